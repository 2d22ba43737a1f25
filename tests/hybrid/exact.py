"""Oracles: what an exact limiter would have said of the same admissions."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from fractions import Fraction

from headgate.hybrid.ledger import Ledger
from headgate.rule import Rule


def rejected(rule: Rule, admissions: Iterable[tuple[int, int]], start: int) -> int:
    """How many of *admissions*, (microsecond, permits), the algorithm itself refuses, full at *start*."""
    algorithm = rule.algorithm
    state, refused, latest = algorithm.fresh(), 0, start
    for now, permits in sorted(admissions):
        latest = max(latest, now)
        if algorithm.look(state, latest, permits).allowed:
            state = algorithm.spend(state, latest, permits)
        else:
            refused += permits
    return refused


def overdrawn(capacity: int, per_second: float, calls: Iterable[tuple[int, int]]) -> int:
    """How many of *calls*, (before, after) in nanoseconds, no exact bucket can have admitted within those times.

    A call was decided somewhere between its two readings of the clock, and a busy machine can put a lot of time there.
    So each is spent as soon as it can be: that is best for the bucket, which never overflows for it. One that finds
    nothing before its own end was one too many.
    """
    rate = Fraction(per_second).limit_denominator(10**6) / 10**9  # a nanosecond
    ordered = sorted(calls)
    if not ordered:
        return 0
    tokens, at, over = Fraction(capacity), ordered[0][0], 0
    waiting: list[int] = []
    index = 0
    while index < len(ordered) or waiting:
        if waiting and tokens >= 1:
            heapq.heappop(waiting)
            tokens -= 1
            continue
        ready = at + -(-(1 - tokens) // rate) if waiting else None
        arrives = ordered[index][0] if index < len(ordered) else None
        if ready is not None and waiting[0] < ready and (arrives is None or waiting[0] < arrives):
            heapq.heappop(waiting)  # its time is over and there was nothing
            over += 1
            continue
        if ready is not None and (arrives is None or ready <= arrives):
            now = int(ready)
        else:
            assert arrives is not None
            now = arrives
            heapq.heappush(waiting, ordered[index][1])
            index += 1
        tokens = min(tokens + (now - at) * rate, Fraction(capacity))
        at = now
    return over


def check_ledger(ledger: Ledger) -> None:
    """The invariant: what is free and what is leased is never more than the capacity."""
    law = ledger.law
    if law is None:
        return
    leased = sum(record.out for record in ledger.nodes.values())
    assert ledger.out == leased, f"out is {ledger.out}, the leases add up to {leased}"
    assert all(record.out >= 0 for record in ledger.nodes.values())
    assert ledger.demand == sum(record.demand for record in ledger.nodes.values())
    if law.kind == "bucket":
        assert ledger.free + leased * law.cost <= law.room, "free and leased are more than the capacity"
    else:
        assert ledger.current >= leased, "permits are leased that were not counted as used"
