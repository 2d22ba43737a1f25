"""Replies that are lost, late or cut off in the middle, once for every operation of every tool.

The scenarios of the tools, step by step on Redis and in memory; but Redis is behind a proxy that loses the first reply
to every step. Memory hears every step once: equal answers mean that nothing was done twice, and nothing was lost.
"""

import asyncio
from typing import Any

import pytest

from headgate.coordination import AsyncLock, Lock
from headgate.coordination.lock import MACHINE as LOCK
from headgate.coordination.place import Machine
from headgate.errors import StoreUnavailable
from tests.coordination.test_lock_twins import LockTwins
from tests.coordination.twins import Twins
from tests.faults.proxy import FaultyProxy
from tests.servers import Server

TTL = 30_000
SCENARIOS: dict[str, tuple[type[Twins], Machine, list[tuple[Any, ...]]]] = {
    "lock": (
        LockTwins,
        LOCK,
        [
            ("acquire", "a", TTL, ""),
            ("acquire", "b", TTL, ""),
            ("renew", "a", TTL),
            ("renew", "b", TTL),
            ("release", "b", TTL),
            ("release", "a", TTL),
            ("acquire", "c", TTL, ""),
            ("acquire", "d", TTL, "c"),
            ("release", "c", TTL),
            ("release", "d", TTL),
        ],
    ),
}


def tick(twins: Twins) -> None:
    twins.clock.advance(0.000_001)


FAULTS = {"lost": 0, "cut off": 5}


@pytest.mark.parametrize("bytes_before", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("tool", SCENARIOS)
def test_every_step(tool: str, bytes_before: int, redis_server: Server) -> None:
    kind, machine, steps = SCENARIOS[tool]
    with FaultyProxy(redis_server.port) as proxy:
        twins = kind(machine, redis_server, url=proxy.url)
        twins.redis.step(machine, "warm-up", _step(steps[0]))  # the server knows the script: what is lost is an answer
        for number, (op, *arguments) in enumerate(steps, start=1):
            tick(twins)
            proxy.truncate = bytes_before
            twins.step(op, *arguments)
            assert proxy.truncated == number, "nothing was lost"
        twins.close()


def _step(row: tuple[Any, ...]) -> Any:
    from headgate.coordination.place import Step

    return Step(row[0], row[1:])


def through(proxy: FaultyProxy, timeout: float = 10) -> str:
    return f"{proxy.url}?timeout={timeout}"


def lose_one(proxy: FaultyProxy) -> None:
    proxy.truncate = 0


def test_lock_acquired_by_whom_it_says(redis_server: Server, name: str) -> None:
    with FaultyProxy(redis_server.port) as proxy:
        lock, other = Lock(name, store=through(proxy)), Lock(name, store=redis_server.patient_url)
        with lock:
            pass
        for _ in range(3):
            lose_one(proxy)
            assert lock.acquire(timeout=0), "the lock would be held by nobody"
            assert not other.acquire(timeout=0)
            lose_one(proxy)
            lock.ensure_held()
            lose_one(proxy)
            assert lock.release()
            assert other.acquire(timeout=0)
            other.release()
        assert proxy.truncated == 9


def test_lock_when_no_answer_ever_comes(redis_server: Server, name: str) -> None:
    """The caller was told that it failed: so the lock is given back, or taken over by the same caller."""
    with FaultyProxy(redis_server.port) as proxy:
        lock, other = Lock(name, store=through(proxy, 0.4)), Lock(name, store=redis_server.patient_url)
        with lock:
            pass
        proxy.swallow_replies = True
        with pytest.raises(StoreUnavailable):
            lock.acquire(timeout=0)
        assert redis_server.client().exists(f"lock:{{{name}}}")
        proxy.swallow_replies = False
        assert lock.acquire(timeout=10), "its own acquisition stands in its way"
        assert not other.acquire(timeout=0)
        proxy.swallow_replies = True
        assert lock.release(), "it was ours until now"
        proxy.swallow_replies = False
        assert other.acquire(timeout=10)
        other.release()


async def test_lock_async(redis_server: Server, name: str) -> None:
    with FaultyProxy(redis_server.port) as proxy:
        lock = AsyncLock(name, store=through(proxy))
        async with lock:
            pass
        lose_one(proxy)
        assert await lock.acquire(timeout=0)
        lose_one(proxy)
        assert await lock.release()
        proxy.delay = 0.05
        tasks = [asyncio.create_task(AsyncLock(name, store=through(proxy)).acquire()) for _ in range(3)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        proxy.delay = 0
        assert await AsyncLock(name, store=redis_server.patient_url).acquire(timeout=10)
