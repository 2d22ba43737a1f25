"""Limits kept in this process: a dict of states, bounded, thread-safe, without a background thread.

Calls sweep out a few expired states as they go. When the store is full of states that have not expired, a new key
replaces the one that has spent least among a few; a key at its limit is never replaced, so a flood of new keys cannot
free a key that is being limited. If all of those few are at their limit, the new key is denied until the first of them
expires.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final, NoReturn

from headgate._lifecycle import renew_after_fork
from headgate._mypyc import mypyc_attr, set_doc
from headgate.algorithms.algorithm import Algorithm, multiply
from headgate.algorithms.bucket import Bucket
from headgate.clock import EPOCH, SYSTEM_CLOCK, Clock
from headgate.decision import COMPILED, Decision, LimiterDecision, decision_in
from headgate.keys import check_key
from headgate.rule import Rule, check_permits, check_policy
from headgate.stores.base import NO_PICKLE, Health, StateBackend, StoreHealth

logger = logging.getLogger("headgate")

# Compiled, the steps from look-up to saved state run no Python code and allocate nothing that could start a garbage
# collection, so no other thread runs between them while there is an interpreter lock. Plain Python needs a lock.
LOCKED: Final = not COMPILED or not getattr(sys, "_is_gil_enabled", lambda: True)()

ONE: Final[object] = 1  # compared by identity: quicker, and True is another object

_SWEEP_EVERY: Final = 1000  # microseconds between two sweeps
_SWEEP_KEYS: Final = 8
_CANDIDATES: Final = 8  # how many states are compared to find one to replace


@mypyc_attr(native_class=False)
class MemoryStore:
    """States of any number of limiters, *max_keys* in all. Give one to several limiters to share the bound."""

    # Any: compiled code would turn True into 1, and a text into another error, before the check
    def __init__(self, *, max_keys: Any = 1_000_000, clock: Clock | None = None) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ValueError(f"max_keys must be a whole number of at least 1, got {max_keys!r}")
        self.max_keys = max_keys
        self.clock = clock
        self.shared_objects: dict[str, Any] = {}  # what coordination keeps with the store
        # Reentrant: an exception that a signal handler raises, at whatever line, never leaves it held; and a handler
        # may itself call the limiter.
        self.lock = threading.RLock()
        self.tables: dict[object, KeyTable] = {}
        # True while a call removes states: a signal handler or finalizer that interrupts it must not do so too.
        self.dropping = False
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Any) -> MemoryStore:
        """The store of ``memory://``; of *options* it takes max_keys."""
        if url != "memory://":
            raise ValueError(f"memory:// has nothing behind it, got {url!r:.40}; its bound is an argument, max_keys=")
        return cls(max_keys=options.get("max_keys", 1_000_000), clock=clock)

    def after_fork(self) -> None:
        """Start with a new lock: a thread that held the old one does not exist in the child."""
        self.lock = threading.RLock()
        for table in self.tables.values():
            table.lock = self.lock

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __len__(self) -> int:
        """How many keys are kept now, including expired ones that were not swept yet."""
        return sum([len(table.states) for table in self.tables.values()])

    def __repr__(self) -> str:
        return f"MemoryStore(max_keys={self.max_keys})"

    def open(self, rule: Rule, on_store_error: Any = "allow") -> KeyTable:
        """The states of one limiter; limiters of the same rule share them. *on_store_error* is never needed here."""
        check_policy(on_store_error)
        with self.lock:
            if rule.label not in self.tables:
                made = rule.algorithm
                self.tables[rule.label] = BucketTable(self, made) if isinstance(made, Bucket) else KeyTable(self, made)
            return self.tables[rule.label]

    def open_async(self, rule: Rule, on_store_error: Any = "allow") -> AsyncKeyTable:
        """The same for asyncio; the states are shared with those of `open`."""
        return AsyncKeyTable(self.open(rule, on_store_error))

    def states(self) -> StateBackend:
        """What keeps the states of locks, pools, queues and breakers in memory."""
        from headgate.coordination.backend import MemoryStates  # a limiter needs none of it

        return MemoryStates(self.clock or SYSTEM_CLOCK)

    def health(self) -> Health:
        """Always healthy: it needs nothing but this process."""
        return Health(True, role="memory")

    async def ahealth(self) -> Health:
        return self.health()

    def close(self) -> None:
        """Do nothing: there are no connections to close."""

    async def aclose(self) -> None:
        """Do nothing: there are no connections to close."""


set_doc(MemoryStore, "States of any number of limiters, max_keys in all. Give one to several to share the bound.")


