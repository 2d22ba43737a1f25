"""A caller that waits for retry_after, with no other callers, is served; and retry_after is never 0."""

from __future__ import annotations

import random

import pytest

from headgate import HybridLimiter
from headgate.hybrid.lease import MILLISECOND
from headgate.rule import AlgorithmName
from headgate.testing import ManualClock
from tests.support.hybrid_sole_process import SoleProcess
from tests.support.servers import Server

START = 1_699_920_000.0
BUCKETS = ["5/second", "3/minute", "7/second burst 20", "100/second burst 12", "1/second", "1000/second"]
WINDOWS = ["5/second", "3/minute", "20/second", "7/10s", "1/second", "1000/second"]
QUOTAS = {"token_bucket": BUCKETS, "gcra": BUCKETS, "fixed_window": WINDOWS, "sliding_window_counter": WINDOWS}


@pytest.mark.parametrize("kind", QUOTAS)
def test_retry_after_is_enough(kind: AlgorithmName, redis_server: Server) -> None:
    """A denied caller that waits for retry_after is served, on a real Redis."""
    waits = 0
    for number, quota in enumerate(QUOTAS[kind] * 2):
        dice = random.Random(f"{kind} {number}")
        clock = ManualClock(START + 100 * dice.random())
        name = f"n{number}"
        with HybridLimiter(quota, algorithm=kind, store=redis_server.patient_url, clock=clock, name=name) as limiter:
            limit = limiter.peek("k").limit
            for _ in range(30):
                clock.advance(dice.random() * dice.choice([0, 0.01, 0.1, 1, 5]))
                permits = min(dice.choice([1, 1, 2, 3, 5, limit]), limit)
                made = [limiter.try_acquire("k", permits) for _ in range(dice.choice([1, 1, 3, 20]))]
                if made[-1]:
                    continue
                waits += 1
                assert made[-1].retry_after > 0
                clock.advance(made[-1].retry_after)
                again = limiter.try_acquire("k", permits)
                assert again, f"{permits} of {quota}: told {made[-1].retry_after}, and then {again.retry_after}"
    assert waits > 100


MIXED = {
    "token_bucket": ["5/second", "7/second burst 3", "10/3s", "20/second burst 4", "3/second burst 30", "1000/second"],
    "fixed_window": ["5/second", "10/3s"],
    "sliding_window_counter": ["5/second", "10/3s", "1000/second"],
}


@pytest.mark.parametrize("accuracy", ["high", "medium", "low"])
@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("stalls", [False, True])
def test_retry_after_beside_other_calls(kind: AlgorithmName, accuracy: str, stalls: bool) -> None:
    """On a clock of its own, with reports under way: permits of 1 to all, and several were told to come back."""
    waits = 0
    for number, quota in enumerate(MIXED[kind] * 3):
        dice = random.Random(f"{kind} {accuracy} {number}")
        process = SoleProcess(quota, kind, accuracy, 1_700_000_000 + dice.randrange(100), stalls)
        capacity = process.rule.capacity
        permit = process.rule.quotas[0].period / process.rule.quotas[0].limit
        for _ in range(150):
            process.sleep(dice.choice([0, 0, permit * dice.random(), 3 * permit * dice.random(), 0.001]))
            permits = dice.choice([1, 1, 1, min(2, capacity), min(3, capacity), capacity])
            made = process.take(permits)
            if made or dice.random() < 0.4:
                continue
            assert made.reset_after >= made.retry_after > 0
            waits += 1
            process.sleep(made.retry_after)
            again = process.take(permits)
            assert again, f"{permits} of {quota}: told {made.retry_after}, and then {again.retry_after}"
    assert waits > 50


