"""Limiters in regions on real servers: home behind a proxy that cuts it off and joins it again."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headgate import AsyncHybridLimiter, HybridLimiter, Limiter
from headgate.errors import StoreUnavailable
from headgate.hybrid.protocol import quota_params
from headgate.hybrid.stock import SHARES, floor_params
from headgate.rule import Rule
from headgate.stores import RedisStore
from headgate.testing import ManualClock
from tests.support.clocks import until
from tests.support.hybrid_exact import overdrawn
from tests.support.proxy import FaultyProxy
from tests.support.servers import Server

RATE = 1000
CUT_SECONDS = float(os.environ.get("HEADGATE_CUT_SECONDS", "1.2"))  # `make soak` cuts for a minute
CUTS = int(os.environ.get("HEADGATE_CUTS", "1"))
WIDE = "100000/30d"  # nothing refills while a test runs


class Caller(threading.Thread):
    """Calls one limiter so often a second, and notes when an admitted call began and ended."""

    def __init__(self, limiter: HybridLimiter, rate: float) -> None:
        super().__init__(daemon=True)
        self.limiter, self.rate = limiter, rate
        self.calls: list[tuple[int, int]] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        began, asked = time.monotonic(), 0
        while not self.stopped.wait(0.004):
            due = int((time.monotonic() - began) * self.rate)
            for _ in range(due - asked):
                before = time.time_ns()
                if self.limiter.try_acquire("hot"):
                    self.calls.append((before, time.time_ns()))
            asked = due

    def between(self, start: int, end: int) -> int:
        return sum(start <= before and after <= end for before, after in self.calls)


@contextmanager
def calling(limiters: list[HybridLimiter], rate: float) -> Iterator[list[Caller]]:
    callers = [Caller(limiter, rate) for limiter in limiters]
    for caller in callers:
        caller.start()
    try:
        yield callers
    finally:
        for caller in callers:
            caller.stopped.set()
        for caller in callers:
            caller.join()


@pytest.mark.bounded(600)
def test_a_cut_between_region_and_home(redis_server: Server, mortal_server: Server) -> None:
    """Cut apart and joined again, both sides go on serving, and together never admit one too many."""
    dice = random.Random(7)
    with FaultyProxy(redis_server.port) as proxy:
        home = proxy.bare_url + "?timeout=0.5"
        eu = HybridLimiter(
            f"{RATE}/second", store=mortal_server.url, home=home, region="eu", on_store_error="deny", floor=0.1
        )
        us = HybridLimiter(
            f"{RATE}/second",
            store=redis_server.url,
            home=redis_server.url,
            region="us",
            on_store_error="deny",
            floor=0.1,
        )
        with calling([eu, us], RATE * 0.7) as (in_eu, in_us):
            until(lambda: min(eu.stats().region.fetches, us.stats().region.fetches) > 1)  # type: ignore[union-attr]
            for _ in range(CUTS):
                proxy.swallow_requests = True
                proxy.cut()
                began = time.time_ns()
                time.sleep(CUT_SECONDS * dice.uniform(0.8, 1.2))
                until(lambda: eu.stats().region.home == "down")  # type: ignore[union-attr]
                ended = time.time_ns()
                seconds = (ended - began) / 1e9
                served, served_home = in_eu.between(began, ended), in_us.between(began, ended)
                assert served >= 0.5 * 0.1 * RATE * seconds, (
                    f"the floor brings {0.1 * RATE * seconds:.0f}, {served} served"
                )
                print(f"cut for {seconds:.1f} s: {served / seconds:.1f}/s in eu, {served_home / seconds:.1f}/s in us")
                assert served_home >= 0.3 * RATE * seconds, f"home has 0.9 of the rate, {served_home} served"
                fetches = eu.stats().region.fetches  # type: ignore[union-attr]
                proxy.swallow_requests = False
                proxy.cut()
                until(lambda seen=fetches: eu.stats().region.fetches > seen + 1)  # type: ignore[union-attr]
                time.sleep(0.3 * CUT_SECONDS)
            assert eu.stats().region.home == "up"  # type: ignore[union-attr]
        calls = [*in_eu.calls, *in_us.calls]
        assert overdrawn(RATE, RATE, calls) == 0
        eu.close()
        us.close()


def test_accuracy_of_a_region(redis_server: Server) -> None:
    """A limiter with a home is of high accuracy, and says so."""
    for accuracy in ("low", 5.0):
        with pytest.raises(ValueError, match="a limiter with a home takes accuracy='high', got"):
            HybridLimiter(WIDE, store=redis_server.url, home=redis_server.url, region="eu", accuracy=accuracy)


def test_regions_share_what_home_has(redis_server: Server, mortal_server: Server) -> None:
    """Two regions that take all they can get admit the quota between them, and not one more."""
    clock = ManualClock()
    quota = "1000/30d"
    first = HybridLimiter(quota, store=mortal_server.url, home=redis_server.url, region="eu", floor=0.1, clock=clock)
    second = HybridLimiter(quota, store=redis_server.url, home=redis_server.url, region="us", floor=0.1, clock=clock)
    assert first.try_acquire("k") and first.stats().region.floor == 0.1  # type: ignore[union-attr]
    admitted = 1

    def take() -> bool:
        nonlocal admitted
        clock.advance(0.2)
        admitted += sum(bool(limiter.try_acquire("k")) for limiter in (first, second) for _ in range(20))
        return admitted >= 890

    until(take)  # the floor of the second region is empty at first and takes days to fill: 900 of 1000
    for _ in range(50):
        take()
    assert 890 <= admitted <= 900
    first.close()
    second.close()


def test_the_floor_of_a_region_that_home_knows(redis_server: Server, mortal_server: Server) -> None:
    """A process that starts while home is away finds the region's floor in the region, whole for a new key."""
    with FaultyProxy(redis_server.port) as proxy:
        home = proxy.bare_url + "?timeout=0.3"
        with HybridLimiter(WIDE, store=mortal_server.url, home=home, region="eu") as limiter:
            assert limiter.try_acquire("a")
        proxy.swallow_requests = True
        proxy.cut()
        with HybridLimiter(WIDE, store=mortal_server.url, home=home, region="eu") as limiter:
            decisions = [limiter.try_acquire("b") for _ in range(5200)]
            assert sum(bool(decision) for decision in decisions) == 5000
            assert not any(decision.degraded for decision in decisions)


