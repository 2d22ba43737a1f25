"""Timers: call a function later, in a thread. Renewals, heartbeats and retries of this process are such calls.

Memory has one `Timers` object, and each Redis its own. Its threads start with the first call and end some time after
the last; another one starts only while all are busy and a call is due, so that many locks are renewed at once where
Redis is slow to answer. The threads check once a second, and are woken only for a call that is due before
that: a lock that is released soon costs no switch to another thread. A `ManualClock` needs no thread: `advance` runs
the calls itself.
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

MAX_THREADS = 16
CHECK_EVERY = 1.0  # seconds
IDLE_CHECKS = 10  # with nothing to do, before a thread ends


class Timer:
    """A call that is to be made; not made after `cancel`."""

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
            logger.exception("a call of a timer failed")


class Timers:
    """Makes calls at their time, by one clock. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._call_later: Callable[[float, Callable[[], object]], object] | None = getattr(clock, "call_later", None)
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Drop all calls in a child: they are the parent's."""
        # Reentrant: a garbage collection may call `later` while this thread holds it. Code acquires it directly and not
        # through the condition, whose `__enter__` is Python code: a signal handler that raises there leaves it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = itertools.count()
        self._threads = self._waiting = 0
        self._next_check = math.inf  # when a waiting thread wakes up; inf: no thread waits

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call *call* in *seconds*."""
        timer = Timer(call)
        if self._call_later:  # a ManualClock
            self._call_later(seconds, timer.run)
            return timer
        with self._lock:
            due = self._clock.now() + round(seconds * MICROSECONDS)
            heapq.heappush(self._heap, (due, next(self._count), timer))
            if len(self._heap) % 1024 == 0:  # most locks are released long before they are renewed
                self._heap = [entry for entry in self._heap if not entry[2].cancelled]
                heapq.heapify(self._heap)
            if due < self._next_check:
                self._wake_thread()
        return timer

    def _wake_thread(self) -> None:
        """Make a thread check what is due: a waiting one, or else a new one."""
        if self._waiting:
            self._changed.notify()
        elif self._threads < MAX_THREADS:
            try:
                threading.Thread(target=self._run, name="headgate-timers", daemon=True).start()
            except RuntimeError as error:  # no thread can be started: the limit is reached, or the process ends
                if not self._threads:
                    logger.warning("no lock or lease is renewed until a thread can be started: %s", error)
                return
            self._threads += 1
        else:
            return
        self._next_check = -math.inf  # at once

    def _run(self) -> None:
        idle = 0
        while True:
            with self._lock:
                timer = self._due()
                if timer is None:
                    idle += 1
                    if idle > IDLE_CHECKS and (self._waiting or not self._heap):
                        self._threads -= 1
                        self._next_check = math.inf
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
        self._next_check = math.inf
        if self._heap:
            self._wake_thread()  # this thread will be busy with the call
        return timer

    def _wait(self) -> None:
        now, wait = self._clock.now(), CHECK_EVERY
        if self._heap:
            wait = min(wait, (self._heap[0][0] - now) / MICROSECONDS)
        self._next_check = now + wait * MICROSECONDS
        self._waiting += 1
        try:
            self._changed.wait(wait)
        finally:
            self._waiting -= 1
