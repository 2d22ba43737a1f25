"""Memory per key with a million live keys, and what a flood of distinct keys leaves behind. Each in a fresh process."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.workload import ALGORITHMS, LIMIT, PERIOD_SECONDS, QUOTA

Tell = Callable[[float], None]  # takes the share that is done
REPORTS = 200
SPENT = "1/hour"  # in a flood of this quota every key is at its limit at once, so none of them may be given up
SPENT_FLOOD = 1_200_000  # enough to fill a store of default size and knock on its door

# Logs grow with the limit, not with the number of keys, so a figure per key would say nothing.
CONTENDERS = {
    "headgate": tuple(name for name in ALGORITHMS if name != "sliding_window"),
    "limits": ("fixed_window",),
    "throttled-py": ("token_bucket", "fixed_window"),
    "token-bucket": ("token_bucket",),
}


def resident() -> int:
    """Give the bytes of this process that are in memory now, freed ones returned to the system first."""
    gc.collect()
    with suppress(AttributeError):  # not glibc: the figure may include freed memory
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Give the most bytes this process ever had in memory. Not ru_maxrss: that one survives exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not report VmHWM")


def headgate(algorithm: str) -> tuple[Callable[[str], Any], Callable[[], int]]:
    from headgate import Limiter
    from headgate.rule import check_algorithm
    from headgate.stores.memory import MemoryStore

    store = MemoryStore()
    return Limiter(QUOTA, algorithm=check_algorithm(algorithm), store=store).try_acquire, store.__len__


def limits(algorithm: str) -> tuple[Callable[[str], Any], Callable[[], int]]:
    from limits import parse, storage, strategies

    item, store = parse(QUOTA), storage.MemoryStorage()
    limiter = strategies.STRATEGIES[peers.LIMITS[algorithm]](store)
    return lambda key: limiter.hit(item, key), store.storage.__len__


def throttled(algorithm: str) -> tuple[Callable[[str], Any], Callable[[], int]]:
    from throttled import MemoryStore, Throttled

    store = MemoryStore(options={"MAX_SIZE": 100_000_000})
    limiter = Throttled(using=peers.THROTTLED[algorithm], quota=peers.throttled_quota(), store=store)
    return limiter.limit, store._backend.get_client().__len__


def token_bucket(_algorithm: str) -> tuple[Callable[[str], Any], Callable[[], int]]:
    from token_bucket import Limiter, MemoryStorage

    store = MemoryStorage()
    return Limiter(LIMIT / PERIOD_SECONDS, LIMIT, store).consume, store._buckets.__len__


LIBRARIES = {"headgate": headgate, "limits": limits, "throttled-py": throttled, "token-bucket": token_bucket}


def live(library: str, algorithm: str, keys: int, tell: Tell) -> dict[str, Any]:
    """Check *keys* distinct keys once each and weigh the process before and after. The keys' own text counts too."""
    check, held = LIBRARIES[library](algorithm)
    check("first:0000000")  # what is imported or built at the first check is no key's cost
    before = resident()
    step = max(1, keys // REPORTS)
    for number in range(keys - 1):
        check(f"user:{number:07d}")
        if number % step == 0:
            tell(number / keys)
    grown = resident() - before
    return {"keys": held(), "bytes_per_key": grown / (keys - 1), "rss": before + grown, "peak_rss": peak()}


def flood(quota: str, keys: int, tell: Tell) -> dict[str, Any]:
    """Send *keys* distinct keys through a limiter of default size, past one key that has spent everything."""
    from headgate import Limiter, Quota
    from headgate.stores.memory import MemoryStore

    store = MemoryStore()
    limiter = Limiter(quota, store=store)
    rate = Quota.parse(quota)
    before = resident()
    start = time.perf_counter()
    while limiter.try_acquire("spent"):
        pass
    step = max(1, keys // REPORTS)
    admitted = 0
    for number in range(keys):
        if limiter.try_acquire(f"user:{number:08d}"):
            admitted += 1
        if number % step == 0:
            tell(number / keys)
    seconds = time.perf_counter() - start
    # A long flood gives the spent key time to refill, honestly. Had it been given up, all would be there again.
    remaining = limiter.peek("spent", permits=0).remaining
    return {
        "quota": quota,
        "sent": keys,
        "admitted": admitted,
        "held": len(store),
        "max_keys": store.max_keys,
        "us_per_check": seconds / keys * 1e6,
        "spent_key_kept": remaining <= seconds * rate.limit / rate.period,
        "rss_before": before,
        "rss_after": resident(),
        "peak_rss": peak(),
    }
