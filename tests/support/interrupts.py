"""`python -m tests.support.interrupts ...`: make calls in a process of its own while a signal handler keeps raising.

Ends with `survived` if the calls afterwards are answered as if nothing had happened.
"""

import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headgate import Limiter
from headgate.rule import check_algorithm


class Interrupt(BaseException):
    pass


def handler(*_: object) -> None:
    raise Interrupt


def interrupt_often(call: Callable[[], object], interrupts: int) -> None:
    """Make *call* again and again until so many interrupts have come."""
    count, until = 0, time.monotonic() + 30
    signal.signal(signal.SIGALRM, handler)
    while count < interrupts:
        assert time.monotonic() < until, "hardly any interrupts"
        try:
            # Nothing comes while the last one is dealt with. After a second another one comes, as Python drops an
            # exception that is raised while an object is finalized.
            signal.setitimer(signal.ITIMER_REAL, 0.002, 1.0)
            while True:
                call()
        except Interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
            count += 1


def memory(algorithm: str, *quotas: str) -> None:
    for quota in quotas:
        limiter = Limiter(quota, algorithm=check_algorithm(algorithm))
        interrupt_often(lambda limiter=limiter: limiter.try_acquire("k", permits=3), 30)  # type: ignore[misc]  # a default binds it
        assert limiter.try_acquire("another")


def redis(url: str) -> None:
    with Limiter("1000/30d", store=url, name="large") as large, Limiter("1/30d", store=url, name="small") as small:
        assert small.try_acquire("k")
        small.store.close()
        small.store = large.store
        small._use(large.store.open(small.rule, "raise"))  # the same connections for both
        for _ in range(5):
            interrupt_often(lambda: large.peek("k", permits=0), 20)
            for _ in range(20):
                assert not small.try_acquire("k")
                assert large.peek("k", permits=0).limit == 1000


def threads(url: str) -> None:
    """The calls of other threads, which share trips, go on while those of the main thread are interrupted."""
    with Limiter("1000000/30d", store=url, on_store_error="raise") as limiter, ThreadPoolExecutor(4) as pool:
        over = False

        def work() -> int:
            return sum(limiter.try_acquire("k").allowed for _ in iter(lambda: over, True))

        others = [pool.submit(work) for _ in range(4)]
        try:
            interrupt_often(lambda: limiter.try_acquire("k"), 100)
        finally:
            over = True
        admitted = sum(other.result() for other in others)
        assert 0 < admitted <= 1_000_000 - limiter.peek("k", permits=0).remaining


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    kinds: dict[str, Callable[..., None]] = {"memory": memory, "redis": redis, "threads": threads}
    kinds[kind](*arguments)
    print("survived")
