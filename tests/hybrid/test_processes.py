"""Many processes, one Redis, one hot key, three times as many calls as there are permits: nobody gets one too many.

``make soak`` runs these for half a minute with eight processes; the suite for a few seconds with fewer.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.hybrid.exact import overdrawn
from tests.hybrid.herd import Worker, herd, outcome
from tests.servers import Server

SECONDS = float(os.environ.get("HEADGATE_HERD_SECONDS", "2.5"))
PROCESSES = int(os.environ.get("HEADGATE_HERD_PROCESSES", "4"))
LONG = SECONDS >= 20
RATE = 1000
QUOTA = f"{RATE}/second"

pytestmark = [pytest.mark.bounded(int(SECONDS) * 3 + 60), pytest.mark.xdist_group("herd")]


def url_of(server: Server) -> str:
    return f"{server.url}?timeout=2"


def test_overload(redis_server: Server) -> None:
    with herd(url_of(redis_server), QUOTA, PROCESSES, SECONDS, 3 * RATE) as workers:
        found = outcome(workers, SECONDS + 50)
    assert overdrawn(RATE, RATE, found.calls) == 0
    print(f"admitted {found.admitted}, {found.rate(1.0):.1f}/s, local {found.local_ratio:.5f}, {found.stats}")
    assert len(found.stats) == PROCESSES
    assert found.rate(1.0) > RATE * (0.99 if LONG else 0.6), "a short run on a busy machine may lose some"
    assert found.local_ratio > (0.99 if LONG else 0.9)
    assert int(redis_server.client().hget("rate_limiter:hybrid:token_bucket:{hot}", "out")) == 0


def test_killed_and_frozen(redis_server: Server) -> None:
    """Some are killed, some are stopped for longer than a lease lasts; the others go on."""
    dice = random.Random(7)
    with herd(url_of(redis_server), QUOTA, PROCESSES, SECONDS, 3 * RATE) as workers:
        wait_for(workers)
        end = time.monotonic() + SECONDS
        pause(SECONDS / 3)
        victims = dice.sample(workers, max(2, PROCESSES // 3))
        for victim in victims:
            victim.process.send_signal(signal.SIGSTOP)
            pause(0.1)
        if LONG:
            pause(7)
        for number, victim in enumerate(victims):
            victim.process.send_signal(signal.SIGKILL if number % 2 else signal.SIGCONT)
        pause(end - time.monotonic())
        found = outcome(workers, 50)
    assert overdrawn(RATE, RATE, found.calls) == 0
    assert len(found.stats) == PROCESSES - len(victims) // 2
    assert found.admitted > RATE * SECONDS * (0.7 if LONG else 0.2)


def test_redis_frozen(mortal_server: Server) -> None:
    """Redis stands still for a while: leases last, then calls are refused, then all goes on, and nothing twice."""
    with herd(f"{mortal_server.url}?timeout=0.3", QUOTA, PROCESSES, SECONDS, 3 * RATE) as workers:
        wait_for(workers)
        pause(SECONDS / 3)
        mortal_server.process.send_signal(signal.SIGSTOP)
        pause(SECONDS / 4)
        mortal_server.process.send_signal(signal.SIGCONT)
        found = outcome(workers, SECONDS + 50)
    assert overdrawn(RATE, RATE, found.calls) == 0
    assert found.admitted > RATE * SECONDS * (0.6 if LONG else 0.2)


@pytest.mark.parametrize("accuracy", ["medium", "low"] if LONG else ["low"])
def test_other_accuracies(accuracy: str, redis_server: Server) -> None:
    with herd(url_of(redis_server), QUOTA, 2, SECONDS, 3 * RATE, accuracy=accuracy) as workers:
        found = outcome(workers, SECONDS + 50)
    assert overdrawn(RATE, RATE, found.calls) == 0
    print(f"{accuracy}: admitted {found.admitted}, local {found.local_ratio:.5f}, {found.stats}")


def pause(seconds: float) -> None:
    time.sleep(max(seconds, 0))


def wait_for(workers: list[Worker]) -> None:
    """Return when all of them are calling."""
    deadline = time.monotonic() + 30
    while not all(worker.begun() for worker in workers):
        assert time.monotonic() < deadline, "somebody never began"
        time.sleep(0.01)


def test_the_check_can_fail() -> None:
    second = 10**9
    assert overdrawn(5, 1, [(i, i) for i in range(5)]) == 0
    assert overdrawn(5, 1, [(i, i) for i in range(6)]) == 1
    assert overdrawn(5, 1, [(i, i) for i in range(5)] + [(second + 1, second + 2)]) == 0
    assert overdrawn(5, 1, [(i, i) for i in range(5)] + [(0, second // 2)]) == 1
    assert overdrawn(5, 1, [(i, i) for i in range(5)] + [(0, 2 * second)]) == 0
    assert overdrawn(1, 1, [(0, 0), (10 * second, 10 * second), (10 * second, 10 * second)]) == 1
