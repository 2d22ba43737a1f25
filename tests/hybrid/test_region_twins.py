"""The ledgers of regions and home in Python and their scripts in Redis, walked through the same steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headgate.hybrid import script
from headgate.hybrid.protocol import OK, PROFILES, STALE, quota_params
from headgate.hybrid.region_script import (
    HOME,
    REGION,
    REGISTER,
    DepositCall,
    HomeCall,
    RegionCall,
    home_call,
    region_call,
    region_replies,
)
from headgate.hybrid.stock import Deposit, FetchOrder, HomeLedger, RegionLedger, deposit_of, floor_params, register
from headgate.rule import Rule
from headgate.stores.base import LeaseCall
from headgate.stores.redis import RedisStore
from tests.hybrid.test_twins import START, check_fields, some_request
from tests.support.servers import Server

QUOTAS = ["100/second burst 60", "7/second burst 40", "30/minute", "1000000/second burst 1000", "1000/hour"]
STEPS = [
    0,
    7,
    1_500,
    200_000,
    1_000_000,
    6_500_000,
    22_000_000,
    26_000_000,
    30_000_000,
    37_000_000,
    -3_000,
    -2_000_000,
    -40_000_000,
]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_regions_and_scripts_agree(seed: int, any_redis_server: Server) -> None:
    """Region and home give the same replies and orders as their scripts to random steps, and keep the same fields."""
    dice = random.Random(f"regions {seed}")
    store = RedisStore(any_redis_server.url)
    execute, client = store.sync_executor().execute, any_redis_server.client()
    began = given_back = 0
    for quota in QUOTAS:
        whole, share = quota_params(Rule(quota)), dice.choice([50, 333])
        params, other = floor_params(whole, share), floor_params(quota_params(Rule(QUOTAS[0])), 100)
        region, home = RegionLedger(), HomeLedger({})
        here, there, floors = (
            f"rate_limiter:twin:region:{{{quota}}}",
            f"rate_limiter:twin:home:{{{quota}}}",
            f"rate_limiter:twin:floors:{{{quota}}}",
        )
        since = START - dice.choice([0, 1_000_000, START])
        seqs: dict[str, int] = {}
        lids: dict[str, int] = {}
        orders: list[FetchOrder] = []
        deposits: list[Deposit] = []
        following: list[str] = []
        now = START
        for step in range(150):
            if following and dice.random() < 0.8:  # what usually comes next
                kind = following.pop(0)
                now += 50_000
            else:
                kind = dice.choice(["sync", "sync", "home", "deposit"])
                now += dice.choice(STEPS) if dice.random() < 0.2 else dice.choice([1_500, 20_000, 200_000])
            if kind == "home" and orders:
                order = dice.choice([*orders[-2:], *orders[-1:] * 5])
                name, part = dice.choice(["eu", "eu", "us", "ap"]), dice.choice([share, 50, 300])
                ours = home.sync(now, whole, order.request("eu"), name, part)
                call = HomeCall(floors, there, whole, order.request("eu"), name, part)
                [theirs] = script.replies(execute(HOME, home_call([call], now)))
                if isinstance(ours, str):
                    assert isinstance(theirs, str) and "FLOORS" in theirs
                else:
                    assert theirs == ours, f"step {step}: {order}"
                    deposits.append(deposit_of(order, ours))
                assert {name: int(kept) for name, kept in client.hgetall(floors).items()} == home.floors
            elif kind == "deposit" and deposits:
                deposit = dice.choice([*deposits[-2:], *deposits[-1:] * 5])
                if dice.random() < 0.3:
                    deposit = deposit._replace(status=dice.choice([0, 0, 1, 2]), leased_here=deposit.granted)
                taken = region.deposit(now, params, deposit)
                [(answer, none)] = region_replies(
                    execute(REGION, region_call([DepositCall(here, params, deposit)], now))
                )
                assert not isinstance(answer, str) and answer.status == (OK if taken else STALE), (
                    f"step {step}: {answer}"
                )
                assert none is None
            else:
                params_now = other if dice.random() < 0.03 else params
                request, profile = some_request(dice, seqs, lids, whole.limit), PROFILES[dice.choice(sorted(PROFILES))]
                busy = step // 20 % 2 == 0
                demand = dice.choice([whole.speed, whole.speed // 3]) if busy else 0
                request = request._replace(demand=demand, inflow=step % 2)  # no region gives any
                expected = region.sync(now, params_now, profile, request, since)
                call_here = RegionCall(LeaseCall(here, params_now, profile, request), since)
                [found] = region_replies(execute(REGION, region_call([call_here], now)))
                assert found == expected, f"step {step}: {request}"
                if expected[1]:
                    began += 1
                    given_back += expected[1].returned
                    orders.append(expected[1])
                    following = ["home", "deposit"]
                if expected[0].lease_id:
                    lids[request.node] = expected[0].lease_id
            check_stock(client, here, region)
        assert region.base
        region.ledger.params = region.base
        check_fields(any_redis_server, here, region.ledger)
    assert began > 10 and given_back
    store.close()


def check_stock(client: Any, key: str, region: RegionLedger) -> None:
    stock = region.stock
    numbers = [stock.out, stock.ends, stock.lease_id, stock.seq, stock.acked_seq, stock.sent_at, stock.returned]
    numbers += [stock.trip, stock.interval, stock.due, stock.fetch_after]
    kept, free = client.hmget(key, "stock", "free")
    assert (kept or "0:0:0:0:0:0:0:100000:0:0:0") == ":".join(map(str, numbers))
    assert float(free or 0) == region.ledger.free


def test_floors_are_registered_alike(redis_server: Server) -> None:
    """The script of the floors accepts and refuses what `register` does, and says what it knows."""
    store, floors = RedisStore(redis_server.url), dict[str, int]()
    execute = store.sync_executor().execute
    dice = random.Random(1)
    for _ in range(60):
        region, share = dice.choice("abcde"), dice.randint(1, 200)
        first = not floors
        done = register(floors, region, share)
        reply = execute(REGISTER, REGISTER.call(["rate_limiter:floors"], region, share))
        assert [bool(reply[0]), bool(reply[1])] == [done, first]
        kept = redis_server.client().hgetall("rate_limiter:floors")
        assert {name: int(value) for name, value in kept.items()} == floors
    assert sum(floors.values()) > 400
    store.close()


def test_region_constants() -> None:
    """Every placeholder of the scripts is filled in."""
    assert not any("@" in each.text for each in (REGION, HOME, REGISTER))
