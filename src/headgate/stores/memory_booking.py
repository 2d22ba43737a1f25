"""Bookings in memory: the slots of keys, beside the states of a table. `headgate.algorithms.booking` has the law."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from headgate.algorithms.all_of import AllOf
from headgate.algorithms.booking import BOOKED, DENIED, Booked, Booking, KeySlots
from headgate.algorithms.bucket import Bucket
from headgate.clock import EPOCH
from headgate.decision import Decision, decision
from headgate.stores.memory_joint import save

if TYPE_CHECKING:
    from headgate.stores.key_table import KeyTable


class SlotTable:
    """The slots of the keys of one table."""

    def __init__(self, table: KeyTable) -> None:
        algorithm: Any = table.algorithm
        self.table = table
        self.several = isinstance(algorithm, AllOf)
        self.parts: list[Bucket] = algorithm.parts if self.several else [algorithm]
        self.epoch = EPOCH if table.store.clock is None and not table.epoch else 0  # from the table's time to ours
        self.keys: dict[str, KeySlots] = {}
        self.ends: list[tuple[int, str, str]] = []  # a heap: when a slot is over, its key and id

    def book(self, asked: Booking) -> Booked:
        """Book a slot. A new key that finds the store full of keys at their limit is denied."""
        table = self.table
        with table.store.lock:
            while True:
                now = table.now()
                self._drop_expired(now)
                before, slots = table.states.get(asked.key), self.keys.get(asked.key) or KeySlots()
                if before is None and not slots.find(asked.id, now) and table.is_full() and not table.make_room():
                    refusal = table.refuse(asked.permits)
                    table.counts.add_locked(refusal, asked.permits)
                    return self._denied(now, now, refusal)
                made = slots.book(self.parts, self._states(before), now, asked, self._save(asked.key, before))
                if made is not None:
                    break
            outcome, at, permits = made
            if outcome == BOOKED:
                self.keys[asked.key] = slots
                heappush(self.ends, (at + asked.grace, asked.key, asked.id))
                table.counts.add_locked(decision(True, 0, 0), asked.permits)
            elif outcome == DENIED:
                table.counts.add_locked(decision(False, 0, 0), asked.permits)
            stands = table.algorithm.evaluate(table.states.get(asked.key, table.algorithm.initial()), now, 0)
        if outcome == DENIED:
            retry = at - now - asked.within
            refusal = decision(False, stands.limit, stands.remaining, stands.reset_us, retry)
            return self._denied(at, now, refusal)
        return Booked(outcome, at + self.epoch, now + self.epoch, permits, stands)

    def cancel(self, key: str, id: str) -> bool:
        """Give up a slot; whether its permits are given back."""
        table = self.table
        with table.store.lock:
            while True:
                slots, before = self.keys.get(key), table.states.get(key)
                if slots is None:
                    return False
                done = slots.cancel(self.parts, self._states(before), table.now(), id, self._save(key, before))
                if done is not None:
                    return done

    def _states(self, state: Any) -> list[int]:
        if state is None:
            return [part.initial() for part in self.parts]
        states: list[int] = state if self.several else [state]
        return states

    def _save(self, key: str, before: Any) -> Callable[[list[int]], bool]:
        """What puts the next states in the place of *before*, unless another call came first."""
        return partial(_save, self.table, key, before, self.several)

    def _denied(self, at: int, now: int, refusal: Decision) -> Booked:
        return Booked(DENIED, at + self.epoch, now + self.epoch, 0, refusal)

    def _drop_expired(self, now: int) -> None:
        while self.ends and self.ends[0][0] < now:
            _, key, id = heappop(self.ends)
            slots = self.keys.get(key)
            if slots is not None:
                slots.forget(id, now)
                if not slots.records and not slots.freed:
                    del self.keys[key]


def _save(table: KeyTable, key: str, before: Any, several: bool, after: list[int]) -> bool:
    done: bool = save([table], [key], [before], [after if several else after[0]])
    return done
