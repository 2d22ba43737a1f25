"""One process's lease on one key: a pure state machine without I/O or clock; times are nanoseconds, as arguments.

Callers spend from `balance` while the lease lasts. `report` says what is held and asks for more; there is no other
report until its reply is taken in (`accept`) or given up (`lose_reply`). Subtract returned permits before reporting
them, and add grants with +=, because callers keep spending in between.

How much to hold and when to report follows demand: enough for one report interval and the trip after it, plus the
square root of that for chance. A key that is called now and then holds one reserve permit; an idle key holds nothing.

A count is a call of `count_demand`. A promise is a retry time that a denied caller was given (its `retry_after`).
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import TYPE_CHECKING, Any, Final

from headgate.algorithms.algorithm import multiply
from headgate.hybrid.inflow import STEPS, Inflow, inflow_of
from headgate.hybrid.protocol import LEAST_ROOM, OK, VOID, LeaseRequest, count_served, time_until_free

if TYPE_CHECKING:
    from headgate.hybrid.protocol import AccuracyProfile, LeaseReply, QuotaParams

MILLISECOND: Final = 1_000_000  # nanoseconds
SECOND: Final = 1_000_000_000

TICK: Final = 10 * MILLISECOND  # the background task looks for work so often, and makes trips of its own no more often
TTL: Final = 6 * SECOND
RESERVE_TTL: Final = 30 * SECOND
IDLE_AFTER: Final = SECOND // 2  # without a caller: all but a reserve permit goes back
DROP_RESERVE_AFTER: Final = 20 * SECOND  # without a caller: the reserve permit goes back too
MARGIN: Final = 5 * MILLISECOND  # a lease ends here before it ends in Redis; clocks may also differ by a thousandth
FAST_AVERAGE: Final = SECOND // 20  # time constant of demand for many calls
SLOW_AVERAGE: Final = SECOND  # time constant of demand for few calls, or none
TREND_CALLS: Final = 4  # so many calls between two counts halve the time constant of a rising demand
IDLE_GAPS: Final = 4  # a lease is idle after so many times the usual gap between two calls
ALONE_INTERVAL: Final = SECOND // 5  # the only process at a used-up key reports no more often
RENEW_PART: Final = 4  # a held lease is renewed when a quarter of its time is left
RETRY_PART: Final = 4  # callers of an oversubscribed bucket without leases retry when a quarter of it may have refilled
ROOM_SECONDS: Final = 1.0  # of demand: the room of a lease with inflow
SCARCE_PART: Final = 16  # less than this part of an oversubscribed bucket is not worth a trip
FEW_CALLS: Final = 16  # so many calls, or fewer, are too few to tell that callers have gone
DENY_UNASKED: Final = 2 * SECOND  # longest time to deny without asking Redis: other processes may reset or refund


class Lease:
    """What a process holds of one key, and what it knows of it. Amounts are units: *cost* units are one permit."""

    __slots__ = (
        "acked_seq",
        "balance",
        "balance_at_last_count",
        "blocked_until",
        "created_at",
        "current",
        "debt",
        "debt_in_doubt",
        "demand",
        "denied",
        "deny_extra_time",
        "deny_min_units",
        "deny_until",
        "due",
        "expected_free",
        "expires",
        "first_promised_retry",
        "free_in_redis",
        "idle_after",
        "idle_check_at",
        "in_flight",
        "inflow",
        "keep_until",
        "key",
        "known_until",
        "last_call_at",
        "last_count_at",
        "last_promised_retry",
        "last_promised_retry_of_several",
        "lease_id",
        "nodes",
        "others",
        "owner",
        "previous",
        "refill_below",
        "refund",
        "report_at",
        "report_interval",
        "returned",
        "sent_at",
        "share_full_at",
        "tick",
        "units_requested_at_last_check",
        "unreported",
        "window_ends",
        "window_ends_by",
    )

    def __init__(self, key: str, acked_seq: int, now: int, owner: Any = None) -> None:
        self.key = key
        self.owner: Any = owner  # the `LimiterLeases` that it belongs to (Any: tests have none)
        # what callers read and change
        self.balance = 0
        self.expires = 0
        self.refill_below = -1  # at this balance more is fetched; -1: not now
        self.free_in_redis = 0  # units that were free in Redis at the last reply
        self.window_ends_by = 0  # windows: when this one is over, at the latest
        self.window_ends = 0  # windows: when this one is over, at the earliest
        self.deny_until = 0  # calls of `deny_min_units` units or more are denied here until then
        self.deny_min_units = 0
        self.deny_extra_time = 0  # denials are likely to go on for so much longer, after Redis was asked again
        self.expected_free = 0  # units in Redis when denials end, if no other process spends any
        self.first_promised_retry = 0  # the earliest retry time that a denied caller was given
        self.last_promised_retry = 0  # the retry time of the last denied caller
        self.last_promised_retry_of_several = 0  # the latest of a denied caller of several permits
        self.current = self.previous = 0  # windows: permits that count, at the last reply
        self.denied = 0  # units denied here since the last count
        self.inflow: Inflow | None = None  # what comes in by itself; it stands still while a report is under way
        # what the ledger must know
        self.lease_id = 0
        self.known_until = 0  # until then the ledger may still know the lease, and can be told what became of it
        self.acked_seq = acked_seq
        self.in_flight = 0  # the number of the report under way, 0 for none
        self.returned = 0  # permits given back, ever
        self.refund = 0  # permits that callers gave back after they were reported as spent
        self.debt = 0  # permits granted while Redis could not be asked
        self.debt_in_doubt = 0  # the part of the debt that was reported and may be charged: no reply has come
        self.sent_at = 0
        # demand, and what follows from it
        self.balance_at_last_count = 0  # plus what was granted, minus what was given back since
        # `balance_at_last_count - balance` is what was spent since the last count; `unreported` is what was spent
        # before it and is not yet acknowledged.
        self.unreported = 0
        self.created_at = now
        self.last_count_at = now
        self.last_call_at = now  # as far as counts and idle checks have noticed
        self.demand = 0.0  # permits a second
        self.report_interval = 0  # between the last report and the next, if all goes on as it is
        self.others = 0  # permits leased to other processes, at the last reply
        self.nodes = 1  # processes at the key, this one included, at the last reply
        self.due = 0  # the time of the next report or idle check
        self.idle_check_at = 0  # equal to `due` if that is an idle check (do callers still come?); 0: none is planned
        self.report_at = 0  # when to report, if every idle check until then finds callers
        self.units_requested_at_last_check = 0  # since the last report, as of the last idle check
        self.idle_after = IDLE_AFTER  # without a caller for so long the lease is idle
        self.keep_until = 0  # kept at least until then, if not 0: a call was granted before Redis was asked
        self.tick = 0  # at which `DueSchedule` hands out the lease; 0: not scheduled
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
        waiting: tuple[tuple[int, int], ...],
    ) -> LeaseRequest:
        """The next request; *trip* is how long a round trip takes. No other report may be under way."""
        if self.inflow is not None:
            self.add_inflow(now)
            if now >= self.expires:
                self.inflow = None
        self.unreported += max(self.balance_at_last_count - self.balance, 0)
        self.count_demand(now, params, waiting)
        if now >= self.expires and (self.balance == 0 or now >= self.known_until):
            self.balance = self.balance_at_last_count = self.lease_id = 0
        target, is_reserve = self._target(now, params, profile, trip) if op == "sync" else (0, 0)
        if params.kind == "counter" and (
            self._retry_is_promised(now, trip) or now < self.window_ends_by < now + MARGIN + TICK
        ):
            target = is_reserve = 0  # permits leased and unspent at its end would count in the next window too
        # a waiter needs more than is held: all of it goes back, so that the ledger decides over all free permits
        keep = 0 if waiting or op != "sync" else target
        inflow = profile.inflow if target and now >= self.last_promised_retry_of_several else 0
        if profile.inflow and (waiting or not inflow):
            self.balance -= self.balance % params.cost  # a part of a permit would be in the way of large calls
        give = max(self.balance // params.cost - keep, 0)
        if give:
            self.deny_until = 0  # there will be permits in Redis
        self.balance -= multiply(give, params.cost)
        self.balance_at_last_count = self.balance
        self.returned += give
        self.in_flight = seq
        self.debt_in_doubt = max(self.debt_in_doubt, self.debt)
        self.sent_at = now
        longest = 3 * profile.longest * 1000 // 2 + TTL
        ttl = RESERVE_TTL if is_reserve else max(TTL, min(3 * self.report_interval, longest))
        self.refill_below = -1
        milli = int(self.demand * 1000)
        held = -(-self.balance // params.cost)  # a part of a permit, which inflow brings, counts as one
        return LeaseRequest(
            op, node, self.lease_id, seq, self.acked_seq, held, self.returned, self.refund, self.debt, waiting, target,
            is_reserve, milli, ttl // 1000, inflow,
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
            # This report was given up. The next one makes the ledger take its grant back, so it must not be added here.
            return False
        self.in_flight = 0
        stopped, self.inflow = self.inflow, None
        if reply.status != OK:
            if reply.status == VOID:  # the ledger does not know this lease: it ran out, or the data is gone
                self.balance = self.balance_at_last_count = self.unreported = 0
                self.lease_id = self.expires = self.known_until = 0
                self.acked_seq = request.seq
            self.due = now
            return False
        self.acked_seq = request.seq
        self.unreported = 0
        self.lease_id = reply.lease_id
        self.refund -= request.refund
        self.debt -= request.debt
        self.debt_in_doubt = 0
        self.share_full_at = 0
        lost = request.held - (reply.leased_here - reply.granted)
        if lost > 0:  # a failover lost a grant: permits that the ledger does not count must not be spent
            not_ours = min(multiply(lost, params.cost), self.balance)
            self.balance -= not_ours
            self.balance_at_last_count -= not_ours
        granted = multiply(reply.granted, params.cost)
        self.balance += granted
        self.balance_at_last_count += granted
        lasts = 1000 * (min(request.ttl, reply.window_ends_in) if reply.window_ends_in else request.ttl)
        self.expires = self.sent_at + lasts - lasts // 1000 - MARGIN
        self.known_until = now + lasts
        window_lasts = reply.window_ends_in * 1000
        self.window_ends_by = now + window_lasts if window_lasts else 0  # callers are told to retry then
        self.window_ends = self.sent_at + window_lasts if window_lasts else 0
        self.free_in_redis = max(reply.free, 0)
        self.others = reply.others
        self.current, self.previous = reply.current, reply.previous
        self.nodes = max(reply.nodes, 1)
        if self.keep_until:
            self.keep_until = now + self._empty_for(reply, params)
        if request.op == "release":
            self.lease_id = self.expires = self.known_until = 0
        if request.op != "sync":
            self.deny_until = self.report_interval = 0
            self.due = now + IDLE_AFTER
        elif reply.inflow and now < self.expires:
            self._plan_with_inflow(now, reply, params, profile.longest * 1000, trip, stopped)
        else:
            self._plan_next(now, reply, request, params, profile.longest * 1000, trip)
        return True

    def lose_reply(self, now: int, request: LeaseRequest) -> None:
        """Give up on *request*, the report under way: its reply is ignored. A refund is not reported twice."""
        self.in_flight = 0
        self.inflow = None  # Redis may have changed it
        self.refund -= request.refund
        self.due = now

    def add_inflow(self, now: int) -> None:
        """Add to the balance what has come in by itself."""
        inflow = self.inflow
        if inflow is not None and self.in_flight == 0:
            came = inflow.add(min(now, self.expires), self.balance)
            self.balance += came
            self.balance_at_last_count += came

    def spend_inflow(self, now: int, price: int) -> bool:
        """Add what has come in, and spend *price* units if that is enough."""
        self.add_inflow(now)
        inflow = self.inflow
        if inflow is None or self.in_flight or self.balance < price or now >= self.expires:
            return False
        self.balance -= price
        inflow.headroom = inflow.room - self.balance  # as of now
        self.plan_inflow()
        return True

    def plan_inflow(self) -> None:
        """Plan at what balance inflow is added, or more is fetched."""
        inflow = self.inflow
        if inflow is not None:
            self.refill_below = max(self.balance - inflow.room // STEPS - 1, inflow.fetch_below)

    def must_fetch(self, now: int) -> bool:
        """Whether a lease that callers have drawn low has to report now; if not, inflow is enough."""
        inflow = self.inflow
        if inflow is None:
            return True
        self.add_inflow(now)
        if self.balance <= inflow.fetch_below:
            return True
        self.plan_inflow()
        return False

    def count_demand(self, now: int, params: QuotaParams, waiting: tuple[tuple[int, int], ...]) -> None:
        """Update `demand` from what callers requested since the last count."""
        units = self.balance_at_last_count - self.balance + self.denied
        requested = units // params.cost
        if units != self.units_requested_at_last_check or waiting:
            self.last_call_at = now
        self.balance_at_last_count = self.balance
        self.denied = self.units_requested_at_last_check = 0
        for many, permits in waiting:
            requested += many * permits
        passed = float(max(now - self.last_count_at, MILLISECOND))
        self.last_count_at = now
        seen = requested / passed * SECOND
        inertia = float(SLOW_AVERAGE)
        if seen > self.demand:  # many calls are a trend; one or two may be chance
            inertia = FAST_AVERAGE + (SLOW_AVERAGE - FAST_AVERAGE) / (1 + requested / TREND_CALLS)
        inertia = min(inertia, float(max(now - self.created_at, FAST_AVERAGE)))  # a new lease has seen little
        self.demand += (seen - self.demand) * passed / (passed + inertia)

    def should_report(self, now: int) -> bool:
        """Whether a lease that is `due` has to report; if not, `due` becomes the time of the next idle check."""
        if self.due != self.idle_check_at or now >= self.report_at or self.debt or self.refund:
            return True
        requested = self.balance_at_last_count - self.balance + self.denied
        if self.inflow is not None and now < self.last_promised_retry and now + 2 * TICK < self.report_at:
            pass  # a caller was told to retry by the inflow of now; the next check is later than this tick
        elif requested == self.units_requested_at_last_check:
            return True  # no caller since the last idle check: the permits go back
        elif self.inflow is not None:
            self.add_inflow(now)
            if self.inflow.scarce and self.inflow.headroom == 0:
                return True  # full, while there was nothing in Redis
            likely = self.demand * ((now - self.idle_check_at + self.idle_after) / SECOND)
            seen = (requested - self.units_requested_at_last_check) / self.owner.cost
            if max(likely, seen) > FEW_CALLS and not likely / 2 <= seen <= 2 * likely:
                self.report_interval = min(self.report_interval, IDLE_AFTER)  # how long that goes on is not known
                return True  # the inflow is too little, or others may need it
        self.units_requested_at_last_check = requested
        self.last_call_at = now
        self.due = self.idle_check_at = min(now + self.idle_after, self.report_at)
        return False

    def forgive_debt(self) -> None:
        """Drop the debt, but keep the part already sent.

        If Redis charged it, the next report must still contain it, or the subtraction there would be wrong.
        """
        self.debt = self.debt_in_doubt
        self.share_full_at = 0

    def _empty_for(self, reply: LeaseReply, params: QuotaParams) -> int:
        """Nanoseconds until Redis has a permit, if nothing is given back."""
        if reply.free >= params.cost:
            return 0
        if not params.period:
            return multiply(-((reply.free - params.cost) // params.rate), 1000)
        if params.kind == "fixed":
            return reply.window_ends_in * 1000
        return time_until_free(params, params.period - reply.window_ends_in, reply.current, reply.previous, 1) * 1000

    def _target(self, now: int, params: QuotaParams, profile: AccuracyProfile, trip: int) -> tuple[int, int]:
        """Permits to hold, and 1 if that is a reserve permit."""
        idle = now - self.last_call_at
        if idle >= DROP_RESERVE_AFTER:
            return 0, 0
        if idle >= self.idle_after or self.demand * max(self.report_interval, SECOND // 2) < SECOND:
            return 1, 1
        shared = self.nodes > 1 and profile.leased * params.limit >= LEAST_ROOM * 1000 * self.nodes
        if profile.inflow and shared and not params.period:  # for a second, and for chance until the next report
            return ceil(self.demand * ROOM_SECONDS + 2 * sqrt(self.demand * (self.report_interval / SECOND))), 0
        # If demand within one trip and the shortest interval exceeds what may be leased, leasing only adds delay: hold
        # nothing.
        rate = min(params.speed / 1000, self.demand * self.nodes)
        if rate * ((trip + max(TICK, trip)) / SECOND) > profile.leased / 1000 * params.limit:
            return 0, 0
        likely = self.demand * ((self.report_interval + trip * 3 // 2 + TICK) / SECOND)
        return ceil(likely + sqrt(likely)), 0

    def _plan_next(
        self, now: int, reply: LeaseReply, request: LeaseRequest, params: QuotaParams, longest: int, trip: int
    ) -> None:
        """Decide when to report next, what to deny until then, and at what balance to fetch more."""
        shortest = max(TICK, trip)
        interval = min(max(reply.report_interval * 1000, shortest), longest)
        # it grows step by step, as little is known at first
        interval = min(interval, 2 * self.report_interval) if self.report_interval else shortest
        if reply.wait > 0 and reply.nodes == 1:  # no other process competes: fetch when it refills
            interval = min(interval, max(reply.wait * 1000, ALONE_INTERVAL, shortest))
        self.report_interval = interval

        self.deny_until = 0
        earliest = self.sent_at + 1  # when Redis can have a permit
        if reply.wait > 0:
            # If no other process holds a lease, nothing can be free before the time that the ledger gave, counted
            # from when it was asked. Otherwise a process may give permits back any time, and the denial is good for
            # one interval. If callers ask for more than refills, also wait a whole interval: one trip then fetches
            # everything that refilled.
            exact = reply.others == 0 and reply.free < params.cost
            latest = 0
            self.due = self.deny_until = now + interval
            if exact:
                self.due = earliest = self.sent_at + reply.wait * 1000
                self.deny_until = latest = now + reply.wait * 1000  # better one trip late than a retry that is denied
            self.deny_min_units = self.expected_free = params.cost
            if reply.oversubscribed and self.due <= now + interval:
                self.due = now + interval
                if request.target:  # callers need not wait for the next trip
                    self.deny_until = max(latest, self.due + trip + 2 * TICK)
                elif not params.period:  # only callers fetch: let them ask before it is full
                    retry_at = now + params.capacity_units // params.rate * 1000 // RETRY_PART
                    self.deny_until = max(latest, min(self.due, retry_at))
            if params.period:  # the denial ends with the window
                self.deny_until = min(self.deny_until, self.window_ends_by)
        else:
            self._plan_denial_of_large_calls(now, reply, request, params)
            if request.target:
                likely = self.demand * ((trip * 13 // 10 + TICK + 2 * MILLISECOND) / SECOND)
                self.refill_below = 0 if request.is_reserve else multiply(ceil(likely + 2 * sqrt(likely)), params.cost)
            self.due = now + interval
            if request.is_reserve or now - self.last_call_at >= self.idle_after:
                self.due = self.last_call_at + DROP_RESERVE_AFTER
        # Keep the retry time that was given out, unless a permit is held here for that caller: in a window that permit
        # may have expired by then, so it is kept all the same.
        first, last = self.first_promised_retry, self.last_promised_retry
        promised_retry = first if first >= earliest else last
        moved_by = self.deny_until - promised_retry
        held_for_caller = self.balance > 0 and self.last_promised_retry_of_several < earliest and not params.period
        if reply.nodes == 1 and promised_retry >= earliest and moved_by > 0 and not held_for_caller:
            self.deny_until = promised_retry  # no other process can have taken what was promised
            self.expected_free -= multiply(-(-moved_by // 1000), params.rate)  # callers of this process may have
        self.deny_extra_time = max(self.deny_until - now - DENY_UNASKED, 0)
        self.deny_until -= self.deny_extra_time
        if reply.wait > 0:
            self.due = min(self.due, now + max(DENY_UNASKED, interval))  # spent permits do not stay unreported for long
        if self.balance > 0:
            if now >= self.expires:  # granted too late to be spent: renew it, or give it back to a waiting caller
                self.deny_until, self.due = 0, now
            elif params.period and reply.window_ends_in <= request.ttl:
                self.due = min(self.due, self.window_ends_by)  # a window starts without leases
            else:  # a report renews the lease
                lasts = min(request.ttl, reply.window_ends_in or request.ttl) * 1000
                self.due = min(self.due, max(self.expires - lasts // RENEW_PART, now + shortest))
        self._plan_idle_check(now, params)

    def _plan_with_inflow(
        self, now: int, reply: LeaseReply, params: QuotaParams, longest: int, trip: int, stopped: Inflow | None
    ) -> None:
        """Let the inflow of *reply* come in from now on, and decide when to report next; *stopped* is the last one."""
        inflow = inflow_of(reply, params, self.balance, now)
        if stopped is not None:  # both parts were withheld for some of the trip
            came = int(min(stopped.rate, inflow.rate) * (now - self.sent_at))
            came = max(min(came, stopped.headroom, multiply(reply.room, params.cost)), 0)
            self.balance += came
            self.balance_at_last_count += came
            inflow.headroom = inflow.room - self.balance
        self.inflow = inflow
        shortest = max(TICK, trip)
        interval = min(max(reply.report_interval * 1000, shortest), longest)
        interval = min(interval, 2 * self.report_interval) if self.report_interval else shortest
        self.report_interval = interval
        self.deny_until = self.deny_extra_time = 0
        inflow.scarce = reply.wait > 0 or (
            reply.oversubscribed > 0 and reply.free * SCARCE_PART < params.capacity_units
        )
        likely = self.demand * ((trip * 13 // 10 + TICK + 2 * MILLISECOND) / SECOND)
        if not inflow.scarce:
            inflow.fetch_below = min(multiply(ceil(likely + 2 * sqrt(likely)), params.cost), inflow.room // STEPS)
        self.plan_inflow()
        lasts = self.expires - now
        self.due = max(min(now + interval, self.expires - lasts // RENEW_PART), now + shortest)
        self._plan_idle_check(now, params)

    def _plan_idle_check(self, now: int, params: QuotaParams) -> None:
        """Plan an idle check before the next report, so that permits go back soon after the last call."""
        self.units_requested_at_last_check = self.balance_at_last_count - self.balance + self.denied
        if self.units_requested_at_last_check:
            self.last_call_at = now
        # rare calls leave gaps: a few usual gaps do not make the lease idle
        self.idle_after = max(IDLE_AFTER, min(int(IDLE_GAPS * SECOND / max(self.demand, 0.001)), self.report_interval))
        self.idle_check_at = 0
        if (self.balance > params.cost or self.inflow is not None) and now + self.idle_after < self.due:
            self.report_at = self.due
            self.due = self.idle_check_at = now + self.idle_after

    def _plan_denial_of_large_calls(
        self, now: int, reply: LeaseReply, request: LeaseRequest, params: QuotaParams
    ) -> None:
        """Remember how long a denied call of several permits cannot be granted, where that is certain."""
        if reply.others or params.period:
            return
        served = count_served(reply.free_before, params.cost, request.waiting)
        refused = [permits for (count, permits), many in zip(request.waiting, served, strict=True) if many < count]
        if refused:
            least = multiply(min(refused), params.cost)
            units_missing = least - reply.free - self.balance
            if units_missing > 0:
                self.deny_min_units = least
                self.expected_free = least - self.balance
                self.deny_until = now + -(-units_missing // params.rate) * 1000

    def note_promised_retry(self, now: int, until: int, several: bool) -> None:
        """Remember *until*, the retry time that a denied caller is given."""
        self.last_promised_retry = until
        if several:
            self.last_promised_retry_of_several = max(self.last_promised_retry_of_several, until)
        if self.first_promised_retry <= now or until < self.first_promised_retry:
            self.first_promised_retry = until

    def _retry_is_promised(self, now: int, trip: int) -> bool:
        """Whether a caller was told to retry soon, and may come later than that; a lease now could leave nothing."""
        first, last = self.first_promised_retry, self.last_promised_retry
        if max(first, last) > max(now, self.deny_until + self.deny_extra_time):
            return True  # near the end of the window a lease of one permit might have run out by then
        # in this window held permits go back when that caller asks; in the next one they would count as used
        return last + TICK > now and last + MARGIN + TICK + 2 * trip >= self.window_ends

    def has_news(self) -> bool:
        """Whether a report would tell Redis anything."""
        return (
            self.balance > 0
            or self.balance_at_last_count != self.balance
            or self.denied > 0
            or self.debt > 0
            or self.refund > 0
            or self.inflow is not None
        )

    def is_forgettable(self, now: int) -> bool:
        """Whether nothing is lost if this lease is forgotten."""
        if self.in_flight or self.has_news() or now < self.keep_until:
            return False
        return now >= self.deny_until and now - self.last_call_at >= IDLE_AFTER
