"""What is particular to Redis: errors that a server answers with, what it says of its health, how often it is asked."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis.asyncio

from headgate.stores import RedisStore
from tests.support.callers import Callers
from tests.support.clocks import PATIENCE, WatchedClock, until, until_async
from tests.support.pulse import Pulse
from tests.support.servers import Server, quiet_port
from tests.support.stores import OneServer

KEY = "rate_limiter:token_bucket:{k}"


# -------------------------------------------------------------------------------------- a server that refuses to decide


@contextmanager
def out_of_memory(client: Any) -> Iterator[None]:
    client.config_set("maxmemory", "1")
    yield
    client.config_set("maxmemory", "0")


@contextmanager
def read_only(client: Any) -> Iterator[None]:
    """The server has become a replica."""
    client.replicaof("127.0.0.1", str(quiet_port()))
    yield
    client.replicaof("NO", "ONE")


@contextmanager
def foreign_value(client: Any) -> Iterator[None]:
    """Something else is kept under our key."""
    client.rename(KEY, "{k}:ours")
    client.rpush(KEY, "not ours")
    yield
    client.rename("{k}:ours", KEY)


@pytest.mark.parametrize("refusal", [out_of_memory, read_only, foreign_value])
def test_refusals(refusal: Callable[[Any], Any], redis_callers: Callers) -> None:
    """An error that the server answers with is answered by the policy, until the server decides again."""
    store = redis_callers.store
    assert isinstance(store, OneServer)
    limiter = redis_callers.limiter("3/30d", on_store_error="allow")
    with store.server.client() as client:
        assert not limiter.try_acquire("k").degraded
        with refusal(client):
            decision = limiter.try_acquire("k")
            assert decision.allowed and decision.degraded
        assert limiter.try_acquire("k").remaining == 1


# --------------------------------------------------------------------------------------------------------------- health


def test_health(any_redis_server: Server) -> None:
    """What the server says of itself; asked again at once, the same answer."""
    with Callers(OneServer(any_redis_server), "sync") as callers:
        limiter = callers.limiter("5/minute")
        limiter.try_acquire("k")
        begun = time.monotonic()
        health = limiter.health()
        assert (health.healthy, health.reason, health.role) == (True, "ok", "master")
        assert health.version[0].isdigit()
        assert 0 < health.latency < 10
        assert health.connections == {"in_use": 0, "idle": 1, "waiting": 0}
        assert limiter.health() is health or time.monotonic() - begun > 1.0


def test_health_of_a_silent_server(failing_callers: Callers) -> None:
    limiter = failing_callers.limiter("5/minute", timeout=0.1)
    with failing_callers.store.silent(), Pulse() as pulse:
        begun = time.monotonic()
        health = limiter.health()
        took = time.monotonic() - begun
    assert (health.healthy, health.reason) == (False, "down")
    assert took < 2.0 + pulse.slack


def test_health_names_what_is_wrong(mortal_server: Server, redis_server: Server) -> None:
    """Settings that will make trouble, memory that is full, a replica, a server that is gone."""

    def health() -> Any:
        store = RedisStore(mortal_server.url)
        try:
            return store.health()
        finally:
            store.close()

    client = mortal_server.client()
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    assert health().healthy
    assert any("noeviction" in problem for problem in health().problems)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")
    assert health().reason == "out of memory"
    client.config_set("maxmemory", "0")
    client.replicaof("127.0.0.1", str(redis_server.port))
    assert (health().healthy, health().reason) == (False, "read-only")
    mortal_server.kill()
    assert "refused" in health().problems[0]


def test_health_leaves_no_connection(redis_server: Server) -> None:
    """A look at the server of a client that was handed in closes the connection that it made."""

    async def check() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.bare_url) as client:
            await client.ping()
            before = len(admin.client_list())
            store = RedisStore(client)
            assert (await store.ahealth()).healthy
            await until_async(lambda: len(admin.client_list()) == before)

    with redis_server.client() as admin:
        asyncio.run(check())


# -------------------------------------------------------------------------------------------------------------- waiting


def test_calls_of_waiters(redis_callers: Callers) -> None:
    """Eight wait in line: two questions each, one when first in line and one when the time has come."""
    clock = WatchedClock()
    store = redis_callers.store
    assert isinstance(store, OneServer)
    limiter = redis_callers.limiter("60/minute burst 1", clock=clock)
    limiter.try_acquire("k")
    limiter.try_acquire("k")  # the script is known now
    before = store.server.calls("evalsha")
    waiters = [redis_callers.wait_in_line(clock, limiter) for _ in range(8)]
    assert store.server.calls("evalsha") - before == 1, "only the first in line asks"
    for served, waiter in enumerate(waiters):
        until(lambda count: clock.naps.count(1.0) == count, served + 1)
        for _ in range(10):
            clock.advance(0.1)
        assert waiter.result(PATIENCE)
    assert store.server.calls("evalsha") - before <= 2 * 8
