"""A floor: a call is allowed only if that share of the capacity remains, so that other callers find it."""

import asyncio
import random
from typing import Any

import pytest

from headgate import Decision, HybridLimiter, Limiter
from headgate.errors import InvalidPermits, PermitsExceedLimit
from headgate.testing import ManualClock
from tests.support.callers import Callers
from tests.support.clocks import until
from tests.support.quotas import LAWS
from tests.support.servers import Server
from tests.support.stores import OpenStores, ThreeServers, rows, service, three_servers

QUOTAS: list[list[str]] = [["10/30d"], ["7/second"], ["10/minute", "25/10m"]]


@pytest.fixture(params=rows(lambda row: row.whole or row.open in (service, three_servers)))
def callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Any:
    """Callers of every store that takes floors."""
    name, colour = request.param
    with Callers(open_stores.empty(name), colour) as callers:
        yield callers


@pytest.mark.parametrize("algorithm", LAWS)
def test_floor(algorithm: Any, callers: Callers) -> None:
    """With floor=0.25 of 10, calls pass while 3 remain afterwards; calls without one can have all."""
    limiter = callers.limiter("10/30d", algorithm=algorithm, clock=ManualClock())
    made = [limiter.try_acquire("k", floor=0.25) for _ in range(8)]
    assert [decision.allowed for decision in made] == [True] * 7 + [False]
    assert [decision.remaining for decision in made] == [9, 8, 7, 6, 5, 4, 3, 3]
    assert made[-1].retry_after > 0
    assert limiter.try_acquire("k", 3) and not limiter.try_acquire("k", floor=0)
    assert limiter.try_acquire("new", 7, floor=0.25)


@pytest.mark.server
@pytest.mark.once
@pytest.mark.parametrize("agree", ["first", "majority"])
def test_several_stores(agree: Any, open_stores: OpenStores) -> None:
    """Each store that is asked leaves the share; a call that one of them refuses is spent at none."""
    opened = open_stores.empty("majority")
    assert isinstance(opened, ThreeServers)
    urls = [server.url for server in opened.servers]
    with (
        Limiter("10/30d", store=urls, agree=agree, on_store_error="raise") as limiter,
        Limiter("10/30d", store=urls[-1], on_store_error="raise") as last,
    ):
        assert last.try_acquire("k", 2)
        made = [limiter.try_acquire("k", floor=0.25).allowed for _ in range(8)]
        assert made == [True] * (5 if agree == "majority" else 7) + [False] * (3 if agree == "majority" else 1)
        assert last.peek("k", 0).remaining == (3 if agree == "majority" else 8)


@pytest.mark.parametrize("row", rows(lambda row: row.whole or row.open is service, ("async",)))
def test_cancelled_call(row: tuple[str, str], open_stores: OpenStores) -> None:
    """A task that is cancelled while its call with a floor is under way spends nothing."""
    with Callers(open_stores.empty(row[0]), row[1]) as callers:
        limiter: Any = callers.limiter("1000/30d")

        async def cancel_all() -> list[Any]:
            tasks = [asyncio.create_task(limiter.limiter.try_acquire("k", 2, floor=0.25)) for _ in range(20)]
            for _ in range(3):  # turns of the event loop, after which the calls are sent
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        limiter.peek("k")
        granted = sum(2 for _ in range(5) for made in callers.run(cancel_all()) if isinstance(made, Decision))
        until(lambda: limiter.peek("k", 0).remaining == 1000 - granted)


@pytest.mark.parametrize("quotas", QUOTAS, ids=str)
@pytest.mark.parametrize("algorithm", LAWS)
def test_a_floor_is_a_peek_and_a_take(algorithm: Any, quotas: list[str], callers: Callers) -> None:
    """On random walks a call with a floor is what a look at more permits says, and waiting `retry_after` is enough."""
    chosen, clock = random.Random(3), ManualClock()
    limiter = callers.limiter(quotas, algorithm=algorithm, clock=clock)
    capacity = min(int(quota.partition("/")[0]) for quota in quotas)
    for _ in range(int(60 * callers.share)):
        permits, floor = chosen.randint(1, 2), chosen.choice([0.1, 0.3, 0.55])
        reserves = [-(-int(quota.partition("/")[0]) * round(floor * 100) // 100) for quota in quotas]
        if len(quotas) == 1:
            expected = limiter.peek("k", permits + reserves[0])
            made = limiter.try_acquire("k", permits, floor=floor)
            assert made.allowed == expected.allowed and made.retry_after == expected.retry_after
        else:
            made = limiter.try_acquire("k", permits, floor=floor)
        if not made and made.retry_after < 4000:
            clock.advance(made.retry_after)
            assert limiter.try_acquire("k", permits, floor=floor)
        if chosen.random() < 0.3:
            limiter.try_acquire("k", chosen.randint(1, capacity))
        clock.advance(chosen.choice([0, 0, 0.2, 5]))


@pytest.mark.parametrize(
    ("permits", "floor", "error", "words"),
    [
        (1, 1, ValueError, "floor must be a share"),
        (1, -0.1, ValueError, "floor must be a share"),
        (1, "0.2", ValueError, "floor must be a share"),
        (1, True, ValueError, "floor must be a share"),
        (9, 0.2, PermitsExceedLimit, "at most 8, what the capacity has above a floor of 0.2"),
        (0, 0.2, InvalidPermits, "at least 1"),
    ],
)
def test_bad_arguments(permits: Any, floor: Any, error: type[Exception], words: str) -> None:
    limiter = Limiter("10/30d")
    with pytest.raises(error, match=words):
        limiter.try_acquire("k", permits, floor=floor)
    assert limiter.peek("k", 0).remaining == 10


def test_where_there_is_no_floor(redis_server: Server) -> None:
    """A hybrid limiter says where floors are."""
    with HybridLimiter("10/30d", store=redis_server.url) as limiter, pytest.raises(ValueError, match="floor= needs a"):
        limiter.try_acquire("k", floor=0.2)


@pytest.mark.parametrize("policy", ["allow", "deny", "local"])
def test_outages(policy: Any) -> None:
    """In an outage the policy answers, local with the floor."""
    url = "redis://127.0.0.1:1?connect_timeout=0.2&timeout=0.2"
    with Limiter("10/30d", store=url, on_store_error=policy) as limiter:
        made = [limiter.try_acquire("k", 4, floor=0.5) for _ in range(2)]
    assert all(decision.degraded for decision in made)
    assert [decision.allowed for decision in made] == {"allow": [1, 1], "deny": [0, 0], "local": [1, 0]}[policy]
