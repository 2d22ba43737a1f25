"""Limits shared through Redis: one script and one round trip for each decision, by the server's clock."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import threading
from collections.abc import Coroutine, Generator
from time import monotonic
from typing import Any

try:
    import redis
    import redis.asyncio
    from redis.exceptions import RedisError, ResponseError
except ImportError as error:
    raise ImportError("a Redis store needs redis-py: pip install 'headgate[redis]'") from error

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision
from headgate.fallback import Fallback
from headgate.keys import check_key
from headgate.plan import arun, run
from headgate.redis import address
from headgate.redis.health import WITHIN
from headgate.redis.loops import LoopLink
from headgate.redis.script import Call, Script
from headgate.redis.threads import ThreadLink
from headgate.rule import Rule, check_permits
from headgate.stores import Health, StoreHealth

Client = redis.Redis | redis.asyncio.Redis


class RedisStore:
    """One Redis (a server, a service behind Sentinels, a Cluster), for limiters of either kind.

    redis            a URL (see `headgate.redis.address`), or a client of redis-py: a plain one serves `Limiter`, an
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
        self._threads: ThreadLink | None = None
        self._threads_examiner: ThreadLink | None = None
        self._health: Health | None = None
        self._health_at = 0.0
        self._lock = threading.Lock()
        self._latest: LoopLink | None = None
        self._loops: dict[asyncio.AbstractEventLoop, LoopLink] = {}

    def open(self, rule: Rule, on_store_error: str = "allow") -> RedisGate:
        """A gate for threads."""
        if isinstance(self._source, redis.asyncio.ConnectionPool):
            raise TypeError("Limiter needs a redis.Redis or a URL; the store was given a redis.asyncio.Redis")
        return RedisGate(self, rule, on_store_error)

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncRedisGate:
        """A gate for asyncio."""
        if isinstance(self._source, redis.ConnectionPool):
            raise TypeError("AsyncLimiter needs a redis.asyncio.Redis or a URL; the store was given a redis.Redis")
        return AsyncRedisGate(self, rule, on_store_error)

    def threads(self) -> ThreadLink:
        """The connections for threads, made when they are first needed."""
        if self._threads is None:
            with self._lock:
                self._threads = self._threads or ThreadLink(self._plain_source(), self._shown())
        return self._threads

    def loop(self) -> LoopLink:
        """The running event loop's connections, made when they are first needed."""
        loop = asyncio.get_running_loop()
        latest = self._latest
        if latest is not None and latest.loop is loop:
            return latest
        link = self._loops.get(loop)
        if link is None:
            for closed in [other for other in self._loops if other.is_closed()]:  # without an aclose()
                del self._loops[closed]
            source = self._source
            assert not isinstance(source, redis.ConnectionPool), "open_async() refused it"
            link = self._loops[loop] = LoopLink(source, self._shown())
        self._latest = link
        return link

    def health(self) -> Health:
        """Ask the server how it is, on a connection of its own; asked again within a second, the same answer."""
        if self._threads_examiner is None:
            self._threads_examiner = ThreadLink(self._plain_source(), self._shown())
        if self._health is None or monotonic() - self._health_at > 1.0:
            seen = self._threads_examiner.examine(WITHIN)
            self._health, self._health_at = _with_connections(seen, self._threads), monotonic()
        return self._health

    async def ahealth(self) -> Health:
        """The same for asyncio."""
        if self._health is None or monotonic() - self._health_at > 1.0:
            source = self._source
            assert not isinstance(source, redis.ConnectionPool), "open_async() refused it"
            examiner = LoopLink(source, self._shown())
            try:
                seen = await examiner.examine(WITHIN)
            finally:
                await examiner.aclose()
            self._health, self._health_at = _with_connections(seen, self._latest), monotonic()
        return self._health

    def close(self) -> None:
        """Close the connections for threads; a client that was handed in keeps its own."""
        for link in (self._threads, self._threads_examiner):
            if link:
                link.close()
        self._threads = self._threads_examiner = None

    async def aclose(self) -> None:
        """Close the running event loop's connections, and those for threads."""
        link, self._latest = self._loops.pop(asyncio.get_running_loop(), None), None
        if link:
            await link.aclose()
        self.close()

    def _plain_source(self) -> address.Target | redis.ConnectionPool:
        assert not isinstance(self._source, redis.asyncio.ConnectionPool), "open() refused it"
        return self._source

    def _shown(self) -> str:
        return f"Redis at {self._source.shown}" if isinstance(self._source, address.Target) else "the client's Redis"


Source = address.Target | redis.ConnectionPool | redis.asyncio.ConnectionPool


def _source(
    given: str | Client, timeout: float | None, connect_timeout: float | None, max_connections: int | None
) -> Source:
    """Where connections come from: a URL, or the pool of somebody's client."""
    if isinstance(given, str):
        return address.read(given, timeout=timeout, connect_timeout=connect_timeout, max_connections=max_connections)
    if (timeout, connect_timeout, max_connections) != (None, None, None):
        raise ValueError("timeout, connect_timeout and max_connections belong to the client that you hand in")
    if isinstance(given, redis.Redis | redis.asyncio.Redis):
        return given.connection_pool
    raise TypeError(f"RedisStore takes a URL or a client of redis-py, got {type(given).__name__} {given!r:.80}")


