"""Redis is not there: leases go on, then the policy decides, and debts are charged on return."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from headgate import AsyncHybridLimiter, HybridLimiter, Quota, StoreUnavailable
from headgate.hybrid.fallback_policy import BackendHealth, FallbackPolicy
from headgate.hybrid.lease import SECOND, Lease
from headgate.rule import OnStoreError
from headgate.testing import ManualClock
from tests.support.clocks import PATIENCE, WatchedClock, until
from tests.support.hybrid_stores import CutStore, HeldStore
from tests.support.servers import Server


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
def store(redis_server: Server, clock: WatchedClock) -> Iterator[CutStore]:
    store = CutStore(redis_server.url, clock=clock)
    yield store
    store.close()


def warm(limiter: HybridLimiter, clock: ManualClock, held: int) -> None:
    """Call until the lease holds *held*."""

    def is_warm() -> bool:
        for _ in range(20):
            limiter.try_acquire("k")
            clock.advance(0.0002)
        until(lambda: not limiter._backend.manager.trip_under_way)
        return limiter.stats().held >= held

    until(is_warm)


def pass_time(limiter: HybridLimiter, clock: WatchedClock, seconds: float) -> None:
    """Let time pass in small steps, and the background threads look for work after each."""
    for _ in range(round(seconds / 0.05)):
        clock.advance(0.05)
        until(looked_around, clock, limiter)


def looked_around(clock: WatchedClock, *limiters: HybridLimiter) -> bool:
    """Whether the background threads of *limiters* have nothing to do now, and sleep; each has its own store."""
    managers = [limiter._backend.manager for limiter in limiters]
    awake = any(manager.wake.is_set() for manager in managers)
    return not awake and clock.sleeping >= sum(manager._thread is not None for manager in managers)


def test_lease_in_outage(store: CutStore, clock: WatchedClock) -> None:
    """A lease is spent without Redis, then ends; decisions are Redis's again when it is back."""
    limiter = HybridLimiter("1000/second", store=store, on_store_error="deny")
    warm(limiter, clock, 20)
    store.cut = True
    assert all([limiter.try_acquire("k").allowed for _ in range(10)])
    pass_time(limiter, clock, 7)
    assert limiter.stats().backend == "down"
    refusal = limiter.try_acquire("k")
    assert not refusal and refusal.degraded
    store.cut = False
    pass_time(limiter, clock, 2)
    assert limiter.stats().backend == "up"
    assert limiter.try_acquire("k").allowed
    limiter.close()


def test_deny(store: CutStore) -> None:
    """deny denies, with a retry time, once the lease is used up."""
    limiter = HybridLimiter("10/second", store=store, on_store_error="deny")
    store.cut = True
    answers = [limiter.try_acquire("k") for _ in range(5)]
    assert not any(answers) and all(answer.degraded for answer in answers)
    assert all(answer.retry_after > 0 for answer in answers)
    limiter.close()


def test_allow(store: CutStore, clock: WatchedClock) -> None:
    """allow allows; Redis charges it afterwards."""
    limiter = HybridLimiter("100/day", store=store, on_store_error="allow")
    store.cut = True
    answers = [limiter.try_acquire("k") for _ in range(60)]
    assert all(answers) and all(answer.degraded for answer in answers)
    assert limiter.peek("k").degraded
    store.cut = False
    pass_time(limiter, clock, 3)
    assert sum(bool(limiter.try_acquire("k")) for _ in range(200)) == 40, "sixty were owed"
    limiter.close()


def test_raise(store: CutStore) -> None:
    """raise raises StoreUnavailable with the reason."""
    limiter = HybridLimiter("10/second", store=store, on_store_error="raise")
    store.cut = True
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="cut"):
            limiter.try_acquire("k")
    limiter.close()


def test_raise_on_refund(store: CutStore) -> None:
    """raise raises for a refund too, and nothing is given back."""
    limiter = HybridLimiter("10/day", store=store, on_store_error="raise")
    assert limiter.try_acquire("k", 5)
    store.cut = True
    with pytest.raises(StoreUnavailable):
        limiter.try_acquire("other")
    with pytest.raises(StoreUnavailable, match="cut"):
        limiter.refund("k", 2)
    limiter.close()


