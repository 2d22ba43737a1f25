"""Clients whose clocks are an hour off decide as the others do: only the server's clock counts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import Node
from tests.support.quotas import ALGORITHMS

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

ROOT = Path(__file__).parent.parent.parent

# The clock is changed before headgate is imported, so that a module that keeps a reference to it keeps the wrong one.
CLIENT = """
import json, sys, time

offset, url, spends = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
true, true_ns = time.time, time.time_ns
time.time = lambda: true() + offset
time.time_ns = lambda: true_ns() + int(offset * 1e9)

from headgate import Limiter

seen = {}
for algorithm in sys.argv[4:]:
    with Limiter("9/100d", algorithm=algorithm, store=url, on_store_error="raise") as limiter:
        made = [limiter.try_acquire("k") for _ in range(spends)]
        last = made[-1]
        seen[algorithm] = [sum(d.allowed for d in made), last.remaining, last.retry_after, last.reset_after]
print(json.dumps(seen))
"""


def client(offset: float, node: Node, spends: int) -> dict[str, Any]:
    command = [sys.executable, "-c", CLIENT, str(offset), f"{node.bare_url}?timeout=10&connect_timeout=10", str(spends)]
    done = subprocess.run([*command, *ALGORITHMS], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True)
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_an_hour_off_changes_nothing(node: Node) -> None:
    """Three clients share nine permits; each gets its three, whatever its clock says."""
    for count, offset in enumerate((-3600.0, 3600.0, 0.0), start=1):
        for algorithm, (admitted, remaining, _, _) in client(offset, node, 3).items():
            assert (admitted, remaining) == (3, 9 - 3 * count), (algorithm, offset)
    for name in node.names():
        assert 0 < node.ask("PTTL", name) <= 210 * 86_400_000, name
    truth = client(0.0, node, 1)
    for offset in (-3600.0, 3600.0):
        for algorithm, (admitted, _, retry, reset) in client(offset, node, 1).items():
            assert admitted == 0, (algorithm, offset)
            assert retry == pytest.approx(truth[algorithm][2], abs=30), (algorithm, offset)
            assert reset == pytest.approx(truth[algorithm][3], abs=30), (algorithm, offset)
