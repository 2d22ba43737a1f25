"""Limits kept in this process: a dict of states, bounded, thread-safe, without a background thread.

Each call that comes by sweeps a few states that have expired. When the store is full of states that have not, a
new key takes the place of the one that has spent least among a few that are looked at; a key that is at its limit
is never given up, so a flood of new keys cannot set anybody free. If all that are looked at are at their limit, the
new key is refused until the first of them expires.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final, NoReturn

from headgate._lifecycle import renew_after_fork
from headgate._mypyc import mypyc_attr
from headgate.algorithms.algorithm import Algorithm, multiply
from headgate.algorithms.bucket import Bucket
from headgate.clock import EPOCH, SYSTEM_CLOCK, Clock
from headgate.decision import COMPILED, Decision, LimiterDecision, decision_in
from headgate.keys import check_key
from headgate.rule import Rule, check_permits, check_policy
from headgate.stores.base import NO_PICKLE, Health, StateBackend, StoreHealth

logger = logging.getLogger("headgate")

# Compiled, the steps from look-up to saved state run no Python code and allocate nothing that could start a garbage
# collection, so nobody can come between them while there is an interpreter lock. Plain Python needs one of its own.
LOCKED: Final = not COMPILED or not getattr(sys, "_is_gil_enabled", lambda: True)()

ONE: Final[object] = 1  # by identity: quicker than to compare, and True is another object

_SWEEP_EVERY: Final = 1000  # microseconds between sweeps that a call makes on its way
_SWEEP_KEYS: Final = 8
_CANDIDATES: Final = 8  # states looked at to make room when full


@mypyc_attr(native_class=False)
class MemoryStore:
    """States of any number of limiters, *max_keys* in all. Give one to several limiters to share the bound."""

    # Any, because compiled code would turn True into 1, and a text into an error of its own, before the check
    def __init__(self, *, max_keys: Any = 1_000_000, clock: Clock | None = None) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ValueError(f"max_keys must be a whole number of at least 1, got {max_keys!r}")
        self.max_keys = max_keys
        self.clock = clock
        self.attachments: dict[str, Any] = {}  # what coordination keeps with the store
        # Owned by a thread: an exception out of a signal handler, wherever it comes, never leaves it held; and a
        # handler that asks the limiter itself gets an answer.
        self.lock = threading.RLock()
        self.tables: dict[object, Table] = {}
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Any) -> MemoryStore:
        """The store of ``memory://``; of *options* it takes max_keys."""
        if url != "memory://":
            raise ValueError(f"memory:// has nothing behind it, got {url!r:.40}; its bound is an argument, max_keys=")
        return cls(max_keys=options.get("max_keys", 1_000_000), clock=clock)

    def after_fork(self) -> None:
        """A thread that held the lock is not in the child: start with a new one."""
        self.lock = threading.RLock()
        for table in self.tables.values():
            table.renew(self.lock)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __len__(self) -> int:
        """How many keys are kept now, expired ones that were not swept yet included."""
        return sum([len(table.states) for table in self.tables.values()])

    def __repr__(self) -> str:
        return f"MemoryStore(max_keys={self.max_keys})"

    def open(self, rule: Rule, on_store_error: Any = "allow") -> Table:
        """The states of one limiter; limiters of the same rule share them. Memory has no errors to answer for."""
        check_policy(on_store_error)
        with self.lock:
            if rule.label not in self.tables:
                law = rule.algorithm
                self.tables[rule.label] = BucketTable(self, law) if isinstance(law, Bucket) else Table(self, law)
            return self.tables[rule.label]

    def open_async(self, rule: Rule, on_store_error: Any = "allow") -> AsyncTable:
        """The same for asyncio; shared with what `open` gives."""
        return AsyncTable(self.open(rule, on_store_error))

    def states(self) -> StateBackend:
        """What keeps the states of locks, pools, queues and breakers in memory."""
        from headgate.coordination.backend import MemoryStates  # a limiter needs none of it

        return MemoryStates(self.clock or SYSTEM_CLOCK)

    def health(self) -> Health:
        """As long as there is a process, it is well."""
        return Health(True, role="memory")

    async def ahealth(self) -> Health:
        return self.health()

    def close(self) -> None:
        """Nothing to let go of; here because every store has it."""

    async def aclose(self) -> None:
        """Nothing to let go of; here because every store has it."""