def test_local_without_redis(store: CutStore, clock: WatchedClock) -> None:
    """A process that never heard from Redis has a bucket of the whole quota."""
    store.cut = True
    limiter = HybridLimiter("10/minute burst 50", store=store, on_store_error="local")
    answers = [limiter.try_acquire("k") for _ in range(80)]
    assert sum(map(bool, answers)) == 50 and all(answer.degraded for answer in answers)
    clock.advance(12.0)
    assert sum(bool(limiter.try_acquire("k")) for _ in range(80)) == 2
    store.cut = False
    pass_time(limiter, clock, 2)
    until(lambda: not limiter.try_acquire("k").degraded)
    assert not limiter.try_acquire("k"), "all of that was owed"
    store.cut = True
    until(lambda: limiter.try_acquire("new").degraded)
    assert not limiter.try_acquire("new"), "a process that has heard from Redis has no burst"
    limiter.close()


def test_local_share(store: CutStore, clock: WatchedClock) -> None:
    """local decides by a share of the rate, which starts empty."""
    limiter = HybridLimiter("10/second burst 50", store=store, on_store_error="local")
    assert limiter.try_acquire("k", 50)
    limiter._backend.leases["k"].nodes = 5  # as if four others had been seen
    store.cut = True
    clock.advance(0.2)
    assert not any([limiter.try_acquire("k") for _ in range(20)]), "it starts empty"
    until(lambda: limiter.stats().backend == "down")
    clock.advance(2.0)  # a fifth of 10/second is 2/second
    answers = [limiter.try_acquire("k") for _ in range(20)]
    assert sum(map(bool, answers)) == 4 and all(answer.degraded for answer in answers)
    clock.advance(100.0)
    assert sum(bool(limiter.try_acquire("k")) for _ in range(50)) == 10, "a fifth of the burst at most"
    store.cut = False
    limiter.close()


def test_outage_is_fast(store: CutStore) -> None:
    """After the first failure a call does not wait for Redis."""
    limiter = HybridLimiter("10/second", store=store)
    store.cut = True
    limiter.try_acquire("k0")
    asked = store.asked
    for number in range(1000):
        limiter.try_acquire(f"k{number}")
    assert store.asked <= asked + 3, "only probes while it is known to be down"
    assert limiter.store_health().state == "open" and "cut" in limiter.store_health().last_error
    assert limiter.store_health().degraded >= 1000
    limiter.close()


def test_server_restarts(mortal_server: Server) -> None:
    """Answers are degraded while a server is down, and not after its return."""
    limiter = HybridLimiter("1000/second", store=mortal_server.url, on_store_error="deny")
    assert limiter.try_acquire("k")
    mortal_server.kill()
    until(lambda: limiter.try_acquire("k").degraded)
    mortal_server.restart()
    until(lambda: limiter.try_acquire("k").allowed and limiter.stats().backend == "up")
    until(lambda: limiter.try_acquire("k").allowed and limiter.stats().held > 10)
    limiter.close()


async def test_server_restarts_for_asyncio(mortal_server: Server) -> None:
    """The same for asyncio."""
    limiter = AsyncHybridLimiter("1000/second", store=mortal_server.url, on_store_error="deny")
    assert await limiter.try_acquire("k")
    mortal_server.kill()
    async with asyncio.timeout(PATIENCE):
        while True:
            if (await limiter.try_acquire("k")).degraded:
                break
            await asyncio.sleep(0)
    mortal_server.restart()
    async with asyncio.timeout(PATIENCE):
        while True:
            decision = await limiter.try_acquire("k")
            if decision.allowed and not decision.degraded:
                break
            await asyncio.sleep(0.005)
    await limiter.aclose()


