"""`python -m tests.support.spender`: spend in a process of its own; stdin: `URL ALGORITHM CALLS PERMITS QUOTA...`.

Several algorithms with plus signs between them are as many limiters, which joint checks ask. Says `ready`, waits for
another line, makes the calls, prints how many permits each limiter granted; and so on.
"""

import sys

from headgate import Limiter
from headgate.joint import JointCheck, try_acquire_all
from headgate.rule import check_algorithm


def main() -> None:
    while words := sys.stdin.readline().split():
        url, algorithms, calls, permits, *quotas = words
        first, *others = map(check_algorithm, algorithms.split("+"))
        with Limiter(quotas, algorithm=first, store=url, on_store_error="raise") as limiter:
            limiters = [
                Limiter(quotas, algorithm=other, store=limiter.store, on_store_error="raise") for other in others
            ]
            checks = [JointCheck(one, "k", int(permits)) for one in (limiter, *limiters)]
            limiter.peek("k")
            print("ready", flush=True)
            sys.stdin.readline()
            granted = [all(try_acquire_all(checks)) for _ in range(int(calls))]
            print(int(permits) * sum(granted), flush=True)


if __name__ == "__main__":
    main()
