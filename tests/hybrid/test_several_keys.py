"""Leases of one key at several stores: no fleet admits one too many while a majority of them is there and intact."""

from __future__ import annotations

import os
import random

import pytest

from headgate.hybrid.protocol import LeaseRequest
from tests.support.hybrid_fleet import QUOTAS
from tests.support.hybrid_several import PROFILE, SeveralFleet, walk

WALKS = int(os.environ.get("HEADGATE_MACHINE_WALKS", "800")) // 8


@pytest.mark.bounded(1800)
@pytest.mark.parametrize("stores", [3, 5])
@pytest.mark.parametrize("kind", QUOTAS)
def test_random_walks(kind: str, stores: int) -> None:
    """Stores die, come back with their state or empty, lose and delay messages, a minority at a time."""
    for seed in range(WALKS if kind != "gcra" else WALKS // 4):
        dice = random.Random(f"{kind} {stores} {seed}")
        fleet = SeveralFleet(kind, QUOTAS[kind][seed % len(QUOTAS[kind])], stores, dice.randint(1, 4), dice)
        try:
            fleet.choose_bad()
            walk(fleet, 80)
            fleet.finish()
        except AssertionError as error:
            raise AssertionError(f"{kind}, {stores} stores, seed {seed}") from error


def fleet_of(quota: str, nodes: int = 1, stores: int = 3, kind: str = "token_bucket") -> SeveralFleet:
    return SeveralFleet(kind, quota, stores, nodes, random.Random(1))


def left(fleet: SeveralFleet, place: int) -> int:
    """Permits that one ledger has, those on lease included."""
    peek = LeaseRequest("peek", "nobody", 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 1)
    reply = fleet.ledgers[place].sync(fleet.true, fleet.params, PROFILE, peek)
    return reply.free // fleet.params.cost + reply.others


def spend_at(fleet: SeveralFleet, place: int, permits: int) -> None:
    """Another process spends so much at one store, which the others do not hear of."""
    request = LeaseRequest("sync", "other", 0, 1, 0, 0, 0, 0, 0, ((permits, 1),), 0, 0, 0, 1)
    fleet.ledgers[place].sync(fleet.true, fleet.params, PROFILE, request)


def test_each_permit_counts_at_every_store() -> None:
    """Stores that have 75, 25 and 100 left lend 25. Two of three would lend 75."""
    fleet = fleet_of("100/360d")
    [node] = fleet.nodes
    fleet.trip(node, 0, [])
    spend_at(fleet, 0, 25)
    spend_at(fleet, 1, 75)
    for _ in range(20):
        fleet.trip(node, 500, [(100, 1)])
        fleet.spend(node, 1, 100)
    assert len(fleet.admitted) == 25


def test_what_is_lent_beyond_goes_back() -> None:
    """The strictest store decides, and the others get back what they have lent beyond it."""
    fleet = fleet_of("100/360d")
    [node] = fleet.nodes
    fleet.trip(node, 0, [])
    spend_at(fleet, 1, 90)
    for _ in range(5):
        fleet.trip(node, 500, [])
    assert node.lease.balance <= 10 * fleet.params.cost
    fleet.spend(node, 1, 4)
    fleet.trip(node, 0, [], op="release")
    assert [left(fleet, place) for place in range(3)] == [96, 6, 96]
    assert not any(ledger.leased_out for ledger in fleet.ledgers)


def test_stores_out_of_step_serve_all_the_same() -> None:
    """Buckets that refill at different moments do not take from callers what no caller gets."""
    fleet = fleet_of("1/second burst 1", nodes=2)
    for place in range(3):
        spend_at(fleet, place, 1)
        fleet.advance(300_000)
    for turn in range(600):
        fleet.trip(fleet.nodes[turn % 2], 0, [(1, 1)])
        fleet.advance(50_000)
    assert 25 <= len(fleet.admitted) <= 31


def test_a_bucket_that_was_full_gets_nothing_back() -> None:
    """It served callers that too few other stores heard of. It has filled since, so that it does not lack them."""
    fleet = fleet_of("10/second")
    [node] = fleet.nodes
    spend_at(fleet, 0, 5)
    fleet.down = {1, 2}
    fleet.trip(node, 0, [(5, 1)])
    assert left(fleet, 0) == 0 and not fleet.admitted
    fleet.advance(1_000_000)
    spend_at(fleet, 0, 10)
    fleet.down = set()
    fleet.trip(node, 0, [])
    assert left(fleet, 0) == 0


def test_a_store_that_was_away_is_charged() -> None:
    """With its state it misses what was spent meanwhile, and counts it with the second request."""
    fleet = fleet_of("100/360d")
    [node] = fleet.nodes
    fleet.trip(node, 500, [])
    fleet.down = {2}
    for _ in range(10):
        fleet.spend(node, 1, 4)
        fleet.trip(node, 500, [])
    assert left(fleet, 2) == 100 and left(fleet, 0) == 60
    fleet.down = set()
    fleet.trip(node, 500, [])
    fleet.trip(node, 500, [])
    assert [left(fleet, place) for place in range(3)] == [60, 60, 60]


@pytest.mark.parametrize("before", [0, 100], ids=["never there", "there before"])
def test_what_was_spent_long_ago_is_not_charged(before: int) -> None:
    """A bucket that had the time to fill is charged what was spent in that time, and not more."""
    fleet = fleet_of("10/second")
    [node] = fleet.nodes
    for step in range(200):
        fleet.down = {2} if step >= before else set()
        fleet.trip(node, 30, [])
        fleet.spend(node, 1, 1)
        fleet.advance(100_000)
    fleet.down = set()
    fleet.trip(node, 30, [])
    fleet.trip(node, 30, [])
    assert -3 <= left(fleet, 2) <= 0 < left(fleet, 0)
    assert len(fleet.admitted) > 150


def test_a_charge_whose_reply_is_lost_counts_once() -> None:
    """What the process gives back then is not taken for spent."""
    fleet = fleet_of("100/360d")
    [node] = fleet.nodes
    fleet.trip(node, 500, [])
    fleet.trip(node, 500, [])
    fleet.down = {2}
    fleet.trip(node, 500, [])
    fleet.spend(node, 1, 8)
    fleet.down = set()
    fleet.trip(node, 500, [])
    fleet.mute = {2}
    fleet.trip(node, 500, [])
    assert [left(fleet, place) for place in range(3)] == [92, 92, 92]
    fleet.mute = set()
    fleet.trip(node, 0, [], op="release")
    assert [left(fleet, place) for place in range(3)] == [92, 92, 92]


def test_a_lease_that_ran_out_pays_for_nothing() -> None:
    """A store that was away since the window before is charged all that was spent in this one."""
    fleet = fleet_of("100/10s", kind="fixed_window")
    [node] = fleet.nodes
    fleet.trip(node, 500, [])
    fleet.down = {2}
    fleet.trip(node, 500, [])
    fleet.trip(node, 0, [])
    fleet.advance(10_000_000)
    fleet.trip(node, 500, [])
    fleet.trip(node, 500, [(30, 1)])
    fleet.down = {0, 1, 2}
    fleet.advance(7_000_000)
    fleet.trip(node, 500, [])
    fleet.down = set()
    fleet.trip(node, 0, [])
    assert left(fleet, 2) == left(fleet, 1) == left(fleet, 0) <= 70


@pytest.mark.parametrize("seen", [True, False], ids=["seen to go", "unseen"])
@pytest.mark.parametrize("kind", ["token_bucket", "fixed_window"])
def test_a_store_that_forgot_is_made_level(kind: str, seen: bool) -> None:
    """One that comes back empty has what the others have left, whether it was seen to go or not."""
    fleet = fleet_of("1000/360d", nodes=2, kind=kind)
    for node in fleet.nodes:
        fleet.trip(node, 50, [(300, 1)])
    fleet.down = {0} if seen else set()
    for node in fleet.nodes:
        fleet.trip(node, 50, [])
    fleet.advance(1_000)
    fleet.forget(0)
    fleet.settle()
    assert left(fleet, 1) == left(fleet, 2) == 400
    assert left(fleet, 0) == 400


def test_a_store_that_comes_back_empty_refuses_nobody() -> None:
    """It is looked at before it is told of a lease that it does not know: for that it would take all that is free."""
    fleet = fleet_of("1000/360d", nodes=2)
    node, other = fleet.nodes
    fleet.trip(node, 50, [(300, 1)])
    fleet.down = {2}
    fleet.trip(node, 50, [])
    fleet.advance(1_000)
    fleet.forget(2)
    fleet.down = set()
    fleet.trip(node, 50, [])
    fleet.trip(other, 0, [(200, 1)])
    assert len(fleet.admitted) == 500


def test_a_level_that_is_set_twice_counts_once() -> None:
    """A store that forgot is set to what the others count; so it is if the reply to that is lost."""
    fleet = fleet_of("1000/360d")
    [node] = fleet.nodes
    fleet.trip(node, 50, [(600, 1)])
    fleet.trip(node, 50, [])
    fleet.advance(1_000)
    fleet.forget(2)
    fleet.trip(node, 50, [])
    assert left(fleet, 2) == 0, "it does not know the lease"
    fleet.mute = {2}
    fleet.trip(node, 50, [])
    fleet.mute = set()
    fleet.trip(node, 50, [])
    assert left(fleet, 2) == 400
    fleet.trip(node, 50, [])
    assert [left(fleet, place) for place in range(3)] == [400, 400, 400]


def test_a_new_process_finds_a_store_that_forgot() -> None:
    """It has seen no store go, and holds nothing; but a store that does not know a key that others know is in doubt."""
    fleet = fleet_of("100/360d", nodes=1)
    fleet.trip(fleet.nodes[0], 0, [(60, 1)])
    fleet.trip(fleet.nodes[0], 0, [], op="release")
    fleet.forget(2)
    fleet.crash()
    fleet.settle()
    assert left(fleet, 2) == 40


def test_what_a_process_holds_stays_on_lease() -> None:
    """No reply reaches it for a while: no store takes for spent what it may spend later."""
    fleet = fleet_of("100/360d")
    [node] = fleet.nodes
    for _ in range(4):
        fleet.trip(node, 500, [])
    fleet.cut = node
    fleet.trip(node, 500, [])
    fleet.cut = None
    for place in range(3):
        spend_at(fleet, place, 100)
    fleet.trip(node, 500, [])
    assert all(ledger.leased_out * fleet.params.cost >= node.lease.balance > 0 for ledger in fleet.ledgers)


def test_too_few_lend_nothing() -> None:
    """With one store of three nothing is granted; what it served goes back, but for what made it less than full."""
    fleet = fleet_of("100/360d")
    [node] = fleet.nodes
    fleet.down = {1, 2}
    for _ in range(3):
        fleet.trip(node, 500, [(10, 1)])
    assert not fleet.admitted and node.lease.balance == 0 and fleet.failed == 3
    fleet.down = {1}
    fleet.trip(node, 500, [(10, 1)])
    fleet.trip(node, 500, [(10, 1)])
    assert len(fleet.admitted) >= 10
    fleet.settle()
    fleet.trip(node, 0, [], op="release")
    assert all(90 <= left(fleet, place) + len(fleet.admitted) <= 100 for place in range(3))
