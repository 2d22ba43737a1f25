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
from headgate.hybrid import drivers
from headgate.hybrid.protocol import PROFILES
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
def test_as_many_as_the_quota_says(kind: str, any_redis_server: Server) -> None:
    with HybridLimiter(SLOW, algorithm=kind, store=any_redis_server.url) as limiter:
        decisions = [limiter.try_acquire("k") for _ in range(300)]
    assert sum(map(bool, decisions)) == 100
    assert all(decisions[:100]) and not any(decisions[100:]), "the first hundred"
    assert [d.remaining for d in decisions[:100]] == sorted((d.remaining for d in decisions[:100]), reverse=True)
    assert {d.limit for d in decisions} == {100}
    assert all(d.retry_after > 0 and d.remaining == 0 for d in decisions[100:])
    assert not any(d.degraded for d in decisions)


@pytest.mark.parametrize("kind", KINDS)
def test_several_limiters_share_one_limit(kind: str, redis_server: Server) -> None:
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


def test_permits(redis_server: Server) -> None:
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
    with HybridLimiter(SLOW, store=redis_server.url) as limiter:
        for bad in ("", "x" * 257, "a\nb", None, 7, b"k", ["k"]):
            with pytest.raises(InvalidKey):
                limiter.try_acquire(bad)  # type: ignore[arg-type]  # that is the test
        assert redis_server.names() == []
        for strange in ("{}", "%", "a:b", "키", "k" * 256):
            assert limiter.try_acquire(strange).remaining == 99


def test_keys_in_redis(redis_server: Server) -> None:
    with HybridLimiter(SLOW, store=redis_server.url, name="a:b", prefix="mine") as limiter:
        limiter.try_acquire("user:{1}")
        assert redis_server.names() == ["mine:hybrid:token_bucket:{user:%7B1%7D}:a%3Ab"]
        assert redis_server.client().pttl(redis_server.names()[0]) > 86_000_000
    redis_server.flush()
    with HybridLimiter(SLOW, store=redis_server.url, hash_keys=True) as limiter:
        limiter.try_acquire("user:1")
        [name] = redis_server.names()
        assert "user" not in name


def test_peek_spends_nothing(redis_server: Server) -> None:
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


def test_a_refund_just_before_the_end(redis_server: Server) -> None:
    with HybridLimiter(SLOW, store=redis_server.patient_url) as limiter:
        assert limiter.try_acquire("k", 30)
    limiter = HybridLimiter(SLOW, store=redis_server.patient_url)
    node = limiter._backend.manager
    with node.lock:  # nobody drives
        limiter.refund("k", 10)
        limiter._backend.release_all()
    limiter.close()
    with HybridLimiter(SLOW, store=redis_server.patient_url) as other:
        assert other.peek("k", 0).remaining == 80


@pytest.mark.parametrize("kind", KINDS)
def test_reset(kind: str, redis_server: Server) -> None:
    with HybridLimiter(SLOW, algorithm=kind, store=redis_server.url) as limiter:
        for _ in range(2):
            assert sum(bool(limiter.try_acquire("k")) for _ in range(200)) == 100
            limiter.reset("k")
        assert limiter.peek("k", 0).remaining == 100


def test_acquire_waits(redis_server: Server) -> None:
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


