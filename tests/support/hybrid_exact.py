"""Oracles: what an exact limiter would have said of the same admissions."""

from __future__ import annotations

from collections.abc import Iterable

from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import PARTS
from headgate.rule import Rule


def rejected(rule: Rule, admissions: Iterable[tuple[int, int]], start: int) -> int:
    """How many of *admissions*, (microsecond, permits), the algorithm itself refuses, full at *start*."""
    algorithm = rule.algorithm
    state, refused, latest = algorithm.initial(), 0, start
    for now, permits in sorted(admissions):
        latest = max(latest, now)
        if algorithm.evaluate(state, latest, permits).allowed:
            state = algorithm.consume(state, latest, permits)
        else:
            refused += permits
    return refused


def overdrawn(capacity: int, per_second: int, calls: Iterable[tuple[int, int]]) -> int:
    """How many of *calls*, (before, after) in nanoseconds, no exact bucket can have admitted within those times.

    A call was decided somewhere between its two readings of the clock, and a busy machine can put a lot of time there.
    Each is charged at its end, when there is most to have; and while it is open the bucket may hold one more, since
    what would have overflowed could have been that call's. So a call is counted only if there is no way to place all.
    """
    second = 1_000_000_000  # units a permit; a nanosecond brings *per_second* of them
    events = sorted(event for before, after in calls for event in ((before, 0), (after, 1)))
    if not events:
        return 0
    level, at, still_open, over = capacity * second, events[0][0], 0, 0
    for now, ends in events:
        level = min(level + (now - at) * per_second, (capacity + still_open) * second)
        at = now
        if not ends:
            still_open += 1
            continue
        still_open -= 1
        if level < second:
            over += 1
        else:
            level -= second
    return over


def check_ledger(ledger: Ledger) -> None:
    """The invariant: what is free and what is leased is never more than the capacity."""
    params = ledger.params
    if params is None:
        return
    leased = sum(record.leased_out for record in ledger.nodes.values())
    assert ledger.leased_out == leased, f"out is {ledger.leased_out}, the leases add up to {leased}"
    assert all(record.leased_out >= 0 for record in ledger.nodes.values())
    assert ledger.inflow == sum(record.inflow for record in ledger.nodes.values()) <= PARTS
    assert all(record.inflow >= 0 and record.room >= 0 for record in ledger.nodes.values())
    assert ledger.demand == sum(record.demand for record in ledger.nodes.values())
    if params.kind == "bucket":
        # leases of a larger quota can be more than all of this one: then nothing is free
        most = max(params.capacity_units - leased * params.cost, 0)
        assert ledger.free <= most, "free and leased are more than the capacity"
        assert ledger.free >= -params.capacity_units, "no debt is larger than the capacity"
    else:
        assert ledger.current >= leased, "permits are leased that were not counted as used"
