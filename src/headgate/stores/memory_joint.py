"""A joint check in memory: several tables of one store in one step.

The store's lock keeps other threads away, except from an `IntegerTable` whose single checks take none (where `LOCKED`
is false). So the new states of such tables are worked out first, and `save` puts all of them in place unless one has
changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.decision import Decision
from headgate.keys import check_key
from headgate.rule import check_permits
from headgate.stores.key_table import ONE, IntegerTable, KeyTable, plain_str

if TYPE_CHECKING:
    from headgate.stores.memory import MemoryStore


def take_all(store: MemoryStore, checks: Any) -> list[Decision]:
    """Spend all *checks* (a table or its async twin, a key, permits) or none; a decision for each, in order."""
    tables: list[KeyTable] = []
    keys: list[Any] = []
    counts: list[int] = []
    places: list[int] = []  # of each check in these lists: those of one table and key add up
    for backend, key, permits in checks:
        table: KeyTable = backend if isinstance(backend, KeyTable) else backend.backend
        count = 1 if permits is ONE else check_permits(permits, table.algorithm.limit)
        key = plain_str(key)
        place = _find(tables, keys, table, key)
        places.append(place)
        if place < len(tables):
            counts[place] = check_permits(counts[place] + count, table.algorithm.limit)
        else:
            tables.append(table)
            keys.append(key)
            counts.append(count)
    with store.lock:
        made = _decide(tables, keys, counts)
        spent = all([decision._allowed for decision in made])
        for i in range(len(tables)):
            if spent or not made[i]._allowed:  # a limiter that would have allowed it has decided nothing
                tables[i].counts.add_locked(made[i], counts[i])
    return made if len(made) == len(places) else [made[place] for place in places]


def _find(tables: list[KeyTable], keys: list[Any], table: KeyTable, key: Any) -> int:
    for place in range(len(tables)):
        if tables[place] is table and keys[place] == key:
            return place
    return len(tables)


def _decide(tables: list[KeyTable], keys: list[Any], counts: list[int]) -> list[Decision]:
    size = len(tables)
    while True:
        nows: list[int] = []
        before: list[Any] = []  # the states; None: a new key
        made: list[Decision] = []
        refusals = new = 0
        for i in range(size):
            table, key = tables[i], keys[i]
            now = table.now()
            state = table.states.get(key)
            if state is None or now >= table.sweep_at:
                check_key(key)
                table.sweep(now)
                state = table.states.get(key)
            nows.append(now)
            before.append(state)
            if state is None:
                new += 1
                state = table.algorithm.initial()
            decision = table.algorithm.evaluate(state, now, counts[i])
            refusals += not decision._allowed
            made.append(decision)
        if not refusals and new and not _make_room(tables[before.index(None)], keys, new):
            refusals = new
            for i in range(size):
                if before[i] is None:
                    made[i] = tables[i].refuse(counts[i])
        if refusals:
            for i in range(size):
                if made[i]._allowed:
                    state = tables[i].algorithm.initial() if before[i] is None else before[i]
                    made[i] = tables[i].algorithm.evaluate(state, nows[i], 0)  # as it is
            return made
        if _spend(tables, keys, counts, nows, before, made):
            return made


def _make_room(table: KeyTable, keys: list[Any], new: int) -> bool:
    """Whether there is room for *new* keys; states that have spent less are dropped for them, but none of *keys*."""
    while table.is_full(new):
        if not table.make_room(keys):
            return False
    return True


def _spend(
    tables: list[KeyTable],
    keys: list[Any],
    counts: list[int],
    nows: list[int],
    before: list[Any],
    made: list[Decision],
) -> bool:
    """Save the states after the call. False: another call came first."""
    after: list[Any] = []
    for i in range(len(tables)):
        table, state = tables[i], before[i]
        if isinstance(table, IntegerTable):
            after.append(table.law.take(0 if state is None else state, nows[i], counts[i])[4])
        elif state is None:
            after.append(table.algorithm.consume(table.algorithm.initial(), nows[i], counts[i]))
        else:
            after.append(None)  # to consume may change the state in place: below, when all is sure
    if not save(tables, keys, before, after):
        return False
    for i in range(len(tables)):
        if after[i] is None:
            consumed: Any = tables[i].algorithm.consume(before[i], nows[i], counts[i])
            tables[i].states[keys[i]] = consumed
    return True


def save(tables: list[KeyTable], keys: list[Any], before: list[Any], after: list[Any]) -> bool:
    """Put the new states in the place of the old ones, if none of those has changed.

    Like `IntegerTable.try_acquire`, this runs no Python code when compiled, and allocates nothing that could start a
    garbage collection: where those checks take no lock, no other thread comes between.
    """
    for i in range(len(tables)):
        if tables[i].states.get(keys[i]) is not before[i]:
            return False
    for i in range(len(tables)):
        if before[i] is None:
            tables[i].add(keys[i], after[i])
        elif after[i] is not None:
            tables[i].states[keys[i]] = after[i]
    return True
