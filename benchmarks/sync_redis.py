"""Redis, one thread or many, one check after another: wall time, percentiles, and what the server says it did.

Everyone is given the same URL and makes its own client of it; all of them use redis-py with hiredis underneath.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise

import redis

from benchmarks import peers
from benchmarks.workload import ALGORITHMS, QUOTA, Sample, Scale, quiet, traffic

Check = Callable[[str], bool]
Start = Callable[[str, str], AbstractContextManager[Check]]  # (url, algorithm) -> a check

# Commands that a client sends, as against those that its script runs inside the server.
SCRIPT_COMMANDS = ("eval", "evalsha", "fcall")


@contextmanager
def headgate(url: str, algorithm: str) -> Iterator[Check]:
    from headgate import Limiter
    from headgate.rule import check_algorithm

    with Limiter(QUOTA, algorithm=check_algorithm(algorithm), store=url, on_store_error="raise") as limiter:
        yield lambda key: limiter.try_acquire(key).allowed


@contextmanager
def limits(url: str, algorithm: str) -> Iterator[Check]:
    from limits import parse, storage, strategies

    item = parse(QUOTA)
    store = storage.RedisStorage(url)
    limiter = strategies.STRATEGIES[peers.LIMITS[algorithm]](store)
    yield lambda key: limiter.hit(item, key)
    store.storage.close()


@contextmanager
def throttled(url: str, algorithm: str) -> Iterator[Check]:
    from throttled import RedisStore, Throttled

    limiter = Throttled(using=peers.THROTTLED[algorithm], quota=peers.throttled_quota(), store=RedisStore(server=url))
    yield lambda key: not limiter.limit(key).limited


@contextmanager
def pyrate(url: str, algorithm: str) -> Iterator[Check]:
    from pyrate_limiter import AbstractBucket, RedisBucket, RedisStateStore, StateBucket, WallClock
    from pyrate_limiter.buckets.redis_bucket import LuaScript

    client = redis.Redis.from_url(url)
    rates, policy = peers.pyrate_rates(), peers.pyrate_policy(algorithm)
    # RedisBucket.init() would load the script once more for every key.
    script = client.script_load(LuaScript.PUT_ITEM)

    def bucket_of(key: str) -> AbstractBucket:
        name = f"pyrate:{algorithm}:{key}"
        if algorithm in peers.PYRATE_LOG:
            return RedisBucket(rates, client, name, script, policy)
        return StateBucket(rates, policy, RedisStateStore(client, name))

    limiter = peers.pyrate_limiter_of(bucket_of, WallClock().now)
    yield lambda key: bool(limiter.try_acquire(key, blocking=False))
    limiter.close()
    client.close()


@contextmanager
def nothing(url: str, _algorithm: str) -> Iterator[Check]:
    """Run a script that only answers: what redis-py and the round trip cost by themselves."""
    client = redis.Redis.from_url(url)
    script = client.script_load("return 1")
    yield lambda key: bool(client.evalsha(script, 1, key))
    client.close()


LIBRARIES: dict[str, tuple[Start, tuple[str, ...]]] = {
    "headgate": (headgate, ALGORITHMS),
    "limits": (limits, tuple(peers.LIMITS)),
    "throttled-py": (throttled, tuple(peers.THROTTLED)),
    "pyrate-limiter": (pyrate, tuple(peers.PYRATE_LOG | peers.PYRATE_STATE)),
    "(empty script)": (nothing, ("-",)),
}


class Meter:
    """Read what the server did between two moments, from its own counters."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)

    def start(self) -> None:
        self.client.flushdb()
        self.client.config_resetstat()

    def stop(self, checks: int) -> dict[str, float]:
        """Give per-check figures: `round_trips`, `server_us`, and the calls of each command, nested ones included."""
        reads = int(self.client.info("stats")["total_reads_processed"]) - 1  # less this INFO
        stats: dict[str, dict[str, float]] = self.client.info("commandstats")
        commands = {name.removeprefix("cmdstat_"): figures for name, figures in stats.items()}
        for own in ("config|resetstat", "config", "info"):
            commands.pop(own, None)
        scripts = [figures for name, figures in commands.items() if name in SCRIPT_COMMANDS]
        busy = sum(figures["usec"] for figures in scripts or commands.values())
        calls = {name: figures["calls"] / checks for name, figures in sorted(commands.items())}
        return {"round_trips": reads / checks, "server_us": busy / checks, **calls}


def percentile(ordered: Sequence[int], share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * share))])


def drive(check: Check, keys: Sequence[str], stamps: list[int]) -> int:
    """Check all *keys*; note when each check ended; return how many were admitted."""
    clock = time.perf_counter_ns
    admitted = 0
    stamps.append(clock())
    for key in keys:
        if check(key):
            admitted += 1
        stamps.append(clock())
    return admitted


def one_round(start: Start, url: str, algorithm: str, keys: Sequence[str]) -> Sample:
    """Drive *keys* through a fresh client on an empty database; connecting and loading scripts is not timed."""
    meter = Meter(url)
    stamps: list[int] = []
    with start(url, algorithm) as check:
        check("warm-up")
        with quiet():
            meter.start()
            admitted = drive(check, keys, stamps)
            server = meter.stop(len(keys))
    meter.client.close()
    return sample([stamps], admitted, server)


def threads_round(start: Start, url: str, algorithm: str, keys: Sequence[str], threads: int) -> Sample:
    """The same from many threads, which share *keys* and start together."""
    meter = Meter(url)
    shares = [keys[first::threads] for first in range(threads)]
    stamps: list[list[int]] = [[] for _ in shares]
    line = threading.Barrier(threads)

    def work(number: int) -> int:
        line.wait()
        return drive(check, shares[number], stamps[number])

    def warm_up(number: int) -> int:
        line.wait()
        return drive(check, [f"warm-up:{number}"] * 4, [])

    with start(url, algorithm) as check, ThreadPoolExecutor(threads) as pool:
        list(pool.map(warm_up, range(threads)))  # opens every connection
        with quiet():
            meter.start()
            admitted = sum(pool.map(work, range(threads)))
            server = meter.stop(len(keys))
    meter.client.close()
    return sample(stamps, admitted, server)


def sample(stamps: Sequence[Sequence[int]], admitted: int, server: dict[str, float]) -> Sample:
    """What the stamps of each thread say."""
    waits = sorted(after - before for own in stamps for before, after in pairwise(own))
    seconds = (max(own[-1] for own in stamps) - min(own[0] for own in stamps)) / 1e9
    return Sample(seconds, len(waits), admitted, percentile(waits, 0.50) / 1e3, percentile(waits, 0.99) / 1e3, server)


def rounds(library: str, scale: Scale, url: str) -> dict[str, Callable[[], Sample]]:
    """Give one round of *library* for each of its algorithms, against the server at *url*."""
    start, algorithms = LIBRARIES[library]
    keys = traffic(scale.redis_keys)
    return {algorithm: partial(one_round, start, url, algorithm, keys) for algorithm in algorithms}


def threads_rounds(library: str, scale: Scale, url: str) -> dict[str, Callable[[], Sample]]:
    """The same with many threads."""
    start, algorithms = LIBRARIES[library]
    keys = traffic(scale.redis_keys)
    arguments = (keys, scale.redis_threads)
    return {algorithm: partial(threads_round, start, url, algorithm, *arguments) for algorithm in algorithms}
