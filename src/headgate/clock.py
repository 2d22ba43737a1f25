"""Time, as whole microseconds since the epoch that never step back.

The wall clock is read once, at import, and the monotonic clock from then on. So windows align with the epoch, and an
NTP step neither refills a bucket nor freezes it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final, Protocol

MICROSECONDS: Final = 1_000_000
EPOCH: Final = time.time_ns() // 1000 - time.monotonic_ns() // 1000


class Clock(Protocol):
    """The time of a limiter. `SystemClock` implements it, and `headgate.testing.ManualClock` for tests."""

    def now(self) -> int:
        """Whole microseconds since the epoch; never less than before."""
        ...

    def wait(self, wake: threading.Event, seconds: float | None) -> None:
        """Block until *wake* is set or *seconds* have passed."""
        ...

    async def wait_async(self, wake: asyncio.Event, seconds: float | None) -> None:
        """The same without blocking the event loop."""
        ...


class SystemClock:
    """The machine's monotonic clock, set to the epoch once."""

    def now(self) -> int:
        return time.monotonic_ns() // 1000 + EPOCH

    def wait(self, wake: threading.Event, seconds: float | None) -> None:
        wake.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))

    async def wait_async(self, wake: asyncio.Event, seconds: float | None) -> None:
        if seconds is None:
            await wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(seconds, wake.set)
        try:
            await wake.wait()
        finally:
            timer.cancel()


SYSTEM_CLOCK: Final = SystemClock()
