"""`python -m tests.support.sharers`: spend on many keys in a process of its own; stdin: one JSON object a line.

Says `ready`, waits for another line, asks for one permit of each key in each round, in an order of its own, and prints
how many were granted in all; and so on.
"""

import json
import random
import sys
from typing import Any

from headgate import Limiter


def main() -> None:
    chance = random.Random()
    while line := sys.stdin.readline():
        order: dict[str, Any] = json.loads(line)
        limiter = Limiter(order["quotas"], store=order["url"], on_store_error="raise", **order["law"])
        keys = [f"key {number}" for number in range(order["keys"])]
        print("ready", flush=True)
        sys.stdin.readline()
        granted = 0
        for _ in range(order["rounds"]):
            chance.shuffle(keys)
            granted += sum(limiter.try_acquire(key).allowed for key in keys)
        print(granted, flush=True)


if __name__ == "__main__":
    main()
