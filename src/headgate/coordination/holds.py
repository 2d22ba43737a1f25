"""Who holds a lock, of those who use one `Lock` object.

Each thread or task has acquisitions of its own, and who has none speaks for whoever has: what one thread of an executor
acquired, another may release. But not who has just asked in vain: that one would release what it was refused.
"""

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
    """The last acquisition of each thread or task, and the last of all."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[object, Hold] = weakref.WeakKeyDictionary()
        self._refused: weakref.WeakSet[object] = weakref.WeakSet()
        self._last: Hold | None = None

    def remember(self, hold: Hold, caller: object) -> None:
        self._of[caller] = self._last = hold
        self._refused.discard(caller)

    def refuse(self, caller: object) -> None:
        """*caller* has asked in vain: until its next `release` it speaks for itself only."""
        self._refused.add(caller)

    def excuse(self, caller: object) -> None:
        """*caller* knows that it was refused, and will release nothing."""
        self._refused.discard(caller)

    def left(self, caller: object) -> bool:
        """Whether *caller* has released already what it acquired."""
        mine = self.of(caller)
        return mine is not None and mine.released

    def of(self, caller: object) -> Hold | None:
        """What *caller* itself acquired last."""
        return None if caller is None else self._of.get(caller)

    def own(self, caller: object) -> Hold | None:
        """What *caller* has to release, lost or not; or what anybody has; or else what there was last."""
        mine = self.of(caller)
        if (mine and not mine.released) or (caller is not None and caller in self._refused):
            return mine
        return self._last if mine is None or (self._last and not self._last.released) else mine

    def take(self, caller: object) -> Hold | None:
        """The same to be released, once; None if there is nothing. What a parent holds is not its child's."""
        hold = self.own(caller)
        if caller is not None:
            self._refused.discard(caller)
        if hold is None or hold.released or hold.process != os.getpid():
            return None
        hold.released = True
        return hold
