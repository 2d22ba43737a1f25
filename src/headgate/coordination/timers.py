"""Things to do later: a few threads for memory and for each Redis renew whatever this process holds.

A call that is due runs in one of them; there are several only while calls take so long that others would have to wait,
so a Redis that is far away is asked for many locks at once. They start with the first call and end some time after
the last. They look once a second, and are woken only for what is due before that: a lock that is taken and given back
at once costs no switch to another thread. By a `ManualClock` there is none: what is due is done by whoever moves it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable

from headgate._lifecycle import renew_after_fork
from headgate.clock import MICROSECONDS, Clock

logger = logging.getLogger("headgate")

MOST = 16  # threads
LOOK = 1.0  # seconds
LOOKS = 10  # with nothing to do, before a thread ends


class Timer:
    """One call; `cancel` forgets it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    @property
    def cancelled(self) -> bool:
        return self._call is None

    def cancel(self) -> None:
        self._call = None

    def run(self) -> None:
        try:
            if call := self._call:
                call()
        except Exception:
            logger.exception("what was to be done later failed")


class Timers:
    """Calls by one clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_hand: Callable[[float, Callable[[], object]], object] | None = getattr(clock, "call_later", None)
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Forget what is to be done: the parent renews what the parent holds."""
        # A garbage collection may call us while we hold it. It is taken as it is, and not through the condition, whose
        # way in is Python: a signal there would leave it held for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = itertools.count()
        self._threads = self._waiting = 0
        self._looks_at = math.inf  # somebody who waits; never, while nobody does

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call *call* in *seconds*."""
        timer = Timer(call)
        if self._by_hand:
            self._by_hand(seconds, timer.run)
            return timer
        with self._lock:
            due = self._clock.now() + round(seconds * MICROSECONDS)
            heapq.heappush(self._heap, (due, next(self._count), timer))
            if len(self._heap) % 1024 == 0:  # most locks are released long before they are renewed
                self._heap = [entry for entry in self._heap if not entry[2].cancelled]
                heapq.heapify(self._heap)
            if due < self._looks_at:
                self._call_somebody()
        return timer

    def _call_somebody(self) -> None:
        """Let one look what is due: one who waits, or else another."""
        if self._waiting:
            self._changed.notify()
        elif self._threads < MOST:
            try:
                threading.Thread(target=self._run, name="headgate-timers", daemon=True).start()
            except RuntimeError as error:  # no more threads here, or the process ends: those that there are have to do
                if not self._threads:
                    logger.warning("nothing is renewed until a thread can be started: %s", error)
                return
            self._threads += 1
        else:
            return
        self._looks_at = -math.inf  # at once

    def _run(self) -> None:
        idle = 0
        while True:
            with self._lock:
                timer = self._due()
                if timer is None:
                    idle += 1
                    if idle > LOOKS and (self._waiting or not self._heap):
                        self._threads -= 1
                        self._looks_at = math.inf
                        return
                    self._wait()
                    continue
            idle = 0
            timer.run()

    def _due(self) -> Timer | None:
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        if not self._heap or self._heap[0][0] > self._clock.now():
            return None
        timer = heapq.heappop(self._heap)[2]
        self._looks_at = math.inf
        if self._heap:
            self._call_somebody()  # we are busy now
        return timer

    def _wait(self) -> None:
        now, wait = self._clock.now(), LOOK
        if self._heap:
            wait = min(wait, (self._heap[0][0] - now) / MICROSECONDS)
        self._looks_at = now + wait * MICROSECONDS
        self._waiting += 1
        try:
            self._changed.wait(wait)
        finally:
            self._waiting -= 1
