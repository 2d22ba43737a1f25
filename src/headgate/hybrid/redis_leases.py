"""The ledgers of leases in a Redis: one call of the script for any number of keys of one partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from headgate._lifecycle import ClosingExchange
from headgate.errors import StoreUnavailable
from headgate.hybrid import script
from headgate.hybrid.protocol import LeaseReply
from headgate.keys import digest, hash_tag, label
from headgate.rule import Rule
from headgate.stores.base import LeaseCall

if TYPE_CHECKING:
    from headgate.redis.async_client import AsyncExecutor
    from headgate.stores.redis import RedisStore


class RedisLeases:
    """See `headgate.stores.base.LeaseBackend`."""

    def __init__(self, store: RedisStore) -> None:
        self.partitioned = store.partitioned
        self._store = store

    def key_function(self, rule: Rule) -> Callable[[str], str]:
        """The function that turns a client's key into the Redis key of its Hash."""
        before = f"{self._store.prefix}:hybrid:{rule.kind}:"
        after = "" if rule.name == "default" else ":" + label(rule.name)
        if self._store.hash_keys:
            return lambda key: before + "{" + digest(key) + "}" + after
        return lambda key: before + hash_tag(key) + after

    def partition(self, key: str) -> int:
        """The Cluster slot of a Hash."""
        return script.SYNC.slot(key)

    def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> list[LeaseReply | str]:
        try:
            reply = self._store.sync_executor().execute(script.SYNC, self._call(calls), timeout)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error
        return script.replies(reply)

    async def exchange_async(self, calls: Sequence[LeaseCall]) -> list[LeaseReply | str]:
        return await self._exchange_on(self._store.async_executor(), calls)

    def closing_exchange(self, timeout: float) -> ClosingExchange:
        """`exchange_async` on new connections; None with a client that was handed in, which may be closed."""
        return ClosingExchange(self._exchange_on, self._store.spare_executor(timeout))

    async def close_loop(self) -> None:
        await self._store.close_loop()

    async def _exchange_on(self, executor: AsyncExecutor, calls: Sequence[LeaseCall]) -> list[LeaseReply | str]:
        try:
            reply = await executor.execute(script.SYNC, self._call(calls))
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error
        return script.replies(reply)

    def _call(self, calls: Sequence[LeaseCall]) -> Any:
        return script.call(calls, self._store.clock.now() if self._store.clock else None)