@pytest.mark.parametrize(
    "quota, way, before, permits",
    [
        ("5/second", 20, [(0, 1, 1), (1.0, 1, 4), (0.39, 0, 0)], 2),
        ("20/second", 40, [(0, 5, 1), (0, 4, 2), (0.76, 4, 4), (0.27, 5, 1), (0, 5, 3)], 5),
        ("5/second", 10, [(0, 1, 1), (0.47, 1, 4), (0.69, 1, 2), (0.53, 1, 3)], 1),
    ],
)
def test_counter_leases_nothing_promised(
    quota: str, way: int, before: list[tuple[float, int, int]], permits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter leases nothing that would count, or run out, when a denied caller retries.

    *before*: (sleep, permits, times).
    """
    process = SoleProcess(quota, "sliding_window_counter", start=1_700_000_000)
    monkeypatch.setattr(process, "way", lambda: way * MILLISECOND)
    for seconds, several, times in before:
        process.sleep(seconds)
        for _ in range(times):
            process.take(several)
    made = process.take(permits)
    assert not made
    process.sleep(made.retry_after)
    assert process.take(permits)


def test_window_lease_is_no_promise() -> None:
    """A denied caller of a window is told to retry at its end, and no slow report moves that."""
    process = SoleProcess("5/second", "fixed_window", "low", 1_700_000_009, stalls=True, seed=1026)
    steps = [(0.2, 1), (0.1, 5), (0.7, 5), (0.1, 1), (1.0, 1), (0.7, 1), (0.2, 5), (0.8, 1), (0.2, 1), (0.39, 1)]
    for seconds, permits in steps:
        process.sleep(seconds)
        made = process.take(permits)
    assert not made
    process.sleep(made.retry_after)
    assert process.take()


def test_no_denial_while_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter does not deny several permits during a report: its grant may count in the next window."""
    process = SoleProcess("5/second", "sliding_window_counter", start=1_700_000_000)
    monkeypatch.setattr(process, "way", lambda: MILLISECOND)
    while process.take():
        pass
    here = process.limiter.try_acquire
    assert here("k", 2) is not None, "it is refused here"
    while not process.lease.in_flight:
        process.sleep(0.001)
        process.lease.deny_until = max(process.lease.deny_until, process.now + MILLISECOND)
    assert here("k", 2) is None


def test_unreported_permits_delay_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permits in a report under way leave no room to refill: a call for the whole bucket waits long enough."""
    process = SoleProcess("5/second")
    monkeypatch.setattr(process, "way", lambda: MILLISECOND)
    for _ in range(60):
        process.take()
        process.sleep(0.05)
    process.sleep(0.45)
    held = process.lease.balance // process.limiter.params.cost
    assert held > 1 and process.take(held)
    monkeypatch.setattr(process, "way", lambda: 440 * MILLISECOND)
    while not process.lease.in_flight:
        process.sleep(0.001)
    made = process.take(5)
    monkeypatch.setattr(process, "way", lambda: MILLISECOND)
    process.sleep(made.retry_after)
    assert made or process.take(5)


@pytest.mark.parametrize("accuracy", ["high", "medium", "low"])
@pytest.mark.parametrize("quota", ["3/second burst 30", "100/second", "1000/second"])
def test_retry_times_of_a_sole_process(quota: str, accuracy: str) -> None:
    """The only process at a key fetches what refills, five times a second at most, so its retry times are short."""
    process = SoleProcess(quota, accuracy=accuracy)
    permit = process.rule.quotas[0].period / process.rule.quotas[0].limit
    while process.take():
        pass
    start, trips, admitted = process.now, process.trips, 0
    while process.now < start + 20_000_000_000:
        made = process.take()
        admitted += made.allowed
        assert made.retry_after <= max(permit, 0.2) + 0.03, "a permit or a fifth of a second, and a trip and two ticks"
        process.sleep(permit / 3)
    assert process.trips - trips <= 120
    assert admitted >= 0.98 * 20 / permit - 1


@pytest.mark.parametrize("kind", QUOTAS)
def test_retry_after_is_positive(kind: AlgorithmName, redis_server: Server) -> None:
    """A denial never has a retry_after of 0."""
    refused = 0
    for number, quota in enumerate(QUOTAS[kind]):
        dice = random.Random(f"{kind} {number}")
        clock = ManualClock(START + 100 * dice.random())
        limiters = [
            HybridLimiter(quota, algorithm=kind, store=redis_server.patient_url, clock=clock, name=f"n{number}")
            for _ in range(3)
        ]
        limit = limiters[0].peek("k").limit
        for _ in range(30):
            clock.advance(dice.random() * dice.choice([0, 0, 0.01, 0.3]))
            permits = min(dice.choice([1, 1, 2, limit]), limit)
            for made in [dice.choice(limiters).try_acquire("k", permits) for _ in range(4)]:
                if not made:
                    refused += 1
                    assert made.retry_after > 0
        for limiter in limiters:
            limiter.close()
    assert refused > 50