def test_guards(redis_server: Server) -> None:
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
        ({"store": None}, r"URL that starts with one of redis://, .*, or a RedisStore; got NoneType"),
        ({"store": "http://x"}, "unknown store 'http://': .* one of redis://"),
        ({"accuracy": "perfect"}, "high, medium, low"),
        ({"accuracy": []}, "high, medium, low"),
        ({"cold": "hot"}, "wait or optimistic"),
        ({"on_store_error": "panic"}, "allow, deny, local, raise"),
        ({"max_local_keys": 0}, "max_local_keys"),
        ({"max_local_keys": True}, "max_local_keys"),
    ],
)
def test_what_it_does_not_serve(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridLimiter(**{"quota": "5/s", "store": "redis://127.0.0.1:1", **arguments})
    assert issubclass(InvalidQuota, ValueError)


def test_a_warm_key_needs_no_network(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_threads_share_a_lease_exactly(redis_server: Server) -> None:
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


def test_close_gives_back(redis_server: Server) -> None:
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
from headgate.hybrid import drivers
drivers.RELEASE_TIMEOUT = 30.0
limiter = HybridLimiter("1000/day", store=sys.argv[1])
while limiter.stats().held < 2:
    assert limiter.try_acquire("k")
print(limiter.stats().local + limiter.stats().remote)
"""


EXIT_OF_A_LOOP = """
import asyncio, sys
from headgate import AsyncHybridLimiter
from headgate.hybrid import drivers
drivers.RELEASE_TIMEOUT = 30.0
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
def test_an_exit_gives_back(script: str, redis_server: Server) -> None:
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


def test_who_is_forgotten_gives_back(redis_server: Server) -> None:
    limiter = HybridLimiter("1000/day", store=redis_server.patient_url)
    while limiter.stats().held < 2:
        assert limiter.try_acquire("k")
    driver = weakref.ref(limiter._backend.manager)
    del limiter
    gc.collect()
    until(lambda: out(redis_server) == 0)
    until(gone, driver)


def test_accuracy_in_capitals_as_the_documents_write_it(redis_server: Server) -> None:
    with HybridLimiter("5/day", store=redis_server.patient_url, accuracy="LOW") as limiter:  # type: ignore[arg-type]
        assert limiter._backend.profile is PROFILES["low"]
        assert "redis://" in repr(limiter) and "HybridStore" not in repr(limiter)


def test_what_is_kept_of_a_limiter_is_enough(redis_server: Server) -> None:
    """Its `try_acquire`, or what `within` gave: the limiter is forgotten while the first call waits for Redis."""

    def limiter() -> HybridLimiter:
        return HybridLimiter("5/day", store=redis_server.patient_url, name="kept", on_store_error="allow")

    kept = [limiter().try_acquire for _ in range(3)] + [limiter().within(10.0).try_acquire for _ in range(3)]
    made = [each("k") for each in kept for _ in range(4)]
    assert not any(each.degraded for each in made)
    assert 1 <= sum(bool(each) for each in made) <= 5  # one may keep a permit that others would have taken


def gone(something: weakref.ref[Any]) -> bool:
    gc.collect()
    return something() is None


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False])
def test_nothing_runs_on_for_nobody_while_redis_is_away(closed: bool) -> None:
    limiter = HybridLimiter("5/second", store="redis://127.0.0.1:1", on_store_error="allow")
    assert limiter.try_acquire("k").degraded
    driver = weakref.ref(limiter._backend.manager)
    if closed:
        limiter.close()
    del limiter
    until(gone, driver)


def test_a_forked_child_has_its_own_leases(redis_server: Server) -> None:
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


def test_forked_children_are_known_by_their_own_names(redis_server: Server) -> None:
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


