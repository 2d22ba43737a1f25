"""Least recently used first, back when its holder dies, and never more than its quota."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.coordination import CRAWLER, AsyncPool, CircuitBreaker, Pool
from headgate.errors import CircuitOpen, HeadgateError, InvalidKey, InvalidQuota, PoolExhausted, StoreUnavailable
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.awaited import Tools
from tests.support.clocks import until_async
from tests.support.clusters import wait_until
from tests.support.proxy import FaultyProxy
from tests.support.retries import answered
from tests.support.servers import Server, free_port

ROOT = Path(__file__).parent.parent.parent
LONG = 20.0


def use(pool: Pool, cooldown: float = 0.0) -> str:
    """Take one and give it back."""
    leased = pool.acquire(timeout=0)
    assert leased.release(cooldown=cooldown)
    return leased.member


def test_least_recently_used(url: str, name: str, clock: ManualClock) -> None:
    """By order, not by name, although the clock stands still."""
    pool = Pool(name, store=url, clock=clock)
    pool.add("z", "m", "a")
    assert [use(pool) for _ in range(6)] == ["z", "m", "a", "z", "m", "a"]
    first, second = pool.acquire(timeout=0), pool.acquire(timeout=0)
    assert (first.member, second.member) == ("z", "m")
    second.release()
    first.release()
    assert [use(pool) for _ in range(3)] == ["a", "m", "z"], "as they came back"


async def test_with(tools: Tools, url: str, name: str) -> None:
    """`with` leases a member, and gives it back."""
    pool = tools.Pool(name, store=url, lease=30.0)
    await pool.add("ua-1", "ua-2")
    async with pool.acquire(timeout=10.0) as leased, pool.acquire(timeout=10.0) as other:
        assert {leased.member, other.member} == {"ua-1", "ua-2"}
        with pytest.raises(PoolExhausted) as caught:
            await pool.acquire(timeout=0)
        assert caught.value.reasons["leased"] == 2
        assert 0 < (caught.value.retry_after or 0) <= 30.0
        assert "2 leased" in str(caught.value)
    assert (await pool.status()).ready == 2
    with pytest.raises(ZeroDivisionError):
        async with pool.acquire():
            print(1 / 0)
    assert (await pool.status()).ready == 2


async def test_release_and_retire(tools: Tools, url: str, name: str) -> None:
    """A lease can be renewed and released once; retired members come back when they are added."""
    pool = tools.Pool(name, store=url)
    await pool.add("a", "b")
    async with pool.acquire(timeout=1.0) as leased:
        assert leased.member == "a"
        assert Pool(name, store=url).acquire(timeout=0).member == "b", "threads and tasks share it"
        with pytest.raises(PoolExhausted):
            await pool.acquire(timeout=0)
        assert await leased.renew()
    leased = await pool.acquire(timeout=1.0)
    assert leased.member == "a"
    assert await leased.release(cooldown=60)
    assert not await leased.release()
    await pool.retire("a", "b", "c")
    await pool.add("b")
    await pool.add("a", "d", restore=False)
    status = await pool.status()
    assert (status.retired, status.leased, status.ready) == (1, 1, 1)


def test_empty(url: str, name: str) -> None:
    """An empty pool is exhausted, for no known time; a waiter gets the first member that is added."""
    pool = Pool(name, store=url)
    with pytest.raises(PoolExhausted, match="no members") as caught:
        pool.acquire(timeout=0.01)
    assert caught.value.retry_after is None
    timer = threading.Timer(0.05, pool.add, ("late",))
    timer.start()
    assert pool.acquire(timeout=LONG).member == "late"
    timer.join()


def test_cooldown(url: str, name: str, clock: ManualClock) -> None:
    """A member that cools down is not leased before its time."""
    pool = Pool(name, store=url, clock=clock)
    pool.add("a", "b")
    assert use(pool, cooldown=12.5) == "a"
    assert use(pool, cooldown=5.0) == "b"
    with pytest.raises(PoolExhausted) as caught:
        pool.acquire(timeout=0)
    assert caught.value.retry_after == 5.0
    assert caught.value.reasons["cooling"] == 2
    clock.advance(5.0)
    assert use(pool, cooldown=100) == "b"
    clock.advance(7.499)
    with pytest.raises(PoolExhausted):
        pool.acquire(timeout=0)
    clock.advance(0.001)
    assert use(pool) == "a"


def test_wait_for_cooldown(url: str, name: str) -> None:
    """A waiter gets the member when its cooldown is over."""
    pool = Pool(name, store=url)
    pool.add("a")
    begun = time.monotonic()
    use(pool, cooldown=0.2)
    assert pool.acquire(timeout=LONG).member == "a"
    assert time.monotonic() - begun >= 0.19


def test_cooldowns_extend(url: str, name: str, clock: ManualClock) -> None:
    """A shorter cooldown does not replace a longer one."""
    pool = Pool(name, store=url, slots=2, clock=clock)
    pool.add("a")
    long, short = pool.acquire(timeout=0), pool.acquire(timeout=0)
    long.release(cooldown=60)
    short.release(cooldown=1)
    assert pool.status().members["a"].ready_in == 60.0


def test_slots(url: str, name: str, clock: ManualClock) -> None:
    """With two slots two callers have the same member."""
    pool = Pool(name, store=url, slots=2, clock=clock)
    pool.add("a", "b")
    taken = [pool.acquire(timeout=0) for _ in range(4)]
    assert sorted(leased.member for leased in taken) == ["a", "a", "b", "b"]
    with pytest.raises(PoolExhausted):
        pool.acquire(timeout=0)
    taken[0].release()
    assert pool.acquire(timeout=0).member == taken[0].member


def test_expired_lease(url: str, name: str, clock: ManualClock) -> None:
    """After its lease the member is free, and the old holder cannot settle it."""
    pool = Pool(name, store=url, lease=30.0, clock=clock)
    pool.add("a")
    late = pool.acquire(timeout=0)
    clock.advance(29)
    assert late.renew()
    clock.advance(29)
    with pytest.raises(PoolExhausted):
        pool.acquire(timeout=0)
    clock.advance(1)
    with pool.acquire(timeout=0) as leased:
        assert leased.member == "a"
        assert not late.renew()
        assert late.lost
        assert not late.release(), "somebody else has it by now"
        assert pool.status().leased == 1
    assert pool.status().ready == 1


def left(pool: Pool) -> float:
    """Seconds until its only member is back, as its store says to who asks in vain."""
    with pytest.raises(PoolExhausted) as caught:
        pool.acquire(timeout=0)
    return caught.value.retry_after or 0.0


# A third of it is what these tests take, more than half what a machine may stand still meanwhile.
LEASE = 6.0


@pytest.mark.slow
async def test_renewed_in_with(tools: Tools, redis_server: Server, name: str) -> None:
    """Within `with` the lease is renewed."""
    url = redis_server.url
    pool, watch = tools.Pool(name, store=url, lease=LEASE), Pool(name, store=url)
    await pool.add("a")
    async with pool.acquire() as leased:
        await asyncio.to_thread(wait_until, lambda: left(watch) < LEASE - 1, "its time goes by")
        await asyncio.to_thread(wait_until, lambda: left(watch) > LEASE - 1, "it is renewed")
        assert not leased.lost


async def test_acquire_makes_a_task(url: str, name: str) -> None:
    """As any coroutine does; one that is cancelled holds nothing."""
    pool = AsyncPool(name, store=url)
    await pool.add("a")
    first = await asyncio.create_task(pool.acquire())
    async with asyncio.TaskGroup() as group:
        second, third = group.create_task(pool.acquire()), group.create_task(pool.acquire(timeout=LONG))
        await asyncio.sleep(0)
        second.cancel()
        await first.release()
    assert second.cancelled()
    assert third.result().member == "a"


def test_dropped_lease(url: str, name: str) -> None:
    """The member of a lease that was dropped comes back after the lease."""
    pool = Pool(name, store=url, lease=0.3)
    pool.add("a")
    pool.acquire().__enter__()
    gc.collect()
    assert pool.acquire(timeout=LONG).member == "a"


def test_retry_after_lease(url: str, name: str, clock: ManualClock) -> None:
    """`retry_after` is the end of the first lease."""
    pool = Pool(name, store=url, lease=30, clock=clock)
    pool.add("a")
    pool.acquire(timeout=0)
    clock.advance(29)
    with pytest.raises(PoolExhausted) as caught:
        pool.acquire(timeout=0)
    assert caught.value.retry_after == pytest.approx(1)


def test_retire(url: str, name: str, clock: ManualClock) -> None:
    """A retired member is leased no more until it is added again."""
    pool = Pool(name, store=url, clock=clock)
    pool.add("a", "b", "c")
    held = pool.acquire(timeout=0)
    pool.retire("a", "b", "nobody")
    assert pool.acquire(timeout=0).member == "c"
    held.release()
    with pytest.raises(PoolExhausted):
        pool.acquire(timeout=0)
    pool.add("a", "b", restore=False)
    assert pool.status().retired == 2, "a worker that starts must not bring back what was revoked"
    pool.add("a")
    assert pool.acquire(timeout=0).member == "a"
    assert pool.status().retired == 1
    assert set(pool.status().members) == {"a", "b", "c"}


def test_quota_is_exact(url: str, name: str, clock: ManualClock) -> None:
    """No window ever holds more, counted from when a use was admitted to when it was settled; none is wasted."""
    pool = Pool(name, store=url, quota="5/10 seconds", clock=clock)
    pool.add("a", "b")
    uses: dict[str, list[tuple[float, float]]] = {"a": [], "b": []}
    dice = random.Random(5)
    for _ in range(120):
        status = pool.status()
        if not status.ready:
            assert status.limited == 2
            clock.advance(min(member.ready_in or 0.0 for member in status.members.values()))
        leased = pool.acquire(timeout=0)
        begun = clock.now()
        clock.advance(dice.choice([0.0, 0.01, 0.5]))
        leased.release()
        uses[leased.member].append((begun, clock.now()))
    for times in uses.values():
        assert len(times) > 40
        for i in range(len(times) - 5):
            assert times[i + 5][0] - times[i][1] > 10_000_000, "six in a window, as somebody may see it"


def test_pool_without_rules(url: str, name: str, clock: ManualClock) -> None:
    """Not even when it settles what others left behind."""
    pool, looks = Pool(name, store=url, quota="1/minute", lease=5, clock=clock), Pool(name, store=url, clock=clock)
    pool.add("a")
    pool.acquire(timeout=0)
    clock.advance(5)
    assert looks.status().limited == 1
    with pytest.raises(PoolExhausted):
        looks.acquire(timeout=0)


def test_rules_that_change(url: str, name: str, clock: ManualClock) -> None:
    """Count for those who are there, and are not changed by one who gives none."""
    plain = Pool(name, store=url, clock=clock)
    plain.add("a")
    plain.acquire(timeout=0)
    roomy = Pool(name, store=url, slots=2, quota="3/10 minutes", clock=clock)
    roomy.add("a")
    assert roomy.acquire(timeout=0).release()
    plain.add("b")
    assert [use(plain) for _ in range(4)] == ["a", "b", "b", "b"]
    with pytest.raises(PoolExhausted):
        plain.acquire(timeout=0)
    assert plain.status().limited == 2


def test_the_usual_rules_can_be_given_too(url: str, name: str, clock: ManualClock) -> None:
    """To take a quota away, say: to give any rule is to give all."""
    strict = Pool(name, store=url, quota="1/hour", failures=1, slots=2, clock=clock)
    strict.add("a")
    use(strict)
    assert strict.status().limited == 1
    Pool(name, store=url, clock=clock).add("a")
    assert strict.status().limited == 1, "none were given"
    Pool(name, store=url, slots=1, clock=clock).add()
    assert [use(strict) for _ in range(5)] == ["a"] * 5
    strict.acquire(timeout=0).release(failed=True)
    held = strict.acquire(timeout=0)
    assert strict.status().leased == 1, "one slot"
    held.release()


def test_first_rules_count(url: str, name: str, clock: ManualClock) -> None:
    """The first rules count, even if a pool without rules was there before."""
    plain = Pool(name, store=url, clock=clock)
    plain.add("a")
    worker = Pool(name, store=url, quota="2/10 minutes", lease=5, clock=clock)
    assert [use(worker), worker.acquire(timeout=0).member] == ["a", "a"]
    clock.advance(5)
    assert plain.status().limited == 1, "also for one who gives none"
    with pytest.raises(PoolExhausted):
        worker.acquire(timeout=0)


def test_a_change_of_rules_forgets_nothing(url: str, name: str, clock: ManualClock) -> None:
    """A member that had its uses for these ten minutes has had them, whatever somebody else made of the rules."""
    strict, loose = (Pool(name, store=url, clock=clock, **rules) for rules in ({"quota": "8/10 minutes"}, {"slots": 2}))
    strict.add("a")
    assert [use(strict) for _ in range(8)] == ["a"] * 8
    loose.add("b")
    assert [use(loose), use(loose)] == ["a", "b"]
    strict.add("a")
    assert strict.status().members["a"].state == "limited"
    assert [use(strict) for _ in range(7)] == ["b"] * 7, "one of its uses was made meanwhile"
    with pytest.raises(PoolExhausted):
        strict.acquire(timeout=0)
    clock.advance(600.002)
    assert strict.status().ready == 2


def test_unanswered_use(url: str, name: str, clock: ManualClock) -> None:
    """Its server may come to it, and count it, when we have long counted it as over."""
    pool = Pool(name, store=url, quota="1/10 seconds", lease=30, clock=clock)
    pool.add("a")
    leased = pool.acquire(timeout=0)
    clock.advance(5)
    leased.unanswered = True
    leased.release(failed=True)
    assert pool.status().members["a"].ready_in == pytest.approx(25 + 10, abs=0.01)
    clock.advance(35.01)
    leased = pool.acquire(timeout=0)
    leased.unanswered = True
    leased.observe(answer(200))
    leased.release()
    assert pool.status().members["a"].ready_in == pytest.approx(10, abs=0.01)


def test_cost_of_a_large_quota(redis_server: Server, name: str, clock: ManualClock) -> None:
    """No step reads or writes more than a record and a chunk or two of its uses."""
    pool = Pool(name, store=RedisStore(redis_server.url, timeout=10, clock=clock), quota=["100000/day", "500/hour"])
    pool.add("a")
    for _ in range(500):
        use(pool)
    client, key = redis_server.client(), f"pool:{{{name}}}"
    assert pool.status().limited == 1
    assert client.strlen(f"{key}:rules") and client.execute_command("HSTRLEN", f"{key}:members", "a") < 200
    assert max(map(len, client.hvals(f"{key}:log"))) == 64 * 16
    assert 0 < client.pttl(f"{key}:log") <= 86_400_000 + 10


KEYS = ["", ":members", ":leases", ":holders", ":done", ":waiting", ":alive", ":order", ":rules", ":log"]


@pytest.mark.parametrize("lost", KEYS)
def test_a_key_that_is_lost(lost: str, redis_server: Server, clock: ManualClock) -> None:
    """Deleted, or evicted: the pool goes on with what the others say, whoever holds or waits for a member."""
    rules: Any = {"lease": 30, "quota": "50/minute", "failures": 3}
    pool = Pool("lost", store=RedisStore(redis_server.url, timeout=10, clock=clock), **rules)
    pool.add("a", "b", "c", "d")
    pool.retire("c")
    assert use(pool, cooldown=20) == "a"
    held = [pool.acquire(timeout=0), pool.acquire(timeout=0)]
    for who in ("dead", "waits"):
        assert pool._runner.execute(pool._terms.operation("acquire", who, 1))[0] == 0
    redis_server.client().delete(f"pool:{{lost}}{lost}")
    clock.advance(6 if lost != ":alive" else 0)
    assert pool.status().leased == (0 if lost == ":holders" else 2), "who holds one holds it"
    clock.advance(6)
    assert pool.status().waiting == 0, "who died waits no longer"
    for leased in held:
        leased.release()
    clock.advance(30)
    assert sorted(use(pool) for _ in range(6)) == ["a", "a", "b", "b", "d", "d"]
    status = pool.status()
    assert (status.ready, status.leased, status.waiting, status.retired) == (3, 0, 0, 1)
    pool.close()


def test_redis_refuses(redis_server: Server, name: str) -> None:
    """A refusal by Redis is `StoreUnavailable`, which says so."""
    redis_server.client().set(f"pool:{{{name}}}", "no sorted set")
    pool = Pool(name, store=redis_server.patient_url)
    with pytest.raises(StoreUnavailable, match=r"refused.*WRONGTYPE"):
        pool.add("a")


def test_several_quotas(url: str, name: str, clock: ManualClock) -> None:
    """All quotas must allow a use."""
    pool = Pool(name, store=url, quota=["2/second", "3/minute"], clock=clock)
    pool.add("a")
    assert [use(pool), use(pool)] == ["a", "a"]
    with pytest.raises(PoolExhausted) as caught:
        pool.acquire(timeout=0)
    assert caught.value.retry_after == pytest.approx(1.0, abs=0.01)
    clock.advance(1.01)
    use(pool)
    with pytest.raises(PoolExhausted) as caught:
        pool.acquire(timeout=0)
    assert caught.value.retry_after == pytest.approx(59, abs=0.1)


def test_crawler_preset(url: str, name: str, clock: ManualClock) -> None:
    """The documented rules."""
    pool = Pool(name, store=url, **CRAWLER, clock=clock)
    pool.add("token")
    assert [use(pool) for _ in range(80)] == ["token"] * 80
    with pytest.raises(PoolExhausted) as caught:
        pool.acquire(timeout=0)
    assert caught.value.retry_after == pytest.approx(600, abs=0.01)


def test_member_breaker(url: str, name: str, clock: ManualClock) -> None:
    """A member's breaker opens, probes and closes as a `CircuitBreaker` does."""
    pool = Pool(name, store=url, failures=3, open_for=60.0, successes=2, clock=clock)
    pool.add("bad")
    for _ in range(3):
        pool.acquire(timeout=0).release(failed=True)
    with pytest.raises(PoolExhausted) as caught:
        pool.acquire(timeout=0)
    assert (caught.value.retry_after, caught.value.reasons["open"]) == (60.0, 1)
    assert pool.status().members["bad"].breaker == "OPEN"
    clock.advance(60)
    pool.acquire(timeout=0).release(failed=True)
    with pytest.raises(PoolExhausted):
        pool.acquire(timeout=0)
    clock.advance(60)
    use(pool)
    assert pool.status().members["bad"].breaker == "HALF_OPEN"
    use(pool)
    assert pool.status().members["bad"].breaker == "CLOSED"


