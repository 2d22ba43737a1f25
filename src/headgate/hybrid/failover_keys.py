"""One process's lease of one key at the first of several stores that answers. Pure: no I/O, times are arguments.

While the same store lends, it is as if there were one. What holds when another store lends in its place, in both
directions:

1. The next store is first asked with a peek. Then it is charged until it has no more left than was free at the store
   before it, when this process saw that last, plus what has refilled since. What is on lease there is not handed over:
   each process spends what it holds, and no store lends it again.
2. With the reply the process exchanges what it holds for what the next store lends. Callers may have spent all that
   was held meanwhile, and no more than that; so the smaller of the two was counted twice, and goes back with the next
   request, if the bucket was not full meanwhile. If less is lent than was held, the rest is kept, unless the bucket
   may be full before it ends. What the process has given back by then is not charged at all.
3. A store that was left has what this process held there on lease until that ends, and counts it as spent.

So a switch gives a key no more than what other processes took from the store before it after this process saw it last;
and, of a bucket that refills, as much as they still hold from there.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from headgate.hybrid.lease import MARGIN, RESERVE_TTL
from headgate.hybrid.protocol import OK, VOID, LeaseReply, LeaseRequest, QuotaParams
from headgate.hybrid.several_lease import LATE, StoreLease

LEASES_END = RESERVE_TTL // 1000 + 1_000_000  # microseconds: no lease that a store has given lasts longer


class FailoverKey:
    """One process's lease of one key at one of *stores* stores, in their order."""

    __slots__ = (
        "at",
        "kept",
        "kept_until",
        "made",
        "moves",
        "params",
        "place",
        "request",
        "returned",
        "seen",
        "seen_at",
        "sent_at",
        "stores",
        "until",
        "used_at",
    )

    def __init__(self, stores: int, acked_seq: int) -> None:
        self.stores = [StoreLease(acked_seq) for _ in range(stores)]
        self.at = -1  # the place of the store that lends; -1: none has
        self.seen: LeaseReply | None = None  # its last reply
        self.seen_at = 0  # nanoseconds: when that came
        self.params: QuotaParams | None = None  # of that time
        self.until = 0  # nanoseconds: what it lends can be given back until then; in the next window it is gone
        self.returned = 0  # permits that the process had given back by then, ever
        self.kept = 0  # permits of the store before it that the process still holds: this one counts them as spent
        self.kept_until = 0  # nanoseconds: its bucket cannot have been full before that
        self.request: LeaseRequest | None = None
        self.place = 0  # of the store that is asked now
        self.made: LeaseRequest | None = None  # what it is asked
        self.moves = False  # whether it is to lend in place of another, or has forgotten
        self.sent_at = self.used_at = 0

    def owes(self, now: int, params: QuotaParams) -> bool:
        """Whether a store has to be charged for a key that was given back: it is when the key is used again."""
        return False

    def remembers(self, now: int) -> bool:
        """Whether another store would have to be told of the key."""
        return self.params is not None and self._free_now(now, self.params) < self.params.capacity_units

    def requests(self, now: int, request: LeaseRequest, params: QuotaParams) -> dict[int, LeaseRequest]:
        """What the first store is asked; a reset is for all of them."""
        self.request, self.sent_at, self.used_at = request, now, now
        for store in self.stores:
            store.missed |= store.waits  # an exchange that was cut short
        if request.op != "reset":
            return self._ask(0, request)
        made = dict.fromkeys(range(len(self.stores)), self._fresh(request, 0))
        if self.at >= 0:
            made[self.at] = self._direct(now, self.at, request)
        return made

    def more_requests(
        self, now: int, replies: MutableMapping[int, LeaseReply], params: QuotaParams
    ) -> dict[int, LeaseRequest]:
        """The request that follows a peek, or one for the next store if this one did not answer; none at the end."""
        request = self.request
        assert request is not None
        if request.op == "reset":
            return {}
        reply, store = replies.get(self.place), self.stores[self.place]
        if reply is None:
            store.missed, store.waits = True, False
            return self._ask(self.place + 1, request) if self.place + 1 < len(self.stores) else {}
        if request.op == "peek" or self.made is None or self.made.op != "peek":
            return {}
        del replies[self.place]  # the next one counts
        self.moves = self.place != self.at or reply.nodes == 0
        if not self.moves:
            return self._send(self._direct(now, self.place, request))
        left = reply.free + (reply.others * params.cost if self.place > self.at else 0)
        given = max(request.returned - self.returned, 0) if request.lease_id and self.sent_at < self.until else 0
        right = min(self._free_now(self.sent_at, params) + given * params.cost, params.capacity_units)
        made = self._fresh(request, request.debt + max(-((right - left) // params.cost), 0))
        return self._send(made._replace(refund=request.refund + min(max((right - left) // params.cost, 0), given)))

    def combine(self, now: int, replies: MutableMapping[int, LeaseReply], params: QuotaParams) -> LeaseReply | None:
        """The reply to the process; None if no store answered. Late replies may not come here."""
        request = self.request
        assert request is not None
        if request.op == "reset":
            for place, store in enumerate(self.stores):
                store.missed, store.waits = place not in replies, False
            self.place = min(replies, default=0)
            self.moves = self.place != self.at
        reply, store = replies.get(self.place), self.stores[self.place]
        if reply is None:
            return None
        if request.op == "peek":
            other = self.place != self.at and self.params is not None
            return reply._replace(free=min(reply.free, self._free_now(now, params))) if other else reply
        store.missed = store.waits = False
        if reply.status == VOID:
            store.forget()
            store.acked_seq = request.seq
        if reply.status != OK:
            return reply
        store.acked_seq, store.lease_id = request.seq, reply.lease_id
        held = request.held if self.sent_at < self.until else 0
        self.at, self.seen, self.seen_at, self.params = self.place, reply, now, params
        self.returned = request.returned
        lasts = 1000 * (reply.window_ends_in if params.period else LEASES_END)
        self.until = self.sent_at + lasts - lasts // 1000 - MARGIN
        store.covered = reply.leased_here
        if request.op == "release":
            store.forget()
        if request.op != "sync":
            self.kept = 0
            return reply
        if self.moves:
            store.refund = 0
            store.give_back(min(held, reply.leased_here), reply, self.sent_at, params)
            self.kept = max(held - reply.leased_here, 0)
            lasts = LEASES_END
            if params.rate:
                used = reply.free + (held + reply.leased_here + reply.others) * params.cost
                lasts = max(params.capacity_units - used, 0) // params.rate
            self.kept_until = self.sent_at + lasts * 1000 - LATE
            reply = reply._replace(granted=max(reply.leased_here - request.held, 0))
        uncovered = max(request.held - (reply.leased_here - reply.granted), 0)
        self.kept = min(uncovered, self.kept) if self._keeps(self.sent_at, request) else 0
        return reply._replace(leased_here=reply.leased_here + self.kept)

    def _keeps(self, now: int, request: LeaseRequest) -> bool:
        """Whether what is kept ends before the bucket can be full; in a window it ends with that."""
        return self.params is not None and (self.params.period > 0 or now + request.ttl * 1000 < self.kept_until)

    # ------------------------------------------------------------------------------------------- what a store is asked

    def _ask(self, place: int, request: LeaseRequest) -> dict[int, LeaseRequest]:
        """The first request for one store: a peek, if it is not the one that lends, or may have forgotten."""
        self.place, self.moves = place, False
        if request.op == "peek":
            return self._send(request)
        if self.at >= 0 and (place != self.at or self.stores[place].missed):
            return self._send(LeaseRequest("peek", request.node, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, request.ttl))
        return self._send(self._direct(self.sent_at, place, request))

    def _send(self, made: LeaseRequest) -> dict[int, LeaseRequest]:
        self.made = made
        self.stores[self.place].waits = made.op != "peek"
        return {self.place: made}

    def _direct(self, now: int, place: int, request: LeaseRequest) -> LeaseRequest:
        """The request of the process, as if there were one store."""
        store = self.stores[place]
        if now + LATE - store.refund_since >= store.refund_room * 1000:
            store.refund = 0
        refund, store.refund = store.refund, 0
        lease_id = store.lease_id if request.lease_id else 0
        if not lease_id:
            self.kept = 0
        if self.kept:
            given = request.returned - self.returned
            lost = given - min(given, store.covered - min(request.held, store.covered))
            if lost > 0:  # the store takes back no more than it has lent
                refund += min(lost, self.kept) if self.sent_at < min(self.until, self.kept_until) else 0
                self.kept = 0
        return request._replace(lease_id=lease_id, acked_seq=store.acked_seq, refund=request.refund + refund)

    def _fresh(self, request: LeaseRequest, debt: int) -> LeaseRequest:
        """The request of a process that holds nothing at a store: what it has there counts as spent.

        It says that all replies have come, so that a debt is not taken off for one that did not.
        """
        return request._replace(lease_id=0, acked_seq=request.seq - 1, held=0, debt=debt)

    def _free_now(self, now: int, params: QuotaParams) -> int:
        """Units that are free at the store that lends, as far as this process knows, if no other has taken any."""
        seen = self.seen
        if seen is None:
            return params.capacity_units
        passed = max(now - self.seen_at, 0) // 1000
        passed -= passed // 1000  # clocks may differ by a thousandth
        if params.kind == "bucket":
            leased = (seen.leased_here + seen.others) * params.cost if passed < LEASES_END else 0
            return min(seen.free + passed * params.rate, max(params.capacity_units - leased, seen.free))
        into_next = passed - seen.window_ends_in
        if into_next >= (params.period if params.kind == "counter" else 0):
            return params.capacity_units
        if into_next >= 0:
            return params.capacity_units - seen.current * (params.cost - into_next // params.step)
        if params.kind == "fixed":
            return seen.free
        elapsed = params.period - seen.window_ends_in
        return seen.free + seen.previous * ((elapsed + passed) // params.step - elapsed // params.step)
