"""Joint checks on Redis: one script whatever is asked, nothing written when denied; and over several stores."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from headgate import AsyncLimiter, Decision, HybridLimiter, Limiter
from headgate.joint import JointCheck, try_acquire_all, try_acquire_all_async
from headgate.stores import MemoryStore, RedisStore
from headgate.testing import ManualClock
from tests.support.callers import in_threads
from tests.support.clocks import until, until_async
from tests.support.proxy import FaultyProxy
from tests.support.quotas import LAWS, law
from tests.support.servers import Server
from tests.support.stores import OpenStores, WholeCluster
from tests.test_redis_trips import commands

WRITES = ("set", "hset", "setrange", "expire", "unlink", "del")


def limiters_of_all_kinds(store: Any, limit: int = 50, kind: Any = Limiter) -> list[Any]:
    """One of each algorithm with one quota, and one with several."""
    quotas = [f"{limit}/30d", [f"{limit}/30d", f"{2 * limit}/60d"]]
    return [
        kind(quota, store=store, name=f"{len(quota)}", on_store_error="raise", **law(name))
        for name in LAWS
        for quota in quotas
    ]


def states(server: Server) -> dict[str, Any]:
    """Everything that the server keeps, by name."""
    with redis.Redis(port=server.port) as client:
        return {name: client.dump(name) for name in server.names()}


def left(limiter: Limiter, key: str = "k") -> int:
    return limiter.peek(key, 0).remaining


# ------------------------------------------------------------------------------------------------------- one script


def test_one_command(any_redis_server: Server) -> None:
    """Fourteen limiters of all algorithms, with keys and permits of their own: one EVALSHA, granted or denied."""
    store = RedisStore(any_redis_server.url)
    limiters = limiters_of_all_kinds(store)
    checks = [JointCheck(limiter, f"key {number}", number + 1) for number, limiter in enumerate(limiters)]
    assert all(try_acquire_all(checks))  # the script is known now
    assert commands(any_redis_server, lambda: try_acquire_all(checks)) == ["EVALSHA"]
    assert [left(limiter, key) for limiter, key, _ in checks] == [50 - 2 * permits for _, _, permits in checks]
    denied: list[JointCheck[Limiter]] = [
        *checks,
        JointCheck(limiters[0], "another", 50),
        JointCheck(limiters[1], "another", 50),
    ]
    assert all(try_acquire_all(denied))
    assert commands(any_redis_server, lambda: try_acquire_all(denied)) == ["EVALSHA"]
    store.close()


async def test_awaited_together(redis_server: Server) -> None:
    """Joint checks that are awaited at the same time share round trips with each other and with single checks."""
    with FaultyProxy(redis_server.port) as proxy:
        store = RedisStore(proxy.url)
        first, second, *_ = limiters_of_all_kinds(store, 1000, AsyncLimiter)
        await try_acquire_all_async([JointCheck(first, "k"), JointCheck(second, "k")])
        before = proxy.trips
        calls = [try_acquire_all_async([JointCheck(first, f"k{i}", i + 1), JointCheck(second, "k")]) for i in range(20)]
        *made, single = await asyncio.gather(*calls, first.try_acquire("k"))
        assert [decisions[0].remaining for decisions in made] == [999 - i for i in range(20)]
        assert sorted(decisions[1].remaining for decisions in made) == list(range(979, 999))
        assert single.remaining == 998
        assert proxy.trips - before <= 2
        await store.aclose()


@pytest.mark.parametrize("refused_by", range(2 * len(LAWS)))
def test_a_refusal_writes_nothing(refused_by: int, redis_server: Server) -> None:
    """Whichever of the limiters refuses."""
    store = RedisStore(redis_server.url)
    limiters = limiters_of_all_kinds(store)
    assert all(try_acquire_all([JointCheck(limiter, "k", 3) for limiter in limiters]))
    assert limiters[refused_by].try_acquire("k", 47)
    before, writes = states(redis_server), {name: redis_server.calls(name) for name in WRITES}
    made = try_acquire_all([JointCheck(limiter, "k") for limiter in limiters])
    assert [number for number, decision in enumerate(made) if not decision] == [refused_by]
    assert {name: redis_server.calls(name) for name in WRITES} == writes
    assert states(redis_server) == before
    store.close()


@pytest.mark.parametrize("back", [0.000001, 1.0, 59.0, 61.0, 3600.0, 10_000_000.0])
@pytest.mark.parametrize("algorithm", [name for name in LAWS if name != "fixed_window"])  # which then has another name
def test_clock_that_steps_back(algorithm: str, back: float, redis_server: Server) -> None:
    """A state that lies ahead of the clock is read, and repaired, as by single checks, granted or denied."""
    before = RedisStore(redis_server.url, clock=ManualClock(1_700_000_000))
    after = RedisStore(redis_server.url, clock=ManualClock(1_700_000_000 - back))

    def limiter(store: RedisStore, name: str) -> Limiter:
        return Limiter(["10/minute", "20/hour"], store=store, name=name, on_store_error="raise", **law(algorithm))

    for permits in (1, 5, 10):
        for name in ("single", "joint"):
            limiter(before, name).reset("k")
            assert limiter(before, name).try_acquire("k", 6)
        expected = limiter(after, "single").try_acquire("k", permits)
        plenty = Limiter("1000/minute", store=after, name="plenty", on_store_error="raise")
        made = try_acquire_all([JointCheck(plenty, "k"), JointCheck(limiter(after, "joint"), "k", permits)])
        assert made[1] == expected
        assert all(made) == expected.allowed
        kept = states(redis_server)
        ours = {name.replace(":joint", ":single"): state for name, state in kept.items() if ":joint" in name}
        assert len(ours) == 2
        assert ours == {name: state for name, state in kept.items() if ":single" in name}
    for store in (before, after):
        store.close()


def test_flushed_script_cache(redis_server: Server) -> None:
    """A server that has forgotten the script is told it again."""
    store = RedisStore(redis_server.url)
    first, second, *_ = limiters_of_all_kinds(store)
    for spent in range(1, 4):
        redis_server.client().script_flush()
        assert all(try_acquire_all([JointCheck(first, "k"), JointCheck(second, "k")]))
        assert left(first) == 50 - spent
    store.close()


@pytest.mark.parametrize("hash_keys", [False, True])
def test_two_quotas_under_one_name(hash_keys: bool, redis_server: Server) -> None:
    """They mix, as single checks of them do, and what one call takes from the same state adds up."""
    store = RedisStore(redis_server.url, hash_keys=hash_keys)
    day, month = Limiter("10/30d", store=store), Limiter("20/60d", store=store)
    several = [Limiter(["10/30d", other], store=store, on_store_error="raise") for other in ("30/60d", "40/90d")]
    assert all(try_acquire_all([JointCheck(day, "k", 3), JointCheck(month, "k", 4)]))
    assert day.try_acquire("single", 3) and month.try_acquire("single", 4)
    assert (left(day), left(month)) == (left(day, "single"), left(month, "single"))
    assert left(day) == 3
    assert not all(try_acquire_all([JointCheck(day, "k", 3), JointCheck(month, "k", 1)]))
    assert all(try_acquire_all([JointCheck(one, "k", 5) for one in several]))
    assert [left(one) for one in several] == [0, 0]
    store.close()


@pytest.mark.parametrize("policy", ["allow", "deny"])
async def test_foreign_value(policy: Any, redis_server: Server) -> None:
    """A key of another type: the policies answer that call, nothing is spent, and other calls are not concerned."""
    redis_server.client().rpush("rate_limiter:token_bucket:{bad}", "not ours")
    store = RedisStore(redis_server.url)
    limiter, other = (
        AsyncLimiter("5/30d", store=store, on_store_error=policy),
        AsyncLimiter("9/30d", store=store, name="o"),
    )
    calls = [try_acquire_all_async([JointCheck(other, "k"), JointCheck(limiter, key)]) for key in ("a", "bad", "b")]
    a, bad, b = await asyncio.gather(*calls)
    assert [decision.degraded for decision in a + bad + b] == [False, False, True, True, False, False]
    assert all(a + b)
    assert all(bad) == (policy == "allow")
    assert (await other.peek("k", 0)).remaining == 7
    await store.aclose()


def test_time_limit(redis_server: Server) -> None:
    """The shortest time limit of the limiters is the call's."""
    with FaultyProxy(redis_server.port) as proxy:
        store = RedisStore(proxy.url)
        first, second = Limiter("5/30d", store=store), Limiter("5/30d", store=store, name="second")
        assert all(try_acquire_all([JointCheck(first, "k"), JointCheck(second, "k")]))
        proxy.hold = True
        begun = time.monotonic()
        made = try_acquire_all([JointCheck(first.with_timeout(19.0), "k"), JointCheck(second.with_timeout(0.05), "k")])
        assert time.monotonic() - begun < 15.0  # the store's own is 20
        assert all(decision.degraded for decision in made)
        proxy.hold = False
        store.close()


