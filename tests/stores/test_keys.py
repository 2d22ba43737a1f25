"""Keys that try to break out of their place never share state; nor do limiters of one store."""

import itertools

import pytest

from headgate.testing import ManualClock
from tests.support.callers import Callers
from tests.support.quotas import ALGORITHMS, HOSTILE_KEYS


def test_hostile_keys_are_distinct() -> None:
    assert len(set(HOSTILE_KEYS)) == len(HOSTILE_KEYS)


@pytest.mark.parametrize("options", [{}, {"name": "a"}, {"hash_keys": True}], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_are_apart(algorithm: str, options: dict[str, object], callers: Callers) -> None:
    """Each hostile key has its own limit, and a reset is of that key alone."""
    limiter = callers.limiter("2/minute", algorithm=algorithm, clock=ManualClock(), **options)
    for key in HOSTILE_KEYS:
        assert limiter.try_acquire(key, permits=2), f"{key!a} shares its state"
    for key in HOSTILE_KEYS:
        assert not limiter.try_acquire(key)
    for key in HOSTILE_KEYS[::6]:
        limiter.reset(key)
        assert limiter.try_acquire(key, permits=2)
        assert sum(not limiter.peek(other) for other in HOSTILE_KEYS) == len(HOSTILE_KEYS)


def test_limiters_are_apart(any_callers: Callers) -> None:
    """Names, algorithms and numbers of quotas are as hostile as keys can be."""
    names = ["default", "a", "a:b", "a:b:0", "{a}", "}", "%7D", "0", "1", "1699920000", "b"]
    quotas: list[list[str]] = [["2/minute"], ["2/minute", "3/minute"]]
    clock = ManualClock()
    for algorithm, name, quota in itertools.product(ALGORITHMS, names[:: 1 if any_callers.whole else 4], quotas):
        limiter = any_callers.limiter(quota, algorithm=algorithm, name=name, clock=clock)
        for key in ("a", "b", "a}b", "a:0"):
            assert limiter.try_acquire(key, permits=2), f"{algorithm} {name} {quota}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_limiters_are_one(algorithm: str, any_callers: Callers) -> None:
    """Limiters of one name, algorithm and quota on one store share their state."""
    clock = ManualClock()
    one, other = (any_callers.limiter("5/minute", algorithm=algorithm, name="login", clock=clock) for _ in range(2))
    assert one.try_acquire("k", permits=3)
    assert other.try_acquire("k", permits=2)
    assert not one.try_acquire("k")