@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_reset_tells_whether_redis_did_it(policy: OnStoreError, mortal_server: Server) -> None:
    """False while Redis cannot be asked; a refund is taken over by the lease, so it is True. Raise raises."""

    async def check() -> None:
        async with AsyncHybridLimiter("10/30d", store=mortal_server.url, on_store_error=policy) as tasks:
            with HybridLimiter("10/30d", store=mortal_server.url, on_store_error=policy) as threads:
                assert threads.try_acquire("a") and await tasks.try_acquire("b")
                assert threads.refund("a") is True and await tasks.refund("b") is True
                assert threads.reset("a") is True and await tasks.reset("b") is True
                mortal_server.kill()
                if policy == "raise":
                    with pytest.raises(StoreUnavailable):
                        threads.reset("a")
                    with pytest.raises(StoreUnavailable):
                        await tasks.reset("b")
                else:
                    assert threads.reset("a") is False and await tasks.reset("b") is False
                    assert threads.refund("a") is True and await tasks.refund("b") is True

    asyncio.run(check())


def test_wrong_type(any_redis_server: Server) -> None:
    """A key of another type is answered by the policy, other keys by Redis."""
    any_redis_server.client().set("rate_limiter:hybrid:token_bucket:{k}", "text")
    with HybridLimiter("10/second", store=any_redis_server.url, on_store_error="deny") as limiter:
        answers = [limiter.try_acquire("k") for _ in range(500)]
        assert not any(answers) and all(answer.degraded for answer in answers)
        assert limiter.try_acquire("fine").allowed, "only that key suffers"
        assert limiter.stats().trips < 10 and limiter.stats().backend == "up"


def test_refusing_server(redis_server: Server) -> None:
    """A server that refuses all writes is an outage."""
    with redis_server.client() as admin, HybridLimiter("10/second", store=redis_server.url) as limiter:
        admin.config_set("maxmemory", "1")
        try:
            answers = [limiter.try_acquire(f"k{number}") for number in range(500)]
            assert all(answer.degraded for answer in answers)
            assert limiter.store_health().state == "open" and "OOM" in limiter.store_health().last_error
            assert limiter.stats().trips + limiter.stats().failures < 20
        finally:
            admin.config_set("maxmemory", "0")
        until(lambda: not limiter.try_acquire("k").degraded)


