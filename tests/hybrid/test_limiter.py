"""`HybridLimiter` on a real Redis, for threads."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import (
    HybridLimiter,
    InvalidKey,
    InvalidPermits,
    InvalidQuota,
    PermitsExceedLimit,
    RateLimited,
)
from headgate.hybrid import background
from headgate.hybrid.protocol import PROFILES, quota_params
from headgate.rule import AlgorithmName, Rule
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.hybrid.test_outages import looked_around
from tests.support.clocks import WatchedClock, until
from tests.support.hybrid_stores import ForbiddenStore, HeldStore
from tests.support.servers import Server

KINDS = ["token_bucket", "gcra", "fixed_window", "sliding_window_counter"]
SLOW = "100/360d"  # nothing to speak of refills while a test runs, and no window ends at midnight


def name_of(key: str, kind: str = "token_bucket") -> str:
    return f"rate_limiter:hybrid:{kind}:{{{key}}}"


def out(server: Server, key: str = "k", kind: str = "token_bucket") -> int:
    return int(server.client().hget(name_of(key, kind), "out") or 0)


@pytest.mark.parametrize("kind", KINDS)
def test_quota(kind: AlgorithmName, any_redis_server: Server) -> None:
    """Exactly the quota is allowed, in order, with falling remaining and a retry time when it is spent."""
    with HybridLimiter(SLOW, algorithm=kind, store=any_redis_server.url) as limiter:
        decisions = [limiter.try_acquire("k") for _ in range(300)]
    assert sum(map(bool, decisions)) == 100
    assert all(decisions[:100]) and not any(decisions[100:]), "the first hundred"
    assert [d.remaining for d in decisions[:100]] == sorted((d.remaining for d in decisions[:100]), reverse=True)
    assert {d.limit for d in decisions} == {100}
    assert all(d.retry_after > 0 and d.remaining == 0 for d in decisions[100:])
    assert not any(d.degraded for d in decisions)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_limit(kind: AlgorithmName, redis_server: Server) -> None:
    """Four limiters together admit the quota, all of it and no more."""
    clock = WatchedClock()
    limiters = [HybridLimiter(SLOW, algorithm=kind, store=redis_server.url, clock=clock) for _ in range(4)]
    admitted = 0
    for turn in range(400):
        admitted += limiters[turn % 4].try_acquire("k").allowed
    assert admitted <= 100

    def all_spent() -> bool:  # what one holds in vain goes back, a spare after 20 seconds, and another has it
        nonlocal admitted
        clock.advance(0.1)
        until(looked_around, clock, *limiters)
        admitted += limiters[0].try_acquire("k").allowed
        return admitted >= 100

    until(all_spent)
    assert not any(limiter.try_acquire("k") for limiter in limiters)
    for limiter in limiters:
        limiter.close()
    assert admitted == 100


def test_several_permits(redis_server: Server) -> None:
    """A call of several permits is all or nothing; bad numbers raise."""
    with HybridLimiter(SLOW, store=redis_server.url) as limiter:
        assert limiter.try_acquire("k", permits=60)
        assert not limiter.try_acquire("k", permits=60)
        assert limiter.try_acquire("k", permits=40), "a refusal spends nothing"
        assert not limiter.try_acquire("k")
        with pytest.raises(PermitsExceedLimit):
            limiter.try_acquire("k", permits=101)
        for bad in (0, -1, True, 1.0, "1", None):
            with pytest.raises(InvalidPermits):
                limiter.try_acquire("k", bad)  # type: ignore[arg-type]  # that is the test


def test_bad_keys(redis_server: Server) -> None:
    """A bad key raises and leaves nothing in Redis; any other text is a key."""
    with HybridLimiter(SLOW, store=redis_server.url) as limiter:
        for bad in ("", "x" * 257, "a\nb", None, 7, b"k", ["k"]):
            with pytest.raises(InvalidKey):
                limiter.try_acquire(bad)  # type: ignore[arg-type]  # that is the test
        assert redis_server.names() == []
        for strange in ("{}", "%", "a:b", "키", "k" * 256):
            assert limiter.try_acquire(strange).remaining == 99


def test_redis_keys(redis_server: Server) -> None:
    """The names of keys in Redis, with prefix, name and hash_keys."""
    with HybridLimiter(SLOW, store=redis_server.url, name="a:b", prefix="mine") as limiter:
        limiter.try_acquire("user:{1}")
        assert redis_server.names() == ["mine:hybrid:token_bucket:{user:%7B1%7D}:a%3Ab"]
        assert redis_server.client().pttl(redis_server.names()[0]) > 86_000_000
    redis_server.flush()
    with HybridLimiter(SLOW, store=redis_server.url, hash_keys=True) as limiter:
        limiter.try_acquire("user:1")
        [name] = redis_server.names()
        assert "user" not in name


def test_peek(redis_server: Server) -> None:
    """peek() spends nothing, and writes nothing to Redis."""
    with HybridLimiter(SLOW, store=redis_server.url) as limiter:
        assert limiter.peek("k").allowed and limiter.peek("k", 0).remaining == 100
        assert redis_server.names() == []
        limiter.try_acquire("k", 30)
        assert limiter.peek("k", 0).remaining == 70
        assert limiter.peek("k", 70).allowed and not limiter.peek("k", 71).allowed
        assert limiter.peek("k", 71).retry_after == pytest.approx(311_040, rel=0.001)
        assert limiter.try_acquire("k", 70)
        assert not limiter.peek("k")


def test_refund(redis_server: Server) -> None:
    """refund() gives back, never above the capacity."""
    with HybridLimiter(SLOW, store=redis_server.url) as limiter:
        assert limiter.try_acquire("k", 100)
        assert not limiter.try_acquire("k")
        limiter.refund("k", 3)
        assert [bool(limiter.try_acquire("k")) for _ in range(4)] == [True, True, True, False]
        limiter.refund("k", 1_000_000)
        assert sum(bool(limiter.try_acquire("k")) for _ in range(200)) == 100, "never above the capacity"
        limiter.refund("new", 5)
        assert limiter.peek("new", 0).remaining == 100
        for bad in (0, -1, True, "1"):
            with pytest.raises(InvalidPermits):
                limiter.refund("k", bad)  # type: ignore[arg-type]  # that is the test


def test_refund_before_close(redis_server: Server) -> None:
    """A refund just before the limiter closes is not lost."""
    with HybridLimiter(SLOW, store=redis_server.patient_url) as limiter:
        assert limiter.try_acquire("k", 30)
    limiter = HybridLimiter(SLOW, store=redis_server.patient_url)
    manager = limiter._backend.manager
    with manager.lock:  # the background thread stands still
        limiter.refund("k", 10)
        limiter._backend.release_all()
    limiter.close()
    with HybridLimiter(SLOW, store=redis_server.patient_url) as other:
        assert other.peek("k", 0).remaining == 80


@pytest.mark.parametrize("kind", KINDS)
def test_reset(kind: AlgorithmName, redis_server: Server) -> None:
    """reset() makes a key as good as new."""
    with HybridLimiter(SLOW, algorithm=kind, store=redis_server.url) as limiter:
        for _ in range(2):
            assert sum(bool(limiter.try_acquire("k")) for _ in range(200)) == 100
            limiter.reset("k")
        assert limiter.peek("k", 0).remaining == 100


def test_acquire(redis_server: Server) -> None:
    """acquire() waits for permits, and raises RateLimited after its time-out."""
    with HybridLimiter("20/second burst 2", store=redis_server.url) as limiter:
        start = time.monotonic()
        for _ in range(6):
            assert limiter.acquire("k", timeout=30)
        assert time.monotonic() - start > 0.19, "four had to wait for a twentieth of a second each"
    with HybridLimiter("1/day", store=redis_server.url, name="other") as limiter:
        assert limiter.acquire("k")
        with pytest.raises(RateLimited) as caught:
            limiter.acquire("k", timeout=0.01)
        assert caught.value.decision.retry_after > 1000


def test_context_manager(redis_server: Server) -> None:
    """limit() guards a block."""
    with HybridLimiter("1/day", store=redis_server.url) as limiter:
        with limiter.limit("k"):
            pass
        with pytest.raises(RateLimited), limiter.limit("k"):
            pass


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"algorithm": "leaky_bucket"}, "does not serve leaky_bucket.*token_bucket"),
        ({"algorithm": "sliding_window"}, "does not serve sliding_window.*sliding_window_counter"),
        ({"algorithm": "bogus"}, "unknown algorithm"),
        ({"quota": ["5/s", "10/m"]}, "one quota"),
        ({"quota": "5/s burst 10", "algorithm": "fixed_window"}, "no burst"),
        ({"store": "memory://"}, "use Limiter"),
        ({"store": MemoryStore()}, "needs a store that keeps leases: .*; got MemoryStore"),
        ({"store": None}, r"one of shared://, redis://, .*, or a SharedStore or RedisStore or Postgre.*; got NoneType"),
        ({"store": "http://x"}, "unknown store 'http://': .* one of shared://, redis://"),
        ({"accuracy": "perfect"}, "high, medium, low"),
        ({"accuracy": []}, "high, medium, low"),
        ({"cold": "hot"}, "wait or optimistic"),
        ({"on_store_error": "panic"}, "allow, deny, local, raise"),
        ({"max_local_keys": 0}, "max_local_keys"),
        ({"max_local_keys": True}, "max_local_keys"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """What leases cannot serve is refused with a message that says what would be right."""
    with pytest.raises(ValueError, match=message):
        HybridLimiter(**{"quota": "5/s", "store": "redis://127.0.0.1:1", **arguments})
    assert issubclass(InvalidQuota, ValueError)


def test_new_algorithm() -> None:
    """An algorithm that leases do not know is refused by its name."""
    rule: Any = Rule("5/s", "sliding_window")
    rule.kind = "seventh"
    with pytest.raises(ValueError, match="does not serve seventh"):
        quota_params(rule)


def test_warm_key_needs_no_network(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision from a lease sends nothing and wakes no thread."""
    clock = ManualClock()
    store = ForbiddenStore(redis_server.url, clock=clock)
    limiter = HybridLimiter("1000000/second", store=store)

    def spent_without_network() -> bool:
        for _ in range(300):
            limiter.try_acquire("k")
            clock.advance(0.000_1)
        with (
            limiter._backend.manager.lock
        ):  # the synchroniser stands still, and with it all that is not the caller's own
            before = limiter.stats()
            if before.held < 100:
                return False  # it holds nothing yet, or has just given it back
            store.forbidden = True
            with monkeypatch.context() as broken:
                broken.setattr("socket.socket.send", None)
                broken.setattr("threading.Event.set", None)
                assert all([limiter.try_acquire("k").allowed for _ in range(before.held)])
            after = limiter.stats()
            store.forbidden = False
        assert (after.remote, after.trips) == (before.remote, before.trips)
        assert after.local - before.local == before.held
        return True

    until(spent_without_network)
    limiter.close()
    store.close()


