"""The ledger of one key: what is free, and which nodes hold a lease. The same as in Redis and PostgreSQL, in Python.

Never one too many rests on these rules:

1. Refill stops at the capacity *minus what is leased out*, as it was before the report at hand. So what is free and
   what is leased is never more than the capacity, and no set of processes can spend more. Where a quota was lowered
   below what is leased, nothing is free until enough of that is spent, given back or burned.
2. A lease that runs out is burned: its holder may have spent it all.
3. A request carries a number that grows; an old request changes nothing. A grant whose reply was not received
   (`acked_seq` says so) is taken back: a process ignores the reply to any request but its latest. What was decided in
   it for waiting callers stays decided: it left the bucket, which may have refilled since.
4. The ledger believes nothing beyond what it granted: `held` and `returned` are cut to that.
5. A lease with inflow refills by itself, with a part of the rate, up to a room. The ledger counts all of the room as
   leased, and refills with that part of the rate less until the next request of the node arrives or the lease ends.

`headgate.hybrid.script` has the same in Lua and `headgate.hybrid.ledger_sql` in PL/pgSQL, with the same names in the
same order; the tests walk them through the same thousands of steps. The simulator and ``shared://`` run on this one.
"""

from __future__ import annotations

from copy import deepcopy
from math import ceil, floor

from headgate.hybrid.protocol import (
    DEMAND_PART,
    DRAINING_ABOVE,
    DRAINING_FACTOR,
    FULL_ABOVE,
    LEAST_ROOM,
    MIN_REPORT_PART,
    OK,
    OVERSUBSCRIBED_ABOVE,
    PARTS,
    SHARE_FACTOR,
    SHORT_OF_INFLOW,
    STALE,
    VOID,
    AccuracyProfile,
    LeaseReply,
    LeaseRequest,
    QuotaParams,
    count_served,
    time_until_free,
)

FOREVER = 1 << 52
STEP = 1_000_000  # microseconds: time stands still for the ledger while a clock is at most this far behind
LONGEST_INTERVAL = 3_600_000_000
LONGEST_LEASE = 91_000_000  # microseconds: a store keeps a ledger that much longer than its bucket needs to be full;
# a ledger with a longer lease, of an accuracy of many seconds, until that ends and its bucket is full after it


class NodeRecord:
    """What the ledger knows of one node."""

    __slots__ = ("debt", "demand", "exp", "granted", "inflow", "lease_id", "leased_out", "returned", "room", "seq")

    def __init__(self, lease_id: int) -> None:
        self.lease_id = lease_id
        self.seq = 0
        self.leased_out = 0  # permits leased to the node, its room included
        self.exp = 0
        self.demand = 0
        self.returned = 0  # permits given back, ever, as far as reported
        self.granted = 0  # permits of the latest grant
        self.debt = 0  # permits of debt charged since the last reply that is known to have arrived
        self.room = 0  # permits that the latest grant left for inflow
        self.inflow = 0  # of PARTS of the rate


