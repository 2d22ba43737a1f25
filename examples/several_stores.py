"""Three stores decide as one. Here one of them is not there at all, and the limit holds as it would with all three.

In an application they are three servers: store=["redis://a", "redis://b", "postgresql://c/app"].
"""

import tempfile

from headgate import Limiter

with tempfile.TemporaryDirectory() as directory:
    stores = [f"shared://{directory}/one", f"shared://{directory}/two", "redis://127.0.0.1:1/0"]  # the last one is down
    with Limiter("100/hour", store=stores, agree="majority", on_store_error="raise") as limiter:
        granted = sum(limiter.try_acquire("user:123").allowed for _ in range(150))
        print(f"two of three stores granted {granted} of 150 calls; {limiter.health().problems[0]}")
        assert granted == 100
    with Limiter("100/hour", store=stores[::-1], agree="first", on_store_error="raise") as limiter:
        print(f"the first of them that answers has {limiter.peek('user:123').remaining} left")
