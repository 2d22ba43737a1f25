"""Several quotas as one: all must allow, else nothing is spent from any."""

from __future__ import annotations

from typing import Any

from headgate.algorithms.algorithm import Algorithm
from headgate.decision import Decision, Units, decision_in


class AllOf(Algorithm[list[Any]]):
    """State: the list of the quotas' states."""

    __slots__ = ("parts", "units")

    def __init__(self, parts: list[Algorithm[Any]]) -> None:
        super().__init__(min(part.limit for part in parts), 1, 1)
        self.parts = parts
        self.units = [Units(part.limit, 1, 1) for part in parts]

    def initial(self) -> list[Any]:
        return [part.initial() for part in self.parts]

    def evaluate(self, state: list[Any], now: int, permits: int) -> Decision:
        """The decision of the quota with the longest wait or the fewest permits; it resets when all quotas have."""
        decisions = [self.parts[i].evaluate(state[i], now, permits) for i in range(len(self.parts))]
        return self.bind(state, now, decisions)

    def evaluate_above(self, state: list[Any], now: int, permits: int, share: int) -> Decision:
        decisions = [self.parts[i].evaluate_above(state[i], now, permits, share) for i in range(len(self.parts))]
        return self.bind(state, now, decisions)

    def bind(self, state: list[Any], now: int, decisions: list[Decision]) -> Decision:
        """One decision from those of the quotas."""
        size = len(self.parts)
        binds = 0
        for i in range(1, size):
            if tighter(decisions[i], decisions[binds]):
                binds = i
        worst = decisions[binds]
        if not worst.allowed:  # nothing is spent, also from quotas that would have allowed the call
            decisions = [self.parts[i].evaluate(state[i], now, 0) for i in range(size)]
        reset = max([decision.reset_us for decision in decisions])
        return decision_in(self.units[binds], worst.allowed, worst.limit - worst.remaining, reset, worst.retry_us)

    def consume(self, state: list[Any], now: int, permits: int) -> list[Any]:
        return [self.parts[i].consume(state[i], now, permits) for i in range(len(self.parts))]

    def remaining(self, state: list[Any], now: int) -> int:
        return min([self.parts[i].remaining(state[i], now) for i in range(len(self.parts))])

    def is_expired(self, state: list[Any], now: int) -> bool:
        return all([self.parts[i].is_expired(state[i], now) for i in range(len(self.parts))])


def tighter(a: Decision, b: Decision) -> bool:
    """Whether *a* binds more than *b*."""
    if a.allowed != b.allowed:
        return b.allowed
    if a.allowed:
        return a.remaining < b.remaining
    return a.retry_us > b.retry_us
