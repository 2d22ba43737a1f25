"""A decision is a value: true when allowed, equal by its numbers, and it survives a trip through pickle."""

import copy
import pickle
from typing import Any

import pytest

from headgate import Decision, Limiter
from headgate.rule import AlgorithmName
from headgate.stores.memory import MemoryStore
from headgate.testing import ManualClock
from tests.support.quotas import ALGORITHMS


def decisions(algorithm: AlgorithmName) -> tuple[Decision, Decision]:
    """One granted, one denied."""
    with Limiter("1/minute", algorithm=algorithm, clock=ManualClock()) as limiter:
        return limiter.try_acquire("k"), limiter.try_acquire("k")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_types(algorithm: AlgorithmName) -> None:
    for decision in decisions(algorithm):
        assert isinstance(decision, Decision)
        assert type(decision.allowed) is bool
        assert type(decision.limit) is int
        assert type(decision.remaining) is int
        assert type(decision.reset_after) is float
        assert type(decision.retry_after) is float
        assert decision.degraded is False


@pytest.mark.parametrize("name", ["allowed", "degraded", "limit", "remaining", "reset_after", "retry_after"])
def test_read_only(name: str) -> None:
    """A decision that is a key of a dict cannot change."""
    granted, _ = decisions("token_bucket")
    with pytest.raises(AttributeError):
        setattr(granted, name, 0)
    with pytest.raises(AttributeError):
        delattr(granted, name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_truth(algorithm: AlgorithmName) -> None:
    granted, denied = decisions(algorithm)
    assert granted and granted.allowed and granted.retry_after == 0.0
    assert not denied and not denied.allowed and denied.retry_after > 0.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_by_value(algorithm: AlgorithmName) -> None:
    first, second = decisions(algorithm), decisions(algorithm)
    assert first == second
    assert [hash(decision) for decision in first] == [hash(decision) for decision in second]
    assert first[0] != first[1]
    assert first[0] != "allowed"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_copies_are_equal(algorithm: AlgorithmName) -> None:
    for decision in decisions(algorithm):
        assert pickle.loads(pickle.dumps(decision)) == decision
        assert copy.copy(decision) == decision
        assert copy.deepcopy(decision) == decision


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_repr_shows_the_numbers(algorithm: AlgorithmName) -> None:
    for decision in decisions(algorithm):
        text = repr(decision)
        for name in ("allowed", "limit", "remaining", "reset_after", "retry_after", "degraded"):
            assert f"{name}={getattr(decision, name)!r}" in text


# what a test of an application may want to make
BY_HAND: list[dict[str, Any]] = [
    {},
    {"allowed": False},
    {"allowed": True, "limit": 5, "remaining": 4, "reset_after": 12.0},
    {"allowed": False, "limit": 5, "reset_after": 2.5, "retry_after": 1.5},
    {"allowed": True, "limit": 5, "remaining": 4, "degraded": True},
    {"allowed": False, "limit": 5, "reset_after": 1, "retry_after": 1, "degraded": True},
]


@pytest.mark.parametrize("given", BY_HAND, ids=str)
def test_made_by_hand(given: dict[str, Any]) -> None:
    made = Decision(**given)
    assert isinstance(made, Decision)
    assert bool(made) is made.allowed is given.get("allowed", True)
    for name, value in given.items():
        assert getattr(made, name) == value
    assert (made.degraded, made.limit) == (given.get("degraded", False), given.get("limit", 0))
    assert eval(repr(made)) == made == pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_made_by_hand_equal(algorithm: AlgorithmName) -> None:
    """A decision made by hand equals one of a limiter with the same numbers."""
    names = ("allowed", "limit", "remaining", "reset_after", "retry_after", "degraded")
    for decision in decisions(algorithm):
        assert Decision(**{name: getattr(decision, name) for name in names}) == decision


@pytest.mark.parametrize(
    "given", [{"alowed": False}, {"allowed": "no"}, {"degraded": 1}, {"reset_after": "1"}], ids=str
)
def test_made_by_hand_wrong(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Decision(**given)
    with pytest.raises(TypeError, match="named arguments only, such as allowed=False"):
        Decision(False)  # type: ignore[arg-type]  # which of them would it be?


def test_help_says_what_it_has() -> None:
    for name in ("allowed", "limit", "remaining", "reset_after", "retry_after", "degraded"):
        assert name in (Decision.__doc__ or "")
    assert "max_keys" in (MemoryStore.__doc__ or "")
