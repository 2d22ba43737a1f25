"""The ledger of one key: what is free, and who holds a lease. This is the script in Redis, in Python.

Rules, on which everything rests:

1. Refill stops at the capacity *minus what is leased out*, as it was before the report at hand. So what is free and
   what is leased is never more than the capacity, and no set of processes can spend more. Where a quota was lowered
   below what is leased, nothing is free until enough of that is spent, given back or burned.
2. A lease that runs out is burned: its holder may have spent it all.
3. A report carries a number that grows; an old one changes nothing. A lease whose reply was not received (`ack` says
   so) is taken back: the process drops replies to anything but its latest ask. What was decided for callers in it is
   not: it left the bucket, which may have refilled since.
4. Nothing is believed beyond what the ledger granted: `held` and `returned` are cut to it.

`headgate.hybrid.script` has the same in Lua, the same names in the same order; the tests walk both through the same
thousands of steps. The simulator runs on this one.
"""

from __future__ import annotations

from copy import deepcopy
from math import ceil, floor

from headgate.hybrid.protocol import (
    BRISK,
    BUSY,
    DRAINING,
    FULL,
    OK,
    RUSH,
    STALE,
    VOID,
    WIDE,
    Ask,
    Law,
    Reply,
    Style,
    serve,
    soonest,
)

FOREVER = 1 << 52
STEP = 1_000_000  # a clock that is less than this behind is waited for
LONGEST_PAUSE = 3_600_000_000


class Record:
    """One node's part."""

    __slots__ = ("debt", "demand", "exp", "lease", "lid", "out", "returned", "seq")

    def __init__(self, lid: int) -> None:
        self.lid = lid
        self.seq = 0
        self.out = 0  # permits leased to it
        self.exp = 0
        self.demand = 0
        self.returned = 0  # ever, as far as reported
        self.lease = 0  # permits of the latest grant
        self.debt = 0  # permits of debt that were charged since a reply was last known to have arrived


