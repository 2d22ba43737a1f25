"""What a node does by itself: give back in time, remember whom it trusted, probe, forget; and what a fork leaves."""

from __future__ import annotations

import pytest

from headgate.hybrid.lease import MILLISECOND, SECOND
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import PROFILES, LeaseRequest
from tests.hybrid.test_node import CAPACITY, Town
from tests.support.hybrid_alone import Alone


@pytest.mark.parametrize("accuracy", PROFILES)
def test_who_goes_idle_gives_back_in_a_second_however_long_the_pause(accuracy: str) -> None:
    alone = Alone("1000/minute", accuracy=accuracy)
    for _ in range(1300):
        alone.take()
        alone.sleep(0.03)
    assert alone.lease.balance > alone.limiter.params.cost, "it holds a lease"
    assert accuracy == "high" or alone.lease.pause > 2 * SECOND, "and would report much later"
    trips = alone.trips
    alone.sleep(2 * 0.5 + 0.05)
    assert alone.lease.balance <= alone.limiter.params.cost and alone.ledger.out <= 1
    assert alone.trips <= trips + 3
    alone.sleep(21)
    assert alone.ledger.out == 0


def test_who_is_called_now_and_then_keeps_its_lease() -> None:
    """A gap between two calls that is nothing unusual is no end: to give back and to request again would be two trips."""
    alone = Alone("1000/minute", accuracy="low")
    for _ in range(100):
        alone.take()
        alone.sleep(1.0)
    trips = alone.trips
    for _ in range(100):
        alone.take()
        alone.sleep(1.0)
    assert alone.trips - trips < 30


def test_trust_is_not_given_again_before_there_can_be_a_permit() -> None:
    """Whoever has overdrawn a key is remembered: 2 an hour are 2 an hour, whenever the calls come."""
    town = Town(1000, "2/hour")
    granted = 0
    for _ in range(40):
        made = town.limiter.grant_unasked("k", 1, town.now)
        if made is None:
            waiter = town.wait("k")
            while waiter.result is None:
                town.turn()
            made = waiter.answer()
        granted += made.allowed
        for _ in range(10):
            town.now += SECOND // 4
            town.turn()
    assert granted == 2
    for _ in range(7300):  # until there can be one
        town.now += SECOND // 4
        town.turn()
    assert not town.limiter.leases, "then it is forgotten"
    assert town.limiter.grant_unasked("k", 1, town.now)


def test_trust_is_one_call_in_the_time_it_takes_to_pay_for_it() -> None:
    town = Town(1000, "100/hour")
    start, granted = town.now, 0
    while town.now < start + 3600 * SECOND:
        granted += town.limiter.grant_unasked("k", 100, town.now) is not None
        town.now += 5 * SECOND // 2
        town.turn()
    assert granted == 2, "the first was there, the second is one call too many, and is paid for"


