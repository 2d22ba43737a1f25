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
        if not (
            _is_exception(ignore)
            if isinstance(ignore, type)
            else (callable(ignore) and not is_async(ignore))
            or (isinstance(ignore, tuple) and all(map(_is_exception, ignore)))
        ):
            raise ValueError(f"ignore must be types of exceptions, or a function that says so, got {ignore!r:.80}")
        self._name = name
        self._ignores = ignore if callable(ignore) and not isinstance(ignore, type) else None
        self._ignored = ignore if isinstance(ignore, type | tuple) else ()

    def of(self, error: BaseException | None) -> str:
        """What *error* says: a success if it is None."""
        if error is None:
            return "success"
        if not blames(error) or isinstance(error, self._ignored):
            return "ignored"
        try:
            return "ignored" if self._ignores and self._ignores(error) else "failure"
        except Exception:  # it must not hide the error of the call
            logger.exception("ignore of the circuit breaker %r failed", self._name)
            return "failure"


def blames(error: BaseException) -> bool:
    """Whether *error* may be the fault of whoever was called.

    A cancellation is not, nor what headgate raises itself: where a limiter, a pool or another breaker refuses, nobody
    was asked.
    """
    return isinstance(error, Exception) and not isinstance(error, HeadgateError)


def _is_exception(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)
