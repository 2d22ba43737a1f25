"""One process's lease of one key at one of several stores. Pure: no I/O, times are arguments.

`headgate.hybrid.several_keys` says what it is for.
"""

from __future__ import annotations

from headgate.hybrid.lease import MARGIN, SECOND
from headgate.hybrid.protocol import LeaseReply, LeaseRequest, QuotaParams

SETTLES = SECOND  # nanoseconds that other processes have to tell a store what it has missed, before it is compared
WINDOW_MARGIN = 250_000  # microseconds: windows that end further apart, or so soon, are not compared
FRESH = SECOND // 2  # nanoseconds for which it is believed what a store had
LATE = SECOND // 10  # nanoseconds: a refund that took longer may have reached a bucket that was full meanwhile


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
        paid = max(min(owed - self.in_doubt, spare), 0)  # what is in doubt may be counted, and is not paid twice
        self.told += paid
        self.returned += spare - paid
        self.covered = held  # whatever becomes of this request: what it grants counts once the reply is here
        if request.op == "release":
            self.until = 0  # the lease may be gone, whether a reply tells or not
        debt = self.in_doubt = max(min(owed - paid, total - aged), 0) + self.extra
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
