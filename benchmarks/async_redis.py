"""Redis and memory under asyncio: many tasks at once, each awaiting one check after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import redis
import redis.asyncio

from benchmarks import peers
from benchmarks.workload import LIMIT, PERIOD_SECONDS, QUOTA, TURN_SECONDS, Sample, Scale, quiet, traffic

Check = Callable[[str], Awaitable[bool]]
Start = Callable[[str, str], AbstractAsyncContextManager[Check]]  # (url, algorithm) -> an awaited check

MEMORY = "memory://"
POOL = 300  # connections for those who take one per task; their defaults raise at 256 tasks
GIVE_UP_SECONDS = 120.0  # a contender that hangs is reported, not waited for
SHOWN = ("token_bucket", "fixed_window", "sliding_window_counter")

# The same work as a token bucket of ours, for redis-py without any library: read, refill, spend, write, expire.
BARE_SCRIPT = """
local capacity, period = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local state = redis.call('HMGET', KEYS[1], 'tokens', 'last_refill')
local tokens = capacity
if state[1] then tokens = math.min(capacity, state[1] + (now - state[2]) * capacity / period) end
if tokens < 1 then return {0, 0} end
redis.call('HSET', KEYS[1], 'tokens', tokens - 1, 'last_refill', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], period / 1000)
return {1, math.floor(tokens - 1)}
"""


@asynccontextmanager
async def headgate(url: str, algorithm: str) -> AsyncIterator[Check]:
    from headgate import AsyncLimiter
    from headgate.rule import check_algorithm

    async with AsyncLimiter(QUOTA, algorithm=check_algorithm(algorithm), store=url, on_store_error="raise") as limiter:

        async def check(key: str) -> bool:
            return (await limiter.try_acquire(key)).allowed

        yield check


@asynccontextmanager
async def limits(url: str, algorithm: str) -> AsyncIterator[Check]:
    from limits import parse
    from limits.aio import storage, strategies

    item = parse(QUOTA)
    store: Any = (
        storage.MemoryStorage()
        if url == MEMORY
        else storage.RedisStorage(f"async+{url}", implementation="redispy", max_connections=POOL)
    )
    strategy: Any = strategies.STRATEGIES[peers.LIMITS[algorithm]]
    limiter = strategy(store)

    async def check(key: str) -> bool:
        return bool(await limiter.hit(item, key))

    yield check
    if url != MEMORY:
        await store.bridge.get_connection().aclose()  # it has no close() of its own


@asynccontextmanager
async def throttled(url: str, algorithm: str) -> AsyncIterator[Check]:
    from throttled.asyncio import MemoryStore, RedisStore, Throttled

    store: Any = (
        MemoryStore(options={"MAX_SIZE": 4_096})
        if url == MEMORY
        else RedisStore(server=url, options={"CONNECTION_POOL_KWARGS": {"max_connections": POOL}})
    )
    limiter = Throttled(using=peers.THROTTLED[algorithm], quota=peers.throttled_quota(), store=store)

    async def check(key: str) -> bool:
        return not (await limiter.limit(key)).limited

    yield check
    if url != MEMORY:
        await store._backend.get_client().connection_pool.disconnect()  # it has no close() of its own


@asynccontextmanager
async def pyrate(url: str, algorithm: str) -> AsyncIterator[Check]:
    from pyrate_limiter import AbstractBucket, RedisStateStore, StateBucket, WallClock

    client = redis.asyncio.Redis.from_url(url, max_connections=POOL)
    rates, policy = peers.pyrate_rates(), peers.pyrate_policy(algorithm)

    def bucket_of(key: str) -> AbstractBucket:
        return StateBucket(rates, policy, RedisStateStore(client, f"pyrate:{algorithm}:{key}"))

    limiter = peers.pyrate_limiter_of(bucket_of, WallClock().now)

    async def check(key: str) -> bool:
        return bool(await limiter.try_acquire_async(key, blocking=False))

    yield check
    await client.aclose()


@asynccontextmanager
async def bare(url: str, _algorithm: str) -> AsyncIterator[Check]:
    client = redis.asyncio.Redis.from_url(url)
    script = await client.script_load(BARE_SCRIPT)

    async def check(key: str) -> bool:
        allowed, _ = await client.evalsha(script, 1, f"bare:{key}", LIMIT, PERIOD_SECONDS * 1_000_000)
        return bool(allowed)

    yield check
    await client.aclose()


AT_ONCE: dict[str, tuple[Start, tuple[str, ...]]] = {
    "headgate": (headgate, SHOWN),
    "limits": (limits, tuple(peers.LIMITS)),
    "throttled-py": (throttled, SHOWN),
    "pyrate-limiter": (pyrate, ("token_bucket",)),
}
ONE_AT_A_TIME: dict[str, tuple[Start, tuple[str, ...]]] = {
    "headgate, one task": (headgate, ("token_bucket",)),
    "redis-py, one task": (bare, ("token_bucket",)),
}
IN_MEMORY: dict[str, tuple[Start, tuple[str, ...]]] = {
    "headgate": (headgate, SHOWN),
    "limits": (limits, tuple(peers.LIMITS)),
    "throttled-py": (throttled, SHOWN),
}


async def drive(check: Check, keys: Sequence[str], tasks: int) -> int:
    """Deal *keys* to *tasks* that all run at once; return how many checks were admitted."""

    async def work(hand: Sequence[str]) -> int:
        admitted = 0
        for key in hand:
            if await check(key):
                admitted += 1
        return admitted

    return sum(await asyncio.gather(*(work(keys[first::tasks]) for first in range(tasks))))


async def measure(start: Start, url: str, algorithm: str, keys: Sequence[str], tasks: int) -> Sample:
    """Go over *keys* until a turn has lasted long enough to be measured well, from an empty store each time."""
    seconds, checks, admitted = 0.0, 0, 0
    while seconds < TURN_SECONDS:
        async with start(url, algorithm) as check:
            if url != MEMORY:
                names = [f"warm-up:{number}" for number in range(4 * tasks)]
                await asyncio.wait_for(drive(check, names, tasks), GIVE_UP_SECONDS)  # opens every connection
                with redis.Redis.from_url(url) as client:
                    client.flushdb()
            with quiet():
                begin = time.perf_counter()
                admitted += await asyncio.wait_for(drive(check, keys, tasks), GIVE_UP_SECONDS)
                seconds += time.perf_counter() - begin
        checks += len(keys)
    return Sample(seconds, checks, admitted)


def one_round(start: Start, url: str, algorithm: str, keys: Sequence[str], tasks: int) -> Sample:
    return asyncio.run(measure(start, url, algorithm, keys, tasks))


def rounds(library: str, scale: Scale, url: str) -> dict[str, Callable[[], Sample]]:
    """Give one round of *library* for each of its algorithms, against the server at *url*."""
    start, algorithms = (AT_ONCE | ONE_AT_A_TIME)[library]
    keys = traffic(scale.async_keys)
    tasks = scale.async_tasks if library in AT_ONCE else 1
    return {algorithm: partial(one_round, start, url, algorithm, keys, tasks) for algorithm in algorithms}


def memory_rounds(library: str, scale: Scale, _url: str) -> dict[str, Callable[[], Sample]]:
    """Give one round of *library* in memory, by one task: nothing there ever waits."""
    start, algorithms = IN_MEMORY[library]
    keys = traffic(scale.memory_keys)
    return {algorithm: partial(one_round, start, MEMORY, algorithm, keys, 1) for algorithm in algorithms}
