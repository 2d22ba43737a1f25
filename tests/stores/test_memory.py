"""The memory store is bounded: a flood of keys neither grows it nor frees a key that is being limited."""

import itertools
import random
import signal
import sys
from collections.abc import Callable
from time import monotonic

import pytest

from headgate import Limiter
from headgate.rule import AlgorithmName, Rule
from headgate.stores.key_table import BucketTable, IntegerTable, KeyTable
from headgate.stores.memory import MemoryStore
from headgate.testing import ManualClock
from tests.support.callers import in_threads
from tests.support.quotas import ALGORITHMS

FLOOD = 50_000
BOUND = 1_000


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(max_keys=BOUND, clock=clock)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_flood(algorithm: AlgorithmName, store: MemoryStore, clock: ManualClock) -> None:
    """A flood of new keys neither grows the store nor frees a key that is at its limit."""
    limiter = Limiter("3/hour", algorithm=algorithm, store=store)
    limited = [f"limited {number}" for number in range(20)]
    for key in limited:
        assert limiter.try_acquire(key, permits=3)
    for number in range(FLOOD):
        limiter.try_acquire(f"flood {number}")
        if number % 1_000 == 0:
            clock.advance(0.1)
            assert len(store) <= BOUND
            assert not any(limiter.try_acquire(key) for key in limited)
    assert len(store) <= BOUND
    assert not any(limiter.try_acquire(key) for key in limited)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_full(algorithm: AlgorithmName, store: MemoryStore, clock: ManualClock) -> None:
    """Full of keys at their limit, it refuses new keys until there is room."""
    limiter = Limiter("1/minute", algorithm=algorithm, store=store)
    for number in range(BOUND):
        assert limiter.try_acquire(f"first {number}")
    for number in range(3 * BOUND):
        decision = limiter.try_acquire(f"later {number}")
        assert not decision.allowed
        assert not decision.degraded
        assert decision.remaining == 0
        assert 0 < decision.retry_after <= 120
    assert len(store) <= BOUND
    assert not any(limiter.try_acquire(f"first {number}") for number in range(BOUND))
    clock.advance(decision.retry_after)
    assert limiter.try_acquire("newcomer"), "retry_after is true here too"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_peek_at_new_keys(algorithm: AlgorithmName) -> None:
    """A peek at a key never seen says what a call would, whatever is in a small store, of one limiter or of two."""
    chance = random.Random(algorithm)
    refused = admitted = 0
    for bound in (1, 2, 9, 40):
        clock = ManualClock()
        store = MemoryStore(max_keys=bound, clock=clock)
        limiters = [Limiter("2/minute", algorithm=algorithm, store=store, name=name) for name in ("one", "two")]
        for number in range(2_000):
            limiter = chance.choice([*limiters, limiters[0]])
            key = f"newcomer {number}" if chance.random() < 0.7 else f"known {chance.randrange(2 * bound)}"
            permits = chance.choice([1, 2, 2])
            idle = limiter.peek(key, permits=0)
            expected = limiter.peek(key, permits)
            decision = limiter.try_acquire(key, permits)
            assert decision == expected
            assert idle.allowed and idle.retry_after == 0.0
            assert idle.remaining >= decision.remaining + (permits if decision else 0)
            assert len(store) <= bound
            refused += not decision and key.startswith("newcomer")
            admitted += decision.allowed
            clock.advance(chance.choice([0, 0, 0, 0.0005, 0.002, 1, 20]) if number % 100 else 130)
    assert min(refused, admitted) > 100, "the trials never came to the point"


def test_flood_from_threads(clock: ManualClock) -> None:
    store = MemoryStore(max_keys=500, clock=clock)
    limiter = Limiter(["3/hour", "5/day"], algorithm="sliding_window", store=store)
    plain = Limiter("3/hour", store=store)
    for one in (limiter, plain):
        one.try_acquire("limited", permits=3)
    seeds = itertools.count()

    def flood() -> None:
        seed = next(seeds)
        chance = random.Random(seed)
        for number in range(1_500):
            one = chance.choice([limiter, plain])
            key = chance.choice([f"{seed} {number}", f"shared {number}"])
            calls: list[Callable[[str], object]] = [one.try_acquire, one.try_acquire, one.peek, one.refund, one.reset]
            chance.choice(calls)(key)
            clock.advance(0.0001)
            assert not one.try_acquire("limited")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    in_threads(8, flood)
    sys.setswitchinterval(before)
    assert len(store) <= 500


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sweep(algorithm: AlgorithmName, clock: ManualClock) -> None:
    """Each call sweeps a few states that have expired."""
    store = MemoryStore(clock=clock)
    limiter = Limiter("2/minute", algorithm=algorithm, store=store)
    for number in range(5_000):
        limiter.try_acquire(f"k{number}")
    assert len(store) == 5_000
    clock.advance(120)
    lengths = []
    for _ in range(5_000):
        limiter.try_acquire("still here")
        clock.advance(0.002)
        lengths.append(len(store))
    assert lengths[0] > 4_000, "not all at once: that would keep one caller waiting"
    assert lengths[-1] <= 5
    assert sorted(lengths, reverse=True) == lengths


