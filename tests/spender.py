"""Spend from one limiter in a process of its own: `python -m tests.spender URL ALGORITHM CALLS PERMITS KEY QUOTA...`.

Says `ready`, waits for a line, makes the calls, prints how many permits were granted.
"""

import sys

from headgate import Limiter


def main(url: str, algorithm: str, calls: str, permits: str, key: str, *quotas: str) -> None:
    with Limiter(list(quotas), algorithm=algorithm, store=url, on_store_error="raise") as limiter:
        limiter.peek(key)
        print("ready", flush=True)
        sys.stdin.readline()
        count = int(permits)
        granted = [limiter.try_acquire(key, permits=count).allowed for _ in range(int(calls))]
        print(count * sum(granted), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
