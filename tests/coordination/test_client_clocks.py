"""Clients whose clocks are an hour off see and do what the others do: only the server's clock counts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Server

ROOT = Path(__file__).parent.parent.parent

# The clock is changed before headgate is imported, so that whoever keeps a reference to it keeps the wrong one.
CLIENT = """
import json, sys, time

offset, url, number = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
true, true_ns = time.time, time.time_ns
time.time = lambda: true() + offset
time.time_ns = lambda: true_ns() + int(offset * 1e9)

from headgate.coordination import CircuitBreaker, Lock, Pool, Semaphore, WaitQueue
from headgate.errors import CircuitOpen

with Lock("l", store=url) as lock:
    fence = lock.fence
semaphore = Semaphore("s", limit=3, store=url, lease=600)
lease = semaphore.acquire(timeout=0)  # until this process ends, and longer
held = [lease.fence > fence, lease.held, semaphore.status().in_use]
breaker = CircuitBreaker("b", store=url)
breaker.record_failure()
retry = None
try:
    with breaker:
        breaker.record_failure()
        breaker.record_failure()
except CircuitOpen as error:
    retry = error.retry_after
pool = Pool("p", store=url, quota="1/hour")
pool.add("a", "b", "c", "d")
member = pool.acquire(timeout=0)
member.release(cooldown=10 if number == 1 else 0)
waits = {name: each.ready_in for name, each in pool.status().members.items() if each.state != "ready"}
queue = WaitQueue("q", store=url)
queue.enqueue(f"r{number}")
print(json.dumps([fence, retry, member.member, waits, len(queue), held]))
"""


def client(offset: float, server: Server, number: int) -> Any:
    command = [sys.executable, "-c", CLIENT, str(offset), server.patient_url, str(number)]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_an_hour_off_changes_nothing(redis_server: Server) -> None:
    seen = [client(offset, redis_server, number) for number, offset in enumerate((3600.0, -3600.0, 0.0), start=1)]
    fences = [row[0] for row in seen]
    assert fences == sorted(fences)
    assert fences[2] - fences[0] < 60_000_000, "the server's microseconds, not a client's"
    assert seen[0][1] is None
    for row in seen[1:]:
        assert row[1] == pytest.approx(600, abs=30)
    assert [row[2] for row in seen] == ["a", "b", "c"]
    assert [row[4] for row in seen] == [1, 2, 3]
    for member, wait in seen[2][3].items():
        assert wait == pytest.approx(3600, abs=30), member
