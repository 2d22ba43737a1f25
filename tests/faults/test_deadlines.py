"""The time that a call may take is a deadline for all that it does, and a caller may give its own."""

import asyncio
import gc
import inspect
import threading
import time
from typing import Any

import pytest

from headgate import AsyncLimiter, Limiter
from tests.support.callers import COLOURS, Callers
from tests.support.clusters import Node, wait_until
from tests.support.proxy import FaultyProxy
from tests.support.pulse import Pulse
from tests.support.stores import OpenStore

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

QUOTA = "100/30d"


def test_connecting_is_a_part_of_it(node: Node) -> None:
    """To log in takes a reply, to decide another, each within the time-out, and both together not."""
    with FaultyProxy(node.port) as proxy, Limiter(QUOTA, store=proxy.url, timeout=0.8) as limiter, Pulse() as pulse:
        proxy.delay = 0.6
        begun = time.monotonic()
        assert limiter.try_acquire("k").degraded
        took = time.monotonic() - begun
    assert took < 0.8 + pulse.slack


@pytest.mark.parametrize("colour", COLOURS)
def test_budget_of_one_call(colour: str, node: Node) -> None:
    """A call with its own time is answered by the policy then; others get the store's answer."""
    with FaultyProxy(node.port) as proxy, Callers(OpenStore(proxy.bare_url), colour) as callers:
        limiter = callers.limiter(QUOTA, timeout=30, on_store_error="allow")
        assert limiter.try_acquire("k").remaining == 99
        hasty = limiter.with_timeout(0.05)
        proxy.delay = 20.0
        with Pulse() as pulse:
            begun = time.monotonic()
            assert hasty.try_acquire("k").degraded
            assert hasty.peek("k").degraded
            took = time.monotonic() - begun
        assert took < 0.1 + pulse.slack
        assert limiter.store_health().degraded == 2, "they share their figures"
        assert limiter.store_health().state == "closed"
        proxy.delay = 0.1
        assert not limiter.try_acquire("k").degraded


async def test_budget_beside_a_patient_call(node: Node) -> None:
    """Two calls of one batch: the one that gives up is given back what it took, the other gets its answer."""
    with FaultyProxy(node.port) as proxy:
        async with AsyncLimiter(QUOTA, store=proxy.url, timeout=30) as limiter:
            assert (await limiter.try_acquire("k")).remaining == 99
            proxy.delay = 20.0
            with Pulse() as pulse:
                begun = time.monotonic()
                patient = asyncio.create_task(limiter.try_acquire("k"))
                await asyncio.sleep(0)
                assert (await limiter.with_timeout(0.05).try_acquire("k")).degraded
                took = time.monotonic() - begun
            assert took < 0.05 + pulse.slack
            proxy.delay = 0.0
            assert (await patient).remaining in (98, 97)
            deadline = time.monotonic() + 20
            while (await limiter.peek("k", permits=0)).remaining != 98:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)


def test_haste(node: Node) -> None:
    """Callers with too little time for a healthy server do not open the breaker, those of a dead one do."""
    with FaultyProxy(node.port) as proxy, Limiter(QUOTA, store=proxy.url, timeout=30) as limiter:
        limiter.try_acquire("k")
        for _ in range(5):
            proxy.delay = 20.0
            assert limiter.with_timeout(0.01).try_acquire("k").degraded
            proxy.delay = 0.0
            assert not limiter.try_acquire("k").degraded
        assert limiter.store_health().opened == 0
    with FaultyProxy(node.port) as proxy, Limiter(QUOTA, store=proxy.url, timeout=1.0) as limiter:
        limiter.with_timeout(20).try_acquire("k")
        proxy.swallow_replies = True
        deadline = time.monotonic() + 20
        while limiter.store_health().state == "closed":
            assert limiter.with_timeout(0.01).try_acquire("k").degraded
            assert time.monotonic() < deadline, "it never opens"


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_limit_above_the_timeout(node: Node, kind: type[Limiter | AsyncLimiter]) -> None:
    """Three calls without an answer open the breaker; `within` changes that only below the store's time-out."""

    async def check(store: str) -> None:
        limiter = kind(QUOTA, store=store, timeout=0.2)
        slow = limiter.with_timeout(5)
        deadline = time.monotonic() + 20
        while (await awaited(slow.try_acquire("k"))).degraded:  # the first connection may take a while
            assert time.monotonic() < deadline
        proxy.swallow_replies = True
        for _ in range(3):
            assert (await awaited(slow.try_acquire("k"))).degraded
        assert limiter.store_health().state == "open"
        if isinstance(limiter, Limiter):
            limiter.close()
        else:
            await limiter.aclose()

    with FaultyProxy(node.port) as proxy:
        asyncio.run(check(proxy.url))


async def awaited(result: Any) -> Any:
    """What a call of either kind of limiter gives."""
    return await result if inspect.isawaitable(result) else result


def test_memory_is_never_late() -> None:
    limiter = Limiter("2/minute")
    assert limiter.with_timeout(0.001).try_acquire("k").remaining == 1
    assert limiter.try_acquire("k").remaining == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", None, True])
def test_bad_budgets(seconds: float) -> None:
    with pytest.raises(ValueError, match="number of seconds above 0"):
        Limiter("1/minute").with_timeout(seconds)


def test_end_of_a_probe(node: Node) -> None:
    """The probe of a limiter that was neither closed nor kept ends."""
    limiter = Limiter(QUOTA, store=node.url, timeout=0.2)
    node.kill()
    for _ in range(5):
        limiter.try_acquire("k")
    assert any(thread.name == "headgate-probe" for thread in threading.enumerate())
    del limiter
    gc.collect()
    wait_until(lambda: all(thread.name != "headgate-probe" for thread in threading.enumerate()), "the probe has ended")
