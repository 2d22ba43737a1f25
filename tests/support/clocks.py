"""A manual clock that counts sleepers, so that a test can wait for them instead of sleeping itself."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from headgate.testing import ManualClock

PATIENCE = 30.0  # real seconds before a test gives up


class WatchedClock(ManualClock):
    """`sleeping` is how many sleep now; `naps` lists the seconds that each of them wished to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeping = 0
        self.naps: list[float | None] = []
        self._counting = threading.Lock()

    def wait(self, wake: threading.Event, seconds: float | None) -> None:
        bed = Bed(self, wake, seconds)
        try:
            super().wait(bed, seconds)  # type: ignore[arg-type]  # as much of an event as is needed
        finally:
            bed.leave()

    def count(self, sleepers: int) -> None:
        with self._counting:
            self.sleeping += sleepers

    async def wait_async(self, wake: asyncio.Event, seconds: float | None) -> None:
        bed = Bed(self, wake, seconds)
        try:
            await super().wait_async(bed, seconds)  # type: ignore[arg-type]  # as much of an event as is needed
        finally:
            bed.leave()

    @property
    def seconds(self) -> float:
        """Seconds since midnight, when it started."""
        return (self.now() - ManualClock().now()) / 1_000_000


class Bed:
    """An event to sleep on. A sleeper is counted once the clock knows when to wake it, and can be advanced."""

    def __init__(self, clock: WatchedClock, wake: threading.Event | asyncio.Event, seconds: float | None) -> None:
        self.clock, self.wake, self.seconds = clock, wake, seconds
        self.set = wake.set
        self.asleep = False

    def wait(self, *timeout: float | None) -> Any:
        """What the event's own `wait` gives: for asyncio to be awaited."""
        if not self.asleep:
            self.asleep = True
            self.clock.naps.append(self.seconds)
            self.clock.count(+1)
        return self.wake.wait(*timeout)

    def leave(self) -> None:
        if self.asleep:
            self.clock.count(-1)


def until(condition: Callable[..., object], *arguments: object) -> None:
    """Return as soon as *condition* holds of *arguments*; fail if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not condition(*arguments):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0005)


async def until_async(condition: Callable[..., object], *arguments: object) -> None:
    """The same, while other tasks run."""
    deadline = time.monotonic() + PATIENCE
    while not condition(*arguments):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.0005)
