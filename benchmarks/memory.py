"""Memory, one thread. Each contender writes its own loop, so that nobody pays for an adapter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from benchmarks import peers
from benchmarks.workload import (
    ALGORITHMS,
    LIMIT,
    PERIOD_SECONDS,
    QUOTA,
    TURN_SECONDS,
    Loop,
    Sample,
    Scale,
    time_loop,
    traffic,
)

Start = Callable[[str], AbstractContextManager[Loop]]  # algorithm -> a loop over a store that has seen no key


@contextmanager
def headgate(algorithm: str) -> Iterator[Loop]:
    from headgate import Limiter
    from headgate.rule import check_algorithm

    with Limiter(QUOTA, algorithm=check_algorithm(algorithm)) as limiter:
        try_acquire = limiter.try_acquire

        def loop(keys: Sequence[str]) -> int:
            admitted = 0
            for key in keys:
                if try_acquire(key):
                    admitted += 1
            return admitted

        yield loop


@contextmanager
def limits(algorithm: str) -> Iterator[Loop]:
    from limits import parse, storage, strategies

    item = parse(QUOTA)
    hit = strategies.STRATEGIES[peers.LIMITS[algorithm]](storage.MemoryStorage()).hit

    def loop(keys: Sequence[str]) -> int:
        admitted = 0
        for key in keys:
            if hit(item, key):
                admitted += 1
        return admitted

    yield loop


@contextmanager
def throttled(algorithm: str) -> Iterator[Loop]:
    from throttled import MemoryStore, Throttled

    # Its store keeps 1,024 keys by default; at four times the keys of a round nothing is ever evicted.
    store = MemoryStore(options={"MAX_SIZE": 4_096})
    limit = Throttled(using=peers.THROTTLED[algorithm], quota=peers.throttled_quota(), store=store).limit

    def loop(keys: Sequence[str]) -> int:
        admitted = 0
        for key in keys:
            if not limit(key).limited:
                admitted += 1
        return admitted

    yield loop


@contextmanager
def pyrate(algorithm: str) -> Iterator[Loop]:
    from pyrate_limiter import AbstractBucket, InMemoryBucket, MonotonicClock, StateBucket

    rates, policy = peers.pyrate_rates(), peers.pyrate_policy(algorithm)
    kind = InMemoryBucket if algorithm in peers.PYRATE_LOG else StateBucket

    def bucket_of(_key: str) -> AbstractBucket:
        return kind(rates, algorithm=policy)

    limiter = peers.pyrate_limiter_of(bucket_of, MonotonicClock().now)
    try_acquire = limiter.try_acquire

    def loop(keys: Sequence[str]) -> int:
        admitted = 0
        for key in keys:
            if try_acquire(key, blocking=False):
                admitted += 1
        return admitted

    yield loop
    limiter.close()


@contextmanager
def token_bucket(_algorithm: str) -> Iterator[Loop]:
    from token_bucket import Limiter, MemoryStorage

    consume = Limiter(LIMIT / PERIOD_SECONDS, LIMIT, MemoryStorage()).consume

    def loop(keys: Sequence[str]) -> int:
        admitted = 0
        for key in keys:
            if consume(key):
                admitted += 1
        return admitted

    yield loop


@contextmanager
def nothing(_algorithm: str) -> Iterator[Loop]:
    """Admit everything after one look at the clock: the floor under all the other rows."""
    clock = time.monotonic_ns

    def loop(keys: Sequence[str]) -> int:
        admitted = 0
        for _key in keys:
            if clock():
                admitted += 1
        return admitted

    yield loop


LIBRARIES: dict[str, tuple[Start, tuple[str, ...]]] = {
    "headgate": (headgate, ALGORITHMS),
    "limits": (limits, tuple(peers.LIMITS)),
    "throttled-py": (throttled, tuple(peers.THROTTLED)),
    "pyrate-limiter": (pyrate, tuple(peers.PYRATE_LOG | peers.PYRATE_STATE)),
    "token-bucket": (token_bucket, ("token_bucket",)),
    "(one clock read)": (nothing, ("-",)),
}


def one_round(start: Start, algorithm: str, keys: Sequence[str]) -> Sample:
    """Go over *keys* until a turn has lasted long enough to be measured well, with a fresh store for each pass."""
    seconds, checks, admitted = 0.0, 0, 0
    while seconds < TURN_SECONDS:
        with start(algorithm) as loop:
            sample = time_loop(loop, keys)
        seconds, checks, admitted = seconds + sample.seconds, checks + sample.checks, admitted + sample.admitted
    return Sample(seconds, checks, admitted)


def rounds(library: str, scale: Scale, _url: str) -> dict[str, Callable[[], Sample]]:
    """Give one round of *library* for each of its algorithms."""
    start, algorithms = LIBRARIES[library]
    keys = traffic(scale.memory_keys)
    return {algorithm: partial(one_round, start, algorithm, keys) for algorithm in algorithms}
