"""For tests of code that uses headgate: a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import threading
from collections.abc import Callable


class ManualClock:
    """Time that stands still until `advance`. Drives memory stores, and wakes callers that wait in `acquire`.

    `advance` also renews locks and leases that are due: in steps shorter than a third of a TTL nothing is lost, while
    one step over the whole TTL is as if the process had been paused for that long.

    Starts at midnight UTC, so that every fixed window of a usual length starts there too. Thread-safe.

    A test that waits, and has no other thread or task to call `advance`, would hang: after *patience* real seconds
    without an `advance`, the wait raises a RuntimeError. Daemon threads, and tasks that are not alone in their event
    loop, go on waiting.

    Args:
        start: seconds since the epoch
        patience: real seconds that a caller may wait without an `advance`
    """

    def __init__(self, start: float = 1_699_920_000.0, *, patience: float = 30.0) -> None:
        self._now = round(start * 1_000_000)
        self._patience = patience
        self._lock = threading.Lock()
        self._timers: list[tuple[int, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def __repr__(self) -> str:
        return f"ManualClock({self._now / 1_000_000})"

    def now(self) -> int:
        """Whole microseconds since the epoch."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on, and wake the waiters that are due.

        Args:
            seconds: how far, to the nearest microsecond; 0 or more
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"time moves forward: advance() takes seconds >= 0, got {seconds!r}")
        with self._lock:
            self._now += round(seconds * 1_000_000)
            due = []
            while self._timers and self._timers[0][0] <= self._now:
                due.append(heapq.heappop(self._timers)[2])
        for wake in due:
            wake()

    def wait(self, wake: threading.Event, seconds: float | None) -> None:
        """Block until *wake* is set or the clock has been advanced by *seconds*."""
        if seconds is not None:
            self.call_later(seconds, wake.set)
        if seconds is None or threading.current_thread().daemon:
            wake.wait()
            return
        before = self._now
        while not wake.wait(self._patience):
            before = self._still_moving(before)

    async def wait_async(self, wake: asyncio.Event, seconds: float | None) -> None:
        """The same without blocking the event loop; `advance` may be called from any thread."""
        loop = asyncio.get_running_loop()
        if seconds is not None:
            self.call_later(seconds, lambda: loop.is_closed() or loop.call_soon_threadsafe(wake.set))
        before = self._now
        while True:
            try:
                async with asyncio.timeout(None if seconds is None else self._patience):
                    await wake.wait()
                return
            except TimeoutError:
                if len(asyncio.all_tasks()) == 1:
                    before = self._still_moving(before)

    def _still_moving(self, before: int) -> int:
        if self._now == before:
            raise RuntimeError(
                f"a call has waited {self._patience} s by a ManualClock that was not advanced; call advance() from "
                "another thread or task, or do not wait: timeout=0"
            )
        return self._now

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Have `advance` call *call* once it has moved on by *seconds*.

        Args:
            seconds: from now
            call: a function without arguments
        """
        with self._lock:
            due = self._now + math.ceil(seconds * 1_000_000)
            if due > self._now:
                heapq.heappush(self._timers, (due, next(self._count), call))
                return
        call()
