"""A server that bears three calls at once, and a fleet that respects it, though one of its processes is killed.

Set HEADGATE_EXAMPLE_REDIS to the URL of a Redis of yours.
"""

import os
import subprocess
import sys
import time

from headgate.coordination import LockTimeout, Semaphore, StoreUnavailable

URL = os.environ.get("HEADGATE_EXAMPLE_REDIS", "redis://localhost:6379/0")
LIMIT = 3
erp = Semaphore("example:erp", limit=LIMIT, store=URL, lease=2.0)


def work() -> None:
    """What each process of the fleet does."""
    most = 0
    for number in range(10):
        with erp.acquire(timeout=30.0, weight=1 + number % 2) as lease:
            most = max(most, erp.status().in_use)
            time.sleep(0.01)  # the call
            assert lease.held
    print(most)


def hang() -> None:
    """What the process does that is killed."""
    with erp.acquire(timeout=30.0, weight=LIMIT):
        print("holds everything", flush=True)
        time.sleep(60)


def main() -> None:
    try:
        erp.force_release()  # what an earlier run may have left
    except StoreUnavailable:
        sys.exit("no Redis answers: start one here, or set HEADGATE_EXAMPLE_REDIS to the URL of yours")
    hanging = subprocess.Popen([sys.executable, __file__, "hang"], stdout=subprocess.PIPE, text=True)
    assert hanging.stdout
    print("one process", hanging.stdout.readline().strip())
    try:
        erp.acquire(timeout=0)
    except LockTimeout as refused:
        print(refused)
    hanging.kill()
    hanging.communicate()
    started = time.monotonic()
    fleet = [subprocess.Popen([sys.executable, __file__, "work"], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    with erp.acquire(timeout=30.0):
        print(f"it was killed; {time.monotonic() - started:.1f} s later its room is free, as its lease is over")
    most = max(int(each.communicate()[0]) for each in fleet)
    print(f"three processes made 30 calls, never heavier than {most} of {LIMIT} at once")
    assert most <= LIMIT and erp.status().in_use == 0


if __name__ == "__main__":
    {"work": work, "hang": hang}.get(sys.argv[-1], main)()
