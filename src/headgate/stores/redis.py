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
from headgate.redis.gates import AsyncRedisBackend, RedisBackend
from headgate.redis.health import WITHIN
from headgate.redis.sync_client import SyncExecutor
from headgate.redis.url import RedisURL, parse_url
from headgate.rule import Rule
from headgate.stores.base import NO_PICKLE, Health, StoreOptions

if TYPE_CHECKING:
    from headgate.hybrid.redis_leases import RedisLeases

Client = redis.Redis | redis.asyncio.Redis


class RedisStore:
    """One Redis (a server, a service behind Sentinels, a Cluster), for limiters of either kind.

    redis            a URL (see `headgate.redis.url`), or a client of redis-py: a plain one serves `Limiter`, an
                     asyncio one `AsyncLimiter`
    prefix           what every key starts with
    hash_keys        store a digest of the client's key instead of the key: shorter, and it shows nobody's address
    timeout          seconds that a check may take in all; then on_store_error answers
    connect_timeout  seconds of those to connect
    max_connections  to each server, for threads; who finds none free waits within the time-out
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
        self.prefix = _check_prefix(prefix)
        if not isinstance(hash_keys, bool):
            raise ValueError(f"hash_keys must be True or False, got {hash_keys!r:.40}")
        self.hash_keys = hash_keys
        self.clock = clock
        self.url = self._source if isinstance(self._source, RedisURL) else None  # None: a client was handed in
        self.display_name = self.url.safe_url if self.url else "the client's Redis"
        self.partitioned = self.url is not None and self.url.kind == "cluster"
        self.attachments: dict[str, Any] = {}  # what hybrid and coordination keep with the store
        self._threads: SyncExecutor | None = None
        self._threads_examiner: SyncExecutor | None = None
        self._health: Health | None = None
        self._health_at = 0.0
        self._latest: AsyncExecutor | None = None
        self._loops: dict[asyncio.AbstractEventLoop, AsyncExecutor] = {}
        self.after_fork()
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Unpack[StoreOptions]) -> RedisStore:
        """The store of a Redis URL, without the options that are another store's."""
        options.pop("max_keys", None)
        return cls(url, clock=clock, **options)  # type: ignore[misc]  # max_keys is not there any more

    def after_fork(self) -> None:
        """Nobody holds a lock, and nobody looks: whoever does so is in the parent."""
        self._looking: asyncio.Task[Health] | None = None
        self._lock = threading.Lock()
        self._health_lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __repr__(self) -> str:
        return f"<RedisStore: {self._shown()}>"  # without the password

    def open(self, rule: Rule, on_store_error: str = "allow") -> RedisBackend:
        """A gate for threads."""
        self._plain_source()
        return RedisBackend(self, rule, on_store_error)

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncRedisBackend:
        """A gate for asyncio."""
        self._async_source()
        return AsyncRedisBackend(self, rule, on_store_error)

    def leases(self) -> RedisLeases:
        """What keeps the leases of `HybridLimiter` here."""
        from headgate.hybrid.redis_leases import RedisLeases  # its Lua stands beside its Python twin

        return RedisLeases(self)

    @property
    def serves_threads(self) -> bool:
        """False: the store was given an asyncio client."""
        return not isinstance(self._source, redis.asyncio.ConnectionPool)

    @property
    def serves_tasks(self) -> bool:
        """False: the store was given a client for threads."""
        return not isinstance(self._source, redis.ConnectionPool)

    def sync_executor(self) -> SyncExecutor:
        """The connections for threads, made when they are first needed."""
        if self._threads is None:
            with self._lock:
                self._threads = self._threads or SyncExecutor(self._plain_source(), self._shown())
        return self._threads

    def threads(self) -> SyncExecutor:
        return self.sync_executor()

    def loop(self) -> AsyncExecutor:
        return self.async_executor()

    def async_executor(self) -> AsyncExecutor:
        """The running event loop's connections, made when they are first needed."""
        loop = asyncio.get_running_loop()
        latest = self._latest
        if latest is not None and latest.loop is loop:
            return latest
        with self._lock:
            link = self._loops.get(loop)
            if link is None:
                for closed in [other for other in self._loops if other.is_closed()]:  # without an aclose()
                    del self._loops[closed]
                link = self._loops[loop] = AsyncExecutor(self._async_source(), self._shown())
                link.close_with_loop()
            self._latest = link
        return link

    def spare_executor(self, timeout: float) -> AsyncExecutor | None:
        """An executor for the end of an event loop, which the caller closes; None with a client that was handed in."""
        return AsyncExecutor(self.url, self._shown(), timeout) if self.url else None

    def latest(self) -> AsyncExecutor | None:
        """The running event loop's connections, or those of the last one that had any."""
        try:
            return self._loops.get(asyncio.get_running_loop(), self._latest)
        except RuntimeError:
            return self._latest

    def health(self) -> Health:
        """Ask the server how it is, on a connection of its own; asked again within a second, the same answer."""
        with self._health_lock:
            if self._health is None or monotonic() - self._health_at > 1.0:
                if self._threads_examiner is None:
                    self._threads_examiner = SyncExecutor(_apart(self._plain_source()), self._shown())
                seen = self._threads_examiner.examine(WITHIN, self._patience())
                self._health, self._health_at = _with_connections(seen, self._threads), monotonic()
            return self._health

    async def ahealth(self) -> Health:
        """The same for asyncio."""
        if self._health is not None and monotonic() - self._health_at <= 1.0:
            return self._health
        looking, loop = self._looking, asyncio.get_running_loop()
        if looking is None or looking.done() or looking.get_loop() is not loop:
            looking = self._looking = loop.create_task(self._look())
        return await asyncio.shield(looking)

    async def _look(self) -> Health:
        examiner = AsyncExecutor(_apart(self._async_source()), self._shown(), WITHIN)
        try:
            seen = await examiner.examine(WITHIN, self._patience())
        finally:
            await examiner.aclose()
        self._health, self._health_at = _with_connections(seen, self._latest), monotonic()
        return self._health

    def _patience(self) -> float:
        return self._source.timeout if isinstance(self._source, RedisURL) else 1.0

    def close(self) -> None:
        """Close the connections for threads; a client that was handed in keeps its own."""
        for link in (self._threads, self._threads_examiner):
            if link:
                link.close()
        self._threads = self._threads_examiner = None

    async def aclose(self) -> None:
        """Close the running event loop's connections, and those for threads."""
        await self.close_loop()
        self.close()

    async def close_loop(self) -> None:
        """Close the running event loop's connections."""
        link, self._latest = self._loops.pop(asyncio.get_running_loop(), None), None
        if link:
            await link.aclose()

    def _plain_source(self) -> RedisURL | redis.ConnectionPool:
        if isinstance(self._source, redis.asyncio.ConnectionPool):
            raise TypeError("threads need a redis.Redis or a URL; the store was given a redis.asyncio.Redis")
        return self._source

    def _async_source(self) -> RedisURL | redis.asyncio.ConnectionPool:
        if isinstance(self._source, redis.ConnectionPool):
            raise TypeError("asyncio needs a redis.asyncio.Redis or a URL; the store was given a redis.Redis")
        return self._source

    def _shown(self) -> str:
        return f"Redis at {self._source.safe_url}" if isinstance(self._source, RedisURL) else "the client's Redis"


