"""A semaphore whose holders and waiters are killed, or stopped for longer than a lease, and a log of when each held it.

    python -m tests.support.semaphore_torture --processes 20 --seconds 30

Each process acquires room of some weight, and logs the time again and again while `held` is true; then it releases the
room. It reads the time before it asks `held`, so a process that was stopped in between logs a time at which it held its
room for sure. From the first to the last time that it logs, its weight counts. What must be true:

* at no time do the processes weigh more than the limit
* no two acquisitions have the same fence
* after a process was killed or stopped, another acquires room within a lease, or when its turn in the queue is over
* when all were killed, all room is free within a lease
"""

import argparse
import itertools
import json
import random
import time
from dataclasses import dataclass

from headgate.coordination import Semaphore
from headgate.coordination.semaphore_leases import WAITER_TTL
from tests.support.servers import KINDS, Server
from tests.support.torture import SLACK, Victims

LEASE = 1.0
LIMIT = 5

WORKER = """
import json, random, sys, time
import redis
from headgate.coordination import LockTimeout, Semaphore

url, port, me = sys.argv[1], int(sys.argv[2]), sys.argv[3]
log = redis.Redis(port=port)
semaphore = Semaphore("torture", limit=int(sys.argv[5]), store=url, lease=float(sys.argv[4]))
dice = random.Random(me)
while True:
    weight = dice.choice([1, 1, 2, 4])
    try:
        lease = semaphore.acquire(timeout=dice.choice([0.05, 10.0]), weight=weight)
    except LockTimeout:
        continue
    for _ in range(dice.randint(2, 8)):
        now = time.monotonic()
        if not lease.held:
            break
        log.rpush("events", json.dumps([me, lease.fence, weight, now]))
        time.sleep(dice.random() * 0.02)
    lease.release()
"""


@dataclass
class SemaphoreOutcome:
    """What the processes logged."""

    acquisitions: int
    most: int  # that the processes weighed together at any time
    fences_differ: bool
    longest_gap: float  # seconds between two acquisitions
    longest_stuck: float  # the same, from when a process was killed or stopped in between
    all_free_after: float  # seconds after all processes were killed
    killed: int
    stopped: int


@dataclass
class Hold:
    """One acquisition: its weight counts from the first to the last time."""

    worker: str
    fence: int
    weight: int
    first: float
    last: float


def read_log(texts: list[bytes]) -> list[Hold]:
    """The acquisitions, in the order of their fences."""
    holds: dict[tuple[str, int], Hold] = {}
    for me, fence, weight, now in map(json.loads, texts):
        hold = holds.setdefault((me, fence), Hold(me, fence, weight, now, now))
        hold.last = max(hold.last, now)
    return sorted(holds.values(), key=lambda hold: hold.fence)


def most_at_once(holds: list[Hold]) -> int:
    """The largest weight of holds that overlap."""
    changes = [(hold.first, hold.weight) for hold in holds] + [(hold.last, -hold.weight) for hold in holds]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def torture_semaphore(
    server: Server, processes: int, seconds: float, seed: int = 1, least: int = 0
) -> SemaphoreOutcome:
    """Run the processes for so many *seconds*, and until there were *least* acquisitions."""
    client = server.client()
    victims = Victims(server, WORKER, processes, [str(LEASE), str(LIMIT)], LEASE)
    victims.torture(seconds, seed, lambda: len(read_log(client.lrange("events", 0, -1))) < least)
    all_dead = time.monotonic()
    semaphore = Semaphore("torture", limit=LIMIT, store=server.patient_url)
    while semaphore.status().in_use and time.monotonic() < all_dead + 10 * LEASE:
        time.sleep(0.01)
    all_free_after = time.monotonic() - all_dead
    semaphore.close()
    holds = read_log(client.lrange("events", 0, -1))
    times = sorted(hold.first for hold in holds)
    return SemaphoreOutcome(
        len(holds),
        most_at_once(holds),
        len({hold.fence for hold in holds}) == len(holds),
        max(after - before for before, after in itertools.pairwise(times)),
        victims.longest_stuck(times),
        all_free_after,
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
    outcome = torture_semaphore(server, options.processes, options.seconds, options.seed)
    server.stop()
    print(f"seed {options.seed}: {outcome}")
    assert outcome.most <= LIMIT and outcome.fences_differ
    assert outcome.all_free_after < LEASE + SLACK, "room was taken for longer than a lease"
    assert outcome.longest_stuck < max(LEASE, WAITER_TTL) + SLACK, "no process got room"


if __name__ == "__main__":
    main()