if COMPILED:  # the compiler keeps no docstrings of classes
    _SAYS = "States of any number of limiters, max_keys in all. Give one to several to share the bound."
    setattr(MemoryStore, "__doc__", _SAYS)  # noqa: B010


def exact(key: Any) -> str:
    """*key* as it is, or checked: a subclass of str could hash and compare as it likes."""
    return key if type(key) is str else check_key(key)


class Table:
    """One limiter's states, by key, and everything that can be asked of them.

    Arguments are Any: what callers give is checked here, and compiled code would turn True into 1 before that.
    """

    in_process: bool = True

    def __init__(self, store: MemoryStore, algorithm: Algorithm[Any]) -> None:
        self.store = store
        self.algorithm = algorithm
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.read_clock: Callable[[], int] = monotonic_ns if store.clock is None else _nanoseconds(store.clock)
        self.epoch = EPOCH if store.clock is None else 0
        self.renew(store.lock)
        self.states: dict[Any, Any] = {}
        self.order: list[str] = []  # every key once, to walk over in small steps
        self.cursor = 0
        self.sweep_at = 0
        self.full_logged = False

    def renew(self, lock: Any) -> None:
        self.lock = lock
        self.acquire_lock = lock.acquire
        self.release_lock = lock.release

    def now(self) -> int:
        return self.read_clock() // 1000 + self.epoch

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        count = 1 if permits is ONE else check_permits(permits, self.algorithm.limit)
        key = exact(key)
        with self.lock:
            now = self.read_clock() // 1000 + self.epoch
            if now >= self.sweep_at:
                self.sweep(now)
            state = self.known(key)
            if state is None:
                return self.first(key, now, count)
            decision = self.algorithm.evaluate(state, now, count)
            if decision.allowed:
                self.states[key] = self.algorithm.consume(state, now, count)
            return decision

    def peek(self, key: Any, permits: Any = 1) -> Decision:
        count = check_permits(permits, self.algorithm.limit, 0)
        key = exact(key)
        with self.lock:
            now = self.now()
            state = self.known(key)
            if state is None:
                check_key(key)
                if not self.has_room(now):
                    return self.refuse(now, count)
                state = self.algorithm.initial()
            return self.algorithm.evaluate(state, now, count)

    def refund(self, key: Any, permits: Any = 1) -> bool:
        count = check_permits(permits)
        key = exact(key)
        with self.lock:
            now = self.now()
            state = self.known(key)
            if state is None:
                check_key(key)
            else:
                self.states[key] = self.algorithm.consume(state, now, -count)
        return True

    def reset(self, key: Any) -> bool:
        key = exact(key)
        with self.lock:
            if self.known(key) is None:
                check_key(key)
            else:
                self.states[key] = self.algorithm.initial()  # idle now, so a sweep takes it out
        return True

    def store_health(self) -> StoreHealth:
        return StoreHealth("closed")  # nothing that could be down

    def with_timeout(self, seconds: float) -> Table:
        return self

    def known(self, key: str) -> Any:
        """The state of *key*; None for one never seen."""
        return self.states.get(key)

    def first(self, key: Any, now: int, permits: int) -> Decision:
        """Decide for a key never seen: nothing stands against it but a full store."""
        key = check_key(key)
        self.sweep(now)
        if len(self.store) >= self.store.max_keys and not self.make_room(now):
            return self.refuse(now, permits)
        fresh = self.algorithm.initial()
        if key in self.states:  # somebody else was first while the lines above ran
            return self.try_acquire(key, permits)
        self.states[key] = self.algorithm.consume(fresh, now, permits)
        self.order.append(key)
        return self.algorithm.evaluate(self.algorithm.initial(), now, permits)

    def sweep(self, now: int) -> None:
        """Drop those of the next few states that are as good as never seen."""
        self.sweep_at = now + _SWEEP_EVERY
        for _ in range(min(_SWEEP_KEYS, len(self.order))):
            if self.cursor >= len(self.order):
                self.cursor = 0
            if self.algorithm.is_expired(self.states[self.order[self.cursor]], now):
                self.drop(self.cursor)
            else:
                self.cursor += 1

    def drop(self, position: int) -> None:
        key = self.order[position]
        self.order[position] = self.order[-1]
        self.order.pop()
        del self.states[key]

    def make_room(self, now: int) -> bool:
        """Give up the state that has spent least of a few, never one at its limit. From the largest table."""
        table = self.largest()
        best = table.least_spent(now)
        if best >= 0:
            table.drop(best)
        return best >= 0

    def has_room(self, now: int) -> bool:
        """Whether `try_acquire` would find room for a newcomer: what it would sweep goes, all else stays as it is."""
        if len(self.store) < self.store.max_keys:
            return True
        cursor, sweep_at = self.cursor, self.sweep_at
        if now >= sweep_at:
            self.sweep(now)
        self.sweep(now)
        table = self.largest()
        found, place = len(self.store) < self.store.max_keys, table.cursor
        if not found:
            found = table.least_spent(now) >= 0
            table.cursor = place
        self.cursor, self.sweep_at = cursor, sweep_at  # the call that comes next looks at the same states
        return found

    def largest(self) -> Table:
        table = self
        for other in self.store.tables.values():
            if len(other.order) > len(table.order):
                table = other
        return table

    def least_spent(self, now: int) -> int:
        """The position of the state that has spent least of the next few; -1 if all are at their limit."""
        best, most = -1, 0
        for _ in range(min(_CANDIDATES, len(self.order))):
            self.cursor = (self.cursor + 1) % len(self.order)
            left = self.algorithm.remaining(self.states[self.order[self.cursor]], now)
            if left > most:
                best, most = self.cursor, left
        return best

    def refuse(self, now: int, permits: int) -> Decision:
        """The answer to a newcomer when there is no room: to come back when the first state expires."""
        if not self.full_logged:
            self.full_logged = True
            logger.warning(
                "the memory store is full of %d keys at their limit: new keys are refused; raise max_keys",
                self.store.max_keys,
            )
        waits = [
            table.algorithm.evaluate(table.states[key], now, 0).reset_us
            for table in self.store.tables.values()
            for key in table.order[:_CANDIDATES]
        ]
        wait = multiply(max(min(waits), 1), self.algorithm.rate)
        units = self.algorithm
        return decision_in(units, not permits, multiply(units.limit, units.cost), wait, wait if permits else 0)


