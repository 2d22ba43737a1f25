"""A limiter's part in a node: its law, its leases, its policy, its figures. And those who wait for Redis."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.decision import Decision, answer
from headgate.hybrid.lease import SECOND, Lease
from headgate.hybrid.outage import Outage
from headgate.hybrid.protocol import Ask, Law, Reply, Style, law_of, soonest
from headgate.hybrid.table import Table
from headgate.rule import Rule

RECALL = 1_000_000  # microseconds after which to ask again for what others hold

if TYPE_CHECKING:
    from headgate.hybrid.node import Node


class Waiter:
    """A caller who waits for Redis. *wake* is called when `result` is there."""

    __slots__ = ("error", "op", "permits", "result", "wake")

    def __init__(self, op: str, permits: int, wake: Callable[[], object]) -> None:
        self.op = op  # take, peek or reset
        self.permits = permits
        self.wake = wake
        self.result: Decision | None = None
        self.error: Exception | None = None  # of the policy

    def answer(self) -> Decision:
        """The result, once it is there; or the error, raised."""
        if self.error:
            raise self.error
        assert self.result is not None
        return self.result


class Member:
    """One limiter's part in a node: its law, its leases, its policy, its figures."""

    def __init__(
        self,
        node: Node,
        rule: Rule,
        style: Style,
        on_store_error: str,
        redis_key: Callable[[str], str],
        read_clock: Callable[[], int],
        remote: Callable[[str, int], Any],
        max_keys: int,
    ) -> None:
        self.node = node
        self.rule = rule
        self.law: Law = law_of(rule)
        self.style = style
        self.outage = Outage(on_store_error, rule.name, rule.quotas[0])
        self.redis_key = redis_key
        self.max_keys = max_keys
        units, law = rule.algorithm, self.law
        self.table = Table(
            units, law.period, law.kind == "counter", node.lock, node.thirsty, read_clock, remote, self.outage
        )
        self.id = new_id()
        node.everybody.add(self)
        self.remote = self.denied = self.spent = self.syncs = self.burned = self.voided = 0

    def enter(self, key: str, now: int) -> Lease:
        """The lease of *key*, a new one if need be. The node's lock must be held.

        There is never a second one for a key while the first may still be told of a grant: the ledger knows this
        process by one name, and would take the first one's grant for lost.
        """
        table = self.table
        lease = table.leases.get(key)
        if lease is None:
            full = len(table.leases) >= self.max_keys
            if full:
                self._evict()
            lease = self.node.leaving.pop((self, key), None)
            if lease is None:
                # all earlier asks count as answered: they are not this one's
                lease = Lease(key, self.node.seq, now, self)
                lease.nodes = self.node.seen
                lease.expires = 1 if full else 0  # who was here before was forgotten: nobody counts as new
            lease.due = now + SECOND
            table.leases[key] = lease
            self.node.schedule(lease)
        return lease

    def _evict(self) -> None:
        """Make room: the key that nobody has asked for longest, of a few. What it holds goes back.

        One about which Redis is, or will be, asked stays: rather there is one too many. So two go, if they can.
        """
        leases, node = self.table.leases, self.node
        few = [lease for lease, _ in zip(leases.values(), range(8), strict=False)]
        free = [lease for lease in few if not lease.flight and lease not in node.waiting]
        free.sort(key=lambda lease: (lease.debt > 0, lease.asked_at))
        for lease in free[: min(len(leases) - self.max_keys + 1, 2)]:
            del leases[lease.key]
            node.leave(lease)
        for lease in few:  # the next look is at others
            if lease.key in leases:
                leases[lease.key] = leases.pop(lease.key)

    def decide(self, lease: Lease, reply: Reply, permits: int, allowed: bool, now: int) -> Decision:
        """The answer to one who waited."""
        table, law = self.table, self.law
        total = reply.free + lease.balance
        if allowed:
            return answer(True, table.units, max(total, 0), table.reset(lease, now, max(total, 0)), 0)
        price = permits * law.cost
        spare = max(min(total, price - 1), 0)
        until = lease.deny_until + lease.later if price >= lease.deny_from else 0  # it is refused here until then
        wait = -((now - until) // 1000)
        if law.period:
            wait = max(wait, self._room_in(reply, permits, lease.balance // law.cost))
            lease.told(now, now + wait * 1000)
            return answer(False, table.units, spare, max(table.over(lease, now), wait), wait)
        missing = max(price - total, wait * law.rate)
        if permits > 1 and price > law.room - reply.others * law.cost:
            missing = max(missing, RECALL * law.rate)  # no refill is enough: others have to give back first
        lease.told(now, now + -(-missing // law.rate) * 1000)
        return answer(False, table.units, spare, max(law.room - spare, missing), missing)

    def _room_in(self, reply: Reply, permits: int, own: int) -> int:
        """Microseconds until a window has room for *permits*, if nobody spends any or gives any back."""
        law = self.law
        if law.kind == "fixed":
            return reply.ends
        return soonest(law, law.period - reply.ends, reply.current, reply.previous, permits, own)

    def standing(self, lease: Lease, reply: Reply, permits: int, now: int) -> Decision:
        """The answer to a peek, from a look at the ledger."""
        table, law = self.table, self.law
        there = reply.free + (lease.balance if now < lease.expires else 0)
        spare = max(there, 0)
        ends = reply.ends + (law.period if law.kind == "counter" else 0)
        price = permits * law.cost
        after = spare - price
        if after >= 0:
            return answer(True, table.units, after, ends if law.period else law.room - after, 0)
        wait = self._room_in(reply, permits, reply.out) if law.period else price - there
        return answer(False, table.units, spare, max(ends if law.period else law.room - spare, wait), wait)


class Errand(NamedTuple):
    """One ask, and for whom."""

    lease: Lease
    ask: Ask
    waiters: Sequence[Waiter]

    @property
    def member(self) -> Member:
        member: Member = self.lease.home
        return member


def new_id() -> str:
    """A name that no other process has."""
    return os.urandom(8).hex()
