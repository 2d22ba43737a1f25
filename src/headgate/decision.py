"""The answer to one check.

A limiter decides in whole numbers of its own units and a `Decision` keeps them: permits and seconds are worked
out when somebody reads them. Most callers only ask whether they may go on, and that answer must cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import ClassVar

from headgate.compiler import mypyc_attr


class Units:
    """What a number in a decision means: *cost* units are a permit, *rate* units are a microsecond."""

    __slots__ = ("cost", "limit", "rate")

    def __init__(self, limit: int, cost: int, rate: int) -> None:
        self.limit = limit
        self.cost = cost
        self.rate = rate


@mypyc_attr(free_list_len=1)
class Decision:
    """What the limiter said about one call. True in a condition when the call may go on.

    allowed      whether the permits were granted
    limit        the capacity that was asked: ``burst`` if the quota has one, else its limit
    remaining    permits that are left now
    reset_after  seconds until the key is as good as never seen
    retry_after  seconds after which the same call succeeds if nobody else comes; 0.0 when allowed
    degraded     the store was down and ``on_store_error`` answered
    """

    __slots__ = ("_reset", "_retry", "_spare", "_units")

    # what is the same for all decisions of a kind is said by their class
    allowed: ClassVar[bool] = True
    degraded: ClassVar[bool] = False

    # No __init__: `answer` below fills these in, and the hot path of the memory store does it on the spot.
    _units: Units
    _spare: int  # of what _units says
    _reset: int
    _retry: int

    @property
    def limit(self) -> int:
        return self._units.limit

    @property
    def remaining(self) -> int:
        return self._spare // self._units.cost

    @property
    def reset_us(self) -> int:
        """`reset_after` in whole microseconds, rounded up."""
        return -(-self._reset // self._units.rate)

    @property
    def retry_us(self) -> int:
        """`retry_after` in whole microseconds, rounded up: one less would be too early."""
        return -(-self._retry // self._units.rate)

    @property
    def reset_after(self) -> float:
        return self.reset_us / 1_000_000

    @property
    def retry_after(self) -> float:
        return self.retry_us / 1_000_000

    def __bool__(self) -> bool:
        return True

    def _values(self) -> tuple[bool, int, int, int, int, bool]:
        return (self.allowed, self.limit, self.remaining, self.reset_us, self.retry_us, self.degraded)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decision) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return (
            f"Decision(allowed={self.allowed}, limit={self.limit}, remaining={self.remaining}, "
            f"reset_after={self.reset_after}, retry_after={self.retry_after}, degraded={self.degraded})"
        )

    def __reduce__(self) -> tuple[Callable[..., Decision], tuple[bool, int, int, int, int, bool]]:
        return decision, self._values()


@mypyc_attr(free_list_len=1)
class Denial(Decision):
    """A decision that is not one to go on."""

    __slots__ = ()

    allowed: ClassVar[bool] = False

    def __bool__(self) -> bool:
        return False


if isinstance(Decision.__bool__, FunctionType):
    # In plain Python that call is a sixth of a decision's time. An object without one is true, and nothing is called.
    delattr(Decision, "__bool__")


class DegradedDecision(Decision):
    """A decision that the policy made, because the store could not."""

    __slots__ = ()

    degraded: ClassVar[bool] = True


class DegradedDenial(Denial):
    """A denial that the policy made, because the store could not."""

    __slots__ = ()

    degraded: ClassVar[bool] = True


def answer(allowed: bool, units: Units, spare: int, reset: int, retry: int, degraded: bool = False) -> Decision:
    """Make a decision from numbers in *units*."""
    made: Decision
    if degraded:
        made = DegradedDecision() if allowed else DegradedDenial()
    else:
        made = Decision() if allowed else Denial()
    made._units = units
    made._spare = spare
    made._reset = reset
    made._retry = retry
    return made


def decision(
    allowed: bool, limit: int, remaining: int, reset_us: int = 0, retry_us: int = 0, degraded: bool = False
) -> Decision:
    """Make a decision from plain permits and microseconds."""
    return answer(allowed, Units(limit, 1, 1), remaining, reset_us, retry_us, degraded)
