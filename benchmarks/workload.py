"""The traffic that every contender faces: one quota, one set of keys, one order, as many denials as admissions.

The period is an hour, so that no window ends and next to nothing refills while a round runs: whoever counts right
admits exactly half of the checks, whatever the algorithm. The admitted share is reported beside every time.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

LIMIT = 100
PERIOD_SECONDS = 3600
QUOTA = f"{LIMIT}/hour"
CHECKS_PER_KEY = 2 * LIMIT

ALGORITHMS = (
    "token_bucket",
    "leaky_bucket",
    "fixed_window",
    "sliding_window",
    "sliding_window_counter",
    "gcra",
)

Loop = Callable[[Sequence[str]], int]  # checks every key in turn, returns how many were admitted
TURN_SECONDS = 0.3  # measured time of one turn, at least: the fast ones go over the traffic more than once
SETTLE_SECONDS = 0.03  # longer than the 10 ms timer thread that one peer leaves behind after its last check


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one contender. *server* holds per-check figures that Redis itself counted."""

    seconds: float
    checks: int
    admitted: int
    p50_us: float | None = None
    p99_us: float | None = None
    server: dict[str, float] = field(default_factory=dict)

    @property
    def us_per_check(self) -> float:
        return self.seconds / self.checks * 1e6


@dataclass(frozen=True, slots=True)
class Scale:
    """How much traffic a round carries in each part."""

    memory_keys: int = 1_000
    redis_keys: int = 20
    redis_threads: int = 16
    async_keys: int = 50
    async_tasks: int = 256
    size_keys: int = 1_000_000


QUICK = Scale(memory_keys=100, redis_keys=4, async_keys=13, size_keys=100_000)


def traffic(keys: int) -> list[str]:
    """List every key CHECKS_PER_KEY times, shuffled in the same way every time."""
    names = [f"user:{number:07d}" for number in range(keys)]
    checks = names * CHECKS_PER_KEY
    random.Random(keys).shuffle(checks)
    return checks


@contextmanager
def quiet() -> Iterator[None]:
    """Let leftover threads end and keep the garbage collector out, for everyone alike."""
    time.sleep(SETTLE_SECONDS)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_loop(loop: Loop, keys: Sequence[str]) -> Sample:
    """Time one pass of *loop* over *keys*, as a whole: a clock read per check would cost as much as the check."""
    with quiet():
        start = time.perf_counter()
        admitted = loop(keys)
        seconds = time.perf_counter() - start
    return Sample(seconds, len(keys), admitted)