class Ledger:
    """All that Redis keeps of a key. A new one is a key never seen: full, and nothing leased."""

    def __init__(self) -> None:
        self.law: Law | None = None
        self.at = 0
        self.free = 0  # bucket: units
        self.window = self.current = self.previous = 0  # windows: permits, leased ones counted as used
        self.out = 0
        self.demand = 0
        self.exp = FOREVER  # no lease runs out before
        self.born = 0
        self.lost = 0
        self.nodes: dict[str, Record] = {}

    def sync(self, time: int, law: Law, style: Style, ask: Ask) -> Reply:
        """Answer *ask* at *time* of the server's clock; to peek changes nothing."""
        ledger = deepcopy(self) if ask.op == "peek" else self
        return ledger._sync(time, law, style, ask)

    def _sync(self, time: int, law: Law, style: Style, ask: Ask) -> Reply:
        now = self._open(time, law)
        free, ceiling = self._load(now)  # refill first: what was leased until now left no room for it
        loaded = free
        if now >= self.exp:
            self._burn(now)
        free -= self._overhang()
        ends = law.period - now % law.period if law.period else 0
        record = self.nodes.get(ask.node)
        if ask.op == "peek":
            own, many = record.out if record else 0, len(self.nodes)
            return Reply(OK, 0, 0, own, free, free, self.out - own, many, 0, 0, ends, 0, self.current, self.previous)

        if record and ask.seq <= record.seq:
            self._save(now, loaded, free)
            return Reply(STALE)
        if ask.lid and (not record or record.lid != ask.lid):
            if ask.lid < self.born and not self.lost:  # a lease that is older than the key: its data was lost
                self.lost = 1
                free = min(free, 0)
            self._save(now, loaded, free)
            return Reply(VOID)
        if not record:
            record = self.nodes[ask.node] = Record(now)
        if ask.ack < record.seq:  # the latest reply never arrived, and never will
            free += record.lease * law.cost
            self.out -= record.lease
            record.out -= record.lease
        else:
            record.debt = 0
        if not ask.lid:  # it holds nothing any more; what it held may be spent
            record.lid = now
            record.returned = ask.returned
        held = min(ask.held, record.out) if ask.lid and ask.op != "release" else 0
        returned = max(0, min(ask.returned - record.returned, record.out - held))
        self.out -= record.out - held
        free += returned * law.cost

        if ask.op == "reset":
            self.previous = 0
            if law.period:
                loaded = law.room - self.current * law.cost
            ceiling, free = law.room, self._top(law, law.room)
        top = self._top(law, ceiling)
        if not law.period:
            free = min(free, top)  # more may have come back than the bucket holds by now: leases of a larger quota
        free = max(free, min(free + ask.refund * law.cost, top))
        debt = max(ask.debt - record.debt, 0)  # some may have been charged by an ask whose reply was lost
        if debt:
            free = min(free, max(free - debt * law.cost, -law.room))
        before, refused = free, 0
        for (count, permits), many in zip(ask.needs, serve(free, law.cost, ask.needs), strict=True):
            free -= many * permits * law.cost
            if many < count:
                refused = max(refused, permits)

        self.demand += ask.demand - record.demand
        many = len(self.nodes)
        busy = self.demand * 1000 > law.speed * BUSY
        lease, full, rationed = self._lease(law, style, ask, held, free, many, refused)
        free -= lease * law.cost
        self.out += lease
        others = self.out - held - lease
        pause = self._pause(law, style, full, busy, free)
        wait = 0
        if free < law.cost:
            wait = self._soonest(now, free) if others == 0 else pause
        elif busy and rationed and 2 * ask.demand < self.demand and 2 * free < law.room:
            wait = pause  # there is more, but others ask for most of it

        record.seq = ask.seq
        record.out = held + lease
        exp = now + ask.ttl
        if law.period:
            exp = min(exp, now - now % law.period + law.period)
        record.exp = max(exp, record.exp) if held else exp  # its holder may never hear that it was cut short
        record.demand = ask.demand
        record.returned = ask.returned
        record.lease = lease
        record.debt += debt
        self.exp = min(self.exp, record.exp)
        if ask.op == "release":
            self.demand -= record.demand
            del self.nodes[ask.node]
        self._save(now, loaded, free)
        return Reply(
            OK, record.lid, lease, record.out, before, free, others, many, wait, pause, ends, int(busy),
            self.current, self.previous,
        )  # fmt: skip

    def _open(self, time: int, law: Law) -> int:
        """The time to go by; bring a state of another law or of another clock into this one."""
        if self.law is None:
            self.law, self.at, self.born, self.free = law, time, time, law.room
            self.window = time // law.period if law.period else 0
        elif self.law != law:
            self.free = max(self.free // self.law.cost * law.cost, -law.room)
            self.window = self.at // law.period if law.period else 0
            self.law = law
        back = self.at - time
        if back > STEP:  # the clock stepped back: no refill for that, and leases last as long as they did
            self.at = time
            self.window = min(self.window, time // law.period) if law.period else 0
            for record in self.nodes.values():
                record.exp -= back
            self.exp -= back
        return max(time, self.at)

    def _load(self, now: int) -> tuple[int, int]:
        """Units that are free at *now*, and how many there would be with nothing spent and nothing leased."""
        law = self.law
        assert law
        if law.kind == "bucket":
            return min(self.free + (now - self.at) * law.rate, self._top(law, law.room)), law.room
        window = now // law.period
        if window > self.window:
            self.previous = self.current if window == self.window + 1 else 0
            self.window, self.current = window, 0
        ceiling = law.room
        if law.kind == "counter":
            ceiling -= self.previous * (law.cost - now % law.period // law.step)
        return ceiling - self.current * law.cost, ceiling

    def _top(self, law: Law, ceiling: int) -> int:
        """Units that may be free beside what is leased. Leases of a larger quota may be more than all: then none."""
        top = ceiling - self.out * law.cost
        return top if law.period else max(top, 0)

    def _save(self, now: int, loaded: int, free: int) -> None:
        law = self.law
        assert law
        self.at = now
        if law.kind == "bucket":
            self.free = free
        else:
            self.current += (loaded - free) // law.cost

    def _burn(self, now: int) -> None:
        """Drop the leases that have run out: what was leased is not outstanding any more, and not free either."""
        self.exp = FOREVER
        for node, record in list(self.nodes.items()):
            if record.exp <= now:
                self.out -= record.out
                self.demand -= record.demand
                del self.nodes[node]
            else:
                self.exp = min(self.exp, record.exp)

    def _overhang(self) -> int:
        """Units of leases that outlive their window, after a change of clock or law: they are used in this one."""
        law = self.law
        assert law
        return max(self.out - self.current, 0) * law.cost if law.period else 0

    def _lease(
        self, law: Law, style: Style, ask: Ask, held: int, free: int, many: int, refused: int
    ) -> tuple[int, bool, bool]:
        """Permits to grant, whether the bucket is full, and whether there were more but for the others' sake."""
        full = (free + self.out * law.cost) / law.room > FULL
        there = max(free // law.cost, 0)
        # what is leased is not in the way of who was refused and comes again; with a counter all of it would be
        room = law.limit - refused - self.out if law.kind != "counter" or refused == 0 else 0
        if ask.op != "sync" or ask.want <= held or room < 1:
            return 0, full, False
        if ask.spare:
            plenty = full and many * 1000 <= style.report_full * law.limit
            return (min(ask.want - held, there, room) if plenty else 0), full, False
        part = ask.demand / self.demand if self.demand > 0 else 1 / many
        most = style.leased * law.limit / 1000
        cap = most * max(part, 1 / many) - held
        fair = max(1, ceil(there * min(1, WIDE * part)))
        lease = max(floor(min(ask.want - held, cap, fair, there, most - self.out, room)), 0)
        return lease, full, fair <= lease < ask.want - held

    def _pause(self, law: Law, style: Style, full: bool, busy: bool, free: int) -> int:
        """Until the next report: as long as it takes to spend a part of the capacity, at the rate that counts."""
        part = float(style.report_full if full else style.report)
        if full and self.demand * 1000 > law.speed * RUSH:
            part = part / DRAINING
        if busy and law.kind == "bucket":  # what is spent and not reported leaves no room for what comes in
            part = min(part, max((law.room - free - self.out * law.cost) / law.room * 500, BRISK))
        spent = max(min(self.demand, law.speed), 1)
        return floor(min(part * law.limit * 1_000_000 / spent, LONGEST_PAUSE))

    def _soonest(self, now: int, free: int) -> int:
        """Microseconds until there can be a permit, if no lease is given back."""
        law = self.law
        assert law
        if law.kind == "bucket":
            return -((free - law.cost) // law.rate)
        elapsed = now % law.period
        if law.kind == "fixed":
            return law.period - elapsed
        ceiling = law.room - self.previous * (law.cost - elapsed // law.step)
        return soonest(law, elapsed, (ceiling - free) // law.cost, self.previous, 1)
