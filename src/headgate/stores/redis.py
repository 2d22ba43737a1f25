"""Limits shared through Redis: one script and one round trip for each decision, by the server's clock."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

import redis
import redis.asyncio

from headgate._lifecycle import renew_after_fork
from headgate.clock import Clock
from headgate.keys import check_key
from headgate.redis.async_client import AsyncExecutor
from headgate.redis.backend import AsyncRedisBackend, RedisBackend
from headgate.redis.health import HEALTH_TIMEOUT
from headgate.redis.sync_client import SyncExecutor
from headgate.redis.url import RedisURL, parse_url
from headgate.rule import Rule
from headgate.stores.base import NO_PICKLE, Health, StoreOptions

if TYPE_CHECKING:
    from headgate.coordination.redis_states import RedisStates
    from headgate.hybrid.redis_leases import RedisLeases

Client = redis.Redis | redis.asyncio.Redis


class RedisStore:
    """One Redis (a server, a service behind Sentinels, a Cluster), for limiters of either kind.

    redis            a URL (see `headgate.redis.url`), or a client of redis-py: a plain one serves `Limiter`, an
                     asyncio one `AsyncLimiter`
    prefix           what every key starts with
    hash_keys        store a digest of the client's key instead of the key: shorter, and no addresses in Redis
    timeout          seconds that a check may take in all; then on_store_error answers
    connect_timeout  seconds of those to connect
    max_connections  to each server, for threads; a caller that finds none free waits within the time-out
    clock            tests only: this time instead of the server's
    """

    def __init__(
        self,
        redis: str | Client,
        *,
        prefix: str = "rate_limiter",
        hash_keys: bool = False,
        timeout: float | None = None,
        connect_timeout: float | None = None,
        max_connections: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._source = _source(redis, timeout, connect_timeout, max_connections)
        self.url = self._source if isinstance(self._source, RedisURL) else None  # None: a client was handed in
        self.display_name = self.url.safe_url if self.url else "the client's Redis"  # without password
        self.partitioned = self.url is not None and self.url.kind == "cluster"  # keys lie at different servers
        self.prefix = _check_prefix(prefix)
        if not isinstance(hash_keys, bool):
            raise ValueError(f"hash_keys must be True or False, got {hash_keys!r:.40}")
        self.hash_keys = hash_keys
        self.clock = clock
        self.shared_objects: dict[str, Any] = {}  # what hybrid and coordination keep with the store
        self._sync_executor: SyncExecutor | None = None
        self._health_executor: SyncExecutor | None = None
        self._health: Health | None = None
        self._health_at = 0.0
        self._latest_executor: AsyncExecutor | None = None
        self._async_executors: dict[asyncio.AbstractEventLoop, AsyncExecutor] = {}
        self.after_fork()
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Unpack[StoreOptions]) -> RedisStore:
        """The store of a Redis URL, without the options that are another store's."""
        options.pop("max_keys", None)
        return cls(url, clock=clock, **options)  # type: ignore[misc]  # max_keys is not there any more

    def after_fork(self) -> None:
        """Start with free locks: a thread that held one, or a task that checked the health, is in the parent."""
        self._health_check: asyncio.Task[Health] | None = None
        self._lock = threading.Lock()
        self._health_lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __repr__(self) -> str:
        return f"<RedisStore: {self._server_name()}>"

    def open(self, rule: Rule, on_store_error: str = "allow") -> RedisBackend:
        """The backend of *rule* for threads."""
        self._sync_source()
        return RedisBackend(self, rule, on_store_error)

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncRedisBackend:
        """The backend of *rule* for asyncio."""
        self._async_source()
        return AsyncRedisBackend(self, rule, on_store_error)

    def leases(self) -> RedisLeases:
        """What keeps the leases of `HybridLimiter` here."""
        from headgate.hybrid.redis_leases import RedisLeases  # its Lua stands beside its Python twin

        return RedisLeases(self)

    def states(self) -> RedisStates:
        """What keeps the states of locks, pools, queues and breakers here."""
        from headgate.coordination.redis_states import RedisStates  # their Lua stands beside its Python twin

        return RedisStates(self)

    # ------------------------------------------------------------------------------------------------ connections

    @property
    def serves_threads(self) -> bool:
        """False: the store was given an asyncio client."""
        return not isinstance(self._source, redis.asyncio.ConnectionPool)

    @property
    def serves_tasks(self) -> bool:
        """False: the store was given a client for threads."""
        return not isinstance(self._source, redis.ConnectionPool)

    def sync_executor(self) -> SyncExecutor:
        """What makes calls from threads; it and its connections are made when they are first needed."""
        if self._sync_executor is None:
            with self._lock:
                self._sync_executor = self._sync_executor or SyncExecutor(self._sync_source(), self._server_name())
        return self._sync_executor

    def async_executor(self) -> AsyncExecutor:
        """What makes calls from the running event loop; each event loop has its own."""
        loop = asyncio.get_running_loop()
        latest = self._latest_executor
        if latest is not None and latest.loop is loop:
            return latest
        with self._lock:
            executor = self._async_executors.get(loop)
            if executor is None:
                for closed in [other for other in self._async_executors if other.is_closed()]:  # without an aclose()
                    del self._async_executors[closed]
                executor = self._async_executors[loop] = AsyncExecutor(self._async_source(), self._server_name())
                executor.close_with_loop()
            self._latest_executor = executor
        return executor

    def spare_executor(self, timeout: float) -> AsyncExecutor | None:
        """An executor for the end of an event loop, which the caller closes; None with a client that was handed in."""
        return AsyncExecutor(self.url, self._server_name(), timeout) if self.url else None

    def latest_executor(self) -> AsyncExecutor | None:
        """The running event loop's executor, or that of the last event loop that had one."""
        try:
            return self._async_executors.get(asyncio.get_running_loop(), self._latest_executor)
        except RuntimeError:
            return self._latest_executor

    def close(self) -> None:
        """Close the connections for threads; a client that was handed in keeps its own."""
        for executor in (self._sync_executor, self._health_executor):
            if executor:
                executor.close()
        self._sync_executor = self._health_executor = None

    async def close_loop(self) -> None:
        """Close the running event loop's connections."""
        executor, self._latest_executor = self._async_executors.pop(asyncio.get_running_loop(), None), None
        if executor:
            await executor.aclose()

    async def aclose(self) -> None:
        """Close the running event loop's connections, and those for threads."""
        await self.close_loop()
        self.close()

    def _server_name(self) -> str:
        return f"Redis at {self.display_name}" if self.url else self.display_name

    def _sync_source(self) -> RedisURL | redis.ConnectionPool:
        if isinstance(self._source, redis.asyncio.ConnectionPool):
            raise TypeError("threads need a redis.Redis or a URL; the store was given a redis.asyncio.Redis")
        return self._source

    def _async_source(self) -> RedisURL | redis.asyncio.ConnectionPool:
        if isinstance(self._source, redis.ConnectionPool):
            raise TypeError("asyncio needs a redis.asyncio.Redis or a URL; the store was given a redis.Redis")
        return self._source

    # ----------------------------------------------------------------------------------------------------- health

    def health(self) -> Health:
        """Check the server's health on a connection of its own; the answer is good for a second."""
        with self._health_lock:
            if self._health is None or monotonic() - self._health_at > 1.0:
                if self._health_executor is None:
                    self._health_executor = SyncExecutor(_separate(self._sync_source()), self._server_name())
                seen = self._health_executor.examine(HEALTH_TIMEOUT, self._check_timeout())
                self._health, self._health_at = _with_connections(seen, self._sync_executor), monotonic()
            return self._health

    async def ahealth(self) -> Health:
        """The same for asyncio."""
        if self._health is not None and monotonic() - self._health_at <= 1.0:
            return self._health
        check, loop = self._health_check, asyncio.get_running_loop()
        if check is None or check.done() or check.get_loop() is not loop:
            check = self._health_check = loop.create_task(self._examine())
        return await asyncio.shield(check)

    async def _examine(self) -> Health:
        source = _separate(self._async_source())
        executor = AsyncExecutor(source, self._server_name(), HEALTH_TIMEOUT)
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


