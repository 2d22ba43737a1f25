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
        decisions = [part.evaluate(kept, now, permits) for part, kept in zip(self.parts, state, strict=True)]
        binds = 0
        for i, decision in enumerate(decisions):
            if tighter(decision, decisions[binds]):
                binds = i
        worst = decisions[binds]
        if not worst.allowed:  # nothing is spent, also from quotas that would have allowed the call
            decisions = [part.evaluate(kept, now, 0) for part, kept in zip(self.parts, state, strict=True)]
        reset = max([decision.reset_us for decision in decisions])
        return decision_in(self.units[binds], worst.allowed, worst.limit - worst.remaining, reset, worst.retry_us)

    def consume(self, state: list[Any], now: int, permits: int) -> list[Any]:
        return [part.consume(kept, now, permits) for part, kept in zip(self.parts, state, strict=True)]

    def remaining(self, state: list[Any], now: int) -> int:
        return min([part.remaining(kept, now) for part, kept in zip(self.parts, state, strict=True)])

    def is_expired(self, state: list[Any], now: int) -> bool:
        return all([part.is_expired(kept, now) for part, kept in zip(self.parts, state, strict=True)])


def tighter(a: Decision, b: Decision) -> bool:
    """Whether *a* binds more than *b*."""
    if a.allowed != b.allowed:
        return b.allowed
    if a.allowed:
        return a.remaining < b.remaining
    return a.retry_us > b.retry_us
