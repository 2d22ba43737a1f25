"""Leases that refill by themselves: what comes in and what does not, what callers are told, and which accuracies."""

from __future__ import annotations

from math import inf, nan

import pytest

from headgate.hybrid.inflow import Inflow, inflow_of
from headgate.hybrid.lease import SECOND, Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.manager import LeaseManager
from headgate.hybrid.protocol import PARTS, PROFILES, LeaseReply, LeaseRequest, accuracy_profile, quota_params
from headgate.hybrid.table import LeaseTable
from headgate.rule import Rule

RULE = Rule("100/second burst 100")
PARAMS, PROFILE = quota_params(RULE), PROFILES["low"]
COST, TRIP = PARAMS.cost, SECOND // 1000


class TwoProcesses:
    """A lease with inflow on a ledger that another process asks too, with as much demand."""

    def __init__(self, waiting: tuple[tuple[int, int], ...] = ((100, 1),)) -> None:
        self.ledger, self.lease, self.now, self.seq = Ledger(), Lease("k", 0, 0), SECOND, 0
        other = LeaseRequest("sync", "other", 0, 1, 0, 0, 0, 0, 0, waiting, 0, 0, 100_000, 60_000_000)
        self.ledger.sync(self.now // 1000, PARAMS, PROFILE, other)
        self.trip()

    def report(self, waiting: tuple[tuple[int, int], ...] = ()) -> LeaseRequest:
        self.lease.count_demand(self.now, PARAMS, ())
        self.lease.demand, self.lease.last_call_at = 100.0, self.now
        self.seq += 1
        return self.lease.report(self.now, self.seq, "me", PARAMS, PROFILE, TRIP, "sync", waiting)

    def accept(self, request: LeaseRequest, reply: LeaseReply) -> LeaseReply:
        assert self.lease.accept(self.now, reply, request, PARAMS, PROFILE, TRIP)
        return reply

    def trip(self, waiting: tuple[tuple[int, int], ...] = ()) -> LeaseReply:
        request = self.report(waiting)
        return self.accept(request, self.ledger.sync(self.now // 1000, PARAMS, PROFILE, request))

    @property
    def inflow(self) -> Inflow:
        assert self.lease.inflow is not None
        return self.lease.inflow


def test_half_the_rate_comes_in() -> None:
    """Of two processes with equal demand each gets half the rate, and the ledger refills by so much less."""
    pair = TwoProcesses()
    reply = pair.trip()
    assert round(reply.inflow / PARTS, 2) == 0.5 and reply.granted == 0 and reply.room > 20
    pair.now += SECOND // 4
    pair.lease.add_inflow(pair.now)
    assert 12 <= pair.lease.balance / COST <= 12.5
    pair.ledger.sync(pair.now // 1000, PARAMS, PROFILE, pair.report())
    assert pair.ledger.free / COST <= 12.5, "the other half"


def test_full_lease_gets_nothing() -> None:
    """What would come into a full lease is lost, also if all of it is spent a moment later."""
    pair = TwoProcesses()
    pair.trip()
    pair.now += 3 * SECOND
    pair.lease.add_inflow(pair.now)
    assert pair.lease.balance == pair.inflow.room
    pair.now += SECOND
    pair.lease.balance = 0
    pair.lease.add_inflow(pair.now)
    assert pair.lease.balance == 0


def test_full_lease_gets_nothing_in_a_trip() -> None:
    """Nor does a trip bring anything to a lease that was full when it began."""
    pair = TwoProcesses()
    pair.trip()
    pair.now += 3 * SECOND
    request = pair.report(((90, 1),))  # all of the lease goes back, for the callers that wait
    reply = pair.ledger.sync(pair.now // 1000, PARAMS, PROFILE, request)
    assert reply.room > 0 and reply.inflow > 0
    pair.now += SECOND
    pair.accept(request, reply)
    assert pair.lease.balance == reply.granted * COST


def test_fast_clock() -> None:
    """A clock that runs fast by nearly a thousandth brings no more than the ledger withholds."""
    inflow = inflow_of(LeaseReply(0, leased_here=0, room=10**6, inflow=PARTS // 2), PARAMS, 0, 0)
    assert inflow.add(int(1000 * SECOND * 1.0009), 0) <= 1_000_000_000 * PARAMS.rate // 2


def test_refund_into_a_full_lease() -> None:
    """A refund goes into the lease only as far as callers have spent since inflow was added; the rest is reported."""
    pair = TwoProcesses()
    pair.trip()
    now = pair.now + 3 * SECOND
    table = LeaseTable(LeaseManager(lambda: now), RULE, "deny")
    table.leases["k"] = pair.lease
    assert table.try_acquire("k") and table.try_acquire("k")
    pair.lease.balance -= 20 * COST
    pair.lease.add_inflow(now)
    room = pair.inflow.room
    while pair.lease.balance < room:  # what comes in takes the place of what was spent
        now += SECOND
        pair.lease.add_inflow(min(now, pair.lease.expires - 1))
    now = pair.now + 3 * SECOND
    table.refund_locally("k", 10)
    assert pair.lease.balance == room and pair.lease.refund == 10


def test_denied_until_it_has_come_in() -> None:
    """A caller that is denied is told when enough will have come in, and is served then, without a trip."""
    pair = TwoProcesses()
    pair.lease.report_interval = SECOND
    pair.trip()
    clock = [pair.now]
    table = LeaseTable(LeaseManager(lambda: clock[0]), RULE, "deny")
    table.leases["k"] = pair.lease
    denied = table.try_acquire("k", 3)
    assert not denied and 0.06 < denied.retry_after < 0.1
    clock[0] += int(denied.retry_after * SECOND)
    assert table.try_acquire("k", 3)
    assert table.try_acquire("k", 90) is None, "more than the lease has room for: only Redis knows"


def test_one_process_has_no_inflow() -> None:
    """A process that is alone at its key asks Redis, so that its retry times are exact."""
    ledger = Ledger()
    alone = LeaseRequest("sync", "me", 0, 1, 0, 0, 0, 0, 0, ((100, 1),), 50, 0, 100_000, 6_000_000, 1)
    assert ledger.sync(1_000_000, PARAMS, PROFILE, alone).inflow == 0


def test_accuracies() -> None:
    """An accuracy is a name, in any case, or the seconds between two reports."""
    assert accuracy_profile("LOW") == accuracy_profile(30) == accuracy_profile(30.0)
    assert accuracy_profile("medium") == accuracy_profile(5)
    assert accuracy_profile("high").inflow == 0 and accuracy_profile(0.5).longest == 500_000


@pytest.mark.parametrize("wrong", ["best", "30", 0.4, 300.5, 0, -1, nan, inf, True, None, [], {}], ids=repr)
def test_wrong_accuracies(wrong: object) -> None:
    with pytest.raises(
        ValueError, match=r"one of high, medium, low, or the seconds between two reports, from 0.5 to 300"
    ):
        accuracy_profile(wrong)
