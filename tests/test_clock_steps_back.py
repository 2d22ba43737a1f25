"""A server's clock may step back, most of all in a failover to another host: waits stay true and bounded."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from headgate import Limiter
from tests.support.quotas import law

ALGORITHMS = ["token_bucket", "leaky_bucket", "gcra", "first_window", "sliding_window", "sliding_window_counter"]
PERIOD = 10_000_000
START = 1_699_920_000_000_000


pytestmark = pytest.mark.server


@pytest.fixture(params=["redis_server", "postgres_server"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of each kind of server in turn."""
    url: str = request.getfixturevalue(request.param).url
    return url


class SteppingClock:
    """A clock that can be set to any time."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> int:
        return self.time

    def wait(self, wake: threading.Event, seconds: float | None) -> None:
        raise AssertionError("no call waits here")

    async def wait_async(self, wake: asyncio.Event, seconds: float | None) -> None:
        raise AssertionError("no call waits here")


@pytest.mark.parametrize("quotas", ["10/10s", ["10/10s", "7/5s"]], ids=["one", "several"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_retry_after(algorithm: str, quotas: str | list[str], store_url: str) -> None:
    """A wait is true, and at most three periods, after the clock has stepped back."""
    dice = random.Random(algorithm)
    clock = SteppingClock()
    denials = 0
    with Limiter(quotas, store=store_url, clock=clock, **law(algorithm)) as limiter:
        for trial in range(60):
            clock.time = START + dice.randrange(PERIOD)
            key = f"key {trial}"
            for _ in range(dice.randrange(1, 6)):
                limiter.try_acquire(key, permits=dice.randrange(1, 4))
                clock.time += dice.randrange(PERIOD // 4)
            clock.time -= dice.choice([1, 1_000, PERIOD // 3, PERIOD, 6 * PERIOD, 3_600_000_000])
            permits = dice.randrange(1, 8)
            decision = limiter.try_acquire(key, permits)
            if not decision:
                denials += 1
                assert 0 < decision.retry_us <= 3 * PERIOD
                clock.time += decision.retry_us
                assert limiter.try_acquire(key, permits), (trial, decision)
    assert denials > 10, "the trials never came to the point"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_is_forgotten(algorithm: str, store_url: str) -> None:
    """A key at its limit stays there, however far the clock steps back."""
    clock = SteppingClock()
    with Limiter("10/10s", store=store_url, clock=clock, **law(algorithm)) as limiter:
        for step in (1, PERIOD // 2, PERIOD, 2 * PERIOD + 1, 3_600_000_000):
            clock.time = START
            key = f"back by {step}"
            assert limiter.try_acquire(key, permits=10)
            clock.time -= step
            assert not limiter.try_acquire(key)
            assert not limiter.try_acquire(key), "the first refusal may have brought the state back to now"
            assert limiter.peek(key, permits=0).remaining == 0
