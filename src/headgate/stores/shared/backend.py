"""One rule on a shared file: find the state, decide by the algorithm, store the next state if nothing has changed.

No call holds a lock while it decides. A state is read, then the clock (so that it is never older than the state), then
`Algorithm.evaluate` and `consume` work out what comes next, and that is stored if the state is still the same; if not,
the call starts again. A call that starts again does so because another one was admitted.

A new key takes an unused slot of its set, or the slot of an expired key, or the one that has spent least; a key at its
limit keeps its slot, and if all of the set are at their limit, the new key is denied until the first of them expires.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

from headgate._mypyc import FREE_THREADED
from headgate.algorithms.algorithm import Algorithm, IntegerState, multiply
from headgate.algorithms.sliding_window import SlidingWindow
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision, decision_in
from headgate.errors import StoreUnavailable
from headgate.fallback import Fallback
from headgate.keys import check_key
from headgate.rule import Rule, check_permits
from headgate.stores.base import StoreHealth
from headgate.stores.key_table import plain_str
from headgate.stores.shared.columns import Damaged
from headgate.stores.shared.layout import SLOTS, TOMB
from headgate.stores.shared.states import SMALLEST, LogWords, StateWords, largest
from headgate.stores.shared.tables import SharedFile
from headgate.telemetry.counts import DecisionCounts

logger = logging.getLogger("headgate")

ONE: Final[object] = 1  # compared by identity: quicker, and True is another object
CHECK_EVERY: Final = 1_000_000  # microseconds between two looks at the path of the file
FULL: Final[object] = object()  # every slot that a new key could have belongs to a key at its limit
# Threads read `SharedRule.sane` while another one sets it. Compiled code keeps a larger number as an object, which
# could be freed between the two steps of reading it if there is no interpreter lock.
MOST_SANE: Final = (1 << 62) - 1 if FREE_THREADED else (1 << 64) - 1


class SharedRule:
    """The backend of one rule. Here its state is one word; `SharedStates` has those of several.

    Arguments are Any: they are checked here, and compiled code would turn True into 1 before that.
    """

    in_process: bool = True

    def __init__(self, file: SharedFile, rule: Rule, clock: Clock | None, on_store_error: Any) -> None:
        self.file = file
        self.rule = rule
        self.algorithm: Algorithm[Any] = rule.algorithm
        self.fallback = Fallback(on_store_error, rule, clock)
        self.follows = self.fallback.local is not None
        self.clock: Clock = clock or SYSTEM_CLOCK
        self.read_clock: Callable[[], int] = monotonic_ns if clock is None else file.clock_of(clock)
        self.given_clock = clock is not None
        self.check_at = 0
        self.sane = 0  # states up to this number make sense
        self.full_logged = False
        self.counts = DecisionCounts()
        self.watched: Any = None  # by telemetry, if a limiter uses this backend
        self.renew()

    def renew(self) -> None:
        """Use the methods of the table that is open now."""
        table: Any = self.file.table
        self.table: Any = table
        self.read: Any = table.find
        self.swap: Any = table.swap
        self.epoch = 0 if self.given_clock else self.file.epoch

    def now(self) -> int:
        return self.read_clock() // 1000 + self.epoch

    def check(self, now: int) -> None:
        """Once a second, and after a fork: open the file again if its path leads to another, or a fork came between."""
        self.check_at = now + CHECK_EVERY
        if self.file.check() or self.file.table is not self.table:
            self.renew()
            self.check_at = 0 if self.given_clock else self.now() + CHECK_EVERY

    # ------------------------------------------------------------------------------------ the calls of a `Backend`

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        count = 1 if permits is ONE else check_permits(permits, self.algorithm.limit)
        if type(key) is not str:
            key = check_key(key)
        try:
            if self.follows and self.fallback.debts:
                self.change(key, self.fallback.take_debt(key))
            try:
                decision = self.take(key, count)
            except ChildProcessError:
                self.check(self.now())
                decision = self.take(key, count)
        except (OSError, StoreUnavailable) as error:
            return self.answer_by_policy(check_key(key), count, error, 0)
        except UnicodeEncodeError:
            check_key(key)
            raise
        if self.fallback.refused_at:
            self.fallback.record_success()
        if self.follows:
            self.fallback.follow_store(key, decision)
        self.counts.add(decision, count)
        return decision

    def try_acquire_above(self, key: Any, permits: int, share: int) -> Decision:
        """`try_acquire` that leaves *share*, in millionths of the capacity; the numbers were checked."""
        key = check_key(key)
        try:
            if self.follows and self.fallback.debts:
                self.change(key, self.fallback.take_debt(key))
            try:
                decision = self.take(key, permits, share)
            except ChildProcessError:
                self.check(self.now())
                decision = self.take(key, permits, share)
        except (OSError, StoreUnavailable) as error:
            return self.answer_by_policy(key, permits, error, share)
        self.counts.add(decision, permits)
        return decision

    def answer_by_policy(self, key: str, permits: int, error: Exception, share: int) -> Decision:
        """Let on_store_error answer."""
        try:
            noted = self.file.note(error)
            decision = self.fallback.take(key, permits, noted, refused=True, unsure=False, share=share)
        except StoreUnavailable:
            self.counts.fail()
            raise
        self.counts.add(decision, permits)
        return decision

    def peek(self, key: Any, permits: Any = 1) -> Decision:
        count = check_permits(permits, self.algorithm.limit, 0)
        key = check_key(key)
        try:
            return self.evaluate(key, count)
        except (OSError, StoreUnavailable) as error:
            return self.fallback.peek(key, count, self.file.note(error), refused=True)

    def refund(self, key: Any, permits: Any = 1) -> bool:
        count = check_permits(permits)
        key = check_key(key)
        return self.change(key, -self.fallback.refund(key, count))

    def reset(self, key: Any) -> bool:
        key = check_key(key)
        self.fallback.reset(key)
        return self.change(key, 0, forget=True)

    def store_health(self) -> StoreHealth:
        return StoreHealth("closed", degraded=self.fallback.answers, last_error=self.file.last_error)

    def with_timeout(self, seconds: float) -> SharedRule:
        return self

    def change(self, key: str, permits: int, forget: bool = False) -> bool:
        """Spend *permits*, below 0 to give them back, or *forget* the key. Returns whether it could be done."""
        try:
            while permits or forget:
                try:
                    if self.try_change(key, permits):
                        break
                except ChildProcessError:
                    self.check(self.now())
        except (OSError, StoreUnavailable) as error:
            self.fallback.record_failure(self.file.note(error), refused=True)
            return False
        return True

    # ---------------------------------------------------------------------------------- read, decide, store if the same

    def fetch(self, key: str) -> tuple[Any, int]:
        """What is kept for *key*, None if nothing is; and the time, which is read after it."""
        while True:
            found: Any = self.read(key)
            read_clock = self.read_clock
            now = read_clock() // 1000 + self.epoch
            if now < self.check_at:
                return found, now
            self.check(now)

    def take(self, key: str, permits: int, share: int = 0) -> Decision:
        while True:
            found, now = self.fetch(key)
            if found is None:
                made = self.admit_new_key(key, now, permits)
                if made is not None:
                    return made
                continue
            try:
                state = self.decode(found, now)
                if share:
                    decision = self.algorithm.evaluate_above(state, now, permits, share)
                else:
                    decision = self.algorithm.evaluate(state, now, permits)
                if decision._allowed:
                    if self.commit(key, found, self.algorithm.consume(state, now, permits)):
                        return decision
                elif self.is_whole(key, found):
                    return decision
            except (Damaged, IndexError):
                self.repair(key, found, now)

    def evaluate(self, key: str, permits: int) -> Decision:
        while True:
            found, now = self.fetch(key)
            if found is None:
                if self.victim(key, now) is FULL:
                    return self.refuse(key, now, permits)
                return self.algorithm.evaluate(self.algorithm.initial(), now, permits)
            try:
                decision = self.algorithm.evaluate(self.decode(found, now), now, permits)
                if self.is_whole(key, found):
                    return decision
            except (Damaged, IndexError):
                self.repair(key, found, now)

    def try_change(self, key: str, permits: int) -> bool:
        """Spend *permits*, or forget the key if there are none; False if something has changed meanwhile."""
        found, now = self.fetch(key)
        if found is None:
            return True
        try:
            state = self.decode(found, now)
            after = self.algorithm.consume(state, now, permits) if permits else self.algorithm.initial()
            return self.commit(key, found, after)
        except (Damaged, IndexError):
            self.repair(key, found, now)
            return False

    def repair(self, key: str, found: Any, now: int) -> None:
        """Words that make no sense, and are still there: the key has spent everything just now, which is strictest."""
        if self.is_whole(key, found):
            self.commit(key, found, self.algorithm.consume(self.algorithm.initial(), now, self.algorithm.limit))

    # What differs for larger states: see `SharedStates`.

    def decode(self, found: Any, now: int) -> Any:
        """The state in what was read; raises `Damaged` if it cannot be one."""
        word: int = found
        if word > self.sane:
            most = largest(self.algorithm, now)
            self.sane = min(most, MOST_SANE)
            if word > most:
                raise Damaged
        return found

    def is_whole(self, key: str, found: Any) -> bool:
        """Whether all of what was read belongs together."""
        return True

    def commit(self, key: str, found: Any, state: Any) -> bool:
        """Store *state* if what was found is still there."""
        done: bool = self.swap(key, found, state)
        return done

    # ----------------------------------------------------------------------------------------------------- new keys

    def admit_new_key(self, key: str, now: int, permits: int) -> Decision | None:
        """Decide for a key without a state: only a full set can deny it. None: something has changed, ask again."""
        check_key(key)
        state = self.algorithm.consume(self.algorithm.initial(), now, permits)
        done: int = self.add(key, state)
        if done < 0:
            slot = self.victim(key, now)
            if slot is FULL:
                return self.refuse(key, now, permits)
            done = slot is not None and self.replace(key, slot, state)
        return self.algorithm.evaluate(self.algorithm.initial(), now, permits) if done else None

    def victim(self, key: str, now: int) -> Any:
        """What `replace` needs of the slot that a new key may take: a free or expired one, or the one that has spent
        least; `FULL` if all are at their limit. None: a slot is unused, or has become so."""
        best: Any = FULL
        most = 0
        for slot in range(SLOTS):
            found = self.look(key, slot, now)
            if found is None:
                return None
            seen, state = found
            if self.algorithm.is_expired(state, now):
                return seen
            remaining = self.algorithm.remaining(state, now)
            if remaining > most:
                best, most = seen, remaining
        return best

    def look(self, key: str, slot: int, now: int) -> Any:
        """((slot, what is kept there), state); None if the slot is free."""
        word = self.table.look(key, slot)
        return None if word is None else ((slot, word), word)

    def add(self, key: str, state: Any) -> int:
        done: int = self.table.add(key, state)
        return done

    def replace(self, key: str, seen: Any, state: Any) -> bool:
        done: bool = self.table.replace(key, seen[0], seen[1], state)
        return done

    def refuse(self, key: str, now: int, permits: int) -> Decision:
        """The answer to a new key whose set is full: it may try again when the first state of the set expires."""
        if not self.full_logged:
            self.full_logged = True
            logger.warning("%s is full of keys at their limit: new keys are denied; raise max_keys", self.file.path)
        waits = [
            self.algorithm.evaluate(found[1], now, 0).reset_us
            for found in [self.look(key, slot, now) for slot in range(SLOTS)]
            if found is not None
        ]
        units = self.algorithm
        wait = multiply(max(min(waits, default=1), 1), units.rate)
        return decision_in(units, not permits, multiply(units.limit, units.cost), wait, wait if permits else 0)

    def count(self) -> int:
        """How many keys have a state that has not expired."""
        now, kept = self.now(), 0
        for state in self.file.states(now):
            kept += not self.algorithm.is_expired(state, now)
        return kept


class SharedInteger(SharedRule):
    """`SharedRule` for states of one word, with one call of `IntegerState.take` for each attempt.

    That takes a seventh off the time of a decision in plain Python. The tests hold it to the answers of `SharedRule`.
    """

    def __init__(self, file: SharedFile, rule: Rule, clock: Clock | None, on_store_error: Any) -> None:
        super().__init__(file, rule, clock, on_store_error)
        law = rule.algorithm
        assert isinstance(law, IntegerState)
        self.law = law

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        count = 1 if permits is ONE else check_permits(permits, self.law.limit)
        key = plain_str(key)
        try:
            while True:
                found: Any = self.read(key)
                read_clock = self.read_clock
                now = read_clock() // 1000 + self.epoch
                if now >= self.check_at or found is None or self.follows:
                    return super().try_acquire(key, permits)
                state: int = found
                if state > self.sane:
                    return super().try_acquire(key, permits)  # which sees whether the state makes sense
                allowed, used, reset, retry, after = self.law.take(state, now, count)
                if not allowed or self.swap(key, found, after):
                    if FREE_THREADED or permits is not ONE:
                        decision = decision_in(self.law, allowed, used, reset, retry)
                        self.counts.add(decision, count)
                        return decision
                    if allowed:
                        self.counts.allowed += 1
                    else:
                        self.counts.denied += 1
                    return decision_in(self.law, allowed, used, reset, retry)
        except (OSError, UnicodeEncodeError):
            return super().try_acquire(key, permits)  # which answers by the policy, if it happens again


class SharedStates(SharedRule):
    """`SharedRule` for states of several words: several quotas, logs, integers that are too large for a word."""

    def __init__(self, file: SharedFile, rule: Rule, clock: Clock | None, on_store_error: Any) -> None:
        self.words: StateWords = file.state_words
        super().__init__(file, rule, clock, on_store_error)

    def renew(self) -> None:
        super().renew()
        self.read = self.table.read
        self.write: Any = self.table.write

    def decode(self, found: Any, now: int) -> Any:
        return self.words.decode(found, now)

    def is_whole(self, key: str, found: Any) -> bool:
        """Whether the cells that were read belong to the words that were read before them."""
        same: bool = not self.words.near or self.table.still(key, found[0] % SLOTS, found[1])
        return same

    def commit(self, key: str, found: Any, state: Any) -> bool:
        change = self.words.encode(state)
        done: bool = self.write(key, found[0] % SLOTS, found[1], change.words, change.cells)
        return done

    def look(self, key: str, slot: int, now: int) -> Any:
        found = self.table.read_at(key, slot)
        if found is None:
            return None
        try:
            return (slot, found[1]), self.words.decode(found, now)
        except (Damaged, IndexError):
            return (slot, found[1]), self.algorithm.consume(self.algorithm.initial(), now, self.algorithm.limit)

    def add(self, key: str, state: Any) -> int:
        if self.words.near:
            self.file.allocate(*self.words.near_cells(self.table.set_index(key)))
        change = self.words.encode(state)
        done: int = self.table.add_state(key, change.words, change.cells)
        return done

    def replace(self, key: str, seen: Any, state: Any) -> bool:
        change = self.words.encode(state)
        done: bool = self.table.replace_state(key, seen[0], seen[1], change.words, change.cells)
        return done


class SharedLog(SharedStates):
    """`SharedStates` for one log: a single permit needs only its two ends, which are read where they are.

    A log that has expired, has no room in its ring or makes no sense is left to `SharedStates`. That takes three
    quarters off the time of a decision. The tests hold it to the answers of `SharedStates`.
    """

    def __init__(self, file: SharedFile, rule: Rule, clock: Clock | None, on_store_error: Any) -> None:
        super().__init__(file, rule, clock, on_store_error)
        law = rule.algorithm
        assert isinstance(law, SlidingWindow)
        self.law = law
        self.log: LogWords = self.words.parts[0]

    def try_acquire(self, key: Any, permits: Any = 1) -> Decision:
        if permits is ONE and type(key) is str and not self.follows:
            try:
                decision = self.take_one(key)
                if decision is not None:
                    self.counts.add(decision, 1)
                    return decision
            except (OSError, UnicodeEncodeError, IndexError):
                pass  # it is answered below, by the policy if it happens again
        return super().try_acquire(key, permits)

    def take_one(self, key: str) -> Decision | None:
        """What `SlidingWindow.evaluate` and `consume` do for one permit; None if it is not as simple."""
        while True:
            found: Any = self.read(key)
            read_clock = self.read_clock
            now = read_clock() // 1000 + self.epoch
            if now >= self.check_at or found is None:
                return None
            place: int = found[0]
            version: int = found[1]
            ring: int = found[2]
            head: int = found[3]
            size: int = found[4]
            before: int = found[5]
            last: int = found[6]
            mask = ring - 1
            if (
                not 0 < size <= ring <= self.log.largest
                or ring < SMALLEST
                or ring & mask
                or head > mask
                or last >= TOMB
            ):
                return None
            cells: Any = self.log.words
            if ring == SMALLEST:
                at = self.words.first_near + place * self.words.near
            else:
                at = self.words.first_far + place * self.words.far + 2 * (ring - 2 * SMALLEST)
            oldest: int = cells[at + 2 * head]
            newest: int = cells[at + 2 * ((head + size - 1) & mask)]
            start = now - self.law.period
            first = 0
            if oldest <= start:
                if newest <= start:
                    return None
                first, end = 1, size - 1  # at least the newest one stays
                while first < end:
                    middle = (first + end) >> 1
                    time: int = cells[at + 2 * ((head + middle) & mask)]
                    if time <= start:
                        first = middle + 1
                    else:
                        end = middle
                before = cells[at + 2 * ((head + first - 1) & mask) + 1]
                oldest = cells[at + 2 * ((head + first) & mask)]
            used = last - before
            if newest > now or oldest <= start or not 0 < used <= self.law.limit:
                return None
            slot = place % SLOTS
            if used == self.law.limit:
                if not self.table.still(key, slot, version):
                    continue
                return decision_in(
                    self.law, False, used, newest + self.law.period - now, oldest + self.law.period - now
                )
            if size == ring:
                return None  # to be moved to another ring
            header = (ring, (head + first) & mask, size - first + 1, before, last + 1)
            entries = self.log.appended(ring, (head + size) & mask, newest, last, now, last + 1)
            if self.write(key, slot, version, header, entries):
                return decision_in(self.law, True, used + 1, self.law.period, 0)
