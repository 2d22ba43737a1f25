"""One script, one round trip, by the server's clock; a flushed script cache is filled again."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from headgate import AsyncLimiter, Limiter, Quota
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.callers import Callers, MakeLimiter
from tests.support.quotas import ALGORITHMS, BUCKETS, LAWS
from tests.support.servers import Server
from tests.support.stores import OneServer

ROOT = Path(__file__).parent.parent


def commands(server: Server, work: Callable[[], object]) -> list[str]:
    """Every command that a client of *work* sends; what scripts call inside the server does not count."""
    with server.client() as client, client.monitor() as monitor:
        work()
        with server.client() as marker:
            marker.echo("the end")
        seen: list[tuple[str, str]] = []
        for line in monitor.listen():
            if line["client_type"] == "lua":
                continue
            if "the end" in line["command"]:
                ours = {port for port, command in seen if command == "EVALSHA"}  # others may PING meanwhile
                return [command for port, command in seen if port in ours]
            seen.append((line["client_port"], line["command"].split()[0].upper()))
    raise AssertionError("the monitor ended")


@pytest.mark.parametrize("quotas", [["50/minute"], ["50/minute", "60/hour", "70/day"]], ids=["one", "several"])
@pytest.mark.parametrize("algorithm", LAWS)
def test_a_decision_is_one_command(
    algorithm: str, quotas: list[str], any_redis_server: Server, any_redis_limiter: MakeLimiter
) -> None:
    limiter = any_redis_limiter(quotas, algorithm=algorithm)
    limiter.try_acquire("k")
    limiter.reset("k")  # the scripts are known now: where slots can be booked, a reset has one of its own
    calls: list[Callable[[], object]] = [
        lambda: limiter.try_acquire("k"),
        lambda: limiter.try_acquire("k", permits=7),
        lambda: limiter.peek("k"),
        lambda: limiter.refund("k"),
        lambda: limiter.reset("k"),
    ]
    for call in calls:
        assert commands(any_redis_server, call) == ["EVALSHA"]


def test_a_decision_is_one_call(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """The same by INFO commandstats, granted and denied."""
    limiter = any_redis_limiter("50/30d")
    limiter.peek("k")
    before = {name: any_redis_server.calls(name) for name in ("evalsha", "eval", "script|load")}
    assert sum(limiter.try_acquire("k").allowed for _ in range(100)) == 50
    after = {name: any_redis_server.calls(name) for name in before}
    assert after == before | {"evalsha": before["evalsha"] + 100}


@pytest.mark.parametrize("algorithm", LAWS)
def test_flushed_script_cache(algorithm: str, redis_callers: Callers) -> None:
    """A server that has forgotten the script is told it again, and no call is degraded."""
    store = redis_callers.store
    assert isinstance(store, OneServer)
    limiter = redis_callers.limiter("50/30d", algorithm=algorithm)
    with store.server.client() as client:
        for left in (40, 30, 20, 10, 0):
            calls = [redis_callers.start(limiter.try_acquire, "k") for _ in range(10)]
            assert sorted(call.result().remaining for call in calls) == list(range(left, left + 10))
            assert all(call.result() for call in calls)
            client.script_flush()
        assert not limiter.try_acquire("k")


@pytest.mark.parametrize("algorithm", LAWS)
def test_no_command_looks_through_all_keys(
    algorithm: str, any_redis_server: Server, any_redis_limiter: MakeLimiter
) -> None:
    """A script must not look through all keys, whatever the number of keys."""
    limiter = any_redis_limiter(["5/minute", "6/hour"], algorithm=algorithm)
    for _ in range(7):
        limiter.try_acquire("k")
    limiter.refund("k")
    limiter.reset("k")
    for command in ("keys", "scan", "zrange|all", "flushall"):
        before = 1 if command == "flushall" else 0  # our own, before the test
        assert any_redis_server.calls(command) <= before


SKEWED = """
import sys, time
skew = int(sys.argv[1]) * 10**9
for name in ("time_ns", "monotonic_ns", "perf_counter_ns"):
    real = getattr(time, name)
    setattr(time, name, lambda real=real: real() + skew)
