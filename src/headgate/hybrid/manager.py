"""All leases of a process on one Redis, and what to tell Redis next. Pure: times are arguments, and others do the I/O.

A thread or a task (`background.py`) or the simulator repeats: `gather` the requests that are due, send them to Redis,
`deliver` the replies or `fail`, then sleep for `seconds_until_work`. A caller that a lease cannot serve queues a waiter
and wakes that thread or task. One batch is under way at a time; in a Cluster, where a batch goes to one server, several
are, and a lease is in one of them at most.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

from headgate.hybrid.fallback_policy import BackendHealth
from headgate.hybrid.lease import IDLE_AFTER, MILLISECOND, SECOND, TICK, Lease
from headgate.hybrid.protocol import VOID, LeaseReply, LeaseRequest, count_served
from headgate.hybrid.schedule import DueSchedule, ReleaseQueue
from headgate.hybrid.table import decision_with, reset_units

if TYPE_CHECKING:
    from headgate.hybrid.limiter_leases import LeaseWaiter, LimiterLeases

BATCH = 64  # keys in one call of the script: they occupy Redis for one or two milliseconds
LAZY_TICK = 5 * TICK  # the sleep of the background task after a second without a trip
RELEASES_PERCENT = 75  # of a batch: what waiters and releases may fill; the rest is for refills and leases that are due


class SyncItem(NamedTuple):
    """One request about one lease, and the waiters that its reply answers."""

    lease: Lease
    request: LeaseRequest
    waiters: Sequence[LeaseWaiter]


class LeaseManager:
    """The leases of one process, or of one event loop, for all limiters on one store."""

    def __init__(
        self, read_clock: Callable[[], int] = monotonic_ns, rng: random.Random | None = None, partitioned: bool = False
    ) -> None:
        self.read_clock = read_clock  # nanoseconds
        self.lock = threading.RLock()
        self.health = BackendHealth(rng or random.Random(), partitioned)
        self.schedule = DueSchedule()
        self.releases = ReleaseQueue()
        self.refill_queue: deque[Lease] = deque()  # leases whose balance callers have drawn low
        self.waiters: dict[Lease, list[LeaseWaiter]] = {}
        self.deferred: deque[Callable[[], None]] = deque()  # calls of signal handlers that interrupted a step
        self.limiters: weakref.WeakSet[LimiterLeases] = weakref.WeakSet()
        self.active: list[LimiterLeases] = []  # the limiters that may hold leases
        self.seq = 0
        self.trip_time = MILLISECOND  # of a round trip, on average
        self.trips = 0
        self.nodes_seen = 1  # processes at one key, lately
        self.trip_under_way = False
        self.last_trip_at = 0
        self._worked_at = 0

    def after_fork(self) -> None:
        """Start anew in the child of a fork: the leases are the parent's."""
        self.lock = threading.RLock()
        self.refill_queue.clear()
        self.deferred.clear()
        self.waiters, self.releases, self.schedule = {}, ReleaseQueue(), DueSchedule()
        self.trip_under_way = False
        self.health.outage_error = None
        for limiter in self.limiters:
            limiter.after_fork(self.lock)

    def wake_background(self) -> None:
        """There is something to do now. Nothing happens here: the simulator and tests run a manager by hand."""

    def called_from_signal_handler(self) -> bool:
        """Whether this thread holds the manager's lock already: then a signal handler interrupted it and calls."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # public enough for Condition, not in typeshed
        return owned

    def activate(self, limiter: LimiterLeases) -> None:
        """Look after the leases of *limiter*, which is being used."""
        if limiter not in self.active:
            self.active.append(limiter)

    def run_deferred(self) -> None:
        """Do what signal handlers could not do in the middle of a step."""
        while self.deferred:
            self.deferred.popleft()()

    def send_at_once(self, now: int) -> None:
        """Let the next trip start without waiting for the next tick."""
        with self.lock:
            self.last_trip_at = min(self.last_trip_at, now - TICK)

    def expire_leases(self) -> None:
        """Spend no lease that is held now."""
        with self.lock:
            for limiter in self.active:
                for lease in limiter.leases.values():
                    lease.expires = lease.known_until = 0

    # ------------------------------------------------------------------------------------------ background task

    def gather(self, now: int) -> list[SyncItem]:
        """The requests to send now, one batch at most."""
        with self.lock:
            if self.deferred:
                self.run_deferred()
            down = self.health.outage_error is not None
            if down and now < self.health.retry_at:
                return []
            if not self.waiters and now < self.last_trip_at + TICK:
                return []
            most = 1 if down else BATCH
            picked: dict[Lease, str] = {}
            half = max(most // 2, 1)  # the other half is for releases and for leases that are due
            if self.waiters:
                self._pick_waiting(now, picked, half)
            if self.releases:
                self.releases.pick(now, picked, max(most * RELEASES_PERCENT // 100, 1))
            while self.refill_queue and len(picked) < most:
                lease = self.refill_queue.popleft()
                if not lease.in_flight and _is_live(lease):
                    picked.setdefault(lease, "sync")
            self._pick_due(now, picked, most)
            if self.releases:
                self.releases.pick(now, picked, most)
            if len(self.waiters) > half:
                self._pick_waiting(now, picked, most)
            items = [self._sync_item(lease, op, now) for lease, op in picked.items()]
            if items:
                self.last_trip_at = self._worked_at = now
                self.trip_under_way = True
            return items

    def deliver(self, now: int, items: Sequence[SyncItem], replies: Sequence[LeaseReply | str]) -> None:
        """Take in the replies of Redis; text is an error about one key."""
        errors = [reply for reply in replies if isinstance(reply, str) and "WRONGTYPE" not in reply]
        if errors and len(errors) == len(replies):  # no permission, no memory, read-only: not about a single key
            self.fail(now, items, RuntimeError(errors[0]))
            return
        with self.lock:
            self.trips += 1
            self.health.record_success()
            sent_at = 0
            for item in items:
                if item.request.op != "peek":
                    sent_at = max(sent_at, item.lease.sent_at)
            self.trip_time += (now - (sent_at or self.last_trip_at) - self.trip_time) // 5
        for item, reply in zip(items, replies, strict=True):
            with self.lock:
                if isinstance(reply, str):
                    self._fail_item(item, now, RuntimeError(reply))
                    if item.request.op == "release":
                        self.releases.confirm(item.lease)  # another request would get the same error
                else:
                    self._accept(item, reply, now)

    def fail(self, now: int, items: Sequence[SyncItem], error: Exception) -> None:
        """Redis did not answer: the policy answers the waiters, and leases stay usable until they expire."""
        with self.lock:
            self.health.record_failure(now, error)
            for item in items:
                self._fail_item(item, now, error)
            if self.health.partitioned:
                return
            for item in items:
                item.lease.due = item.lease.blocked_until = self.health.retry_at
                self._schedule_live(item.lease)
            waiters, self.waiters = self.waiters, {}
            for lease, queue in waiters.items():
                for waiter in queue:
                    lease.owner.finish_by_policy(lease, waiter, now)

    def seconds_until_work(self, now: int) -> float | None:
        """Seconds until `gather` may have something; None: nothing to do until a caller waits.

        In a long outage it first discards the releases, if they are all that is left to do. With None it also forgets
        which limiters are active: the next call of each activates it again.
        """
        with self.lock:
            health = self.health
            used = any(limiter.leases for limiter in self.active)
            if not used and (self.releases.all_blocked(now) if health.partitioned else health.is_long_outage()):
                self.releases.discard_all()  # not worth the wait
            if health.outage_error is not None:
                until = max(health.retry_at, now + TICK) if used or self.releases else None
            elif any(not lease.in_flight for lease in self.waiters):
                return 0.0
            elif self.releases or self.refill_queue:
                soon = self.last_trip_at + TICK
                until = soon if soon > now else now + TICK  # all of them are blocked or under way
            elif used or self.waiters:
                until = now + (TICK if now - self._worked_at < SECOND else LAZY_TICK)
            else:
                until = None
            if until is None:
                self.active.clear()
                return None
            return max(until - now, 0) / SECOND

    # ------------------------------------------------------------------------------------- what the batch takes

    def _pick_waiting(self, now: int, picked: dict[Lease, str], most: int) -> None:
        """Pick leases that callers wait for; a caller that the lease can serve meanwhile is answered instead."""
        for lease in list(self.waiters):
            if len(picked) >= most:
                break
            if lease in picked:
                continue
            owner: LimiterLeases = lease.owner
            queue = self.waiters[lease]
            while lease.balance and queue and queue[0].op == "take":
                if not owner.spend(lease, queue[0].permits * owner.cost, now):
                    break
                waiter = queue.pop(0)
                owner.spent -= waiter.permits  # it was counted when it began to wait
                units_left = lease.balance + lease.free_in_redis
                waiter.result = decision_with(owner, True, units_left, reset_units(owner, lease, now, units_left), 0)
                waiter.wake()
            if not queue:
                del self.waiters[lease]
            elif not lease.in_flight:
                picked[lease] = "sync"

    def _pick_due(self, now: int, picked: dict[Lease, str], most: int) -> None:
        """Pick the leases that are due, and forget those that hold nothing and that no caller uses."""
        schedule, tick = self.schedule, now // TICK
        for lease in schedule.pop_due(now):
            if not _is_live(lease):
                continue
            if lease.due // TICK > tick:
                schedule.add(lease)
            elif lease.in_flight:
                continue
            elif lease in picked:
                schedule.add(lease, tick + 1)  # if it was picked for a peek, its report has yet to come
            elif self.health.outage_error is not None:
                # one lease, whatever it has to report, probes whether Redis is back
                if len(picked) < most:
                    picked[lease] = "sync"
                else:
                    lease.due = now + SECOND  # not from `retry_at`, which may be long ago
                    schedule.add(lease)
            elif not lease.should_report(now):
                schedule.add(lease)
            elif lease.is_forgettable(now) and lease not in self.waiters:
                del lease.owner.leases[lease.key]
            elif not lease.has_news():
                lease.due = max(lease.deny_until, lease.last_call_at + IDLE_AFTER, lease.keep_until, now + TICK)
                schedule.add(lease)
            elif len(picked) < most:
                picked[lease] = "sync"
            else:
                schedule.add(lease, tick + 1)

    def _sync_item(self, lease: Lease, op: str, now: int) -> SyncItem:
        """The request about *lease*, for its first waiters of one operation; the next trip has the others."""
        owner: LimiterLeases = lease.owner
        waiters: list[LeaseWaiter] = []
        waiting: list[tuple[int, int]] = []
        queue = self.waiters.pop(lease, None)
        if queue:
            first_op = queue[0].op
            op = "sync" if first_op == "take" else first_op
            for waiter in queue:
                if waiter.op != first_op:
                    self.waiters[lease] = queue[len(waiters) :]
                    break
                waiters.append(waiter)
                if op == "sync" and waiting and waiting[-1][1] == waiter.permits:
                    waiting[-1] = (waiting[-1][0] + 1, waiter.permits)
                elif op == "sync":
                    waiting.append((1, waiter.permits))
        if op == "peek":
            return SyncItem(lease, LeaseRequest("peek", owner.node_id, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, TICK), waiters)
        self.seq += 1
        if now >= lease.known_until:
            owner.burned += lease.balance // owner.cost
        owner.count_decisions(lease)
        request = lease.report(
            now, self.seq, owner.node_id, owner.params, owner.profile, self.trip_time, op, tuple(waiting)
        )
        return SyncItem(lease, request, waiters)

    # --------------------------------------------------------------------------------------- what becomes of it

    def _accept(self, item: SyncItem, reply: LeaseReply, now: int) -> None:
        """Take in the reply about one lease, and answer its waiters."""
        lease, request, owner = item.lease, item.request, item.lease.owner
        owner.syncs += 1
        if request.op == "peek":
            for waiter in item.waiters:
                waiter.result = owner.decide_peek(lease, reply, waiter.permits, now)
                waiter.wake()
            return
        if lease.accept(now, reply, request, owner.params, owner.profile, self.trip_time):
            self.nodes_seen = max(reply.nodes, self.nodes_seen + (reply.nodes - self.nodes_seen) // 16)
            self._answer_waiters(item, reply, now)
        elif reply.status == VOID:
            owner.voided += 1
            if item.waiters:  # they ask again, with the key's lease of now: this one may have been released meanwhile
                self.activate(owner)
                current = owner.lease_for(lease.key, now)
                self.waiters[current] = [*item.waiters, *self.waiters.get(current, ())]
        else:  # STALE: another process uses our node id
            self._fail_item(item, now, RuntimeError("an older request than the last one"))
        if request.op == "release" and (reply.status != VOID or not (lease.debt or lease.refund)):
            self.releases.confirm(lease)
        self._schedule_live(lease)

    def _answer_waiters(self, item: SyncItem, reply: LeaseReply, now: int) -> None:
        lease, owner, waiters = item.lease, item.lease.owner, iter(item.waiters)
        if item.request.op == "reset":
            for waiter in waiters:
                waiter.result = owner.decide_peek(lease, reply, 0, now)
                waiter.wake()
            return
        waiting = item.request.waiting
        for (count, permits), served in zip(waiting, count_served(reply.free_before, owner.cost, waiting), strict=True):
            for place in range(count):
                waiter = next(waiters)
                waiter.result = owner.decide_waiter(lease, reply, permits, place < served, now)
                waiter.wake()

    def _fail_item(self, item: SyncItem, now: int, error: Exception) -> None:
        """One key's request got no answer, or an error."""
        lease = item.lease
        self.health.last_error = error
        if item.request.op != "peek":
            lease.lose_reply(now, item.request)
            lease.due = lease.blocked_until = now + SECOND
            self._schedule_live(lease)
        for waiter in item.waiters:
            lease.owner.finish_by_policy(lease, waiter, now, error)

    def _schedule_live(self, lease: Lease) -> None:
        if _is_live(lease):
            self.schedule.add(lease)


def _is_live(lease: Lease) -> bool:
    """Whether callers find *lease* in its table."""
    return lease.owner.leases.get(lease.key) is lease