def plain_str(key: Any) -> str:
    """*key* if it is exactly a str; else checked and converted: a subclass could hash and compare as it likes."""
    return key if type(key) is str else check_key(key)


class KeyTable:
    """The backend of one rule: its states, by key.

    Arguments are Any: they are checked here, and compiled code would turn True into 1 before that.
    """

    in_process: bool = True

    def __init__(self, store: MemoryStore, algorithm: Algorithm[Any]) -> None:
        self.store = store
        self.algorithm = algorithm
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.read_clock: Callable[[], int] = monotonic_ns if store.clock is None else _nanoseconds(store.clock)
        self.epoch = EPOCH if store.clock is None else 0
        self.lock: Any = store.lock
        self.states: dict[Any, Any] = {}
        self.order: list[str] = []  # every key once: sweeps go through it in small steps
        self.cursor = 0
        self.sweep_at = 0
        self.full_logged = False

    def now(self) -> int:
        return self.read_clock() // 1000 + self.epoch

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        count = 1 if permits is ONE else check_permits(permits, self.algorithm.limit)
        key = plain_str(key)
        with self.lock:
            now = self.now()
            if now >= self.sweep_at:
                self.sweep(now)
            state = self.states.get(key)
            if state is None:
                return self.admit_new_key(key, now, count)
            decision = self.algorithm.evaluate(state, now, count)
            if decision._allowed:
                self.states[key] = self.algorithm.consume(state, now, count)
            return decision

    def peek(self, key: Any, permits: Any = 1) -> Decision:
        count = check_permits(permits, self.algorithm.limit, 0)
        key = plain_str(key)
        with self.lock:
            now, state = self.now(), self.get(key)
            if state is None:
                if not self.has_room(now):
                    return self.refuse(now, count)
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
        return True

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
        self.sweep(now)
        if len(self.store) >= self.store.max_keys and not self.make_room(now):
            return self.refuse(now, permits)
        state: Any = self.algorithm.consume(self.algorithm.initial(), now, permits)
        self.order.append(key)  # before the state: a sweep drops a key without a state, but not a state without its key
        if self.states.setdefault(key, state) is not state:
            return self.try_acquire(key, permits)  # another call came first while the lines above ran
        return self.algorithm.evaluate(self.algorithm.initial(), now, permits)

    def sweep(self, now: int) -> None:
        """Drop the expired ones of the next few states."""
        self.sweep_at = now + _SWEEP_EVERY
        if self.store.dropping:
            return
        self.store.dropping = True
        try:
            for _ in range(min(_SWEEP_KEYS, len(self.order))):
                if self.cursor >= len(self.order):
                    self.cursor = 0
                state = self.states.get(self.order[self.cursor])
                if state is None or self.algorithm.is_expired(state, now):
                    self.drop(self.cursor)
                else:
                    self.cursor += 1
        finally:
            self.store.dropping = False

    def drop(self, position: int) -> None:
        key = self.order[position]
        last = self.order.pop()
        if position < len(self.order):
            self.order[position] = last
        self.states.pop(key, None)

    def make_room(self, now: int) -> bool:
        """Drop the state of the largest table that has spent least among a few, but none at its limit."""
        if self.store.dropping:
            return False
        self.store.dropping = True
        try:
            table = self.largest()
            best = table.least_spent(now)
            if best >= 0:
                table.drop(best)
            return best >= 0
        finally:
            self.store.dropping = False

    def has_room(self, now: int) -> bool:
        """Whether `try_acquire` would find room for a new key. Drops what it would sweep, and changes nothing else."""
        if len(self.store) < self.store.max_keys:
            return True
        cursor, sweep_at = self.cursor, self.sweep_at
        if now >= sweep_at:
            self.sweep(now)
        self.sweep(now)
        table = self.largest()
        found, before = len(self.store) < self.store.max_keys, table.cursor
        if not found:
            found = table.least_spent(now) >= 0
            table.cursor = before
        self.cursor, self.sweep_at = cursor, sweep_at  # the next call starts at the same states
        return found

    def largest(self) -> KeyTable:
        table = self
        for other in self.store.tables.values():
            if len(other.order) > len(table.order):
                table = other
        return table

    def least_spent(self, now: int) -> int:
        """The position of the state that has spent least among the next few; -1 if all are at their limit."""
        best, most = -1, 0
        for _ in range(min(_CANDIDATES, len(self.order))):
            self.cursor = (self.cursor + 1) % len(self.order)
            state = self.states.get(self.order[self.cursor])
            remaining = self.algorithm.limit if state is None else self.algorithm.remaining(state, now)
            if remaining > most:
                best, most = self.cursor, remaining
        return best

    def refuse(self, now: int, permits: int) -> Decision:
        """The answer to a new key when there is no room: it may try again when the first state expires."""
        if not self.full_logged:
            self.full_logged = True
            logger.warning(
                "the memory store is full of %d keys at their limit: new keys are denied; raise max_keys",
                self.store.max_keys,
            )
        waits = [
            table.algorithm.evaluate(table.states[key], now, 0).reset_us
            for table in self.store.tables.values()
            for key in table.order[:_CANDIDATES]
            if key in table.states
        ]
        wait = multiply(max(min(waits, default=1), 1), self.algorithm.rate)
        units = self.algorithm
        return decision_in(units, not permits, multiply(units.limit, units.cost), wait, wait if permits else 0)


