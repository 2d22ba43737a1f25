"""The leases of one limiter in this process, by key, and all its decisions: from a lease, or from a reply of Redis.

`try_acquire` is the hot path: no I/O, and no lock where `LOCKED` is false. A call that the lease cannot decide goes on
to `ask_redis`, which the subclasses implement for threads and for event loops; `decide_waiter` makes its answer then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headgate._mypyc import FREE_THREADED, mypyc_attr
from headgate.algorithms.algorithm import multiply
from headgate.decision import COMPILED, Decision, LimiterDecision, Units, decision_in
from headgate.hybrid.fallback_policy import BackendHealth, FallbackPolicy
from headgate.hybrid.inflow import Inflow
from headgate.hybrid.lease import Lease
from headgate.hybrid.protocol import LeaseReply, QuotaParams, quota_params, time_until_free
from headgate.keys import check_key
from headgate.rule import Rule, check_permits
from headgate.stores.key_table import TryAcquire

if TYPE_CHECKING:
    from headgate.hybrid.manager import LeaseManager

# As in the memory store: the compiled steps from look-up to saved balance run no Python code and start no garbage
# collection, so no other thread runs between them where there is an interpreter lock.
LOCKED: Final = not COMPILED or FREE_THREADED

ONE: Final[object] = 1  # compared by identity: quicker, and True is another object

RETRY_WHILE_OTHERS_HOLD_US: Final = 1_000_000  # for a denied caller, if other processes hold what it needs


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseTable:
    """The leases of one limiter, by key, with the rule and the clock that a decision takes.

    Callers' arguments are Any: they are checked here, and compiled code would turn True into 1 before that.
    """

    def __init__(self, manager: LeaseManager, rule: Rule, on_store_error: str) -> None:
        params = quota_params(rule)
        units: Units = rule.algorithm
        self.manager = manager
        self.rule = rule
        self.params: QuotaParams = params
        self.units = units
        self.limit = units.limit
        self.cost = units.cost
        self.rate = units.rate
        self.capacity_units = units.limit * units.cost
        self.period = params.period  # microseconds; 0 for a bucket
        self.is_sliding_counter = params.kind == "counter"
        self.refill_queue = manager.refill_queue
        self.read_clock = manager.read_clock
        self.health: BackendHealth = manager.health
        self.policy = FallbackPolicy(on_store_error, rule.name, rule.quotas[0], manager.health)
        self.leases: dict[Any, Lease] = {}
        self.refunded = 0  # units that were put back into a lease: callers had asked for them all the same
        self.use_lock(manager.lock)

    def use_lock(self, lock: Any) -> None:
        """Use *lock* from now on: a thread that held the old one does not exist in the child of a fork."""
        self.lock = lock
        self.acquire_lock = lock.acquire
        self.release_lock = lock.release

    def try_acquire(self, key: Any, permits: Any = 1, timeout: Any = None) -> Any:
        """Spend *permits* of *key* from its lease, deny them, or ask Redis and wait *timeout* seconds at most."""
        return decide(self, key, permits, timeout)

    def ask_redis(self, op: str, key: str, permits: int, timeout: Any) -> Any:
        """Have Redis decide, and wait for it.

        The base class returns None; the simulator and tests queue a waiter themselves.
        """
        return None

    def spend(self, lease: Lease, price: int, now: int) -> bool:
        """Spend *price* units of *lease*, if it has them. A method of this class, so that it is one compiled step."""
        if now >= lease.expires or lease.balance < price:
            return lease.inflow is not None and lease.spend_inflow(now, price)
        lease.balance -= price
        return True

    def peek_locally(self, key: str, permits: int) -> Decision | None:
        """The answer of `try_acquire` with nothing spent; None if only Redis knows."""
        with self.lock:
            lease = self.leases.get(key)
            if lease is None:
                return None
            now = self.read_clock()
            price = multiply(permits, self.cost)
            lease.add_inflow(now)
            left = lease.balance - price
            if left >= 0 and now < lease.expires and lease.balance > 0:
                units_left = left + lease.free_in_redis
                return decision_with(self, True, units_left, reset_units(self, lease, now, units_left), 0)
            if now < lease.deny_until and can_deny(self, lease, price):
                return deny(self, lease, now, price)
            return deny_by_inflow(self, lease, now, price)

    def refund_locally(self, key: str, permits: int) -> bool:
        """Put back what was spent since the last report; return whether that was all. The next report has the rest."""
        with self.lock:
            lease = self.leases.get(key)
            if lease is None:
                return False
            permits = min(permits, self.limit)
            price = multiply(permits, self.cost)
            spent = lease.balance_at_last_count - lease.balance
            if lease.inflow is not None:  # only what was spent since inflow was added has left room
                spent = min(spent, lease.inflow.room - lease.inflow.headroom - lease.balance)
            put_back = max(min(price, spent), 0) if self.read_clock() < lease.expires else 0
            lease.balance += put_back
            self.refunded += put_back
            lease.deny_until = 0
            # no more than fills the bucket now: some of that may be spent by the time that Redis hears of the refund
            held_by_others, refunded = multiply(lease.others, self.cost), multiply(lease.refund, self.cost)
            units_missing = self.capacity_units - lease.balance - lease.free_in_redis - held_by_others - refunded
            lease.refund += max(-(-min(price - put_back, units_missing) // self.cost), 0)
            return lease.refund == 0

    def decide_waiter(self, lease: Lease, reply: LeaseReply, permits: int, allowed: bool, now: int) -> Decision:
        """The answer to a caller that waited for *reply*."""
        params = self.params
        total = reply.free + lease.balance
        if allowed:
            units_left = max(total, 0)
            return decision_with(self, True, units_left, reset_units(self, lease, now, units_left), 0)
        price = permits * params.cost
        units_left = max(min(total, price - 1), 0)
        # a retry time no earlier than that of a denial without a trip
        until = lease.deny_until + lease.deny_extra_time if price >= lease.deny_min_units else 0
        wait = -((now - until) // 1000)
        if params.period:
            wait = max(wait, window_frees_in(self, reply, permits, lease.balance // params.cost))
            lease.note_promised_retry(now, now + wait * 1000, permits > 1)
            return decision_with(self, False, units_left, max(window_left(self, lease, now), wait), wait)
        units_missing = max(price - total, wait * params.rate)
        if lease.inflow is not None:
            units_missing = max(units_missing, inflow_wait(self, lease, lease.inflow, now, price))
        if permits > 1 and price > params.capacity_units - reply.others * params.cost:
            # no refill is enough: other processes have to give permits back first
            units_missing = max(units_missing, RETRY_WHILE_OTHERS_HOLD_US * params.rate)
        lease.note_promised_retry(now, now + -(-units_missing // params.rate) * 1000, permits > 1)
        reset = max(params.capacity_units - units_left, units_missing)
        return decision_with(self, False, units_left, reset, units_missing)

    def decide_peek(self, lease: Lease, reply: LeaseReply, permits: int, now: int) -> Decision:
        """The answer to a peek, or how things stand after a reset."""
        params = self.params
        total = reply.free + (lease.balance if now < lease.expires else 0)
        units_left = max(total, 0)
        price = permits * params.cost
        after = units_left - price
        reset = params.capacity_units - (after if after >= 0 else units_left)
        if params.period:
            reset = reply.window_ends_in + (params.period if self.is_sliding_counter else 0)
        if after >= 0:
            return decision_with(self, True, after, reset, 0)
        wait = window_frees_in(self, reply, permits, reply.leased_here) if params.period else price - total
        return decision_with(self, False, units_left, max(reset, wait), wait)


# Functions, because a compiled class with interpreted subclasses calls its own methods through Python.


def decide(table: LeaseTable, key: Any, permits: Any, timeout: Any) -> Any:
    """Decide here: spend from the lease, deny, or let the policy answer in an outage. Otherwise ask Redis."""
    price = table.cost if permits is ONE else multiply(check_permits(permits, table.limit), table.cost)
    if type(key) is not str:
        key = check_key(key)
    try:
        if LOCKED:
            table.acquire_lock()
        lease = table.leases[key]
        now = table.read_clock()
        left = lease.balance - price
        if left >= 0 and now < lease.expires:
            lease.balance = left
            if left <= lease.refill_below:
                if lease.must_fetch(now):
                    lease.refill_below = -1
                    table.refill_queue.append(lease)
                left = lease.balance  # with what has come in meanwhile
            used = table.capacity_units - left - lease.free_in_redis
            decision = LimiterDecision()
            decision._allowed = True
            decision._degraded = False
            decision._units = table.units
            decision._used = used
            decision._reset = used if table.period == 0 else window_left(table, lease, now)
            decision._retry = 0
            return decision
        if now < lease.deny_until and can_deny(table, lease, price):
            lease.denied += price
            return deny(table, lease, now, price)
        if lease.inflow is not None:
            made = decide_by_inflow(table, lease, now, price)
            if made is not None:
                return made
        if table.health.outage_error is not None:
            table.policy.requested += price // table.cost
            return table.policy.take(lease, price // table.cost, now)
    except KeyError:
        check_key(key)
    finally:
        if LOCKED:
            try:
                table.release_lock()
            except RuntimeError:
                pass  # a signal interrupted the call before it held the lock
    return table.ask_redis("take", key, int(permits), timeout)


def can_deny(table: LeaseTable, lease: Lease, price: int) -> bool:
    """Whether a call for *price* units can be denied here without asking Redis.

    If so, the retry time stays correct once unreported permits are reported.
    """
    if price < lease.deny_min_units:
        return False
    if table.is_sliding_counter:  # held permits, and those of a report under way, would count in the next window
        if price == table.cost:
            return lease.in_flight == 0 or lease.deny_until + lease.deny_extra_time < lease.window_ends
        return lease.balance == 0 and lease.in_flight == 0
    # permits that were spent and not reported cannot have refilled
    return price <= table.capacity_units - lease.unreported - lease.balance_at_last_count + lease.balance


def deny(table: LeaseTable, lease: Lease, now: int, price: int) -> Decision:
    """The denial of a call for *price* units, with a retry time from what is known here."""
    usable_here = lease.balance if now < lease.expires else 0
    until = lease.deny_until + lease.deny_extra_time
    wait = -((now - until) // 1000)  # microseconds, rounded up
    if table.period == 0:
        wait = multiply(wait, table.rate)
        units_short = price - lease.expected_free - usable_here
        if units_short > 0:
            wait += units_short
            until += multiply(-(-units_short // table.rate), 1000)
    elif table.is_sliding_counter and (price > table.cost or lease.others == 0):
        left = -((now - lease.window_ends_by) // 1000)
        if left > 0:
            own, permits, elapsed = usable_here // table.cost, price // table.cost, table.period - left
            wait = max(wait, time_until_free(table.params, elapsed, lease.current, lease.previous, permits, own))
            until = now + multiply(wait, 1000)
    lease.note_promised_retry(now, until, price > table.cost)
    used = table.capacity_units - min(usable_here + lease.free_in_redis, price - 1)
    reset = used if table.period == 0 else window_left(table, lease, now)
    return decision_in(table.units, False, used, max(reset, wait), wait, False)


def decide_by_inflow(table: LeaseTable, lease: Lease, now: int, price: int) -> Decision | None:
    """Spend *price* units after adding what has come in by itself, or deny them; None: only Redis knows."""
    if lease.spend_inflow(now, price):
        units_left = lease.balance + lease.free_in_redis
        return decision_with(table, True, units_left, reset_units(table, lease, now, units_left), 0)
    denied = deny_by_inflow(table, lease, now, price)
    if denied is not None:
        lease.denied += price
    return denied


def deny_by_inflow(table: LeaseTable, lease: Lease, now: int, price: int) -> Decision | None:
    """The denial of a call for *price* units until so much has come in by itself; None: only Redis knows."""
    inflow = lease.inflow
    if inflow is None or not inflow.scarce or now >= lease.expires or price > inflow.room:
        return None
    if lease.in_flight and now >= lease.last_promised_retry:
        return None  # this may be the caller that was told to come back now: Redis knows what has come in meanwhile
    wait = inflow_wait(table, lease, inflow, now, price)
    used = table.capacity_units - min(lease.balance + lease.free_in_redis, price - 1)
    return decision_in(table.units, False, used, max(used, wait), wait, False)


def inflow_wait(table: LeaseTable, lease: Lease, inflow: Inflow, now: int, price: int) -> int:
    """Units that refill until *price* units have come into *lease*, whatever a report loses; noted as a retry time."""
    margin = (
        table.cost if price > table.cost else 0
    )  # inflow may end meanwhile, and leave parts of permits here and there
    until = now + inflow.nanoseconds_until(price + margin - lease.balance)
    until = min(until, max(lease.due, lease.report_at if lease.idle_check_at else 0, now)) + table.manager.trip_time
    lease.note_promised_retry(now, until, False)
    return multiply(-((now - until) // 1000), table.rate)


def decision_with(table: LeaseTable, allowed: bool, units_left: int, reset: int, retry: int) -> Decision:
    """A decision that leaves *units_left* units; *reset* and *retry* as in `reset_units`."""
    return decision_in(table.units, allowed, table.capacity_units - units_left, reset, retry)


def reset_units(table: LeaseTable, lease: Lease, now: int, units_left: int) -> int:
    """The decision's time until the key is as good as new: units of a bucket, microseconds of a window."""
    return table.capacity_units - units_left if table.period == 0 else window_left(table, lease, now)


