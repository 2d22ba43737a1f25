"""Checks of the arguments that all tools take; the error for a bad one says what would be right."""

from __future__ import annotations

import inspect
from typing import Final

from headgate.clock import MICROSECONDS, Clock

LONGEST = 366 * 86_400.0  # seconds
SHORTEST = 0.01
_NUMBERS: Final = (int, float)  # quicker than int | float, which is made anew at each call


def check_seconds(name: str, value: float) -> float:
    """A number of seconds, more than 0."""
    if not _is_duration(value) or value == 0:
        raise ValueError(f"{name} must be seconds, more than 0 and at most a year, got {value!r:.80}")
    return float(value)


def check_seconds_or_0(name: str, value: float) -> float:
    """A number of seconds that may be 0."""
    if not _is_duration(value):
        raise ValueError(f"{name} must be seconds >= 0 and at most a year, got {value!r:.80}")
    return float(value)


def check_ttl(name: str, value: float) -> float:
    """A number of seconds that a lock or a lease lasts: a shorter one could not be renewed in time."""
    if check_seconds(name, value) < SHORTEST:
        raise ValueError(f"{name} must be at least {SHORTEST} seconds, got {value!r}")
    return float(value)


def check_count(name: str, value: int) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise ValueError(f"{name} must be a whole number from 1 to 1,000,000, got {value!r:.80}")
    return value


def check_timeout(timeout: float | None) -> float | None:
    """Seconds to wait: 0 does not wait, None waits for ever."""
    if timeout is not None and not _is_duration(timeout):
        forms = "0 does not wait, None waits for ever"
        raise ValueError(f"timeout must be seconds >= 0 and at most a year ({forms}), got {timeout!r:.80}")
    return timeout


def deadline_after(clock: Clock, timeout: float | None) -> int | None:
    """Check *timeout*, and return when it will be over, in the clock's microseconds; None: never."""
    timeout = check_timeout(timeout)
    return None if timeout is None else clock.now() + round(timeout * MICROSECONDS)


def is_async(function: object) -> bool:
    """Whether the result of *function* has to be awaited."""
    called = getattr(function, "__call__", None)  # noqa: B004  # an object whose class has an async `__call__`
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _is_duration(value: object) -> bool:
    return isinstance(value, _NUMBERS) and type(value) is not bool and 0 <= value <= LONGEST