@pytest.mark.parametrize("owed", [0, 7])
def test_log_of_uncharged_permits(
    owed: int, store: CutStore, clock: WatchedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names permits that a closed limiter granted and Redis never charges."""
    limiter = HybridLimiter("100/day", store=store, name=f"gone owing {owed}", on_store_error="allow")
    store.cut = True
    assert all(limiter.try_acquire("k").degraded for _ in range(owed))
    assert limiter.peek("k").degraded
    limiter.close()
    manager = limiter._backend.manager

    def given_up() -> bool:
        clock.advance(1.0)
        with manager.lock:  # or it may not be in the log yet
            return not manager.releases

    until(given_up)
    told = [record.getMessage() for record in caplog.records if "'gone owing" in record.getMessage()]
    assert len(told) == bool(owed)
    assert all(line.endswith(f"never charged to it: {owed}") for line in told)


LEAVES = {
    "threads": """
import sys
from headgate import HybridLimiter
limiter = HybridLimiter("100/day", store=sys.argv[1], on_store_error="allow")
assert all(limiter.try_acquire("k").degraded for _ in range(7))
""",
    "asyncio": """
import asyncio, gc, sys
from headgate import AsyncHybridLimiter
async def main():
    async with AsyncHybridLimiter("100/day", store=sys.argv[1], on_store_error="allow") as limiter:
        for _ in range(7):
            assert (await limiter.try_acquire("k")).degraded
asyncio.run(main())
gc.collect()
""",
}


@pytest.mark.parametrize("program", LEAVES.values(), ids=list(LEAVES))
def test_log_at_exit(program: str) -> None:
    """The same at the end of a process, once."""
    command = [sys.executable, "-c", program, "redis://127.0.0.1:1?timeout=0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stderr.count("permits granted and never charged to it: 7\n") == 1


def test_lost_data(redis_server: Server) -> None:
    """Lost data in Redis is not worth a second quota."""
    limiter = HybridLimiter("1000/day", store=redis_server.url)
    admitted = 0
    while limiter.stats().held < 5:
        admitted += limiter.try_acquire("k").allowed
    redis_server.flush()
    admitted += sum(bool(limiter.try_acquire("k")) for _ in range(3000))
    assert admitted <= 1000
    limiter.close()


@pytest.mark.parametrize("nodes, capacity, first", [(1, 10, 1), (5, 10, 1), (100, 10, 1)])
def test_first_permit(nodes: int, capacity: int, first: int) -> None:
    """local grants one permit at once to a key never seen, then its share of the rate."""
    health = BackendHealth(random.Random(1), partitioned=False)
    health.never_answered = False
    policy = FallbackPolicy("local", "default", Quota(capacity, 1.0), health)
    lease = Lease("k", 0, 0)
    lease.nodes = nodes
    assert sum(policy.take(lease, 1, SECOND).allowed for _ in range(20)) == first
    assert lease.debt == first
    later = SECOND + nodes * SECOND // capacity + 1
    assert policy.take(lease, 1, later).allowed, "and then its share of the rate"


@pytest.mark.usefixtures("patient_health")
def test_within(redis_server: Server) -> None:
    """within() answers by the policy after its time; permits taken for the caller come back."""
    store = HeldStore(redis_server.url, clock=ManualClock())
    store.released = threading.Event()
    limiter = HybridLimiter("10/day", store=store, on_store_error="deny")
    hurried = limiter.with_timeout(0.05)
    late = hurried.try_acquire("k", 10)
    assert not late and late.degraded
    assert hurried.peek("k").degraded
    store.released.set()
    until(lambda: limiter.try_acquire("k", 10).allowed)  # the permits of the late call came back
    assert not hurried.try_acquire("k").degraded, "denied here, so it does not wait"
    assert limiter.health().healthy
    limiter.close()
    store.close()


class Jumps(ManualClock):
    """A clock that goes on by *step* seconds whenever it is read."""

    step = 0.0

    def now(self) -> int:
        self._now += round(self.step * 1_000_000)
        return super().now()


def test_within_and_an_expiring_lease(redis_server: Server) -> None:
    """within() holds when the lease runs out between look-up and decision."""
    clock = Jumps()
    store = HeldStore(redis_server.patient_url, clock=clock)
    store.released = threading.Event()
    store.released.set()
    limiter = HybridLimiter("1000/day", store=store, on_store_error="deny")
    warm(limiter, clock, 5)
    until(lambda: not limiter._backend.manager.trip_under_way)
    store.released.clear()
    with limiter._backend.manager.lock:
        limiter._backend.leases["k"].expires = limiter._backend.read_clock() + 5 * SECOND
        clock.step = 4.0
    answers: list[bool] = []
    call = threading.Thread(
        target=lambda: answers.append(limiter.with_timeout(0.05).try_acquire("k").allowed), daemon=True
    )
    call.start()
    call.join(PATIENCE / 2)
    clock.step = 0.0
    assert answers, "it waits for Redis"
    store.released.set()
    limiter.close()
    store.close()


def test_within_and_optimistic(redis_server: Server) -> None:
    """within() grants the first call unasked just as well."""
    store = HeldStore(redis_server.patient_url)
    store.released = threading.Event()
    limiter = HybridLimiter("10/day", store=store, cold="optimistic", on_store_error="deny")
    made = limiter.with_timeout(0.05).try_acquire("k")
    assert made.allowed and not made.degraded
    late = limiter.with_timeout(0.05).try_acquire("k")
    assert not late.allowed and late.degraded
    store.released.set()
    limiter.close()
    store.close()


@pytest.mark.usefixtures("patient_health")
async def test_within_for_asyncio(redis_server: Server) -> None:
    """within() for asyncio."""
    limiter = AsyncHybridLimiter("10/day", store=redis_server.url, on_store_error="deny")
    assert (await limiter.with_timeout(PATIENCE).try_acquire("k")).allowed
    late = await limiter.with_timeout(0.000_001).try_acquire("other")
    assert not late and late.degraded
    assert (await limiter.health()).healthy
    await limiter.aclose()
