"""One process's lease on one key: a pure state machine. No I/O, no clock; times are nanoseconds that somebody tells.

A caller spends from `balance` while the lease lasts. A report (`report`) says what is held and asks for more; until
its reply is taken in (`accept`) or given up (`lose`) there is no other. What goes back is taken from the balance
*before* it is reported, what is granted is added, never set: callers go on spending while a report is under way.

How much to hold and when to report follows demand: enough for one pause and the trip after it, and a root of that for
chance. A key that is asked for now and then holds one spare permit; one that nobody asks for holds nothing.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Any, Final

from headgate.algorithms.algorithm import multiply
from headgate.hybrid.protocol import OK, VOID, Ask, Law, Reply, Style, serve, soonest

MILLISECOND: Final = 1_000_000  # nanoseconds
SECOND: Final = 1_000_000_000

TICK: Final = 10 * MILLISECOND  # the synchroniser looks around so often, and makes trips no more often of its own
TTL: Final = 6 * SECOND
SPARE_TTL: Final = 30 * SECOND
IDLE: Final = SECOND // 2  # without a caller: what is held goes back, but for a spare
FORGOTTEN: Final = 20 * SECOND  # without a caller: the spare goes back too
MARGIN: Final = 5 * MILLISECOND  # a lease ends here before it ends there, and clocks may differ by a thousandth
QUICK: Final = SECOND // 20  # demand follows many calls with this time constant
SLOW: Final = SECOND  # and few, or none, with this one
FEW: Final = 4
ALONE: Final = SECOND // 5  # a process that is alone at a key which is used up asks no more often of its own
CERTAIN: Final = 2 * SECOND  # a refusal is repeated for so long without asking: somebody else may reset or refund


class Lease:
    """Units are those of the law: *cost* of them are a permit."""

    __slots__ = (
        "ack",
        "asked_at",
        "balance",
        "beyond",
        "born",
        "counted_at",
        "current",
        "debt",
        "demand",
        "denied",
        "deny_from",
        "deny_until",
        "doubt",
        "due",
        "ends",
        "expires",
        "flight",
        "glance",
        "home",
        "ill",
        "key",
        "known",
        "later",
        "latest",
        "lid",
        "look",
        "low",
        "mark",
        "nodes",
        "others",
        "pause",
        "previous",
        "promise",
        "quiet",
        "refund",
        "remember",
        "report_at",
        "returned",
        "sent_at",
        "several",
        "share",
        "slot",
        "there",
        "turns",
        "unheard",
    )

    def __init__(self, key: str, ack: int, now: int, home: Any = None) -> None:
        self.key = key
        self.home: Any = home  # the limiter it belongs to
        # what callers touch
        self.balance = 0
        self.expires = 0
        self.low = -1  # at this balance more should be fetched; -1: not now
        self.beyond = 0  # units that were free in Redis at the last reply
        self.ends = 0  # windows: when this one is over, at the latest
        self.turns = 0  # and at the earliest
        self.deny_until = 0
        self.deny_from = 0  # asks of at least so many units are denied until then
        self.later = 0  # how much longer that is likely to go on
        self.there = 0  # units that Redis has when that is over, nobody else spending any
        self.promise = 0  # when a caller who was refused was told to come back: the first of them
        self.latest = 0  # and the one who was refused last
        self.several = 0  # and the last of those who asked for several permits
        self.current = self.previous = 0  # windows: permits that count, at the last reply
        self.denied = 0  # units refused here since the last count
        # what the ledger must know
        self.lid = 0
        self.known = 0  # until then the ledger may know it, though it is over here: it can still be told of
        self.ack = ack
        self.flight = 0  # the number of the report under way, 0 for none
        self.returned = 0
        self.refund = 0
        self.debt = 0
        self.doubt = 0  # of the debt: told, and perhaps charged; no reply has come to say so
        self.sent_at = 0
        # demand, and what follows from it
        self.mark = 0  # the balance as it would be with nothing spent since the last count
        self.unheard = 0  # units spent before that, of which Redis may not have heard yet
        self.born = now
        self.counted_at = now
        self.asked_at = now
        self.demand = 0.0  # permits a second
        self.pause = 0
        self.others = 0
        self.nodes = 1
        self.due = 0  # when to report next, or to look whether anybody still asks
        self.look = 0  # the same if it is for a look; 0: none
        self.report_at = 0  # and when to report after looks
        self.glance = 0  # units asked for since the last report, at the last look
        self.quiet = IDLE  # who is not asked for so long is idle
        self.remember = 0  # not forgotten before, if not 0: it was granted on trust, and has to be known for that
        self.slot = 0  # the tick at which the node looks at it
        self.ill = 0  # until then Redis is not asked about this key: it answered with an error
        self.share = 0  # during an outage: when this process's share of the bucket would be full, in units

    def report(
        self,
        now: int,
        seq: int,
        node: str,
        law: Law,
        style: Style,
        trip: int,
        op: str,
        needs: tuple[tuple[int, int], ...],
    ) -> Ask:
        """What to tell and to ask for; *trip* is how long a trip takes. Nothing else may be under way."""
        self.unheard += max(self.mark - self.balance, 0)
        self.count(now, law, needs)
        if now >= self.expires and (self.balance == 0 or now >= self.known):
            self.balance = self.mark = self.lid = 0
        want, spare = self._want(now, law, style, trip) if op == "sync" else (0, 0)
        if law.kind == "counter" and (self._awaits(now, trip) or now < self.ends < now + MARGIN + TICK):
            want = spare = 0  # what is leased till then, and not spent, would count in the next window too
        # whoever waits needs more than is here: all goes back, so that everything that is free is in one place
        keep = 0 if needs or op != "sync" else want
        give = max(self.balance // law.cost - keep, 0)
        if give:
            self.deny_until = 0  # there will be something to have there
        self.balance -= multiply(give, law.cost)
        self.mark = self.balance
        self.returned += give
        self.flight = seq
        self.doubt = max(self.doubt, self.debt)
        self.sent_at = now
        ttl = SPARE_TTL if spare else max(TTL, 3 * self.pause)
        self.low = -1
        milli = int(self.demand * 1000)
        return Ask(
            op, node, self.lid, seq, self.ack, self.balance // law.cost, self.returned, self.refund, self.debt, needs,
            want, spare, milli, ttl // 1000,
        )  # fmt: skip

    def accept(self, now: int, reply: Reply, ask: Ask, law: Law, style: Style, trip: int) -> bool:
        """Take in the reply to the report under way; whether it was one."""
        if ask.seq != self.flight:
            return False  # given up, and the ledger will be told so: it would be spent twice
        self.flight = 0
        if reply.status != OK:
            if reply.status == VOID:  # the ledger does not know this lease: it ran out, or its data is gone
                self.balance = self.mark = self.unheard = self.lid = self.expires = self.known = 0
                self.ack = ask.seq
            self.due = now
            return False
        self.ack = ask.seq
        self.unheard = 0
        self.lid = reply.lid
        self.refund -= ask.refund
        self.debt -= ask.debt
        self.doubt = 0
        self.share = 0
        lost = ask.held - (reply.out - reply.lease)
        if lost > 0:  # a failover lost a grant: what is not counted there must not be spent here
            missing = min(multiply(lost, law.cost), self.balance)
            self.balance -= missing
            self.mark -= missing
        granted = multiply(reply.lease, law.cost)
        self.balance += granted
        self.mark += granted
        lasts = 1000 * (min(ask.ttl, reply.ends) if reply.ends else ask.ttl)
        self.expires = self.sent_at + lasts - lasts // 1000 - MARGIN
        self.known = now + lasts
        self.ends = now + reply.ends * 1000 if reply.ends else 0  # callers are told to come then
        self.turns = self.sent_at + reply.ends * 1000 if reply.ends else 0
        self.beyond = max(reply.free, 0)
        self.others = reply.others
        self.current, self.previous = reply.current, reply.previous
        self.nodes = max(reply.nodes, 1)
        if self.remember:
            self.remember = now + self._empty(reply, law)
        if ask.op == "release":
            self.lid = self.expires = self.known = 0
        if ask.op != "sync":
            self.deny_until = self.pause = 0
            self.due = now + IDLE
        else:
            self._pace(now, reply, ask, law, style, trip)
        return True

    def lose(self, now: int, ask: Ask) -> None:
        """Give up on *ask*, the report under way: its reply will not be taken in. A refund is not told twice."""
        self.flight = 0
        self.refund -= ask.refund
        self.due = now

    def count(self, now: int, law: Law, needs: tuple[tuple[int, int], ...]) -> None:
        """Learn from what was asked since the last time."""
        spent = self.mark - self.balance + self.denied
        asked = spent // law.cost
        if spent != self.glance or needs:
            self.asked_at = now
        self.mark = self.balance
        self.denied = self.glance = 0
        for many, permits in needs:
            asked += many * permits
        passed = float(max(now - self.counted_at, MILLISECOND))
        self.counted_at = now
        seen = asked / passed * SECOND
        inertia = float(SLOW)
        if seen > self.demand:  # many calls are news; one or two may be chance
            inertia = QUICK + (SLOW - QUICK) / (1 + asked / FEW)
        inertia = min(inertia, float(max(now - self.born, QUICK)))  # what is young knows little
        self.demand += (seen - self.demand) * passed / (passed + inertia)

    def ripe(self, now: int) -> bool:
        """Whether it is time to report, now that it is `due`; if not, `due` is when to look again."""
        if self.due != self.look or now >= self.report_at or self.debt or self.refund:
            return True
        asked = self.mark - self.balance + self.denied
        if asked == self.glance:
            return True  # nobody has asked since the last look: it goes back
        self.glance = asked
        self.asked_at = now
        self.due = self.look = min(now + self.quiet, self.report_at)
        return False

    def forgive(self) -> None:
        """Owe nothing any more, but for what may have been charged: that is told again, lest less be charged later."""
        self.debt = self.doubt
        self.share = 0

    def _empty(self, reply: Reply, law: Law) -> int:
        """Nanoseconds without a permit in Redis, if nothing is given back there."""
        if reply.free >= law.cost:
            return 0
        if not law.period:
            return multiply(-((reply.free - law.cost) // law.rate), 1000)
        if law.kind == "fixed":
            return reply.ends * 1000
        return soonest(law, law.period - reply.ends, reply.current, reply.previous, 1) * 1000

    def _want(self, now: int, law: Law, style: Style, trip: int) -> tuple[int, int]:
        """Permits to hold, and whether they are a spare."""
        idle = now - self.asked_at
        if idle >= FORGOTTEN:
            return 0, 0
        if idle >= self.quiet or self.demand * max(self.pause, SECOND // 2) < SECOND:
            return 1, 1
        # what is out on leases turns over once in a trip and a pause: more than may be leased, and leases only delay
        rate = min(law.speed / 1000, self.demand * self.nodes)
        if rate * ((trip + max(TICK, trip)) / SECOND) > style.leased / 1000 * law.limit:
            return 0, 0
        likely = self.demand * ((self.pause + trip * 3 // 2 + TICK) / SECOND)
        return ceil(likely + sqrt(likely)), 0

    def _pace(self, now: int, reply: Reply, ask: Ask, law: Law, style: Style, trip: int) -> None:
        """Decide when to report next, what to refuse until then, and at what balance to fetch more."""
        shortest = max(TICK, trip)
        pause = min(max(reply.pause * 1000, shortest), style.longest * 1000)
        pause = min(pause, 2 * self.pause) if self.pause else shortest  # slowly: nothing is known yet
        if reply.wait > 0 and reply.nodes == 1:  # nobody else can have what comes in: it is fetched when it is there
            pause = min(pause, max(reply.wait * 1000, ALONE, shortest))
        self.pause = pause

        self.deny_until = 0
        earliest = self.sent_at + 1  # when there can be something there
        if reply.wait > 0:
            # With nobody else holding a lease nothing can come sooner than the ledger said, counted from when it was
            # asked. Otherwise something may be given back any time, and the answer is good for a pause. So it is where
            # more is asked for than comes in: what comes in meanwhile is not lost, and is fetched in one trip.
            exact = reply.others == 0 and reply.free < law.cost
            latest = 0
            self.due = self.deny_until = now + pause
            if exact:
                self.due = earliest = self.sent_at + reply.wait * 1000
                self.deny_until = latest = now + reply.wait * 1000  # rather a trip late than in vain
            self.deny_from = self.there = law.cost
            if reply.busy and self.due <= now + pause:
                self.due = now + pause
                if ask.want:  # nobody needs to wait for the next trip
                    self.deny_until = max(latest, self.due + trip + 2 * TICK)
                elif not law.period:  # nothing is fetched but by callers: long before it is full they may ask again
                    self.deny_until = max(latest, min(self.due, now + law.room // law.rate * 250))
            if law.period:  # another window is another matter
                self.deny_until = min(self.deny_until, self.ends)
        else:
            self._refuse_larger(now, reply, ask, law)
            if ask.want:
                likely = self.demand * ((trip * 13 // 10 + TICK + 2 * MILLISECOND) / SECOND)
                self.low = 0 if ask.spare else multiply(ceil(likely + 2 * sqrt(likely)), law.cost)
            self.due = now + pause
            if ask.spare or now - self.asked_at >= self.quiet:
                self.due = self.asked_at + FORGOTTEN
        promise = self.promise if self.promise >= earliest else self.latest
        early = self.deny_until - promise
        # who comes for one finds it here, unless other callers were faster; of a window it may have run out by then
        kept = self.balance > 0 and self.several < earliest and not law.period
        if reply.nodes == 1 and promise >= earliest and early > 0 and not kept:
            self.deny_until = promise  # nobody else can have taken what was promised
            self.there -= multiply(-(-early // 1000), law.rate)  # but who was served meanwhile may have
        self.later = max(self.deny_until - now - CERTAIN, 0)
        self.deny_until -= self.later
        if reply.wait > 0:
            self.due = min(self.due, now + max(CERTAIN, pause))  # what is spent does not go unreported for long
        if self.balance > 0:
            if now >= self.expires:  # it came too late to be spent: that is renewed, or goes back to who asks
                self.deny_until, self.due = 0, now
            elif not reply.ends or ask.ttl < reply.ends:  # to report is to renew
                self.due = min(self.due, max(self.expires - ask.ttl * 250, now + shortest))
            else:
                self.due = min(self.due, self.ends)  # a window starts with nothing
        self._look_out(now, law)

    def _look_out(self, now: int, law: Law) -> None:
        """See to it that what is held goes back soon after the last call, however long the pause."""
        self.glance = self.mark - self.balance + self.denied
        if self.glance:
            self.asked_at = now
        # calls that are far between leave gaps: a few of those are no end
        self.quiet = max(IDLE, min(int(FEW * SECOND / max(self.demand, 0.001)), self.pause))
        self.look = 0
        if self.balance > law.cost and now + self.quiet < self.due:
            self.report_at = self.due
            self.due = self.look = now + self.quiet

    def _refuse_larger(self, now: int, reply: Reply, ask: Ask, law: Law) -> None:
        """Remember for how long a refused call of several permits cannot be granted, where that is certain."""
        if reply.others or law.period:
            return
        served = serve(reply.before, law.cost, ask.needs)
        refused = [permits for (count, permits), many in zip(ask.needs, served, strict=True) if many < count]
        if refused:
            least = multiply(min(refused), law.cost)
            missing = least - reply.free - self.balance
            if missing > 0:
                self.deny_from = least
                self.there = least - self.balance
                self.deny_until = now + -(-missing // law.rate) * 1000

    def told(self, now: int, until: int, several: bool) -> None:
        """A caller was refused at *now* and told to come back; the first of them counts, and then the latest."""
        self.latest = until
        if several:
            self.several = max(self.several, until)
        if self.promise <= now or until < self.promise:
            self.promise = until

    def _awaits(self, now: int, trip: int) -> bool:
        """Whether a caller was told to come back, perhaps a moment late, for what no lease of now can give it."""
        if max(self.promise, self.latest) > max(now, self.deny_until + self.later):
            return True  # even who comes for one, near the end of the window, might find that it has run out
        # in this window all that is held goes back when somebody comes for it; in the next one it counts as used
        return self.latest + TICK > now and self.latest + MARGIN + TICK + 2 * trip >= self.turns

    def worth(self) -> bool:
        """Whether a report would say anything."""
        return self.balance > 0 or self.mark != self.balance or self.denied > 0 or self.debt > 0 or self.refund > 0

    def idle(self, now: int) -> bool:
        """Whether nothing would be lost if it were forgotten."""
        if self.flight or self.worth() or now < self.remember:
            return False
        return now >= self.deny_until and now - self.asked_at >= IDLE
