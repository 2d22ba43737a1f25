"""Limits shared through Redis: one script and one round trip for each decision, by the server's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import redis
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from headgate.clock import Clock
from headgate.keys import check_key
from headgate.redis.async_client import AsyncExecutor
from headgate.redis.joint import BookingScript, JointScript
from headgate.redis.script import LimiterScript, slot_of, tag_function
from headgate.redis.servers import ServerFigures
from headgate.redis.topology import Unreached
from headgate.redis.url import RedisOptions, parse_url
from headgate.rule import Rule
from headgate.stores.base import StoreOptions
from headgate.stores.remote import RuleForTasks, RuleForThreads, RuleOnServer
from headgate.stores.remote_joint import JointScripts
from headgate.stores.resp_store import RespStore, Source
from headgate.stores.settings import check_flag

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


class RedisStore(RespStore):
    """One Redis (a server, a service behind Sentinels, a Cluster), for limiters of either kind.

    Args:
        redis: a URL (see `headgate.redis.url`), or a client of redis-py: a plain one serves `Limiter`, an asyncio one
            `AsyncLimiter`
        prefix: what every key starts with
        hash_keys: store a digest of the client's key instead of the key: shorter, and no addresses in Redis
        clock: tests only: this time instead of the server's

    Keyword Args:
        timeout: seconds that a check may take in all; then on_store_error answers
        connect_timeout: seconds of those to connect
        min_connections: to each server, that `warm_up` opens; nothing connects before it or the first check
        max_connections: to each server, for threads; a caller that finds none free waits within the time-out. An event
            loop has at most four to each server
        retries: how often a call is sent again where that is safe, within its time-out (see `RetryPolicy`)
        retry_pause: seconds before each
    """

    kind = "redis"
    backends = (RedisBackend, AsyncRedisBackend)

    def __init__(
        self,
        redis: str | Client,
        *,
        prefix: str = "rate_limiter",
        hash_keys: bool = False,
        clock: Clock | None = None,
        **options: Unpack[RedisOptions],
    ) -> None:
        super().__init__(_source(redis, options), "Redis")
        self.partitioned = self.url is not None and self.url.kind == "cluster"
        self.prefix = _check_prefix(prefix)
        self.hash_keys = check_flag("hash_keys", hash_keys)
        self.clock = clock
        self.shared_objects: dict[str, Any] = {}  # what hybrid and coordination keep with the store
        self.joint_scripts = JointScripts(lambda parts: JointScript(parts, clock))

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Unpack[StoreOptions]) -> RedisStore:
        """The store of a Redis URL, without the options that are another store's.

        Args:
            url: of the server
            clock: tests only
            **options: of any store
        """
        options.pop("max_keys", None)
        return cls(url, clock=clock, **options)  # type: ignore[misc]  # max_keys is not there any more

    def open(self, rule: Rule, on_store_error: str = "allow") -> RuleForThreads:
        """The backend of *rule* for threads; raises if the store was given an asyncio client."""
        self._sync_source()
        return super().open(rule, on_store_error)

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> RuleForTasks:
        """The backend of *rule* for asyncio; raises if the store was given a client for threads."""
        self._async_source()
        return super().open_async(rule, on_store_error)

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
        return AsyncExecutor(self.url, self._server_name, timeout) if self.url else None


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


def _check_prefix(prefix: str) -> str:
    if "{" in check_key(prefix, "prefix") or "}" in prefix:
        raise ValueError(f"prefix must not have braces, they would choose a Cluster slot for all keys: {prefix!r}")
    return prefix