def answer(status: int, **headers: str) -> Any:
    return SimpleNamespace(status_code=status, headers={name.replace("_", "-"): text for name, text in headers.items()})


def test_observe(url: str, name: str, clock: ManualClock) -> None:
    """What an answer says counts for the member."""
    pool = Pool(name, store=url, failures=2, open_for=60.0, clock=clock)
    pool.add("a", "b", "c", "d", "e")
    rows = [
        answer(200),
        answer(429, Retry_After="30"),
        answer(401),
        answer(500),
        answer(200, X_RateLimit_Remaining="0"),
    ]
    rows[4].headers["X-RateLimit-Reset"] = "90"
    for row in rows:
        with pool.acquire(timeout=0) as leased:
            leased.observe(row)
    members = pool.status().members
    assert [members[member].state for member in "abcde"] == ["ready", "cooling", "retired", "ready", "cooling"]
    assert (members["b"].ready_in, members["e"].ready_in) == (30.0, 90.0)
    assert (members["b"].failures, members["d"].failures) == (0, 1)
    with pytest.raises(TypeError, match="status"):
        leased.observe("200")


def test_release_after_observe(url: str, name: str, clock: ManualClock) -> None:
    """`release` adds to what was observed."""
    pool = Pool(name, store=url, clock=clock)
    pool.add("a")
    leased = pool.acquire(timeout=0)
    leased.observe(SimpleNamespace(status_code=429, headers={"Retry-After": "20"}))
    assert leased.release(cooldown=5)
    assert pool.status().members["a"].ready_in == pytest.approx(20)
    clock.advance(20)
    leased = pool.acquire(timeout=0)
    leased.observe(SimpleNamespace(status_code=401, headers={}))
    assert leased.release()
    assert pool.status().retired == 1


