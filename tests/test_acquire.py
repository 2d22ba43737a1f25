"""acquire() in threads: it waits as long as the decision says, in line, until the time runs out."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from headgate import Decision, Limiter
from headgate.errors import PermitsExceedLimit, RateLimited
from tests.support.clocks import PATIENCE, WatchedClock, until
from tests.support.places import ALGORITHMS, Place
from tests.support.servers import Server

MICROSECOND = 0.000_001


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(100)
    yield pool
    pool.shutdown(wait=False, cancel_futures=True)


def start(pool: ThreadPoolExecutor, clock: WatchedClock, limiter: Limiter, **arguments: Any) -> Future[Decision]:
    """Begin to acquire "k" in another thread; return when it sleeps there."""
    sleeping = clock.sleeping
    future = pool.submit(limiter.acquire, "k", **arguments)
    until(lambda: clock.sleeping > sleeping)
    return future


def test_free_permits_are_not_waited_for(place: Place, clock: WatchedClock) -> None:
    limiter = place.limiter("3/minute", clock=clock)
    assert limiter.acquire("k").remaining == 2
    assert limiter.acquire("k", permits=2, timeout=0).remaining == 0
    assert clock.naps == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_waits_exactly_as_long_as_it_takes(
    algorithm: str, place: Place, clock: WatchedClock, pool: ThreadPoolExecutor
) -> None:
    limiter = place.limiter("2/minute", algorithm=algorithm, clock=clock)
    limiter.try_acquire("k", permits=2)
    due = limiter.peek("k").retry_after
    waiter = start(pool, clock, limiter)
    clock.advance(due - MICROSECOND)
    assert limiter.peek("k").retry_after == MICROSECOND
    assert not waiter.done()
    clock.advance(MICROSECOND)
    assert waiter.result(PATIENCE).allowed
    assert clock.naps == [due]


def test_first_come_first_served(place: Place, clock: WatchedClock, pool: ThreadPoolExecutor) -> None:
    limiter = place.limiter("60/minute burst 1", clock=clock)
    limiter.try_acquire("k")
    order: list[int] = []
    waiters: list[Future[Decision]] = []
    for _ in range(12):
        waiters.append(start(pool, clock, limiter))
        waiters[-1].add_done_callback(lambda waiter: order.append(waiters.index(waiter)))
    for served in range(12):
        assert len(order) == served
        until(lambda left: clock.sleeping == left, 12 - served)
        clock.advance(1.0)
        until(lambda before: len(order) > before, served)
    assert order == list(range(12))
    assert clock.seconds == 12.0


def test_a_large_wish_is_not_overtaken(place: Place, clock: WatchedClock, pool: ThreadPoolExecutor) -> None:
    limiter = place.limiter("60/minute burst 5", clock=clock)
    limiter.try_acquire("k", permits=5)
    large = start(pool, clock, limiter, permits=5)
    small = start(pool, clock, limiter, permits=1)
    clock.advance(4.0)
    assert not large.done()
    assert not small.done(), "the small one must wait behind the large one"
    clock.advance(1.0)
    assert large.result(PATIENCE).remaining == 0
    until(lambda: clock.naps[-1] == 1.0)
    clock.advance(1.0)
    assert small.result(PATIENCE).remaining == 0


def test_keys_do_not_wait_for_each_other(place: Place, clock: WatchedClock, pool: ThreadPoolExecutor) -> None:
    limiter = place.limiter("1/day", clock=clock)
    limiter.try_acquire("k")
    waiter = start(pool, clock, limiter)
    assert limiter.acquire("other", timeout=0)
    clock.advance(86400)
    assert waiter.result(PATIENCE)


@pytest.mark.parametrize("how", ["refund", "reset"])
def test_what_comes_back_wakes_the_first(how: str, place: Place, clock: WatchedClock, pool: ThreadPoolExecutor) -> None:
    limiter = place.limiter("1/day", clock=clock)
    limiter.try_acquire("k")
    first = start(pool, clock, limiter)
    second = start(pool, clock, limiter)
    getattr(limiter, how)("k")
    assert first.result(PATIENCE).allowed
    until(lambda: clock.sleeping == 1)
    assert not second.done()
    getattr(limiter, how)("k")
    assert second.result(PATIENCE).allowed
    assert clock.seconds == 0.0


def test_time_runs_out_on_the_microsecond(place: Place, clock: WatchedClock, pool: ThreadPoolExecutor) -> None:
    limiter = place.limiter("1/minute", clock=clock)
    limiter.try_acquire("k")
    first = start(pool, clock, limiter, timeout=2.0)
    second = start(pool, clock, limiter, timeout=2.0)
    clock.advance(2.0 - MICROSECOND)
    assert limiter.peek("k").retry_after == 58 + MICROSECOND
    assert not first.done()
    assert not second.done()
    clock.advance(MICROSECOND)
    for waiter in (first, second):
        error = waiter.exception(PATIENCE)
        assert isinstance(error, RateLimited)
        assert not error.decision.allowed
        assert error.decision.retry_after == 58.0


def test_one_who_gives_up_lets_the_next_one_go_on(place: Place, clock: WatchedClock, pool: ThreadPoolExecutor) -> None:
    limiter = place.limiter("60/minute burst 5", clock=clock)
    limiter.try_acquire("k", permits=5)
    impatient = start(pool, clock, limiter, permits=5, timeout=2.5)
    patient = start(pool, clock, limiter, permits=2)
    clock.advance(2.5)
    assert isinstance(impatient.exception(PATIENCE), RateLimited)
    assert patient.result(PATIENCE).allowed


@pytest.mark.parametrize("timeout", [1e308, 10**400])
def test_a_timeout_that_no_clock_can_count(timeout: float) -> None:
    limiter = Limiter("1/second", clock=WatchedClock())
    assert limiter.acquire("k", timeout=timeout)
    with pytest.raises(ValueError, match="None to wait for ever"):
        limiter.acquire("k", timeout=math.inf)


def test_a_timeout_of_0_tries_once(place: Place, clock: WatchedClock) -> None:
    limiter = place.limiter("1/minute", clock=clock)
    assert limiter.acquire("k", timeout=0)
    with pytest.raises(RateLimited):
        limiter.acquire("k", timeout=0)
    assert clock.naps == []


def test_what_can_never_be_is_not_waited_for(place: Place, clock: WatchedClock) -> None:
    limiter = place.limiter("3/minute", clock=clock)
    with pytest.raises(PermitsExceedLimit):
        limiter.acquire("k", permits=4)
    assert clock.naps == []


def test_never_asks_more_often_than_the_decision_says(
    redis_server: Server, clock: WatchedClock, pool: ThreadPoolExecutor
) -> None:
    """Eight wait in line: two questions each, one when first in line and one when the time has come."""
    limiter = Limiter("60/minute burst 1", store=redis_server.url, clock=clock)
    limiter.try_acquire("k")
    limiter.try_acquire("k")  # the script is known now
    before = redis_server.calls("evalsha")
    waiters = [start(pool, clock, limiter) for _ in range(8)]
    assert redis_server.calls("evalsha") - before == 1, "only the first in line asks"
    for served, waiter in enumerate(waiters):
        until(lambda count: clock.naps.count(1.0) == count, served + 1)
        for _ in range(10):
            clock.advance(0.1)
        assert waiter.result(PATIENCE)
    assert redis_server.calls("evalsha") - before <= 2 * 8
    limiter.close()


def test_real_time_passes(place: Place) -> None:
    """No manual clock: five calls at 20/second with no burst take four pauses of 50 ms."""
    limiter = place.limiter("20/second burst 1")
    begun = time.monotonic()
    for _ in range(5):
        limiter.acquire("k")
    assert 0.199 <= time.monotonic() - begun < 5.0


def test_real_time_runs_out(place: Place) -> None:
    limiter = place.limiter("1/day")
    limiter.try_acquire("k")
    begun = time.monotonic()
    with pytest.raises(RateLimited):
        limiter.acquire("k", timeout=0.15)
    assert 0.149 <= time.monotonic() - begun < 5.0


def test_a_crowd_in_real_time_is_served_completely(place: Place) -> None:
    limiter = place.limiter("200/second burst 1")
    granted: list[Decision] = []
    threads = [threading.Thread(target=lambda: granted.append(limiter.acquire("k"))) for _ in range(40)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(granted) == 40
    assert time.monotonic() - begun >= 39 / 200 - 0.001