async def test_cancelled_in_mid_trip(redis_server: Server) -> None:
    """The replies are held back, the callers go away, and what was spent for them comes back."""
    with FaultyProxy(redis_server.port) as proxy:
        store = RedisStore(proxy.url)
        first = AsyncLimiter("100/30d", store=store, on_store_error="raise")
        second = AsyncLimiter(["90/30d", "80/60d"], store=store, algorithm="sliding_window", on_store_error="raise")
        await first.peek("k")
        proxy.hold = True
        before = redis_server.calls("evalsha")
        checks = [JointCheck(first, "k", 2), JointCheck(second, "other")]
        calls = [asyncio.create_task(try_acquire_all_async(checks)) for _ in range(30)]
        await until_async(lambda: redis_server.calls("evalsha") + redis_server.calls("eval") > before)
        for call in calls[:20]:
            call.cancel()
        results = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        proxy.hold = False
        granted = [result for result in await results if isinstance(result, list)]
        assert len(granted) == 10
        await until_async(lambda: proxy.under_way == 0)

        async def remaining() -> tuple[int, int]:
            return (await first.peek("k", 0)).remaining, (await second.peek("other", 0)).remaining

        for _ in range(1000):
            if await remaining() == (80, 70):
                break
        assert await remaining() == (80, 70)
        await store.aclose()


