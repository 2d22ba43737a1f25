"""What a caller waits for a server that hangs, with the time-outs that headgate is shipped with."""

import asyncio
import time

import pytest

from headgate import AsyncLimiter, Limiter, StoreUnavailable
from headgate.coordination import Lock
from headgate.stores.redis import RedisStore
from tests.support.clusters import Node
from tests.support.pulse import Pulse

pytestmark = [pytest.mark.store_timeout(None), pytest.mark.xdist_group("faults")]

EARLY = 0.01  # seconds that clocks may differ by


def test_a_check_waits_80_ms(node: Node) -> None:
    """`on_store_error` answers after 0.08 s, as README.md says."""
    with Limiter("100/30d", store=node.url) as limiter:
        assert limiter.with_timeout(20).try_acquire("k").remaining == 99
        node.freeze()
        with Pulse() as pulse:
            begun = time.monotonic()
            assert limiter.try_acquire("k").degraded
            took = time.monotonic() - begun
    assert 0.08 - EARLY <= took < 0.08 + pulse.slack


def test_a_check_waits_80_ms_async(node: Node) -> None:
    """`AsyncLimiter` too."""

    async def check() -> tuple[float, float]:
        async with AsyncLimiter("100/30d", store=node.url) as limiter:
            assert (await limiter.with_timeout(20).try_acquire("k")).remaining == 99
            node.freeze()
            with Pulse() as pulse:
                begun = time.monotonic()
                assert (await limiter.try_acquire("k")).degraded
                took = time.monotonic() - begun
            return took, pulse.slack

    took, slack = asyncio.run(check())
    assert 0.08 - EARLY <= took < 0.08 + slack


def test_a_lock_waits_2_s(node: Node) -> None:
    """A step of a lock has 2 s; then the caller gets `StoreUnavailable`."""
    lock = Lock("k", store=node.url)
    assert lock.acquire(timeout=20)
    lock.release()
    node.freeze()
    with Pulse() as pulse:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable):
            lock.acquire(timeout=0)
        took = time.monotonic() - begun
    node.thaw()
    assert 2.0 - EARLY <= took < 2.0 + pulse.slack


def test_health_looks_for_1_s(node: Node) -> None:
    """`health()` says "down" after at most one second."""
    store = RedisStore(node.url)
    node.freeze()
    with Pulse() as pulse:
        begun = time.monotonic()
        assert store.health().reason == "down"
        took = time.monotonic() - begun
    store.close()
    assert took < 1.0 + pulse.slack