def _with_connections(seen: Health, link: ThreadLink | LoopLink | None) -> Health:
    used = link.connections() if link else []
    counts = {
        "in_use": sum(server.in_use() for server in used),
        "idle": sum(server.idle() for server in used),
        "waiting": sum(server.waiting for server in used),
    }
    if seen.healthy and isinstance(link, ThreadLink) and counts["waiting"] and not counts["idle"]:
        words = f"{counts['waiting']} callers wait for one of {counts['in_use']} connections: raise max_connections"
        return dataclasses.replace(
            seen, healthy=False, reason="pool exhausted", problems=(*seen.problems, words), connections=counts
        )
    return dataclasses.replace(seen, connections=counts)


def _check_prefix(prefix: str) -> str:
    if "{" in check_key(prefix, "prefix") or "}" in prefix:
        raise ValueError(f"prefix must not have braces, they would choose a Cluster slot for all keys: {prefix!r}")
    return prefix


_FAILURES = (RedisError, OSError)


class Plans:
    """What a gate does, as plans: check the arguments, ask Redis, or let the fallback answer."""

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        self.script = Script(rule, store.prefix, store.hash_keys, store.clock)
        self.fallback = Fallback(on_store_error, rule, store.clock)

    def take(self, key: str, permits: int) -> Generator[Call, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity)
        fallback = self.fallback
        try:
            if fallback.owed and fallback.owed.get(key):
                yield Call("charge", key, fallback.owed[key])
                fallback.owed.pop(key, None)
            reply = yield Call("take", key, permits)
        except _FAILURES as error:
            return fallback.take(key, permits, error, isinstance(error, ResponseError))
        decision = self._decision(reply)
        if fallback.local:
            fallback.follow(key, decision)
        return decision

    def peek(self, key: str, permits: int) -> Generator[Call, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity, 0)
        try:
            reply = yield Call("peek", key, permits)
        except _FAILURES as error:
            return self.fallback.peek(key, permits, error, isinstance(error, ResponseError))
        return self._decision(reply)

    def refund(self, key: str, permits: int) -> Generator[Call, Any, None]:
        key, permits = check_key(key), check_permits(permits)
        try:
            yield Call("refund", key, permits)
        except _FAILURES as error:
            self.fallback.refund(key, permits, error, isinstance(error, ResponseError))

    def reset(self, key: str) -> Generator[Call, Any, None]:
        key = check_key(key)
        try:
            yield Call("reset", key, 1)
        except _FAILURES as error:
            self.fallback.reset(key, error, isinstance(error, ResponseError))

    def health(self, link: ThreadLink | LoopLink) -> StoreHealth:
        """What the caller's own calls have seen; asks nobody."""
        breakers = link.breakers()
        return StoreHealth(
            state="open" if any(breaker.open for breaker in breakers) else "closed",
            failures=max((breaker.failures for breaker in breakers), default=0),
            opened=sum(breaker.opened for breaker in breakers),
            degraded=self.fallback.answers,
            last_error=next((breaker.last_error for breaker in breakers if breaker.last_error), ""),
        )

    def _decision(self, reply: Any) -> Decision:
        if self.fallback.refused:
            self.fallback.accepted()
        return self.script.decision(reply)


class RedisGate:
    """One rule on one Redis, for threads."""

    in_process = False

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.plans = Plans(store, rule, on_store_error)
        self._store = store
        self._within: float | None = None  # seconds; None: the store's time-out

    def try_acquire(self, key: str, permits: int = 1) -> Decision:
        return run(self.plans.take(key, permits), self._ask)

    def peek(self, key: str, permits: int = 1) -> Decision:
        return run(self.plans.peek(key, permits), self._ask)

    def refund(self, key: str, permits: int = 1) -> None:
        run(self.plans.refund(key, permits), self._ask)

    def reset(self, key: str) -> None:
        run(self.plans.reset(key), self._ask)

    def store_health(self) -> StoreHealth:
        return self.plans.health(self._store.threads())

    def within(self, seconds: float) -> RedisGate:
        gate = copy.copy(self)
        gate._within = seconds
        return gate

    def _ask(self, call: Call) -> Any:
        return self._store.threads().ask(self.plans.script, call, self._within)


class AsyncRedisGate:
    """One rule on one Redis, for asyncio."""

    in_process = False

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.plans = Plans(store, rule, on_store_error)
        self._store = store
        self._within: float | None = None  # seconds; None: the store's time-out

    def try_acquire(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]:
        return arun(self.plans.take(key, permits), self._ask)

    def peek(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]:
        return arun(self.plans.peek(key, permits), self._ask)

    def refund(self, key: str, permits: int = 1) -> Coroutine[Any, Any, None]:
        return arun(self.plans.refund(key, permits), self._ask)

    def reset(self, key: str) -> Coroutine[Any, Any, None]:
        return arun(self.plans.reset(key), self._ask)

    def store_health(self) -> StoreHealth:
        return self.plans.health(self._store.loop())

    def within(self, seconds: float) -> AsyncRedisGate:
        gate = copy.copy(self)
        gate._within = seconds
        return gate

    def _ask(self, call: Call) -> Coroutine[Any, Any, Any]:
        return self._store.loop().ask(self.plans.script, call, self._within)
