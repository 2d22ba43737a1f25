"""Limits shared through Redis: one script and one round trip for each decision, by the server's clock."""

from __future__ import annotations

import dataclasses
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import redis
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from headgate.clock import Clock
from headgate.errors import StoreUnavailable
from headgate.keys import check_key
from headgate.redis.async_client import AsyncExecutor
from headgate.redis.booking import BookingScript
from headgate.redis.health import HEALTH_TIMEOUT
from headgate.redis.joint import JointScript
from headgate.redis.script import LimiterScript, slot_of, tag_function
from headgate.redis.servers import ServerFigures
from headgate.redis.sync_client import SyncExecutor
from headgate.redis.topology import Unreached
from headgate.redis.url import MIN_CONNECTIONS, RedisOptions, RedisURL, parse_url
from headgate.rule import Rule
from headgate.stores.base import Health, StoreOptions
from headgate.stores.remote import RuleForTasks, RuleForThreads, RuleOnServer
from headgate.stores.remote_joint import JointScripts
from headgate.stores.remote_store import StoreOnServer

if TYPE_CHECKING:
    from headgate.coordination.redis_states import RedisStates
    from headgate.hybrid.redis_leases import RedisLeases

Client = redis.Redis | redis.asyncio.Redis


class RuleOnRedis(RuleOnServer):
    """What both backends share: the rule's script, and what the errors of redis-py mean for a call."""

    store_errors, refusals, unsent = (RedisError, OSError), ResponseError, Unreached

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        super().__init__(store, rule, on_store_error)
        self.script: LimiterScript = LimiterScript(rule, store.prefix, store.hash_keys, store.clock)
        if rule.is_bucket:
            self.booking = BookingScript(rule, self.script, store.prefix, store.hash_keys, store.clock)


class RedisBackend(RuleOnRedis, RuleForThreads):
    """One rule on one Redis, for threads."""


class AsyncRedisBackend(RuleOnRedis, RuleForTasks):
    """One rule on one Redis, for asyncio."""


class RedisStore(StoreOnServer[SyncExecutor, AsyncExecutor]):
    """One Redis (a server, a service behind Sentinels, a Cluster), for limiters of either kind.

    redis            a URL (see `headgate.redis.url`), or a client of redis-py: a plain one serves `Limiter`, an
                     asyncio one `AsyncLimiter`
    prefix           what every key starts with
    hash_keys        store a digest of the client's key instead of the key: shorter, and no addresses in Redis
    timeout          seconds that a check may take in all; then on_store_error answers
    connect_timeout  seconds of those to connect
    min_connections  to each server, that `warm_up` opens; nothing connects before it or the first check
    max_connections  to each server, for threads; a caller that finds none free waits within the time-out. An event loop
                     has at most four to each server
    retries          how often a call is sent again where that is safe, within its time-out (see `RetryPolicy`)
    retry_pause      seconds before each
    clock            tests only: this time instead of the server's
    """

    kind = "redis"

    def __init__(
        self,
        redis: str | Client,
        *,
        prefix: str = "rate_limiter",
        hash_keys: bool = False,
        clock: Clock | None = None,
        **options: Unpack[RedisOptions],
    ) -> None:
        self._source = _source(redis, options)
        self.url = self._source if isinstance(self._source, RedisURL) else None  # None: a client was handed in
        self.display_name = self.url.safe_url if self.url else "the client's Redis"  # without password
        self.partitioned = self.url is not None and self.url.kind == "cluster"  # keys lie at different servers
        self.prefix = _check_prefix(prefix)
        if not isinstance(hash_keys, bool):
            raise ValueError(f"hash_keys must be True or False, got {hash_keys!r:.40}")
        self.hash_keys = hash_keys
        self.clock = clock
        self.shared_objects: dict[str, Any] = {}  # what hybrid and coordination keep with the store
        self.joint_scripts = JointScripts(lambda parts: JointScript(parts, clock))
        self._health_executor: SyncExecutor | None = None
        super().__init__()

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Unpack[StoreOptions]) -> RedisStore:
        """The store of a Redis URL, without the options that are another store's."""
        options.pop("max_keys", None)
        return cls(url, clock=clock, **options)  # type: ignore[misc]  # max_keys is not there any more

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

    def partition(self, key: str) -> int:
        """The Cluster slot of a client's key."""
        return slot_of(tag_function(self.hash_keys)(key))

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

    def _open_threads(self) -> SyncExecutor:
        return SyncExecutor(self._sync_source(), self._server_name())

    def _open_tasks(self) -> AsyncExecutor:
        return AsyncExecutor(self._async_source(), self._server_name())

    def warm_up(self) -> None:
        """Open `min_connections` to each server, for threads, so that the first checks find them.

        Raises `StoreUnavailable` if a server cannot be reached within the time-out.
        """
        try:
            self.sync_executor().warm_up(self.url.min_connections if self.url else MIN_CONNECTIONS)
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot connect to {self._server_name()}: {error}") from error

    async def awarm_up(self) -> None:
        """The same for the running event loop."""
        try:
            await self.async_executor().warm_up(self.url.min_connections if self.url else MIN_CONNECTIONS)
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailable(f"cannot connect to {self._server_name()}: {error}") from error

    def connections(self) -> dict[str, int]:
        """The connections of the latest event loop: in_use, idle, and calls that wait for one."""
        return _connection_counts(self._latest_executor)

    def connections_by_server(self) -> dict[str, dict[str, int]]:
        """The same for each server, by host:port."""
        executor = self._latest_executor
        return {
            server: {"in_use": sender.in_use(), "idle": sender.idle(), "waiting": sender.waiting}
            for server, sender in (executor.connections_by_server() if executor else {}).items()
        }

    async def aservers(self, time_limit: float) -> list[ServerFigures]:
        """The figures of every server that decides, asked within *time_limit* seconds; a dead one is not up."""
        return await self.async_executor().survey(time_limit)

    def spare_executor(self, timeout: float) -> AsyncExecutor | None:
        """An executor for the end of an event loop, which the caller closes; None with a client that was handed in."""
        return AsyncExecutor(self.url, self._server_name(), timeout) if self.url else None

    def close(self) -> None:
        """Close the connections for threads; a client that was handed in keeps its own."""
        for executor in (self._sync_executor, self._health_executor):
            if executor:
                executor.close()
        self._sync_executor = self._health_executor = None

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


def _source(given: str | Client, options: RedisOptions) -> Source:
    """Where connections come from: a URL, or the pool of a client that was handed in."""
    known = RedisOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"RedisStore has no option {unknown[0]!r}; known are {', '.join(known)}")
    if isinstance(given, str):
        return parse_url(given, **options)
    if any(value is not None for value in options.values()):
        *names, last = known
        raise ValueError(f"{', '.join(names)} and {last} belong to the client that you hand in")
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


def _connection_counts(executor: SyncExecutor | AsyncExecutor | None) -> dict[str, int]:
    servers = executor.connections() if executor else []
    return {
        "in_use": sum(server.in_use() for server in servers),
        "idle": sum(server.idle() for server in servers),
        "waiting": sum(server.waiting for server in servers),
    }


def _with_connections(seen: Health, executor: SyncExecutor | AsyncExecutor | None) -> Health:
    counts = _connection_counts(executor)
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