for name in ("time", "monotonic"):
    real = getattr(time, name)
    setattr(time, name, lambda real=real: real() + skew / 10**9)
from headgate import Limiter
for algorithm in sys.argv[3:]:
    with Limiter("5/30d", algorithm=algorithm, store=sys.argv[2], on_store_error="raise") as limiter:
        print(algorithm, limiter.try_acquire("k", permits=3).allowed, limiter.peek("k", permits=0).remaining)
"""


def test_wrong_clock_of_a_client(redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """Clients a hundred days ahead and behind count against the same state, by the server's time."""
    limiters = [redis_limiter("5/30d", algorithm=algorithm) for algorithm in ALGORITHMS]
    assert all(limiter.try_acquire("k", permits=3) for limiter in limiters)
    for skew in (100 * 86400, -100 * 86400):
        command = [sys.executable, "-c", SKEWED, str(skew), redis_server.patient_url, *ALGORITHMS]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True).stdout
        assert said.splitlines() == [f"{algorithm} False 2" for algorithm in ALGORITHMS]
    assert [limiter.peek("k", permits=0).remaining for limiter in limiters] == [2] * len(limiters)


@pytest.mark.parametrize("back", [0.000001, 1.0, 59.0, 61.0, 3600.0, 10_000_000.0])
@pytest.mark.parametrize("algorithm", [name for name in LAWS if name != "fixed_window"])
def test_clock_that_steps_back(algorithm: str, back: float, redis_limiter: MakeLimiter) -> None:
    """A failover can put an older clock in charge. (A fixed window then has another name, and its own count.)"""
    before, after = ManualClock(1_700_000_000), ManualClock(1_700_000_000 - back)
    assert redis_limiter("10/minute", algorithm=algorithm, clock=before).try_acquire("k", permits=10)
    limiter = redis_limiter("10/minute", algorithm=algorithm, clock=after)
    denied = limiter.try_acquire("k")
    assert not denied
    assert 0 < denied.retry_after <= 180
    after.advance(denied.retry_after - 0.000001)
    assert not limiter.try_acquire("k")
    after.advance(0.000001)
    assert limiter.try_acquire("k"), "retry_after is true here too"
    after.advance(limiter.peek("k", permits=0).reset_after)
    assert limiter.try_acquire("k", permits=10)
    assert not limiter.try_acquire("k")


CHANGES = [("100/minute", "10/minute"), ("10/minute", "100/minute"), ("10/minute", "10/hour"), ("50/hour", "7/second")]
BURST_CHANGES = [("100/minute", "100/minute burst 5"), ("7/minute burst 1000", "11/hour"), ("3/day", "999983/day")]


