"""Limits shared through Redis: one script and one round trip for each decision, by the server's clock."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Generator
from typing import Any

try:
    import redis
    import redis.asyncio
    from redis.exceptions import NoScriptError, RedisError
except ImportError as error:
    raise ImportError("a Redis store needs redis-py: pip install 'headgate[redis]'") from error

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision
from headgate.fallback import Fallback
from headgate.keys import check_key
from headgate.plan import arun, run
from headgate.redis.batch import Batcher
from headgate.redis.connect import Connections, async_pool, check_url
from headgate.redis.script import Call, Script
from headgate.rule import Rule, check_permits

Client = redis.Redis | redis.asyncio.Redis


class RedisStore:
    """One Redis, for limiters of either kind.

    redis      a URL, or a client of redis-py: a plain one serves `Limiter`, an asyncio one `AsyncLimiter`
    prefix     what every key starts with
    hash_keys  store a digest of the client's key instead of the key: shorter, and it shows nobody's address
    clock      tests only: this time instead of the server's
    """

    def __init__(
        self,
        redis: str | Client,
        *,
        prefix: str = "rate_limiter",
        hash_keys: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._source = _source(redis)
        self.prefix = _check_prefix(prefix)
        self.hash_keys = hash_keys
        self.clock = clock
        self._connections: Connections | None = None
        self._lock = threading.Lock()
        self._latest: Batcher | None = None
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher] = weakref.WeakKeyDictionary()

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

    def connections(self) -> Connections:
        """The connections for threads, made when they are first needed."""
        if self._connections is None:
            source = self._source
            assert not isinstance(source, redis.asyncio.ConnectionPool), "open() refused it"
            with self._lock:
                self._connections = self._connections or Connections(source)
        return self._connections

    def batcher(self) -> Batcher:
        """The running event loop's queue, made when it is first needed."""
        loop = asyncio.get_running_loop()
        latest = self._latest
        if latest is not None and latest.loop is loop:
            return latest
        batcher = self._batchers.get(loop)
        if batcher is None:
            source = self._source
            assert not isinstance(source, redis.ConnectionPool), "open_async() refused it"
            pool = async_pool(source) if isinstance(source, str) else source
            batcher = self._batchers[loop] = Batcher(pool, own=isinstance(source, str))
        self._latest = batcher
        return batcher

    def close(self) -> None:
        """Close the connections for threads; a client that was handed in keeps its own."""
        if self._connections:
            self._connections.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections, and those for threads."""
        batcher, self._latest = self._batchers.pop(asyncio.get_running_loop(), None), None
        if batcher:
            await batcher.aclose()
        self.close()


def _source(given: str | Client) -> str | redis.ConnectionPool | redis.asyncio.ConnectionPool:
    """Where connections come from: a URL, or the pool of somebody's client."""
    if isinstance(given, str):
        return check_url(given)
    if isinstance(given, redis.Redis | redis.asyncio.Redis):
        return given.connection_pool
    raise TypeError(f"RedisStore takes a URL or a client of redis-py, got {type(given).__name__} {given!r:.80}")


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
        try:
            reply = yield Call("take", key, permits)
        except _FAILURES as error:
            return self.fallback.take(key, permits, error)
        return self._decision(reply)

    def peek(self, key: str, permits: int) -> Generator[Call, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity, 0)
        try:
            reply = yield Call("peek", key, permits)
        except _FAILURES as error:
            return self.fallback.peek(key, permits, error)
        return self._decision(reply)

    def refund(self, key: str, permits: int) -> Generator[Call, Any, None]:
        key, permits = check_key(key), check_permits(permits)
        try:
            yield Call("refund", key, permits)
        except _FAILURES as error:
            self.fallback.refund(key, permits, error)

    def reset(self, key: str) -> Generator[Call, Any, None]:
        key = check_key(key)
        try:
            yield Call("reset", key, 1)
        except _FAILURES as error:
            self.fallback.reset(key, error)

    def _decision(self, reply: Any) -> Decision:
        if self.fallback.lost:
            self.fallback.found()
        return self.script.decision(reply)


class RedisGate:
    """One rule on one Redis, for threads."""

    in_process = False

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.plans = Plans(store, rule, on_store_error)
        self._store = store

    def try_acquire(self, key: str, permits: int = 1) -> Decision:
        return run(self.plans.take(key, permits), self._send)

    def peek(self, key: str, permits: int = 1) -> Decision:
        return run(self.plans.peek(key, permits), self._send)

    def refund(self, key: str, permits: int = 1) -> None:
        run(self.plans.refund(key, permits), self._send)

    def reset(self, key: str) -> None:
        run(self.plans.reset(key), self._send)

    def _send(self, call: Call) -> Any:
        script = self.plans.script
        connections = self._store.connections()
        connection = connections.borrow()
        try:
            connection.send_packed_command([script.call([call])], check_health=False)
            try:
                return connection.read_response()
            except NoScriptError:  # a new server, or its cache was flushed
                connection.send_packed_command([script.call([call], whole=True)], check_health=False)
                return connection.read_response()
        finally:
            connections.give_back(connection)


class AsyncRedisGate:
    """One rule on one Redis, for asyncio."""

    in_process = False

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.plans = Plans(store, rule, on_store_error)
        self._store = store

    def try_acquire(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]:
        return arun(self.plans.take(key, permits), self._send)

    def peek(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]:
        return arun(self.plans.peek(key, permits), self._send)

    def refund(self, key: str, permits: int = 1) -> Coroutine[Any, Any, None]:
        return arun(self.plans.refund(key, permits), self._send)

    def reset(self, key: str) -> Coroutine[Any, Any, None]:
        return arun(self.plans.reset(key), self._send)

    def _send(self, call: Call) -> Coroutine[Any, Any, Any]:
        return self._store.batcher().call(self.plans.script, call)
