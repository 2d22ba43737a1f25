"""A decision is a value: true when allowed, equal by its numbers, and it survives a trip through pickle."""

import copy
import pickle

import pytest

from headgate import Decision, Limiter
from headgate.testing import ManualClock
from tests.places import ALGORITHMS


def decisions(algorithm: str) -> tuple[Decision, Decision]:
    """One granted, one denied."""
    with Limiter("1/minute", algorithm=algorithm, clock=ManualClock()) as limiter:
        return limiter.try_acquire("k"), limiter.try_acquire("k")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_types(algorithm: str) -> None:
    for decision in decisions(algorithm):
        assert isinstance(decision, Decision)
        assert type(decision.allowed) is bool
        assert type(decision.limit) is int
        assert type(decision.remaining) is int
        assert type(decision.reset_after) is float
        assert type(decision.retry_after) is float
        assert decision.degraded is False


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_truth(algorithm: str) -> None:
    granted, denied = decisions(algorithm)
    assert granted and granted.allowed and granted.retry_after == 0.0
    assert not denied and not denied.allowed and denied.retry_after > 0.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_by_value(algorithm: str) -> None:
    first, second = decisions(algorithm), decisions(algorithm)
    assert first == second
    assert [hash(decision) for decision in first] == [hash(decision) for decision in second]
    assert first[0] != first[1]
    assert first[0] != "allowed"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_copies_are_equal(algorithm: str) -> None:
    for decision in decisions(algorithm):
        assert pickle.loads(pickle.dumps(decision)) == decision
        assert copy.copy(decision) == decision
        assert copy.deepcopy(decision) == decision


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_repr_shows_the_numbers(algorithm: str) -> None:
    for decision in decisions(algorithm):
        text = repr(decision)
        for name in ("allowed", "limit", "remaining", "reset_after", "retry_after", "degraded"):
            assert f"{name}={getattr(decision, name)!r}" in text
