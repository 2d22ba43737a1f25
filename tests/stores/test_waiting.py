"""acquire(): waits as long as the decision says, in line, until the time runs out."""

import asyncio
import math
import random
import time
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from headgate import AsyncLimiter, Decision, Limiter
from headgate.errors import PermitsExceedLimit, RateLimited
from tests.support.callers import Callers
from tests.support.clocks import PATIENCE, WatchedClock, until
from tests.support.quotas import LAWS

MICROSECOND = 0.000_001


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


def test_free_permits(callers: Callers, clock: WatchedClock) -> None:
    limiter = callers.limiter("3/minute", clock=clock)
    assert limiter.acquire("k").remaining == 2
    assert limiter.acquire("k", permits=2, timeout=0).remaining == 0
    assert clock.naps == []


@pytest.mark.parametrize("algorithm", LAWS)
def test_waits_until_due(algorithm: str, callers: Callers, clock: WatchedClock) -> None:
    """Exactly as long as it takes, to the microsecond."""
    limiter = callers.limiter("2/minute", algorithm=algorithm, clock=clock)
    limiter.try_acquire("k", permits=2)
    due = limiter.peek("k").retry_after
    waiter = callers.wait_in_line(clock, limiter)
    clock.advance(due - MICROSECOND)
    assert limiter.peek("k").retry_after == MICROSECOND
    assert not waiter.done()
    clock.advance(MICROSECOND)
    assert waiter.result(PATIENCE).allowed
    assert clock.naps == [due]


def test_first_come_first_served(callers: Callers, clock: WatchedClock) -> None:
    limiter = callers.limiter("60/minute burst 1", clock=clock)
    limiter.try_acquire("k")
    order: list[int] = []
    waiters: list[Future[Decision]] = []
    for _ in range(30):
        waiters.append(callers.wait_in_line(clock, limiter))
        waiters[-1].add_done_callback(lambda waiter: order.append(waiters.index(waiter)))
    for served in range(30):
        assert len(order) == served
        until(lambda left: clock.sleeping == left, 30 - served)
        clock.advance(1.0)
        until(lambda before: len(order) > before, served)
    assert order == list(range(30))
    assert clock.seconds == 30.0


def test_no_overtaking(callers: Callers, clock: WatchedClock) -> None:
    """A waiter for one permit stays behind a waiter for five."""
    limiter = callers.limiter("60/minute burst 5", clock=clock)
    limiter.try_acquire("k", permits=5)
    large = callers.wait_in_line(clock, limiter, permits=5)
    small = callers.wait_in_line(clock, limiter, permits=1)
    clock.advance(4.0)
    assert not large.done() and not small.done()
    clock.advance(1.0)
    assert large.result(PATIENCE).remaining == 0
    until(lambda: clock.naps[-1] == 1.0)
    clock.advance(1.0)
    assert small.result(PATIENCE).remaining == 0


def test_keys_are_apart(callers: Callers, clock: WatchedClock) -> None:
    """A waiter for one key does not hold up another key."""
    limiter = callers.limiter("1/day", clock=clock)
    limiter.try_acquire("k")
    waiter = callers.wait_in_line(clock, limiter)
    assert limiter.acquire("other", timeout=0)
    clock.advance(86400)
    assert waiter.result(PATIENCE)


@pytest.mark.parametrize("how", ["refund", "reset"])
def test_woken(how: str, callers: Callers, clock: WatchedClock) -> None:
    """What comes back wakes the first in line, and only the first."""
    limiter = callers.limiter("1/day", clock=clock)
    limiter.try_acquire("k")
    first, second = callers.wait_in_line(clock, limiter), callers.wait_in_line(clock, limiter)
    getattr(limiter, how)("k")
    assert first.result(PATIENCE).allowed
    until(lambda: clock.sleeping == 1)
    assert not second.done()
    getattr(limiter, how)("k")
    assert second.result(PATIENCE).allowed
    assert clock.seconds == 0.0


def test_time_runs_out(callers: Callers, clock: WatchedClock) -> None:
    """On the microsecond, for all in line."""
    limiter = callers.limiter("1/minute", clock=clock)
    limiter.try_acquire("k")
    waiters = [callers.wait_in_line(clock, limiter, timeout=2.0) for _ in range(3)]
    clock.advance(2.0 - MICROSECOND)
    assert limiter.peek("k").retry_after == 58 + MICROSECOND
    assert not any(waiter.done() for waiter in waiters)
    clock.advance(MICROSECOND)
    for waiter in waiters:
        error = waiter.exception(PATIENCE)
        assert isinstance(error, RateLimited)
        assert not error.decision.allowed
        assert error.decision.retry_after == 58.0


def test_the_next_goes_on(callers: Callers, clock: WatchedClock) -> None:
    """A waiter whose time runs out lets the next one in line go on."""
    limiter = callers.limiter("60/minute burst 5", clock=clock)
    limiter.try_acquire("k", permits=5)
    impatient = callers.wait_in_line(clock, limiter, permits=5, timeout=2.5)
    patient = callers.wait_in_line(clock, limiter, permits=2)
    clock.advance(2.5)
    assert isinstance(impatient.exception(PATIENCE), RateLimited)
    assert patient.result(PATIENCE).allowed


