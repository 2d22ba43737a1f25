"""An exact model of bookings, in fractions, and the law that all starts must keep. Nothing here is of the library."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil

from headgate import Quota

Start = tuple[int, int]  # microseconds, and permits


def rate_of(quota: Quota) -> Fraction:
    """Permits a microsecond."""
    return Fraction(quota.limit, 1_000_000) / Fraction(quota.period).limit_denominator(10**6)


class Level:
    """The bucket of one quota: what was spent up to the last start and has not run out by then."""

    def __init__(self, quota: Quota) -> None:
        self.rate, self.capacity = rate_of(quota), quota.capacity
        self.level, self.last = Fraction(0), 0

    def at(self, now: int) -> Fraction:
        return max(self.level - (now - self.last) * self.rate, Fraction(0))

    def wait(self, now: int, permits: int) -> int:
        return max(ceil((self.at(now) + permits - self.capacity) / self.rate), 0)

    def start(self, at: int, permits: int) -> None:
        self.level, self.last = self.at(at) + permits, max(at, self.last)


class Model:
    """Several quotas: a booking starts at the first microsecond at which all have room, behind all earlier ones."""

    def __init__(self, quotas: list[Quota]) -> None:
        self.levels = [Level(quota) for quota in quotas]

    def book(self, now: int, permits: int, within: int) -> int | None:
        """The moment of the slot; None: it would be too late, and nothing is spent."""
        at = now + max(level.wait(now, permits) for level in self.levels)
        if at - now > within:
            return None
        for level in self.levels:
            level.start(at, permits)
        return at


def check_law(quota: Quota, starts: list[Start], grace: int = 0) -> None:
    """In any stretch t, at most capacity + rate * (t + grace) start: for all pairs of starts, by one pass."""
    rate = rate_of(quota)
    allowance = quota.capacity + rate * grace
    ordered = sorted(starts)
    level = Fraction(0)
    for (before, _), (at, permits) in pairwise([(0, 0), *ordered]):
        level = max(level - (at - before) * rate, Fraction(0)) + permits
        assert level <= allowance, f"{float(level)} at {at}, allowed are {float(allowance)}"