# ------------------------------------------------------------------------------------------------------------ Cluster


@pytest.fixture
def cluster(open_stores: OpenStores) -> WholeCluster:
    found = open_stores.empty("cluster")
    assert isinstance(found, WholeCluster)
    return found


def scripts_run(cluster: WholeCluster, work: Callable[[], object]) -> int:
    """How many calls of scripts *work* makes at all servers of the Cluster."""
    members = cluster.cluster.primaries()
    before = sum(member.calls("evalsha") + member.calls("eval") for member in members)
    work()
    return sum(member.calls("evalsha") + member.calls("eval") for member in members) - before


@pytest.mark.server
@pytest.mark.xdist_group("stores-cluster")
def test_slots(cluster: WholeCluster) -> None:
    """Keys that share a slot are one script; others one script for each slot, given back if a later one refuses."""
    store = RedisStore(cluster.url, timeout=20.0)
    limiters = limiters_of_all_kinds(store, limit=100)
    same = [JointCheck(limiter, "k") for limiter in limiters]
    assert all(try_acquire_all(same))  # the script is known now
    assert scripts_run(cluster, lambda: try_acquire_all(same)) == 1
    assert len({key_slot(key) for key in (b"a", b"b", b"c")}) == 3
    three = [JointCheck(limiters[number % 2], "abc"[number % 3], number + 1) for number in range(6)]
    assert all(try_acquire_all(three))
    assert scripts_run(cluster, lambda: try_acquire_all(three)) == 3
    assert limiters[0].try_acquire("c", 92)
    made = try_acquire_all(three)
    assert [decision.allowed for decision in made] == [True, True, False, True, True, True]
    for (limiter, key, _), decision in zip(three, made, strict=True):
        now = limiter.peek(key, 0)
        assert (decision.remaining, decision.limit) == (now.remaining, now.limit)
    assert [left(limiters[number % 2], "abc"[number % 3]) for number in range(6)] == [98, 96, 2, 92, 90, 88]
    store.close()


@pytest.mark.server
@pytest.mark.xdist_group("stores-cluster")
def test_cancelled_between_slots(cluster: WholeCluster) -> None:
    """A task that is cancelled after the first slots gives back what it took there."""

    async def cancel() -> tuple[int, ...]:
        store = RedisStore(cluster.url, timeout=20.0)
        limiter = AsyncLimiter("1000/30d", store=store, on_store_error="raise")
        other = AsyncLimiter("1000/30d", store=store, name="other", algorithm="gcra", on_store_error="raise")
        checks = [JointCheck(one, key) for key in "abcdefgh" for one in (limiter, other)]
        await try_acquire_all_async(checks)
        granted = 1
        for number in range(64):
            trips = store.async_executor().round_trips + number % 8
            task = asyncio.create_task(try_acquire_all_async(checks))
            await until_async(lambda trips: store.async_executor().round_trips > trips, trips)
            task.cancel()
            for _ in range(number // 8):
                await asyncio.sleep(0)
            task.cancel()  # again, while it gives back
            granted += not isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)

        async def spent() -> set[int]:
            return {1000 - (await one.peek(key, 0)).remaining for one, key, _ in checks}

        for _ in range(200):
            if await spent() == {granted}:
                break
            await asyncio.sleep(0.01)
        result = await spent()
        await store.aclose()
        return granted, *result

    granted, *spent = asyncio.run(cancel())
    assert spent == [granted]


# ----------------------------------------------------------------------------------------------------- several stores


class Stores:
    """A Redis limiter, another through a store object of its own on the same state, and one in memory."""

    def __init__(self, url: str, limit: int = 50) -> None:
        self.stores = [RedisStore(url), RedisStore(url)]
        self.shared, self.again = (
            Limiter(f"{limit}/30d", store=store, on_store_error="raise") for store in self.stores
        )
        self.memory = Limiter(f"{limit}/30d", store=MemoryStore())

    def close(self) -> None:
        for store in self.stores:
            store.close()


