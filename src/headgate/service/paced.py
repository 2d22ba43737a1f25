"""Checks with `wait` on a leaky bucket: each is answered at its own place in time, so that answers are evenly spaced.

The bucket is the line: a check that fits in takes the next place and is answered when the checks before it have run
out. One that does not fit, or whose place is further away than it would wait, is denied at once and spends nothing.
When a client disconnects, the checks behind it in this worker move up, and its permits go back to the bucket.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from headgate._plan import arun
from headgate._waiters import WaiterRequest, pace
from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.keys import check_key
from headgate.limiter import AsyncLimiter
from headgate.rule import check_permits


class PlaceInLine:
    """The place of one check: when it is answered, and how long its own permits take to run out."""

    def __init__(self, length: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.length = length  # seconds
        self.taken = False
        self.due = math.inf  # on the clock of the event loop
        self._come: asyncio.Future[None] = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def move_to(self, due: float) -> None:
        """Be answered at *due*."""
        if self._timer:
            self._timer.cancel()
        self.due = due
        self._timer = self.loop.call_at(due, self._end)

    def _end(self) -> None:
        if not self._come.done():
            self._come.set_result(None)

    async def come(self) -> None:
        """Return when the time has come."""
        try:
            await self._come
        finally:
            if self._timer:
                self._timer.cancel()


class PacedChecks:
    """The checks of this worker that wait for their place, by limiter and key."""

    def __init__(self) -> None:
        self._lines: dict[tuple[AsyncLimiter, str], list[PlaceInLine]] = {}
        self._refunds: set[asyncio.Task[None]] = set()

    async def wait(self, limiter: AsyncLimiter, key: str, permits: int, timeout: float) -> Decision:
        """Take a place and wait for it; raise `RateLimited` at once if there is none within *timeout* seconds.

        A task that is cancelled meanwhile spends nothing.
        """
        rule = limiter.rule
        check_key(key)
        check_permits(permits, rule.capacity)
        quota = rule.quotas[0]
        place = PlaceInLine(permits * quota.period_us / quota.limit / 1e6)

        async def answer(request: WaiterRequest | float | None) -> Decision | None:
            if request is WaiterRequest.PEEK:
                return await limiter.peek(key, permits)
            if request is WaiterRequest.TAKE:
                made = await limiter.try_acquire(key, permits)
                place.taken = made.allowed and not made.degraded
                return made
            assert isinstance(request, float)
            await self._stay(limiter, key, place, request)
            return None

        try:
            return await arun(pace(rule, key, permits, timeout), answer)
        except BaseException:
            if place.taken:
                self._leave(limiter, key, permits, place)
            raise

    async def _stay(self, limiter: AsyncLimiter, key: str, place: PlaceInLine, delay: float) -> None:
        line = self._lines.setdefault((limiter, key), [])
        line.append(place)
        place.move_to(place.loop.time() + delay)
        try:
            await place.come()
        finally:
            line.remove(place)
            if not line:
                self._lines.pop((limiter, key), None)

    def _leave(self, limiter: AsyncLimiter, key: str, permits: int, place: PlaceInLine) -> None:
        """Move the checks behind *place* up by its length, and give its permits back."""
        for other in self._lines.get((limiter, key), ()):
            if other.due > place.due:
                other.move_to(other.due - place.length)
        refund = asyncio.ensure_future(_refund(limiter, key, permits))
        self._refunds.add(refund)
        refund.add_done_callback(self._refunds.discard)


async def _refund(limiter: AsyncLimiter, key: str, permits: int) -> None:
    with suppress(StoreUnavailable):
        await limiter.refund(key, permits)
