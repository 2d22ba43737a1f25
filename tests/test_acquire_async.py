"""acquire() in tasks: in line, on time, and cancelled at any moment without losing a permit."""

import asyncio
import random
import time
from typing import Any

import pytest

from headgate import AsyncLimiter, Decision
from headgate.errors import PermitsExceedLimit, RateLimited
from tests.support.clocks import PATIENCE, WatchedClock, until_async
from tests.support.places import ALGORITHMS, Place

MICROSECOND = 0.000_001


async def start(clock: WatchedClock, limiter: AsyncLimiter, **arguments: Any) -> asyncio.Task[Decision]:
    """Begin to acquire "k" in a task; return when it sleeps there."""
    sleeping = clock.sleeping
    task = asyncio.create_task(limiter.acquire("k", **arguments))
    await until_async(lambda: clock.sleeping > sleeping)
    return task


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_waits_exactly_as_long_as_it_takes(algorithm: str, place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("2/minute", algorithm=algorithm, clock=clock) as limiter:
            await limiter.try_acquire("k", permits=2)
            due = (await limiter.peek("k")).retry_after
            waiter = await start(clock, limiter)
            clock.advance(due - MICROSECOND)
            assert (await limiter.peek("k")).retry_after == MICROSECOND
            assert not waiter.done()
            clock.advance(MICROSECOND)
            assert (await waiter).allowed
            assert clock.naps == [due]

    asyncio.run(check())


def test_first_come_first_served(place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("60/minute burst 1", clock=clock) as limiter:
            await limiter.try_acquire("k")
            order: list[int] = []

            async def wait(number: int) -> None:
                await limiter.acquire("k")
                order.append(number)

            tasks = [asyncio.create_task(wait(number)) for number in range(50)]
            for served in range(50):
                await until_async(lambda left: clock.sleeping == left, 50 - served)
                clock.advance(1.0)
                await until_async(lambda before: len(order) > before, served)
            await asyncio.gather(*tasks)
            assert order == list(range(50))
            assert clock.seconds == 50.0

    asyncio.run(check())


@pytest.mark.parametrize("how", ["refund", "reset"])
def test_what_comes_back_wakes_the_first(how: str, place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("1/day", clock=clock) as limiter:
            await limiter.try_acquire("k")
            first, second = await start(clock, limiter), await start(clock, limiter)
            await getattr(limiter, how)("k")
            assert (await first).allowed
            await until_async(lambda: clock.sleeping == 1)
            assert not second.done()
            await getattr(limiter, how)("k")
            assert (await second).allowed
            assert clock.seconds == 0.0

    asyncio.run(check())


def test_time_runs_out_on_the_microsecond(place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("1/minute", clock=clock) as limiter:
            await limiter.try_acquire("k")
            waiters = [await start(clock, limiter, timeout=2.0) for _ in range(3)]
            clock.advance(2.0 - MICROSECOND)
            assert (await limiter.peek("k")).retry_after == 58 + MICROSECOND
            assert not any(waiter.done() for waiter in waiters)
            clock.advance(MICROSECOND)
            for waiter in waiters:
                with pytest.raises(RateLimited) as caught:
                    await waiter
                assert caught.value.decision.retry_after == 58.0

    asyncio.run(check())


def test_what_can_never_be_is_not_waited_for(place: Place) -> None:
    async def check() -> None:
        async with place.async_limiter("3/minute", clock=WatchedClock()) as limiter:
            with pytest.raises(PermitsExceedLimit):
                await limiter.acquire("k", permits=4)

    asyncio.run(check())


def test_real_time(place: Place) -> None:
    async def check() -> None:
        async with place.async_limiter("20/second burst 1") as limiter:
            begun = time.monotonic()
            await asyncio.gather(*(limiter.acquire("k") for _ in range(5)))
            assert 0.199 <= time.monotonic() - begun < 5.0
        async with place.async_limiter("1/30d", name="long") as limiter:
            await limiter.try_acquire("k")
            begun = time.monotonic()
            with pytest.raises(RateLimited):
                await limiter.acquire("k", timeout=0.02)
            assert 0.019 <= time.monotonic() - begun < 5.0

    asyncio.run(check())


def test_a_cancelled_waiter_leaves_the_line(place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("60/minute burst 5", clock=clock) as limiter:
            await limiter.try_acquire("k", permits=5)
            first = await start(clock, limiter, permits=5)
            middle = await start(clock, limiter, permits=1)
            last = await start(clock, limiter, permits=1)
            middle.cancel()
            first.cancel()
            clock.advance(1.0)
            assert (await last).remaining == 0
            for gone in (first, middle):
                with pytest.raises(asyncio.CancelledError):
                    await gone

    asyncio.run(check())


@pytest.mark.parametrize("method", ["try_acquire", "acquire"])
@pytest.mark.parametrize("limit", [1000, 40], ids=["plenty", "scarce"])
@pytest.mark.parametrize("permits", [1, 3])
def test_a_cancelled_call_loses_no_permit(permits: int, limit: int, method: str, place: Place) -> None:
    """Cancel at random moments, most of them while the call is under way; then what is spent is what was granted."""

    async def call(limiter: AsyncLimiter, key: str) -> int:
        decision: Decision = await getattr(limiter, method)(key, permits=permits)
        return permits if decision else 0

    async def check() -> None:
        chance = random.Random(f"{permits} {limit} {method}")
        async with place.async_limiter(f"{limit}/30d") as limiter:
            await limiter.peek("k")
            for round_ in range(8):
                key = f"k{round_}"
                tasks = []
                for _ in range(40):
                    tasks.append(asyncio.create_task(call(limiter, key)))
                    if chance.random() < 0.3:
                        await asyncio.sleep(chance.choice([0, 0, 0.0001, 0.0005]))
                    if chance.random() < 0.7:
                        chance.choice(tasks).cancel()
                await asyncio.sleep(chance.choice([0, 0.0002, 0.001, 0.003]))
                for task in tasks:
                    if method == "acquire" or chance.random() < 0.5:
                        task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                granted = sum(result for result in results if isinstance(result, int))
                assert all(isinstance(result, int | asyncio.CancelledError) for result in results)
                await _until_left(limiter, key, limit - granted)

    asyncio.run(check())


async def _until_left(limiter: AsyncLimiter, key: str, expected: int) -> None:
    """What a cancelled call took may still be on its way back."""
    deadline = time.monotonic() + PATIENCE
    while (left := (await limiter.peek(key, permits=0)).remaining) != expected:
        assert time.monotonic() < deadline, f"{left} are left, not {expected}"
        await asyncio.sleep(0.01)


def test_wait_for_and_timeout_lose_no_permit(place: Place) -> None:
    async def check() -> None:
        async with place.async_limiter("50/30d") as limiter:
            await limiter.try_acquire("k", permits=50)
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(limiter.acquire("k"), 0.005)
            await limiter.refund("k", permits=10)
            await _until_left(limiter, "k", 10)
            for _ in range(10):
                async with asyncio.timeout(PATIENCE):
                    assert await limiter.acquire("k")

    asyncio.run(check())
