"""What the end of a call says about whoever was called: a success, a failure, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headgate.coordination.arguments import is_async
from headgate.errors import HeadgateError

logger = logging.getLogger("headgate")

Ignore = tuple[type[BaseException], ...] | type[BaseException] | Callable[[BaseException], bool]


class Outcomes:
    """*ignore*: exceptions that count for nothing, as types or a function that says so."""

    def __init__(self, name: str, ignore: Ignore) -> None:
        self._name = name
        self._ignores: Callable[[BaseException], bool]
        if isinstance(ignore, type | tuple):
            kinds = ignore if isinstance(ignore, tuple) else (ignore,)
            fits = all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)
            self._ignores = lambda error: isinstance(error, kinds)
        else:
            fits = callable(ignore) and not is_async(ignore)
            self._ignores = ignore
        if not fits:
            what = "a type of exception, a tuple of such, or a function that says so"
            raise ValueError(f"ignore must be {what}, got {ignore!r:.80}")

    def of(self, error: BaseException | None) -> str:
        """What *error* says: a success if it is None."""
        if error is None:
            return "success"
        try:
            return "ignored" if not blames(error) or self._ignores(error) else "failure"
        except Exception:  # it must not hide the error of the call
            logger.exception("ignore of the circuit breaker %r failed", self._name)
            return "failure"


def blames(error: BaseException) -> bool:
    """Whether *error* may be the fault of whoever was called.

    A cancellation is not, nor what headgate raises itself: where a limiter, a pool or another breaker refuses, nobody
    was asked.
    """
    return isinstance(error, Exception) and not isinstance(error, HeadgateError)
