"""The tables of the memory store: the states of one rule by key, thread-safe and bounded.

Calls sweep out a few expired states as they go. When the store is full of states that have not expired, a new key
replaces the one that has spent least among a few; a key at its limit is never replaced, so a flood of new keys cannot
free a key that is being limited. If all of those few are at their limit, the new key is denied until the first of them
expires.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from headgate._mypyc import FREE_THREADED, mypyc_attr
from headgate.algorithms.algorithm import Algorithm, IntegerState, multiply
from headgate.algorithms.bucket import Bucket
from headgate.clock import EPOCH, SYSTEM_CLOCK, Clock
from headgate.decision import COMPILED, Decision, LimiterDecision, decision_in
from headgate.keys import check_key
from headgate.rule import check_permits
from headgate.stores.base import StoreHealth
from headgate.telemetry.counts import DecisionCounts

if TYPE_CHECKING:
    from headgate.stores.memory import MemoryStore

logger = logging.getLogger("headgate")

# Compiled, the steps from look-up to saved state run no Python code and allocate nothing that could start a garbage
# collection, so no other thread runs between them where there is an interpreter lock. All other builds need a lock.
LOCKED: Final = not COMPILED or FREE_THREADED

ONE: Final[object] = 1  # compared by identity: quicker, and True is another object

_SWEEP_EVERY: Final = 1000  # microseconds between two sweeps
_SWEEP_KEYS: Final = 8
_SWEEP_FOR_NEW: Final = 2  # states swept for each new key: expired ones go faster than new ones come
_CANDIDATES: Final = 8  # how many states are compared to find one to replace


def plain_str(key: Any) -> str:
    """*key* if it is exactly a str; else checked and converted: a subclass could hash and compare as it likes."""
    return key if type(key) is str else check_key(key)


class KeyCount:
    """How many keys the tables of one store hold. `keys` may be too high after an interrupt, but never too low."""

    __slots__ = ("dropping", "keys", "max_keys")

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.keys = 0
        # True while a call removes states: a signal handler or finalizer that interrupts it must not do so too.
        self.dropping = False


class KeyTable:
    """The backend of one rule: its states, by key.

    Arguments are Any: they are checked here, and compiled code would turn True into 1 before that.
    """

    in_process: bool = True

    def __init__(self, store: MemoryStore, algorithm: Algorithm[Any]) -> None:
        self.store = store
        self.key_count: KeyCount = store.key_count
        self.algorithm = algorithm
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.read_clock: Callable[[], int] = monotonic_ns if store.clock is None else _nanoseconds(store.clock)
        self.epoch = EPOCH if store.clock is None else 0
        self.use_lock(store.lock)
        self.states: dict[Any, Any] = {}
        self.order: list[str] = []  # every key once: sweeps go through it in small steps
        self.cursor = 0
        self.sweep_at = 0
        self.full_logged = False
        self.slots: Any = None  # a `SlotTable`, from the first booking on
        self.counts = DecisionCounts()
        self.watched: Any = None  # by telemetry, if a limiter uses this table: see `headgate.telemetry.watch`

    def use_lock(self, lock: Any) -> None:
        self.lock: Any = lock
        self.acquire_lock: Any = lock.acquire  # compiled code calls these quicker; plain Python calls `lock.acquire`
        self.release_lock: Any = lock.release

    def now(self) -> int:
        return self.read_clock() // 1000 + self.epoch

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        count = 1 if permits is ONE else check_permits(permits, self.algorithm.limit)
        if type(key) is not str:
            key = check_key(key)
        try:
            self.acquire_lock()
            now = self.now()
            if now >= self.sweep_at:
                self.sweep(now)
            state = self.states.get(key)
            if state is None:
                return self.admit_new_key(key, now, count)
            decision = self.algorithm.evaluate(state, now, count)
            if decision._allowed:
                after: Any = self.algorithm.consume(state, now, count)
                if after is not state:
                    self.states[key] = after
            self.counts.add_locked(decision, count)
            return decision
        finally:
            try:
                self.release_lock()
            except RuntimeError:
                pass  # a signal interrupted the call before it held the lock

    def try_acquire_above(self, key: Any, permits: int, share: int) -> Decision:
        """`try_acquire` that leaves *share*, in millionths of the capacity; the numbers were checked."""
        key = plain_str(key)
        with self.lock:
            while True:
                now, state = self.now(), self.get(key)
                if state is None:
                    return self.admit_new_key(key, now, permits)
                decision = self.algorithm.evaluate_above(state, now, permits, share)
                if not decision._allowed:
                    self.counts.add_locked(decision, permits)
                    return decision
                after: Any = self.algorithm.consume(state, now, permits)
                if self.states.get(key) is state:  # where single checks take no lock, one may have come between
                    self.states[key] = after
                    self.counts.add_locked(decision, permits)
                    return decision

    def peek(self, key: Any, permits: Any = 1) -> Decision:
        count = check_permits(permits, self.algorithm.limit, 0)
        key = plain_str(key)
        with self.lock:
            now, state = self.now(), self.get(key)
            if state is None:
                if not self.has_room(now):
                    return self.refuse(count)
                state = self.algorithm.initial()
            return self.algorithm.evaluate(state, now, count)

    def refund(self, key: Any, permits: Any = 1) -> bool:
        count = check_permits(permits)
        key = plain_str(key)
        with self.lock:
            state = self.get(key)
            if state is not None:
                self.states[key] = self.algorithm.consume(state, self.now(), -count)
        return True

    def reset(self, key: Any) -> bool:
        key = plain_str(key)
        with self.lock:
            if self.get(key) is not None:
                self.states[key] = self.algorithm.initial()  # expired, so a sweep will drop it
            if self.slots is not None:
                self.slots.keys.pop(key, None)
        return True

    @property
    def books(self) -> bool:
        return True

    def book(self, asked: Any) -> Any:
        return self.slot_table().book(asked)

    def cancel_slot(self, key: Any, id: Any) -> bool:
        done: bool = self.slot_table().cancel(key, id)
        return done

    def slot_table(self) -> Any:
        """The `SlotTable` of this table."""
        made: Any = self.slots
        if made is None:
            from headgate.stores.memory_booking import SlotTable  # most limiters need none of it

            with self.lock:
                made = self.slots  # another thread may have come first
                if made is None:
                    made = self.slots = SlotTable(self)
        return made

    def store_health(self) -> StoreHealth:
        return StoreHealth("closed")  # memory is never down

    def with_timeout(self, seconds: float) -> KeyTable:
        return self

    def get(self, key: str) -> Any:
        """The state of *key*; None for a new key, which is checked first."""
        state = self.states.get(key)
        if state is None:
            check_key(key)
        return state

    def admit_new_key(self, key: Any, now: int, permits: int) -> Decision:
        """Decide for a key without a state: only a full store can deny it."""
        key = check_key(key)
        self.drop_expired(now, _SWEEP_FOR_NEW)
        if self.is_full() and not self.make_room():
            refusal = self.refuse(permits)
            self.counts.add_locked(refusal, permits)
            return refusal
        state: Any = self.algorithm.consume(self.algorithm.initial(), now, permits)
        if not self.add(key, state):
            return self.try_acquire(key, permits)  # another call came first while the lines above ran
        decision = self.algorithm.evaluate(self.algorithm.initial(), now, permits)
        self.counts.add_locked(decision, permits)
        return decision

    def add(self, key: str, state: Any) -> bool:
        """Save the first state of *key*. False: it has one already."""
        self.key_count.keys += 1
        self.order.append(key)  # before the state: a sweep drops a key without a state, but not a state without its key
        return self.states.setdefault(key, state) is state

    def is_full(self, new: int = 1) -> bool:
        """Whether the store has no room for *new* keys."""
        if self.key_count.keys + new <= self.key_count.max_keys:
            return False
        self.key_count.keys = len(self.store)
        return self.key_count.keys + new > self.key_count.max_keys

    def sweep(self, now: int) -> None:
        """Drop expired states, as is done from time to time."""
        self.sweep_at = now + _SWEEP_EVERY
        self.drop_expired(now, _SWEEP_KEYS)

    def drop_expired(self, now: int, keys: int) -> None:
        """Drop the expired ones of the next few states."""
        if self.key_count.dropping:
            return
        self.key_count.dropping = True
        try:
            for _ in range(min(keys, len(self.order))):
                if self.cursor >= len(self.order):
                    self.cursor = 0
                state = self.states.get(self.order[self.cursor])
                if state is None or self.algorithm.is_expired(state, now):
                    self.drop(self.cursor)
                else:
                    self.cursor += 1
        finally:
            self.key_count.dropping = False

    def drop(self, position: int) -> None:
        key = self.order[position]
        last = self.order.pop()
        if position < len(self.order):
            self.order[position] = last
        if self.states.pop(key, None) is not None:
            self.key_count.keys -= 1

    def make_room(self, keep: Any = ()) -> bool:
        """Drop the state of the largest table that has spent least among a few, but none at its limit or in *keep*."""
        if self.key_count.dropping:
            return False
        self.key_count.dropping = True
        try:
            table = self.largest()
            best = table.least_spent(keep)
            if best >= 0:
                table.drop(best)
            return best >= 0
        finally:
            self.key_count.dropping = False

    def has_room(self, now: int) -> bool:
        """Whether `try_acquire` would find room for a new key. Drops what it would sweep, and changes nothing else."""
        if not self.is_full():
            return True
        cursor, sweep_at = self.cursor, self.sweep_at
        if now >= sweep_at:
            self.sweep(now)
        self.drop_expired(now, _SWEEP_FOR_NEW)
        table = self.largest()
        found, before = not self.is_full(), table.cursor
        if not found:
            found = table.least_spent() >= 0
            table.cursor = before
        self.cursor, self.sweep_at = cursor, sweep_at  # the next call starts at the same states
        return found

    def largest(self) -> KeyTable:
        table = self
        for other in self.store.tables.values():
            if len(other.order) > len(table.order):
                table = other
        return table

    def least_spent(self, keep: Any = ()) -> int:
        """The position of the state that has spent least among the next few; -1 if all are at their limit or kept."""
        best, most = -1, 0
        now = self.now()  # by its own clock: that of a bucket has another epoch than that of a window
        for _ in range(min(_CANDIDATES, len(self.order))):
            self.cursor = (self.cursor + 1) % len(self.order)
            state = self.states.get(self.order[self.cursor])
            remaining = self.algorithm.limit if state is None else self.algorithm.remaining(state, now)
            if remaining > most and self.order[self.cursor] not in keep:
                best, most = self.cursor, remaining
        return best

    def refuse(self, permits: int) -> Decision:
        """The answer to a new key when there is no room: it may try again when the first state expires."""
        if not self.full_logged:
            self.full_logged = True
            logger.warning(
                "the memory store is full of %d keys at their limit: new keys are denied; raise max_keys",
                self.key_count.max_keys,
            )
        waits = [
            table.algorithm.evaluate(table.states[key], table.now(), 0).reset_us
            for table in self.store.tables.values()
            for key in table.order[:_CANDIDATES]
            if key in table.states
        ]
        wait = multiply(max(min(waits, default=1), 1), self.algorithm.rate)
        units = self.algorithm
        return decision_in(units, not permits, multiply(units.limit, units.cost), wait, wait if permits else 0)


class IntegerTable(KeyTable):
    """`KeyTable` for states that are whole numbers: compiled code needs no lock to replace one by another."""

    def __init__(self, store: MemoryStore, algorithm: IntegerState) -> None:
        super().__init__(store, algorithm)
        self.law = algorithm

    def make_room(self, keep: Any = ()) -> bool:
        if LOCKED:  # the caller holds it
            return super().make_room(keep)
        with self.lock:  # the other tables of the store rely on it
            return super().make_room(keep)

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        count = 1 if permits is ONE else check_permits(permits, self.law.limit)
        if type(key) is not str:
            key = check_key(key)
        try:
            if LOCKED:
                self.lock.acquire()
            read_clock = self.read_clock
            now = read_clock() // 1000 + self.epoch
            if now >= self.sweep_at:
                self.sweep(now)
            state = self.states.get(key)
            if state is None:
                return self.admit_new_key(key, now, count)
            allowed, used, reset, retry, after = self.law.take(state, now, count)
            if allowed:
                self.states[key] = after  # saved before the decision is made, which may start a garbage collection
                self.counts.allowed += 1
                if permits is not ONE:
                    self.counts.more_allowed += count - 1
            else:
                self.counts.denied += 1
                if permits is not ONE:
                    self.counts.more_denied += count - 1
            decision = LimiterDecision()  # what `decision_in` does: a call of it is 5 % of a decision
            decision._allowed = allowed
            decision._degraded = False
            decision._units = self.law
            decision._used = used
            decision._reset = reset
            decision._retry = retry
            return decision
        finally:
            if LOCKED:
                try:
                    self.lock.release()
                except RuntimeError:
                    pass  # a signal interrupted the call before it held the lock


class BucketTable(IntegerTable):
    """`IntegerTable` for the law of `Bucket`, with `Bucket.take` for one permit written out in `try_acquire`.

    That takes a third off the time of a decision in plain Python (``make bench``), and a tenth off it in compiled code.
    The tests hold it to the answers of `KeyTable`.
    """

    def __init__(self, store: MemoryStore, algorithm: Bucket) -> None:
        super().__init__(store, algorithm)
        self.epoch = 0  # only differences of times matter to a bucket
        self.rate = algorithm.rate
        self.in_time = algorithm.rate == 1  # a unit is a microsecond
        self.cost = algorithm.cost
        self.max_debt = algorithm.room - self.cost  # a call for one permit passes with this debt, and not with more

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        if permits is not ONE:  # counted in two places: an `if` for it here would be 1 % of a decision
            return super().try_acquire(key, permits)
        cost = self.cost
        try:
            if LOCKED:
                self.lock.acquire()
            elif type(key) is not str:
                key = check_key(key)
            read_clock = self.read_clock
            now = read_clock() // 1000
            if now >= self.sweep_at:
                self.sweep(now)
            states = self.states
            if not COMPILED:
                paid_at: int = states[key]  # 4 % of a decision quicker than `get`, which is quicker for a new key
            elif (state := states.get(key)) is None:
                return self.admit_new_key(key, now, 1)
            else:
                paid_at = state
            start = now if self.in_time else multiply(now, self.rate)
            debt = paid_at - start
            if debt < 0:
                debt = 0
                paid_at = start
            if debt > self.max_debt:
                self.counts.denied += 1
                decision = LimiterDecision()
                decision._allowed = decision._degraded = False
                decision._units = self.law
                decision._used = decision._reset = debt
                decision._retry = debt - self.max_debt
                return decision
            states[key] = paid_at + cost  # saved before the decision is made, which may start a garbage collection
            self.counts.allowed += 1
            decision = LimiterDecision()
            decision._allowed = True
            decision._degraded = False
            decision._units = self.law
            decision._used = decision._reset = debt + cost
            decision._retry = 0
            return decision
        except KeyError:
            return self.admit_new_key(key, self.now(), 1)
        except TypeError:
            check_key(key)  # an unhashable key: the error says what a key is
            raise
        finally:
            if LOCKED:
                try:
                    self.lock.release()
                except RuntimeError:
                    pass  # a signal interrupted the call before it held the lock


def make_table(store: MemoryStore, algorithm: Algorithm[Any]) -> KeyTable:
    """The fastest table for the states of *algorithm*."""
    if isinstance(algorithm, Bucket):
        return BucketTable(store, algorithm)
    return IntegerTable(store, algorithm) if isinstance(algorithm, IntegerState) else KeyTable(store, algorithm)


@mypyc_attr(allow_interpreted_subclasses=True)
class TryAcquire:
    """`Limiter.try_acquire`. It stands here to be compiled: as plain Python it would add a fifth to a decision.

    The arguments are Any because compiled code would convert a `str` and an `int` before they are checked; `Limiter`
    declares their types. Not Generic: mypyc frees the weak references to objects of such a class twice.
    """

    _table: KeyTable | None  # the backend, if it is in memory: compiled code calls it without looking the method up
    _call: Any  # else the backend's `try_acquire`

    def try_acquire(self, key: Any, permits: Any = 1, floor: Any = None) -> Decision:
        """Spend *permits* from *key*; nothing is spent when denied. One round trip."""
        if floor is not None:
            return self._take_above(key, permits, floor)
        table = self._table
        if table is not None:
            return table.try_acquire(key, permits)
        decision: Decision = self._call(key, permits)
        return decision

    def _take_above(self, key: Any, permits: Any, floor: Any) -> Decision:
        raise NotImplementedError


def _nanoseconds(clock: Clock) -> Callable[[], int]:
    latest = 0

    def read() -> int:
        nonlocal latest
        latest = max(latest, clock.now() * 1000)  # a state relies on time that never goes back
        return latest

    return read