def test_a_region_that_home_does_not_know(redis_server: Server, mortal_server: Server) -> None:
    """A region without a promise of home has nothing to lease: the policy answers until home is there."""
    with FaultyProxy(redis_server.port) as proxy:
        proxy.swallow_requests = True
        home = proxy.bare_url + "?timeout=0.1"
        limiter = HybridLimiter(WIDE, store=mortal_server.url, home=home, region="eu", on_store_error="raise")
        with pytest.raises(StoreUnavailable, match="has not promised region 'eu' a floor"):
            limiter.try_acquire("k")
        assert limiter.stats().region.home == "down"  # type: ignore[union-attr]
        proxy.swallow_requests = False
        proxy.cut()

        def admitted() -> bool:
            try:
                return bool(limiter.try_acquire("k"))
            except StoreUnavailable:
                return False

        until(admitted)
        limiter.close()


def test_floors_beyond_half(redis_server: Server, mortal_server: Server) -> None:
    """Home refuses a floor with which all would be more than half of the quota, and says what it has promised."""
    with HybridLimiter(WIDE, store=redis_server.url, home=redis_server.url, region="us", floor=0.3) as first:
        assert first.try_acquire("k")
    second = HybridLimiter(
        WIDE, store=mortal_server.url, home=redis_server.url, region="eu", floor=0.3, on_store_error="raise"
    )
    with pytest.raises(StoreUnavailable, match=r"at most 0\.5 of the quota; home has promised us 0\.3"):
        second.try_acquire("k")
    second.close()


