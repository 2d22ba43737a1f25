"""An adaptive limit of a semaphore: what a caller may set, and what the end of a lease says about the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headgate.coordination.arguments import check_count, check_seconds
from headgate.coordination.feedback import ExceptionKinds, exception_test, logger
from headgate.coordination.states.adaptive_limit import OVERLOADED, SUCCESS


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """Let the limit of a `Semaphore` follow what a server bears, for all processes together.

    It grows by one after so many successes and shrinks by a share at a sign of overload: a call of `overloaded()`, an
    exception that *overload* names, or a lease that was held for longer than *target*. Other exceptions count for
    nothing.

    max         the limit never grows above it
    min         the limit never shrinks below it; no caller may weigh more
    grow_after  successes before it grows by one; None: as many as the limit is
    shrink      what is left of it after an overload, as a share from 0.001 to 0.999
    target      seconds; None: how long a lease is held does not matter
    overload    types of exceptions, or a function of one, that mean that the server has too much to do
    """

    max: int
    min: int = 1
    grow_after: int | None = None
    shrink: float = 0.9
    target: float | None = None
    overload: ExceptionKinds = TimeoutError
    _means_overload: Callable[[BaseException], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if check_count("min", self.min) > check_count("max", self.max):
            raise ValueError(f"min must be at most max, which is {self.max}, got {self.min}")
        if self.grow_after is not None:
            check_count("grow_after", self.grow_after)
        number = isinstance(self.shrink, int | float) and not isinstance(self.shrink, bool)
        if not number or not 0.001 <= self.shrink <= 0.999:
            raise ValueError(f"shrink must be a share from 0.001 to 0.999, such as 0.9, got {self.shrink!r:.80}")
        if self.target is not None:
            check_seconds("target", self.target)
        object.__setattr__(self, "_means_overload", exception_test("overload", self.overload))

    def settings(self, start: int) -> str:
        """The text by which the store knows it; *start* is the limit to begin with."""
        if not self.min <= start <= self.max:
            raise ValueError(f"limit, where it starts, must be from min={self.min} to max={self.max}, got {start}")
        return f"{start}:{self.min}:{self.max}:{self.grow_after or 0}:{round(self.shrink * 1000)}"

    def outcome(self, error: BaseException | None, seconds: float) -> int:
        """What a lease that ended with *error* after so many seconds says: success, overloaded, or 0 for neither."""
        if self.target is not None and seconds > self.target:
            return OVERLOADED
        if error is None:
            return SUCCESS
        try:
            return OVERLOADED if self._means_overload(error) else 0
        except Exception:  # an error of *overload* must not replace the error of the call
            logger.exception("overload of an adaptive semaphore failed")
            return 0
