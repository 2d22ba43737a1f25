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
        until(lambda: not limiter._backend.manager.busy)
        return limiter.stats().held >= held

    until(is_warm)


def pass_time(limiter: HybridLimiter, clock: WatchedClock, seconds: float) -> None:
    """Let time pass in small steps, and the synchroniser look around after each."""
    for _ in range(round(seconds / 0.05)):
        clock.advance(0.05)
        until(looked_around, clock, limiter)


def looked_around(clock: WatchedClock, *limiters: HybridLimiter) -> bool:
    """Whether the synchronisers of *limiters* have done what there is to do now, and sleep; each has its own store."""
    drivers = [limiter._backend.manager for limiter in limiters]
    awake = any(driver.wake.is_set() for driver in drivers)
    return not awake and clock.sleeping >= sum(driver._thread is not None for driver in drivers)


def test_a_lease_outlives_the_connection_and_then_ends(store: CutStore, clock: WatchedClock) -> None:
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
    limiter = HybridLimiter("10/second", store=store, on_store_error="deny")
    store.cut = True
    answers = [limiter.try_acquire("k") for _ in range(5)]
    assert not any(answers) and all(answer.degraded for answer in answers)
    assert all(answer.retry_after > 0 for answer in answers)
    limiter.close()


def test_allow_and_charge_it_afterwards(store: CutStore, clock: WatchedClock) -> None:
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
    limiter = HybridLimiter("10/second", store=store, on_store_error="raise")
    store.cut = True
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="cut"):
            limiter.try_acquire("k")
    limiter.close()


def test_raise_is_for_refunds_too(store: CutStore) -> None:
    limiter = HybridLimiter("10/day", store=store, on_store_error="raise")
    assert limiter.try_acquire("k", 5)
    store.cut = True
    with pytest.raises(StoreUnavailable):
        limiter.try_acquire("other")
    with pytest.raises(StoreUnavailable, match="cut"):
        limiter.refund("k", 2)
    limiter.close()


def test_local_without_ever_a_word_from_redis_is_a_limiter_in_this_process(
    store: CutStore, clock: WatchedClock
) -> None:
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
    assert not limiter.try_acquire("new"), "who has heard from Redis has no burst"
    limiter.close()


def test_local_is_a_share_that_starts_empty(store: CutStore, clock: WatchedClock) -> None:
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


def test_an_outage_costs_no_time(store: CutStore) -> None:
    limiter = HybridLimiter("10/second", store=store)
    store.cut = True
    limiter.try_acquire("k0")
    asked = store.asked
    for number in range(1000):
        limiter.try_acquire(f"k{number}")
    assert store.asked <= asked + 3, "nobody requests while it is known to be down, but a probe now and then"
    assert limiter.store_health().state == "open" and "cut" in limiter.store_health().last_error
    assert limiter.store_health().degraded >= 1000
    limiter.close()


def test_a_server_that_dies_and_comes_back(mortal_server: Server) -> None:
    limiter = HybridLimiter("1000/second", store=mortal_server.url, on_store_error="deny")
    assert limiter.try_acquire("k")
    mortal_server.kill()
    until(lambda: limiter.try_acquire("k").degraded)
    mortal_server.restart()
    until(lambda: limiter.try_acquire("k").allowed and limiter.stats().backend == "up")
    until(lambda: limiter.try_acquire("k").allowed and limiter.stats().held > 10)
    limiter.close()


async def test_the_same_for_asyncio(mortal_server: Server) -> None:
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


def test_a_key_of_another_type(any_redis_server: Server) -> None:
    any_redis_server.client().set("rate_limiter:hybrid:token_bucket:{k}", "text")
    with HybridLimiter("10/second", store=any_redis_server.url, on_store_error="deny") as limiter:
        answers = [limiter.try_acquire("k") for _ in range(500)]
        assert not any(answers) and all(answer.degraded for answer in answers)
        assert limiter.try_acquire("fine").allowed, "only that key suffers"
        assert limiter.stats().trips < 10 and limiter.stats().backend == "up"


