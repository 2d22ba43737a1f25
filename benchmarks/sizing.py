"""What a key takes: in real servers, in this process, in the hybrid limiter and in a shared file.

Servers: the text of key and value alone; MEMORY USAGE of a key after one call; and growth of `used_memory`, which also
holds the server's tables of keys and of expiry times. The floor is a bare `SET` with `EX` and a key of 28 bytes. In
process: growth of what Python has allocated and of the resident set, each in a process of its own, by
`python -m benchmarks.sizing METER WHAT KEYS`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from benchmarks.figures import Bar
from benchmarks.size import resident
from benchmarks.team import ROOT
from benchmarks.workload import ALGORITHMS, QUOTA

TWO_QUOTAS = "token_bucket, two quotas"
RULES: dict[str, tuple[str, str | list[str]]] = {name: (name, QUOTA) for name in ALGORITHMS}
RULES |= {TWO_QUOTAS: ("token_bucket", ["10/minute", QUOTA])}
LENGTHS = (1, 10, 100, 1000)  # admitted calls in a log
FLOOR = "(bare SET with EX)"
SMALLEST = "gcra"  # of the algorithms, in every store
TTL_BYTES = 8  # what was counted for an expiry time when these promises were made
PROMISED_CONTENT = 50  # bytes of key and value
PROMISED_MILLION = 75  # MB for a million users
PROMISED_LOCAL = 80  # bytes a user
AT_ONCE = 1_000


def key_of(number: int) -> str:
    return f"user:{number:07d}"


def limiter_of(rule: str, store: str = "memory://", quota: Any = None) -> Any:
    from headgate import Limiter
    from headgate.rule import check_algorithm

    algorithm, usual = RULES[rule]
    return Limiter(quota or usual, algorithm=check_algorithm(algorithm), store=store, on_store_error="raise")


# ------------------------------------------------------------------------------------------------------ in servers


def in_server(client: Any, url: str, keys: int) -> dict[str, dict[str, float]]:
    """By rule: bytes of key and value alone, by MEMORY USAGE, and by growth of the server."""
    found: dict[str, dict[str, float]] = {}
    client.flushall()
    before = int(client.info("memory")["used_memory"])
    for first in range(0, keys, AT_ONCE):
        with client.pipeline(transaction=False) as batch:
            for number in range(first, min(first + AT_ONCE, keys)):
                batch.set(f"ratelimit:{number:07d}:1701234000", 1, ex=3600)
            batch.execute()
    all_in = (int(client.info("memory")["used_memory"]) - before) / keys
    name = next(client.scan_iter())
    found[FLOOR] = {"content": len(name) + 1, "usage": client.memory_usage(name, samples=0), "grown": all_in}
    for rule in RULES:
        client.flushall()
        with limiter_of(rule, url) as limiter:
            limiter.try_acquire(key_of(0))
            one = {"usage": usage(client), "content": content(client)}
        client.flushall()
        before = int(client.info("memory")["used_memory"])
        asyncio.run(fill(rule, url, keys))
        found[rule] = one | {"grown": (int(client.info("memory")["used_memory"]) - before) / keys}
    return found


async def fill(rule: str, url: str, keys: int) -> None:
    """One call to each key, many of them under way at a time."""
    from headgate import AsyncLimiter
    from headgate.rule import check_algorithm

    algorithm, quota = RULES[rule]
    checked = check_algorithm(algorithm)
    async with AsyncLimiter(quota, algorithm=checked, store=url, on_store_error="raise") as limiter:
        for first in range(0, keys, AT_ONCE):
            await asyncio.gather(*(limiter.try_acquire(key_of(n)) for n in range(first, min(first + AT_ONCE, keys))))


def million(client: Any, url: str, rule: str, keys: int) -> dict[str, float]:
    """Growth of `used_memory` and of the server's resident set over *keys* keys of *rule*."""
    client.flushall()
    before = client.info("memory")
    asyncio.run(fill(rule, url, keys))
    after = client.info("memory")
    held = int(client.dbsize())
    client.flushall()
    return {
        "keys": held,
        "used": int(after["used_memory"]) - int(before["used_memory"]),
        "rss": int(after["used_memory_rss"]) - int(before["used_memory_rss"]),
    }


