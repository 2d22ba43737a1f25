"""A limiter's part in a node, and what callers want who are not served from a lease."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headgate.decision import Decision, answer, decision
from headgate.errors import StoreUnavailable
from headgate.hybrid.errand import Waiter
from headgate.hybrid.lease import SECOND, TICK, Lease
from headgate.hybrid.outage import Outage
from headgate.hybrid.protocol import Law, Reply, Style, law_of, soonest
from headgate.hybrid.table import Table
from headgate.rule import Rule

if TYPE_CHECKING:
    from headgate.hybrid.node import Node

RECALL = 1_000_000  # microseconds after which to ask again for what others hold


class Member:
    """One limiter: its law, its leases, its policy, its figures."""

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
            self.node.wheel.schedule(lease)
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
            node.leaving.add(lease)
        for lease in few:  # the next look is at others
            if lease.key in leases:
                leases[lease.key] = leases.pop(lease.key)

    # ------------------------------------------------------------------------------------------------ callers

    def wait(self, key: str, waiter: Waiter, now: int) -> bool:
        """Queue *waiter*; or answer it at once, when Redis is known to be down. Whether it was answered."""
        node = self.node
        with node.lock:
            node.join(self)
            lease = self.enter(key, now)
            taken = waiter.permits if waiter.op == "take" else 0
            if node.backend.down is None and now >= lease.ill:
                self.remote += taken
                node.waiting.setdefault(lease, []).append(waiter)
                return False
            self.outage.asked += taken
            if node.backend.down is not None:
                lease.due = min(lease.due, node.backend.retry_at)
                node.wheel.schedule(lease)
            self.fall_back(lease, waiter, now)
            return True

    def abandon(self, key: str, waiter: Waiter) -> None:
        """Nobody waits any more: what is, or will be, taken for *waiter* goes back."""

        def settle() -> None:
            if waiter.op == "take" and waiter.result is not None and waiter.result.allowed:
                self.refund(key, waiter.permits, self.table.read_clock())

        with self.node.lock:
            lease, waiting = self.table.leases.get(key), self.node.waiting
            queue = waiting.get(lease, []) if lease else []
            if lease and waiter in queue:  # nobody has asked for it yet
                queue.remove(waiter)
                if not queue:
                    del waiting[lease]
                return
            waiter.wake = settle
            if waiter.result is not None:
                settle()

    def give_up(self, key: str, waiter: Waiter, now: int, error: Exception | None = None) -> Decision:
        """The policy's word for one who cannot wait any longer, or for whom nobody can ask."""
        with self.node.lock:
            if waiter.result is None and waiter.error is None:
                lease = self.enter(key, now)
                self.abandon(key, waiter)
                late = Waiter(waiter.op, waiter.permits, lambda: None)
                self.fall_back(lease, late, now, error or TimeoutError("no answer in the time that the caller had"))
                return late.answer()
        return waiter.answer()

    def interrupted(self, key: str, waiter: Waiter, now: int) -> Decision:
        """The policy's word in the middle of somebody else's step, of which nothing may be disturbed."""
        lease = self.table.leases.get(key)
        if lease is None:
            lease = Lease(key, 0, now, self)
            lease.expires = 1  # nobody will remember it: so it is not new
        self.fall_back(lease, waiter, now, RuntimeError("the limiter was called by what interrupted it"))
        return waiter.answer()

    def check_reachable(self, key: str, now: int) -> None:
        """Raise `StoreUnavailable` if *key* cannot be asked about now, and that is the policy."""
        if self.outage.policy != "raise":
            return
        backend = self.node.backend
        with self.node.lock:
            lease = self.table.leases.get(key)
            if backend.down is not None or (lease is not None and now < lease.ill):
                error = backend.down or backend.last_error
                raise StoreUnavailable(f"the store of limiter {self.rule.name!r} did not answer: {error}") from error

    def trust(self, key: str, permits: int, now: int) -> Decision | None:
        """Grant the first call about a key before Redis has been asked, and owe it; None for any other call."""
        node, leases = self.node, self.table.leases
        with node.lock:
            if node.backend.down is not None or key in leases or len(leases) >= self.max_keys:
                return None  # where keys are forgotten early, one that is not known need not be new
            node.join(self)
            lease = self.enter(key, now)
            lease.debt += permits
            lease.remember = now
            self.spent += permits
            lease.due = now
            node.wheel.schedule(lease)
            node.last_trip = min(node.last_trip, now - TICK)
            limit = self.law.limit
            return decision(True, limit, limit - permits)

    def refund(self, key: str, permits: int, now: int) -> None:
        """Give back what can be given back here, and tell Redis of the rest with the next report."""
        with self.node.lock:
            self.node.join(self)
            lease = self.enter(key, now)
            if not self.table.refund(key, permits):
                lease.due = now
                self.node.wheel.schedule(lease)

    def dismiss(self) -> None:
        """Give back everything that is held; the policy answers who waits."""
        node = self.node
        with node.lock:
            node.catch_up()
            for lease in list(self.table.leases.values()):
                for waiter in node.waiting.pop(lease, ()):
                    self.fall_back(lease, waiter, self.table.read_clock())
                self._give_back(lease)

    def desert(self) -> None:
        """Give back what nobody waits for: the limiter is gone, but somebody may have kept its `try_acquire`."""
        node = self.node
        with node.lock:
            for lease in list(self.table.leases.values()):
                if lease not in node.waiting:
                    self._give_back(lease)

    def _give_back(self, lease: Lease) -> None:
        self.table.leases.pop(lease.key, None)
        self.node.leaving.add(lease)

    def unsettled(self) -> bool:
        """Whether something is on its way out that Redis may still hear of."""
        node = self.node
        with node.lock:
            return node.backend.down is None and any(member is self for member, _ in node.leaving)

    def forget(self) -> None:
        """It is closed; should it be used again, it joins again."""
        with self.node.lock:
            if self in self.node.members:
                self.node.members.remove(self)

    # ------------------------------------------------------------------------------------------------ answers

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
            lease.told(now, now + wait * 1000, permits > 1)
            return answer(False, table.units, spare, max(table.over(lease, now), wait), wait)
        missing = max(price - total, wait * law.rate)
        if permits > 1 and price > law.room - reply.others * law.cost:
            missing = max(missing, RECALL * law.rate)  # no refill is enough: others have to give back first
        lease.told(now, now + -(-missing // law.rate) * 1000, permits > 1)
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

    def fall_back(self, lease: Lease, waiter: Waiter, now: int, error: Exception | None = None) -> None:
        """Answer *waiter* by the policy, in place of Redis."""
        outage = self.outage
        if waiter.op == "reset":
            lease.forgive()
        before, outage.down = outage.down, error or outage.down or self.node.backend.last_error
        try:
            waiter.result = (outage.take if waiter.op == "take" else outage.peek)(lease, waiter.permits, now)
        except Exception as refusal:
            waiter.error = refusal
        outage.down = before
        waiter.wake()

    def tally(self, lease: Lease) -> None:
        """Add to the figures what was spent and denied since the last time."""
        self.spent += (lease.mark - lease.balance) // self.law.cost
        self.denied += lease.denied // self.law.cost

    def drop(self, lease: Lease) -> None:
        """Nobody will hear of *lease* any more: what it holds is burned."""
        self.burned += lease.balance // self.law.cost
        self.tally(lease)


def new_id() -> str:
    """A name that no other process has."""
    return os.urandom(8).hex()
