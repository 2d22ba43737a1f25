"""The answer to one check.

A limiter decides in whole numbers of its own units and a `Decision` keeps them: permits and seconds are worked out
when a caller reads them. Most callers only ask whether they may go on, and that answer must cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Final, Never

from headgate._mypyc import mypyc_attr, set_doc


class Units:
    """What a number in a decision means: *cost* units are a permit, *rate* units are a microsecond."""

    __slots__ = ("cost", "limit", "rate")

    def __init__(self, limit: int, cost: int, rate: int) -> None:
        self.limit = limit
        self.cost = cost
        self.rate = rate


COMPILED: Final = not isinstance(Units.__init__, FunctionType)


class Decision:
    """What the limiter said about one call. True in a condition when the call may go on.

    Limiters make them. For a test that wants one: ``Decision(allowed=False, limit=5, retry_after=2.0)``.

    Attributes:
        allowed: whether the permits were granted
        limit: the capacity that was asked: ``burst`` if the quota has one, else its limit
        remaining: permits that are left now
        reset_after: seconds until the key is as good as never seen
        retry_after: seconds after which the same call succeeds if no other call comes first; 0.0 when allowed
        degraded: the store was down and ``on_store_error`` answered
    """

    __slots__ = ("_allowed", "_degraded", "_reset", "_retry", "_units", "_used")

    _allowed: bool
    _degraded: bool
    _units: Units
    _used: int  # in units, as are the next two
    _reset: int
    _retry: int

    def __init__(
        self,
        *unnamed: Never,
        allowed: bool = True,
        limit: int = 0,
        remaining: int = 0,
        reset_after: float = 0.0,
        retry_after: float = 0.0,
        degraded: bool = False,
    ) -> None:
        if unnamed:
            raise TypeError(f"Decision takes named arguments only, such as allowed=False; got {unnamed!r:.40}")
        if not isinstance(allowed, bool) or not isinstance(degraded, bool):
            raise TypeError(f"allowed and degraded are True or False, got {allowed!r:.40} and {degraded!r:.40}")
        self._allowed = allowed
        self._degraded = degraded
        self._units = Units(limit, 1, 1)
        self._used = limit - remaining
        self._reset = round(reset_after * 1_000_000)
        self._retry = round(retry_after * 1_000_000)

    @property
    def allowed(self) -> bool:
        return self._allowed

    @property
    def degraded(self) -> bool:
        return self._degraded

    @property
    def limit(self) -> int:
        return self._units.limit

    @property
    def remaining(self) -> int:
        left = self._units.limit + (-self._used // self._units.cost)
        return left if left > 0 else 0  # below 0: bookings are ahead

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
        return self._allowed

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


set_doc(
    Decision,
    "What the limiter said about one call; true when it may go on. Has allowed, limit, remaining, reset_after and\n"
    "retry_after (seconds), degraded. For a test: Decision(allowed=False, limit=5, retry_after=2.0).",
)


@mypyc_attr(free_list_len=1)
class LimiterDecision(Decision):
    """A decision that a limiter makes: it is created empty, and the limiter sets every field.

    The constructor of `Decision` is for people. Here one with arguments would add 11 % to a decision in plain Python.
    """

    __slots__ = ()

    def __init__(self) -> None:
        pass


if not COMPILED:  # even a call of the empty method above would add 5 %
    LimiterDecision.__init__ = object.__init__  # type: ignore[method-assign]  # it does nothing, too


def decision_in(units: Units, allowed: bool, used: int, reset: int, retry: int, degraded: bool = False) -> Decision:
    """Make a decision from numbers in *units*."""
    made = LimiterDecision()
    made._allowed = allowed
    made._degraded = degraded
    made._units = units
    made._used = used
    made._reset = reset
    made._retry = retry
    return made


def decision(
    allowed: bool, limit: int, remaining: int, reset_us: int = 0, retry_us: int = 0, degraded: bool = False
) -> Decision:
    """Make a decision from plain permits and microseconds."""
    return decision_in(Units(limit, 1, 1), allowed, limit - remaining, reset_us, retry_us, degraded)