def test_tasks(redis_server: Server, mortal_server: Server) -> None:
    """`AsyncHybridLimiter` fetches from home in a task, and closes in the midst of it."""

    async def take() -> None:
        store = RedisStore(mortal_server.url)
        async with AsyncHybridLimiter("1000/second", store=store, home=redis_server.url, region="eu") as limiter:

            async def fetched() -> bool:
                for _ in range(30):
                    await limiter.try_acquire("k")
                await asyncio.sleep(0.005)
                region = (await limiter.stats_async()).region
                return region is not None and region.fetched > 100

            deadline = time.monotonic() + 60
            while not await fetched():
                assert time.monotonic() < deadline
            region = limiter.stats().region
            assert region and region.home == "up" and region.name == "eu" and region.trip_seconds > 0
        await store.aclose()

    asyncio.run(take())


def test_other_limiters_are_apart(redis_server: Server) -> None:
    """A limiter without a home on the same Redis and of the same name has a limit of its own."""
    with (
        HybridLimiter("10/30d", store=redis_server.url) as plain,
        HybridLimiter("10/30d", store=redis_server.url, home=redis_server.url, region="eu", floor=0.5) as regional,
    ):
        assert sum(bool(plain.try_acquire("k")) for _ in range(12)) == 10
        assert sum(bool(regional.try_acquire("k")) for _ in range(5)) == 5
        assert plain.stats().region is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"region": "eu"}, "region and floor are for a limiter with a home"),
        ({"floor": 0.1}, "region and floor are for a limiter with a home"),
        ({"home": "redis://localhost:1"}, "needs the name of its region too"),
        ({"home": "redis://localhost:1", "region": "e u"}, "region must be 1 to 40 letters"),
        (
            {"home": "redis://localhost:1", "region": "eu", "floor": 0},
            r"floor must be a share of the quota from 0\.001",
        ),
        ({"home": "redis://localhost:1", "region": "eu", "floor": 0.6}, "floor must be a share of the quota"),
        ({"home": "redis://localhost:1", "region": "eu", "floor": True}, "floor must be a share of the quota"),
        ({"home": "redis://localhost:1", "region": "eu", "floor": 0.0505}, "a whole number of thousandths"),
        ({"home": "memory://", "region": "eu"}, "home must be one Redis server"),
        ({"home": "redis+cluster://localhost:1", "region": "eu"}, "got a Redis Cluster"),
        ({"home": "redis://localhost:1", "region": "eu", "store": "shared://x"}, "keeps its leases in a Redis"),
        ({"home": "redis://localhost:1", "region": "eu", "algorithm": "fixed_window"}, "regions serve token_bucket"),
        ({"home": "redis://localhost:1", "region": "eu", "quota": "10/s"}, r"less than one permit: give floor=0\.1"),
        ({"home": "redis://localhost:1", "region": "eu", "quota": "997/365d"}, "too fine"),
        ({"home": 7, "region": "eu"}, "store must be a URL"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
@pytest.mark.parametrize("kind", [HybridLimiter, AsyncHybridLimiter])
def test_arguments(kind: type[Limiter], arguments: dict[str, object], message: str) -> None:
    """A wrong argument is refused at once, with what would be right."""
    given = {"quota": "1000/second", "store": "redis://localhost:1"} | arguments
    with pytest.raises(ValueError, match=message):
        kind(given.pop("quota"), **given)  # type: ignore[arg-type]


def test_floors_and_home_add_up() -> None:
    """Floors and home's part are never more than the quota, in permits and in rate."""
    whole = quota_params(Rule("7/second burst 40"))
    for share in (1, 50, 333, 500):
        floor = floor_params(whole, share)
        assert floor.limit == 40 * share // SHARES
        assert floor.rate * whole.cost * SHARES == whole.rate * share * floor.cost