class Ledger:
    """Everything that Redis keeps about one key. A new ledger is a key never seen: full, and nothing leased."""

    def __init__(self) -> None:
        self.params: QuotaParams | None = None
        self.at = 0
        self.free = 0  # bucket: units
        self.window = self.current = self.previous = 0  # windows: permits, leased ones counted as used
        self.leased_out = 0  # permits leased to all nodes; the field `out` of the Hash in Redis
        self.demand = 0
        self.exp = FOREVER  # no lease runs out before this time
        self.born = 0
        self.lost = 0
        self.inflow = 0  # of PARTS of the rate, to all nodes
        self.late = 0  # the end of the latest lease of more than LONGEST_LEASE
        self.nodes: dict[str, NodeRecord] = {}

    def sync(self, time: int, params: QuotaParams, profile: AccuracyProfile, request: LeaseRequest) -> LeaseReply:
        """Answer *request* at *time* of the server's clock; a peek changes nothing."""
        ledger = deepcopy(self) if request.op == "peek" else self
        return ledger._sync(time, params, profile, request)

    def _sync(self, time: int, params: QuotaParams, profile: AccuracyProfile, request: LeaseRequest) -> LeaseReply:
        now = self._open(time, params)
        free, ceiling = self._load(now)  # refill before expired leases are burned: until now they took up capacity
        loaded = free
        if now >= self.exp:
            top = self._top(params, ceiling)
            unclaimed = self._burn(now)
            if unclaimed:
                free = min(free + unclaimed, top)
        free -= self._overhang()
        window_ends_in = params.period - now % params.period if params.period else 0
        record = self.nodes.get(request.node)
        if request.op == "peek":
            own, node_count = record.leased_out if record else 0, len(self.nodes)
            return LeaseReply(
                OK, 0, 0, own, free, free, self.leased_out - own, node_count, 0, 0, window_ends_in, 0,
                self.current, self.previous,
            )  # fmt: skip

        if record and request.seq <= record.seq:
            self._save(now, loaded, free)
            return LeaseReply(STALE)
        if request.lease_id and (not record or record.lease_id != request.lease_id):
            if request.lease_id < self.born and not self.lost:
                self.lost = 1  # a lease older than the key: the data of the key was lost
                free = min(free, 0)
            self._save(now, loaded, free)
            return LeaseReply(VOID)
        if not record:
            record = self.nodes[request.node] = NodeRecord(now)
        if request.acked_seq < record.seq:  # the latest reply never arrived, and never will
            free += record.granted * params.cost
            self.leased_out -= record.granted + record.room
            record.leased_out -= record.granted + record.room
        else:
            record.debt = 0
        self.inflow -= record.inflow
        if not request.lease_id:  # the node holds nothing any more; what it held may be spent
            record.lease_id = now
            record.returned = request.returned
        held = min(request.held, record.leased_out) if request.lease_id and request.op != "release" else 0
        returned = max(0, min(request.returned - record.returned, record.leased_out - held))
        self.leased_out -= record.leased_out - held
        free += returned * params.cost

        if request.op == "reset":
            self.previous = 0
            if params.period:
                loaded = params.capacity_units - self.current * params.cost
            ceiling, free = params.capacity_units, self._top(params, params.capacity_units)
        top = self._top(params, ceiling)
        if not params.period:
            free = min(free, top)  # leases of a larger quota may give back more than the bucket holds by now
        free = max(free, min(free + request.refund * params.cost, top))
        debt = max(request.debt - record.debt, 0)  # a request whose reply was lost may have been charged already
        if debt:
            free = min(free, max(free - debt * params.cost, -params.capacity_units))
        free_before, refused = free, 0
        served = count_served(free, params.cost, request.waiting)
        for (count, permits), many in zip(request.waiting, served, strict=True):
            free -= many * permits * params.cost
            if many < count:
                refused = max(refused, permits)

        self.demand += request.demand - record.demand
        node_count = len(self.nodes)
        oversubscribed = self.demand * 1000 > params.speed * OVERSUBSCRIBED_ABOVE
        granted, full, rationed = self._grant(params, profile, request, held, free, node_count, refused)
        free -= granted * params.cost
        self.leased_out += granted
        room, inflow, short = self._share(params, profile, request, held + granted, free, node_count, refused)
        self.leased_out += room
        others = self.leased_out - held - granted - room
        report_interval = self._report_interval(params, profile, full, oversubscribed, free)
        if inflow and not short:
            report_interval = LONGEST_INTERVAL  # as long as the node's accuracy allows
        wait = 0
        if free < params.cost:
            wait = self._time_until_free(now, free) if others == 0 else report_interval
        elif oversubscribed and rationed and 2 * request.demand < self.demand and 2 * free < params.capacity_units:
            wait = report_interval  # more is free, but other nodes ask for most of it

        record.seq = request.seq
        record.leased_out = held + granted + room
        exp = now + request.ttl
        if params.period:
            exp = min(exp, now - now % params.period + params.period)
        record.exp = max(exp, record.exp) if held else exp  # the holder might never hear that its lease was cut short
        record.demand = request.demand
        record.returned = request.returned
        record.granted = granted
        record.debt += debt
        record.room = room
        record.inflow = inflow
        self.inflow += inflow
        self.exp = min(self.exp, record.exp)
        if record.exp > now + LONGEST_LEASE:
            self.late = max(self.late, record.exp)
        if request.op == "release":
            self.demand -= record.demand
            del self.nodes[request.node]
        self._save(now, loaded, free)
        return LeaseReply(
            OK, record.lease_id, granted, held + granted, free_before, free, others, node_count, wait,
            report_interval, window_ends_in, int(oversubscribed), self.current, self.previous, room, inflow,
        )  # fmt: skip

    def _open(self, time: int, params: QuotaParams) -> int:
        """Convert the state of a changed quota or of a clock that stepped back; return the time to use."""
        if self.params is None:
            self.params, self.at, self.born, self.free = params, time, time, params.capacity_units
            self.window = time // params.period if params.period else 0
        elif self.params != params:
            self.free = max(self.free // self.params.cost * params.cost, -params.capacity_units)
            self.window = self.at // params.period if params.period else 0
            self.params = params
        back = self.at - time
        if back > STEP:  # the clock stepped back: nothing refills for that time, and leases keep their remaining time
            self.at = time
            self.window = min(self.window, time // params.period) if params.period else 0
            for record in self.nodes.values():
                record.exp -= back
            self.exp -= back
            self.late = max(self.late - back, 0)
        return max(time, self.at)

    def _load(self, now: int) -> tuple[int, int]:
        """Units that are free at *now*, and how many would be free with nothing spent and nothing leased."""
        params = self.params
        assert params
        if params.kind == "bucket":
            top = self._top(params, params.capacity_units)
            came = (now - self.at) * params.rate
            if self.inflow:
                came -= withheld(came, self.inflow)
            return min(self.free + came, top), params.capacity_units
        window = now // params.period
        if window > self.window:
            self.previous = self.current if window == self.window + 1 else 0
            self.window, self.current = window, 0
        ceiling = params.capacity_units
        if params.kind == "counter":
            ceiling -= self.previous * (params.cost - now % params.period // params.step)
        return ceiling - self.current * params.cost, ceiling

    def _top(self, params: QuotaParams, ceiling: int) -> int:
        """Units that may be free beside what is leased; none if leases of a larger quota exceed the capacity."""
        top = ceiling - self.leased_out * params.cost
        return top if params.period else max(top, 0)

    def _save(self, now: int, loaded: int, free: int) -> None:
        params = self.params
        assert params
        self.at = now
        if params.kind == "bucket":
            self.free = free
        else:
            self.current += (loaded - free) // params.cost

    def _burn(self, now: int) -> int:
        """Drop the leases that have run out: their permits are neither outstanding any more nor free.

        Return the units that were withheld as the inflow of these leases after their end.
        """
        self.exp = FOREVER
        unclaimed = 0
        for node, record in list(self.nodes.items()):
            if record.exp <= now:
                self.leased_out -= record.leased_out
                self.demand -= record.demand
                if record.inflow and self.params:
                    self.inflow -= record.inflow
                    came = (now - max(record.exp, self.at)) * self.params.rate
                    unclaimed += came - withheld(came, PARTS - record.inflow)
                del self.nodes[node]
            else:
                self.exp = min(self.exp, record.exp)
        return unclaimed

    def _overhang(self) -> int:
        """Units of leases that outlive their window after a change of clock or quota: used in this one."""
        params = self.params
        assert params
        return max(self.leased_out - self.current, 0) * params.cost if params.period else 0

    def _grant(
        self,
        params: QuotaParams,
        profile: AccuracyProfile,
        request: LeaseRequest,
        held: int,
        free: int,
        node_count: int,
        refused: int,
    ) -> tuple[int, bool, bool]:
        """Permits to grant, whether the bucket is full, and whether the grant was cut for the sake of other nodes."""
        full = (free + self.leased_out * params.cost) / params.capacity_units > FULL_ABOVE
        free_permits = max(free // params.cost, 0)
        # no lease takes the permits that a refused caller will come back for; with a counter any lease would
        leasable = params.limit - refused - self.leased_out if params.kind != "counter" or refused == 0 else 0
        if request.op != "sync" or request.target <= held or leasable < 1:
            return 0, full, False
        if request.is_reserve:
            plenty = full and node_count * 1000 <= profile.report_full * params.limit
            return (min(request.target - held, free_permits, leasable) if plenty else 0), full, False
        part = request.demand / self.demand if self.demand > 0 else 1 / node_count
        most = profile.leased * params.limit / 1000
        cap = most * max(part, 1 / node_count) - held
        fair = max(1, ceil(free_permits * min(1, SHARE_FACTOR * part)))
        granted = max(floor(min(request.target - held, cap, fair, free_permits, most - self.leased_out, leasable)), 0)
        return granted, full, fair <= granted < request.target - held

    def _share(
        self,
        params: QuotaParams,
        profile: AccuracyProfile,
        request: LeaseRequest,
        has: int,
        free: int,
        node_count: int,
        refused: int,
    ) -> tuple[int, int, bool]:
        """Room beside the *has* permits that the node has, the inflow that fills it, and whether that is too little."""
        if not request.inflow or request.op != "sync" or params.period or request.target < 1 or request.is_reserve:
            return 0, 0, False
        if node_count == 1 or refused > 1:
            return 0, 0, False  # what is told to denied callers is exact for one process, and for one bucket
        part = request.demand / self.demand if self.demand > 0 else 1 / node_count
        most = profile.leased * params.limit / 1000
        unused = (params.capacity_units - free) // params.cost - self.leased_out  # neither free nor leased
        cap = most * max(part, 1 / node_count)
        room = max(floor(min(min(request.target, cap) - has, most - self.leased_out, unused)), 0)
        wanted = floor(PARTS * (request.demand / max(self.demand, params.speed * (DEMAND_PART - 1) / DEMAND_PART)))
        inflow = min(wanted, PARTS - self.inflow)
        if inflow < 1 or has + room < LEAST_ROOM:
            return 0, 0, False
        return room, inflow, inflow < wanted * SHORT_OF_INFLOW

    def _report_interval(
        self, params: QuotaParams, profile: AccuracyProfile, full: bool, oversubscribed: bool, free: int
    ) -> int:
        """Microseconds until the next report: the time in which demand spends a part of the capacity."""
        part = float(profile.report_full if full else profile.report)
        if full and self.demand * 1000 > params.speed * DRAINING_ABOVE:
            part = part / DRAINING_FACTOR
        if oversubscribed and params.kind == "bucket":  # unreported permits leave no room for refill
            spent = params.capacity_units - free - self.leased_out * params.cost
            part = min(part, max(spent / params.capacity_units * 500, MIN_REPORT_PART))
        speed = max(min(self.demand, params.speed), 1)
        return floor(min(part * params.limit * 1_000_000 / speed, LONGEST_INTERVAL))

    def _time_until_free(self, now: int, free: int) -> int:
        """Microseconds until a permit can be free, if no lease is given back."""
        params = self.params
        assert params
        if params.kind == "bucket":
            return -((free - params.cost) // params.rate)
        elapsed = now % params.period
        if params.kind == "fixed":
            return params.period - elapsed
        ceiling = params.capacity_units - self.previous * (params.cost - elapsed // params.step)
        return time_until_free(params, elapsed, (ceiling - free) // params.cost, self.previous, 1)


def withheld(came: int, inflow: int) -> int:
    """The part *inflow* of PARTS of *came* units, rounded up. No product in it is larger than *came* or PARTS squared.

    So Lua computes the same.
    """
    whole, rest = divmod(came, PARTS)
    return inflow * whole - (-inflow * rest // PARTS)