def logs_in_server(client: Any, url: str) -> dict[str, int]:
    """MEMORY USAGE of the log of a sliding window, by the calls in it."""
    found = {}
    for length in LENGTHS:
        client.flushall()
        with limiter_of("sliding_window", url, "1000/hour") as limiter:
            for _ in range(length):
                limiter.try_acquire(key_of(0))
        found[str(length)] = usage(client)
    return found


def usage(client: Any) -> int:
    """All keys that are there, together: several quotas keep a key each."""
    return sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter())


def content(client: Any) -> int:
    """The text of keys and values."""
    total = 0
    for key in client.scan_iter():
        if client.type(key) == b"hash":
            total += sum(len(name) + len(value) for name, value in client.hgetall(key).items())
        else:
            total += client.strlen(key)
        total += len(key)
    return total


def connect(url: str) -> Any:
    return redis.Redis.from_url(url)


# ------------------------------------------------------------------------------------------------------ in process


def allocated(rule: str, keys: int) -> float:
    """Bytes a key that Python has allocated."""
    limiter = limiter_of(rule)
    limiter.try_acquire("warm-up")
    gc.collect()
    tracemalloc.start()
    for number in range(keys):
        limiter.try_acquire(key_of(number))
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / keys


def grown(rule: str, keys: int) -> float:
    """Bytes a key by which the process grows."""
    limiter = limiter_of(rule)
    limiter.try_acquire("warm-up")
    before = resident()
    for number in range(keys):
        limiter.try_acquire(key_of(number))
    return (resident() - before) / keys


def log(length: str, keys: int) -> float:
    """Bytes a key whose log holds *length* calls."""
    limiter = limiter_of("sliding_window", quota="1000/hour")
    tracemalloc.start()
    for number in range(keys):
        key = key_of(number)
        for _ in range(int(length)):
            limiter.try_acquire(key)
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / keys


def shared(rule: str, keys: int) -> float:
    """Bytes that the files take for each key that they have room for; all of them are used. Holes take none."""
    from headgate.stores import SharedStore

    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        store: Any = SharedStore(f"shared://{folder}/sizes", max_keys=keys)
        limiter = limiter_of(rule, store)
        for number in range(keys):
            limiter.try_acquire(key_of(number))
        return 512 * sum(path.stat().st_blocks for path in Path(folder).rglob("*") if path.is_file()) / keys


def hybrid(url: str, _keys: int) -> float:
    """Bytes a warm key by which the process grows."""
    from benchmarks.hybrid import weight

    return float(weight(url)["bytes_per_key"])


METERS: dict[str, Callable[[str, int], float]] = {
    "allocated": allocated,
    "grown": grown,
    "log": log,
    "shared": shared,
    "hybrid": hybrid,
}


def weigh(meter: str, what: str, keys: int, path: str | None) -> float:
    """One figure in a fresh process, with the headgate at *path*."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    command = [sys.executable, "-m", "benchmarks.sizing", meter, what, str(keys)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    return float(done.stdout)


def bars(found: dict[str, Any]) -> list[Bar]:
    """The documents' promises, met or not."""
    made = []

    def at_most(what: str, most: float, value: float) -> None:
        made.append(Bar(f"sizing, {what}", f"<= {most:g}", f"{value:.0f}", value <= most))

    for server, by in found["servers"].items():
        size = by["keys"][SMALLEST]["content"]
        at_most(f"{server}, {SMALLEST}: bytes of key and value", PROMISED_CONTENT, size)
        at_most(f"{server}, {SMALLEST}: the same and {TTL_BYTES} bytes for the TTL", PROMISED_CONTENT, size + TTL_BYTES)
        what = f"{server}, {SMALLEST}: MB of a million users, key, value and {TTL_BYTES} bytes for the TTL"
        at_most(what, PROMISED_MILLION, size + TTL_BYTES)
        one = by["million"][SMALLEST]
        what = f"{server}, {SMALLEST}: MB of a million users, the server's tables included"
        at_most(what, PROMISED_MILLION, one["used"] / one["keys"])
    local = {"memory": found["process"][SMALLEST]["grown"], "shared file": found["shared"][SMALLEST]}
    local["hybrid, a warm key"] = found["hybrid"]
    for where, value in local.items():
        at_most(f"{where}: bytes a user locally", PROMISED_LOCAL, value)
    return made


def main(meter: str, what: str, keys: str) -> None:
    print(METERS[meter](what, int(keys)))


if __name__ == "__main__":
    main(*sys.argv[1:])
