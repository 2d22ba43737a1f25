"""One process's leases of one key at several stores, of which a majority must lend. Pure: no I/O, times are arguments.

The lease of the process (`headgate.hybrid.lease`) knows of one store. Here its request becomes one for each store, and
their replies become one reply. What "never one too many" rests on, beside the rules of each ledger:

1. The process gets the least that any store lends of those that answer, and they are a majority of all. So each permit
   is counted by every store that answered, and one of them that has missed nothing keeps the limit. A bare vote would
   not do: three stores of 100 permits, each asked by two thirds of the callers, lend 150.
2. What a store has lent beyond that goes back with the next request. What it has served to waiting callers goes back as
   a refund, unless its bucket could have been full meanwhile: then it would get more than it lacks. So that this is
   rare, callers that compete for the last permits are first taken to one store, the one that has least, and to the
   others only with what that one has served.
3. What the process spends and a store has not lent it (the store did not answer, or has forgotten) is charged to that
   store as `debt` when it answers again. A spend that is older than the bucket takes to fill need not be charged.
4. A store that did not answer may have forgotten all. It is first asked with a peek, which changes nothing, and is not
   one of the majority meanwhile. Then it is compared with the others, and what it has counted less is taken from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headgate.hybrid.lease import MARGIN, SECOND
from headgate.hybrid.protocol import OK, VOID, LeaseReply, LeaseRequest, QuotaParams, count_served

SETTLES = SECOND  # nanoseconds that other processes have to tell a store what it has missed, before it is compared
KNOWN_PART = 10  # a key of which a tenth and two permits are used is known well enough to doubt a store that knows none
KNOWN_PERMITS = 2
WINDOW_MARGIN = 250_000  # microseconds: windows that end further apart, or so soon, are not compared
SCARCE_PERMITS = 2  # a store that has so much more than callers wait for serves them all
FRESH = SECOND // 2  # nanoseconds for which it is believed what a store had
LATE = SECOND // 10  # nanoseconds: a refund that took longer may have reached a bucket that was full meanwhile
RETRY = 10_000  # microseconds after which callers ask again that stores have refused, each another one
SAMPLES = 8  # of what was spent, while a store misses it
COMPOSITE = 1  # the id of the lease that the process knows: this object tells which one it is


class StoreLease:
    """What a process holds of one key at one store, and what that store has to be told."""

    __slots__ = (
        "acked_seq",
        "covered",
        "extra",
        "free",
        "in_doubt",
        "lease_id",
        "level_from",
        "lost",
        "missed",
        "refund",
        "refund_room",
        "refund_since",
        "returned",
        "seen_at",
        "told",
        "until",
        "waits",
    )

    def __init__(self, acked_seq: int) -> None:
        self.lease_id = 0
        self.acked_seq = acked_seq
        self.covered = 0  # permits that the store has on lease to this process
        self.until = 0  # nanoseconds: they are, until then at least
        self.returned = 0  # ever
        self.refund = 0  # served to callers there, and not admitted
        self.refund_since = 0  # nanoseconds: when the first of them was asked for
        self.refund_room = 0  # microseconds of refill, from then, for which the bucket had room, or the window lasts
        self.free = 0  # units that were free at the last reply
        self.seen_at = -FRESH  # nanoseconds: when that was
        self.told = 0  # permits spent, ever, that this store has counted
        self.in_doubt = 0  # permits of debt that were sent, and may be charged: no reply has come
        self.extra = 0  # permits that it has counted less than the others
        self.waits = False  # for a reply
        self.missed = False  # it did not answer the last request
        self.level_from = 0  # nanoseconds: from then on it is compared with the others; 0: it has missed nothing
        self.lost = False  # it did not know a lease that it had given, and has taken all that was free from the key

    def forget(self) -> None:
        """Hold nothing there any more: the store burns it, or has forgotten it."""
        self.lease_id = self.covered = self.until = 0

    def request(self, now: int, request: LeaseRequest, total: int, aged: int) -> LeaseRequest:
        """What this store is told and asked. *total*: permits spent, ever; *aged*: those that need no charge."""
        held = min(request.held, self.covered)
        spare, owed = self.covered - held, total - self.told
        paid = max(min(owed - self.in_doubt, spare), 0)
        self.told += paid
        self.returned += spare - paid
        self.covered = held  # whatever becomes of this request: what it grants counts once the reply is here
        if request.op == "release":
            self.until = 0  # the lease may be gone, whether a reply tells or not
        debt = self.in_doubt = max(min(owed - paid, total - aged) + self.extra, self.in_doubt)
        if self.refund > 0 and now + LATE - self.refund_since >= self.refund_room * 1000:
            self.refund = 0
        refund, self.refund = max(self.refund + request.refund, 0), 0
        return request._replace(
            lease_id=self.lease_id,
            acked_seq=self.acked_seq,
            held=held,
            returned=self.returned,
            refund=refund,
            debt=debt,
        )

    def accept(self, reply: LeaseReply, request: LeaseRequest, sent_at: int, total: int) -> None:
        """Take in the reply to *request*."""
        self.acked_seq, self.told, self.in_doubt, self.extra = request.seq, total, 0, 0
        self.lease_id, self.covered = reply.lease_id, reply.leased_here
        if request.op == "release":
            self.forget()
        lasts = 1000 * (min(request.ttl, reply.window_ends_in) if reply.window_ends_in else request.ttl)
        self.until = sent_at + lasts - lasts // 1000 - MARGIN

    def give_back(self, permits: int, reply: LeaseReply, sent_at: int, params: QuotaParams) -> None:
        """Refund what was served to callers that were not admitted, with the next request, if that is early enough."""
        if permits <= 0:
            return
        if params.period:
            room = reply.window_ends_in - WINDOW_MARGIN
        else:
            leased = reply.leased_here + reply.others
            room = (params.capacity_units - reply.free - (permits + leased) * params.cost) // params.rate
        if self.refund <= 0:
            self.refund_since, self.refund_room = sent_at, room
        self.refund_room = min(self.refund_room, room)
        self.refund += permits

    def meet(self, reply: LeaseReply, now: int) -> None:
        """Take in the reply to a peek: the store answers again."""
        self.missed = False
        self.level_from = self.level_from or now + SETTLES
        if now >= self.until or reply.leased_here < max(self.covered, 1):
            self.forget()


class KeyLeases:
    """One process's leases of one key at *stores* stores, of which *needed* must answer."""

    __slots__ = (
        "aged",
        "asked",
        "history",
        "leased",
        "levels",
        "needed",
        "request",
        "returned",
        "sent_at",
        "spent",
        "stores",
        "total",
        "used_at",
    )

    def __init__(self, stores: int, needed: int, acked_seq: int) -> None:
        self.stores = [StoreLease(acked_seq) for _ in range(stores)]
        self.needed = needed
        self.leased = 0  # permits that the process had on lease at the last reply
        self.returned = 0  # what it had given back by then, ever
        self.spent = 0  # what it had spent by then, ever, debts included
        self.total = 0  # what it had spent at the request under way
        self.history: list[tuple[int, int]] = []  # (nanoseconds, spent by then), while a store misses some of it
        self.request: LeaseRequest | None = None
        self.asked: dict[int, LeaseRequest] = {}
        self.levels: dict[int, tuple[int, int]] = {}  # of stores that lost the key: what others count, spent by then
        self.aged = 0  # permits spent so long ago that no store need be charged
        self.sent_at = self.used_at = 0

    def owes(self, now: int, params: QuotaParams) -> bool:
        """Whether a store has yet to be charged."""
        aged = self._aged(now, params)
        return any(self.spent > max(store.told, aged) for store in self.stores)

    def requests(self, now: int, request: LeaseRequest, params: QuotaParams) -> dict[int, LeaseRequest]:
        """The requests for the stores that *request* of the process becomes."""
        self.request, self.sent_at, self.used_at = request, now, now
        for store in self.stores:
            store.missed |= store.waits  # an exchange that was cut short
        if request.op == "peek":
            self.asked = dict.fromkeys(range(len(self.stores)), request)
            return self.asked
        if request.lease_id:
            spent = max(self.leased - request.held - (request.returned - self.returned), 0)
        else:
            spent = self.leased  # what it held may be spent
            for store in self.stores:
                if now >= store.until and not store.missed:  # burned there; it was not spent later than that
                    store.told += max(min(self.spent + spent + request.debt - store.told, store.covered), 0)
                    store.forget()
        self.total = max(self.spent + spent + request.debt, self.total)
        self.aged = self._note_spent(now, params)
        self.asked = {}
        first = self._first(now, request, params)
        return self._ask(now, request, range(len(self.stores)) if first is None else (first,))

    def more_requests(
        self, now: int, replies: Mapping[int, LeaseReply], params: QuotaParams
    ) -> dict[int, LeaseRequest]:
        """The requests for the other stores, after the one that was asked first."""
        request = self.request
        assert request is not None
        places = [place for place in range(len(self.stores)) if place not in self.asked]
        for place in self.asked:
            reply = replies.get(place)
            if places and reply is not None and reply.status == OK:
                request = request._replace(waiting=_served(reply, self.asked[place], params))
        return self._ask(now, request, places)

    def _first(self, now: int, request: LeaseRequest, params: QuotaParams) -> int | None:
        """The store that is asked first, if callers wait and may be too many; None: all at once."""
        wanted = (_permits(request.waiting) + SCARCE_PERMITS) * params.cost
        lending = self._lending()
        here = [(self.stores[place].free, place) for place in lending]
        fresh = all(now - self.stores[place].seen_at < FRESH for place in lending)
        if not request.waiting or not here or (fresh and min(here)[0] >= wanted):
            return None
        return min(here)[1]

    def _lending(self) -> list[int]:
        """The stores that need not be looked at, or set to what the others count, before they lend."""
        return [
            place
            for place, store in enumerate(self.stores)
            if not store.missed and not (store.lost and place in self.levels)
        ]

    def _ask(self, now: int, request: LeaseRequest, places: Iterable[int]) -> dict[int, LeaseRequest]:
        made: dict[int, LeaseRequest] = {}
        lending = self._lending() if request.op == "sync" else ()
        for place in places:
            store = self.stores[place]
            if len(lending) >= self.needed and place not in lending:
                made[place] = _peek(request) if store.missed else _set_level(request, store, self.levels[place][0])
                store.waits = not store.missed
                continue
            if store.missed:
                if now >= store.until:
                    store.forget()
                store.level_from = store.level_from or now + SETTLES
            store.waits = True
            made[place] = store.request(now, request, self.total, self.aged)
        self.asked |= made
        return made

    def combine(self, now: int, replies: Mapping[int, LeaseReply], params: QuotaParams) -> LeaseReply | None:
        """The reply to the process; None if too few stores answered. Late replies may not come here."""
        request = self.request
        assert request is not None
        if request.op == "peek":
            found = [reply for reply in replies.values() if reply.status == OK]
            return _strictest(found, request, params) if len(found) >= self.needed else None
        good: dict[int, LeaseReply] = {}
        met: dict[int, LeaseReply] = {}
        voids = 0
        for place, asked in self.asked.items():
            store, reply = self.stores[place], replies.get(place)
            if reply is None or reply.status not in (OK, VOID):
                store.missed = True
            elif asked.op == "peek":
                store.meet(reply, now)
                met[place] = reply
            elif asked.op == "reset" and request.op == "sync":
                store.accept(reply, asked, self.sent_at, self.levels.pop(place)[1])
                store.lost, store.level_from = False, now + SETTLES
            elif reply.status == VOID:
                voids += 1
                store.lost |= now < store.until
                store.forget()
                store.acked_seq, store.missed, store.level_from = request.seq, False, store.level_from or now
            else:
                store.accept(reply, asked, self.sent_at, self.total)
                store.missed = store.lost = False
                if asked.refund and now - self.sent_at > LATE:
                    store.level_from = store.level_from or now
                good[place] = reply
            store.waits = False
        if len(good) < self.needed:
            for place, reply in good.items():
                served = _permits(_served(reply, self.asked[place], params))
                self.stores[place].give_back(served, reply, self.sent_at, params)
            if len(good) + voids < self.needed:
                return None
            for place in good:
                self.stores[place].refund -= request.refund  # the process will say it again
            return LeaseReply(VOID)
        return self._lend(now, request, params, good, met)

    def _lend(
        self,
        now: int,
        request: LeaseRequest,
        params: QuotaParams,
        good: Mapping[int, LeaseReply],
        met: Mapping[int, LeaseReply],
    ) -> LeaseReply:
        """The least of what the stores of *good* lend and serve; the rest goes back, or is charged to the others."""
        served = {place: _permits(_served(reply, self.asked[place], params)) for place, reply in good.items()}
        admitted = min(served.values())  # the callers that so many permits serve are those that the strictest store did
        granted = max(min(self.stores[place].covered for place in good) - request.held, 0)
        self.leased, self.returned = request.held + granted, request.returned
        self.spent = self.total = self.total + admitted
        effective: dict[int, LeaseReply] = {}
        for place, reply in good.items():
            store = self.stores[place]
            store.told = self.total
            beyond = served[place] - admitted
            store.give_back(beyond, reply, self.sent_at, params)
            spare = beyond + max(store.covered - self.leased, 0)
            effective[place] = reply._replace(
                free=reply.free + spare * params.cost,
                wait=0 if spare else reply.wait,
                leased_here=min(self.leased, store.covered),
            )
            store.free, store.seen_at = reply.free, now
        self._level(now, params, good, effective, met)
        reply = _strictest(list(effective.values()), request, params)
        reply = reply._replace(granted=granted, leased_here=self.leased, free_before=admitted * params.cost)
        counts = zip(count_served(reply.free_before, params.cost, request.waiting), request.waiting, strict=True)
        refused = min((permits for many, (count, permits) in counts if many < count), default=0)
        if refused and reply.free >= (refused - self.leased) * params.cost:  # there is some at each store, of which the
            free = (refused - self.leased) * params.cost - 1  # others have served it to another caller: ask again soon
            reply = reply._replace(free=min(free, reply.free), wait=max(reply.wait, RETRY))
        return reply

    # ---------------------------------------------------------------------------------------- stores that have missed

    def _level(
        self,
        now: int,
        params: QuotaParams,
        good: Mapping[int, LeaseReply],
        effective: Mapping[int, LeaseReply],
        met: Mapping[int, LeaseReply],
    ) -> None:
        """Compare the stores that may have missed something with the others, and note what to take from them."""
        enough = params.capacity_units // KNOWN_PART + KNOWN_PERMITS * params.cost
        empty = {place for place, reply in met.items() if _is_unknown(reply, reply.free, params)}
        for place, reply in good.items():
            new = not self.asked[place].lease_id and not self.asked[place].debt
            if new and _is_unknown(reply, reply.free_before, params):
                empty.add(place)
        known = [params.capacity_units - _left(effective[place], params) for place in good if place not in empty]
        if not known or max(known) <= enough:
            empty.clear()
        for place in empty:
            self.stores[place].level_from = self.stores[place].level_from or now + SETTLES
        intact = [place for place in effective if not self.stores[place].level_from] or list(effective)
        self._note_levels(params, {place: effective[place] for place in intact})
        for place, reply in (*effective.items(), *met.items()):
            store = self.stores[place]
            others = sorted(_left(effective[other], params) for other in intact if other != place)
            if not store.level_from or not others or (now < store.level_from and place not in empty):
                continue
            right = self._right(others)
            if not all(_same_window(reply, effective[other]) for other in intact):
                continue
            nodes = max(effective[other].nodes for other in intact)
            units = _left(reply, params) - right - (self.total - store.told) * params.cost
            store.extra = max(-(-units // (params.cost * max(nodes, 1))), 0)
            if not store.extra and place in effective:
                store.level_from = 0

    def _right(self, others: Sequence[int]) -> int:
        """What is left by the most generous of *others*, in order, that can have missed nothing.

        As many stores as a majority can do without may have missed something; the one that is compared is one of them.
        """
        may_lag = len(self.stores) - self.needed
        return others[min(max(len(others) - may_lag, 0), len(others) - 1)]

    def _note_levels(self, params: QuotaParams, intact: Mapping[int, LeaseReply]) -> None:
        """Note what stores that have lost the key are to be set to: they have taken all that was free."""
        self.levels.clear()
        for place, store in enumerate(self.stores):
            others = sorted(_left(reply, params) for other, reply in intact.items() if other != place)
            ends = [reply.window_ends_in for reply in intact.values()]
            if store.lost and others and (not params.period or min(ends) >= 2 * WINDOW_MARGIN):
                counted = -(-(params.capacity_units - self._right(others)) // params.cost)
                self.levels[place] = (max(counted, 0), self.total)

    def _note_spent(self, now: int, params: QuotaParams) -> int:
        """Remember when it was spent what a store has missed; return how much of it need not be charged any more."""
        if all(store.told >= self.total for store in self.stores):
            self.history.clear()
            return 0
        if not self.history or now - self.history[-1][0] >= fill_time(params) // SAMPLES:
            self.history.append((now, self.total))
        aged = self._aged(now, params)
        self.history = [(at, spent) for at, spent in self.history if spent >= aged]
        return aged

    def _aged(self, now: int, params: QuotaParams) -> int:
        return max((spent for at, spent in self.history if now - at >= fill_time(params)), default=0)


def fill_time(params: QuotaParams) -> int:
    """Nanoseconds after which it does not matter that a store missed a spend.

    A bucket is full by then; and if more was spent meanwhile, what is charged for that is as much as it would lack.
    """
    if params.kind == "bucket":
        return (params.capacity_units // params.rate + 1) * 1000
    return (params.period + WINDOW_MARGIN) * (2000 if params.kind == "counter" else 1000)


def _peek(request: LeaseRequest) -> LeaseRequest:
    return LeaseRequest("peek", request.node, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, request.ttl)


def _set_level(request: LeaseRequest, store: StoreLease, counted: int) -> LeaseRequest:
    """Set a store to *counted* permits: a reset and a debt. Any number of processes may do so, as it adds nothing up.

    It says that all replies have come, so that a debt is not taken off for one that did not.
    """
    return request._replace(
        op="reset", lease_id=0, acked_seq=request.seq - 1, held=0, returned=store.returned, refund=0, debt=counted,
        waiting=(), target=0, is_reserve=0, demand=0,
    )  # fmt: skip


def _served(reply: LeaseReply, asked: LeaseRequest, params: QuotaParams) -> tuple[tuple[int, int], ...]:
    """The callers of *asked* that a store has served: how many, and permits for each."""
    groups = zip(count_served(reply.free_before, params.cost, asked.waiting), asked.waiting, strict=True)
    return tuple((many, permits) for many, (_, permits) in groups if many)


def _permits(groups: tuple[tuple[int, int], ...]) -> int:
    return sum(many * permits for many, permits in groups)


def _left(reply: LeaseReply, params: QuotaParams) -> int:
    """Units that can still be spent: free ones, and those on lease."""
    return reply.free + (reply.leased_here + reply.others) * params.cost


def _is_unknown(reply: LeaseReply, free: int, params: QuotaParams) -> bool:
    """Whether the store knew nothing of the key."""
    return reply.nodes <= 1 and reply.others == 0 and free >= params.capacity_units


def _same_window(one: LeaseReply, other: LeaseReply) -> bool:
    if not other.window_ends_in:
        return True
    ends = (one.window_ends_in, other.window_ends_in)
    return min(ends) >= WINDOW_MARGIN and max(ends) - min(ends) <= WINDOW_MARGIN


def _strictest(replies: Sequence[LeaseReply], request: LeaseRequest, params: QuotaParams) -> LeaseReply:
    """What holds for all of *replies*."""
    return LeaseReply(
        OK,
        0 if request.op == "peek" else COMPOSITE,
        leased_here=min(reply.leased_here for reply in replies),
        free_before=min(reply.free_before for reply in replies),
        free=min(reply.free for reply in replies),
        others=max(reply.others for reply in replies),
        nodes=max(reply.nodes for reply in replies),
        wait=max(reply.wait for reply in replies),
        report_interval=min(reply.report_interval for reply in replies),
        window_ends_in=min(reply.window_ends_in for reply in replies),
        oversubscribed=max(reply.oversubscribed for reply in replies),
        current=max(reply.current for reply in replies),
        previous=max(reply.previous for reply in replies),
    )
