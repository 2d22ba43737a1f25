"""One limit for two regions, each with a Redis of its own. Here one Redis stands for all: HEADGATE_EXAMPLE_REDIS."""

import os
import sys
import time

from headgate import HybridLimiter

url = os.environ.get("HEADGATE_EXAMPLE_REDIS", "redis://localhost:6379/0")

with (
    HybridLimiter("1000/second", store=url, home=url, region="eu", floor=0.1, name="example") as eu,
    HybridLimiter("1000/second", store=url, home=url, region="us", floor=0.1, name="example") as us,
):
    if eu.peek("tenant:42").degraded:
        sys.exit("no Redis answers: start one here, or set HEADGATE_EXAMPLE_REDIS to the URL of yours")
    start, calls, admitted = time.monotonic(), 0, 0
    while time.monotonic() - start < 1.5:
        for limiter in (eu, us):
            calls += 1
            admitted += limiter.try_acquire("tenant:42").allowed
    most = 1000 + 1000 * (time.monotonic() - start)
    print(f"{calls:,} calls, {admitted:,} admitted of {most:,.0f} at most in both regions")
    assert admitted <= most, "never one too many"

    for limiter in (eu, us):
        region = limiter.stats().region
        assert region
        print(f"{region.name}: home is {region.home} and gave {region.fetched:,} permits in {region.fetches} fetches")
