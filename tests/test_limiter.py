"""The door itself: the names it takes, and what it shows of itself."""

from typing import get_args

import pytest

from headgate import AlgorithmName, AsyncLimiter, HybridLimiter, Limiter, OnStoreError, Quota
from headgate.algorithms import ALGORITHMS as TABLE
from headgate.rule import POLICIES
from headgate.stores import MemoryStore, RedisStore
from headgate.testing import ManualClock
from tests.support.quotas import ALGORITHMS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithm_in_capitals(algorithm: AlgorithmName) -> None:
    """An algorithm may be written in capitals."""
    store = MemoryStore()
    small = Limiter("5/30d", algorithm=algorithm, store=store)
    large = Limiter("5/30d", algorithm=algorithm.upper(), store=store)  # type: ignore[arg-type]  # for type checkers
    assert small.try_acquire("k")
    assert large.peek("k", permits=0).remaining == 4
    assert large.rule.kind == algorithm


def test_types_name_what_there_is() -> None:
    assert get_args(AlgorithmName) == tuple(TABLE)
    assert get_args(OnStoreError) == POLICIES == ("allow", "deny", "local", "raise")


def test_what_it_shows() -> None:
    assert repr(Limiter(["5/second", Quota(100, 60.0)], name="login", algorithm="gcra")) == (
        "<Limiter 'login': 5/second, 100/minute, gcra in MemoryStore(max_keys=1000000)>"
    )
    limiter = AsyncLimiter("5/second", store="redis://me:secret@localhost:1/2?password=secret")
    assert repr(limiter).startswith("<AsyncLimiter 'default': 5/second, token_bucket in <RedisStore: Redis at redis://")
    assert "localhost:1/2" in repr(limiter)
    hybrid = HybridLimiter("5/second", store="redis://me:secret@localhost:1")
    for shown in (repr(limiter), repr(hybrid), repr(RedisStore("redis://:secret@localhost"))):
        assert "secret" not in shown
    assert repr(limiter.with_timeout(1.0)) == repr(limiter)


def test_what_a_clock_shows() -> None:
    clock = ManualClock()
    clock.advance(1.5)
    assert eval(repr(clock)).now() == clock.now()
