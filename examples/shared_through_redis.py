"""One limit that many servers share. Set HEADGATE_EXAMPLE_REDIS to the URL of a Redis of yours."""

import os
import sys

from headgate import Limiter

url = os.environ.get("HEADGATE_EXAMPLE_REDIS", "redis://localhost:6379/0")

with (
    Limiter("10/minute burst 20", store=url, name="example", on_store_error="deny") as one_server,
    Limiter("10/minute burst 20", store=url, name="example", on_store_error="deny") as another_server,
):
    if one_server.peek("user:123").degraded:
        sys.exit("no Redis answers: start one here, or set HEADGATE_EXAMPLE_REDIS to the URL of yours")
    one_server.reset("user:123")
    admitted = sum(server.try_acquire("user:123").allowed for server in [one_server, another_server] * 30)
    print(f"two servers admitted {admitted} of 60 calls together")
    assert 20 <= admitted < 30, "20 at once, and what was refilled while the calls ran"
    one_server.reset("user:123")
