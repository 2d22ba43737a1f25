"""One limiter's leases beyond the local decision: waiting callers, the policy's answers, and what goes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headgate.decision import Decision, decision
from headgate.hybrid.lease import SECOND, Lease
from headgate.hybrid.protocol import AccuracyProfile
from headgate.hybrid.table import LeaseTable
from headgate.keys import check_key
from headgate.rule import Rule, check_permits
from headgate.stores.base import StoreHealth

if TYPE_CHECKING:
    from headgate.hybrid.manager import LeaseManager


class LeaseWaiter:
    """A caller that waits for Redis. *wake* is called once `result` or `error` is set."""

    __slots__ = ("error", "op", "permits", "result", "wake")

    def __init__(self, op: str, permits: int, wake: Callable[[], object]) -> None:
        self.op = op  # take, peek or reset
        self.permits = permits
        self.wake = wake
        self.result: Decision | None = None
        self.error: Exception | None = None  # of the policy raise

    def answer(self) -> Decision:
        """The result, or the error raised."""
        if self.error:
            raise self.error
        assert self.result is not None
        return self.result


class LimiterLeases(LeaseTable):
    """Everything of one limiter that its `LeaseManager` works on: table, waiters' answers, releases, counters."""

    in_process = False

    def __init__(
        self,
        manager: LeaseManager,
        rule: Rule,
        profile: AccuracyProfile,
        on_store_error: str,
        *,
        max_keys: int,
        optimistic: bool = False,
        ledger_name: Callable[[str], str] = str,
    ) -> None:
        super().__init__(manager, rule, on_store_error)
        self.profile = profile
        self.max_keys = max_keys
        self.optimistic = optimistic
        self.ledger_name = ledger_name  # of a key, in the store
        self.node_id = new_node_id()
        # permits that callers asked for, by how they were answered, as far as leases do not count them any more
        self.waited = self.spent = self.denied = 0
        self.syncs = self.burned = self.voided = 0
        manager.limiters.add(self)

    def after_fork(self, lock: Any) -> None:
        """Start anew in the child of a fork: two processes with one node id would spend the same leases."""
        self.node_id = new_node_id()
        self.leases.clear()
        self.use_lock(lock)

    def lease_for(self, key: str, now: int) -> Lease:
        """The lease of *key*, a new one if there is none. The manager's lock must be held.

        A key never has a second lease while a grant for the first may still arrive: the ledger knows this process by
        one id, and would take the grant of the first for lost.
        """
        lease = self.leases.get(key)
        if lease is None:
            full = len(self.leases) >= self.max_keys
            if full:
                self._evict()
            lease = self.manager.releases.pop((self, key), None)
            if lease is None:
                # it acknowledges all earlier requests: their replies are not for this lease
                lease = Lease(key, self.manager.seq, now, self)
                lease.nodes = self.manager.nodes_seen
                # 1: keys were evicted, so this may be one of them, and `FallbackPolicy._share` gives it no first permit
                lease.expires = 1 if full else 0
            lease.due = now + SECOND
            self.leases[key] = lease
            self.manager.schedule.add(lease)
        return lease

    def _evict(self) -> None:
        """Make room: release the least recently used of a few leases.

        A lease that is in a report, or that a caller waits for, stays: one lease too many is better. Two are released
        where that is possible, to make up for it.
        """
        leases, manager = self.leases, self.manager
        few = [lease for lease, _ in zip(leases.values(), range(8), strict=False)]
        free = [lease for lease in few if not lease.in_flight and lease not in manager.waiters]
        free.sort(key=lambda lease: (lease.debt > 0, lease.last_call_at))
        for lease in free[: min(len(leases) - self.max_keys + 1, 2)]:
            self._release(lease)
        for lease in few:  # to the end, so that the next eviction looks at others
            if lease.key in leases:
                leases[lease.key] = leases.pop(lease.key)

    # ------------------------------------------------------------------------------------------------ callers

    def queue_waiter(self, key: str, waiter: LeaseWaiter, now: int) -> bool:
        """Queue *waiter* for the next trip; or answer it at once, and return True, while Redis is known to be down."""
        manager = self.manager
        with manager.lock:
            manager.activate(self)
            lease = self.lease_for(key, now)
            taken = waiter.permits if waiter.op == "take" else 0
            if self.health.outage_error is None and now >= lease.blocked_until:
                self.waited += taken
                manager.waiters.setdefault(lease, []).append(waiter)
                answered = False
            else:
                self.policy.requested += taken
                if self.health.outage_error is not None:
                    lease.due = min(lease.due, self.health.retry_at)
                    manager.schedule.add(lease)
                self.finish_by_policy(lease, waiter, now)
                answered = True
        manager.wake_background()
        return answered

    def cancel_waiter(self, key: str, waiter: LeaseWaiter) -> None:
        """Forget a caller that is gone: permits that Redis takes, or took, for it go back."""

        def give_back() -> None:
            if waiter.op == "take" and waiter.result is not None and waiter.result.allowed:
                self._refund(key, waiter.permits)

        with self.manager.lock:
            lease, waiters = self.leases.get(key), self.manager.waiters
            queue = waiters.get(lease, []) if lease else []
            if lease and waiter in queue:  # Redis has not been asked for it yet
                queue.remove(waiter)
                if not queue:
                    del waiters[lease]
                return
            waiter.wake = give_back
            if waiter.result is not None:
                give_back()

    def answer_by_policy(self, key: str, waiter: LeaseWaiter, now: int, error: Exception | None = None) -> Decision:
        """The policy's answer to a caller whose time is up, or when no thread can be started that asks Redis."""
        with self.manager.lock:
            if waiter.result is None and waiter.error is None:
                lease = self.lease_for(key, now)
                self.cancel_waiter(key, waiter)
                late = LeaseWaiter(waiter.op, waiter.permits, _do_nothing)
                self.finish_by_policy(lease, late, now, error or TimeoutError("no answer within the caller's time-out"))
                return late.answer()
        return waiter.answer()

    def answer_in_signal_handler(self, key: str, waiter: LeaseWaiter, now: int) -> Decision:
        """The policy's answer to a signal handler that interrupted a step of the manager: it may disturb nothing."""
        lease = self.leases.get(key)
        if lease is None:
            lease = Lease(key, 0, now, self)
            lease.expires = 1  # it is not stored, so the next call must not get the first permit again
        self.finish_by_policy(lease, waiter, now, RuntimeError("a signal handler called the limiter it interrupted"))
        return waiter.answer()

    def finish_by_policy(self, lease: Lease, waiter: LeaseWaiter, now: int, error: Exception | None = None) -> None:
        """Answer *waiter* by the policy, in place of Redis."""
        if waiter.op == "reset":
            lease.forgive_debt()
        if self.policy.policy == "raise":
            self.policy.answers += 1
            waiter.error = self.policy.unavailable(error)
        elif waiter.op == "take":
            waiter.result = self.policy.take(lease, waiter.permits, now)
        else:
            waiter.result = self.policy.peek(lease, waiter.permits, now)
        waiter.wake()

    def grant_unasked(self, key: str, permits: int, now: int) -> Decision | None:
        """Grant the first call for a key before Redis has been asked, as a debt; None for any other call."""
        manager, leases = self.manager, self.leases
        with manager.lock:
            if self.health.outage_error is not None or key in leases or len(leases) >= self.max_keys:
                return None  # in a full table keys are evicted early, and an unknown key need not be a new one
            manager.activate(self)
            lease = self.lease_for(key, now)
            lease.debt += permits
            lease.keep_until = now
            self.spent += permits
            lease.due = now
            manager.schedule.add(lease)
            manager.send_at_once(now)
        manager.wake_background()
        return decision(True, self.limit, self.limit - permits)

    def refund(self, key: str, permits: int = 1) -> bool:
        """Put back what the lease can take; the next report has the rest. True, or the policy raises."""
        key, permits = check_key(key), check_permits(permits)
        if self.manager.called_from_signal_handler():
            self.manager.deferred.append(lambda: self._refund(key, permits))
        else:
            self._check_reachable(key)
            self._refund(key, permits)
        self.manager.wake_background()
        return True

    def _refund(self, key: str, permits: int) -> None:
        with self.manager.lock:
            now = self.read_clock()
            self.manager.activate(self)
            lease = self.lease_for(key, now)
            if not self.refund_locally(key, permits):
                lease.due = now
                self.manager.schedule.add(lease)

    def _check_reachable(self, key: str) -> None:
        """Raise `StoreUnavailable` if Redis cannot be asked about *key* now and the policy is raise."""
        if self.policy.policy != "raise":
            return
        with self.manager.lock:
            lease, now = self.leases.get(key), self.read_clock()
            if self.health.outage_error is not None or (lease is not None and now < lease.blocked_until):
                raise self.policy.unavailable(None)

    # ------------------------------------------------------------------------------------------------ releases

    def release_all(self) -> None:
        """Give back everything that is held; waiters are answered by the policy."""
        manager = self.manager
        with manager.lock:
            manager.run_deferred()
            for lease in list(self.leases.values()):
                for waiter in manager.waiters.pop(lease, ()):
                    self.finish_by_policy(lease, waiter, self.read_clock())
                self._release(lease)

    def release_unawaited(self) -> None:
        """Give back what no caller waits for: the limiter was collected, but its `try_acquire` may still be in use."""
        with self.manager.lock:
            for lease in list(self.leases.values()):
                if lease not in self.manager.waiters:
                    self._release(lease)

    def _release(self, lease: Lease) -> None:
        self.leases.pop(lease.key, None)
        self.manager.releases.add(lease)

    def is_releasing(self) -> bool:
        """Whether leases are on their way back that Redis may still hear of."""
        with self.manager.lock:
            return self.health.outage_error is None and any(limiter is self for limiter, _ in self.manager.releases)

    def unregister(self) -> None:
        """The limiter is closed; a later call activates it again."""
        with self.manager.lock:
            if self in self.manager.active:
                self.manager.active.remove(self)

    def discard(self, lease: Lease) -> None:
        """Redis will hear no more of *lease*: what it holds is burned."""
        self.burned += lease.balance // self.cost
        self.count_decisions(lease)

    def count_decisions(self, lease: Lease) -> None:
        """Add to the counters what *lease* spent and denied since the last time."""
        self.spent += (lease.balance_at_last_count - lease.balance) // self.cost
        self.denied += lease.denied // self.cost

    def store_health(self) -> StoreHealth:
        health, error = self.health, self.health.current_error(self.read_clock())
        return StoreHealth(
            state="open" if error else "closed",
            failures=health.failures_in_row,
            opened=health.outages,
            degraded=self.policy.answers,
            last_error=f"{type(error).__name__}: {error}" if error else "",
        )


def new_node_id() -> str:
    """An id that no other process has."""
    return os.urandom(8).hex()


def _do_nothing() -> None:
    """The caller has its answer already."""