def test_a_machine_that_slept_has_no_leases(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = HybridLimiter("1000/day", store=redis_server.url)
    spent = held = 0
    slept = drivers.suspended_time() + 3600 * 10**9
    while held < 5:
        spent += limiter.try_acquire("k").allowed
        with limiter._backend.manager.lock:  # or what is held may go back before the look at the clock
            held = limiter.stats().held
            if held >= 5:
                monkeypatch.setattr(drivers, "suspended_time", lambda: slept)
                lease = limiter._backend.leases["k"]
    until(lambda: lease.expires == 0 or lease.lid == 0 or limiter.stats().burned)
    assert limiter.try_acquire("k").allowed, "with a new lease"
    limiter.close()
    with HybridLimiter("1000/day", store=redis_server.url) as other:
        assert other.peek("k", 0).remaining <= 1000 - spent - held, "what was held may have been spent"


def test_idle_keys_are_forgotten(redis_server: Server) -> None:
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


def test_no_more_local_keys_than_allowed(redis_server: Server) -> None:
    limiter = HybridLimiter("10/day", store=redis_server.url, max_local_keys=50)
    for number in range(300):
        assert limiter.try_acquire(f"k{number}")
    more = itertools.count(300)  # whoever is asked about just then is not sent away: there may be one too many
    until(lambda: limiter.try_acquire(f"k{next(more)}") and limiter.stats().keys <= 50)
    limiter.close()
    assert sum(out(redis_server, f"k{number}") for number in range(next(more))) == 0, "who was sent away gave back"


def test_many_keys_travel_together(redis_server: Server) -> None:
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
    assert (stats.syncs, stats.failures) == (60, 0) and stats.trips <= 2, "those who came first, and all the others"
    limiter.close()
    store.close()


def test_limiters_on_one_store_share_its_trips(redis_server: Server) -> None:
    store = RedisStore(redis_server.url)
    limiters = [HybridLimiter(SLOW, store=store, name=f"n{number}") for number in range(3)]
    assert len({limiter._backend.manager for limiter in limiters}) == 1
    for limiter in limiters:
        assert limiter.try_acquire("k").remaining == 99
    for limiter in limiters:
        limiter.close()
    assert len(redis_server.names()) == 3
    store.close()


def test_a_refusal_is_local_and_exact(redis_server: Server) -> None:
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
def test_waiting_for_retry_after_is_enough(kind: str, redis_server: Server) -> None:
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


def test_optimistic_about_keys_never_seen(redis_server: Server) -> None:
    store = ForbiddenStore(redis_server.url)
    limiter = HybridLimiter("3/day", store=store, cold="optimistic")
    first = limiter.try_acquire("k")
    assert first.allowed and first.remaining == 2
    until(lambda: int(redis_server.client().hlen(name_of("k"))) > 0)
    assert sum(bool(limiter.try_acquire("k")) for _ in range(10)) == 2, "the first was charged"
    limiter.close()
    store.close()


def test_stats(redis_server: Server) -> None:
    limiter = HybridLimiter("1000/second", store=redis_server.url)
    assert limiter.stats().local_ratio == 1.0
    for _ in range(5000):
        limiter.try_acquire("k")
    stats = limiter.stats()
    assert stats.local + stats.remote == 5000
    assert stats.backend == "up" and stats.failures == 0 and stats.trips >= 1 and stats.trip_seconds > 0
    assert limiter.store_health().state == "closed"
    limiter.close()


def test_public_types() -> None:
    assert headgate.HybridLimiter is HybridLimiter
    assert "HybridLimiter" in headgate.__all__
    assert issubclass(HybridLimiter, headgate.Limiter)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        headgate.Nothing  # noqa: B018


def test_a_peek_that_is_refused_asks_nobody(redis_server: Server) -> None:
    with HybridLimiter("5/day", store=redis_server.url, clock=ManualClock()) as limiter:
        for _ in range(8):
            limiter.try_acquire("k")
        before = limiter.stats().syncs
        assert not limiter.peek("k")
        assert limiter.stats().syncs == before


def test_closing_does_not_wait_for_the_next_tick(redis_server: Server) -> None:
    """Which never comes by a clock that stands still."""
    with HybridLimiter("1000/day", store=redis_server.url, clock=ManualClock()) as limiter:
        for number in range(200):
            assert limiter.try_acquire(f"k{number}")
        assert limiter.stats().held > 100
    assert sum(out(redis_server, f"k{number}") for number in range(200)) == 0


def test_a_signal_handler_between_the_steps_does_not_hang(redis_server: Server) -> None:
    with HybridLimiter("1000/second", store=redis_server.url, on_store_error="deny") as limiter:
        assert limiter.try_acquire("warm")
        with limiter._backend.manager.lock:  # as if it had interrupted a call of this very thread
            for made in (limiter.try_acquire("cold"), limiter.peek("colder")):
                assert not made.allowed and made.degraded
        assert limiter.try_acquire("cold"), "and nothing is remembered"


def test_without_redis_py_everything_else_is_there() -> None:
    code = """
import sys
sys.modules["redis"] = None
from headgate import *
Limiter("1/second")
from headgate.simulate import Scenario, simulate
try:
    from headgate import HybridLimiter
    HybridLimiter("1/second")
except ImportError as error:
    assert "headgate[redis]" in str(error), error
else:
    raise AssertionError("it is there")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_a_reset_by_another_process_is_heard_of(redis_server: Server) -> None:
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
def test_what_it_does_not_take(option: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        HybridLimiter("5/s", store="redis://127.0.0.1:1", **option)