class BucketTable(KeyTable):
    """`KeyTable` for the law of `Bucket`, with `Bucket.evaluate` and `Bucket.consume` written out in `try_acquire`.

    That halves the time of a decision in plain Python (``make bench``), and lets compiled code do without a lock. The
    tests hold it to the answers of `KeyTable`.
    """

    def __init__(self, store: MemoryStore, algorithm: Bucket) -> None:
        super().__init__(store, algorithm)
        self.units = algorithm
        self.epoch = 0  # only differences of times matter to a bucket
        self.rate = algorithm.rate
        self.cost = algorithm.cost
        self.room = algorithm.room
        self.paid_at: dict[Any, int] = self.states

    def make_room(self, now: int) -> bool:
        if LOCKED:  # the caller holds it
            return super().make_room(now)
        with self.lock:  # the other tables of the store rely on it
            return super().make_room(now)

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        cost = self.cost if permits is ONE else multiply(check_permits(permits, self.units.limit), self.cost)
        now = 0
        try:
            if LOCKED:
                self.lock.acquire()
            elif type(key) is not str:
                key = check_key(key)
            read_clock = self.read_clock
            now = read_clock() // 1000
            if now >= self.sweep_at:
                self.sweep(now)
            start = now if self.rate == 1 else multiply(now, self.rate)
            paid_at = self.paid_at
            debt = paid_at[key] - start
            if debt < 0:
                debt = 0
            after = debt + cost
            if after > self.room:
                denial = LimiterDecision()
                denial._allowed = denial._degraded = False
                denial._units = self.units
                denial._used = denial._reset = debt
                denial._retry = after - self.room
                return denial
            paid_at[key] = start + after  # saved before the decision is made, which may start a garbage collection
            decision = LimiterDecision()
            decision._allowed = True
            decision._degraded = False
            decision._units = self.units
            decision._used = decision._reset = after
            decision._retry = 0
            return decision
        except KeyError:
            return self.admit_new_key(key, now, cost // self.cost)
        except TypeError:
            check_key(key)  # an unhashable key: the error says what a key is
            raise
        finally:
            if LOCKED:
                try:
                    self.lock.release()
                except RuntimeError:
                    pass  # a signal interrupted the call before it held the lock


@mypyc_attr(allow_interpreted_subclasses=True)
class TryAcquire:
    """`Limiter.try_acquire`. It stands here to be compiled: as plain Python it would add a fifth to a decision.

    The arguments are Any because compiled code would convert a `str` and an `int` before they are checked; `Limiter`
    declares their types. Not Generic: mypyc frees the weak references to objects of such a class twice.
    """

    _table: KeyTable | None  # the backend, if it is in memory: compiled code calls it without looking the method up
    _call: Any  # else the backend's `try_acquire`

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        """Spend *permits* from *key*; nothing is spent when denied. One round trip."""
        table = self._table
        if table is not None:
            return table.try_acquire(key, permits)
        decision: Decision = self._call(key, permits)
        return decision


def _nanoseconds(clock: Clock) -> Callable[[], int]:
    latest = 0

    def read() -> int:
        nonlocal latest
        latest = max(latest, clock.now() * 1000)  # a state relies on time that never goes back
        return latest

    return read


class AsyncKeyTable:
    """A `KeyTable` with awaitable methods, which never wait."""

    in_process: bool = True

    def __init__(self, table: KeyTable) -> None:
        self.table = table
        self.clock = table.clock

    async def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        return self.table.try_acquire(key, permits)

    async def peek(self, key: Any, permits: Any = 1) -> Decision:
        return self.table.peek(key, permits)

    async def refund(self, key: Any, permits: Any = 1) -> bool:
        return self.table.refund(key, permits)

    async def reset(self, key: Any) -> bool:
        return self.table.reset(key)

    def store_health(self) -> StoreHealth:
        return self.table.store_health()

    def with_timeout(self, seconds: float) -> AsyncKeyTable:
        return self
