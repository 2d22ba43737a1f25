"""The connections of threads to one server: some are idle, others in use, and callers that find none free wait.

The connection used last is used next. What a connection is, and how it is made, a subclass knows.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict, deque
from time import monotonic
from typing import Any

from headgate._waiters import SignalSafeEvent

NEVER = -math.inf
RECHECK = 0.1  # seconds after which a waiter looks again: a signal may have lost a connection, or a wake-up


class ThreadConnections:
    """What is common to the connections of all clients. Thread-safe, and usable from signal handlers."""

    exhausted: type[Exception] = ConnectionError  # what a caller gets that waited for a connection in vain

    def __init__(self) -> None:
        self._idle: deque[tuple[Any, float]] = deque()  # with the time of last use
        self._all: weakref.WeakSet[Any] = weakref.WeakSet()  # weak: a signal may lose one on its way to a caller
        self._making = threading.RLock()  # reentrant: a signal handler may need a connection too
        self._waiting: OrderedDict[SignalSafeEvent, None] = OrderedDict()
        self._last_broken = NEVER

    def _make(self) -> Any:
        """A new connection, not connected yet; None if there are as many as there may be."""
        raise NotImplementedError

    def acquire(self, deadline: float) -> Any:
        """A connected connection, by *deadline*."""
        raise NotImplementedError

    def release(self, connection: Any, *, clean: bool) -> None:
        """Take *connection* back; one that is not *clean* may still get a reply."""
        raise NotImplementedError

    def warm_up(self, count: int, deadline: float) -> None:
        """Open *count* connections, at most as many as there may be, by *deadline*."""
        made: list[Any] = []
        try:
            while len(made) < count:
                made.append(self.acquire(deadline))
        finally:
            for connection in made:
                self.release(connection, clean=True)

    def in_use(self) -> int:
        return len(self._all) - len(self._idle)

    def idle(self) -> int:
        return len(self._idle)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _wait(self, deadline: float) -> tuple[Any, float]:
        """Make a connection or wait for one, without a lock that a signal could leave held."""
        event = SignalSafeEvent()
        try:
            while True:
                event.clear()
                self._waiting[event] = None  # before the check: a thread that releases one after it must see us wait
                try:
                    return self._idle.pop()
                except IndexError:
                    pass
                if made := self._make():
                    return made, NEVER
                left = deadline - monotonic()
                if left <= 0:
                    raise self.exhausted(f"all {len(self._all)} connections are in use: raise max_connections")
                event.wait(min(left, RECHECK))
        finally:
            self._waiting.pop(event, None)
            if self._idle:
                self._wake_first()  # we may have been woken for a connection that we leave

    def _wake_first(self) -> None:
        """Wake the thread that has waited longest, and take it off the list."""
        try:
            event, _ = self._waiting.popitem(last=False)
        except KeyError:
            return
        event.set()
