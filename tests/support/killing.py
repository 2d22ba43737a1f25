"""`python -m tests.support.killing SECONDS TRIAL...`: four processes spend on a shared store, and are killed at random.

One of them is killed (-9) every few milliseconds and started again. In the end what the file says was spent is
compared with what the processes counted: nothing is answered without being paid, and a kill costs one call at most.
Some keys are at their limit from the start and must stay so, while new keys come all the time. Prints one line of JSON
for each trial.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from headgate import Limiter
from headgate.stores import SharedStore
from headgate.stores.shared import tables

WORKERS = 4
KEYS = [f"key {number}" for number in range(12)]
LIMITED = [f"limited {number}" for number in range(6)]
WORDS = 64  # for each worker: what it counted of each key, then calls, then keys that were set free
CALLS, FREED = 40, 41


@dataclass(frozen=True)
class Trial:
    """What is spent; *flood*: new keys fill the only set, so that slots change their keys all the time."""

    quotas: Any
    algorithm: Any
    limit: int
    flood: bool = False


LARGE = 10_000_000
TRIALS = {
    "bucket": Trial(f"1000000/3660d burst {LARGE}", "token_bucket", LARGE),
    "window": Trial(f"{LARGE}/3660d", "fixed_window", LARGE),
    "two quotas": Trial([f"{LARGE}/3660d", f"{LARGE + 1}/3660d"], "fixed_window", LARGE),
    "log": Trial("60000/3660d", "sliding_window", 60_000),
    "flood": Trial("1000000/3660d burst 1000", "gcra", 1000, flood=True),
    "flood of two quotas": Trial(["1000/3660d", "1001/3660d"], "fixed_window", 1000, flood=True),
}


def open_limiter(trial: Trial, directory: str) -> Limiter:
    tables._open.clear()
    store = SharedStore(f"shared://{directory}", max_keys=1 if trial.flood else 200)
    return Limiter(trial.quotas, algorithm=trial.algorithm, store=store, on_store_error="raise")


def work(trial: Trial, directory: str, counts: memoryview) -> None:
    """Spend for ever."""
    limiter = open_limiter(trial, directory)
    chance = random.Random()
    while True:
        number = chance.randrange(len(KEYS))
        if trial.flood:
            limiter.try_acquire(f"new {chance.randrange(1_000_000)}")
        elif limiter.try_acquire(KEYS[number]):
            counts[number] += 1
        if number == 0:
            counts[FREED] += limiter.try_acquire(chance.choice(LIMITED)).allowed
        counts[CALLS] += 1


def start(trial: Trial, directory: str, counts: memoryview) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(trial, directory, counts)
    except BaseException as error:
        os.write(2, repr(error).encode() + b"\n")
    os._exit(1)


def run(trial: Trial, directory: str, seconds: float) -> dict[str, Any]:
    shared = mmap.mmap(-1, 8 * WORDS * WORKERS)
    words = memoryview(shared).cast("Q")
    counts = [words[WORDS * seat : WORDS * (seat + 1)] for seat in range(WORKERS)]
    limiter = open_limiter(trial, directory)
    for key in LIMITED:
        assert limiter.try_acquire(key, trial.limit)
    workers = [start(trial, directory, counts[seat]) for seat in range(WORKERS)]
    end, kills, slowest, calls, moved, died = time.monotonic() + seconds, 0, 0.0, 0, time.monotonic(), 0
    while time.monotonic() < end:
        time.sleep(random.uniform(0.0005, 0.012))
        seat = random.randrange(WORKERS)
        os.kill(workers[seat], signal.SIGKILL)
        died += not os.WIFSIGNALED(os.waitpid(workers[seat], 0)[1])
        workers[seat] = start(trial, directory, counts[seat])
        kills += 1
        total, now = sum(each[CALLS] for each in counts), time.monotonic()
        if total != calls:
            slowest, calls, moved = max(slowest, now - moved), total, now
        assert now - moved < 10, "all processes are stuck"
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    kills += WORKERS
    limiter = open_limiter(trial, directory)
    owed = [trial.limit - limiter.peek(key, 0).remaining for key in KEYS]
    counted = [sum(each[number] for each in counts) for number in range(len(KEYS))]
    differences = [have - want for have, want in zip(owed, counted, strict=True)]
    return {
        "kills": kills,
        "calls": calls,
        "unpaid": sum(-difference for difference in differences if difference < 0),
        "in_vain": sum(difference for difference in differences if difference > 0),
        "freed": sum(each[FREED] for each in counts) + sum(limiter.try_acquire(key).allowed for key in LIMITED),
        "died": died,
        "longest_pause_ms": round(1000 * slowest, 1),
    }


def main() -> None:
    seconds, names = float(sys.argv[1]), sys.argv[2:] or list(TRIALS)
    for name in names:
        directory = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        try:
            print(json.dumps({"trial": name, **run(TRIALS[name], directory, seconds)}), flush=True)
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
