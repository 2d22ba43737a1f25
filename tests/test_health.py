"""`RedisStore.health()`: what the server says of itself, in words, without waiting for it."""

import asyncio
import os
import signal
import time

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.stores.redis import RedisStore
from tests.support.pulse import Pulse
from tests.support.servers import Server


@pytest.mark.usefixtures("patient_health")
def test_a_healthy_one(any_redis_server: Server) -> None:
    store = RedisStore(any_redis_server.url)
    with Limiter("5/minute", store=store) as limiter:
        limiter.try_acquire("k")
        begun = time.monotonic()
        health = store.health()
        assert (health.healthy, health.reason, health.role) == (True, "ok", "master")
        assert health.version[0].isdigit()
        assert 0 < health.latency < 10
        assert health.connections == {"in_use": 0, "idle": 1, "waiting": 0}
        assert store.health() is health or time.monotonic() - begun > 1.0, "asked again at once: the same answer"
    store.close()


@pytest.mark.usefixtures("patient_health")
def test_a_healthy_one_async(redis_server: Server) -> None:
    async def check() -> None:
        store = RedisStore(redis_server.url)
        assert (await store.ahealth()).healthy
        await store.aclose()

    asyncio.run(check())


def test_one_that_hangs_and_one_that_is_gone(mortal_server: Server) -> None:
    store = RedisStore(mortal_server.url, timeout=0.1)
    os.kill(mortal_server.process.pid, signal.SIGSTOP)
    with Pulse() as pulse:
        begun = time.monotonic()
        health = store.health()
        took = time.monotonic() - begun
    os.kill(mortal_server.process.pid, signal.SIGCONT)
    assert (health.healthy, health.reason) == (False, "down")
    assert took < 2.0 + pulse.slack
    mortal_server.kill()
    gone = RedisStore(mortal_server.url).health()
    assert (gone.healthy, gone.reason) == (False, "down")
    assert "refused" in gone.problems[0]
    store.close()


@pytest.mark.usefixtures("patient_health")
def test_settings_that_will_make_trouble(mortal_server: Server) -> None:
    client = mortal_server.client()
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    store = RedisStore(mortal_server.url)
    health = store.health()
    assert health.healthy
    assert any("noeviction" in problem for problem in health.problems)
    store.close()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")
    full = RedisStore(mortal_server.url)
    assert full.health().reason == "out of memory"
    full.close()


@pytest.mark.usefixtures("patient_health")
def test_a_replica_makes_no_decisions(mortal_server: Server, redis_server: Server) -> None:
    mortal_server.client().replicaof("127.0.0.1", str(redis_server.port))
    store = RedisStore(mortal_server.url)
    assert (store.health().healthy, store.health().reason) == (False, "read-only")
    store.close()


@pytest.mark.usefixtures("patient_health")
def test_by_the_limiter(redis_server: Server) -> None:
    async def check() -> None:
        async with AsyncLimiter("5/minute", store=redis_server.url) as limiter:
            assert (await limiter.health()).role == "master"
        async with AsyncLimiter("5/minute") as limiter:
            assert (await limiter.health()).healthy

    with Limiter("5/minute", store=redis_server.url) as limiter:
        assert limiter.health().healthy
    assert Limiter("5/minute").health().role == "memory"
    asyncio.run(check())