def test_several_stores(redis_server: Server) -> None:
    """A refusal that can be seen beforehand writes nothing anywhere; any other is given back."""
    stores = Stores(redis_server.url)
    checks = [
        JointCheck(stores.shared, "k", 20),
        JointCheck(stores.memory, "k", 30),
        JointCheck(stores.shared, "other", 5),
    ]
    made = try_acquire_all(checks)
    assert [(decision.allowed, decision.remaining) for decision in made] == [(True, 30), (True, 20), (True, 45)]
    before = states(redis_server)
    made = try_acquire_all(checks)
    assert [(decision.allowed, decision.remaining) for decision in made] == [(True, 30), (False, 20), (True, 45)]
    assert states(redis_server) == before
    both = [
        JointCheck(stores.shared, "k", 16),
        JointCheck(stores.memory, "k"),
        JointCheck(stores.again, "k", 16),
    ]  # 32 of 30
    made = try_acquire_all(both)
    assert [(decision.allowed, decision.remaining) for decision in made] == [(True, 30), (True, 20), (False, 14)]
    assert (left(stores.shared), left(stores.memory)) == (30, 20)
    stores.close()


def test_several_stores_at_once(redis_server: Server) -> None:
    """From many threads: never too many, and what was given back is back."""
    stores = Stores(redis_server.url)
    checks = [JointCheck(stores.memory, "k"), JointCheck(stores.shared, "k"), JointCheck(stores.again, "k")]
    granted = sum(in_threads(16, lambda: sum(all(try_acquire_all(checks)) for _ in range(5))))
    assert 1 <= granted <= 25
    assert (left(stores.memory), left(stores.shared)) == (50 - granted, 50 - 2 * granted)
    stores.close()


def test_local_grants_go_back(redis_server: Server, mortal_server: Server) -> None:
    """What `local` granted in an outage of one store is forgotten, with its debt, if another store refuses."""
    stores = Stores(redis_server.url)
    failing = Limiter("50/30d", store=mortal_server.url, on_store_error="local")
    assert failing.try_acquire("k")
    mortal_server.kill()
    until(lambda: failing.peek("k").degraded and failing.store_health().state == "open")
    made = try_acquire_all(
        [JointCheck(failing, "k", 9), JointCheck(stores.shared, "k", 30), JointCheck(stores.again, "k", 30)]
    )
    assert [decision.allowed for decision in made] == [True, True, False]
    assert made[0].degraded
    assert left(failing) == 49
    mortal_server.restart()
    until(lambda: not failing.peek("k").degraded)
    assert failing.try_acquire("k").remaining == 49, "it came back empty, and no debt is charged"
    failing.close()
    stores.close()


def test_hybrid(redis_server: Server) -> None:
    """A limiter with leases beside one without."""
    store = RedisStore(redis_server.url)
    with HybridLimiter("50/30d", store=store, name="hybrid") as hybrid:
        strict = Limiter("5/30d", store=store, name="strict", on_store_error="raise")
        checks: list[JointCheck[Limiter]] = [JointCheck(hybrid, "k", 2), JointCheck(strict, "k")]
        granted = [all(try_acquire_all(checks)) for _ in range(8)]
        assert granted == [True] * 5 + [False] * 3
        assert left(hybrid) == 40
    store.close()


async def test_stores_of_asyncio(redis_server: Server) -> None:
    """The same for tasks; one that is cancelled in the second step gives back the first."""
    with FaultyProxy(redis_server.port) as proxy:
        slow = AsyncLimiter("50/30d", store=proxy.url, on_store_error="raise")
        quick = AsyncLimiter("50/30d", store=redis_server.url, name="quick", on_store_error="raise")
        memory = AsyncLimiter("50/30d")
        checks = [JointCheck(memory, "k"), JointCheck(quick, "k"), JointCheck(slow, "k")]
        made: list[Decision] = await try_acquire_all_async(checks)
        assert [decision.remaining for decision in made] == [49, 49, 49]
        before = redis_server.calls("evalsha")
        proxy.delay = 0.2  # longer than a step of the others takes
        task = asyncio.create_task(try_acquire_all_async(checks))
        await until_async(lambda: redis_server.calls("evalsha") >= before + 4)  # two looks and two takes
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proxy.delay = 0.0
        for limiter in (memory, quick, slow):
            for _ in range(1000):
                if (await limiter.peek("k", 0)).remaining == 49:
                    break
            assert (await limiter.peek("k", 0)).remaining == 49
        for limiter in (slow, quick):
            await limiter.aclose()
