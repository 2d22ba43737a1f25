"""A lock whose holders are killed, or stopped for longer than its TTL, and a register that checks fences.

    python -m tests.support.torture --processes 20 --seconds 30

Each process acquires the lock, writes to the register a few times with its fence, and releases the lock. Before half
of the writes it checks `lock.held`. The register refuses a smaller fence than it has seen. Most of the processes that
are killed or stopped hold the lock. What must be true:

* no two processes have the same fence
* a process that checked `lock.held`, and was neither stopped nor starved since, makes no stale write
* after a process was killed or stopped, another has the lock within a TTL
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers import KINDS, Server

ROOT = Path(__file__).parent.parent.parent
TTL = 1.0
SLACK = 0.5  # seconds that a process on a busy machine may take to report an acquisition
STARVED = 0.02  # seconds from a check of the lock to the end of the write; after longer ones the lock may be lost

WORKER = """
import json, random, sys, time
import redis
from headgate.coordination import Lock

url, port, me = sys.argv[1], int(sys.argv[2]), sys.argv[3]
register = redis.Redis(port=port)
write = register.register_script('''
local last = tonumber(redis.call('GET', 'register') or 0)
if tonumber(ARGV[1]) < last then return 0 end
redis.call('SET', 'register', ARGV[1])
redis.call('HSETNX', 'writers', ARGV[1], ARGV[2])
return redis.call('HGET', 'writers', ARGV[1]) == ARGV[2] and 1 or -1
''')
lock = Lock("torture", store=url, ttl=float(sys.argv[4]))
dice = random.Random(me)
while True:
    if not lock.acquire(timeout=10):
        continue
    acquired = time.monotonic()
    register.rpush("events", json.dumps([me, "acquired", acquired, 0, lock.fence]))
    for _ in range(dice.randint(1, 4)):
        time.sleep(dice.random() * 0.05)
        looked = time.monotonic()
        careful = dice.random() < 0.5
        if careful and not lock.held:
            break
        done = write(args=[lock.fence, me])
        took = time.monotonic() - looked
        if done != 1:
            kind = "shared" if done == -1 else "stale" if careful else "careless"
            register.rpush("events", json.dumps([me, kind, looked, took, acquired]))
    lock.release()
"""


@dataclass
class Outcome:
    """What the processes and the register reported."""

    acquisitions: int
    careless: int  # stale writes without a check, refused
    stale: int  # stale writes after a check, refused
    unexplained: int  # of those, by processes that were neither stopped nor starved
    shared: int  # fences of two processes
    longest_gap: float  # seconds between two acquisitions
    longest_stuck: float  # the same, from when a process was killed or stopped in between
    fences_grow: bool
    killed: int
    stopped: int


class Victims:
    """Processes of which one after the other is killed, or stopped for longer than *ttl*, mostly one that holds."""

    def __init__(self, server: Server, worker: str, processes: int, arguments: Sequence[str], ttl: float) -> None:
        self._command = [sys.executable, "-c", worker, server.patient_url, str(server.port)]
        self._arguments = arguments
        self._client = server.client()
        self._ttl = ttl
        self._serial = itertools.count()
        self.pauses: dict[str, list[tuple[float, float]]] = {}
        self.blows: list[float] = []  # when a process was killed or stopped
        self.killed = 0
        self._workers = dict(self._start() for _ in range(processes))

    @property
    def stopped(self) -> int:
        return sum(map(len, self.pauses.values()))

    def torture(self, seconds: float, seed: int, go_on: Callable[[], bool]) -> None:
        """Kill and stop them for so many *seconds*, and as long as *go_on* says; then kill them all."""
        dice = random.Random(seed)
        try:
            while self._client.llen("events") == 0:
                time.sleep(0.05)
            end = time.monotonic() + seconds
            while time.monotonic() < end or go_on():
                time.sleep(dice.uniform(0.05, 0.3))
                me = dice.choice(list(self._workers))
                if dice.random() < 0.8:
                    [last] = self._client.lrange("events", -1, -1)
                    me = next((each for each in (json.loads(last)[0],) if each in self._workers), me)
                if dice.random() < 0.5:
                    self._kill(me)
                else:
                    self._stop(me, self._ttl * dice.uniform(1.2, 1.6))
        finally:
            for process in self._workers.values():
                process.kill()
            for process in self._workers.values():
                process.wait()

    def longest_stuck(self, acquired: Sequence[float]) -> float:
        """Seconds between two of these times, counted from when a process was killed or stopped in between."""
        return max(
            after - max([blow for blow in self.blows if before < blow < after], default=before)
            for before, after in itertools.pairwise(acquired)
        )

    def _start(self) -> tuple[str, subprocess.Popen[bytes]]:
        me = f"w{next(self._serial)}"
        self.pauses[me] = []
        command = [*self._command, me, *self._arguments]
        return me, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def _kill(self, me: str) -> None:
        victim = self._workers.pop(me)
        victim.kill()
        victim.wait()
        self.blows.append(time.monotonic())
        self.killed += 1
        name, process = self._start()
        self._workers[name] = process

    def _stop(self, me: str, seconds: float) -> None:
        begun = time.monotonic()
        os.kill(self._workers[me].pid, signal.SIGSTOP)
        self.blows.append(time.monotonic())
        time.sleep(seconds)
        os.kill(self._workers[me].pid, signal.SIGCONT)
        self.pauses[me].append((begun, time.monotonic()))


def torture(server: Server, processes: int, seconds: float, seed: int = 1, least: int = 0) -> Outcome:
    """Run the processes for so many *seconds*, and until there were *least* acquisitions."""
    client = server.client()

    def too_few() -> bool:
        return sum("acquired" in text for text in client.lrange("events", 0, -1)) < least

    victims = Victims(server, WORKER, processes, [str(TTL)], TTL)
    victims.torture(seconds, seed, too_few)
    events: list[list[Any]] = [json.loads(text) for text in client.lrange("events", 0, -1)]
    acquired = sorted((when, fence) for _, kind, when, _, fence in events if kind == "acquired")
    stale = [event for event in events if event[1] == "stale"]
    unexplained = [
        [me, when, took]
        for me, _, when, took, since in stale
        if took < STARVED and not any(stop < when + took and go > since for stop, go in victims.pauses[me])
    ]
    times = [when for when, _ in acquired]
    fences = [fence for _, fence in acquired]
    return Outcome(
        len(acquired),
        sum(event[1] == "careless" for event in events),
        len(stale),
        len(unexplained),
        sum(event[1] == "shared" for event in events),
        max(after - before for before, after in itertools.pairwise(times)),
        victims.longest_stuck(times),
        len(set(fences)) == len(fences),
        victims.killed,
        victims.stopped,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options = parser.parse_args()
    server = Server(KINDS[0])
    outcome = torture(server, options.processes, options.seconds, options.seed)
    server.stop()
    print(f"seed {options.seed}: {outcome}")
    assert outcome.unexplained == outcome.shared == 0 and outcome.fences_grow
    assert outcome.longest_stuck < TTL + SLACK, "the lock was stuck for longer than a TTL"


if __name__ == "__main__":
    main()
