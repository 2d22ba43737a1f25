"""What a reservation and its settlement take, in memory and on Redis, beside a check of a limiter on the same store.

    python -m benchmarks.budget [redis://localhost:6379/0]

Interleaves rounds of both and prints medians and their ratio; without a URL it starts a Redis of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

from headgate import COMPILED, Budget, Limiter
from tests.support.servers import KINDS, Server

ROUNDS = 7
QUOTA = "900000000/30d"


def pairs(store: str) -> Callable[[int], float]:
    """Microseconds of a reserve and a settle together."""
    budget = Budget(requests=QUOTA, tokens=QUOTA, store=store, name="benchmark")

    def measure(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            budget.reserve("tenant:7", requests=1, tokens=5, timeout=1.0).settle(tokens=3)
        return (time.perf_counter() - begun) / times * 1e6

    return measure


def checks(store: str) -> Callable[[int], float]:
    """Microseconds of a check."""
    limiter = Limiter(QUOTA, store=store, name="benchmark")

    def measure(times: int) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            limiter.try_acquire("tenant:7")
        return (time.perf_counter() - begun) / times * 1e6

    return measure


def compare(name: str, store: str, times: int) -> None:
    pair, check = pairs(store), checks(store)
    pair(times // 5), check(times // 5)  # warm-up
    rounds = [(pair(times), check(times)) for _ in range(ROUNDS)]
    taken, checked = median(each[0] for each in rounds), median(each[1] for each in rounds)
    print(f"{name}: reserve and settle {taken:.1f} us, check {checked:.2f} us, ratio {taken / checked:.2f}")


if __name__ == "__main__":
    print("compiled" if COMPILED else "plain Python")
    compare("memory", "memory://", 20_000)
    if len(sys.argv) > 1:
        compare("redis", sys.argv[1], 2_000)
    else:
        server = Server(KINDS[0])
        compare("redis", server.bare_url, 2_000)
        server.stop()