@pytest.mark.parametrize(
    ("algorithm", "old", "new"),
    [
        (algorithm, old, new)
        for algorithm in LAWS
        for old, new in CHANGES + (BURST_CHANGES if algorithm in BUCKETS else [])
    ],
)
def test_new_quota_on_live_keys(algorithm: str, old: str, new: str, redis_limiter: MakeLimiter) -> None:
    """What the old quota wrote is read by the new one: sane numbers, no error, and it comes back to normal."""
    clock = ManualClock()
    clock.advance(12.345678)
    before = redis_limiter(old, algorithm=algorithm, clock=clock)
    for part in (3, 2):
        before.try_acquire("k", permits=min(part, Quota.parse(old).capacity))
    before.try_acquire("k", permits=Quota.parse(old).capacity // 2 or 1)
    clock.advance(1.0)
    limiter = redis_limiter(new, algorithm=algorithm, clock=clock)
    capacity = Quota.parse(new).capacity
    state = limiter.peek("k", permits=0)
    assert state.limit == capacity
    assert 0 <= state.remaining <= capacity
    if state.remaining:
        assert limiter.try_acquire("k", permits=state.remaining)
    denied = limiter.try_acquire("k")
    assert not denied
    clock.advance(denied.retry_after)
    assert limiter.try_acquire("k"), "retry_after is true here too"
    limiter.refund("k")
    clock.advance(limiter.peek("k", permits=0).reset_after)
    rested = limiter.peek("k", permits=0)
    assert (rested.remaining, rested.reset_after) == (capacity, 0.0)


def test_new_algorithm_on_live_keys(redis_limiter: MakeLimiter) -> None:
    for _ in range(2):
        for algorithm in LAWS:
            limiter = redis_limiter("10/30d", algorithm=algorithm)
            assert limiter.try_acquire("k", permits=5)


@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}, {"protocol": 2}], ids=str)
def test_a_client_of_ones_own(options: dict[str, Any], redis_server: Server) -> None:
    """It is used as it is, and left open."""
    with redis.Redis.from_url(redis_server.bare_url, **options) as client:
        store = RedisStore(client, prefix="mine", clock=ManualClock())
        with Limiter("2/minute", store=store, on_store_error="raise") as limiter:
            assert limiter.try_acquire("k").remaining == 1
        store.close()
        assert client.ping()
        with Limiter("2/minute", store=store, on_store_error="raise") as again:
            assert again.try_acquire("k").remaining == 0
    assert redis_server.names() == ["mine:token_bucket:{k}"]


@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}, {"protocol": 2}], ids=str)
async def test_an_async_client_of_ones_own(options: dict[str, Any], redis_server: Server) -> None:
    async with redis.asyncio.Redis.from_url(redis_server.bare_url, **options) as client:
        store = RedisStore(client, clock=ManualClock())
        async with AsyncLimiter("2/minute", store=store, on_store_error="raise") as limiter:
            assert (await limiter.try_acquire("k")).remaining == 1
        assert await client.ping()


def test_one_store_under_both_doors(redis_server: Server) -> None:
    store = RedisStore(redis_server.url, clock=ManualClock())

    async def check() -> int:
        limiter = AsyncLimiter("10/minute", store=store)
        left = (await limiter.try_acquire("k", permits=3)).remaining
        await store.aclose()
        return left

    assert Limiter("10/minute", store=store).try_acquire("k", permits=2).remaining == 8
    assert asyncio.run(check()) == 5
    assert Limiter("10/minute", store=store).peek("k", permits=0).remaining == 5
    store.close()


def test_the_database_of_the_url(redis_server: Server) -> None:
    url = redis_server.bare_url.removesuffix("/0") + "/5?timeout=10"
    with Limiter("10/minute", store=url, on_store_error="raise") as limiter:
        limiter.try_acquire("k")
    with redis.Redis(port=redis_server.port, db=5) as client:
        assert client.dbsize() == 1
    assert redis_server.client().dbsize() == 0


def test_a_password(mortal_server: Server) -> None:
    with mortal_server.client() as client:
        client.config_set("requirepass", "s3cret")
    url = f"redis://:s3cret@127.0.0.1:{mortal_server.port}/0?timeout=10"
    with Limiter("10/minute", store=url, on_store_error="raise") as limiter:
        assert limiter.try_acquire("k").remaining == 9


FORKED = """
import os, sys
from headgate import Limiter
limiter = Limiter("100/30d", store=sys.argv[1], on_store_error="raise")
assert limiter.try_acquire("k")
children = []
for _ in range(4):
    child = os.fork()
    if not child:
        os._exit(sum(limiter.try_acquire("k").allowed for _ in range(50)))
    children.append(child)
own = sum(limiter.try_acquire("k").allowed for _ in range(50))
print(1 + own + sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_fork(redis_server: Server) -> None:
    """A forked child does not use its parent's connection."""
    command = [sys.executable, "-c", FORKED, redis_server.patient_url]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True).stdout
    assert said == "100\n"
