"""How long it takes to get a lock: when nobody has it, and when another process gives it back. Beside redis-py's.

Runs in a process of its own, so that it can be told which build of headgate to import; prints one line of JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Any

import redis

from headgate.coordination import Lock

LIBRARIES = ("headgate", "redis-py")
TTL = 30.0


class Ours:
    """headgate's lock as both are measured: acquire, release."""

    def __init__(self, url: str, name: str) -> None:
        self.lock = Lock(name, store=url, ttl=TTL)

    def acquire(self) -> None:
        assert self.lock.acquire(timeout=30.0)

    def release(self) -> None:
        assert self.lock.release()


class Peer:
    """redis-py's, as it comes: it looks every 0.1 s."""

    def __init__(self, url: str, name: str) -> None:
        self.lock = redis.Redis.from_url(url).lock(name, timeout=TTL)

    def acquire(self) -> None:
        assert self.lock.acquire(blocking_timeout=30.0)

    def release(self) -> None:
        self.lock.release()


MAKE: dict[str, Callable[[str, str], Ours | Peer]] = {"headgate": Ours, "redis-py": Peer}


def uncontended(url: str, times: int) -> dict[str, list[float]]:
    """Seconds of each acquisition of a free lock; a few of one, then a few of the other."""
    locks = {library: MAKE[library](url, f"free-{library}") for library in LIBRARIES}
    taken: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for number in range(times // 20 + 1):
        for library in random.sample(LIBRARIES, 2):
            lock = locks[library]
            for _ in range(20):
                begun = time.perf_counter()
                lock.acquire()
                spent = time.perf_counter() - begun
                lock.release()
                if number:  # the first are warm-up
                    taken[library].append(spent)
    return taken


class Holder:
    """Another process, which takes a lock and gives it back when it is told."""

    def __init__(self, url: str, library: str) -> None:
        command = [sys.executable, "-m", "benchmarks.lock", "hold", url, library]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask("take")
        self.ask("free")

    def ask(self, wish: str) -> float:
        """Wait until it is done; when it was (monotonic)."""
        self.tell(wish)
        return self.answer()

    def tell(self, wish: str) -> None:
        assert self.process.stdin
        print(wish, file=self.process.stdin, flush=True)

    def answer(self) -> float:
        assert self.process.stdout
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def hold(url: str, library: str) -> None:
    lock = MAKE[library](url, f"handed-{library}")
    for wish in sys.stdin:
        if wish == "take\n":
            lock.acquire()
        else:
            time.sleep(random.uniform(0.03, 0.15))  # the other waits by now, at any point of its pause
        when = time.monotonic()
        if wish == "free\n":
            lock.release()
        print(when, flush=True)


def handed_over(url: str, times: int) -> dict[str, list[float]]:
    """Seconds from the beginning of a release in one process to the end of the acquisition in another."""
    holders = {library: Holder(url, library) for library in LIBRARIES}
    locks = {library: MAKE[library](url, f"handed-{library}") for library in LIBRARIES}
    taken: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for number in range(times + 2):
        for library in random.sample(LIBRARIES, 2):
            holder, lock = holders[library], locks[library]
            holder.ask("take")
            holder.tell("free")
            lock.acquire()
            got = time.monotonic()
            spent = got - holder.answer()
            lock.release()
            if number > 1:
                taken[library].append(spent)
    for holder in holders.values():
        holder.close()
    return taken


def summary(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = quantiles(times, n=100, method="inclusive")
    return {"p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98], "most_ms": 1000 * max(times), "times": len(times)}


def measure(url: str, rounds: int) -> dict[str, dict[str, Any]]:
    found = {"uncontended": uncontended(url, 200 * rounds), "handed over": handed_over(url, 15 * rounds)}
    return {what: {library: summary(times) for library, times in by.items()} for what, by in found.items()}


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(*sys.argv[2:])
    else:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
