"""The lock under torture: processes that are killed, or stopped for longer than the TTL, and a register with a fence.

    python -m tests.support.torture --processes 20 --seconds 30

Each process takes the lock, writes to the register a few times with its fence, and gives the lock back; half of the
times it looks first whether the lock is still its own. The register refuses a fence smaller than one it has seen. It is
mostly holders that are killed and stopped. What must hold:

* no fence is used by two processes
* a process that looked, and was neither stopped nor starved between, writes nothing stale
* whatever is killed or stopped, somebody has the lock again within a TTL
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers import KINDS, Server

ROOT = Path(__file__).parent.parent.parent
TTL = 1.0
SLACK = 0.5  # seconds that a busy machine may take to say that it acquired it
STARVED = 0.02  # seconds between a look at the lock and the end of the write after it, beyond which nothing is sure

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
    """What was seen."""

    acquisitions: int
    careless: int  # stale writes that nobody looked before, refused
    stale: int  # those that somebody did look before
    unexplained: int  # of those, by processes that were neither stopped nor starved
    shared: int  # fences of two processes
    longest_gap: float  # seconds between two acquisitions
    longest_stuck: float  # the same, from when a process was killed or stopped in between
    fences_grow: bool
    killed: int
    stopped: int


def torture(server: Server, processes: int, seconds: float, seed: int = 1, least: int = 0) -> Outcome:
    """For so many *seconds*, and until there were *least* acquisitions."""
    dice = random.Random(seed)
    serial = iter(range(1_000_000))
    pauses: dict[str, list[tuple[float, float]]] = {}
    killed = 0
    blows: list[float] = []  # when a process was killed or stopped

    def start() -> tuple[str, subprocess.Popen[bytes]]:
        me = f"w{next(serial)}"
        pauses[me] = []
        command = [sys.executable, "-c", WORKER, server.patient_url, str(server.port), me, str(TTL)]
        return me, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)

    def acquisitions() -> int:
        return sum("acquired" in text for text in client.lrange("events", 0, -1))

    workers = dict(start() for _ in range(processes))
    client = server.client()
    try:
        while client.llen("events") == 0:
            time.sleep(0.05)
        end = time.monotonic() + seconds
        while time.monotonic() < end or acquisitions() < least:
            time.sleep(dice.uniform(0.05, 0.3))
            me = dice.choice(list(workers))
            if dice.random() < 0.8:
                me = next((each for each in (json.loads(client.lindex("events", -1))[0],) if each in workers), me)
            if dice.random() < 0.5:
                victim = workers.pop(me)
                victim.kill()
                victim.wait()
                blows.append(time.monotonic())
                killed += 1
                name, process = start()
                workers[name] = process
            else:
                begun = time.monotonic()
                os.kill(workers[me].pid, signal.SIGSTOP)
                blows.append(time.monotonic())
                time.sleep(TTL * dice.uniform(1.2, 1.6))
                os.kill(workers[me].pid, signal.SIGCONT)
                pauses[me].append((begun, time.monotonic()))
    finally:
        for process in workers.values():
            process.kill()
        for process in workers.values():
            process.wait()
    events: list[list[Any]] = [json.loads(text) for text in client.lrange("events", 0, -1)]
    acquired = sorted((when, fence) for _, kind, when, _, fence in events if kind == "acquired")
    stale = [event for event in events if event[1] == "stale"]
    unexplained = [
        [me, when, took]
        for me, _, when, took, since in stale
        if took < STARVED and not any(stop < when + took and go > since for stop, go in pauses[me])
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
        max(
            after - max([blow for blow in blows if before < blow < after], default=before)
            for before, after in itertools.pairwise(times)
        ),
        len(set(fences)) == len(fences),
        killed,
        sum(map(len, pauses.values())),
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
    assert outcome.longest_stuck < TTL + SLACK, "nobody had it for longer than a TTL after its holder was gone"


if __name__ == "__main__":
    main()
