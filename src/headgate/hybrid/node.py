"""All leases of a process on one Redis, and what to tell about them next. Pure: time is an argument, and nobody asks.

A driver (a thread, a task, the simulator) repeats: `gather` what is due, ask Redis, `deliver` the replies or `fail`,
then sleep for `pause`. Callers join in (`Member.wait`) when they cannot be served here. One batch is under way at a
time; in a Cluster, where one server need not wait for another, several are, and a lease is in one of them at most.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from headgate.decision import answer
from headgate.hybrid.backend import Backend
from headgate.hybrid.errand import Errand, Waiter, needs_of
from headgate.hybrid.farewells import Farewells
from headgate.hybrid.lease import IDLE, MILLISECOND, SECOND, TICK, Lease
from headgate.hybrid.member import Member, new_id
from headgate.hybrid.protocol import VOID, Ask, Reply, serve
from headgate.hybrid.wheel import Wheel

BATCH = 64  # keys in one call of the script: they hold Redis for one or two milliseconds
LAZY = 5 * TICK  # between looks while nobody calls


class Node:
    """One process's, or one event loop's, side of the protocol."""

    def __init__(self, dice: random.Random | None = None, apart: bool = False) -> None:
        self.lock = threading.RLock()
        self.backend = Backend(dice or random.Random(), apart)
        self.wheel = Wheel()
        self.thirsty: deque[Lease] = deque()  # those that callers have drawn low
        self.waiting: dict[Lease, list[Waiter]] = {}
        self.leaving = Farewells()
        self.later: deque[Callable[[], None]] = deque()  # put off: it came in the middle of something
        self.members: list[Member] = []  # those who hold leases, or may
        self.everybody: weakref.WeakSet[Member] = weakref.WeakSet()
        self.seq = 0
        self.trip = MILLISECOND  # how long one takes, on average
        self.seen = 1  # nodes at one key, lately
        self.trips = 0
        self.busy = False  # something is under way
        self.last_trip = 0
        self._active_at = 0

    def renew(self) -> None:
        """Start anew in the child of a fork: what the parent holds is the parent's."""
        self.lock = threading.RLock()
        self.thirsty.clear()
        self.later.clear()
        self.waiting, self.leaving, self.wheel = {}, Farewells(), Wheel()
        self.busy = False
        self.backend.down = None
        self._spread()
        for member in self.everybody:  # also who has nothing to do now: two processes of one name would be a disaster
            member.id = new_id()
            member.table.leases.clear()
            member.table.renew(self.lock)

    def mine(self) -> bool:
        """Whether the lock is held by the thread that asks."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # made for conditions; typeshed has it not
        return owned

    def join(self, member: Member) -> None:
        """Look after *member*, who is being used."""
        if member not in self.members:
            self.members.append(member)
            member.outage.down = self.backend.down
            member.outage.alone = not self.trips

    def catch_up(self) -> None:
        """Do what was put off."""
        while self.later:
            self.later.popleft()()

    def hasten(self, now: int) -> None:
        """Let those who leave travel at once: to wait for the next tick is for those who stay."""
        with self.lock:
            self.last_trip = min(self.last_trip, now - TICK)

    def expire(self) -> None:
        """Spend no lease that is held now."""
        with self.lock:
            for member in self.members:
                for lease in member.table.leases.values():
                    lease.expires = lease.known = 0

    # ------------------------------------------------------------------------------------------------- driver

    def gather(self, now: int) -> list[Errand]:
        """What to ask now, at most a batch."""
        with self.lock:
            self.catch_up()
            down = self.backend.down is not None
            if down and now < self.backend.retry_at:
                return []
            if not self.waiting and now < self.last_trip + TICK:
                return []
            few = 1 if down else BATCH
            picked: dict[Lease, str] = {}
            self._pick_waiting(now, picked, max(few // 2, 1))  # whoever else has to travel has room, too
            self.leaving.pick(now, picked, max(few * 3 // 4, 1))
            while self.thirsty and len(picked) < few:
                lease = self.thirsty.popleft()
                if not lease.flight and _live(lease):
                    picked.setdefault(lease, "sync")
            self._pick_due(now, picked, few)
            self.leaving.pick(now, picked, few)
            self._pick_waiting(now, picked, few)
            errands = [self._errand(lease, op, now) for lease, op in picked.items()]
            if errands:
                self.last_trip = self._active_at = now
                self.busy = True
            return errands

    def deliver(self, now: int, errands: Sequence[Errand], replies: Sequence[Reply | str]) -> None:
        """Take in what Redis said."""
        told = [reply for reply in replies if isinstance(reply, str) and "WRONGTYPE" not in reply]
        if told and len(told) == len(replies):  # no right, no memory, read-only: nothing about a single key
            self.fail(now, errands, RuntimeError(told[0]))
            return
        with self.lock:
            self.trips += 1
            if self.trips == 1:
                for member in self.members:
                    member.outage.alone = False
            self.backend.answered()
            self._spread()
            sent = max((errand.lease.sent_at for errand in errands if errand.ask.op != "peek"), default=self.last_trip)
            self.trip += (now - sent - self.trip) // 5
        for errand, reply in zip(errands, replies, strict=True):
            with self.lock:
                if isinstance(reply, str):
                    self._refused(errand, now, RuntimeError(reply))
                    self._told_farewell(errand)  # again would be no use
                else:
                    self._told(errand, reply, now)

    def fail(self, now: int, errands: Sequence[Errand], error: Exception) -> None:
        """Redis did not answer: callers get the policy's word, leases last as long as they last."""
        with self.lock:
            self.backend.missed(now, error)
            for errand in errands:
                self._refused(errand, now, error)
            if self.backend.apart:
                return
            self._spread()
            for errand in errands:
                errand.lease.due = errand.lease.ill = self.backend.retry_at
                self._schedule_live(errand.lease)
            waiting, self.waiting = self.waiting, {}
            for lease, waiters in waiting.items():
                for waiter in waiters:
                    lease.home.fall_back(lease, waiter, now)

    def pause(self, now: int) -> float | None:
        """Seconds until `gather` may have something; None: nothing will come but by a caller who waits."""
        with self.lock:
            backend = self.backend
            used = any(member.table.leases for member in self.members)
            if not used and (self.leaving.ill(now) if backend.apart else backend.long_gone()):
                self.leaving.drop_all()  # not worth the wait
            if backend.down is not None:
                until = max(backend.retry_at, now + TICK) if used or self.leaving else None
            elif any(not lease.flight for lease in self.waiting):
                return 0.0
            elif self.leaving or self.thirsty:
                soon = self.last_trip + TICK
                until = soon if soon > now else now + TICK  # nobody of them can travel now
            elif used or self.waiting:
                until = now + (TICK if now - self._active_at < SECOND else LAZY)
            else:
                until = None
            if until is None:
                self.members.clear()  # they join again when they are used again
                return None
            return max(until - now, 0) / SECOND

    # ---------------------------------------------------------------------------------------------- who travels

    def _pick_waiting(self, now: int, picked: dict[Lease, str], most: int) -> None:
        for lease in list(self.waiting) if len(picked) < most else ():
            if len(picked) >= most:
                break
            if lease not in picked and self._still_waiting(lease, now) and not lease.flight:
                picked[lease] = "sync"

    def _still_waiting(self, lease: Lease, now: int) -> bool:
        """Serve those who wait for what has come meanwhile; whether somebody is left."""
        member: Member = lease.home
        table, waiters = member.table, self.waiting[lease]
        while waiters and waiters[0].op == "take" and table.take(lease, waiters[0].permits * table.cost, now):
            waiter = waiters.pop(0)
            member.spent -= waiter.permits  # it was counted when it began to wait
            spare = lease.balance + lease.beyond
            waiter.tell(answer(True, table.units, spare, table.reset(lease, now, spare), 0))
        if not waiters:
            del self.waiting[lease]
        return bool(waiters)

    def _pick_due(self, now: int, picked: dict[Lease, str], few: int) -> None:
        """Pick the leases whose time has come, and forget those that hold nothing and that nobody asks for."""
        wheel, tick = self.wheel, now // TICK
        for lease in wheel.turn(now):
            if not _live(lease):
                continue
            if lease.due // TICK > tick:
                wheel.schedule(lease)
            elif lease in picked or lease.flight:
                continue
            elif self.backend.down is not None:  # whatever there is to say: somebody has to find out
                if len(picked) < few:
                    picked[lease] = "sync"
                else:
                    lease.due = now + SECOND  # not from `retry_at`, which may be long ago
                    wheel.schedule(lease)
            elif not lease.ripe(now):
                wheel.schedule(lease)
            elif lease.idle(now) and lease not in self.waiting:
                del lease.home.table.leases[lease.key]
            elif not lease.worth():
                lease.due = max(lease.deny_until, lease.asked_at + IDLE, lease.remember, now + TICK)
                wheel.schedule(lease)
            elif len(picked) < few:
                picked[lease] = "sync"
            else:
                wheel.place(lease, tick + 1)

    def _errand(self, lease: Lease, op: str, now: int) -> Errand:
        member: Member = lease.home
        waiters: Sequence[Waiter] = ()
        queued = self.waiting.pop(lease, None)
        if queued:  # the first of them that want the same; the others have the next trip
            wish = queued[0].op
            many = next((i for i, waiter in enumerate(queued) if waiter.op != wish), len(queued))
            waiters = queued[:many]
            if many < len(queued):
                self.waiting[lease] = queued[many:]
            op = "sync" if wish == "take" else wish
        if op == "peek":
            return Errand(lease, Ask("peek", member.id, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, TICK), waiters)
        self.seq += 1
        if now >= lease.known:
            member.burned += lease.balance // member.law.cost
        member.tally(lease)
        needs = needs_of(waiters) if op == "sync" else ()
        ask = lease.report(now, self.seq, member.id, member.law, member.style, self.trip, op, needs)
        return Errand(lease, ask, waiters)

    # ------------------------------------------------------------------------------------------- what they hear

    def _told(self, errand: Errand, reply: Reply, now: int) -> None:
        lease, ask, member = errand.lease, errand.ask, errand.member
        member.syncs += 1
        if ask.op == "peek":
            for waiter in errand.waiters:
                waiter.tell(member.standing(lease, reply, waiter.permits, now))
            return
        if lease.accept(now, reply, ask, member.law, member.style, self.trip):
            self.seen = max(reply.nodes, self.seen + (reply.nodes - self.seen) // 16)
            self._serve(errand, reply, now)
        elif reply.status == VOID:
            member.voided += 1
            if errand.waiters:  # they ask again: of the lease of today, should this one have been dismissed meanwhile
                self.join(member)
                today = member.enter(lease.key, now)
                self.waiting[today] = [*errand.waiters, *self.waiting.get(today, ())]
        else:  # STALE: somebody goes by our name
            self._refused(errand, now, RuntimeError("an older ask than the last one"))
        if reply.status != VOID or not (lease.debt or lease.refund):
            self._told_farewell(errand)
        self._schedule_live(lease)

    def _serve(self, errand: Errand, reply: Reply, now: int) -> None:
        """Tell each who waited what became of it."""
        lease, member = errand.lease, errand.member
        if errand.ask.op == "reset":
            for waiter in errand.waiters:
                waiter.tell(member.standing(lease, reply, 0, now))
            return
        waiters = iter(errand.waiters)
        served = serve(reply.before, member.law.cost, errand.ask.needs)
        for (count, permits), many in zip(errand.ask.needs, served, strict=True):
            for place in range(count):
                next(waiters).tell(member.decide(lease, reply, permits, place < many, now))

    def _refused(self, errand: Errand, now: int, error: Exception) -> None:
        """One key's ask got no answer."""
        lease = errand.lease
        self.backend.last_error = error
        if errand.ask.op != "peek":
            lease.lose(now, errand.ask)
            lease.due = lease.ill = now + SECOND
            self._schedule_live(lease)
        for waiter in errand.waiters:
            errand.member.fall_back(lease, waiter, now, error)

    def _told_farewell(self, errand: Errand) -> None:
        if errand.ask.op == "release":
            self.leaving.heard(errand.lease)

    def _spread(self) -> None:
        """Let everybody know whether Redis answers."""
        for member in self.members:
            member.outage.down = self.backend.down

    def _schedule_live(self, lease: Lease) -> None:
        if _live(lease):
            self.wheel.schedule(lease)


def _live(lease: Lease) -> bool:
    """Whether callers can find it."""
    return lease.home.table.leases.get(lease.key) is lease
