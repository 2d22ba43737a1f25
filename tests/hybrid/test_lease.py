"""One lease and one ledger, step by step: what is taken, given back, lost, burned and refused."""

from __future__ import annotations

from typing import Any

from headgate.hybrid.lease import DENY_UNASKED, DROP_RESERVE_AFTER, MARGIN, MILLISECOND, SECOND, TTL, Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import OK, PROFILES, STALE, VOID, LeaseReply, LeaseRequest, quota_params
from headgate.rule import Rule
from tests.support.hybrid_exact import check_ledger

STYLE = PROFILES["high"]
TRIP = MILLISECOND


class Pair:
    """A lease here, a ledger there, one clock for both."""

    def __init__(self, quota: str, algorithm: str = "token_bucket") -> None:
        self.params = quota_params(Rule(quota, algorithm))
        self.profile = STYLE
        self.ledger = Ledger()
        self.lease = Lease("k", 0, 0)
        self.now = SECOND  # nanoseconds
        self.seq = 0

    def report(
        self, op: str = "sync", waiting: tuple[tuple[int, int], ...] = (), demand: float | None = None
    ) -> LeaseRequest:
        if demand is not None:
            self.lease.count_demand(self.now, self.params, ())
            self.lease.demand, self.lease.last_call_at = demand, self.now
        self.seq += 1
        return self.lease.report(self.now, self.seq, "me", self.params, self.profile, TRIP, op, waiting)

    def send(self, request: LeaseRequest) -> LeaseReply:
        return self.ledger.sync(self.now // 1000, self.params, self.profile, request)

    def accept(self, request: LeaseRequest, reply: LeaseReply) -> bool:
        return self.lease.accept(self.now, reply, request, self.params, self.profile, TRIP)

    def trip(
        self, op: str = "sync", waiting: tuple[tuple[int, int], ...] = (), demand: float | None = None
    ) -> LeaseReply:
        request = self.report(op, waiting, demand)
        reply = self.send(request)
        self.accept(request, reply)
        return reply

    def spend(self, permits: int) -> None:
        assert self.now < self.lease.expires
        self.lease.balance -= permits * self.params.cost
        assert self.lease.balance >= 0

    @property
    def held(self) -> int:
        return self.lease.balance // self.params.cost

    @property
    def free(self) -> int:
        return self.ledger.free // self.params.cost


def leased(quota: str = "100/hour", demand: float = 100.0) -> Pair:
    """A pair whose lease holds something."""
    pair = Pair(quota)
    pair.trip(demand=demand)
    pair.trip(demand=demand)
    assert pair.held > 0
    return pair


def test_lease_is_part_of_the_capacity() -> None:
    """What is free and what is leased add up to the capacity."""
    pair = leased()
    assert pair.held == pair.ledger.leased_out
    assert pair.free + pair.held == 100


def test_lease_follows_demand() -> None:
    """A lease grows with demand, up to the part of the capacity that the profile allows."""
    held = [leased("1000/hour", demand).held for demand in (5.0, 100.0, 1000.0, 100_000.0)]
    assert held == sorted(held) and held[0] >= 1
    assert held[-1] <= STYLE.leased


def test_waiters_are_decided_in_redis() -> None:
    """A waiter is decided by the ledger, after everything that was held has gone back."""
    pair = leased("10/hour")
    held = pair.held
    assert held
    reply = pair.trip(waiting=((1, 10),), demand=0.0)
    assert reply.free_before == 10 * pair.params.cost, "what was held here counts there"
    assert pair.free == 0 and pair.ledger.leased_out == 0


def test_lost_reply() -> None:
    """The ledger takes back a grant whose reply was lost; the lease ignores the late reply."""
    pair = leased()
    request = pair.report(demand=400.0)
    reply = pair.send(request)
    assert reply.granted > 0
    pair.lease.lose_reply(pair.now, request)
    pair.trip(demand=400.0)
    assert not pair.accept(request, reply), "it came too late: the ledger has taken it back"
    assert pair.held == pair.ledger.leased_out
    assert pair.free + pair.held == 100


def test_lost_return() -> None:
    """Permits that were given back in a lost report are given back in the next."""
    pair = leased()
    held = pair.held
    lost = pair.report(demand=0.0)  # gives back all but a spare, and is lost on the way
    assert pair.held <= 1 < held
    pair.lease.lose_reply(pair.now, lost)
    pair.trip(demand=0.0)
    assert pair.free + pair.held == 100


def test_old_request() -> None:
    """A request that arrives after a later one changes nothing."""
    pair = leased()
    old = pair.report(demand=50.0)
    pair.lease.lose_reply(pair.now, old)
    pair.trip(demand=50.0)
    before = (pair.ledger.free, pair.ledger.leased_out)
    assert pair.send(old).status == STALE
    assert (pair.ledger.free, pair.ledger.leased_out) == before


def test_expires_before_the_ledger() -> None:
    """A lease ends in its process before it ends in the ledger."""
    pair = leased()
    there = next(iter(pair.ledger.nodes.values())).exp * 1000
    assert pair.lease.expires <= there - MARGIN - TTL // 1000


def test_never_cut_short() -> None:
    """A spare lasts longer than other leases, and its holder may not get the reply that would shorten it."""
    pair = Pair("100/hour")
    pair.trip(demand=0.5)
    assert pair.held == 1
    pair.now += SECOND
    request = pair.report(demand=100.0)
    pair.send(request)
    pair.lease.lose_reply(pair.now, request)
    assert pair.held == 1
    assert next(iter(pair.ledger.nodes.values())).exp * 1000 > pair.lease.expires


def test_expired_lease_is_burned() -> None:
    """Permits of a lease that ran out are not free again: its holder may have spent them."""
    pair = leased()
    held = pair.held
    pair.now += TTL + SECOND
    request = pair.report(demand=0.0)
    assert request.lease_id == 0
    pair.lease.lose_reply(pair.now, request)
    pair.trip(demand=0.0)
    assert pair.free + pair.held == 100 - held, "its holder may have spent it"


def test_late_grant_goes_back() -> None:
    """A grant may have ended before its reply arrives after a long trip: it goes back and causes no denial."""
    pair = Pair("5/second", "fixed_window")
    pair.trip(waiting=((3, 1),))
    request = pair.report(demand=50.0)
    pair.now += 400 * MILLISECOND
    reply = pair.send(request)
    pair.now += 300 * MILLISECOND
    pair.accept(request, reply)
    lease = pair.lease
    assert pair.held == 2 and reply.wait > 0 and pair.now >= lease.expires
    assert pair.now >= lease.deny_until and pair.now >= lease.due, (
        "no caller is denied for it, and it is reported at once"
    )
    assert pair.trip(waiting=((2, 1),)).free_before == 2


def test_burned_lease_is_not_returned() -> None:
    """A lease that the ledger has burned is not given back."""
    pair = leased()
    pair.now = pair.lease.known_until
    request = pair.report()
    assert request.lease_id == 0 and request.held == 0
    assert request.returned == 0 and pair.held == 0


def test_void_lease_is_not_spent() -> None:
    """A lease that the ledger does not know is not spent any more."""
    pair = leased()
    pair.ledger = Ledger()  # its data was lost
    request = pair.report(demand=100.0)
    assert request.held > 0
    reply = pair.send(request)
    assert reply.status == VOID
    assert not pair.accept(request, reply)
    assert pair.held == 0 and pair.lease.expires == 0
    assert pair.trip(demand=100.0).status == OK


def test_lost_data() -> None:
    """A lease older than its key proves that data was lost: the bucket starts empty."""
    pair = leased("100/hour")
    pair.ledger = Ledger()
    pair.now += MILLISECOND
    pair.trip(demand=100.0)
    assert pair.free == 0 and pair.ledger.lost, "a lease older than the key proves that there was one before"
    newcomer = LeaseRequest("sync", "other", 0, 1, 0, 0, 0, 0, 0, ((1, 1),), 0, 0, 0, 6_000_000)
    assert pair.send(newcomer).free_before < pair.params.cost


def test_failover_loses_a_grant() -> None:
    """A grant that a failover lost is not spent."""
    pair = leased()
    record = next(iter(pair.ledger.nodes.values()))
    lost = record.leased_out
    pair.ledger.leased_out -= record.leased_out
    pair.ledger.free += record.leased_out * pair.params.cost
    record.leased_out = record.granted = 0
    reply = pair.trip(demand=100.0)
    assert lost and pair.held == reply.leased_here == pair.ledger.leased_out


def test_debt_is_charged_once() -> None:
    """A debt is charged once although the reply to its report was lost."""
    pair = Pair("100/hour")
    pair.lease.debt = 30
    request = pair.report(demand=0.0)
    pair.send(request)
    pair.lease.lose_reply(pair.now, request)
    pair.trip(demand=0.0)
    assert pair.free + pair.held == 70 and pair.lease.debt == 0


def test_debt_floor() -> None:
    """A debt is never larger than the capacity."""
    pair = Pair("100/hour")
    pair.lease.debt = 5000
    reply = pair.trip(waiting=((1, 1),), demand=0.0)
    assert pair.free == -100 and reply.wait > 0


def test_refund_once() -> None:
    """A refund is reported once at most."""
    pair = Pair("100/hour")
    pair.trip(waiting=((50, 1),), demand=0.0)
    pair.lease.refund = 20
    request = pair.report(demand=0.0)
    pair.send(request)
    pair.lease.lose_reply(pair.now, request)
    pair.trip(demand=0.0)
    assert pair.free + pair.held == 70


def test_refund_below_capacity() -> None:
    """A refund never fills a bucket above its capacity."""
    pair = leased()
    pair.lease.refund = 1000
    pair.trip(demand=100.0)
    assert pair.free + pair.held == 100


def test_reset_beside_leases() -> None:
    """A reset fills the bucket up to what other nodes hold."""
    pair = leased()
    others = LeaseRequest("sync", "other", 0, 1, 0, 0, 0, 0, 0, (), 7, 0, 10_000_000, 6_000_000)
    there = pair.send(others).granted
    pair.spend(pair.held)
    pair.trip("reset")
    assert there and pair.free == 100 - there


def test_release() -> None:
    """A release leaves no record of the node in the ledger."""
    pair = leased()
    pair.trip("release")
    assert pair.free == 100 and not pair.ledger.nodes and pair.ledger.leased_out == pair.ledger.demand == 0
    assert pair.held == 0 and pair.lease.lease_id == 0


def test_exact_denial() -> None:
    """A denial lasts exactly until the next permit if no other node holds a lease."""
    pair = Pair("1/second burst 3")
    pair.trip(waiting=((3, 1),), demand=0.0)
    sent = pair.now
    pair.trip(waiting=((1, 1),), demand=0.0)
    assert pair.lease.deny_until == sent + SECOND, "the next permit comes then, and not a moment before"


def test_denial_after_a_long_trip() -> None:
    """A long trip does not shorten a denial."""
    for quota, demand in (
        ("10/second", 1.0),
        ("10/second", 60.0),
        ("10/second", 2000.0),
        ("60/second burst 1", 2000.0),
    ):
        pair = Pair(quota)
        request = pair.report(waiting=((10, 1),), demand=demand)
        pair.now += MILLISECOND
        reply = pair.send(request)
        pair.now += 90 * MILLISECOND
        pair.accept(request, reply)
        assert reply.wait > 0 and pair.lease.deny_until >= pair.now + reply.wait * 1000


def test_promise_before_refill() -> None:
    """A retry time before the next permit can refill is not kept to."""
    pair = Pair("1/second")
    pair.trip(waiting=((1, 1),))
    pair.now += SECOND // 2
    pair.lease.note_promised_retry(pair.now, pair.now + SECOND // 4, False)
    reply = pair.trip(waiting=((1, 1),))
    assert pair.lease.deny_until >= pair.now + reply.wait * 1000


def test_denial_of_several() -> None:
    """A denied call of several permits is denied again without a trip until they can have refilled."""
    pair = Pair("1/second burst 10")
    pair.profile = STYLE._replace(leased=0)
    pair.trip(waiting=((8, 1),), demand=0.0)
    sent = pair.now
    pair.trip(waiting=((1, 5),), demand=0.0)
    assert pair.lease.deny_min_units == 5 * pair.params.cost
    assert pair.lease.deny_until + pair.lease.deny_extra_time == sent + 3 * SECOND
    assert pair.lease.deny_until == sent + DENY_UNASKED, (
        "then Redis is asked again: another process may have given some back"
    )


def test_window_lease() -> None:
    """A lease of a window ends with the window."""
    pair = Pair("100/10s", "fixed_window")
    pair.now = 1_700_000_007 * SECOND
    pair.trip(demand=100.0)
    pair.trip(demand=100.0)
    assert pair.held and pair.lease.expires < 1_700_000_010 * SECOND
    pair.now = 1_700_000_010 * SECOND
    reply = pair.trip(waiting=((100, 1),), demand=0.0)
    assert reply.free_before == 100, "a new window, and all of it"


def test_idle_key() -> None:
    """An idle key gives back its lease, then its spare, and is forgotten."""
    pair = leased()
    pair.now += SECOND
    pair.trip()
    assert pair.held <= 1
    pair.now = pair.lease.last_call_at + DROP_RESERVE_AFTER
    pair.trip()
    assert pair.held == 0 and pair.free == 100 and pair.lease.is_forgettable(pair.now)


def test_changed_quota() -> None:
    """A changed quota keeps the permits that are left."""
    pair = Pair("100/hour")
    pair.trip(waiting=((90, 1),), demand=0.0)
    pair.params = quota_params(Rule("50/minute"))
    reply = pair.trip(waiting=((1, 1),), demand=0.0)
    assert reply.free_before // pair.params.cost == 10


def test_lowered_quota() -> None:
    """Leases of the old quota may be many times the new one: nothing is free until they end, and then it goes on."""
    pair = leased("100000/hour", 1_000_000.0)
    old, held = pair.params, pair.held
    new = quota_params(Rule("100/hour"))
    assert held > 1000
    newcomer = LeaseRequest("sync", "new", 0, 1, 0, 0, 0, 0, 0, ((1, 1),), 10, 0, 10_000, 6_000_000)

    def ask(seq: int, ack: int) -> LeaseReply:
        reply = pair.ledger.sync(pair.now // 1000, new, STYLE, newcomer._replace(seq=seq, acked_seq=ack))
        check_ledger(pair.ledger)
        return reply

    refused = ask(1, 0)
    assert refused.free_before < new.cost and refused.granted == 0
    pair.now += 2 * SECOND
    assert ask(2, 1).free_before < new.cost, "what is leased leaves no room"
    pair.now += TTL
    first = ask(3, 2)  # the old lease is burned
    assert first.others == 0 and first.free >= 0
    pair.now += 37 * SECOND
    assert ask(4, 3).free_before >= new.cost, "a permit comes in 36 s"
    assert old != new


def test_returns_of_a_larger_quota() -> None:
    """Permits that come back from leases of a larger quota do not fill the smaller one above its capacity."""
    pair = leased("100000/hour", 1_000_000.0)
    held = pair.held
    pair.params = quota_params(Rule("100/hour"))
    pair.lease.balance = pair.lease.balance_at_last_count = held * pair.params.cost
    pair.trip("release")
    check_ledger(pair.ledger)
    assert held > 1000 and pair.free == 100


def test_reset_beside_larger_leases() -> None:
    """A reset beside leases of a larger quota leaves no debt."""
    pair = leased("100000/hour", 1_000_000.0)
    new = quota_params(Rule("100/hour"))
    reset = LeaseRequest("reset", "new", 0, 1, 0, 0, 0, 0, 0, (), 0, 0, 0, 6_000_000)
    reply = pair.ledger.sync(pair.now // 1000, new, STYLE, reset)
    check_ledger(pair.ledger)
    assert reply.free == 0 and reply.others > 100


def test_reset_keeps_a_debt_in_doubt() -> None:
    """A reset during an outage drops the debt except what a lost report may have charged."""
    pair = Pair("100/hour")
    pair.lease.debt = 5
    lost = pair.report(demand=0.0)
    pair.send(lost)
    pair.lease.lose_reply(pair.now, lost)
    pair.lease.debt += 2
    pair.lease.forgive_debt()
    pair.lease.debt += 3
    pair.trip(demand=0.0)
    assert pair.free + pair.held == 100 - 5 - 3 and pair.lease.debt == 0


def test_reset_during_a_report() -> None:
    """A reset while a report is under way leaves no negative debt."""
    pair = Pair("100/hour")
    pair.lease.debt = 5
    request = pair.report(demand=0.0)
    pair.lease.forgive_debt()
    pair.accept(request, pair.send(request))
    assert pair.lease.debt == 0
    pair.lease.debt = 3
    pair.lease.forgive_debt()
    assert pair.lease.debt == 0


def other(pair: Pair, seq: int, **more: Any) -> LeaseReply:
    """What another node is told."""
    request = LeaseRequest("sync", "other", 0, seq, seq - 1, 0, 0, 0, 0, (), 0, 0, 0, 6_000_000)._replace(**more)
    reply = pair.send(request)
    check_ledger(pair.ledger)
    return reply


def test_leased_in_all() -> None:
    """All nodes together lease no more than the profile allows."""
    pair = leased("1000/hour", 1_000_000.0)
    there = other(pair, 1, target=900, demand=10**9).granted
    assert pair.held > STYLE.leased // 2 and there + pair.held <= STYLE.leased


def test_fair_share() -> None:
    """A node with little demand gets four times its share of what is free at most."""
    pair = Pair("1000/hour")
    pair.profile = STYLE._replace(leased=0)
    pair.trip(demand=9_900.0)
    pair.profile = STYLE
    assert pair.free == 1000 and pair.held == 0
    assert 38 <= other(pair, 1, target=900, demand=100_000).granted <= 42, "about a hundredth of the demand"


def test_spare_permit() -> None:
    """A spare permit is granted only from a full bucket of enough permits for all nodes."""
    pair = Pair("100/hour")
    assert other(pair, 1, target=1, is_reserve=1).granted == 1
    pair = Pair("100/hour")
    pair.trip(waiting=((50, 1),), demand=0.0)
    assert other(pair, 1, target=1, is_reserve=1).granted == 0, "half of it is spent"
    pair = Pair("10/hour")
    pair.trip(demand=0.0)
    assert other(pair, 1, target=1, is_reserve=1).granted == 0, "a tenth for each of two is too much"


def test_clock_steps_back() -> None:
    """Leases keep their remaining time when the server's clock steps back."""
    pair = leased()
    left = next(iter(pair.ledger.nodes.values())).exp - pair.now // 1000
    pair.now -= 500 * SECOND
    other(pair, 1)
    assert pair.ledger.nodes["me"].exp - pair.now // 1000 == left
    assert pair.ledger.exp - pair.now // 1000 <= left
    pair.now += left * 1000
    other(pair, 2)
    assert "me" not in pair.ledger.nodes, "it ran out when it would have"


def test_ttl_of_rare_reports() -> None:
    """A lease lasts until the next report, however rare reports are."""
    pair = leased()
    pair.profile = PROFILES["low"]
    pair.lease.report_interval = 10 * SECOND
    assert pair.report(demand=100.0).ttl == 30_000_000


def test_counter_keeps_promises() -> None:
    """A counter leases nothing that a denied caller was told to retry for."""
    pair = Pair("100/10s", "sliding_window_counter")
    pair.now = 1_700_000_001 * SECOND
    assert pair.report(demand=100.0).target > 0
    pair.lease.in_flight = 0
    pair.lease.note_promised_retry(pair.now, pair.now + 5 * SECOND, True)
    request = pair.report(demand=100.0)
    assert request.target == 0 and request.is_reserve == 0


def test_counter_at_the_end_of_a_window() -> None:
    """A counter leases nothing in the last moments of a window."""
    pair = Pair("100/second", "sliding_window_counter")
    pair.trip(demand=50.0)
    pair.now = 2 * SECOND - 50 * MILLISECOND
    assert pair.report(demand=50.0).target > 0
    pair = Pair("100/second", "sliding_window_counter")
    pair.trip(demand=50.0)
    pair.now = 2 * SECOND - 10 * MILLISECOND
    assert pair.report(demand=50.0).target == 0


def test_retry_times() -> None:
    """The earliest and the last retry time that callers were told are remembered."""
    lease = Lease("k", 0, 0)
    for until in (50, 30, 40):
        lease.note_promised_retry(10, until, False)
    assert (lease.first_promised_retry, lease.last_promised_retry) == (30, 40)
    lease.note_promised_retry(35, 60, False)
    assert (lease.first_promised_retry, lease.last_promised_retry) == (60, 60), "the first is over"


def test_return_ends_a_denial() -> None:
    """A lease that gives permits back stops denying."""
    pair = leased()
    pair.lease.deny_until = pair.now + SECOND
    pair.report(demand=0.0)
    assert pair.held <= 1 and pair.lease.deny_until == 0, "there is something to have there"


def test_denial_of_several_beside_others() -> None:
    """A denial of several permits is not repeated without a trip while other nodes may give back."""
    pair = Pair("1/second burst 10")
    pair.profile = STYLE._replace(leased=0)
    pair.trip(waiting=((6, 1),), demand=0.0)
    pair.profile = STYLE
    assert other(pair, 1, target=2, demand=10**6).granted > 0
    pair.profile = STYLE._replace(leased=0)
    pair.trip(waiting=((1, 5),), demand=0.0)
    assert pair.lease.deny_until == 0


def test_denials_are_reported() -> None:
    """Denials are demand, and worth a report."""
    lease = Lease("k", 0, 0)
    assert not lease.has_news()
    lease.denied = 1
    assert lease.has_news()


def test_no_lease_on_long_trips() -> None:
    """Nothing is leased where a trip takes longer than the bucket lasts."""
    pair = Pair("1000/second burst 10")
    pair.lease.demand = 900.0
    assert pair.lease.report(pair.now, 1, "me", pair.params, STYLE, 50 * MILLISECOND, "sync", ((30, 1),)).target == 0
    pair = Pair("1000/second burst 1000")
    pair.lease.demand = 900.0
    assert pair.lease.report(pair.now, 1, "me", pair.params, STYLE, 50 * MILLISECOND, "sync", ((30, 1),)).target > 0
