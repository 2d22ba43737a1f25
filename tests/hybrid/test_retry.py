"""Who waits as long as it was told, with nobody else about, is served. And nobody is told to wait for no time."""

from __future__ import annotations

import random

import pytest

from headgate import HybridLimiter
from headgate.testing import ManualClock
from tests.servers import Server

START = 1_699_920_000.0
BUCKETS = ["5/second", "3/minute", "7/second burst 20", "100/second burst 12", "1/second", "1000/second"]
WINDOWS = ["5/second", "3/minute", "20/second", "7/10s", "1/second", "1000/second"]
QUOTAS = {"token_bucket": BUCKETS, "gcra": BUCKETS, "fixed_window": WINDOWS, "sliding_window_counter": WINDOWS}


@pytest.mark.parametrize("kind", QUOTAS)
def test_who_waits_as_told_is_served(kind: str, redis_server: Server) -> None:
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


@pytest.mark.parametrize("kind", QUOTAS)
def test_nobody_is_told_to_come_back_at_once(kind: str, redis_server: Server) -> None:
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
