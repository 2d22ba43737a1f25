"""pace(): a leaky bucket that lets calls through one by one, evenly spaced, instead of refusing them."""

import asyncio
import time
from concurrent.futures import Future
from fractions import Fraction

import pytest

from headgate import Limiter
from headgate.errors import RateLimited
from headgate.rule import AlgorithmName
from tests.support.callers import Callers
from tests.support.clocks import PATIENCE, WatchedClock, until
from tests.support.quotas import ALGORITHMS


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


def bucket(callers: Callers, clock: WatchedClock, quota: str) -> Limiter:
    return callers.limiter(quota, algorithm="leaky_bucket", clock=clock)


def line_up(callers: Callers, clock: WatchedClock, limiter: Limiter, count: int) -> list[Future[float]]:
    """Start *count* paced calls one after another; each returns the second at which it started to run."""
    run = limiter.paced(key="k")(lambda: clock.seconds)
    calls = []
    for _ in range(count):
        before = len(clock.naps)
        calls.append(callers.start(run))
        until(lambda naps: calls[-1].done() or len(clock.naps) > naps, before)
    return calls


def test_evenly_spaced(callers: Callers, clock: WatchedClock) -> None:
    limiter = bucket(callers, clock, "2/second burst 5")
    calls = line_up(callers, clock, limiter, 5)
    assert clock.naps == [0.5, 1.0, 1.5, 2.0]
    for started in range(1, 5):
        assert sum(call.done() for call in calls) == started
        clock.advance(0.5)
        calls[started].result(PATIENCE)
    assert [call.result() for call in calls] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_an_odd_rate_does_not_drift(callers: Callers, clock: WatchedClock) -> None:
    """Seven a minute: each start is due at a multiple of 60/7 seconds, rounded once and not each time."""
    calls = line_up(callers, clock, bucket(callers, clock, "7/minute burst 50"), 50)
    for number, nap in enumerate(clock.naps, start=1):
        assert nap is not None
        assert abs(Fraction(round(nap * 10**6)) - Fraction(number * 60 * 10**6, 7)) <= 2
    clock.advance(500)
    assert all(call.result(PATIENCE) is not None for call in calls)


def test_full_queue(callers: Callers, clock: WatchedClock) -> None:
    """A full bucket refuses at once."""
    limiter = bucket(callers, clock, "1/second burst 3")
    calls = line_up(callers, clock, limiter, 3)
    with pytest.raises(RateLimited) as caught:
        limiter.pace("k")
    assert caught.value.decision.retry_after == 1.0
    clock.advance(1.0)
    calls += line_up(callers, clock, limiter, 1)
    clock.advance(10.0)
    assert calls[-1].result(PATIENCE) == 11.0
    assert all(call.result(PATIENCE) is not None for call in calls)


def test_timeout(callers: Callers, clock: WatchedClock) -> None:
    """A wait that would be longer than the time-out is refused at once, and takes no place."""
    limiter = bucket(callers, clock, "1/second burst 10")
    limiter.pace("k", permits=3)
    for _ in range(5):
        with pytest.raises(RateLimited) as caught:
            limiter.pace("k", timeout=2.0)
        assert caught.value.decision.retry_after == 1.0
    assert clock.naps == []
    assert limiter.peek("k", permits=0).remaining == 7
    clock.advance(3.0)
    assert limiter.pace("k", timeout=2.0)


def test_permits(callers: Callers, clock: WatchedClock) -> None:
    """A larger call keeps the next one waiting for longer."""
    limiter = bucket(callers, clock, "1/second burst 10")
    assert limiter.pace("k", permits=4)
    assert clock.naps == []
    calls = line_up(callers, clock, limiter, 2)
    assert clock.naps == [4.0, 5.0]
    clock.advance(5.0)
    assert [call.result(PATIENCE) for call in calls] == [5.0, 5.0]


def test_cancelled(async_callers: Callers, clock: WatchedClock) -> None:
    """Due at 0, 1 and 2 s, and that of 1 s is cancelled: a new one must not start together with that of 2 s."""
    limiter = bucket(async_callers, clock, "1/second burst 10")
    calls = line_up(async_callers, clock, limiter, 3)
    calls[1].cancel()
    until(lambda: clock.sleeping == 1)
    calls += line_up(async_callers, clock, limiter, 1)
    for _ in range(40):
        clock.advance(0.1)
        async_callers.run(turns(20))  # for the tasks that were woken
    starts = sorted(call.result(PATIENCE) for call in (calls[0], calls[2], calls[3]))
    assert starts[1] - starts[0] > 0.9
    assert starts[2] - starts[1] > 0.9


async def turns(count: int) -> None:
    """Let the event loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_guards(callers: Callers) -> None:
    """In real time: five starts at 100/second are 40 ms apart, first to last."""
    limiter = callers.limiter("100/second burst 5", algorithm="leaky_bucket")
    run = limiter.paced(key="k")(time.monotonic)
    begun = time.monotonic()
    starts = [run() for _ in range(4)]
    with limiter.paced(key="k") as decision:
        assert decision.allowed
        starts.append(time.monotonic())
    assert starts == sorted(starts)
    assert starts[-1] - begun >= 0.039


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "leaky_bucket"])
def test_only_a_leaky_bucket_paces(algorithm: AlgorithmName) -> None:
    with Limiter("1/second", algorithm=algorithm) as limiter, pytest.raises(ValueError, match="leaky_bucket"):
        limiter.pace("k")
