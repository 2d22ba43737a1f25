"""`python -m tests.support.spender`: spend in a process of its own; stdin: `URL ALGORITHM CALLS PERMITS QUOTA...`.

Says `ready`, waits for another line, makes the calls, prints how many permits were granted; and so on.
"""

import sys

from headgate import Limiter
from headgate.rule import check_algorithm


def main() -> None:
    while words := sys.stdin.readline().split():
        url, algorithm, calls, permits, *quotas = words
        with Limiter(quotas, algorithm=check_algorithm(algorithm), store=url, on_store_error="raise") as limiter:
            limiter.peek("k")
            print("ready", flush=True)
            sys.stdin.readline()
            count = int(permits)
            granted = [limiter.try_acquire("k", permits=count).allowed for _ in range(int(calls))]
            print(count * sum(granted), flush=True)


if __name__ == "__main__":
    main()
