"""However many callers there are, there are no more connections than the pool may have, and no call fails."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
import redis.asyncio

from headgate import AsyncLimiter, Limiter
from headgate.redis.batching import BatchSender
from headgate.stores.redis import RedisStore
from tests.support.clusters import Node, wait_until

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

POOLS = [2, 8]


def url(node: Node, pool: int) -> str:
    return f"{node.bare_url}?timeout=50&connect_timeout=50&max_connections={pool}"


@contextmanager
def watched(node: Node) -> Iterator[list[int]]:
    """How many connections there are besides our own, looked at all the time."""
    counts: list[int] = []
    over = threading.Event()

    def watch() -> None:
        with redis.Redis(port=node.port) as client:
            while not over.wait(0.002):
                counts.append(len(client.client_list()) - 1)

    thread = threading.Thread(target=watch)
    thread.start()
    yield counts
    over.set()
    thread.join()


@pytest.mark.parametrize("pool", POOLS)
def test_10_000_awaited_checks(pool: int, node: Node) -> None:
    async def check() -> None:
        async with AsyncLimiter("4000/30d", store=url(node, pool), on_store_error="raise") as limiter:
            await limiter.peek("k")
            await asyncio.to_thread(wait_until, lambda: any(counts), "the connection is seen")
            decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(10_000)))
        assert sum(decision.allowed for decision in decisions) == 4000

    with watched(node) as counts:
        asyncio.run(check())
    assert 0 < max(counts) <= pool


@pytest.mark.parametrize("pool", POOLS)
def test_64_threads(pool: int, node: Node) -> None:
    """An exhausted pool is waited for, within the budget of the call, and is no error."""
    admitted: list[bool] = []
    with Limiter("1000/30d", store=url(node, pool), on_store_error="raise") as limiter:

        def work() -> None:
            for _ in range(20):
                admitted.append(limiter.try_acquire("k").allowed)

        with watched(node) as counts:
            threads = [threading.Thread(target=work) for _ in range(64)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_until(lambda: any(counts), "the connections are seen")
    assert len(admitted) == 64 * 20
    assert sum(admitted) == 1000
    assert 0 < max(counts) <= pool


def test_cancelled_probe(node: Node) -> None:
    """A probe that is cancelled twice, by `aclose` and by the end of the event loop, leaves no connection open."""

    async def check() -> None:
        store = RedisStore(url(node, 8))
        probe = asyncio.create_task(store.async_executor().probe(0))
        sending: list[BatchSender] = []
        while not sending:
            await asyncio.sleep(0)
            sending = [one for one in gc.get_objects() if type(one) is BatchSender and one.in_use()]
        probe.cancel()
        while any(sender.in_use() for sender in sending):  # noqa: ASYNC110
            await asyncio.sleep(0)
        probe.cancel()  # in the turn of the event loop in which the reply came
        await asyncio.gather(probe, return_exceptions=True)
        await store.aclose()

    asyncio.run(check())
    made = [seen for seen in gc.get_objects() if type(seen) is redis.asyncio.Connection]
    assert not [connection for connection in made if connection.port == node.port and connection.is_connected]
