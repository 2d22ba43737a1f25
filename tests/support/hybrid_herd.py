"""Real processes that call one hybrid limiter as fast as they are told, and a record of every admission.

Each worker notes the wall clock, which is Redis's own on the same machine, before and after every admitted call, in a
file that is mapped into memory: what it has noted is there even if it is killed the next moment.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headgate
from tests.support.clocks import until

PAIR = struct.Struct("<qq")
BEAT = 0.005  # seconds between a worker's bursts of calls
LATE = 0.05  # seconds of sleep after which a worker was held up


@dataclass
class Outcome:
    """Every admission by worker, and the statistics that the workers wrote."""

    calls: list[tuple[int, int]]
    together: tuple[int, int] = (0, 0)  # nanoseconds between which all workers that lived were calling
    stats: list[dict[str, Any]] = field(default_factory=list)

    @property
    def admitted(self) -> int:
        return len(self.calls)

    def lost(self, rate: float, skip: float) -> tuple[float, float]:
        """How many fewer than *rate* a second were admitted, and in how many seconds.

        That is while all were calling, without the first *skip* seconds, in which a bucket empties. From then on an
        exact bucket admits all that comes in, as long as more is asked for.
        """
        first, last = self.together[0] + int(skip * 1e9), self.together[1]
        seconds = (last - first) / 1e9
        return rate * seconds - sum(first < after <= last for _, after in self.calls), seconds

    @property
    def late(self) -> float:
        """Seconds that workers slept too long: the machine held them up."""
        return float(sum(s["late"] for s in self.stats))

    @property
    def local_ratio(self) -> float:
        local, remote = sum(s["local"] for s in self.stats), sum(s["remote"] for s in self.stats)
        return float(local / (local + remote))


class Worker:
    """One process. It calls from when the file `go` is there, for *seconds* at least, and until `stop` is there."""

    def __init__(self, place: Path, number: int, order: dict[str, Any]) -> None:
        self.log = place / f"{number}.log"
        self.said = place / f"{number}.json"
        self.name = place / f"{number}.name"
        self.go, self.stop = place / "go", place / "stop"
        capacity = int(order["rate"] * order["seconds"] * 2) + 10_000
        self.log.write_bytes(bytes(PAIR.size * capacity))
        order = order | {"log": str(self.log), "said": str(self.said), "name": str(self.name)}
        order |= {"go": str(self.go), "stop": str(self.stop)}
        command = [sys.executable, "-m", "tests.support.hybrid_herd", json.dumps(order)]
        ours = str(Path(headgate.__file__).parent.parent)
        root = str(Path(__file__).resolve().parent.parent.parent)
        self.process = subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": f"{ours}:{root}"})

    def begun(self) -> bool:
        """Whether it has been admitted once."""
        with self.log.open("rb") as file:
            return any(file.read(PAIR.size))

    def leased(self, redis: Any, key: str) -> int:
        """Permits that are leased to it in the Hash *key*, whether spent or not."""
        record = redis.hget(key, f"n:{self.name.read_text()}")
        return int(record.split(":")[2]) if record else 0

    def calls(self) -> Iterator[tuple[int, int]]:
        for before, after in PAIR.iter_unpack(self.log.read_bytes()):
            if not after:
                return
            yield before, after


@contextmanager
def herd(
    url: str | list[str], quota: str, processes: int, seconds: float, rate: float, **options: Any
) -> Iterator[list[Worker]]:
    """Start workers that share *rate* calls a second among them; they are killed at the end if need be."""
    with tempfile.TemporaryDirectory() as place:
        order = {"url": url, "quota": quota, "seconds": seconds, "rate": rate / processes} | options
        workers = [Worker(Path(place), number, order) for number in range(processes)]
        try:
            until(lambda: all(worker.name.exists() for worker in workers))
            workers[0].go.touch()
            yield workers
        finally:
            for worker in workers:
                if worker.process.poll() is None:
                    worker.process.kill()
                worker.process.wait()


def outcome(workers: Iterable[Worker], timeout: float) -> Outcome:
    """Let the workers come to an end, wait for them and gather what they did."""
    workers = list(workers)
    workers[0].stop.touch()
    found = Outcome([])
    deadline = time.monotonic() + timeout
    starts, ends = [], []
    for worker in workers:
        worker.process.wait(max(deadline - time.monotonic(), 0.1))
        calls = list(worker.calls())
        found.calls += calls
        if calls:
            starts.append(calls[0][0])
            if worker.process.returncode == 0:
                ends.append(calls[-1][1])
    found.together = (max(starts), min(ends))
    for worker in workers:
        if worker.said.exists():
            found.stats.append(json.loads(worker.said.read_text()))
    return found


def work(order: dict[str, Any]) -> None:
    from headgate import HybridLimiter
    from headgate.hybrid import background

    background.RELEASE_TIMEOUT = 30.0  # whatever the machine does meanwhile
    limiter = HybridLimiter(
        order["quota"],
        store=order["url"],
        on_store_error=order.get("policy", "deny"),
        accuracy=order.get("accuracy", "high"),
        agree=order.get("agree"),
    )
    name, go, stop = Path(order["name"]), Path(order["go"]), Path(order["stop"])
    name.with_suffix(".new").write_text(limiter._backend.node_id)
    name.with_suffix(".new").rename(name)
    with open(order["log"], "r+b") as file, mmap.mmap(file.fileno(), 0) as record:
        place, room = 0, len(record) // PAIR.size
        while not go.exists():
            time.sleep(0.001)
        begin, asked, late = time.monotonic(), 0, 0.0
        while (passed := time.monotonic() - begin) < order["seconds"] or not stop.exists():
            due = int(passed * order["rate"])
            for _ in range(due - asked):
                requests = time.time_ns()
                decision = limiter.try_acquire("hot")
                if decision.allowed and place < room:
                    PAIR.pack_into(record, place * PAIR.size, requests, time.time_ns())
                    place += 1
            asked = due
            sleeps = time.monotonic()
            time.sleep(BEAT)
            late += max(time.monotonic() - sleeps - LATE, 0)
    stats = limiter.stats()
    limiter.close()
    figures = {name: getattr(stats, name) for name in ("local", "remote", "trips", "burned", "degraded", "held")}
    Path(order["said"]).write_text(json.dumps(figures | {"late": late}))


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