def test_two_that_trust_each_other_pay_as_well() -> None:
    """That somebody else holds a lease, and may give it back, is no reason to be trusted again."""
    town = Town(1000, "100/hour")
    params, profile = town.limiter.params, town.limiter.profile
    ledger = town.ledgers["k"] = Ledger()
    other = LeaseRequest("sync", "other", 0, 1, 0, 0, 0, 0, 0, ((80, 1),), 15, 0, 100_000_000, 30_000_000)
    assert ledger.sync(town.now // 1000, params, profile, other).lease > 0
    granted = 0
    for _ in range(10):
        granted += town.limiter.grant_unasked("k", 20, town.now) is not None
        town.now += 5 * SECOND // 2
        town.turn()
    assert granted == 1


def test_the_child_of_a_fork_has_nothing_of_its_parents() -> None:
    town = Town(max_keys=10)
    for key in "ab":
        town.wait(key)
    town.turn()
    town.wait("b")
    town.manager.releases.add(town.limiter.leases.pop("a"))
    town.manager.refill_queue.append(town.limiter.leases["b"])
    old, name = town.manager.lock, town.limiter.node_id
    old.acquire()  # by a thread that is not in the child
    town.manager.after_fork()
    node, table = town.manager, town.limiter
    assert node.lock is not old and table.lock is node.lock
    for release in (table.acquire_lock(), table.release_lock):
        assert release is not False
    assert not (node.waiting or node.leaving or node.thirsty or table.leases)
    assert town.limiter.node_id != name
    town.now += 10 * SECOND
    assert town.gather() == []


def test_what_a_lost_farewell_owed_is_still_owed() -> None:
    town = Town(max_keys=10, policy="allow")
    town.manager.fail(town.now, (), OSError("away"))
    town.wait("x")
    town.manager.releases.add(town.limiter.leases.pop("x"))
    town.now += 2 * SECOND
    items = town.gather()
    assert [(item.request.op, item.request.debt) for item in items] == [("release", 1)]
    town.wait("x")  # met again while that is under way
    town.manager.fail(town.now, items, OSError("away"))
    for _ in range(4):
        town.now += 2 * SECOND
        town.turn()
    free = town.ledgers["x"].free + town.ledgers["x"].out * town.limiter.params.cost
    assert CAPACITY * town.limiter.params.cost - free >= 1.9 * town.limiter.params.cost, "both are charged"


def test_a_reset_while_redis_is_away_forgets_what_is_owed() -> None:
    town = Town(max_keys=10, policy="allow")
    town.manager.fail(town.now, (), OSError("away"))
    for _ in range(3):
        town.wait("x")
    assert town.limiter.leases["x"].debt == 3
    town.wait("x", "reset", 0)
    assert town.limiter.leases["x"].debt == 0


def test_one_key_finds_out_whether_redis_is_back_and_less_and_less_often() -> None:
    town = Town(max_keys=100)
    for number in range(20):
        town.wait(f"k{number}")
    town.manager.fail(town.now, town.gather(), OSError("away"))
    waits = []
    for _ in range(8):
        waits.append(town.manager.health.retry_at - town.now)
        assert town.gather() == [], "not before its time"
        town.now = town.manager.health.retry_at
        town.wait(f"k{len(waits)}")
        probe = town.manager.gather(town.now)
        assert len(probe) == 1
        town.manager.fail(town.now, probe, OSError("away"))
    assert waits[0] < 100 * MILLISECOND and waits[4] > 4 * waits[0] and SECOND // 2 < max(waits) < 2 * SECOND


def test_nobody_is_asked_about_a_key_that_is_ill() -> None:
    """One key is of another type: its callers have the policy's word for a second, and nobody else has."""
    town = Town(max_keys=10)
    bad, good = town.wait("bad"), town.wait("good")
    items = town.gather()
    assert [item.lease.key for item in items] == ["bad", "good"]
    ledger = town.ledgers.setdefault("good", Ledger())
    params, profile = town.limiter.params, town.limiter.profile
    reply = ledger.sync(town.now // 1000, params, profile, items[1].request)
    town.manager.deliver(town.now, items, ["WRONGTYPE of another kind", reply])
    assert bad.answer().degraded and not good.answer().degraded
    assert town.wait("bad").answer().degraded, "at once"
    town.now += 2 * SECOND
    assert town.wait("bad").result is None, "asked again"


def test_the_number_of_processes_is_forgotten_slowly_and_a_new_key_knows_it() -> None:
    """During an outage it is what a share is a share of."""
    town = Town(max_keys=10)
    params, profile = town.limiter.params, town.limiter.profile
    ledger = town.ledgers["x"] = Ledger()
    for number in range(9):
        request = LeaseRequest("sync", f"p{number}", 0, 1, 0, 0, 0, 0, 0, (), 0, 0, 0, 6_000_000)
        ledger.sync(town.now // 1000, params, profile, request)
    town.wait("x")
    town.turn()
    assert town.manager.nodes_seen == 10
    town.wait("y")
    assert town.limiter.leases["y"].nodes == 10
    del town.limiter.leases["x"]
    town.turn()
    assert 8 <= town.manager.nodes_seen < 10, "y is its own, and says nothing of x"


def test_who_was_asked_for_longest_ago_goes_first_but_not_with_a_debt() -> None:
    town = Town(max_keys=4, policy="allow")
    for key in "abcd":
        town.wait(key)
        town.turn()
        town.now += 60 * MILLISECOND
    leases = town.limiter.leases
    leases["a"].debt = 1
    town.wait("e")
    assert "b" not in leases and "a" in leases and {"c", "d", "e"} <= leases.keys()


def test_what_a_key_owes_is_told_though_it_is_given_up() -> None:
    town = Town(max_keys=10, policy="allow")
    town.manager.fail(town.now, (), OSError("away"))
    town.wait("x")
    lease = town.limiter.leases.pop("x")
    town.manager.releases.add(lease)
    assert lease.debt == 1 and lease in town.manager.releases.values()


def test_a_refund_is_told_soon() -> None:
    town = Town(max_keys=10)
    town.wait("x", permits=10)
    for _ in range(100):
        town.turn()
    assert town.limiter.leases["x"].due > town.now + SECOND // 4, "it has nothing to say"
    town.limiter.refund("x", 5)
    requests = [item.request for item in town.gather()]
    assert [request.refund for request in requests] == [5]


def test_who_joins_during_an_outage_hears_of_it() -> None:
    town = Town(max_keys=10)
    town.manager.fail(town.now, (), OSError("away"))
    assert town.wait("x").answer().degraded
    assert isinstance(town.manager.health.down, OSError)
    town.now += 2 * SECOND
    town.answer(town.gather())
    assert town.manager.health.down is None
