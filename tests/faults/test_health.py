"""What a limiter says of its store: in use, or answered for by the policy; and what the store says of itself."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate import Limiter
from headgate.redis.health import HEALTH_TIMEOUT
from headgate.stores.base import Health
from headgate.stores.redis import RedisStore
from tests.support.clusters import Node, wait_until
from tests.support.outages import OUTAGES, paused
from tests.support.proxy import FaultyProxy
from tests.support.pulse import Pulse

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

TIMEOUTS = "?timeout=0.2&connect_timeout=0.2"
PATIENT = "?timeout=20&connect_timeout=20"


def test_open_breaker(node: Node) -> None:
    """Thousands of calls in the outage, and only the probe knocks: a handful of times a second."""
    with FaultyProxy(node.port) as proxy, Limiter("1000/30d", store=proxy.bare_url + TIMEOUTS) as limiter:
        limiter.try_acquire("k")
        proxy.swallow_replies = True
        for _ in range(20):
            assert limiter.try_acquire("k").degraded
        before, begun, calls = len(proxy.connections), time.monotonic(), 0
        while (took := time.monotonic() - begun) < 1.0 or calls < 2_000:
            assert limiter.try_acquire("k").degraded
            calls += 1
        assert len(proxy.connections) - before <= 10 * took


# what health() is to say in each outage; "" for any reason
REASONS = {
    "killed": "down",
    "frozen": "down",
    "replies lost": "down",
    "requests lost": "down",
    "late": "",
    "out of memory": "out of memory",
    "read-only": "read-only",
    "busy script": "",
    "loading": "loading",
}


ANSWERS = ("out of memory", "read-only", "loading")  # a server that is asked, however slow the machine


@pytest.mark.parametrize("outage", REASONS)
def test_health_names_the_reason(outage: str, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def health() -> Health:
        store = RedisStore(proxy.bare_url + timeouts)
        seen = store.health()
        store.close()
        return seen

    async def ahealth() -> Health:
        store = RedisStore(proxy.bare_url + timeouts)
        seen = await store.ahealth()
        await store.aclose()
        return seen

    with FaultyProxy(node.port) as proxy:
        timeouts = PATIENT
        wait_until(lambda: health().healthy and asyncio.run(ahealth()).healthy, "it is healthy")
        with OUTAGES[outage](node, proxy), Pulse() as pulse, monkeypatch.context() as patch:
            within = 20.0 if outage in ANSWERS else HEALTH_TIMEOUT
            patch.setattr("headgate.stores.resp_store.HEALTH_TIMEOUT", within)
            timeouts = PATIENT if outage in ANSWERS else TIMEOUTS
            begun = time.monotonic()
            with ThreadPoolExecutor(1) as thread:
                of_threads = thread.submit(health)
                both = asyncio.run(ahealth()), of_threads.result()
            for seen in both:
                assert not seen.healthy
                assert seen.reason == (REASONS[outage] or seen.reason) != "ok"
                assert seen.problems or seen.reason != "down"
            took = time.monotonic() - begun
        assert took < within + 1.0 + pulse.slack
        timeouts = PATIENT
        wait_until(lambda: health().healthy and asyncio.run(ahealth()).healthy, "it is healthy again")


def test_slower_than_a_check_may_be(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, but each time too late: named so, within a second in all, however many questions there are."""
    with FaultyProxy(node.port) as proxy:
        # a machine that stands still would use up a second
        monkeypatch.setattr("headgate.stores.resp_store.HEALTH_TIMEOUT", 20.0)
        store = RedisStore(proxy.url, timeout=0.1, connect_timeout=20)
        proxy.delay = 0.15
        with Pulse() as pulse:
            begun = time.monotonic()
            seen = store.health()
            took = time.monotonic() - begun
        store.close()
        assert (seen.healthy, seen.reason) == (False, "slow")
        assert seen.latency > 0.1
        assert took < 1.5 + pulse.slack


def test_a_pool_that_is_exhausted(node: Node) -> None:
    """Checks are held up, and those that come behind find no connection; the look at the server has its own."""
    store = RedisStore(node.url, timeout=50, max_connections=2)
    with Limiter("1000/30d", store=store) as limiter:
        limiter.try_acquire("k")
        threads = [threading.Thread(target=limiter.try_acquire, args=("k",)) for _ in range(5)]
        with paused(node):
            for thread in threads:
                thread.start()
            wait_until(lambda: store.sync_executor().connections()[0].waiting == 3, "three wait for two connections")
            seen = limiter.health()
        for thread in threads:
            thread.join()
    assert (seen.healthy, seen.reason) == (False, "pool exhausted")
    assert seen.connections == {"in_use": 2, "idle": 0, "waiting": 3}
    assert "max_connections" in seen.problems[-1]
    store.close()