@pytest.mark.parametrize("timeout", [1e308, 10**400])
def test_endless_timeouts(timeout: float) -> None:
    """A time-out longer than clocks can count is for ever; infinity is not a number of seconds."""
    limiter = Limiter("1/second", clock=WatchedClock())
    assert limiter.acquire("k", timeout=timeout)
    with pytest.raises(ValueError, match="None to wait for ever"):
        limiter.acquire("k", timeout=math.inf)


def test_a_timeout_of_0_tries_once(callers: Callers, clock: WatchedClock) -> None:
    limiter = callers.limiter("1/minute", clock=clock)
    assert limiter.acquire("k", timeout=0)
    with pytest.raises(RateLimited):
        limiter.acquire("k", timeout=0)
    assert clock.naps == []


def test_too_many_permits(callers: Callers, clock: WatchedClock) -> None:
    """What can never be is not waited for."""
    with pytest.raises(PermitsExceedLimit):
        callers.limiter("3/minute", clock=clock).acquire("k", permits=4)
    assert clock.naps == []


def test_real_time(any_callers: Callers) -> None:
    """Without a manual clock: five calls at 20/second with no burst take four pauses of 50 ms."""
    limiter = any_callers.limiter("20/second burst 1")
    begun = time.monotonic()
    assert all(call.result(PATIENCE) for call in [any_callers.start(limiter.acquire, "k") for _ in range(5)])
    assert 0.199 <= time.monotonic() - begun < PATIENCE
    limiter = any_callers.limiter("1/30d", name="long")
    limiter.try_acquire("k")
    begun = time.monotonic()
    with pytest.raises(RateLimited):
        limiter.acquire("k", timeout=0.15)
    assert 0.149 <= time.monotonic() - begun < PATIENCE


def test_many_in_real_time(callers: Callers) -> None:
    """All of forty are served, and not too fast."""
    limiter = callers.limiter("200/second burst 1")
    begun = time.monotonic()
    assert all(call.result(PATIENCE) for call in [callers.start(limiter.acquire, "k") for _ in range(40)])
    assert time.monotonic() - begun >= 39 / 200 - 0.001


# ------------------------------------------------------------------------------------------- tasks that are cancelled


def test_cancelled_waiter(async_callers: Callers, clock: WatchedClock) -> None:
    """A waiter that is cancelled leaves the line."""
    limiter = async_callers.limiter("60/minute burst 5", clock=clock)
    limiter.try_acquire("k", permits=5)
    first, middle, last = (async_callers.wait_in_line(clock, limiter, permits=count) for count in (5, 1, 1))
    middle.cancel()
    first.cancel()
    until(lambda: clock.naps[-1] == 1.0 and clock.sleeping == 1)  # the last one is first, and has asked
    clock.advance(1.0)
    assert last.result(PATIENCE).remaining == 0
    for gone in (first, middle):
        with pytest.raises(CancelledError):
            gone.result(PATIENCE)


@pytest.mark.parametrize("method", ["try_acquire", "acquire"])
@pytest.mark.parametrize("limit", [1000, 40], ids=["plenty", "scarce"])
@pytest.mark.parametrize("permits", [1, 3])
def test_cancelled_call(permits: int, limit: int, method: str, async_callers: Callers) -> None:
    """Cancel at random moments, most of them while the call is under way; then what is spent is what was granted."""
    chance = random.Random(f"{permits} {limit} {method}")
    limiter: Any = async_callers.limiter(f"{limit}/30d")
    asynchronous = limiter.limiter

    async def cancel_some(key: str) -> list[Any]:
        tasks = []
        for _ in range(40):
            tasks.append(asyncio.create_task(getattr(asynchronous, method)(key, permits=permits)))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.choice([0, 0, 0.0001, 0.0005]))
            if chance.random() < 0.7:
                chance.choice(tasks).cancel()
        await asyncio.sleep(chance.choice([0, 0.0002, 0.001, 0.003]))
        for task in tasks:
            if method == "acquire" or chance.random() < 0.5:
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    limiter.peek("k")
    for number in range(8):
        key = f"k{number}"
        results = async_callers.run(cancel_some(key))
        assert all(isinstance(result, Decision | asyncio.CancelledError) for result in results)
        granted = permits * sum(result.allowed for result in results if isinstance(result, Decision))
        until(lambda key, left: limiter.peek(key, permits=0).remaining == left, key, limit - granted)


def test_wait_for(async_callers: Callers) -> None:
    """A waiter whose task times out takes no permit."""
    limiter: Any = async_callers.limiter("50/30d")
    asynchronous = limiter.limiter
    limiter.try_acquire("k", permits=50)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asynchronous.acquire("k"), 0.005)

    for _ in range(5):
        async_callers.run(give_up())
    limiter.refund("k", permits=10)
    until(lambda: limiter.peek("k", permits=0).remaining == 10)
    for _ in range(10):
        assert limiter.acquire("k", timeout=PATIENCE)


def test_stopped_loop() -> None:
    """A task in an event loop that no longer runs does not hold up the waiters of another."""
    limiter = AsyncLimiter("1/hour")
    stopped = asyncio.new_event_loop()
    assert stopped.run_until_complete(limiter.try_acquire("k"))
    held_up = stopped.create_task(limiter.acquire("k"))
    stopped.run_until_complete(asyncio.sleep(0))

    async def refund_and_wait() -> Decision:
        await limiter.refund("k")
        return await limiter.acquire("k", timeout=PATIENCE)

    assert asyncio.run(refund_and_wait())
    held_up.cancel()
    stopped.run_until_complete(asyncio.wait([held_up]))
    stopped.close()