def test_sweep_keeps_what_counts(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)
    limiter = Limiter("1/hour", store=store)
    for number in range(200):
        limiter.try_acquire(f"k{number}")
    for _ in range(1_000):
        limiter.try_acquire("other")
        clock.advance(0.01)
    assert len(store) == 201
    assert not any(limiter.try_acquire(f"k{number}") for number in range(200))


def test_limiters_share_the_bound(store: MemoryStore) -> None:
    for name in ("login", "search"):
        limiter = Limiter("2/minute", store=store, name=name)
        for number in range(2 * BOUND):
            limiter.try_acquire(f"k{number}")
    assert len(store) <= BOUND


@pytest.mark.parametrize("other", ALGORITHMS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_share_the_bound(algorithm: AlgorithmName, other: AlgorithmName) -> None:
    """By the system's clock: new keys of one algorithm never free keys of another that are at their limit."""
    store = MemoryStore(max_keys=10)
    first = Limiter("1/30d", algorithm=algorithm, store=store, name="first")
    second = Limiter("1/30d", algorithm=other, store=store, name="second")
    keys = [f"k{number}" for number in range(10)]
    assert all(first.try_acquire(key) for key in keys)
    for key in keys:
        decision = second.try_acquire(key)
        assert not decision and 0 < decision.retry_after <= 60 * 86_400
        assert not second.peek(key)
    assert not any(first.try_acquire(key) for key in keys)


def test_stores_are_apart() -> None:
    first, second = Limiter("1/minute"), Limiter("1/minute")
    assert first.try_acquire("k")
    assert second.try_acquire("k")


@pytest.mark.parametrize("max_keys", [1, 2, 33])
def test_small_bounds(max_keys: int, clock: ManualClock) -> None:
    limiter = Limiter("2/minute", max_keys=max_keys, clock=clock)
    assert limiter.try_acquire("limited", permits=2)
    for number in range(200):
        limiter.try_acquire(f"k{number}")
        assert not limiter.try_acquire("limited")
    clock.advance(60)
    assert limiter.try_acquire("limited", permits=2)


def test_threads_and_time_that_moves(clock: ManualClock) -> None:
    """Time moves while 16 threads spend: never more than the capacity and what has come in since."""
    limiter = Limiter("10/second burst 20", clock=clock)

    def work() -> int:
        spent = 0
        for _ in range(200):
            clock.advance(0.001)
            spent += limiter.try_acquire("k").allowed
        return spent

    most = 20 + 16 * 200 * 0.001 * 10
    assert most - 2 <= sum(in_threads(16, work)) <= most  # a little is lost while the bucket is still full


@pytest.mark.parametrize(
    ("quota", "algorithm"),
    [
        *[(quota, "token_bucket") for quota in ("10/second burst 4", "7/second", "1000000000/second", "3/366d")],
        *[(quota, "fixed_window") for quota in ("7/second", "1000000000/second", "3/366d")],
        *[(quota, "sliding_window_counter") for quota in ("7/second", "1000000000/second", "3/366d")],
    ],
)
def test_shortcuts(quota: str, algorithm: AlgorithmName) -> None:
    """`BucketTable`, which writes the law of buckets out, and `IntegerTable` answer as `KeyTable` does."""
    clock, dice = ManualClock(), random.Random(quota)
    store, rule = MemoryStore(clock=clock), Rule(quota, algorithm=algorithm)
    by_law, written_out = KeyTable(store, rule.algorithm), store.open(rule)
    assert isinstance(written_out, BucketTable if algorithm == "token_bucket" else IntegerTable)
    for _ in range(2000):
        permits = dice.randint(1, rule.capacity) if dice.random() < 0.2 else dice.randint(1, min(rule.capacity, 3))
        assert by_law.try_acquire("k", permits) == written_out.try_acquire("k", permits)
        assert by_law.peek("k", permits) == written_out.peek("k", permits)
        clock.advance(dice.choice([0, 0.000_001, 0.05, 0.3, rule.quotas[0].period * dice.random()]))


@pytest.mark.slow
@pytest.mark.parametrize("same_key", [True, False])
@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window"])
def test_signal_handler(algorithm: AlgorithmName, same_key: bool) -> None:
    """A signal handler may call the limiter that it interrupts: its table stays whole, and later calls are answered."""
    store = MemoryStore()
    limiter = Limiter("2/1ms", algorithm=algorithm, store=store)
    calls, handled = 0, 0

    def handle(*_: object) -> None:
        nonlocal handled
        handled += 1
        limiter.try_acquire(f"key {calls}" if same_key else f"handler {handled}")

    before = signal.signal(signal.SIGVTALRM, handle)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        while handled < 150:
            calls += 1
            limiter.try_acquire(f"key {calls}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    deadline = monotonic() + 20
    while len(store) > 1 and monotonic() < deadline:  # all expire in 2 ms, and each new key sweeps up to 8 of them
        limiter.try_acquire("the last")
    assert len(store) <= 1, "states that no sweep finds"
