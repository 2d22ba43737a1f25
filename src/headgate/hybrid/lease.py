"""One process's lease on one key: a pure state machine without I/O or clock; times are nanoseconds, as arguments.

Callers spend from `balance` while the lease lasts. `report` says what is held and asks for more; there is no other
report until its reply is taken in (`accept`) or given up (`lose_reply`). Permits that go back leave the balance
*before* they are reported, and granted permits are added to it, never set: callers go on spending meanwhile.

How much to hold and when to report follows demand: enough for one pause and the trip after it, plus the square root of
that for chance. A key that is asked for now and then holds one spare permit; an idle key holds nothing.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import TYPE_CHECKING, Any, Final

from headgate.algorithms.algorithm import multiply
from headgate.hybrid.protocol import OK, VOID, LeaseRequest, count_served, time_until_room

if TYPE_CHECKING:
    from headgate.hybrid.protocol import AccuracyProfile, LeaseReply, QuotaParams

MILLISECOND: Final = 1_000_000  # nanoseconds
SECOND: Final = 1_000_000_000

TICK: Final = 10 * MILLISECOND  # the driver looks for work so often, and makes trips of its own no more often
TTL: Final = 6 * SECOND
SPARE_TTL: Final = 30 * SECOND
IDLE_AFTER: Final = SECOND // 2  # without a caller: all but a spare permit goes back
DROP_SPARE_AFTER: Final = 20 * SECOND  # without a caller: the spare permit goes back too
MARGIN: Final = 5 * MILLISECOND  # a lease ends here before it ends in Redis; clocks may also differ by a thousandth
FAST_AVERAGE: Final = SECOND // 20  # time constant of demand for many calls
SLOW_AVERAGE: Final = SECOND  # time constant of demand for few calls, or none
FEW: Final = 4
ALONE_INTERVAL: Final = SECOND // 5  # the only process at a used-up key reports no more often
DENY_UNASKED: Final = 2 * SECOND  # a denial stands so long without asking: others may reset or refund


class Lease:
    """Amounts are units of the quota: *cost* units are one permit."""

    __slots__ = (
        "ack",
        "asked_at",
        "asked_at_last_look",
        "balance",
        "blocked_until",
        "counted_at",
        "counted_balance",
        "created_at",
        "current",
        "debt",
        "debt_in_doubt",
        "demand",
        "denied",
        "deny_extension",
        "deny_from",
        "deny_until",
        "due",
        "expected_free",
        "expires",
        "first_retry",
        "free_in_redis",
        "idle_after",
        "in_flight",
        "keep_until",
        "key",
        "known_until",
        "last_retry",
        "last_retry_several",
        "lid",
        "look_at",
        "nodes",
        "others",
        "owner",
        "pause",
        "previous",
        "refill_below",
        "refund",
        "report_at",
        "returned",
        "sent_at",
        "share_full_at",
        "tick",
        "unreported",
        "window_ends",
        "window_ends_by",
    )

    def __init__(self, key: str, ack: int, now: int, owner: Any = None) -> None:
        self.key = key
        self.owner: Any = owner  # the LimiterLeases that it belongs to
        # what callers read and change
        self.balance = 0
        self.expires = 0
        self.refill_below = -1  # at this balance more is fetched; -1: not now
        self.free_in_redis = 0  # units that were free in Redis at the last reply
        self.window_ends_by = 0  # windows: when this one is over, at the latest
        self.window_ends = 0  # windows: when this one is over, at the earliest
        self.deny_until = 0
        self.deny_from = 0  # requests for at least so many units are denied until then
        self.deny_extension = 0  # denials are likely to go on for so much longer
        self.expected_free = 0  # units in Redis when denials end, if no other process spends any
        self.first_retry = 0  # the earliest time that a denied caller was told to retry at
        self.last_retry = 0  # the time that the last denied caller was told
        self.last_retry_several = 0  # the latest that a denied caller of several permits was told
        self.current = self.previous = 0  # windows: permits that count, at the last reply
        self.denied = 0  # units denied here since the last count
        # what the ledger must know
        self.lid = 0
        self.known_until = 0  # until then the ledger may still know the lease, and can be told what became of it
        self.ack = ack
        self.in_flight = 0  # the number of the report under way, 0 for none
        self.returned = 0
        self.refund = 0
        self.debt = 0
        self.debt_in_doubt = 0  # the part of the debt that was reported and may be charged: no reply has come
        self.sent_at = 0
        # demand, and what follows from it
        self.counted_balance = 0  # the balance, as if nothing had been spent since the last count
        self.unreported = 0  # units spent before that, which Redis may not have heard of yet
        self.created_at = now
        self.counted_at = now
        self.asked_at = now
        self.demand = 0.0  # permits a second
        self.pause = 0
        self.others = 0
        self.nodes = 1
        self.due = 0  # when to report next, or to look whether callers still come
        self.look_at = 0  # equal to `due` while that is for a look; 0: no look is planned
        self.report_at = 0  # when to report after looks
        self.asked_at_last_look = 0  # units asked for since the last report, as of the last look
        self.idle_after = IDLE_AFTER  # a lease without a caller for so long is idle
        self.keep_until = 0  # kept at least until then, if not 0: a call was granted before Redis was asked
        self.tick = 0  # the tick at which the manager looks at the lease; 0: none
        self.blocked_until = 0  # until then Redis is not asked about this key: it answered with an error
        self.share_full_at = 0  # during an outage: when this process's share of the bucket is full

    def report(
        self,
        now: int,
        seq: int,
        node: str,
        params: QuotaParams,
        profile: AccuracyProfile,
        trip: int,
        op: str,
        needs: tuple[tuple[int, int], ...],
    ) -> LeaseRequest:
        """The next request; *trip* is how long a round trip takes. No other report may be under way."""
        self.unreported += max(self.counted_balance - self.balance, 0)
        self.count_demand(now, params, needs)
        if now >= self.expires and (self.balance == 0 or now >= self.known_until):
            self.balance = self.counted_balance = self.lid = 0
        want, spare = self._wanted(now, params, profile, trip) if op == "sync" else (0, 0)
        if params.kind == "counter" and (
            self._has_promised(now, trip) or now < self.window_ends_by < now + MARGIN + TICK
        ):
            want = spare = 0  # permits leased and unspent at its end would count in the next window too
        # a waiter needs more than is held: all of it goes back, so that the ledger decides over all free permits
        keep = 0 if needs or op != "sync" else want
        give = max(self.balance // params.cost - keep, 0)
        if give:
            self.deny_until = 0  # there will be permits in Redis
        self.balance -= multiply(give, params.cost)
        self.counted_balance = self.balance
        self.returned += give
        self.in_flight = seq
        self.debt_in_doubt = max(self.debt_in_doubt, self.debt)
        self.sent_at = now
        ttl = SPARE_TTL if spare else max(TTL, 3 * self.pause)
        self.refill_below = -1
        milli = int(self.demand * 1000)
        return LeaseRequest(
            op, node, self.lid, seq, self.ack, self.balance // params.cost, self.returned, self.refund, self.debt,
            needs, want, spare, milli, ttl // 1000,
        )  # fmt: skip

    def accept(
        self,
        now: int,
        reply: LeaseReply,
        request: LeaseRequest,
        params: QuotaParams,
        profile: AccuracyProfile,
        trip: int,
    ) -> bool:
        """Take in *reply*; return whether it answers the report under way and was OK."""
        if request.seq != self.in_flight:
            return False  # given up, and the ledger will be told so: its grant would be spent twice
        self.in_flight = 0
        if reply.status != OK:
            if reply.status == VOID:  # the ledger does not know this lease: it ran out, or the data is gone
                self.balance = self.counted_balance = self.unreported = self.lid = self.expires = self.known_until = 0
                self.ack = request.seq
            self.due = now
            return False
        self.ack = request.seq
        self.unreported = 0
        self.lid = reply.lid
        self.refund -= request.refund
        self.debt -= request.debt
        self.debt_in_doubt = 0
        self.share_full_at = 0
        lost = request.held - (reply.out - reply.lease)
        if lost > 0:  # a failover lost a grant: permits that the ledger does not count must not be spent
            missing = min(multiply(lost, params.cost), self.balance)
            self.balance -= missing
            self.counted_balance -= missing
        granted = multiply(reply.lease, params.cost)
        self.balance += granted
        self.counted_balance += granted
        lasts = 1000 * (min(request.ttl, reply.ends) if reply.ends else request.ttl)
        self.expires = self.sent_at + lasts - lasts // 1000 - MARGIN
        self.known_until = now + lasts
        self.window_ends_by = now + reply.ends * 1000 if reply.ends else 0  # callers are told to retry then
        self.window_ends = self.sent_at + reply.ends * 1000 if reply.ends else 0
        self.free_in_redis = max(reply.free, 0)
        self.others = reply.others
        self.current, self.previous = reply.current, reply.previous
        self.nodes = max(reply.nodes, 1)
        if self.keep_until:
            self.keep_until = now + self._empty_for(reply, params)
        if request.op == "release":
            self.lid = self.expires = self.known_until = 0
        if request.op != "sync":
            self.deny_until = self.pause = 0
            self.due = now + IDLE_AFTER
        else:
            self._plan_next(now, reply, request, params, profile.longest * 1000, trip)
        return True

    def lose_reply(self, now: int, request: LeaseRequest) -> None:
        """Give up on *request*, the report under way: its reply is ignored. A refund is not reported twice."""
        self.in_flight = 0
        self.refund -= request.refund
        self.due = now

    def count_demand(self, now: int, params: QuotaParams, needs: tuple[tuple[int, int], ...]) -> None:
        """Update `demand` from what callers asked for since the last time."""
        spent = self.counted_balance - self.balance + self.denied
        asked = spent // params.cost
        if spent != self.asked_at_last_look or needs:
            self.asked_at = now
        self.counted_balance = self.balance
        self.denied = self.asked_at_last_look = 0
        for many, permits in needs:
            asked += many * permits
        passed = float(max(now - self.counted_at, MILLISECOND))
        self.counted_at = now
        seen = asked / passed * SECOND
        inertia = float(SLOW_AVERAGE)
        if seen > self.demand:  # many calls are a trend; one or two may be chance
            inertia = FAST_AVERAGE + (SLOW_AVERAGE - FAST_AVERAGE) / (1 + asked / FEW)
        inertia = min(inertia, float(max(now - self.created_at, FAST_AVERAGE)))  # a new lease has seen little
        self.demand += (seen - self.demand) * passed / (passed + inertia)

    def should_report(self, now: int) -> bool:
        """Whether a lease that is `due` has to report; if not, `due` becomes the time of the next look."""
        if self.due != self.look_at or now >= self.report_at or self.debt or self.refund:
            return True
        asked = self.counted_balance - self.balance + self.denied
        if asked == self.asked_at_last_look:
            return True  # no caller since the last look: the permits go back
        self.asked_at_last_look = asked
        self.asked_at = now
        self.due = self.look_at = min(now + self.idle_after, self.report_at)
        return False

    def forgive_debt(self) -> None:
        """Drop the debt, except what Redis may have charged: that is reported again, or less would be charged later."""
        self.debt = self.debt_in_doubt
        self.share_full_at = 0

    def _empty_for(self, reply: LeaseReply, params: QuotaParams) -> int:
        """Nanoseconds until Redis has a permit, if nothing is given back."""
        if reply.free >= params.cost:
            return 0
        if not params.period:
            return multiply(-((reply.free - params.cost) // params.rate), 1000)
        if params.kind == "fixed":
            return reply.ends * 1000
        return time_until_room(params, params.period - reply.ends, reply.current, reply.previous, 1) * 1000

    def _wanted(self, now: int, params: QuotaParams, profile: AccuracyProfile, trip: int) -> tuple[int, int]:
        """Permits to hold, and 1 if they are a spare."""
        idle = now - self.asked_at
        if idle >= DROP_SPARE_AFTER:
            return 0, 0
        if idle >= self.idle_after or self.demand * max(self.pause, SECOND // 2) < SECOND:
            return 1, 1
        # leased permits turn over once in a trip and a pause: with more demand than may be leased, leases only delay
        rate = min(params.speed / 1000, self.demand * self.nodes)
        if rate * ((trip + max(TICK, trip)) / SECOND) > profile.leased / 1000 * params.limit:
            return 0, 0
        likely = self.demand * ((self.pause + trip * 3 // 2 + TICK) / SECOND)
        return ceil(likely + sqrt(likely)), 0

    def _plan_next(
        self, now: int, reply: LeaseReply, request: LeaseRequest, params: QuotaParams, longest: int, trip: int
    ) -> None:
        """Decide when to report next, what to deny until then, and at what balance to fetch more."""
        shortest = max(TICK, trip)
        pause = min(max(reply.pause * 1000, shortest), longest)
        pause = (
            min(pause, 2 * self.pause) if self.pause else shortest
        )  # grows step by step, as little is known at first
        if reply.wait > 0 and reply.nodes == 1:  # no other process competes: fetch when it refills
            pause = min(pause, max(reply.wait * 1000, ALONE_INTERVAL, shortest))
        self.pause = pause

        self.deny_until = 0
        earliest = self.sent_at + 1  # when Redis can have a permit
        if reply.wait > 0:
            # If no other process holds a lease, nothing can be free before the time that the ledger gave, counted
            # from when it was asked. Otherwise a process may give permits back any time, and the denial is good for
            # one pause. The same where callers ask for more than refills: one trip fetches what refilled meanwhile.
            exact = reply.others == 0 and reply.free < params.cost
            latest = 0
            self.due = self.deny_until = now + pause
            if exact:
                self.due = earliest = self.sent_at + reply.wait * 1000
                self.deny_until = latest = now + reply.wait * 1000  # better one trip late than a retry that is denied
            self.deny_from = self.expected_free = params.cost
            if reply.busy and self.due <= now + pause:
                self.due = now + pause
                if request.want:  # callers need not wait for the next trip
                    self.deny_until = max(latest, self.due + trip + 2 * TICK)
                elif not params.period:  # only callers fetch: let them ask before it is full
                    self.deny_until = max(latest, min(self.due, now + params.room // params.rate * 250))
            if params.period:  # the denial ends with the window
                self.deny_until = min(self.deny_until, self.window_ends_by)
        else:
            self._refuse_larger(now, reply, request, params)
            if request.want:
                likely = self.demand * ((trip * 13 // 10 + TICK + 2 * MILLISECOND) / SECOND)
                self.refill_below = 0 if request.spare else multiply(ceil(likely + 2 * sqrt(likely)), params.cost)
            self.due = now + pause
            if request.spare or now - self.asked_at >= self.idle_after:
                self.due = self.asked_at + DROP_SPARE_AFTER
        promise = self.first_retry if self.first_retry >= earliest else self.last_retry
        early = self.deny_until - promise
        # a caller of one permit finds it here, unless others were faster; a window may have ended by then
        kept = self.balance > 0 and self.last_retry_several < earliest and not params.period
        if reply.nodes == 1 and promise >= earliest and early > 0 and not kept:
            self.deny_until = promise  # no other process can have taken what was promised
            self.expected_free -= multiply(-(-early // 1000), params.rate)  # but callers served meanwhile may
        self.deny_extension = max(self.deny_until - now - DENY_UNASKED, 0)
        self.deny_until -= self.deny_extension
        if reply.wait > 0:
            self.due = min(self.due, now + max(DENY_UNASKED, pause))  # spent permits do not stay unreported for long
        if self.balance > 0:
            if now >= self.expires:  # granted too late to be spent: renew it, or give it back to a waiting caller
                self.deny_until, self.due = 0, now
            elif not reply.ends or request.ttl < reply.ends:  # a report renews the lease
                self.due = min(self.due, max(self.expires - request.ttl * 250, now + shortest))
            else:
                self.due = min(self.due, self.window_ends_by)  # a window starts without leases
        self._plan_look(now, params)

    def _plan_look(self, now: int, params: QuotaParams) -> None:
        """Plan a look before the next report, so that permits go back soon after the last call of a long pause."""
        self.asked_at_last_look = self.counted_balance - self.balance + self.denied
        if self.asked_at_last_look:
            self.asked_at = now
        # rare calls leave gaps: a few usual gaps do not make the lease idle
        self.idle_after = max(IDLE_AFTER, min(int(FEW * SECOND / max(self.demand, 0.001)), self.pause))
        self.look_at = 0
        if self.balance > params.cost and now + self.idle_after < self.due:
            self.report_at = self.due
            self.due = self.look_at = now + self.idle_after

    def _refuse_larger(self, now: int, reply: LeaseReply, request: LeaseRequest, params: QuotaParams) -> None:
        """Remember how long a denied call of several permits cannot be granted, where that is certain."""
        if reply.others or params.period:
            return
        served = count_served(reply.before, params.cost, request.needs)
        refused = [permits for (count, permits), many in zip(request.needs, served, strict=True) if many < count]
        if refused:
            least = multiply(min(refused), params.cost)
            missing = least - reply.free - self.balance
            if missing > 0:
                self.deny_from = least
                self.expected_free = least - self.balance
                self.deny_until = now + -(-missing // params.rate) * 1000

    def note_retry(self, now: int, until: int, several: bool) -> None:
        """Remember the earliest and the last time that a denied caller was told to retry at."""
        self.last_retry = until
        if several:
            self.last_retry_several = max(self.last_retry_several, until)
        if self.first_retry <= now or until < self.first_retry:
            self.first_retry = until

    def _has_promised(self, now: int, trip: int) -> bool:
        """Whether a denied caller will retry, perhaps a moment late, for permits that a lease would take away."""
        if max(self.first_retry, self.last_retry) > max(now, self.deny_until + self.deny_extension):
            return True  # near the end of the window a lease of one permit might have run out by then
        # in this window held permits go back when that caller asks; in the next one they would count as used
        return self.last_retry + TICK > now and self.last_retry + MARGIN + TICK + 2 * trip >= self.window_ends

    def has_news(self) -> bool:
        """Whether a report would tell Redis anything."""
        return (
            self.balance > 0
            or self.counted_balance != self.balance
            or self.denied > 0
            or self.debt > 0
            or self.refund > 0
        )

    def is_forgettable(self, now: int) -> bool:
        """Whether nothing is lost if this lease is forgotten."""
        if self.in_flight or self.has_news() or now < self.keep_until:
            return False
        return now >= self.deny_until and now - self.asked_at >= IDLE_AFTER
