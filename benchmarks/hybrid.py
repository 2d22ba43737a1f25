"""The hybrid limiter on keys that are warm: beside our own memory limiter and a peer's, with a real Redis behind it.

Three situations: everything is admitted; everything is refused; Redis is away and the policy answers. Then, once, what
no ratio can say: percentiles of single calls, round trips a second, bytes a key.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from benchmarks.size import resident
from benchmarks.workload import TURN_SECONDS, Loop, Sample, Scale, time_loop

PLENTY, SPENT = "1000000000/hour", "5/day"
CALLS = 100_000
NO_SERVER = "redis://127.0.0.1:1/0"  # refuses every connection
HOT_SECONDS = 3.0
MANY_KEYS = 2_000
WARM_KEYS = 20_000

Start = Callable[[str], AbstractContextManager[Loop]]  # url -> a loop over one key


def _loop(try_acquire: Callable[[str], Any]) -> Loop:
    def loop(keys: Sequence[str]) -> int:
        admitted = 0
        for key in keys:
            if try_acquire(key):
                admitted += 1
        return admitted

    return loop


@contextmanager
def hybrid(url: str, quota: str, warm: int) -> Iterator[Loop]:
    from headgate import HybridLimiter

    with HybridLimiter(quota, store=url) as limiter:
        limiter.reset("k")
        deadline = time.monotonic() + 10
        while limiter.stats().held < warm and time.monotonic() < deadline:
            limiter.try_acquire("k")
        for _ in range(0 if warm else 20):
            limiter.try_acquire("k")
        yield _loop(limiter.try_acquire)


@contextmanager
def memory(_url: str, quota: str) -> Iterator[Loop]:
    from headgate import Limiter

    with Limiter(quota) as limiter:
        yield _loop(limiter.try_acquire)


@contextmanager
def limits(_url: str, quota: str) -> Iterator[Loop]:
    from limits import parse, storage, strategies

    item, hit = parse(quota), strategies.FixedWindowRateLimiter(storage.MemoryStorage()).hit

    def loop(keys: Sequence[str]) -> int:
        admitted = 0
        for key in keys:
            if hit(item, key):
                admitted += 1
        return admitted

    yield loop


LIBRARIES: dict[str, dict[str, Start]] = {
    "headgate hybrid": {
        "admitted": partial(hybrid, quota=PLENTY, warm=CALLS // 10),
        "refused": partial(hybrid, quota=SPENT, warm=0),
        "Redis away": lambda _url: hybrid(NO_SERVER, PLENTY, 0),
    },
    "headgate": {"admitted": partial(memory, quota=PLENTY), "refused": partial(memory, quota=SPENT)},
    "limits": {"admitted": partial(limits, quota=PLENTY), "refused": partial(limits, quota=SPENT)},
}


def one_round(start: Start, url: str, keys: Sequence[str]) -> Sample:
    """Go over *keys* until a turn has lasted long enough to be measured well."""
    seconds, checks, admitted = 0.0, 0, 0
    with start(url) as loop:
        while seconds < TURN_SECONDS:
            sample = time_loop(loop, keys)
            seconds, checks, admitted = seconds + sample.seconds, checks + sample.checks, admitted + sample.admitted
    return Sample(seconds, checks, admitted)


def rounds(library: str, _scale: Scale, url: str) -> dict[str, Callable[[], Sample]]:
    logging.getLogger("headgate").setLevel(logging.CRITICAL)  # that NO_SERVER does not answer is no news
    keys = ["k"] * CALLS
    return {name: partial(one_round, start, url, keys) for name, start in LIBRARIES[library].items()}


def figures(url: str) -> dict[str, Any]:
    """What is measured once, in a process of its own."""
    from headgate import HybridLimiter

    logging.getLogger("headgate").setLevel(logging.CRITICAL)
    found: dict[str, Any] = {}
    with HybridLimiter("10000/second", store=url, name="figures") as limiter:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            limiter.try_acquire("k")
        before = limiter.stats().trips
        found["p99_us"] = _p99(limiter.try_acquire, HOT_SECONDS)
        found["trips_per_second"] = (limiter.stats().trips - before) / HOT_SECONDS
        found["local_ratio"] = limiter.stats().local_ratio
    with HybridLimiter("10000/second", store=NO_SERVER, name="figures") as limiter:
        found["p99_away_us"] = _p99(limiter.try_acquire, HOT_SECONDS)
    with HybridLimiter("1000/second", store=url, name="many") as limiter:
        dice = random.Random(1)
        keys = [f"user:{number:07d}" for number in range(MANY_KEYS)]
        before, until = 0, time.monotonic() + 2 * HOT_SECONDS
        half = time.monotonic() + HOT_SECONDS
        while time.monotonic() < until:  # 20,000 calls a second at most
            for key in dice.choices(keys, k=100):
                limiter.try_acquire(key)
            time.sleep(0.005)
            if not before and time.monotonic() > half:
                before = limiter.stats().trips
        found["trips_per_second_many"] = (limiter.stats().trips - before) / HOT_SECONDS
    return found


def _p99(try_acquire: Callable[[str], Any], seconds: float) -> float:
    """Microseconds of the 99th of a hundred single calls, one reading of the clock included."""
    clock, times = time.perf_counter_ns, []
    end = clock() + int(seconds * 1e9)
    while True:
        start = clock()
        try_acquire("k")
        now = clock()
        times.append(now - start)
        if now >= end:
            break
    times.sort()
    return times[int(len(times) * 0.99)] / 1000


def weight(url: str) -> dict[str, Any]:
    """Bytes that the process grows by for each warm key, the key's own text included. In a fresh process."""
    from headgate import HybridLimiter

    with HybridLimiter("1000/hour", store=url, name="weight") as limiter:
        for number in range(500):
            limiter.try_acquire(f"first:{number:06d}")
        before = resident()

        def warm(first: int) -> None:
            for number in range(first, WARM_KEYS, 16):
                limiter.try_acquire(f"user:{number:07d}")

        threads = [threading.Thread(target=warm, args=(first,)) for first in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"bytes_per_key": (resident() - before) / (limiter.stats().keys - 500), "keys": limiter.stats().keys}
