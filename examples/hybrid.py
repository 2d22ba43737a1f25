"""One limit for many processes, decided in each of them without a round trip. HEADGATE_EXAMPLE_REDIS is your Redis."""

import os
import sys
import time

from headgate import HybridLimiter

url = os.environ.get("HEADGATE_EXAMPLE_REDIS", "redis://localhost:6379/0")

# Two limiters stand for two processes; each would be in a process of its own.
with (
    HybridLimiter("1000/second", store=url, name="example") as one,
    HybridLimiter("1000/second", store=url, name="example") as another,
):
    if one.peek("tenant:42").degraded:
        sys.exit("no Redis answers: start one here, or set HEADGATE_EXAMPLE_REDIS to the URL of yours")
    one.reset("tenant:42")
    start, calls, admitted = time.monotonic(), 0, 0
    while time.monotonic() - start < 1.5:
        for process in (one, another):
            calls += 1
            admitted += process.try_acquire("tenant:42").allowed
    most = 1000 + 1000 * (time.monotonic() - start)
    print(f"{calls:,} calls, {admitted:,} admitted of {most:,.0f} at most: what came in just now is leased next")
    assert admitted <= most, "never one too many"

    stats = one.stats()
    print(f"{stats.local_ratio:.3%} decided without waiting, in {stats.trips} trips to Redis")
    one.reset("tenant:42")
