"""Checks that are awaited at the same time travel together, in bounded batches; a single check waits for no other."""

import asyncio
import threading
import time

import pytest

from headgate import AsyncLimiter, Decision
from headgate.errors import StoreUnavailable
from headgate.rule import AlgorithmName
from tests.support.clocks import PATIENCE, until_async
from tests.support.proxy import FaultyProxy
from tests.support.quotas import ALGORITHMS
from tests.support.servers import Server

BOUND = 128  # checks of about 15 microseconds, so that a batch holds Redis for about 2 ms at most


async def check_all(limiter: AsyncLimiter, count: int) -> list[Decision]:
    return await asyncio.gather(*(limiter.try_acquire(f"k{number}") for number in range(count)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_many_checks_make_few_trips(algorithm: AlgorithmName, any_redis_server: Server) -> None:
    with FaultyProxy(any_redis_server.port) as proxy:
        async with AsyncLimiter("5/30d", algorithm=algorithm, store=proxy.url, on_store_error="raise") as limiter:
            await limiter.peek("warm")
            before = proxy.trips
            decisions = await check_all(limiter, 256)
            assert [decision.remaining for decision in decisions] == [4] * 256
            assert proxy.trips - before <= 256 // 16
            assert proxy.under_way == 0


async def test_the_server_sees_few_reads(any_redis_server: Server) -> None:
    """The same without anything in between, by the server's own statistics."""
    async with AsyncLimiter("5/30d", store=any_redis_server.url, on_store_error="raise") as limiter:
        await limiter.peek("warm")
        calls, reads = any_redis_server.calls("evalsha"), any_redis_server.reads()
        await check_all(limiter, 256)
        assert any_redis_server.calls("evalsha") - calls <= 16
        assert any_redis_server.reads() - reads <= 64


@pytest.mark.parametrize("quotas", [["5/30d"], ["5/30d", "6/60d", "7/90d"]], ids=["one quota", "three quotas"])
async def test_batches_are_bounded(quotas: list[str], redis_server: Server) -> None:
    with FaultyProxy(redis_server.port) as proxy:
        async with AsyncLimiter(quotas, store=proxy.url, on_store_error="raise") as limiter:
            await limiter.peek("warm")
            decisions = await check_all(limiter, 3_000)
            assert sum(decision.allowed for decision in decisions) == 3_000
            assert 16 <= proxy.most <= BOUND


async def test_one_alone_is_one_trip(redis_server: Server) -> None:
    with FaultyProxy(redis_server.port) as proxy:
        async with AsyncLimiter("100/30d", store=proxy.url, on_store_error="raise") as limiter:
            await limiter.try_acquire("k")
            before = proxy.trips
            for left in range(98, 48, -1):
                assert (await limiter.try_acquire("k")).remaining == left
            assert proxy.trips - before == 50
            assert proxy.most == 1


async def test_each_caller_gets_its_answer(redis_server: Server) -> None:
    """Different limiters, keys, permits and calls, all at once on one store."""
    async with AsyncLimiter("1000/30d", store=redis_server.url, on_store_error="raise") as limiter:
        takes = [limiter.try_acquire(f"k{number}", permits=number) for number in range(1, 500)]
        for number, decision in enumerate(await asyncio.gather(*takes), start=1):
            assert decision.remaining == 1000 - number
        mixed = []
        for number in range(1, 500):
            mixed.append(limiter.peek(f"k{number}", permits=0))
            mixed.append(limiter.try_acquire(f"k{number}", permits=500))
        answers = await asyncio.gather(*mixed)
        for number in range(1, 500):
            assert answers[2 * number - 2].remaining == 1000 - number
            assert answers[2 * number - 1].remaining == 500 - number


async def test_errors_are_apart(redis_server: Server) -> None:
    """One key holds a foreign value: its check fails, and no other."""
    redis_server.client().rpush("rate_limiter:token_bucket:{k50}", "not ours")
    async with AsyncLimiter("5/30d", store=redis_server.url, on_store_error="raise") as limiter:
        calls = (limiter.try_acquire(f"k{number}") for number in range(100))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for number, result in enumerate(results):
            if number == 50:
                assert isinstance(result, StoreUnavailable)
            else:
                assert isinstance(result, Decision)
                assert result.remaining == 4


async def test_bad_input_fails_alone(redis_server: Server) -> None:
    async with AsyncLimiter("5/30d", store=redis_server.url, on_store_error="raise") as limiter:
        calls = (limiter.try_acquire("" if number == 7 else f"k{number}") for number in range(20))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [number for number, result in enumerate(results) if isinstance(result, ValueError)] == [7]


async def test_cancelled_in_mid_trip(redis_server: Server) -> None:
    """The replies are held back, the callers go away, and what was spent for them comes back."""
    with FaultyProxy(redis_server.port) as proxy:
        async with AsyncLimiter("100/30d", store=proxy.url, on_store_error="raise") as limiter:
            await limiter.peek("k")
            proxy.hold = True
            before = redis_server.calls("evalsha")
            calls = [asyncio.create_task(limiter.try_acquire("k", permits=2)) for _ in range(30)]
            await until_async(lambda: redis_server.calls("evalsha") > before)  # all thirty travel together
            for call in calls[:20]:
                call.cancel()
            results = asyncio.gather(*calls, return_exceptions=True)
            await asyncio.sleep(0)
            proxy.hold = False
            granted = [result for result in await results if isinstance(result, Decision)]
            assert len(granted) == 10
            await until_async(lambda: proxy.under_way == 0)
            deadline = time.monotonic() + PATIENCE
            while (left := (await limiter.peek("k", permits=0)).remaining) != 80:
                assert time.monotonic() < deadline, f"{left} are left"


def test_event_loops_in_turn(redis_server: Server) -> None:
    """One limiter serves one event loop after another."""
    limiter = AsyncLimiter("1000/30d", store=redis_server.url, on_store_error="raise")

    async def check() -> int:
        decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(100)))
        await limiter.aclose()
        return sum(decision.allowed for decision in decisions)

    assert [asyncio.run(check()) for _ in range(3)] == [100, 100, 100]
    assert redis_server.client().hget("rate_limiter:token_bucket:{k}", "tokens") == "700"


def test_two_event_loops(redis_server: Server) -> None:
    """One limiter serves two event loops at once, in two threads."""
    limiter = AsyncLimiter("1000/30d", store=redis_server.url, on_store_error="raise")
    granted: list[int] = []

    async def check() -> None:
        for _ in range(5):
            granted.append(sum([bool(decision) for decision in await check_one_key()]))
        await limiter.aclose()

    async def check_one_key() -> list[Decision]:
        return await asyncio.gather(*(limiter.try_acquire("k") for _ in range(150)))

    threads = [threading.Thread(target=lambda: asyncio.run(check())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 10
    assert sum(granted) == 1000


async def test_killed_in_mid_batch(mortal_server: Server) -> None:
    """No caller waits for ever, whatever the moment."""
    async with AsyncLimiter("100000/30d", store=mortal_server.url) as limiter:
        await limiter.peek("k")
        calls = [asyncio.create_task(limiter.try_acquire("k")) for _ in range(2_000)]
        await asyncio.sleep(0.003)
        mortal_server.kill()
        decisions = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE)
        assert all(decision.allowed for decision in decisions)
        assert decisions[-1].degraded