def test_lease_cut_off(redis_server: Server, name: str, clock: ManualClock) -> None:
    """A lease that cannot be renewed ends by our own clock."""
    with FaultyProxy(redis_server.port) as proxy:
        pool = Pool(name, store=f"{proxy.bare_url}?timeout=0.5", lease=30, clock=clock)
        answered(lambda: pool.add("a"))
        leased = answered(lambda: pool.acquire(timeout=0))
        proxy.swallow_requests = True
        proxy.cut()
        assert not leased.lost and leased.renew(), "it has time"
        clock.advance(30)
        assert leased.lost and not leased.renew()
        assert not leased.release()
        proxy.swallow_requests = False
        pool.close()


async def test_ignore_errors(tools: Tools, url: str, name: str, clock: ManualClock) -> None:
    """After `ignore_errors`, or `excuse` as it was called, an exception counts for nothing."""
    pool = tools.Pool(name, store=url, failures=5, clock=clock)
    await pool.add("a")
    for method in ("ignore_errors", "excuse"):
        leased = await pool.acquire(timeout=0)
        with suppress(KeyError):
            async with leased:
                if tools.kind == "threads":
                    leased = leased.tool
                getattr(leased, method)()
                raise KeyError
        assert (await pool.status()).members["a"].failures == 0


