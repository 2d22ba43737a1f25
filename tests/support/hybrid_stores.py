"""Redis stores whose lease traffic a test can cut, hold or forbid."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import redis

from headgate.errors import StoreUnavailable
from headgate.hybrid.protocol import LeaseReply
from headgate.hybrid.redis_leases import RedisLeases
from headgate.stores.base import LeaseCall
from headgate.stores.redis import RedisStore

Replies = list[LeaseReply | str]


class CutStore(RedisStore):
    """Its network can be cut and mended; while it is cut, every exchange fails at once."""

    cut = False
    asked = 0

    def leases(self) -> RedisLeases:
        store = self

        class CutLeases(RedisLeases):
            def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> Replies:
                store.asked += 1
                if store.cut:
                    raise StoreUnavailable("cut") from redis.ConnectionError("cut")
                return super().exchange(calls, timeout)

        return CutLeases(self)


class ForbiddenStore(RedisStore):
    """While `forbidden` is set, an exchange with Redis is an error of the test."""

    forbidden = False

    def leases(self) -> RedisLeases:
        store = self

        class ForbiddenLeases(RedisLeases):
            def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> Replies:
                assert not store.forbidden, "Redis was asked"
                return super().exchange(calls, timeout)

        return ForbiddenLeases(self)


class HeldStore(RedisStore):
    """Its replies to threads wait until `released` is set."""

    released: threading.Event

    def leases(self) -> RedisLeases:
        store = self

        class HeldLeases(RedisLeases):
            def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> Replies:
                replies = super().exchange(calls, timeout)
                assert store.released.wait(50)
                return replies

        return HeldLeases(self)


class AsyncHeldStore(RedisStore):
    """Its replies to tasks wait until `released` is set."""

    released: asyncio.Event

    def leases(self) -> RedisLeases:
        store = self

        class HeldLeases(RedisLeases):
            async def exchange_async(self, calls: Sequence[LeaseCall]) -> Replies:
                replies = await super().exchange_async(calls)
                await store.released.wait()
                return replies

        return HeldLeases(self)
