"""All leases of a process on one Redis, and what to tell about them next. Pure: time is an argument, and nobody asks.

A driver (a thread, a task, the simulator) repeats: `gather` what is due, ask Redis, `deliver` the replies or `fail`,
then sleep for `pause`. Callers join in with `wait` when they cannot be served here. One batch is under way at a time;
in a Cluster, where one server need not wait for another, several are, and a lease is in one of them at most.
"""

from __future__ import annotations

import heapq
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from headgate.decision import Decision, answer, decision
from headgate.errors import StoreUnavailable
from headgate.hybrid.lease import IDLE, MILLISECOND, SECOND, TICK, Lease
from headgate.hybrid.member import Errand, Member, Waiter, new_id
from headgate.hybrid.outage import Outage
from headgate.hybrid.protocol import VOID, Ask, Reply, serve

BATCH = 64  # keys in one call of the script: they hold Redis for one or two milliseconds
LAZY = 5 * TICK  # between looks while nobody calls
FIRST_RETRY = 50 * MILLISECOND  # after a failure; then doubled up to the next
LAST_RETRY = SECOND
QUEUE = 10_000  # keys on their way out; beyond that leases are left to run out


class Node:
    """One process's, or one event loop's, side of the protocol.

    *apart*: keys lie at several servers, so that one of them does not answer says nothing of the others.
    """

    def __init__(self, dice: random.Random | None = None, apart: bool = False) -> None:
        self.apart = apart
        self.lock = threading.RLock()
        self.thirsty: deque[Lease] = deque()  # those that callers have drawn low
        self.waiting: dict[Lease, list[Waiter]] = {}
        self.leaving: dict[tuple[Member, str], Lease] = {}  # in no table any more, and not given back yet
        self.later: deque[Callable[[], None]] = deque()  # put off: it came in the middle of something
        self.members: list[Member] = []  # those who hold leases, or may
        self.everybody: weakref.WeakSet[Member] = weakref.WeakSet()
        self.seq = 0
        self.trip = MILLISECOND  # how long one takes, on average
        self.seen = 1  # nodes at one key, lately
        self.trips = 0
        self.failures = 0  # trips, ever
        self.failed = 0  # the same in a row
        self.outages = 0  # times that all went well before
        self.busy = False  # something is under way
        self.down: Exception | None = None  # why nobody is asked; apart, that is each lease's own matter (`ill`)
        self.last_error: Exception | None = None
        self.failed_at = 0
        self.retry_at = 0
        self.last_trip = 0
        self.active_at = 0
        self._retry = FIRST_RETRY
        self._wheel: dict[int, list[Lease]] = {}  # whom to look at, by tick
        self._ticks: list[int] = []  # a heap of the same ticks
        self._dice = dice or random.Random()

    def renew(self) -> None:
        """Start anew in the child of a fork: what the parent holds is the parent's."""
        self.lock = threading.RLock()
        self.thirsty.clear()
        self.later.clear()
        self.waiting, self.leaving, self._wheel, self._ticks = {}, {}, {}, []
        self.busy = False
        self._heard(None)
        for member in self.everybody:  # also who has nothing to do now: two processes of one name would be a disaster
            member.id = new_id()
            member.table.leases.clear()
            member.table.renew(self.lock)

    # ------------------------------------------------------------------------------------------------ callers

    def wait(self, member: Member, key: str, waiter: Waiter, now: int) -> bool:
        """Queue *waiter*; or answer it at once, when Redis is known to be down. Whether it was answered."""
        with self.lock:
            self._join(member)
            lease = member.enter(key, now)
            taken = waiter.permits if waiter.op == "take" else 0
            if self.down is None and now >= lease.ill:
                member.remote += taken
                self.waiting.setdefault(lease, []).append(waiter)
                return False
            member.outage.asked += taken
            if self.down is not None:
                lease.due = min(lease.due, self.retry_at)
                self.schedule(lease)
            self._policy(lease, waiter, now)
            return True

    def sick(self, now: int) -> Exception | None:
        """Why Redis, or a part of it, is not asked now; None: it is."""
        lately = self.apart and self.last_error is not None and now < self.failed_at + 2 * SECOND
        return self.last_error if lately else self.down

    def check_reachable(self, member: Member, key: str, now: int) -> None:
        """Raise `StoreUnavailable` if *key* cannot be asked about now, and that is the policy."""
        if member.outage.policy != "raise":
            return
        with self.lock:
            lease = member.table.leases.get(key)
            if self.down is not None or (lease is not None and now < lease.ill):
                error = self.down or self.last_error
                raise StoreUnavailable(f"the store of limiter {member.rule.name!r} did not answer: {error}") from error

    def abandon(self, member: Member, key: str, waiter: Waiter) -> None:
        """Nobody waits any more: what is, or will be, taken for *waiter* goes back."""

        def settle() -> None:
            if waiter.op == "take" and waiter.result is not None and waiter.result.allowed:
                self.refund(member, key, waiter.permits, member.table.read_clock())

        with self.lock:
            lease = member.table.leases.get(key)
            queue = self.waiting.get(lease, []) if lease else []
            if lease and waiter in queue:  # nobody has asked for it yet
                queue.remove(waiter)
                if not queue:
                    del self.waiting[lease]
                return
            waiter.wake = settle
            if waiter.result is not None:
                settle()

    def give_up(self, member: Member, key: str, waiter: Waiter, now: int) -> Decision:
        """The policy's word for one who cannot wait any longer."""
        with self.lock:
            if waiter.result is None and waiter.error is None:
                lease = member.enter(key, now)
                self.abandon(member, key, waiter)
                late = Waiter(waiter.op, waiter.permits, lambda: None)
                self._policy(lease, late, now, TimeoutError("no answer in the time that the caller had"))
                return late.answer()
        return waiter.answer()

    def mine(self) -> bool:
        """Whether the lock is held by the thread that asks."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # made for conditions; typeshed has it not
        return owned

    def interrupted(self, member: Member, key: str, waiter: Waiter, now: int) -> Decision:
        """The policy's word in the middle of somebody else's step, of which nothing may be disturbed."""
        lease = member.table.leases.get(key)
        if lease is None:
            lease = Lease(key, 0, now, member)
            lease.expires = 1  # nobody will remember it: so it is not new
        self._policy(lease, waiter, now, RuntimeError("the limiter was called by what interrupted it"))
        return waiter.answer()

    def trust(self, member: Member, key: str, permits: int, now: int) -> Decision | None:
        """Grant the first call about a key before Redis has been asked, and owe it; None for any other call."""
        with self.lock:
            leases = member.table.leases
            if self.down is not None or key in leases or len(leases) >= member.max_keys:
                return None  # where keys are forgotten early, one that is not known need not be new
            self._join(member)
            lease = member.enter(key, now)
            lease.debt += permits
            lease.remember = now
            member.spent += permits
            lease.due = now
            self.schedule(lease)
            self.last_trip = min(self.last_trip, now - TICK)
            limit = member.law.limit
            return decision(True, limit, limit - permits)

    def refund(self, member: Member, key: str, permits: int, now: int) -> None:
        """Give back what can be given back here, and tell Redis of the rest with the next report."""
        with self.lock:
            self._join(member)
            lease = member.enter(key, now)
            if not member.table.refund(key, permits):
                lease.due = now
                self.schedule(lease)

    def leave(self, lease: Lease) -> None:
        """See to it that what *lease* holds goes back; it is in no table any more."""
        told = (lease.lid and lease.worth()) or lease.debt or lease.refund
        if lease.flight or (told and len(self.leaving) < QUEUE):
            self.leaving[lease.home, lease.key] = lease
        else:
            self._drop(lease)

    def expire(self) -> None:
        """Spend no lease that is held now."""
        with self.lock:
            for member in self.members:
                for lease in member.table.leases.values():
                    lease.expires = 0

    def forget(self, member: Member) -> None:
        """*member* is closed; should it be used again, it joins again."""
        with self.lock:
            if member in self.members:
                self.members.remove(member)

    def dismiss(self, member: Member) -> None:
        """Give back everything that *member* holds."""
        with self.lock:
            self._catch_up()
            leases = list(member.table.leases.values())
            member.table.leases.clear()
            for lease in leases:
                if waiters := self.waiting.pop(lease, None):
                    self._answer_all(lease, waiters, member.table.read_clock())
                self.leave(lease)

    def unsettled(self, member: Member) -> bool:
        """Whether something of *member* is on its way out that Redis may still hear of."""
        with self.lock:
            return self.down is None and any(leaves is member for leaves, _ in self.leaving)

    # ------------------------------------------------------------------------------------------------- driver

    def gather(self, now: int) -> list[Errand]:
        """What to ask now, at most a batch."""
        with self.lock:
            self._catch_up()
            if self.down is not None and now < self.retry_at:
                return []
            if not self.waiting and now < self.last_trip + TICK:
                return []
            few = BATCH if self.down is None else 1
            picked: dict[Lease, str] = {}
            self._pick_waiting(now, picked, max(few // 2, 1))  # whoever else has to travel has room, too
            self._pick_leaving(now, picked, max(few * 3 // 4, 1))
            while self.thirsty and len(picked) < few:
                lease = self.thirsty.popleft()
                if not lease.flight and lease.home.table.leases.get(lease.key) is lease:
                    picked.setdefault(lease, "sync")
            self._turn(now, picked, few)
            self._pick_leaving(now, picked, few)
            self._pick_waiting(now, picked, few)
            errands = [self._errand(lease, op, now) for lease, op in picked.items()]
            if errands:
                self.last_trip = self.active_at = now
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
            self.failed = 0
            self._retry = FIRST_RETRY
            self._heard(None)
            sent = max((errand.lease.sent_at for errand in errands if errand.ask.op != "peek"), default=self.last_trip)
            self.trip += (now - sent - self.trip) // 5
        for errand, reply in zip(errands, replies, strict=True):
            with self.lock:
                if isinstance(reply, str):
                    self._refused(errand, now, RuntimeError(reply))
                    self._gone(errand)  # to tell it again would be no use
                else:
                    self._told(errand, reply, now)

    def fail(self, now: int, errands: Sequence[Errand], error: Exception) -> None:
        """Redis did not answer: callers get the policy's word, leases last as long as they last."""
        with self.lock:
            self.failures += 1
            self.failed += 1
            self.outages += self.sick(now) is None
            self.last_error, self.failed_at = error, now
            if self.apart:  # each server has a breaker of its own, which says at once that it is away
                for errand in errands:
                    self._refused(errand, now, error)
                return
            self._heard(error)
            self.retry_at = now + int(self._retry * self._dice.uniform(0.8, 1.2))
            self._retry = min(2 * self._retry, LAST_RETRY)
            for errand in errands:
                self._refused(errand, now, error)
                errand.lease.due = errand.lease.ill = self.retry_at
                self._schedule_live(errand.lease)
            waiting, self.waiting = self.waiting, {}
            for lease, waiters in waiting.items():
                self._answer_all(lease, waiters, now)

    def pause(self, now: int) -> float | None:
        """Seconds until `gather` may have something; None: nothing will come but by a caller who waits."""
        with self.lock:
            used = any(member.table.leases for member in self.members)
            if not used and self._hopeless(now):
                while self.leaving:
                    self._drop(self.leaving.popitem()[1])
            if self.down is not None:
                until = max(self.retry_at, now + TICK) if used or self.leaving else None
            elif any(not lease.flight for lease in self.waiting):
                return 0.0
            elif self.leaving or self.thirsty:
                soon = self.last_trip + TICK
                until = soon if soon > now else now + TICK  # nobody of them can travel now
            elif used or self.waiting:
                until = now + (TICK if now - self.active_at < SECOND else LAZY)
            else:
                until = None
            if until is None:
                self.members.clear()  # they join again when they are used again
                return None
            return max(until - now, 0) / SECOND

    # ------------------------------------------------------------------------------------------------- inside

    def _catch_up(self) -> None:
        while self.later:
            self.later.popleft()()

    def _pick_waiting(self, now: int, picked: dict[Lease, str], most: int) -> None:
        for lease in list(self.waiting) if len(picked) < most else ():
            if len(picked) >= most:
                break
            if lease not in picked and self._still_waiting(lease, now) and not lease.flight:
                picked[lease] = "sync"

    def _pick_leaving(self, now: int, picked: dict[Lease, str], most: int) -> None:
        gone = []
        for lease in self.leaving.values() if len(picked) < most else ():
            if len(picked) >= most:
                break
            if lease in picked or lease.flight or now < lease.ill:
                continue
            if lease.debt or lease.refund or now < lease.expires:
                picked[lease] = "release"
            else:
                gone.append(lease)
        for lease in gone:
            del self.leaving[lease.home, lease.key]
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        """Nobody will hear of *lease* any more: what it holds is burned."""
        lease.home.burned += lease.balance // lease.home.law.cost
        self._count(lease)

    def _hopeless(self, now: int) -> bool:
        """Whether Redis has not answered for a while, so that what only wants to leave is not worth the wait."""
        if self.apart:
            return all(now < lease.ill for lease in self.leaving.values())
        return self.down is not None and self._retry >= LAST_RETRY

    def _count(self, lease: Lease) -> None:
        member: Member = lease.home
        member.spent += (lease.mark - lease.balance) // member.law.cost
        member.denied += lease.denied // member.law.cost

    def _turn(self, now: int, picked: dict[Lease, str], few: int) -> None:
        """Pick the leases whose time has come, and forget those that hold nothing and that nobody asks for."""
        tick = now // TICK
        while self._ticks and self._ticks[0] <= tick:
            turned = heapq.heappop(self._ticks)
            leases = self._wheel.pop(turned)
            while leases:
                lease = leases.pop()
                if lease.slot != turned:
                    continue  # it was looked at for another reason, and has another place by now
                lease.slot = 0
                table = lease.home.table
                if table.leases.get(lease.key) is not lease:
                    continue
                if lease.due // TICK > tick:
                    self.schedule(lease)
                elif lease in picked or lease.flight:
                    continue
                elif self.down is not None:  # whatever there is to say: somebody has to find out
                    if len(picked) < few:
                        picked[lease] = "sync"
                    else:
                        lease.due = now + SECOND  # not from `retry_at`, which may be long ago
                        self.schedule(lease)
                elif not lease.ripe(now):
                    self.schedule(lease)
                elif lease.idle(now) and lease not in self.waiting:
                    del table.leases[lease.key]
                elif not lease.worth():
                    lease.due = max(lease.deny_until, lease.asked_at + IDLE, lease.remember, now + TICK)
                    self.schedule(lease)
                elif len(picked) < few:
                    picked[lease] = "sync"
                else:
                    self._place(lease, tick + 1)

    def _still_waiting(self, lease: Lease, now: int) -> bool:
        """Serve those who wait for what has come meanwhile; whether somebody is left."""
        member: Member = lease.home
        table, waiters = member.table, self.waiting[lease]
        while waiters and waiters[0].op == "take" and table.take(lease, waiters[0].permits * table.cost, now):
            waiter = waiters.pop(0)
            member.spent -= waiter.permits  # it was counted when it began to wait
            spare = lease.balance + lease.beyond
            self._tell(waiter, answer(True, table.units, spare, table.reset(lease, now, spare), 0))
        if not waiters:
            del self.waiting[lease]
        return bool(waiters)

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
            op = {"take": "sync", "peek": "peek", "reset": "reset"}[wish]
        if op == "peek":
            return Errand(lease, Ask("peek", member.id, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, TICK), waiters)
        self.seq += 1
        needs: list[tuple[int, int]] = []
        for waiter in waiters if op == "sync" else ():
            if needs and needs[-1][1] == waiter.permits:
                needs[-1] = (needs[-1][0] + 1, waiter.permits)
            else:
                needs.append((1, waiter.permits))
        if lease.expires and now >= lease.expires:
            member.burned += lease.balance // member.law.cost
        self._count(lease)
        ask = lease.report(now, self.seq, member.id, member.law, member.style, self.trip, op, tuple(needs))
        return Errand(lease, ask, waiters)

    def _told(self, errand: Errand, reply: Reply, now: int) -> None:
        lease, ask, member = errand.lease, errand.ask, errand.member
        member.syncs += 1
        if ask.op == "peek":
            for waiter in errand.waiters:
                self._tell(waiter, errand.member.standing(lease, reply, waiter.permits, now))
            return
        if lease.accept(now, reply, ask, member.law, member.style, self.trip):
            self.seen = max(reply.nodes, self.seen + (reply.nodes - self.seen) // 16)
            self._serve(errand, reply, now)
        elif reply.status == VOID:
            member.voided += 1
            if errand.waiters:  # they ask again: of the lease of today, should this one have been dismissed meanwhile
                self._join(member)
                today = member.enter(lease.key, now)
                self.waiting[today] = [*errand.waiters, *self.waiting.get(today, ())]
        else:  # STALE: somebody goes by our name
            self._refused(errand, now, RuntimeError("an older ask than the last one"))
        if reply.status != VOID or not (lease.debt or lease.refund):
            self._gone(errand)
        self._schedule_live(lease)

    def _gone(self, errand: Errand) -> None:
        """*errand* was heard: if it was a farewell, that is all."""
        lease = errand.lease
        if errand.ask.op == "release" and self.leaving.get((lease.home, lease.key)) is lease:
            del self.leaving[lease.home, lease.key]

    def _serve(self, errand: Errand, reply: Reply, now: int) -> None:
        """Tell each who waited what became of it."""
        lease, member = errand.lease, errand.member
        if errand.ask.op == "reset":
            for waiter in errand.waiters:
                self._tell(waiter, member.standing(lease, reply, 0, now))
            return
        waiters = iter(errand.waiters)
        served = serve(reply.before, member.law.cost, errand.ask.needs)
        for (count, permits), many in zip(errand.ask.needs, served, strict=True):
            for place in range(count):
                made = member.decide(lease, reply, permits, place < many, now)
                self._tell(next(waiters), made)

    def _refused(self, errand: Errand, now: int, error: Exception) -> None:
        """One key's ask got no answer."""
        lease = errand.lease
        self.last_error = error
        if errand.ask.op != "peek":
            lease.lose(now, errand.ask)
            lease.due = lease.ill = now + SECOND
            self._schedule_live(lease)
        for waiter in errand.waiters:
            self._policy(lease, waiter, now, error)

    def _join(self, member: Member) -> None:
        if member not in self.members:
            self.members.append(member)
            member.outage.down = self.down
            member.outage.alone = not self.trips

    def _heard(self, error: Exception | None) -> None:
        """Redis answers, or it does not."""
        self.down = error
        for member in self.members:
            member.outage.down = error

    def _answer_all(self, lease: Lease, waiters: Sequence[Waiter], now: int) -> None:
        for waiter in waiters:
            self._policy(lease, waiter, now)

    def _policy(self, lease: Lease, waiter: Waiter, now: int, error: Exception | None = None) -> None:
        outage: Outage = lease.home.outage
        if waiter.op == "reset":
            lease.forgive()
        before, outage.down = outage.down, error or outage.down or self.last_error
        try:
            waiter.result = (outage.take if waiter.op == "take" else outage.peek)(lease, waiter.permits, now)
        except Exception as refusal:
            waiter.error = refusal
        outage.down = before
        waiter.wake()

    def _tell(self, waiter: Waiter, made: Decision) -> None:
        waiter.result = made
        waiter.wake()

    def _schedule_live(self, lease: Lease) -> None:
        if lease.home.table.leases.get(lease.key) is lease:
            self.schedule(lease)

    def schedule(self, lease: Lease) -> None:
        """Look at *lease* when it is due, or before if it has an earlier place already."""
        self._place(lease, max(lease.due // TICK, 1))

    def _place(self, lease: Lease, tick: int) -> None:
        if lease.slot == 0 or tick < lease.slot:
            lease.slot = tick
            if tick not in self._wheel:
                self._wheel[tick] = []
                heapq.heappush(self._ticks, tick)
            self._wheel[tick].append(lease)