def test_exception_in_with(url: str, name: str, clock: ManualClock) -> None:
    """An exception is a failure of the member, unless an answer was observed."""
    pool = Pool(name, store=url, failures=5, clock=clock)
    pool.add("a")

    def body(row: Any, error: BaseException) -> None:
        with pool.acquire(timeout=0) as leased:
            if row:
                leased.observe(row)
            raise error

    for row, error, failures in [(None, KeyError(), 1), (answer(200), KeyError(), 0), (None, KeyError(), 1)]:
        with pytest.raises(KeyError):
            body(row, error)
        assert pool.status().members["a"].failures == failures
    with pytest.raises(KeyboardInterrupt):
        body(None, KeyboardInterrupt())
    assert pool.status().members["a"].failures == 1


def test_own_refusals_are_ignored(url: str, name: str, clock: ManualClock) -> None:
    """A breaker of the whole site that is open must not take every member with it."""
    pool, site = Pool(name, store=url, failures=1, clock=clock), CircuitBreaker(name, store=url, clock=clock)
    pool.add("a")
    site.force_open()
    for _ in range(3):
        with pytest.raises(CircuitOpen), pool.acquire(timeout=0), site:
            raise AssertionError("it is open")
    assert (pool.status().ready, pool.status().members["a"].failures) == (1, 0)


