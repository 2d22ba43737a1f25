"""Joint checks in memory: whatever comes between, and in a store that is full."""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from headgate import Limiter
from headgate._mypyc import FREE_THREADED
from headgate.joint import JointCheck, try_acquire_all
from headgate.stores.memory import MemoryStore
from headgate.testing import ManualClock
from tests.support.quotas import LAWS, law


@contextmanager
def at_every_collection(work: Callable[[], object]) -> Iterator[None]:
    """Call *work* at every garbage collection, and let there be one at nearly every allocation.

    Only in this thread: a worker of xdist has another one, which would call it while this one counts and goes on.
    """
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    thread, busy = threading.get_ident(), False

    def collected(phase: str, _info: dict[str, int]) -> None:
        nonlocal busy
        if phase == "stop" and not busy and threading.get_ident() == thread:
            busy = True
            try:
                work()
            finally:
                busy = False

    gc.callbacks.append(collected)
    gc.set_threshold(1, 1000, 1000)
    gc.enable()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
        if not enabled:
            gc.disable()


@pytest.mark.skipif(FREE_THREADED, reason="its garbage collector cannot be made to come between")
@pytest.mark.parametrize("other", ["token_bucket", "gcra", "fixed_window", "sliding_window_counter"])
def test_calls_that_come_between(other: str) -> None:
    """Finalizers run in the middle of a joint check, wherever it allocates, and spend: every permit is counted."""
    limit, granted, between = 3_000, 0, 0
    for number in range(4):
        store, key = MemoryStore(), f"k{number}"
        first = Limiter(f"{limit}/30d", store=store)
        second = Limiter(f"{limit}/30d", store=store, name="second", **law(other))

        def spend(first: Limiter = first, second: Limiter = second, key: str = key) -> None:
            nonlocal between
            between += first.try_acquire(key).allowed
            second.peek(key)

        granted = between = 0
        kept: list[list[int]] = []
        with at_every_collection(spend):
            for _ in range(limit):
                kept += [[], []]  # of the lists that the interpreter keeps ready: a check has to allocate others
                granted += all(try_acquire_all([JointCheck(second, key), JointCheck(first, key)]))
        assert granted + between == limit
        assert first.peek(key, 0).remaining == 0
        assert second.peek(key, 0).remaining == limit - granted
        assert between, "nothing came between"


@pytest.mark.parametrize("algorithm", LAWS)
def test_full(algorithm: str) -> None:
    """Full of keys at their limit, the store denies a new key; it drops no key of the call to make room for another."""
    clock = ManualClock()
    store = MemoryStore(max_keys=20, clock=clock)
    limiter = Limiter("1/minute", store=store, **law(algorithm))
    other = Limiter("5/minute", store=store, name="other")
    assert other.try_acquire("known")
    for number in range(19):
        assert limiter.try_acquire(f"first {number}")
    for number in range(50):
        made = try_acquire_all([JointCheck(other, "known", 2), JointCheck(limiter, f"later {number}")])
        assert [(decision.allowed, decision.remaining) for decision in made] == [(True, 4), (False, 0)]
        assert 0 < made[1].retry_after <= 120
        assert len(store) == 20
    assert not any(limiter.try_acquire(f"first {number}") for number in range(19))
    clock.advance(120)
    assert all(try_acquire_all([JointCheck(other, "known"), JointCheck(limiter, "newcomer")]))


def test_a_refusal_makes_no_room() -> None:
    """No state is dropped for a new key if the call is refused anyway."""
    store = MemoryStore(max_keys=10)
    limiter, strict = Limiter("5/hour", store=store), Limiter("1/hour", store=store, name="strict")
    assert strict.try_acquire("k")
    for number in range(9):
        assert limiter.try_acquire(f"k{number}")
    for number in range(50):
        assert not all(try_acquire_all([JointCheck(limiter, f"new {number}"), JointCheck(strict, "k")]))
    assert [limiter.peek(f"k{number}", 0).remaining for number in range(9)] == [4] * 9


@pytest.mark.parametrize("bound", [1, 2, 3, 9])
def test_small_bounds(bound: int) -> None:
    """More new keys than the store may have are denied; it never has more than it may."""
    chance, clock = random.Random(bound), ManualClock()
    store = MemoryStore(max_keys=bound, clock=clock)
    limiters = [Limiter("2/minute", store=store, name=name) for name in "abc"]
    granted = 0
    for _ in range(500):
        keys = [chance.choice("xyz") for _ in limiters]
        granted += all(try_acquire_all([JointCheck(one, key) for one, key in zip(limiters, keys, strict=True)]))
        assert len(store) <= bound
        clock.advance(chance.choice([0, 0.5, 20]))
    assert (granted == 0) == (bound < 3)