Source = RedisURL | redis.ConnectionPool | redis.asyncio.ConnectionPool


def _source(
    given: str | Client, timeout: float | None, connect_timeout: float | None, max_connections: int | None
) -> Source:
    """Where connections come from: a URL, or the pool of somebody's client."""
    if isinstance(given, str):
        return parse_url(given, timeout=timeout, connect_timeout=connect_timeout, max_connections=max_connections)
    if (timeout, connect_timeout, max_connections) != (None, None, None):
        raise ValueError("timeout, connect_timeout and max_connections belong to the client that you hand in")
    if isinstance(given, redis.Redis | redis.asyncio.Redis):
        return given.connection_pool
    raise TypeError(f"RedisStore takes a URL (text) or a client of redis-py, got {type(given).__name__}")


Pool = TypeVar("Pool", bound=redis.ConnectionPool | redis.asyncio.ConnectionPool)


def _apart(source: RedisURL | Pool) -> RedisURL | Pool:
    """The same way to connect, for a look that must neither wait for others' connections nor try for long."""
    if isinstance(source, RedisURL):
        return source
    brief = {"socket_timeout": WITHIN / 2, "socket_connect_timeout": WITHIN / 2, "retry": None}
    return type(source)(source.connection_class, 4, **{**source.connection_kwargs, **brief})


def _with_connections(seen: Health, link: SyncExecutor | AsyncExecutor | None) -> Health:
    used = link.connections() if link else []
    counts = {
        "in_use": sum(server.in_use() for server in used),
        "idle": sum(server.idle() for server in used),
        "waiting": sum(server.waiting for server in used),
    }
    if seen.healthy and isinstance(link, SyncExecutor) and counts["waiting"] and not counts["idle"]:
        words = f"{counts['waiting']} callers wait for one of {counts['in_use']} connections: raise max_connections"
        return dataclasses.replace(
            seen, healthy=False, reason="pool exhausted", problems=(*seen.problems, words), connections=counts
        )
    return dataclasses.replace(seen, connections=counts)


def _check_prefix(prefix: str) -> str:
    if "{" in check_key(prefix, "prefix") or "}" in prefix:
        raise ValueError(f"prefix must not have braces, they would choose a Cluster slot for all keys: {prefix!r}")
    return prefix