Source = RedisURL | redis.ConnectionPool | redis.asyncio.ConnectionPool


def _source(
    given: str | Client, timeout: float | None, connect_timeout: float | None, max_connections: int | None
) -> Source:
    """Where connections come from: a URL, or the pool of a client that was handed in."""
    if isinstance(given, str):
        return parse_url(given, timeout=timeout, connect_timeout=connect_timeout, max_connections=max_connections)
    if (timeout, connect_timeout, max_connections) != (None, None, None):
        raise ValueError("timeout, connect_timeout and max_connections belong to the client that you hand in")
    if isinstance(given, redis.Redis | redis.asyncio.Redis):
        return given.connection_pool
    raise TypeError(f"RedisStore takes a URL (text) or a client of redis-py, got {type(given).__name__}")


Pool = TypeVar("Pool", bound=redis.ConnectionPool | redis.asyncio.ConnectionPool)


def _separate(source: RedisURL | Pool) -> RedisURL | Pool:
    """The same way to connect, for a health check that neither waits for a client's connections nor tries for long."""
    if isinstance(source, RedisURL):
        return source
    brief = {"socket_timeout": HEALTH_TIMEOUT / 2, "socket_connect_timeout": HEALTH_TIMEOUT / 2, "retry": None}
    return type(source)(source.connection_class, 4, **{**source.connection_kwargs, **brief})


def _with_connections(seen: Health, executor: SyncExecutor | AsyncExecutor | None) -> Health:
    servers = executor.connections() if executor else []
    counts = {
        "in_use": sum(server.in_use() for server in servers),
        "idle": sum(server.idle() for server in servers),
        "waiting": sum(server.waiting for server in servers),
    }
    if seen.healthy and isinstance(executor, SyncExecutor) and counts["waiting"] and not counts["idle"]:
        words = f"{counts['waiting']} callers wait for one of {counts['in_use']} connections: raise max_connections"
        return dataclasses.replace(
            seen, healthy=False, reason="pool exhausted", problems=(*seen.problems, words), connections=counts
        )
    return dataclasses.replace(seen, connections=counts)


def _check_prefix(prefix: str) -> str:
    if "{" in check_key(prefix, "prefix") or "}" in prefix:
        raise ValueError(f"prefix must not have braces, they would choose a Cluster slot for all keys: {prefix!r}")
    return prefix
