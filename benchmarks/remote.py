"""A service as a store: `headgate://` beside the same limiter on Redis itself, in turn.

One check after another from a thread, and 256 tasks of an event loop, whose checks travel together: half and hundredth
slowest of the single checks. The service is one worker: on memory, which is as many hops as Redis; on the same Redis,
which is one hop more; and on the same Redis with leases, which asks it for few checks. A lone check is
measured over many small limits, and over one hot key, which is what leases are for. One round is
`python -m benchmarks.remote KEYS URL...`, which prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.figures import Bar
from benchmarks.server import free_port
from benchmarks.service import process
from benchmarks.workload import QUOTA, quiet, traffic

ROOT = Path(__file__).resolve().parent.parent
REDIS, MEMORY, BEHIND = "headgate on Redis", "headgate://, service on memory", "headgate://, service on Redis"
LEASED = "headgate://, service on Redis with leases"
HTTP = "headgate+http://, service on memory"
TASKS = 256
HOT = "1000000/hour"  # of one key, a limit that is not reached
SLICES = 8  # turns of each contender in a round
MOST = 1.5  # times the p99 of Redis

Figures = dict[str, dict[str, float]]  # by contender: p50 and p99 in microseconds, of one thread and of tasks


@contextmanager
def running(redis: str, build: str | None) -> Iterator[dict[str, str]]:
    """The URLs of all contenders, with their services running."""
    urls = {REDIS: f"{redis}?timeout=10"}
    with ExitStack() as stack:
        behind = f"{redis}?timeout=10"
        for name, store in ((MEMORY, "memory://"), (BEHIND, behind), (LEASED, behind)):
            http, resp = free_port(), free_port()
            serve = ("-m", "headgate", "serve", "--port", str(http), "--resp-port", str(resp), "--store", store)
            leases = ["--client-limits-hybrid"] if name == LEASED else []
            stack.enter_context(process(http, *serve, "--client-limits", "100", *leases, path=build))
            urls[name] = f"headgate://127.0.0.1:{resp}?timeout=10"
            if name == MEMORY:
                urls[HTTP] = f"headgate+http://127.0.0.1:{http}?timeout=10"
        yield urls


def percentiles(seconds: list[float]) -> tuple[float, float]:
    seconds.sort()
    return seconds[len(seconds) // 2] * 1e6, seconds[len(seconds) * 99 // 100] * 1e6


def alone(urls: dict[str, str], keys: Sequence[str], quota: str = QUOTA) -> dict[str, list[float]]:
    """The time of each check, one after another."""
    from headgate import Limiter

    name = f"r{os.getpid()}"
    limiters = {one: Limiter(quota, store=url, name=name, on_store_error="raise") for one, url in urls.items()}
    found: dict[str, list[float]] = {one: [] for one in urls}
    for limiter in limiters.values():
        limiter.peek("warm-up")
    with quiet():
        for turn in range(SLICES):
            for one, limiter in limiters.items():
                for key in keys[turn::SLICES]:
                    begun = perf_counter()
                    limiter.try_acquire(key)
                    found[one].append(perf_counter() - begun)
    for limiter in limiters.values():
        limiter.close()
    return found


async def together(urls: dict[str, str], keys: Sequence[str]) -> dict[str, list[float]]:
    """The same of many tasks."""
    from headgate import AsyncLimiter

    name = f"t{os.getpid()}"
    limiters = {one: AsyncLimiter(QUOTA, store=url, name=name, on_store_error="raise") for one, url in urls.items()}
    found: dict[str, list[float]] = {one: [] for one in urls}

    async def work(limiter: AsyncLimiter, left: Iterator[str], times: list[float]) -> None:
        for key in left:
            begun = perf_counter()
            await limiter.try_acquire(key)
            times.append(perf_counter() - begun)

    for limiter in limiters.values():
        await asyncio.gather(*[limiter.peek("warm-up") for _ in range(TASKS)])
    with quiet():
        for turn in range(SLICES):
            for one, limiter in limiters.items():
                left = iter(keys[turn::SLICES])
                await asyncio.gather(*[work(limiter, left, found[one]) for _ in range(TASKS)])
    for limiter in limiters.values():
        await limiter.aclose()
    return found


def one_round(urls: dict[str, str], keys: Sequence[str]) -> Figures:
    """Every contender once, in slices that take turns."""
    parts = {
        "": alone(urls, keys),
        "hot ": alone(urls, ["hot"] * len(keys), HOT),
        "tasks ": asyncio.run(together(urls, [*keys] * 4)),
    }
    found: Figures = {one: {} for one in urls}
    for part, times in parts.items():
        for one in urls:
            found[one][f"{part}p50"], found[one][f"{part}p99"] = percentiles(times[one])
    return found


def measure(urls: dict[str, str], keys: int, path: str | None) -> Figures:
    """One round in a process of its own, with the headgate at *path*."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))} if path else None
    command = [sys.executable, "-m", "benchmarks.remote", str(keys), *urls.values()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=True)
    found: Figures = json.loads(done.stdout)
    return found


def medians(rounds: Sequence[Figures]) -> Figures:
    return {
        one: {name: median(each[one][name] for each in rounds) for name in figures}
        for one, figures in rounds[0].items()
    }


def bars(rounds: Sequence[Figures]) -> list[Bar]:
    """p99 against Redis in the same round: of the service on memory, a hop away as Redis is, of two hops, of leases."""
    made: list[Bar] = []
    lone, hot, tasks = ("p99", "one thread"), ("hot p99", "one thread, one key"), ("tasks p99", f"{TASKS} tasks")
    for store, names in ((MEMORY, (lone, tasks)), (BEHIND, (lone, tasks)), (LEASED, (hot,))):
        for name, what in names:
            times = median(each[store][name] / each[REDIS][name] for each in rounds)
            made.append(Bar(f"{store}, {what}, p99: times Redis", f"<= {MOST}", f"{times:.2f}", times <= MOST))
    return made


def main(keys: str, *urls: str) -> None:
    names: Any = (REDIS, MEMORY, HTTP, BEHIND, LEASED)
    print(json.dumps(one_round(dict(zip(names, urls, strict=True)), traffic(int(keys)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