def test_concurrent_threads(redis_server: Server) -> None:
    """Eight threads together get the quota, no more and no less."""
    limiter = HybridLimiter("5000/360d", store=redis_server.url)
    counts = [0] * 8
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for _ in range(2000):
            counts[number] += limiter.try_acquire("k").allowed

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    limiter.close()
    assert sum(counts) == 5000


def test_close_releases(redis_server: Server) -> None:
    """close() gives the lease back; the limiter can be used again."""
    limiter = HybridLimiter("1000/day", store=redis_server.url)
    until(lambda: limiter.try_acquire("k").allowed and limiter.stats().held > 1)
    spent = limiter.stats().local + limiter.stats().remote
    limiter.close()
    assert out(redis_server) == 0
    with HybridLimiter("1000/day", store=redis_server.url) as other:
        assert other.peek("k", 0).remaining == 1000 - spent
    assert limiter.try_acquire("k"), "it may be used again"
    limiter.close()


EXIT = """
import sys, time
from headgate import HybridLimiter
from headgate.hybrid import background
background.RELEASE_TIMEOUT = 30.0
limiter = HybridLimiter("1000/day", store=sys.argv[1])
while limiter.stats().held < 2:
    assert limiter.try_acquire("k")
print(limiter.stats().local + limiter.stats().remote)
"""


