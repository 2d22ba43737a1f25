"""Things to do later: one thread for memory and one for each Redis renews whatever this process holds.

A call that is due runs in that thread, so it must not wait for long. The thread starts with the first call and ends
some time after the last. It looks once a second, and is woken only for what is due before that: a lock that is taken
and given back at once costs no switch to another thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable

from headgate.clock import MICROSECONDS, SYSTEM_CLOCK, Clock

logger = logging.getLogger("headgate")

LOOK = 1.0  # seconds
LOOKS = 10  # with nothing to do, before the thread ends

_ALL: weakref.WeakSet[Timers] = weakref.WeakSet()


class Timer:
    """One call; `cancel` forgets it."""

    __slots__ = ("_wake", "call")

    def __init__(self, call: Callable[[], object], wake: threading.Event | None) -> None:
        self.call: Callable[[], object] | None = call
        self._wake = wake

    def cancel(self) -> None:
        self.call = None
        if self._wake:
            self._wake.set()


class Timers:
    """Calls by one clock, in one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ticks = clock is SYSTEM_CLOCK
        self._start()
        _ALL.add(self)

    def _start(self) -> None:
        self._lock = threading.RLock()  # a garbage collection may call us while we hold it
        self._wake = threading.Event()
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None
        self._looks_at = 0

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call *call* in *seconds*, in the thread of the timers."""
        # a clock that somebody moves may never reach the time: then the thread is to end when nothing is left to do
        timer = Timer(call, None if self._ticks else self._wake)
        with self._lock:
            due = self._clock.now() + round(seconds * MICROSECONDS)
            heapq.heappush(self._heap, (due, next(self._count), timer))
            if len(self._heap) % 1024 == 0:  # most locks are released long before they are renewed
                self._heap = [entry for entry in self._heap if entry[2].call]
                heapq.heapify(self._heap)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headgate-timers", daemon=True)
                self._thread.start()
            elif due < self._looks_at:
                self._wake.set()
        return timer

    def _run(self) -> None:
        idle = 0
        while True:
            with self._lock:
                self._wake.clear()
                while self._heap and self._heap[0][2].call is None:
                    heapq.heappop(self._heap)
                now = self._clock.now()
                call, wait = None, LOOK
                if self._heap:
                    idle = 0
                    due, _, timer = self._heap[0]
                    if due <= now:
                        heapq.heappop(self._heap)
                        call = timer.call
                    elif self._ticks:
                        wait = min(wait, (due - now) / MICROSECONDS)
                    else:
                        wait = (due - now) / MICROSECONDS
                elif idle < LOOKS and self._ticks:
                    idle += 1
                else:
                    self._thread = None
                    return
                self._looks_at = now + round(wait * MICROSECONDS)
            if call is None:
                self._clock.wait(self._wake, wait)
                continue
            try:
                call()
            except Exception:
                logger.exception("what was to be done later failed")


def _after_fork() -> None:
    for timers in _ALL:
        timers._start()  # the parent renews what the parent holds


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
