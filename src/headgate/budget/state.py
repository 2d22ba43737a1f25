"""The state of a budget: its buckets, the holds beside them, the callers that wait, and holds that are over.

A bucket has a debt, which drains with time, and *held*, the sum of the live holds. What is available is room less debt
less held. All numbers are units (see `headgate.budget.amounts`), so the state knows neither names nor currencies. A
*spec* says which buckets a call concerns: level, label, room and rate of each; *units* is a number for each of them;
both are packed (see `headgate.budget.records`). All levels of a hierarchy that have the same root are one state.

reserve    holds *units* for *id* until *hold* is over, if there is room in all buckets beside what the ids before it in
           the queue wait for. Otherwise the id waits for *waiter_ttl*, and longer if it asks again (0: it does not).
           Replies with granted and, if there is no room, wait, and number, available and reset of the bucket that binds
           most. Granted is 1 or 0; -1: the same reservation was settled or withdrawn before; 2: the id holds other
           units already: their number follows, and they themselves behind the five values.
extend     raises what *id* holds to *units*, records what was *spent*, and starts its time again. Replies with 1, or
           with 0 if there is no room: then it keeps what it had.
settle     ends the hold and charges *units* in its place, a debt if there is no room for them. Replies with 1, or with
           0 if another call settled it, or it is not known; that is charged all the same if *unknown* is 1.
withdraw   ends the hold, or takes *id* out of the queue, and charges nothing. Replies with 1, or with 0 if there is
           none.
pause      raises the debts until nothing is available for the time in which *units* drain, and holds all room for
           *duration*, in which other holds may end. Replies with 1.
available  replies with what is available in each bucket, less than 0 if there is a debt.
holds      replies with the id, the microseconds left and the units, as text, of each live hold with this *spec*.

The first four reply with the paths of waiters that may succeed now, too, behind a fixed number of values. The path of a
waiter is its innermost level.

A hold that is not settled in time is lost, and *lost* says what becomes of it: `charge` charges all of it, `spent` what
was reported as spent, `release` nothing, as of the moment when its time was over. It is remembered for an hour, in
which a settle corrects what was charged. A hold that is settled or withdrawn is remembered for a minute with its nonce,
which tells a reservation that was delayed in the network (it is refused) from a new one with the same id.

Waiters are not asked before an extend, as its call is in progress and would be wasted. New calls wait behind them, so
the calls in progress come to an end. `headgate.budget.script` is the same in Lua.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Final

from headgate.budget.records import (
    CLOCK_STEP,
    LOST_TTL,
    MAX_WOKEN,
    PAUSE,
    BudgetBucket,
    BudgetWaiter,
    HoldRecord,
    SpecBuckets,
    buckets_of,
    forget_at,
    numbers,
    spec_of,
)
from headgate.budget.script import LUA
from headgate.coordination.states.machine import StateMachine
from headgate.keys import label

SWEEP_EVERY: Final = 256  # operations, after which a state in memory drops the buckets that are full


class BudgetState:
    """The same in Python."""

    def __init__(self) -> None:
        self.buckets: dict[str, BudgetBucket] = {}
        self.records: dict[str, HoldRecord] = {}
        self.due: list[tuple[int, str]] = []  # a heap; also of holds whose time has changed since
        self.waiting: dict[str, BudgetWaiter] = {}
        self.paths: list[str] = []  # of the waiters that the operation may have let in
        self.operations = 0

    def reserve(
        self,
        now: int,
        id: str,
        spec: bytes,
        units: bytes,
        hold: int,
        nonce: str,
        lost: str,
        waiter_ttl: int,
        path: str,
    ) -> list[Any]:
        answer = self.hold(now, id, spec, numbers(units), hold, nonce, lost, waiter_ttl, path)
        return [*answer, *self.paths]

    def hold(
        self,
        now: int,
        id: str,
        spec: bytes,
        units: list[int],
        hold: int,
        nonce: str,
        lost: str,
        waiter_ttl: int,
        path: str,
    ) -> list[int]:
        """`reserve` with numbers; the paths to wake are in `paths`."""
        self._begin(now)
        record, till = self.records.get(id), now + hold
        if record is not None:
            if record.kind == "done" and record.nonce == nonce:
                return [-1, 0, 0, 0, 0]
            if record.kind == "live":
                for each in buckets_of(record.spec):
                    self._bucket(now, each[0], each[2]).hold(0, now, till)
                self._write(id, record, till)
                other = record.spec == spec and record.units != units
                return [2, len(record.units), 0, 0, 0, *record.units] if other else [1, 0, 0, 0, 0]
        sums = self._asked_before(now, id) if self.waiting else {}
        wait = -1
        denial = [0, 0, 0, 0, 0]
        found = []
        for number, (index, room, rate) in enumerate(buckets_of(spec)):
            bucket = self._bucket(now, index, rate)
            bucket.drain(now)
            found.append(bucket)
            held = bucket.held_at(now)
            short = bucket.debt + held + units[number] - room
            if sums:
                short += sums.get(index, 0)
            if short > 0:
                paused, left = self._paused(now, index)
                short -= paused
                needed = max(-(-short // rate) if short <= bucket.debt else max(bucket.ends - now, 1), left)
                if needed > wait:
                    wait = needed
                    reset = max(-(-(bucket.debt + held - paused) // rate), left)
                    denial = [0, wait, number + 1, room - bucket.debt - held, reset]
        if wait >= 0:
            if waiter_ttl > 0:
                self.waiting[id] = BudgetWaiter(now + waiter_ttl, path, spec, units)
            elif id in self.waiting:
                del self.waiting[id]
                self._tell_waiters()
            return denial
        if self.waiting and id in self.waiting:
            del self.waiting[id]
            self._tell_waiters()
        for number, bucket in enumerate(found):
            bucket.hold(units[number], now, till)
        self._write(id, HoldRecord("live", nonce, lost, spec, units), till)
        return [1, 0, 0, 0, 0]

    def grant(
        self, now: int, id: str, spec: bytes, buckets: SpecBuckets, units: list[int], hold: int, lost: str
    ) -> bool:
        """`hold` for an *id* that was never used, while no caller waits; False without room: then nothing is held."""
        if self.waiting:
            return False
        self._begin(now)
        found = []
        for number, (index, room, rate) in enumerate(buckets):
            bucket = self._bucket(now, index, rate)
            bucket.drain(now)
            if bucket.debt + bucket.held_at(now) + units[number] > room:
                return False
            found.append(bucket)
        till = now + hold
        for number, bucket in enumerate(found):
            bucket.hold(units[number], now, till)
        self._write(id, HoldRecord("live", "", lost, spec, units), till)
        return True

    def extend(self, now: int, id: str, spec: bytes, units: bytes, hold: int, spent: bytes) -> list[Any]:
        self._begin(now)
        record = self.records.get(id)
        if record is None or record.kind == "done" or record.spec != spec:
            return [0, *self.paths]
        live, till, fits = record.kind == "live", now + hold, True
        known = record.units if live else [0] * len(record.units)
        paid = [0] * len(record.units) if live else record.charged()
        raised = [max(amount, had) for amount, had in zip(numbers(units), record.units, strict=True)]
        found = []
        for (index, room, rate), amount, had, back in zip(buckets_of(spec), raised, known, paid, strict=True):
            bucket = self._bucket(now, index, rate)
            bucket.drain(now)
            found.append(bucket)
            if (not live or amount > had) and max(bucket.debt - back, 0) + bucket.held_at(now) + amount - had > room:
                fits = False
        if fits:
            record.kind, record.units = "live", raised  # first: see `repair`
            for bucket, amount, had, back in zip(found, raised, known, paid, strict=True):
                bucket.hold(amount - had, now, till)
                bucket.charge(-back)
        if record.kind == "live":
            record.spent = numbers(spent)
            for bucket in found:
                bucket.hold(0, now, till)
            self._write(id, record, till)
        return [int(fits), *self.paths]

    def settle(self, now: int, id: str, spec: bytes, units: bytes, nonce: str, unknown: int) -> list[Any]:
        return [self.finish(now, id, spec, numbers(units), nonce, unknown), *self.paths]

    def finish(self, now: int, id: str, spec: bytes, units: list[int], nonce: str, unknown: int) -> int:
        """`settle` with numbers; the paths to wake are in `paths`."""
        self._begin(now)
        record = self.records.get(id)
        return self._end(now, id, record, spec, units, nonce, unknown)

    def settle_granted(self, now: int, id: str, buckets: SpecBuckets, units: list[int]) -> bool:
        """`finish` for what `grant` gave, while no caller waits; False if it is not live: then nothing is charged.

        The hold is forgotten at once: no call with this id can be on its way, as it would be in a network.
        """
        if self.waiting:
            return False
        self._begin(now)
        record = self.records.get(id)
        if record is None or record.kind != "live":
            return False
        back = record.units
        for number, (index, _, rate) in enumerate(buckets):
            bucket = self._bucket(now, index, rate)
            bucket.drain(now)
            bucket.charge(units[number])
            bucket.release(back[number])
        del self.records[id]
        return True

    def withdraw(self, now: int, id: str, spec: bytes, units: bytes, nonce: str, unknown: int) -> list[Any]:
        self._begin(now)
        record = self.records.get(id)
        if record is not None and (record.kind == "lost" or (record.kind == "live" and record.nonce != nonce)):
            return [0, *self.paths]
        return [self._end(now, id, record, spec, numbers(units), nonce, unknown), *self.paths]

    def pause(self, now: int, id: str, spec: bytes, units: bytes, duration: int) -> list[Any]:
        self._begin(now)
        for (index, room, rate), amount in zip(buckets_of(spec), numbers(units), strict=True):
            bucket = self._bucket(now, index, rate)
            bucket.drain(now)
            paused, left = self._paused(now, index)
            bucket.charge(max(room + amount - (bucket.held_at(now) - paused) - bucket.debt, 0))
            if duration > left:
                bucket.hold(room - paused, now, now + duration)
                level, _, label = index.partition(" ")
                alone = spec_of([(level, label, room, rate)])
                self._write(PAUSE + index, HoldRecord("pause", "", "release", alone, [room]), now + duration)
        return [1, *self.paths]

    def available(self, now: int, id: str, spec: bytes, units: bytes) -> list[Any]:
        self._begin(now)
        found = []
        for index, room, rate in buckets_of(spec):
            bucket = self._bucket(now, index, rate)
            bucket.drain(now)
            found.append(room - bucket.debt - bucket.held_at(now))
        return found

    def holds(self, now: int, id: str, spec: bytes, units: bytes) -> list[Any]:
        self._begin(now)
        records = self.records.items()
        live = [(record.till, id, record) for id, record in records if record.kind == "live" and record.spec == spec]
        found: list[Any] = []
        for till, each, record in sorted(live, key=lambda one: one[:2]):
            found += [each, till - now, " ".join(map(str, record.units))]
        return found

    def repair(self) -> None:
        """Make it whole after a signal handler has raised in an operation, which may have been done in part.

        What is held follows from the records. A debt may have been raised for a record that is still there: it is
        charged twice then, which is better than to forget what all others owe.
        """
        held: dict[str, int] = {}
        ends: dict[str, int] = {}
        for record in self.records.values():
            if record.kind in ("live", "pause"):
                for (index, _, _), amount in zip(buckets_of(record.spec), record.units, strict=True):
                    held[index] = held.get(index, 0) + amount
                    ends[index] = max(ends.get(index, 0), record.till)
        for index, bucket in self.buckets.items():
            bucket.held, bucket.ends = held.get(index, 0), ends.get(index, 0)
        self.due = sorted([(record.till, id) for id, record in self.records.items()])
        self.paths = []

    def is_expired(self, now: int) -> bool:
        if self.due and self.due[0][0] <= now:
            self._begin(now)
        if self.records or any(waiter.till > now for waiter in self.waiting.values()):
            return False
        self._sweep(now)
        return not self.buckets

    def _paused(self, now: int, index: str) -> tuple[int, int]:
        """What a pause holds of a bucket, and for how long; 0 if it is not paused."""
        record = self.records.get(PAUSE + index)
        return (0, 0) if record is None else (record.units[0], record.till - now)

    def _end(
        self, now: int, id: str, record: HoldRecord | None, spec: bytes, units: list[int], nonce: str, unknown: int
    ) -> int:
        waited = self.waiting.pop(id, None) if self.waiting else None
        ended = record is not None and record.kind != "done"
        if ended or (record is None and unknown):
            for number, (index, _, rate) in enumerate(buckets_of(spec)):
                bucket = self._bucket(now, index, rate)
                bucket.drain(now)
                bucket.charge(units[number])
        if record is not None and ended:
            live = record.kind == "live"
            back = record.units if live else record.charged()
            for number, (index, _, rate) in enumerate(buckets_of(record.spec)):
                bucket = self._bucket(now, index, rate)
                bucket.drain(now)
                if live:
                    bucket.release(back[number])
                else:
                    bucket.charge(-back[number])
        result = int(ended)
        if record is None or ended:  # the reply and the nonce of this call are kept in place of the policy
            done = HoldRecord("done", nonce if record is None else record.nonce, f"{result}{nonce}", b"", [])
            self._write(id, done, forget_at(now))
        elif record.lost == "1" + nonce:  # the same call again
            result = 1
        if waited is not None or (result and self.waiting):
            self._tell_waiters()
        return result

    def _begin(self, now: int) -> None:
        if self.paths:
            self.paths = []
        if self.due and self.due[0][0] <= now:
            self._end_due(now)
        self.operations += 1
        if self.operations % SWEEP_EVERY == 0:
            self._sweep(now)

    def _end_due(self, now: int) -> None:
        freed = False
        while self.due and self.due[0][0] <= now:
            time, id = heappop(self.due)
            record = self.records.get(id)
            if record is None or record.till != time:
                continue
            if record.kind != "live":
                del self.records[id]
                if record.kind != "pause":
                    continue
            cost = record.charged()
            freed = freed or record.lost != "charge"
            for number, (index, _, rate) in enumerate(buckets_of(record.spec)):
                bucket = self._bucket(now, index, rate)
                bucket.drain(time)
                bucket.release(record.units[number])
                bucket.charge(cost[number])
            if record.kind == "pause":
                continue
            record.kind = "lost"
            self._write(id, record, time + LOST_TTL)
        if freed:
            self._tell_waiters()

    def _bucket(self, now: int, index: str, rate: int) -> BudgetBucket:
        bucket = self.buckets.get(index)
        if bucket is None:
            bucket = self.buckets[index] = BudgetBucket(now, rate)
        elif bucket.at > now + CLOCK_STEP:
            bucket.at = now
        return bucket

    def _write(self, id: str, record: HoldRecord, till: int) -> None:
        record.till = till
        self.records[id] = record
        heappush(self.due, (till, id))
        if len(self.due) > 4 * len(self.records) + 64:  # most are out of date
            self.due = sorted([(each.till, id) for id, each in self.records.items()])

    def _asked_before(self, now: int, id: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        dead = []
        for each, waiter in self.waiting.items():
            if each == id:
                break
            if waiter.till <= now:
                dead.append(each)
                continue
            for (index, _, _), amount in zip(buckets_of(waiter.spec), waiter.units, strict=True):
                sums[index] = sums.get(index, 0) + amount
        for each in dead:
            del self.waiting[each]
        return sums

    def _tell_waiters(self) -> None:
        for waiter in islice(self.waiting.values(), MAX_WOKEN):
            if waiter.path not in self.paths:
                self.paths.append(waiter.path)

    def _sweep(self, now: int) -> None:
        """Drop the buckets that are as good as new."""
        for index in list(self.buckets):
            bucket = self.buckets[index]
            bucket.drain(now)
            if not bucket.debt and not bucket.held_at(now):
                del self.buckets[index]


@lru_cache(1000)
def budget_machine(name: str) -> StateMachine:
    """The state machine of the budgets with this *name*."""
    return StateMachine(f"budget:{label(name)}", ("", ":due", ":waiting"), LUA, BudgetState)
