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

from headgate.hybrid.protocol import OK, VOID, LeaseReply, LeaseRequest, QuotaParams, count_served
from headgate.hybrid.several_lease import FRESH, LATE, SETTLES, WINDOW_MARGIN, StoreLease
from headgate.hybrid.several_levels import Levels, set_level

SCARCE_PERMITS = 2  # a store that has so much more than callers wait for serves them all
RETRY = 10_000  # microseconds after which callers ask again that stores have refused, each another one
SAMPLES = 8  # of what was spent, while a store misses it
COMPOSITE = 1  # the id of the lease that the process knows: this object tells which one it is


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
        self.levels = Levels(self.stores, needed)
        self.leased = 0  # permits that the process had on lease at the last reply
        self.returned = 0  # what it had given back by then, ever
        self.spent = 0  # what it had spent by then, ever, debts included
        self.total = 0  # what it had spent at the request under way
        self.history: list[tuple[int, int]] = []  # (nanoseconds, spent by then), while a store misses some of it
        self.request: LeaseRequest | None = None
        self.asked: dict[int, LeaseRequest] = {}
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
            if not store.missed and not (store.lost and place in self.levels.to_set)
        ]

    def _ask(self, now: int, request: LeaseRequest, places: Iterable[int]) -> dict[int, LeaseRequest]:
        made: dict[int, LeaseRequest] = {}
        lending = self._lending() if request.op == "sync" else ()
        for place in places:
            store = self.stores[place]
            if len(lending) >= self.needed and place not in lending:
                made[place] = (
                    _peek(request) if store.missed else set_level(request, store, self.levels.to_set[place][0])
                )
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
                store.accept(reply, asked, self.sent_at, self.levels.to_set.pop(place)[1])
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
        self.levels.compare(now, params, self.total, self.asked, good, effective, met)
        reply = _strictest(list(effective.values()), request, params)
        reply = reply._replace(granted=granted, leased_here=self.leased, free_before=admitted * params.cost)
        counts = zip(count_served(reply.free_before, params.cost, request.waiting), request.waiting, strict=True)
        refused = min((permits for many, (count, permits) in counts if many < count), default=0)
        if refused and reply.free >= (refused - self.leased) * params.cost:  # there is some at each store, of which the
            free = (refused - self.leased) * params.cost - 1  # others have served it to another caller: ask again soon
            reply = reply._replace(free=min(free, reply.free), wait=max(reply.wait, RETRY))
        return reply

    # --------------------------------------------------------------------------------------------- what was spent when

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


def _served(reply: LeaseReply, asked: LeaseRequest, params: QuotaParams) -> tuple[tuple[int, int], ...]:
    """The callers of *asked* that a store has served: how many, and permits for each."""
    groups = zip(count_served(reply.free_before, params.cost, asked.waiting), asked.waiting, strict=True)
    return tuple((many, permits) for many, (_, permits) in groups if many)


def _permits(groups: tuple[tuple[int, int], ...]) -> int:
    return sum(many * permits for many, permits in groups)


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
