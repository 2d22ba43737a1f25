"""pace(): a leaky bucket that lets calls through one by one, evenly spaced, instead of refusing them."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.errors import RateLimited
from tests.support.clocks import PATIENCE, WatchedClock, until, until_async
from tests.support.places import ALGORITHMS, Place


async def line_up(clock: WatchedClock, limiter: AsyncLimiter, count: int) -> list[asyncio.Task[float]]:
    """Start *count* paced calls one after another; each returns the second at which it started to run."""

    async def run() -> float:
        await limiter.pace("k")
        return clock.seconds

    tasks = []
    for _ in range(count):
        before = len(clock.naps)
        tasks.append(asyncio.create_task(run()))
        await until_async(lambda naps: tasks[-1].done() or len(clock.naps) > naps, before)
    return tasks


def test_calls_start_evenly_spaced(place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("2/second burst 5", algorithm="leaky_bucket", clock=clock) as limiter:
            calls = await line_up(clock, limiter, 5)
            assert clock.naps == [0.5, 1.0, 1.5, 2.0]
            for started in range(1, 5):
                assert sum(call.done() for call in calls) == started
                clock.advance(0.5)
                await calls[started]
            assert [call.result() for call in calls] == [0.0, 0.5, 1.0, 1.5, 2.0]

    asyncio.run(check())


def test_threads_are_spaced_too(place: Place) -> None:
    clock = WatchedClock()
    limiter = place.limiter("60/minute burst 4", algorithm="leaky_bucket", clock=clock)
    with ThreadPoolExecutor(4) as pool:
        started: list[float] = []

        def run() -> None:
            limiter.pace("k")
            started.append(clock.seconds)

        calls = [pool.submit(run) for _ in range(4)]
        until(lambda: clock.sleeping == 3)
        for second in range(4):
            until(lambda count: len(started) == count, second + 1)
            clock.advance(1.0)
        assert [call.exception(PATIENCE) for call in calls] == [None] * 4
    assert started == [0.0, 1.0, 2.0, 3.0]


def test_an_odd_rate_does_not_drift(place: Place) -> None:
    """Seven a minute: each start is due at a multiple of 60/7 seconds, rounded once and not each time."""

    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("7/minute burst 50", algorithm="leaky_bucket", clock=clock) as limiter:
            calls = await line_up(clock, limiter, 50)
            for number, nap in enumerate(clock.naps, start=1):
                assert nap is not None
                assert abs(Fraction(round(nap * 10**6)) - Fraction(number * 60 * 10**6, 7)) <= 2
            clock.advance(500)
            await asyncio.gather(*calls)

    asyncio.run(check())


def test_a_full_queue_refuses_at_once(place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("1/second burst 3", algorithm="leaky_bucket", clock=clock) as limiter:
            calls = await line_up(clock, limiter, 3)
            with pytest.raises(RateLimited) as caught:
                await limiter.pace("k")
            assert caught.value.decision.retry_after == 1.0
            clock.advance(1.0)
            calls += await line_up(clock, limiter, 1)
            clock.advance(10.0)
            assert await calls[-1] == 11.0
            await asyncio.gather(*calls)

    asyncio.run(check())


def test_a_wait_longer_than_the_timeout_is_refused_at_once_and_takes_no_place(place: Place) -> None:
    clock = WatchedClock()
    limiter = place.limiter("1/second burst 10", algorithm="leaky_bucket", clock=clock)
    limiter.pace("k", permits=3)
    for _ in range(5):
        with pytest.raises(RateLimited) as caught:
            limiter.pace("k", timeout=2.0)
        assert caught.value.decision.retry_after == 1.0
    assert clock.naps == []
    assert limiter.peek("k", permits=0).remaining == 7
    clock.advance(3.0)
    assert limiter.pace("k", timeout=2.0)


def test_a_larger_call_keeps_the_next_one_waiting_for_longer(place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("1/second burst 10", algorithm="leaky_bucket", clock=clock) as limiter:
            assert await limiter.pace("k", permits=4)
            assert clock.naps == []
            calls = await line_up(clock, limiter, 2)
            assert clock.naps == [4.0, 5.0]
            clock.advance(5.0)
            await asyncio.gather(*calls)

    asyncio.run(check())


def test_one_who_is_cancelled_lets_nobody_start_at_the_same_time(place: Place) -> None:
    """Due at 0, 1 and 2 s, and that of 1 s is cancelled: a new one must not start together with that of 2 s."""

    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("1/second burst 10", algorithm="leaky_bucket", clock=clock) as limiter:
            calls = await line_up(clock, limiter, 3)
            calls[1].cancel()
            await asyncio.wait([calls[1]])
            calls += await line_up(clock, limiter, 1)
            for _ in range(40):
                clock.advance(0.1)
                for _ in range(20):  # turns of the event loop, for whoever was woken to run
                    await asyncio.sleep(0)
            starts = sorted([await calls[0], await calls[2], await calls[3]])
            assert starts[1] - starts[0] > 0.9
            assert starts[2] - starts[1] > 0.9

    asyncio.run(check())


def test_as_decorator_and_context_manager(place: Place) -> None:
    limiter = place.limiter("100/second burst 5", algorithm="leaky_bucket")

    @limiter.paced(key="k")
    def run() -> float:
        return time.monotonic()

    begun = time.monotonic()
    starts = [run() for _ in range(4)]
    with limiter.paced(key="k") as decision:
        assert decision.allowed
        starts.append(time.monotonic())
    assert starts == sorted(starts)
    assert starts[-1] - begun >= 0.039


def test_as_async_decorator_and_context_manager(place: Place) -> None:
    async def check() -> None:
        async with place.async_limiter("100/second burst 5", algorithm="leaky_bucket") as limiter:

            @limiter.paced(key=lambda name: name)
            async def run(name: str) -> float:
                return time.monotonic()

            begun = time.monotonic()
            starts = await asyncio.gather(*(run("k") for _ in range(4)))
            async with limiter.paced(key="k"):
                assert time.monotonic() - begun >= 0.039
            assert max(starts) - begun >= 0.029
        async with place.async_limiter("1/30d burst 5", algorithm="leaky_bucket", name="full") as limiter:

            @limiter.paced(key="k")
            async def wait() -> None: ...

            calls = [asyncio.ensure_future(wait()) for _ in range(6)]
            with pytest.raises(RateLimited):
                await asyncio.gather(*calls)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    asyncio.run(check())


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "leaky_bucket"])
def test_only_a_leaky_bucket_paces(algorithm: str) -> None:
    with Limiter("1/second", algorithm=algorithm) as limiter, pytest.raises(ValueError, match="leaky_bucket"):
        limiter.pace("k")