def test_a_server_that_refuses(redis_server: Server) -> None:
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
def test_the_log_says_what_a_closed_limiter_will_never_be_charged(
    owed: int, store: CutStore, clock: WatchedClock, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = HybridLimiter("100/day", store=store, name=f"gone owing {owed}", on_store_error="allow")
    store.cut = True
    assert all(limiter.try_acquire("k").degraded for _ in range(owed))
    assert limiter.peek("k").degraded
    limiter.close()
    node = limiter._backend.manager

    def given_up() -> bool:
        clock.advance(1.0)
        with node.lock:  # or it may not be in the log yet
            return not node.releases

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
import asyncio, sys
from headgate import AsyncHybridLimiter
async def main():
    async with AsyncHybridLimiter("100/day", store=sys.argv[1], on_store_error="allow") as limiter:
        for _ in range(7):
            assert (await limiter.try_acquire("k")).degraded
asyncio.run(main())
""",
}


@pytest.mark.parametrize("program", LEAVES.values(), ids=list(LEAVES))
def test_the_log_says_so_of_a_process_that_ends(program: str) -> None:
    command = [sys.executable, "-c", program, "redis://127.0.0.1:1?timeout=0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stderr.count("permits granted and never charged to it: 7\n") == 1


def test_lost_data_is_no_second_quota(redis_server: Server) -> None:
    limiter = HybridLimiter("1000/day", store=redis_server.url)
    admitted = 0
    while limiter.stats().held < 5:
        admitted += limiter.try_acquire("k").allowed
    redis_server.flush()
    admitted += sum(bool(limiter.try_acquire("k")) for _ in range(3000))
    assert admitted <= 1000
    limiter.close()


@pytest.mark.parametrize("nodes, capacity, first", [(1, 10, 1), (5, 10, 1), (100, 10, 1)])
def test_a_key_never_seen_gets_one_permit_at_once(nodes: int, capacity: int, first: int) -> None:
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
def test_a_caller_with_a_deadline(redis_server: Server) -> None:
    store = HeldStore(redis_server.url, clock=ManualClock())
    store.released = threading.Event()
    limiter = HybridLimiter("10/day", store=store, on_store_error="deny")
    hurried = limiter.within(0.05)
    late = hurried.try_acquire("k", 10)
    assert not late and late.degraded
    assert hurried.peek("k").degraded
    store.released.set()
    until(lambda: limiter.try_acquire("k", 10).allowed)  # what was taken for nobody came back
    assert not hurried.try_acquire("k").degraded, "known here, so nobody waits"
    assert limiter.health().healthy
    limiter.close()
    store.close()


class Jumps(ManualClock):
    """A clock that goes on by *step* seconds whenever somebody looks."""

    step = 0.0

    def now(self) -> int:
        self._now += round(self.step * 1_000_000)
        return super().now()


def test_a_deadline_holds_when_a_lease_runs_out_in_between(redis_server: Server) -> None:
    clock = Jumps()
    store = HeldStore(redis_server.patient_url, clock=clock)
    store.released = threading.Event()
    store.released.set()
    limiter = HybridLimiter("1000/day", store=store, on_store_error="deny")
    warm(limiter, clock, 5)
    until(lambda: not limiter._backend.manager.busy)
    store.released.clear()
    with limiter._backend.manager.lock:
        limiter._backend.leases["k"].expires = limiter._backend.read_clock() + 5 * SECOND
        clock.step = 4.0
    answers: list[bool] = []
    call = threading.Thread(target=lambda: answers.append(limiter.within(0.05).try_acquire("k").allowed), daemon=True)
    call.start()
    call.join(PATIENCE / 2)
    clock.step = 0.0
    assert answers, "it waits for Redis"
    store.released.set()
    limiter.close()
    store.close()


def test_a_deadline_does_not_make_it_less_optimistic(redis_server: Server) -> None:
    store = HeldStore(redis_server.patient_url)
    store.released = threading.Event()
    limiter = HybridLimiter("10/day", store=store, cold="optimistic", on_store_error="deny")
    made = limiter.within(0.05).try_acquire("k")
    assert made.allowed and not made.degraded
    late = limiter.within(0.05).try_acquire("k")
    assert not late.allowed and late.degraded
    store.released.set()
    limiter.close()
    store.close()


@pytest.mark.usefixtures("patient_health")
async def test_a_task_with_a_deadline(redis_server: Server) -> None:
    limiter = AsyncHybridLimiter("10/day", store=redis_server.url, on_store_error="deny")
    assert (await limiter.within(PATIENCE).try_acquire("k")).allowed
    late = await limiter.within(0.000_001).try_acquire("other")
    assert not late and late.degraded
    assert (await limiter.health()).healthy
    await limiter.aclose()