class BucketTable(Table):
    """The default algorithm, asked for one key after another: `Table.try_acquire` with every call written out.

    Half the time of the other in plain Python; ``make bench`` shows it, and the tests hold both to the same answers.
    """

    def __init__(self, store: MemoryStore, algorithm: Bucket) -> None:
        super().__init__(store, algorithm)
        self.units = algorithm
        self.epoch = 0  # a bucket does not care when time began
        self.rate = algorithm.rate
        self.cost = algorithm.cost
        self.room = algorithm.room
        self.paid: dict[Any, int] = self.states

    def make_room(self, now: int) -> bool:
        if LOCKED:  # already held
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
            paid = self.paid
            debt = paid[key] - start
            if debt < 0:
                debt = 0
            after = debt + cost
            if after > self.room:
                denial = LimiterDecision()
                denial.allowed = False
                denial.degraded = False
                denial._units = self.units
                denial._used = debt
                denial._reset = debt
                denial._retry = after - self.room
                return denial
            paid[key] = start + after
            decision = LimiterDecision()
            decision.allowed = True
            decision.degraded = False
            decision._units = self.units
            decision._used = after
            decision._reset = after
            decision._retry = 0
            return decision
        except KeyError:
            return self.first(key, now, cost // self.cost)
        except TypeError:
            check_key(key)  # unhashable: says what a key is
            raise
        finally:
            if LOCKED:
                try:
                    self.lock.release()
                except RuntimeError:
                    pass  # interrupted before it was ours


def _nanoseconds(clock: Clock) -> Callable[[], int]:
    latest = 0

    def read() -> int:
        nonlocal latest
        latest = max(latest, clock.now() * 1000)  # states rely on it: time does not go back
        return latest

    return read


class AsyncTable:
    """A table behind awaitable methods. Nothing in it ever waits."""

    in_process: bool = True

    def __init__(self, table: Table) -> None:
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

    def with_timeout(self, seconds: float) -> AsyncTable:
        return self
