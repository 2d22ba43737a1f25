"""`HybridLimiter` on several stores: real servers that are killed, frozen and restarted empty."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import AsyncHybridLimiter, HybridLimiter, StoreUnavailable
from headgate.hybrid import several_leases
from headgate.rule import AlgorithmName, OnStoreError
from headgate.stores import RedisStore, SeveralStore
from headgate.testing import ManualClock
from tests.support.clocks import until
from tests.support.hybrid_exact import overdrawn
from tests.support.postgres import PostgresServer
from tests.support.servers import KINDS, Server, quiet_port

pytestmark = pytest.mark.xdist_group("several")

SECONDS = float(os.environ.get("HEADGATE_SEVERAL_SECONDS", "3"))
QUOTA = "100/30d"
A, B, C = (f"redis://127.0.0.1:1/{number}" for number in range(3))


@pytest.fixture(scope="module")
def trio() -> Iterator[list[Server]]:
    servers = [Server(KINDS[0], port=quiet_port) for _ in range(3)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def three(trio: list[Server]) -> list[Server]:
    """Three servers that run and are empty."""
    for server in trio:
        if server.process.poll() is not None:
            server.restart()
        until(server._answers)
        server.flush()
    return trio


def left(server: Server | PostgresServer, key: str = "k", quota: str = QUOTA) -> int:
    """What one store alone says."""
    with HybridLimiter(quota, store=server.patient_url, on_store_error="raise") as limiter:
        return limiter.peek(key, 0).remaining


def urls(servers: list[Server]) -> list[str]:
    return [server.url for server in servers]


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("store", "options", "words"),
    [
        ([A, B, C], {}, "needs agree='majority'"),
        ([A, B, C], {"agree": "first", "accuracy": "low"}, "takes accuracy='high', got 'low'"),
        (A, {"agree": "majority"}, "is for a list"),
        ([A, B, C], {"agree": "most"}, "agree must be 'first' or 'majority', got 'most'"),
        ([A], {"agree": "majority"}, "list of one store; give the store itself"),
        ([A, B, "memory://"], {"agree": "majority"}, "on_store_error='local'"),
        ([A, B, B], {"agree": "majority"}, "is in the list twice"),
        ([A, B, C], {"agree": "majority", "home": A, "region": "eu"}, "with a home takes one store"),
        ([A, B, C], {"agree": "majority", "accuracy": "low"}, "takes accuracy='high', got 'low'"),
        ([A, B, "headgate://127.0.0.1:1"], {"agree": "majority"}, "store 3 of the list is ServiceStore"),
        ([A, B, RedisStore("redis+cluster://127.0.0.1:1")], {"agree": "majority"}, "store 3 of the list is a Redis Cl"),
    ],
)
def test_wrong_arguments(store: Any, options: dict[str, Any], words: str) -> None:
    """An error says what was wrong, and what would be right."""
    with pytest.raises(ValueError, match=words):
        HybridLimiter("5/minute", store=store, **options)


# ------------------------------------------------------------------------------------------------------------ majority


@pytest.mark.parametrize("kind", ["token_bucket", "fixed_window", "sliding_window_counter"])
def test_exactly_the_limit(kind: AlgorithmName, three: list[Server]) -> None:
    """Two limiters on a store of their own together get exactly the limit; close gives the rest back at all stores."""
    store = SeveralStore(urls(three), "majority")
    limiters = [HybridLimiter(QUOTA, algorithm=kind, store=each, on_store_error="raise") for each in (store, store)]
    limiters.append(HybridLimiter(QUOTA, algorithm=kind, store=urls(three), agree="majority", on_store_error="raise"))
    spent = sum(bool(limiters[turn % 3].try_acquire("k")) for turn in range(30))
    assert spent == 30
    limiters[0].close()
    limiters[2].close()

    def all_spent() -> bool:
        nonlocal spent
        spent += bool(limiters[1].try_acquire("k"))
        return spent == 100

    until(all_spent)
    assert not limiters[1].try_acquire("k")
    limiters[1].close()
    store.close()
    for server in three:
        with HybridLimiter(QUOTA, algorithm=kind, store=server.patient_url, on_store_error="raise") as alone:
            assert alone.peek("k", 0).remaining == 0


async def test_calls_for_asyncio(three: list[Server]) -> None:
    """Tasks get the limit and no more; peek, refund and reset; aclose gives back what is held, at all stores."""
    async with AsyncHybridLimiter(QUOTA, store=urls(three), agree="majority", on_store_error="raise") as limiter:
        made = await asyncio.gather(*[limiter.try_acquire("k") for _ in range(150)])
        assert sum(map(bool, made)) == 100
        assert await limiter.reset("k") and (await limiter.peek("k", 0)).remaining == 100
        while limiter.stats().held < 2:
            assert await limiter.try_acquire("k")
            await asyncio.sleep(0)
        spent = 100 - (await limiter.peek("k", 0)).remaining
    assert [await asyncio.to_thread(left, server) for server in three] == [100 - spent] * 3


def test_ending_loop_releases(three: list[Server]) -> None:
    """An event loop that ends as it should gives its leases back at all stores, without aclose()."""

    async def use() -> int:
        limiter, spent = AsyncHybridLimiter(QUOTA, store=urls(three), agree="majority"), 0
        while limiter.stats().held < 2:
            spent += (await limiter.try_acquire("k")).allowed
            await asyncio.sleep(0)
        return spent

    spent = asyncio.run(use())
    assert [left(server) for server in three] == [100 - spent] * 3


def test_stores_die_in_turn(three: list[Server]) -> None:
    """Each store is killed and comes back empty; a key keeps its count, as the others tell, and all is used."""
    quota, limit = "20000/30d", 20_000
    with HybridLimiter(quota, store=urls(three), agree="majority", on_store_error="raise") as limiter:
        spent = sum(bool(limiter.try_acquire("k", 100)) * 100 for _ in range(20))
        for server in three:
            server.kill()
            spent += sum(bool(limiter.try_acquire("k", 100)) * 100 for _ in range(20))
            server.restart()

            def level(server: Server = server) -> bool:
                nonlocal spent
                spent += bool(limiter.try_acquire("k"))
                return 0 < left(server, "k", quota) <= limit - spent

            until(level)
        until(lambda: limiter.stats().backend == "up" and len({left(server, "k", quota) for server in three}) == 1)

        def all_spent() -> bool:
            nonlocal spent
            spent += sum(bool(limiter.try_acquire("k")) for _ in range(1000))
            return spent >= limit - 100

        until(all_spent)
        assert spent <= limit


@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_too_few_answer(policy: OnStoreError, three: list[Server]) -> None:
    """With two of three gone `on_store_error` answers; when they are back, what it granted is charged at all stores."""
    with HybridLimiter(QUOTA, store=urls(three), agree="majority", on_store_error=policy) as limiter:
        assert limiter.try_acquire("k", 10).remaining == 90
        three[1].kill()
        three[2].kill()
        if policy == "raise":
            with pytest.raises(StoreUnavailable, match="1 of 3 stores answered and it takes 2"):
                limiter.try_acquire("k", 80)
            return
        made = limiter.try_acquire("k", 80)
        assert made.degraded and made.allowed is (policy == "allow")
        for server in three[1:]:
            server.restart()
        until(lambda: not limiter.try_acquire("k", 90).degraded)
        if policy == "allow":
            until(lambda: not limiter.try_acquire("k") and max(left(server) for server in three) <= 20)


def test_redis_and_postgresql(three: list[Server], postgres_server: PostgresServer) -> None:
    """Stores may be of different kinds; one of each can be gone."""
    quota = "1000000/30d"
    stores = [three[0].url, postgres_server.url, three[1].url]
    with HybridLimiter(quota, store=stores, agree="majority", on_store_error="raise") as limiter:
        assert limiter.try_acquire("k", 300_000).remaining == 700_000
        three[0].kill()
        assert limiter.try_acquire("k", 300_000).remaining == 400_000
        assert not limiter.try_acquire("k", 500_000)
        three[0].restart()

        def level() -> bool:
            assert limiter.try_acquire("k")
            return left(three[0], "k", quota) <= 400_000

        until(level)
        three[1].kill()
        assert not limiter.try_acquire("k", 500_000)
        until(lambda: limiter.try_acquire("k", 300_000).allowed)
    assert 0 < left(postgres_server, "k", quota) < 100_000


@pytest.mark.store_timeout(0.3)
def test_frozen(three: list[Server]) -> None:
    """A store that stands still delays three trips by its time-out, and then none."""
    with HybridLimiter("1000000/30d", store=urls(three), agree="majority", on_store_error="raise") as limiter:
        assert limiter.try_acquire("k")
        os.kill(three[2].process.pid, signal.SIGSTOP)
        try:
            store = limiter.store.store
            assert isinstance(store, SeveralStore)
            until(lambda: limiter.try_acquire("k", 1000).allowed and store.health().problems != ())
            begun = time.monotonic()
            assert all(limiter.try_acquire(f"k{number}").allowed for number in range(20))
            assert time.monotonic() - begun < 20 * 0.3
        finally:
            os.kill(three[2].process.pid, signal.SIGCONT)


@pytest.mark.store_timeout(None)
@pytest.mark.bounded(180)
async def test_one_killed_at_random(three: list[Server]) -> None:
    """One of three stores is killed every second or so: never over, and callers get answers."""
    choose = random.Random(5)
    rate, burst, kills = 200, 20, 0
    grants: list[tuple[int, int]] = []
    store = [server.bare_url + "?timeout=1&connect_timeout=1" for server in three]
    stop = time.monotonic() + SECONDS

    async def ask(limiter: AsyncHybridLimiter) -> None:
        while time.monotonic() < stop:
            begun = time.monotonic_ns()
            if await limiter.try_acquire("k"):
                grants.append((begun, time.monotonic_ns()))
            await asyncio.sleep(0.02)

    async def kill() -> None:
        nonlocal kills
        while time.monotonic() < stop - 1.4:
            server = choose.choice(three)
            await asyncio.sleep(0.6)
            server.kill()
            await asyncio.sleep(0.2 + 0.2 * choose.random())
            server.process = server._spawn()  # not in a thread: a server ends with the thread that started it
            await asyncio.sleep(1.4)  # every process reports to it, and it is compared
            kills += 1

    limiters = [
        AsyncHybridLimiter(f"{rate}/second burst {burst}", store=store, agree="majority", on_store_error="deny")
        for _ in range(4)
    ]
    await asyncio.gather(kill(), *[ask(limiter) for limiter in limiters * 4])
    degraded = sum(limiter.stats().degraded for limiter in limiters)
    for limiter in limiters:
        await limiter.aclose()
    assert kills
    assert overdrawn(burst, rate, grants) == 0
    exact = burst + rate * (grants[-1][1] - grants[0][0]) / 1e9
    print(f"{len(grants)} grants, {len(grants) / exact:.4f} of an exact limiter's; {kills} kills, {degraded} degraded")
    assert len(grants) >= (0.8 * exact if SECONDS >= 60 else 1)


# ------------------------------------------------------------------------------------------------- what is kept of keys


def test_a_key_that_was_given_back_is_charged(three: list[Server]) -> None:
    """A store that was away hears, when another key is used, what was spent of a key that the process has given up."""
    with HybridLimiter(QUOTA, store=urls(three), agree="majority", on_store_error="raise") as limiter:
        leases = limiter._backend.manager.ledgers
        assert isinstance(leases, several_leases.SeveralLeases)
        three[2].kill()
        assert limiter.try_acquire("k", 10)
        limiter._backend.release_all()
        until(lambda: not limiter._backend.is_releasing())
        assert len(leases._owed) == 1 and left(three[0]) == 90
        three[2].restart()

        def charged() -> bool:
            limiter.peek("another")
            limiter.try_acquire("another")
            return not leases._owed and left(three[2]) == 90

        until(charged)
        assert [name for name in leases._keys if name[0].endswith(":k")] == []
        assert [left(server) for server in three] == [90, 90, 90]


def test_keys_that_are_given_back_are_forgotten(tmp_path: Path) -> None:
    """A key is kept while a store that is away has to be charged for it, until that does not matter any more."""
    clock = ManualClock()
    stores = [f"shared://{tmp_path}/one", f"shared://{tmp_path}/two", A]
    with HybridLimiter("100/minute", store=stores, agree="majority", clock=clock, on_store_error="raise") as limiter:
        leases = limiter._backend.manager.ledgers
        assert isinstance(leases, several_leases.SeveralLeases)
        for number in range(50):
            assert limiter.try_acquire(f"k{number}")
        limiter._backend.release_all()
        until(lambda: clock.advance(0.02) or not limiter._backend.is_releasing())  # type: ignore[func-returns-value]
        assert len(leases._keys) == 50
        clock.advance(200.0)

        def forgotten() -> bool:
            assert limiter.try_acquire("another")
            clock.advance(61.0)
            return len(leases._keys) == len(leases._owed) + 1 <= 3

        until(forgotten)
