"""The answer to one check.

A limiter decides in whole numbers of its own units and a `Decision` keeps them: permits and seconds are worked
out when somebody reads them. Most callers only ask whether they may go on, and that answer must cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, Final, Never

from headgate._mypyc import mypyc_attr


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

    allowed      whether the permits were granted
    limit        the capacity that was asked: ``burst`` if the quota has one, else its limit
    remaining    permits that are left now
    reset_after  seconds until the key is as good as never seen
    retry_after  seconds after which the same call succeeds if nobody else comes; 0.0 when allowed
    degraded     the store was down and ``on_store_error`` answered

    Limiters make them. For a test that wants one: ``Decision(allowed=False, limit=5, retry_after=2.0)``.
    """

    __slots__ = ("_reset", "_retry", "_spare", "_units")

    # what is the same for all decisions of a kind is said by their class
    allowed: ClassVar[bool] = True
    degraded: ClassVar[bool] = False

    _units: Units
    _spare: int  # of what _units says
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
        self._units = Units(limit, 1, 1)
        self._spare = remaining
        self._reset = round(reset_after * 1_000_000)
        self._retry = round(retry_after * 1_000_000)
        if not COMPILED and type(self) is Decision:
            setattr(self, "__class__", _kind(allowed, degraded))  # noqa: B010  # which says the rest

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


class Grant(Decision):
    """A decision to go on, made by hand."""

    __slots__ = ()


class Denial(Decision):
    """A decision that is not one to go on."""

    __slots__ = ()

    allowed: ClassVar[bool] = False

    def __bool__(self) -> bool:
        return False


class DegradedDecision(Decision):
    """A decision that the policy made, because the store could not."""

    __slots__ = ()

    degraded: ClassVar[bool] = True


class DegradedDenial(Denial):
    """A denial that the policy made, because the store could not."""

    __slots__ = ()

    degraded: ClassVar[bool] = True


def _kind(allowed: object, degraded: object) -> type[Decision]:
    if not isinstance(allowed, bool) or not isinstance(degraded, bool):
        raise TypeError(f"allowed and degraded are True or False, got {allowed!r:.40} and {degraded!r:.40}")
    if allowed:
        return DegradedDecision if degraded else Grant
    return DegradedDenial if degraded else Denial


# Those that limiters make are empty at first, and are filled in on the spot.


@mypyc_attr(free_list_len=1)
class QuickDecision(Decision):
    """A decision still empty."""

    __slots__ = ()

    def __init__(self) -> None:
        pass


@mypyc_attr(free_list_len=1)
class QuickDenial(Denial):
    """A denial still empty."""

    __slots__ = ()

    def __init__(self) -> None:
        pass


class QuickDegradedDecision(DegradedDecision):
    """A decision of the policy's still empty."""

    __slots__ = ()

    def __init__(self) -> None:
        pass


class QuickDegradedDenial(DegradedDenial):
    """A denial of the policy's still empty."""

    __slots__ = ()

    def __init__(self) -> None:
        pass


if COMPILED:
    # An object of the compiler's cannot change its class, so the right one is found first; and it has no docstring.

    def _new_of_kind(cls: Any, *unnamed: Any, **given: Any) -> Any:
        return _kind(given.get("allowed", True), given.get("degraded", False))(*unnamed, **given)

    setattr(Decision, "__new__", staticmethod(_new_of_kind))  # noqa: B010  # the compiler would not have it
    setattr(  # noqa: B010
        Decision,
        "__doc__",
        "What the limiter said about one call; true when it may go on. Has allowed, limit, remaining, reset_after and\n"
        "retry_after (seconds), degraded. For a test: Decision(allowed=False, limit=5, retry_after=2.0).",
    )
else:
    # In plain Python these calls are a third of a decision's time. An object without __bool__ is true at once.
    delattr(Decision, "__bool__")
    for _quick in (QuickDecision, QuickDenial, QuickDegradedDecision, QuickDegradedDenial):
        setattr(_quick, "__init__", object.__init__)  # noqa: B010


def answer(allowed: bool, units: Units, spare: int, reset: int, retry: int, degraded: bool = False) -> Decision:
    """Make a decision from numbers in *units*."""
    if degraded:
        return _filled(QuickDegradedDecision() if allowed else QuickDegradedDenial(), units, spare, reset, retry)
    if allowed:
        return _filled(QuickDecision(), units, spare, reset, retry)
    return _filled(QuickDenial(), units, spare, reset, retry)


def _filled(made: Decision, units: Units, spare: int, reset: int, retry: int) -> Decision:
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
