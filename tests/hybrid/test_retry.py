"""Who waits as long as it was told, with nobody else about, is served."""

from __future__ import annotations

import random

import pytest

from headgate import HybridLimiter
from headgate.testing import ManualClock
from tests.servers import Server

START = 1_699_920_000.0
A_LITTLE = 0.003  # seconds: a lease, and a refusal, begin a trip after Redis said so


@pytest.mark.parametrize("permits", [1, 3, 5])
@pytest.mark.parametrize("kind", ["token_bucket", "gcra", "fixed_window", "sliding_window_counter"])
def test_who_waits_as_told_is_served(kind: str, permits: int, redis_server: Server) -> None:
    dice = random.Random(f"{kind} {permits}")
    clock = ManualClock(START + dice.random())
    waits = 0
    with HybridLimiter("5/second", algorithm=kind, store=f"{redis_server.url}?timeout=10", clock=clock) as limiter:
        for _ in range(60):
            clock.advance(dice.random() * dice.choice([0.01, 0.1]))
            refused = limiter.try_acquire("k", permits)
            if refused:
                continue
            waits += 1
            clock.advance(refused.retry_after + A_LITTLE)
            again = limiter.try_acquire("k", permits)
            assert again, f"wait {waits}: told {refused.retry_after}, and then {again.retry_after}"
    assert waits > 3