async def test_members_are_in_no_error_and_no_log(url: str, name: str) -> None:
    """They may be tokens."""
    pool = Pool(name, store=url)
    for call in (pool.add, pool.retire):
        for token in ("s3cret\n", "s3cret\ud800", "s3cret" * 99, b"s3cret", ["s3cret"]):
            with pytest.raises(InvalidKey, match="member") as caught:
                call(token)  # type: ignore[arg-type]  # that is the point
            assert "s3" not in repr(caught.value)
    pool.add("s3cret")
    leased = pool.acquire()
    with pytest.raises(PoolExhausted) as none:
        pool.acquire(timeout=0)
    leased.release()
    shown = [leased, pool.status(), none.value, pool, await AsyncPool(name, store=url).acquire()]
    assert "s3cret" not in repr(shown) + str(none.value)
    assert list(pool.status().members) == ["s3cret"]


def test_many_members_are_looked_at_seldom(url: str, name: str, clock: ManualClock) -> None:
    """Who asks in vain, again and again, does not keep Redis from others; of few members the reasons are exact."""
    pool = Pool(name, store=url, clock=clock)
    pool.add("a", "b")
    for retired in (("a", "b"), [f"m{number}" for number in range(200)]):
        pool.add(*retired)
        pool.retire(*retired)
    seen = []
    for step in (0.0, 0.5, 0.6):
        clock.advance(step)
        with pytest.raises(PoolExhausted) as caught:
            pool.acquire(timeout=0)
        seen.append(caught.value.reasons["retired"])
        pool.add(f"new {step}")
        pool.retire(f"new {step}")
    assert seen == [202, 202, 204]
    few = Pool(f"{name}'", store=url, clock=clock)
    for number in range(3):
        few.add(str(number))
        few.retire(str(number))
        with pytest.raises(PoolExhausted) as caught:
            few.acquire(timeout=0)
        assert caught.value.reasons["retired"] == number + 1


