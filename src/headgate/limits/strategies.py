"""Strategies of `limits` that headgate adds: token-bucket, leaky-bucket and gcra, for threads and asyncio.

A limit of `limits` has no burst, so a bucket holds as much as the limit: "10 per minute" lets ten through at once, and
then one every six seconds. The three admit the same hits. They need a storage of headgate; in place of the memory
storage of `limits`, which extensions make for themselves as a fallback, they use a headgate storage in memory.
"""

from __future__ import annotations

from typing import Any, ClassVar

import limits.aio.storage
import limits.aio.strategies
import limits.storage
import limits.strategies
from limits import RateLimitItem, WindowStats
from limits.errors import ConfigurationError

from headgate.limits.storages import AsyncHeadgateStorage, HeadgateStorage


def _unusable(storage: object) -> ConfigurationError:
    return ConfigurationError(
        f"this strategy needs a storage of headgate, got {type(storage).__name__}: use headgate+redis:// or "
        "headgate+memory://, or call headgate.limits.install() before the storage is made"
    )


class BucketRateLimiter(limits.strategies.RateLimiter):
    """A bucket for each key."""

    kind: ClassVar[str]
    storage: HeadgateStorage

    def __init__(self, storage: Any) -> None:
        if isinstance(storage, limits.storage.MemoryStorage):
            storage = HeadgateStorage("memory://", wrap_exceptions=storage.wrap_exceptions)
        if not isinstance(storage, HeadgateStorage):
            raise _unusable(storage)
        super().__init__(storage)

    def hit(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        """Spend *cost*; nothing is spent when it does not fit."""
        return self.storage.take(self.kind, item.key_for(*identifiers), item.amount, item.get_expiry(), cost)

    def test(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        """Whether *cost* would fit now."""
        return self.storage.test(self.kind, item.key_for(*identifiers), item.amount, item.get_expiry(), cost)

    def get_window_stats(self, item: RateLimitItem, *identifiers: str) -> WindowStats:
        """What is left, and when the bucket is full again, or has its next permit if it has none."""
        key = item.key_for(*identifiers)
        return WindowStats(*self.storage.stats(self.kind, key, item.amount, item.get_expiry()))


class TokenBucketRateLimiter(BucketRateLimiter):
    kind = "token_bucket"


class LeakyBucketRateLimiter(BucketRateLimiter):
    kind = "leaky_bucket"


class GCRARateLimiter(BucketRateLimiter):
    kind = "gcra"


class AsyncBucketRateLimiter(limits.aio.strategies.RateLimiter):
    """The same for asyncio."""

    kind: ClassVar[str]
    storage: AsyncHeadgateStorage

    def __init__(self, storage: Any) -> None:
        if isinstance(storage, limits.aio.storage.MemoryStorage):
            storage = AsyncHeadgateStorage("memory://", wrap_exceptions=storage.wrap_exceptions)
        if not isinstance(storage, AsyncHeadgateStorage):
            raise _unusable(storage)
        super().__init__(storage)

    async def hit(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        return await self.storage.take(self.kind, item.key_for(*identifiers), item.amount, item.get_expiry(), cost)

    async def test(self, item: RateLimitItem, *identifiers: str, cost: float = 1) -> bool:
        return await self.storage.test(self.kind, item.key_for(*identifiers), item.amount, item.get_expiry(), cost)

    async def get_window_stats(self, item: RateLimitItem, *identifiers: str) -> WindowStats:
        key = item.key_for(*identifiers)
        return WindowStats(*await self.storage.stats(self.kind, key, item.amount, item.get_expiry()))


class AsyncTokenBucketRateLimiter(AsyncBucketRateLimiter):
    kind = "token_bucket"


class AsyncLeakyBucketRateLimiter(AsyncBucketRateLimiter):
    kind = "leaky_bucket"


class AsyncGCRARateLimiter(AsyncBucketRateLimiter):
    kind = "gcra"


STRATEGIES: dict[str, tuple[type[BucketRateLimiter], type[AsyncBucketRateLimiter]]] = {
    "token-bucket": (TokenBucketRateLimiter, AsyncTokenBucketRateLimiter),
    "leaky-bucket": (LeakyBucketRateLimiter, AsyncLeakyBucketRateLimiter),
    "gcra": (GCRARateLimiter, AsyncGCRARateLimiter),
}


def register() -> None:
    """Make the strategies known to `limits`, and so to what chooses a strategy by its name."""
    for_threads: dict[str, Any] = limits.strategies.STRATEGIES
    for_asyncio: dict[str, Any] = limits.aio.strategies.STRATEGIES
    for name, (plain, asynchronous) in STRATEGIES.items():
        for_threads[name], for_asyncio[name] = plain, asynchronous
