"""A check on a Redis that is farther and farther away: who pays the round trip, and how often.

A proxy of ours holds every reply back. `(PING)` is the round trip as redis-py sees it, proxy included: what others take
is read against it. One delay is `python -m benchmarks.latency SECONDS URL`, which prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import redis

from benchmarks import async_redis, peers, sync_redis
from benchmarks.figures import Bar
from benchmarks.hybrid import PLENTY
from benchmarks.team import ROOT
from benchmarks.workload import QUOTA, quiet

DELAYS_MS = (0, 1, 5, 10, 20, 50)
TASKS = 256
LEAST = 60  # checks that are timed, at least
BATCH, PAUSE = 1_000, 0.002  # hybrid: calls in a row, then a moment for its background thread

PING, SYNC, HYBRID, COLD = "(PING)", "Limiter", "HybridLimiter, warm key", "HybridLimiter, first call of a key"
ASYNC, ASYNC_PEER = f"AsyncLimiter, {TASKS} tasks", f"limits, {TASKS} tasks"
PEER, PEER_STATS = "limits", "limits, and what remains"

Figures = dict[str, dict[str, float]]  # by contender: p50 and p99 in microseconds, and how many checks


def keys(prefix: str) -> Iterator[str]:
    """A thousand keys in turn, none of which meets its limit."""
    while True:
        yield from (f"{prefix}:{number:04d}" for number in range(1_000))


def figures(nanoseconds: list[int]) -> dict[str, float]:
    nanoseconds.sort()
    p50, p99 = (sync_redis.percentile(nanoseconds, share) / 1000 for share in (0.5, 0.99))
    return {"p50": p50, "p99": p99, "checks": len(nanoseconds)}


def one_by_one(check: Callable[[str], object], seconds: float, prefix: str) -> dict[str, float]:
    names, clock, times = keys(prefix), time.perf_counter_ns, list[int]()
    for _ in range(3):
        check(next(names))
    with quiet():
        end = clock() + int(seconds * 1e9)
        while len(times) < LEAST or clock() < end:
            key = next(names)
            begun = clock()
            check(key)
            times.append(clock() - begun)
    return figures(times)


def ping(url: str, seconds: float) -> dict[str, float]:
    with redis.Redis.from_url(url) as client:
        return one_by_one(lambda _key: client.ping(), seconds, "")


def limiter(url: str, seconds: float) -> dict[str, float]:
    with sync_redis.headgate(f"{url}?timeout=10", "token_bucket") as check:
        return one_by_one(check, seconds, "sync")


def peer(url: str, seconds: float) -> dict[str, float]:
    with sync_redis.limits(url, "fixed_window") as check:
        return one_by_one(check, seconds, "peer")


def peer_with_stats(url: str, seconds: float) -> dict[str, float]:
    """What it takes to answer with headers: the library says yes or no, and has a second call for the rest."""
    from limits import parse, storage, strategies

    item, store = parse(QUOTA), storage.RedisStorage(url)
    rate = strategies.STRATEGIES[peers.LIMITS["fixed_window"]](store)

    def check(key: str) -> object:
        return rate.hit(item, key), rate.get_window_stats(item, key)

    found = one_by_one(check, seconds, "stats")
    store.storage.close()
    return found


async def together(start: async_redis.Start, url: str, seconds: float, algorithm: str) -> dict[str, float]:
    """TASKS that check one key after another; the first check of each opens connections and does not count."""
    clock, times = time.perf_counter_ns, list[int]()

    async with start(url, algorithm) as check:
        await asyncio.gather(*(check(f"first:{number}") for number in range(TASKS)))
        end = clock() + int(seconds * 1e9)

        async def work(number: int) -> None:
            names = keys(f"task:{number}")
            while True:
                begun = clock()
                await check(next(names))
                times.append(clock() - begun)
                if clock() > end:
                    return

        with quiet():
            await asyncio.gather(*(work(number) for number in range(TASKS)))
    return figures(times)


def tasks(start: async_redis.Start, suffix: str, algorithm: str, url: str, seconds: float) -> dict[str, float]:
    return asyncio.run(together(start, url + suffix, seconds, algorithm))


def hybrid(url: str, seconds: float) -> dict[str, float]:
    from headgate import HybridLimiter

    clock, times = time.perf_counter_ns, list[int]()
    with HybridLimiter(PLENTY, store=f"{url}?timeout=10", name="latency") as limiter:
        deadline = time.monotonic() + 10
        while limiter.stats().held < BATCH and time.monotonic() < deadline:
            limiter.try_acquire("k")
        end = clock() + int(seconds * 1e9)
        while clock() < end:
            for _ in range(BATCH):
                begun = clock()
                limiter.try_acquire("k")
                times.append(clock() - begun)
            time.sleep(PAUSE)
    return figures(times)


def cold(url: str, _seconds: float) -> dict[str, float]:
    from headgate import HybridLimiter

    with HybridLimiter("1000/hour", store=f"{url}?timeout=10", name="cold") as limiter:
        times: list[int] = []
        for number in range(max(5, LEAST // 3)):
            begun = time.perf_counter_ns()
            limiter.try_acquire(f"cold:{number}")
            times.append(time.perf_counter_ns() - begun)
    return figures(times[2:])


CONTENDERS: dict[str, Callable[[str, float], dict[str, float]]] = {
    PING: ping,
    SYNC: limiter,
    PEER: peer,
    PEER_STATS: peer_with_stats,
    ASYNC: partial(tasks, async_redis.headgate, "?timeout=10", "token_bucket"),
    ASYNC_PEER: partial(tasks, async_redis.limits, "", "fixed_window"),
    HYBRID: hybrid,
    COLD: cold,
}


def measure(port: int, seconds: float, path: str | None) -> Figures:
    """All contenders, in a process of their own, with the headgate at *path*."""
    places = os.pathsep.join(filter(None, [path, str(ROOT)]))
    command = [sys.executable, "-m", "benchmarks.latency", str(seconds), f"redis://127.0.0.1:{port}/0"]
    environment = {**os.environ, "PYTHONPATH": places}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    found: Figures = json.loads(done.stdout)
    return found


def bars(found: dict[str, Figures]) -> list[Bar]:
    """A check is one round trip, tasks together pay hardly more, and a warm key of the hybrid limiter pays none."""
    made = []
    for delay, by in found.items():
        if delay == "10":
            for name, most in ((SYNC, 1.1), (ASYNC, 2.0)):
                times = by[name]["p50"] / by[PING]["p50"]
                made.append(
                    Bar(f"latency, {delay} ms, {name}: p50 in round trips", f"<= {most}", f"{times:.2f}", times <= most)
                )
        if delay in ("0", "50"):
            p99 = by[HYBRID]["p99"]
            made.append(Bar(f"latency, {delay} ms, {HYBRID}: p99, us", "<= 5", f"{p99:.2f}", p99 <= 5))
    return made


def main(seconds: str, url: str) -> None:
    found = {name: contender(url, float(seconds)) for name, contender in CONTENDERS.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
