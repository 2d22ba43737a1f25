"""Processes on three stores, one of which is killed and comes back empty: never one too many, whatever the policy.

``make soak`` runs these for a minute; the suite for some seconds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.support.hybrid_exact import overdrawn
from tests.support.hybrid_herd import herd, outcome
from tests.support.servers import KINDS, Server, quiet_port

SECONDS = float(os.environ.get("HEADGATE_SEVERAL_SECONDS", "2"))
PROCESSES = 4
RATE = 500
AWAY, GOOD_AGAIN = 0.3, 1.5  # seconds; in the latter every process reports to the store, and compares it

pytestmark = [pytest.mark.bounded(int(SECONDS) * 3 + 120), pytest.mark.xdist_group("several")]


@pytest.fixture
def three() -> Iterator[list[Server]]:
    servers = [Server(KINDS[0], port=quiet_port) for _ in range(3)]
    yield servers
    for server in servers:
        server.stop()


@pytest.mark.parametrize("policy", ["local", "allow"])
def test_one_comes_back_empty(policy: str, three: list[Server]) -> None:
    """A majority answers all the time, so no call is degraded: the policy has nothing to add."""
    choose, kills = random.Random(7), 0
    urls = [f"{server.bare_url}?timeout=2" for server in three]
    options = {"policy": policy, "agree": "majority"}
    with herd(urls, f"{RATE}/second", PROCESSES, SECONDS, 3 * RATE, **options) as workers:
        stop = time.monotonic() + SECONDS - AWAY - GOOD_AGAIN / 2
        while time.monotonic() < stop:
            time.sleep(GOOD_AGAIN if kills else GOOD_AGAIN / 2)
            server = choose.choice(three)
            server.kill()
            time.sleep(AWAY)
            server.restart()
            kills += 1
        time.sleep(GOOD_AGAIN / 2)
        found = outcome(workers, SECONDS + 50)
    lost, seconds = found.lost(RATE, 1.0)
    print(f"{policy}: {kills} kills, {found.admitted} admitted, lost {lost:.0f} in {seconds:.1f} s, {found.stats}")
    assert len(found.stats) == PROCESSES, "a worker raised"
    assert sum(stats["degraded"] for stats in found.stats) == 0
    assert overdrawn(RATE, RATE, found.calls) == 0
    assert lost <= RATE * seconds * 0.1 or SECONDS < 20, "a short run on a busy machine may lose more"
