"""Who holds a lock, of those who use one `Lock` object: each thread or task has acquisitions of its own."""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import Protocol

from headgate.coordination.timers import Timer


class Event(Protocol):
    """A `threading.Event` or an `asyncio.Event`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class Hold:
    """One acquisition, from when it was granted until it is released or lost."""

    def __init__(self, owner: str, fence: int, until: int, most: int | None, lost: Event) -> None:
        self.owner = owner
        self.fence = fence
        self.until = until  # by our own clock, a little before it ends in the store
        self.most = most  # not renewed after that
        self.lost = lost
        self.over = False
        self.released = False
        self.process = os.getpid()
        self.timer: Timer | None = None
        self.task: asyncio.Task[object] | None = None  # to be cancelled when it is lost

    def lose(self) -> None:
        self.end()
        if not self.lost.is_set():
            self.lost.set()
            if self.task:
                self.task.cancel()

    def end(self) -> None:
        self.over = True
        if self.timer:
            self.timer.cancel()


class Holds:
    """The last acquisition of each thread or task."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[object, Hold | None] = weakref.WeakKeyDictionary()  # None: only tried
        self._only: Hold | None = None  # the last one, unless two callers ever had one that was not released
        self._several = False

    def remember(self, hold: Hold, caller: object) -> None:
        other = self._only if self._only and self._only is not self._of.get(caller) else None
        self._several = self._several or (other is not None and not other.released)
        self._of[caller] = hold
        self._only = None if self._several else hold

    def tries(self, caller: object) -> None:
        """From now on *caller* speaks for itself only."""
        self._of.setdefault(caller, None)

    def own(self, caller: object) -> Hold | None:
        """What *caller* acquired last, released, lost or not.

        One who never tried may speak for the only one who did: to release it in another thread, say.
        """
        return self._of[caller] if caller is not None and caller in self._of else self._only

    def take(self, caller: object) -> Hold | None:
        """The same to be released; None if there is nothing. What a parent holds is not its child's."""
        hold = self.own(caller)
        return hold if hold and (not hold.over or hold.lost.is_set()) and hold.process == os.getpid() else None
