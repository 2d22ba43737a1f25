"""What a reservation and its settlement take, in memory and on Redis, beside a check of a limiter on the same store.

One round is `python -m benchmarks.budget TIMES redis://...`, which prints one line of JSON: microseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.figures import Bar
from benchmarks.team import ROOT

PAIR, CHECK = "reserve and settle", "check"
SLICES = 5  # turns of each in a round
MOST_IN_MEMORY = 3.0  # microseconds, compiled
MOST_ON_REDIS = 2.5  # times a check: the wire alone is twice
QUOTA = "900000000/30d"

Times = dict[str, dict[str, float]]  # by store, of PAIR and CHECK


def contenders(store: str) -> dict[str, Callable[[], object]]:
    from headgate import Budget, Limiter

    budget = Budget(requests=QUOTA, tokens=QUOTA, store=store, name="benchmark", on_store_error="raise")
    limiter = Limiter(QUOTA, store=store, name="benchmark", on_store_error="raise")
    return {
        PAIR: lambda: budget.reserve("tenant:7", requests=1, tokens=5, timeout=1.0).settle(tokens=3),
        CHECK: lambda: limiter.try_acquire("tenant:7"),
    }


def timed(call: Callable[[], object], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times * 1e6


def one_round(store: str, times: int) -> dict[str, float]:
    calls = contenders(store)
    for call in calls.values():
        timed(call, times // 5)  # warm-up
    slices = [{name: timed(call, times) for name, call in calls.items()} for _ in range(SLICES)]
    return {name: median(each[name] for each in slices) for name in calls}


def measure(redis: str, times: int, path: str | None) -> Times:
    """One round in a process of its own, with the headgate at *path*."""
    places = os.pathsep.join(filter(None, [path, str(ROOT)]))
    environment = {**os.environ, "PYTHONPATH": places} if path else None
    command = [sys.executable, "-m", "benchmarks.budget", str(times), f"{redis}?timeout=10"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=True)
    found: Times = json.loads(done.stdout)
    return found


def medians(rounds: Sequence[Times]) -> Times:
    """By what is measured on which store; both stores beside each other."""
    return {
        name: {store: median(each[store][name] for each in rounds) for store in rounds[0]} for name in (CHECK, PAIR)
    }


def bars(rounds: Sequence[Times], compiled: bool) -> list[Bar]:
    taken = median(each["memory"][PAIR] for each in rounds)
    times = median(each["redis"][PAIR] / each["redis"][CHECK] for each in rounds)
    made = [Bar("budget, Redis: times a check", f"<= {MOST_ON_REDIS}", f"{times:.2f}", times <= MOST_ON_REDIS)]
    if compiled:
        in_time = taken <= MOST_IN_MEMORY
        made.append(Bar("budget, memory, compiled: microseconds", f"<= {MOST_IN_MEMORY}", f"{taken:.2f}", in_time))
    return made


def main(times: str, redis: str) -> None:
    in_memory, on_redis = one_round("memory://", 10 * int(times)), one_round(redis, int(times))
    print(json.dumps({"memory": in_memory, "redis": on_redis}))


if __name__ == "__main__":
    main(*sys.argv[1:])