def test_fifo(url: str, name: str) -> None:
    """Waiters of a process are served in their order."""
    pool = Pool(name, store=url)
    pool.add("a")
    held = pool.acquire()
    order: list[int] = []

    def work(number: int) -> None:
        with pool.acquire(timeout=LONG):
            order.append(number)

    line = pool._runner.backend.waiters.queues
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_until(partial(lambda number: len(line.get(pool._runner.channel, ())) > number, number), "it waits")
    held.release()
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_processes_are_served_in_order(redis_server: Server, name: str) -> None:
    """Places that share nothing but the server: whoever came first is first, and who died is passed over."""
    clock = ManualClock()
    stores = [RedisStore(redis_server.url, timeout=10, clock=clock) for _ in range(3)]
    first, second, third = (Pool(name, store=store) for store in stores)
    first.add("a")
    held = first.acquire(timeout=0)

    def ask(pool: Pool, who: str) -> int:
        return int(pool._runner.execute(pool._terms.operation("acquire", who, 1))[0])

    assert ask(first, "dies") == 0
    assert ask(second, "second") == 0
    held.release()
    assert ask(third, "third") == 0, "it is somebody else's"
    assert ask(second, "second") == 0
    assert first.status().waiting == 3
    clock.advance(4)
    assert ask(third, "third") == ask(second, "second") == 0
    clock.advance(1)
    assert ask(third, "third") == 0
    assert ask(second, "second") == 1, "the first has not been heard of for five seconds"
    for store in stores:
        store.close()


async def test_10_000_waiters(redis_server: Server, name: str) -> None:
    """10,000 waiting tasks need a handful of connections."""
    pool = AsyncPool(name, store=redis_server.patient_url)
    await pool.add("a")
    held = await pool.acquire()
    before = len(redis_server.client().client_list())
    tasks = [asyncio.ensure_future(pool.acquire()) for _ in range(10_000)]
    await asyncio.sleep(1.2)  # longer than anybody sleeps before it looks again
    assert len(redis_server.client().client_list()) - before <= 6
    await held.release()
    leased = await asyncio.wait_for(tasks[0], LONG)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    await leased.release()


HOLD = """
import sys, time
from headgate.coordination import Pool
leased = Pool(sys.argv[2], store=sys.argv[1], lease=4.0).acquire(timeout=20)
with leased:
    print(leased.member, flush=True)
    time.sleep(60)
"""


def test_killed_holders(redis_server: Server, name: str) -> None:
    """The members of killed processes come back after their leases."""
    pool = Pool(name, store=redis_server.patient_url, lease=300.0)
    pool.add(*"abcde")
    command = [sys.executable, "-c", HOLD, redis_server.patient_url, name]
    holders = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(5)]
    taken = {holder.stdout.readline() for holder in holders if holder.stdout}
    assert len(taken) == 5
    assert pool.status().leased == 5
    for holder in holders:
        os.kill(holder.pid, signal.SIGKILL)
    killed = time.monotonic()
    back = {pool.acquire(timeout=LONG).member for _ in range(5)}
    assert back == set("abcde")
    assert time.monotonic() - killed < 4.0 + 8.0, "the lease, and what a busy machine adds"
    for holder in holders:
        holder.communicate()


