"""What stores share whose server speaks the Redis protocol: connections by a URL or a client's pool, and the health."""

from __future__ import annotations

import dataclasses
import weakref
from time import monotonic
from typing import TypeVar

import redis
import redis.asyncio

from headgate.errors import StoreUnavailable
from headgate.redis.async_client import AsyncExecutor
from headgate.redis.health import HEALTH_TIMEOUT
from headgate.redis.sync_client import SyncExecutor
from headgate.redis.url import MIN_CONNECTIONS, RedisURL
from headgate.stores.base import Health
from headgate.stores.remote_store import StoreOnServer

Source = RedisURL | redis.ConnectionPool | redis.asyncio.ConnectionPool
Pool = TypeVar("Pool", bound=redis.ConnectionPool | redis.asyncio.ConnectionPool)


class RespStore(StoreOnServer[SyncExecutor, AsyncExecutor]):
    """A server of the Redis protocol, with *name* for messages; *source* is a URL, or the pool of a client."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self.url = source if isinstance(source, RedisURL) else None  # None: a client was handed in
        self.display_name = self.url.safe_url if self.url else "the client's Redis"  # without password
        self._server_name = f"{name} at {self.display_name}" if self.url else self.display_name
        self._health_executor: SyncExecutor | None = None
        super().__init__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._server_name}>"

    def _open_threads(self) -> SyncExecutor:
        return SyncExecutor(self._sync_source(), self._server_name)

    def _open_tasks(self) -> AsyncExecutor:
        return AsyncExecutor(self._async_source(), self._server_name)

    def warm_up(self) -> None:
        """Open `min_connections` to each server, for threads, so that the first checks find them.

        Raises `StoreUnavailable` if a server cannot be reached within the time-out.
        """
        try:
            self.sync_executor().warm_up(self.url.min_connections if self.url else MIN_CONNECTIONS)
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot connect to {self._server_name}: {error}") from error

    async def awarm_up(self) -> None:
        """The same for the running event loop."""
        try:
            await self.async_executor().warm_up(self.url.min_connections if self.url else MIN_CONNECTIONS)
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot connect to {self._server_name}: {error}") from error

    def connections(self) -> dict[str, int]:
        """The connections of the latest event loop: in_use, idle, and calls that wait for one."""
        return _connection_counts(self._latest_executor)

    def close(self) -> None:
        """Close the connections for threads; a client that was handed in keeps its own."""
        for executor in (self._sync_executor, self._health_executor):
            if executor:
                executor.close()
        self._sync_executor = self._health_executor = None

    def _sync_source(self) -> RedisURL | redis.ConnectionPool:
        if isinstance(self._source, redis.asyncio.ConnectionPool):
            raise TypeError("threads need a redis.Redis or a URL; the store was given a redis.asyncio.Redis")
        return self._source

    def _async_source(self) -> RedisURL | redis.asyncio.ConnectionPool:
        if isinstance(self._source, redis.ConnectionPool):
            raise TypeError("asyncio needs a redis.asyncio.Redis or a URL; the store was given a redis.Redis")
        return self._source

    def health(self) -> Health:
        """Check the server's health on a connection of its own; the answer is good for a second."""
        with self._health_lock:
            if self._health is None or monotonic() - self._health_at > 1.0:
                if self._health_executor is None:
                    self._health_executor = self._open_health()
                seen = self._health_executor.examine(HEALTH_TIMEOUT, self._check_timeout())
                self._health, self._health_at = _with_connections(seen, self._sync_executor), monotonic()
            return self._health

    def _open_health(self) -> SyncExecutor:
        source = _separate(self._sync_source())
        executor = SyncExecutor(source, self._server_name)
        if not isinstance(source, RedisURL):
            # The pool was made for these checks. `close` drops the executor, which may still be in use in another
            # thread; the last one closes the sockets, before a garbage collection finds them open, which would warn.
            weakref.finalize(executor, source.disconnect).atexit = False
        return executor

    async def _examine(self) -> Health:
        source = _separate(self._async_source())
        executor = AsyncExecutor(source, self._server_name, HEALTH_TIMEOUT)
        try:
            seen = await executor.examine(HEALTH_TIMEOUT, self._check_timeout())
        finally:
            await executor.aclose()
            if not isinstance(source, RedisURL):
                await source.disconnect()  # the pool was made for this check; the client's own pool stays open
        self._health, self._health_at = _with_connections(seen, self._latest_executor), monotonic()
        return self._health

    def _check_timeout(self) -> float:
        return self.url.timeout if self.url else 1.0


def _separate(source: RedisURL | Pool) -> RedisURL | Pool:
    """The same way to connect, for a health check that neither waits for a client's connections nor tries for long."""
    if isinstance(source, RedisURL):
        return source
    brief = {"socket_timeout": HEALTH_TIMEOUT / 2, "socket_connect_timeout": HEALTH_TIMEOUT / 2, "retry": None}
    return type(source)(source.connection_class, 4, **{**source.connection_kwargs, **brief})


def _connection_counts(executor: SyncExecutor | AsyncExecutor | None) -> dict[str, int]:
    return executor.connection_counts() if executor else {"in_use": 0, "idle": 0, "waiting": 0}


def _with_connections(seen: Health, executor: SyncExecutor | AsyncExecutor | None) -> Health:
    counts = _connection_counts(executor)
    if seen.healthy and isinstance(executor, SyncExecutor) and counts["waiting"] and not counts["idle"]:
        words = f"{counts['waiting']} callers wait for one of {counts['in_use']} connections: raise max_connections"
        return dataclasses.replace(
            seen, healthy=False, reason="pool exhausted", problems=(*seen.problems, words), connections=counts
        )
    return dataclasses.replace(seen, connections=counts)