EXIT_OF_A_LOOP = """
import asyncio, sys
from headgate import AsyncHybridLimiter
from headgate.hybrid import background
background.RELEASE_TIMEOUT = 30.0
limiter = AsyncHybridLimiter("1000/day", store=sys.argv[1])
async def main():
    while limiter.stats().held < 2:
        assert await limiter.try_acquire("k")
        await asyncio.sleep(0.001)
    print(limiter.stats().local + limiter.stats().remote)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
loop = asyncio.new_event_loop()  # and not asyncio.run, which ends a loop as it should be
loop.run_until_complete(main())
loop.close()
"""


@pytest.mark.parametrize("script", [EXIT, EXIT_OF_A_LOOP], ids=["thread", "event loop"])
def test_exit_releases(script: str, redis_server: Server) -> None:
    """A process that ends without close() gives its leases back."""
    done = subprocess.run(
        [sys.executable, "-c", script, redis_server.patient_url],
        env=os.environ | {"PYTHONPATH": str(Path(headgate.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stderr == ""
    spent = int(done.stdout)
    assert out(redis_server) == 0
    with HybridLimiter("1000/day", store=redis_server.url) as limiter:
        assert limiter.peek("k", 0).remaining == 1000 - spent


def test_collected_limiter(redis_server: Server) -> None:
    """A limiter that is garbage collected gives its leases back, and its thread ends."""
    limiter = HybridLimiter("1000/day", store=redis_server.patient_url)
    while limiter.stats().held < 2:
        assert limiter.try_acquire("k")
    manager = weakref.ref(limiter._backend.manager)
    del limiter
    gc.collect()
    until(lambda: out(redis_server) == 0)
    until(gone, manager)


def test_accuracy_in_capitals(redis_server: Server) -> None:
    """accuracy may be written in capitals; repr() names the store."""
    with HybridLimiter("5/day", store=redis_server.patient_url, accuracy="LOW") as limiter:  # type: ignore[arg-type]
        assert limiter._backend.profile is PROFILES["low"]
        assert "redis://" in repr(limiter) and "HybridStore" not in repr(limiter)


def test_kept_method(redis_server: Server) -> None:
    """A bound method works after its limiter was collected, even while the first call waits."""

    def limiter() -> HybridLimiter:
        return HybridLimiter("5/day", store=redis_server.patient_url, name="kept", on_store_error="allow")

    kept = [limiter().try_acquire for _ in range(3)] + [limiter().with_timeout(10.0).try_acquire for _ in range(3)]
    made = [each("k") for each in kept for _ in range(4)]
    assert not any(each.degraded for each in made)
    assert 1 <= sum(bool(each) for each in made) <= 5  # one may keep a permit that others would have taken


def gone(something: weakref.ref[Any]) -> bool:
    gc.collect()
    return something() is None


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False])
def test_thread_ends_in_outage(closed: bool) -> None:
    """The thread ends during an outage once its limiter is closed or collected."""
    limiter = HybridLimiter("5/second", store="redis://127.0.0.1:1", on_store_error="allow")
    assert limiter.try_acquire("k").degraded
    manager = weakref.ref(limiter._backend.manager)
    if closed:
        limiter.close()
    del limiter
    until(gone, manager)


def test_fork(redis_server: Server) -> None:
    """A forked child has leases of its own; parent and child share the quota."""
    limiter = HybridLimiter("1000/day", store=redis_server.url)
    until(lambda: limiter.try_acquire("k").allowed and limiter.stats().held > 1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            held = limiter.stats().held
            many = sum(bool(limiter.try_acquire("k")) for _ in range(2000))
            limiter.close()
            os.write(write, f"{held} {many}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        held, many = map(int, pipe.read().split())
    assert os.waitpid(child, 0)[1] == 0
    assert held == 0
    admitted = many + limiter.stats().local + limiter.stats().remote

    def all_spent() -> bool:  # for a while it may refuse what the child held when it last asked
        nonlocal admitted
        admitted += sum(bool(limiter.try_acquire("k")) for _ in range(2000))
        return admitted >= 1000

    until(all_spent)
    assert admitted == 1000
    limiter.close()


def test_fork_ids(redis_server: Server) -> None:
    """Forked children have node ids of their own, for unused limiters too."""
    used, unused = (HybridLimiter("1000/day", store=redis_server.url, name=name) for name in ("a", "b"))
    assert used.try_acquire("k")
    limiters = [used, unused]
    names = [limiter._backend.node_id for limiter in limiters]
    for _ in range(2):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, " ".join(limiter._backend.node_id for limiter in limiters).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            names += pipe.read().split()
        os.waitpid(child, 0)
    assert len(set(names)) == 6
    for limiter in limiters:
        limiter.close()


def test_suspended_machine(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was suspended spends no lease of before."""
    limiter = HybridLimiter("1000/day", store=redis_server.url)
    spent = held = 0
    slept = background.suspended_time() + 3600 * 10**9
    while held < 5:
        spent += limiter.try_acquire("k").allowed
        with limiter._backend.manager.lock:  # or what is held may go back before the look at the clock
            held = limiter.stats().held
            if held >= 5:
                monkeypatch.setattr(background, "suspended_time", lambda: slept)
                lease = limiter._backend.leases["k"]
    until(lambda: lease.expires == 0 or lease.lease_id == 0 or limiter.stats().burned)
    assert limiter.try_acquire("k").allowed, "with a new lease"
    limiter.close()
    with HybridLimiter("1000/day", store=redis_server.url) as other:
        assert other.peek("k", 0).remaining <= 1000 - spent - held, "what was held may have been spent"


def test_idle_keys(redis_server: Server) -> None:
    """Idle keys give back and are forgotten, a busy key is not."""
    clock = WatchedClock()
    store = RedisStore(redis_server.url, clock=clock)
    limiter = HybridLimiter("1000/day", store=store)
    for number in range(20):
        limiter.try_acquire(f"k{number}")
    seconds = 0

    def forgotten() -> bool:
        nonlocal seconds
        seconds += 1
        limiter.try_acquire("busy")
        clock.advance(1.0)
        until(looked_around, clock, limiter)
        return limiter.stats().keys == 1

    until(forgotten)
    assert seconds > 20, "a spare is kept for that long"
    assert "busy" in limiter._backend.leases
    assert sum(out(redis_server, f"k{number}") for number in range(20)) == 0
    limiter.close()
    store.close()


def test_max_local_keys(redis_server: Server) -> None:
    """max_local_keys bounds the leases; evicted ones go back."""
    limiter = HybridLimiter("10/day", store=redis_server.url, max_local_keys=50)
    for number in range(300):
        assert limiter.try_acquire(f"k{number}")
    more = itertools.count(300)  # a lease in a report is not evicted: there may be one too many
    until(lambda: limiter.try_acquire(f"k{next(more)}") and limiter.stats().keys <= 50)
    limiter.close()
    assert sum(out(redis_server, f"k{number}") for number in range(next(more))) == 0, "evicted leases were given back"


def test_batches(redis_server: Server) -> None:
    """Sixty waiting keys travel in two trips at most."""
    store = HeldStore(redis_server.url, clock=ManualClock())
    store.released = threading.Event()
    limiter = HybridLimiter("1000/second", store=store)
    threads = [threading.Thread(target=limiter.try_acquire, args=(f"k{number}",)) for number in range(60)]
    for thread in threads:
        thread.start()
    until(lambda: limiter.stats().remote == 60)
    store.released.set()
    for thread in threads:
        thread.join()
    stats = limiter.stats()
    assert (stats.syncs, stats.failures) == (60, 0) and stats.trips <= 2, "the first ones, and all the others"
    limiter.close()
    store.close()


def test_shared_manager(redis_server: Server) -> None:
    """Limiters on one store share its manager."""
    store = RedisStore(redis_server.url)
    limiters = [HybridLimiter(SLOW, store=store, name=f"n{number}") for number in range(3)]
    assert len({limiter._backend.manager for limiter in limiters}) == 1
    for limiter in limiters:
        assert limiter.try_acquire("k").remaining == 99
    for limiter in limiters:
        limiter.close()
    assert len(redis_server.names()) == 3
    store.close()


def test_local_denial(redis_server: Server) -> None:
    """A repeated denial needs no trip and ends exactly at its retry time."""
    clock = ManualClock()
    store = RedisStore(redis_server.url, clock=clock)
    limiter = HybridLimiter("1/minute burst 3", store=store)
    assert [bool(limiter.try_acquire("k")) for _ in range(4)] == [True, True, True, False]
    before = limiter.stats()
    refusals = [limiter.try_acquire("k") for _ in range(50)]
    assert not any(refusals) and limiter.stats().remote == before.remote
    assert refusals[0].retry_after == 60.0
    clock.advance(59.999_999)
    assert not limiter.try_acquire("k")
    clock.advance(0.000_001)
    assert limiter.try_acquire("k")
    limiter.close()
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_retry_after(kind: AlgorithmName, redis_server: Server) -> None:
    """A call after retry_after succeeds."""
    clock = ManualClock()
    store = RedisStore(redis_server.url, clock=clock)
    limiter = HybridLimiter("5/minute", algorithm=kind, store=store)
    for permits in (1, 1, 3, 2, 1, 5, 4, 1):
        decision = limiter.try_acquire("k", permits)
        if not decision:
            clock.advance(decision.retry_after)
            decision = limiter.try_acquire("k", permits)
        assert decision, f"{permits} after {decision.retry_after}"
    limiter.close()
    store.close()


def test_optimistic(redis_server: Server) -> None:
    """cold=optimistic grants the first call at once and charges it afterwards."""
    store = ForbiddenStore(redis_server.url)
    limiter = HybridLimiter("3/day", store=store, cold="optimistic")
    first = limiter.try_acquire("k")
    assert first.allowed and first.remaining == 2
    until(lambda: int(redis_server.client().hlen(name_of("k"))) > 0)
    assert sum(bool(limiter.try_acquire("k")) for _ in range(10)) == 2, "the first was charged"
    limiter.close()
    store.close()


def test_stats(redis_server: Server) -> None:
    """stats() counts every permit once."""
    limiter = HybridLimiter("1000/second", store=redis_server.url)
    assert limiter.stats().local_ratio == 1.0
    for _ in range(5000):
        limiter.try_acquire("k")
    stats = limiter.stats()
    assert stats.local + stats.remote == 5000
    assert stats.backend == "up" and stats.failures == 0 and stats.trips >= 1 and stats.trip_seconds > 0
    assert limiter.store_health().state == "closed"
    assert limiter.with_timeout(1).stats().local == limiter.stats().local
    limiter.close()


def test_only_the_timed_one_is_kept(redis_server: Server) -> None:
    """A limiter of `with_timeout` keeps the leases of the limiter that it came from."""
    limiter = HybridLimiter("1000/second", store=redis_server.url)
    timed = limiter.with_timeout(5)
    original = weakref.ref(limiter)
    del limiter
    gc.collect()
    assert timed.try_acquire("k") and original() is not None
    del timed
    gc.collect()
    assert original() is None


def test_public_types() -> None:
    assert headgate.HybridLimiter is HybridLimiter
    assert "HybridLimiter" in headgate.__all__
    assert issubclass(HybridLimiter, headgate.Limiter)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        headgate.Nothing  # noqa: B018


def test_denied_peek(redis_server: Server) -> None:
    """A denied peek needs no trip while the denial is certain."""
    with HybridLimiter("5/day", store=redis_server.url, clock=ManualClock()) as limiter:
        for _ in range(8):
            limiter.try_acquire("k")
        before = limiter.stats().syncs
        assert not limiter.peek("k")
        assert limiter.stats().syncs == before


def test_close_at_once(redis_server: Server) -> None:
    """close() does not wait for the next tick, which never comes by a clock that stands still."""
    with HybridLimiter("1000/day", store=redis_server.url, clock=ManualClock()) as limiter:
        for number in range(200):
            assert limiter.try_acquire(f"k{number}")
        assert limiter.stats().held > 100
    assert sum(out(redis_server, f"k{number}") for number in range(200)) == 0


def test_signal_handler_inside_a_step(redis_server: Server) -> None:
    """A signal handler that interrupts a step gets the policy's answer, and nothing is remembered."""
    with HybridLimiter("1000/second", store=redis_server.url, on_store_error="deny") as limiter:
        assert limiter.try_acquire("warm")
        with limiter._backend.manager.lock:  # as if it had interrupted a call of this very thread
            for made in (limiter.try_acquire("cold"), limiter.peek("colder")):
                assert not made.allowed and made.degraded
        assert limiter.try_acquire("cold"), "and nothing is remembered"


def test_without_redis_py() -> None:
    """Everything but HybridLimiter on Redis works without redis-py."""
    code = """
import sys
sys.modules["redis"] = None
from headgate import *
Limiter("1/second")
from headgate.simulate import Scenario, simulate
from headgate.rule import AlgorithmName
try:
    from headgate import HybridLimiter
    HybridLimiter("1/second")
except ImportError as error:
    assert "headgate[redis]" in str(error), error
else:
    raise AssertionError("it is there")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_reset_elsewhere(redis_server: Server) -> None:
    """A reset by another process ends a denial here within seconds."""
    clock = ManualClock(1_700_000_000.0)
    options: dict[str, Any] = {"store": f"{redis_server.bare_url}?timeout=10", "clock": clock}
    with HybridLimiter("10/day", **options) as here, HybridLimiter("10/day", **options) as there:
        while here.try_acquire("k"):
            pass
        refused = here.try_acquire("k")
        assert refused.retry_after > 1000, "the truth, though it is asked for again long before"
        clock.advance(2.5)
        assert not here.try_acquire("k"), "and what was spent is reported by now"
        there.reset("k")
        clock.advance(2.5)
        assert here.try_acquire("k")


@pytest.mark.parametrize(
    "option, message",
    [
        ({"acuracy": "low"}, "takes no acuracy; it takes accuracy, .*max_local_keys, .*timeout"),
        ({"max_keys": 5}, "max_local_keys"),
    ],
)
def test_unknown_options(option: dict[str, Any], message: str) -> None:
    """An unknown option raises a TypeError that lists the known ones."""
    with pytest.raises(TypeError, match=message):
        HybridLimiter("5/s", store="redis://127.0.0.1:1", **option)


def test_thread_ends_while_a_manual_clock_stands(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limiter in a test, with a clock that nobody moves any more, leaves no thread behind."""
    monkeypatch.setattr("headgate.hybrid.background.LINGER", 0.01)
    with HybridLimiter("10/day", store=redis_server.url, clock=ManualClock()) as limiter:
        assert limiter.try_acquire("k")
        assert limiter._backend.manager._thread is not None
    until(lambda: limiter._backend.manager._thread is None)