def test_give_up_leaves_the_queue(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when it is taken for dead."""
    pool, retries = Pool(name, store=url), []
    monkeypatch.setattr(pool._runner, "retry_in_background", lambda step, *_: retries.append(step.name))
    for timeout, left in [(0.01, ["settle"]), (0, [])]:
        with pytest.raises(PoolExhausted):
            pool.acquire(timeout=timeout)
        assert retries == left, "who may not wait does not stand there"
        retries.clear()


def test_settle_is_retried(redis_server: Server, name: str) -> None:
    """A release without an answer is retried in the background."""
    with FaultyProxy(redis_server.port) as proxy:
        pool = Pool(name, store=f"{proxy.bare_url}?timeout=0.5", lease=600)
        answered(lambda: pool.add("a"))
        leased = pool.acquire(timeout=LONG)
        proxy.swallow_requests = True
        assert leased.release(), "in time, for all we know"
        assert not leased.release()
        proxy.swallow_requests = False
        assert Pool(name, store=redis_server.patient_url).acquire(timeout=LONG).member == "a"
        pool.close()


async def test_cancelled_settle_is_retried(redis_server: Server, name: str) -> None:
    """A release that was cancelled is retried in the background."""
    with FaultyProxy(redis_server.port) as proxy:
        pool = AsyncPool(name, store=f"{proxy.bare_url}?timeout=10", lease=600)
        await pool.add("a")
        leased = await pool.acquire(timeout=0)
        proxy.swallow_requests = True
        task = asyncio.create_task(leased.release())
        await until_async(lambda: proxy.swallowed)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        proxy.swallow_requests = False
        proxy.cut()  # nobody waits for what was swallowed
        assert (await AsyncPool(name, store=redis_server.patient_url).acquire(timeout=LONG)).member == "a"
        await pool.aclose()


def test_fork(url: str, name: str) -> None:
    """A forked child does not release its parent's lease."""
    pool = Pool(name, store=url)
    pool.add("a")
    leased = pool.acquire(timeout=0)
    leased._lease.process += 1
    assert not leased.release()
    assert pool.status().leased == 1


def test_lost_a_little_early(url: str, name: str, clock: ManualClock) -> None:
    """Two clocks do not run alike; one clock does."""
    pool = Pool(name, store=url, lease=20, clock=clock)
    pool.add("a")
    leased = pool.acquire(timeout=0)
    clock.advance(18.9)
    assert not leased.lost
    clock.advance(0.2)
    assert leased.lost == (url != "memory://")
    clock.advance(1)
    assert leased.lost


def test_next_waiter_is_told(redis_server: Server, name: str) -> None:
    """Whoever takes the first of two that came free at once, by time, tells whoever is first then."""
    client, clock = redis_server.client(), ManualClock()
    pool = Pool(name, store=RedisStore(redis_server.url, timeout=10, clock=clock))
    pool.add("a", "b")
    use(pool, cooldown=1)
    use(pool, cooldown=1)
    for who in ("first", "second"):
        assert pool._runner.execute(pool._terms.operation("acquire", who, 1))[0] == 0
    with client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(f"pool:{{{name}}}")
        heard.get_message(timeout=LONG)
        clock.advance(1)
        assert pool._runner.execute(pool._terms.operation("acquire", "first", 1))[0] == 1
        wait_until(lambda: heard.get_message(timeout=0.1), "it is told")
        assert pool._runner.execute(pool._terms.operation("acquire", "second", 1))[0] == 1
        assert heard.get_message(timeout=0.2) is None, "nobody waits"
    pool.close()


def test_empty_pools_are_swept(name: str, clock: ManualClock) -> None:
    """Memory drops the state of an empty pool."""
    empty, pool = Pool(name, clock=clock), Pool(f"{name}'", clock=clock)
    pool.add("a")
    empty.status()
    states = empty._runner.backend.states._states  # type: ignore[attr-defined]  # that of memory has them
    for _ in range(1024):
        pool.status()
    assert ("pool", name) not in states and ("pool", f"{name}'") in states


def test_redis_is_down(name: str) -> None:
    """Methods raise `StoreUnavailable`."""
    pool = Pool(name, store=f"redis://127.0.0.1:{free_port()}?timeout=0.5")
    with pytest.raises(StoreUnavailable):
        pool.acquire()
    with pytest.raises(StoreUnavailable):
        pool.add("a")
    pool.close()


def test_redis_goes_away_and_comes_back(node: Any, name: str) -> None:
    """What was given back meanwhile is back; nobody is told twice."""
    pool = Pool(name, store=f"{node.bare_url}?timeout=1", lease=300)
    answered(lambda: pool.add("a"))
    leased = pool.acquire(timeout=LONG)
    node.freeze()
    assert leased.release()
    node.thaw()
    assert pool.acquire(timeout=LONG).member == "a"
    pool.close()


def test_redis_keys(redis_server: Server) -> None:
    """The documented keys and scores."""
    pool = Pool("user-agents", store=redis_server.url)
    pool.add("ua-1", "ua-2")
    assert redis_server.client().type("pool:{user-agents}") == "zset"
    assert redis_server.client().zrange("pool:{user-agents}", 0, -1) == ["ua-1", "ua-2"]
    with pool.acquire():
        assert redis_server.client().zrange("pool:{user-agents}", 0, -1, withscores=True)[1] == ("ua-1", 2**53)
    assert all(key.startswith("pool:{user-agents}") for key in redis_server.names())


def test_what_is_left_of_who_waited(redis_server: Server) -> None:
    """A pool that never had members leaves nothing for ever, and none that has leaves more than it needs."""
    client = redis_server.client()
    with pytest.raises(PoolExhausted):
        Pool("empty", store=redis_server.patient_url, quota="5/minute").acquire(timeout=0.01)
    wait_until(lambda: client.zcard("pool:{empty}:waiting") == 0, "it has left")
    assert redis_server.names() and all(0 < client.pttl(key) <= 3_600_000 for key in redis_server.names())
    pool = Pool("full", store=redis_server.patient_url, quota="5/minute")
    pool.add("a")
    with pool.acquire():
        assert pool._runner.execute(pool._terms.operation("acquire", "waits", 1))[0] == 0
        ends = {key: client.pttl(key) for key in redis_server.names() if key.startswith("pool:{full}")}
        for part in (":waiting", ":alive", ":order"):
            assert 0 < ends["pool:{full}" + part] <= 3_600_000, part
    assert 0 < client.pttl("pool:{full}:done") <= 30_000
    assert {key for key in redis_server.names() if client.pttl(key) < 0} == {
        "pool:{full}" + part for part in ("", ":members", ":rules")
    }


NAMES = ["a b", "토큰", "{}", "a:b", "%", "0", "-1", "*", "'; return 1 --", "a\\b"]


def test_hostile_members(url: str, name: str) -> None:
    """Any text can be a member."""
    pool = Pool(name, store=url)
    pool.add(*NAMES)
    assert [use(pool) for _ in NAMES] == NAMES
    assert set(pool.status().members) == set(NAMES)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, InvalidKey, "256"),
    ({"name": "x", "lease": 0}, ValueError, "lease"),
    ({"name": "x", "lease": "30"}, ValueError, "lease"),
    ({"name": "x", "lease": 1e-9}, ValueError, "0.01"),
    ({"name": "x", "quota": 80}, InvalidQuota, "80/10 minutes"),
    ({"name": "x", "quota": ["80/m", 5]}, InvalidQuota, "80/10 minutes"),
    ({"name": "x", "slots": 0}, ValueError, "slots"),
    ({"name": "x", "slots": 1.0}, ValueError, "slots"),
    ({"name": "x", "failures": 0}, ValueError, "failures"),
    ({"name": "x", "open_for": -1}, ValueError, "open_for"),
    ({"name": "x", "successes": 0}, ValueError, "successes"),
    ({"name": "x", "quota": "10/fortnight"}, InvalidQuota, "minute"),
    ({"name": "x", "quota": "10/s burst 20"}, InvalidQuota, "burst"),
]


@pytest.mark.parametrize("door", [Pool, AsyncPool])
@pytest.mark.parametrize(
    ("arguments", "error", "word"), BAD, ids=[", ".join(row[0]) + f" {number}" for number, row in enumerate(BAD)]
)
def test_bad_arguments(door: Any, arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    """The error says what would be right."""
    with pytest.raises(error, match=word):
        door(**arguments)


def test_bad_calls(url: str, name: str) -> None:
    """The error says what would be right."""
    pool = Pool(name, store=url)
    for member in ("", None, 5, "a\nb"):
        with pytest.raises(InvalidKey, match="member"):
            pool.add(member)  # type: ignore[arg-type]  # that is the point
    pool.add("a")
    leased = pool.acquire()
    for cooldown in (-1, float("nan"), "5", True):
        with pytest.raises(ValueError, match="cooldown"):
            leased.release(cooldown=cooldown)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="timeout"):
        pool.acquire(timeout=-1)
    assert leased.release()
    assert issubclass(PoolExhausted, HeadgateError)
