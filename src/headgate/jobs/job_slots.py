"""When a job may start: `JobSlots` asks a `Limiter` for its slot, `AsyncJobSlots` an `AsyncLimiter`.

The queue keeps the job, its payload, its retries and its dead letters; these classes keep nothing. A job that is
delivered asks for the slot of its id. If the slot is still to come, the adapter puts the job back into the queue with
that delay, and it asks again when it is back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from headgate.booking import BookedSlot, check_duration
from headgate.errors import RateLimited
from headgate.limiter import AsyncLimiter, Limiter
from headgate.rule import check_permits

WITHIN = 86_400.0  # seconds: a queue may be long
GRACE = 60.0  # seconds: a job that comes back may stand behind many that come for the first time
NAP = 0.1  # seconds; a shorter delay is slept in the worker, as timers of queues are a little early or late

Key = str | Callable[..., str]
AnyLimiter = TypeVar("AnyLimiter", Limiter, AsyncLimiter)


class SlotsOfJobs(Generic[AnyLimiter]):
    """What both share.

    Args:
        limiter: a bucket: token_bucket, gcra or leaky_bucket, on a store that all workers share
        key: whose limit: a text, or a function of the job's arguments
        permits: what a job spends
        within: seconds; a job whose slot would be later comes back when it may be booked, in no order
        grace: seconds that a slot holds for a worker that is late; then the job is booked anew, behind the others
        max_delay: seconds for which the queue may hold a job; then it asks again, and keeps its slot
    """

    _limiter_type: ClassVar[type[Limiter | AsyncLimiter]]

    def __init__(
        self,
        limiter: AnyLimiter,
        key: Key,
        *,
        permits: int = 1,
        within: float = WITHIN,
        grace: float = GRACE,
        max_delay: float = WITHIN,
    ) -> None:
        if not isinstance(limiter, self._limiter_type):
            name, expected = type(self).__name__, self._limiter_type.__name__
            raise TypeError(f"limiter of {name} must be a {expected}, got {type(limiter).__name__}")
        check_permits(permits, limiter.rule.capacity)
        check_duration("within", within)
        check_duration("grace", grace)
        if not isinstance(key, str) and not callable(key):
            raise TypeError(f"key must be a text or a function of the job's arguments, got {key!r:.40}")
        if isinstance(max_delay, bool) or not isinstance(max_delay, int | float) or max_delay < 1:
            raise ValueError(f"max_delay must be at least 1 second, got {max_delay!r:.40}")
        self.limiter: AnyLimiter = limiter
        self.key = key
        self.permits = permits
        self.within = within
        self.grace = grace
        self.max_delay = max_delay

    def key_of(self, args: Any, kwargs: Any) -> str:
        return self.key if isinstance(self.key, str) else self.key(*args, **kwargs)

    def delay_of(self, slot: BookedSlot) -> tuple[float, float]:
        """Seconds to sleep in the worker, and seconds after which the job has to come again."""
        return (slot.delay, 0.0) if slot.delay <= NAP else (0.0, min(slot.delay, self.max_delay))

    def delay_after(self, error: RateLimited) -> float:
        return min(max(error.decision.retry_after, 1.0), self.max_delay)


class JobSlots(SlotsOfJobs[Limiter]):
    """The slots of jobs, for queues whose workers are threads or processes."""

    _limiter_type = Limiter

    def delay(self, id: str, args: Any = (), kwargs: Any = None) -> float:
        """Seconds after which the job has to come again; 0.0: it may start now.

        Args:
            id: names one attempt of one job
            *args: the job's
            **kwargs: the job's
        """
        nap, delay = self.book(id, args, kwargs)
        time.sleep(nap)
        return delay

    def book(self, id: str, args: Any = (), kwargs: Any = None) -> tuple[float, float]:
        """Seconds to sleep in the worker before the job starts, and those of `delay`: one of them is 0.0, or both."""
        nap, delay, _ = self.decide(id, args, kwargs)
        return nap, delay

    def decide(self, id: str, args: Any = (), kwargs: Any = None) -> tuple[float, float, bool]:
        """The seconds that `book` returns, and whether `on_store_error` gave them."""
        key = self.key_of(args, kwargs or {})
        try:
            slot = self.limiter.book(key, id, self.permits, within=self.within, grace=self.grace)
        except RateLimited as error:
            return 0.0, self.delay_after(error), error.decision.degraded
        return *self.delay_of(slot), slot.degraded


class AsyncJobSlots(SlotsOfJobs[AsyncLimiter]):
    """The slots of jobs, for queues whose workers are tasks of an event loop."""

    _limiter_type = AsyncLimiter

    async def delay(self, id: str, args: Any = (), kwargs: Any = None) -> float:
        """Seconds after which the job has to come again; 0.0: it may start now. *id* names one attempt of one job."""
        nap, delay = await self.book(id, args, kwargs)
        await asyncio.sleep(nap)
        return delay

    async def book(self, id: str, args: Any = (), kwargs: Any = None) -> tuple[float, float]:
        """Seconds to sleep in the worker before the job starts, and those of `delay`: one of them is 0.0, or both."""
        key = self.key_of(args, kwargs or {})
        try:
            slot = await self.limiter.book(key, id, self.permits, within=self.within, grace=self.grace)
        except RateLimited as error:
            return 0.0, self.delay_after(error)
        return self.delay_of(slot)
