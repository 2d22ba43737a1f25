"""`AsyncHybridLimiter` on a real Redis."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from headgate import AsyncHybridLimiter, InvalidKey, PermitsExceedLimit, RateLimited
from headgate.rule import AlgorithmName
from headgate.stores.redis import RedisStore
from tests.hybrid.test_limiter import KINDS, SLOW, out
from tests.support.clocks import PATIENCE, until_async
from tests.support.hybrid_stores import AsyncHeldStore
from tests.support.servers import Server, free_port


@pytest.mark.parametrize("kind", KINDS)
async def test_quota(kind: AlgorithmName, redis_server: Server) -> None:
    """Exactly the quota is allowed, and closing gives everything back."""
    async with AsyncHybridLimiter(SLOW, algorithm=kind, store=redis_server.url) as limiter:
        decisions = [await limiter.try_acquire("k") for _ in range(300)]
    assert all(decisions[:100]) and not any(decisions[100:])
    assert out(redis_server, kind=kind) == 0


async def test_concurrent_tasks(redis_server: Server) -> None:
    """Fifty tasks together get the quota, no more and no less, mostly from the lease."""
    async with AsyncHybridLimiter("3000/360d", store=redis_server.url) as limiter:

        async def work() -> int:
            count = 0
            for _ in range(100):
                count += (await limiter.try_acquire("k")).allowed
                await asyncio.sleep(0)
            return count

        assert sum(await asyncio.gather(*[work() for _ in range(50)])) == 3000
        assert limiter.stats().local_ratio > 0.9


async def test_methods(redis_server: Server) -> None:
    """peek, refund, reset, acquire and limit work as those of AsyncLimiter."""
    async with AsyncHybridLimiter(SLOW, store=redis_server.url) as limiter:
        assert await limiter.try_acquire("k", 100)
        assert not await limiter.try_acquire("k")
        assert not await limiter.peek("k")
        await limiter.refund("k", 3)
        assert [bool(await limiter.try_acquire("k")) for _ in range(4)] == [True, True, True, False]
        await limiter.reset("k")
        assert (await limiter.peek("k", 0)).remaining == 100
        with pytest.raises(PermitsExceedLimit):
            await limiter.try_acquire("k", 101)
        with pytest.raises(InvalidKey):
            await limiter.try_acquire("")
        assert limiter.store_health().state == "closed"
    async with AsyncHybridLimiter("20/second burst 1", store=redis_server.url, name="waits") as limiter:
        for _ in range(3):
            await limiter.acquire("k", timeout=30)
    async with AsyncHybridLimiter("1/day", store=redis_server.url, name="refuses") as limiter:
        async with limiter.limit("k"):
            pass
        with pytest.raises(RateLimited):
            async with limiter.limit("k"):
                pass


async def test_close_releases(redis_server: Server) -> None:
    """aclose() gives the lease back: Redis misses only what was spent."""
    limiter = AsyncHybridLimiter("1000/day", store=redis_server.url)
    spent = 0
    while limiter.stats().held < 2:
        spent += (await limiter.try_acquire("k")).allowed
        await asyncio.sleep(0)
    await limiter.aclose()
    assert out(redis_server) == 0
    async with AsyncHybridLimiter("1000/day", store=redis_server.url) as other:
        assert (await other.peek("k", 0)).remaining == 1000 - spent


def test_several_loops(redis_server: Server) -> None:
    """A limiter can be used in one event loop after the other; they share the quota."""
    limiter = AsyncHybridLimiter("100/day", store=redis_server.url)

    async def some() -> int:
        many = sum([bool(await limiter.try_acquire("k")) for _ in range(40)])
        await limiter.aclose()
        return many

    assert [asyncio.run(some()) for _ in range(3)] == [40, 40, 20]


async def test_cancelled_waiter(redis_server: Server) -> None:
    """A caller that is cancelled while it waits loses no permits: they come back."""
    store = AsyncHeldStore(redis_server.url)
    store.released = asyncio.Event()
    limiter = AsyncHybridLimiter(SLOW, store=store)
    asked = asyncio.create_task(limiter.try_acquire("k", 100))
    await until_async(lambda: redis_server.names())
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    store.released.set()
    async with asyncio.timeout(PATIENCE):  # until the permits of the cancelled call have come back
        while True:
            if await limiter.try_acquire("k", 100):
                break
            await asyncio.sleep(0.001)
    await limiter.aclose()
    await store.aclose()


async def test_warm_key_is_synchronous(redis_server: Server) -> None:
    """A decision from a lease never yields to the event loop."""
    async with AsyncHybridLimiter("1000000/second", store=redis_server.url) as limiter:
        while limiter.stats().held < 300:
            await limiter.try_acquire("k")
            await asyncio.sleep(0)
        for _ in range(300):
            with pytest.raises(StopIteration) as done:
                limiter.try_acquire("k").send(None)
            assert done.value.value.allowed


async def test_reuse_after_close(redis_server: Server) -> None:
    """A closed limiter can be used again, keeps its counters, and leaves no task behind."""
    limiter = AsyncHybridLimiter("1000/day", store=redis_server.patient_url)
    for turn in (1, 2):
        while limiter.stats().held < 2:
            assert await limiter.try_acquire("k")
            await asyncio.sleep(0)
        assert out(redis_server) > 0
        asked = limiter.stats().local + limiter.stats().remote
        await limiter.aclose()
        assert out(redis_server) == 0, f"closed, turn {turn}"
        assert limiter.stats().local + limiter.stats().remote == asked, "and what it did is not forgotten"
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left running"


async def test_shared_trips(redis_server: Server) -> None:
    """Limiters on one store share its manager, so that simultaneous calls take two trips at most."""
    store = RedisStore(redis_server.patient_url)
    limiters = [AsyncHybridLimiter("1000/second", store=store, name=f"n{number}") for number in range(10)]
    await asyncio.gather(*[limiter.try_acquire("k") for limiter in limiters])
    loop = asyncio.get_running_loop()
    assert len({limiter.store.loops[loop].manager for limiter in limiters}) == 1
    assert limiters[0].stats().trips <= 2, "calls at the same time travel together"
    await limiters[0].aclose()
    assert (await limiters[1].try_acquire("other")).allowed, "the others go on"
    for limiter in limiters[1:]:
        await limiter.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await store.aclose()


async def test_cancelled_trip(redis_server: Server) -> None:
    """A trip that is cancelled before it begins leaves no waiter and no lease in flight."""
    limiter = AsyncHybridLimiter("1000/day", store=redis_server.patient_url, on_store_error="deny")
    asked = asyncio.create_task(limiter.try_acquire("k"))
    backend: Any = limiter._backend
    manager = backend.leases().manager
    while not manager.trip_under_way:  # noqa: ASYNC110 - the very next turn, before the trip has its own
        await asyncio.sleep(0)
    await manager.stop()
    assert not manager.trip_under_way
    assert (await asyncio.wait_for(asked, PATIENCE)).degraded, "it is answered, by the policy"
    assert not any(lease.in_flight for lease in backend.leases().leases.values())
    await limiter.aclose()


async def test_collected_limiter(redis_server: Server) -> None:
    """A limiter that is garbage collected gives its leases back and leaves no task behind."""
    store = RedisStore(redis_server.patient_url)
    limiter = AsyncHybridLimiter("1000/day", store=store)
    while limiter.stats().held < 2:
        assert await limiter.try_acquire("k")
        await asyncio.sleep(0)
    del limiter
    gc.collect()
    await until_async(lambda: out(redis_server) == 0)
    await until_async(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    await store.aclose()


async def used(limiter: AsyncHybridLimiter) -> str:
    await limiter.try_acquire("k")
    state = limiter.store_health().state
    await limiter.aclose()
    return state


def test_collected_after_an_outage() -> None:
    """The error that a limiter remembers of an outage does not keep alive what the callers knew, itself included."""

    def outage() -> weakref.ref[AsyncHybridLimiter]:
        limiter = AsyncHybridLimiter("5/second", store=f"redis://127.0.0.1:{free_port()}")
        assert asyncio.run(used(limiter)) == "open"
        return weakref.ref(limiter)

    limiter = outage()
    gc.collect()
    assert limiter() is None


def test_store_health(redis_server: Server) -> None:
    """store_health() answers inside and outside of an event loop."""
    limiter = AsyncHybridLimiter("5/second", store=redis_server.patient_url)
    assert limiter.store_health().state == "closed", "it was never asked"
    assert asyncio.run(used(limiter)) == "closed"
    assert limiter.store_health().state == "closed"
    away = AsyncHybridLimiter("5/second", store="redis://127.0.0.1:1")
    assert asyncio.run(used(away)) == "open"
    assert away.store_health().state == "open" and "127.0.0.1:1" in away.store_health().last_error