def window_left(table: LeaseTable, lease: Lease, now: int) -> int:
    """Microseconds until the permits of this window count no more."""
    left = -((now - lease.window_ends_by) // 1000)
    if left < 0:
        left = 0
    return left + table.period if table.is_sliding_counter else left


def window_frees_in(table: LeaseTable, reply: LeaseReply, permits: int, own: int) -> int:
    """Microseconds until a window has *permits* free, if no process spends any or gives any back."""
    if table.params.kind == "fixed":
        return reply.window_ends_in
    elapsed = table.params.period - reply.window_ends_in
    return time_until_free(table.params, elapsed, reply.current, reply.previous, permits, own)


@mypyc_attr(allow_interpreted_subclasses=True)
class TryAcquireFromLease(TryAcquire):
    """`HybridLimiter.try_acquire`. It stands here to be compiled: so it calls `decide` directly."""

    _leases: LeaseTable | None  # the backend; None for a limiter of `with_timeout`, whose backend is called by `_call`

    def try_acquire(self, key: Any, permits: Any = 1, floor: Any = None) -> Decision:
        """Spend *permits* from *key*; nothing is spent when denied. No round trip where the lease suffices."""
        if floor is not None:
            return self._take_above(key, permits, floor)
        leases = self._leases
        decision: Decision = self._call(key, permits) if leases is None else decide(leases, key, permits, None)
        return decision
