"""Which calls are inside a circuit breaker, and in which of them the running code is.

It is kept in the context (`contextvars`), so a task that a call starts is inside it, too.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

MOST = 1000  # calls, within each other or that somebody else can leave: those who never leave must not fill the memory


class Admission(NamedTuple):
    """A call that was let through: who, in which state of the breaker, and whether Redis or we said so."""

    id: str
    number: int
    local: bool


class Entry:
    """A call that is inside; `admission` is None once its result was recorded."""

    __slots__ = ("admission", "left", "of")

    def __init__(self, of: Inside, admission: Admission) -> None:
        self.of = of
        self.admission: Admission | None = admission
        self.left = False


_INSIDE: ContextVar[tuple[Entry, ...]] = ContextVar("headgate_inside", default=())  # of all breakers, the last inmost


class Inside:
    """The calls that are inside one breaker."""

    def __init__(self) -> None:
        self._open: dict[Entry, None] = {}

    def enter(self, admission: Admission) -> None:
        entry = Entry(self, admission)
        _INSIDE.set((*_not_left()[1 - MOST :], entry))
        self._open[entry] = None
        if len(self._open) > MOST:
            [oldest, *_] = list(self._open)  # in one step: other threads change it, too
            self._open.pop(oldest, None)

    def entry(self) -> Entry | None:
        """The call that the running code is inside of."""
        return next((each for each in reversed(_not_left()) if each.of is self), None)

    def leave(self) -> Entry | None:
        """The same, which ends now; entered in one thread or task and left in another, the last to enter will do."""
        entry = self.entry() or next(reversed(list(self._open)), None)
        if entry:
            entry.left = True
            self._open.pop(entry, None)
            _INSIDE.set(_not_left())
        return entry


def _not_left() -> tuple[Entry, ...]:
    return tuple(each for each in _INSIDE.get() if not each.left)
