"""Exact models of the algorithms, from their definitions, in fractions.

A model says only whether a call is allowed at a given moment, how much is left then, and whether the key is as good as
never seen. It does not compute waits: whether a `retry_after` or a `reset_after` is true, and the shortest that is
true, follows from asking the model about that moment and about the microsecond before it.

Time is in microseconds. Nothing here is shared with the library.
"""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from math import floor
from typing import Protocol

from headgate import Quota


class Model(Protocol):
    def used(self, now: int) -> Fraction:
        """Permits that count against the capacity at *now*."""
        ...

    def spend(self, now: int, permits: int) -> None: ...

    def refund(self, now: int, permits: int) -> None: ...


class Bucket:
    """A level that drains at limit/period. Token bucket (its tokens are what is not used) and leaky bucket."""

    def __init__(self, quota: Quota) -> None:
        self.rate = Fraction(quota.limit) / Fraction(quota.period).limit_denominator(10**6) / 10**6
        self.level = Fraction(0)
        self.last = 0

    def used(self, now: int) -> Fraction:
        return max(Fraction(0), self.level - (now - self.last) * self.rate)

    def spend(self, now: int, permits: int) -> None:
        self.level, self.last = self.used(now) + permits, now

    def refund(self, now: int, permits: int) -> None:
        self.level, self.last = max(Fraction(0), self.used(now) - permits), now


class Gcra:
    """A theoretical arrival time: each permit moves it on by one emission interval, from now if it has passed."""

    def __init__(self, quota: Quota) -> None:
        self.interval = Fraction(quota.period).limit_denominator(10**6) * 10**6 / quota.limit
        self.arrival = Fraction(0)

    def used(self, now: int) -> Fraction:
        return max(Fraction(0), self.arrival - now) / self.interval

    def spend(self, now: int, permits: int) -> None:
        self.arrival = max(self.arrival, Fraction(now)) + permits * self.interval

    def refund(self, now: int, permits: int) -> None:
        self.arrival -= permits * self.interval


class FixedWindow:
    """A count for each aligned window."""

    def __init__(self, quota: Quota) -> None:
        self.period = int(Fraction(quota.period).limit_denominator(10**6) * 10**6)
        self.counts: Counter[int] = Counter()

    def used(self, now: int) -> Fraction:
        return Fraction(self.counts[now // self.period])

    def spend(self, now: int, permits: int) -> None:
        self.counts[now // self.period] += permits

    def refund(self, now: int, permits: int) -> None:
        window = now // self.period
        self.counts[window] = max(0, self.counts[window] - permits)


class FirstWindow:
    """A count, and the end of its window, which the first call that counted has started."""

    def __init__(self, quota: Quota) -> None:
        self.period = int(Fraction(quota.period).limit_denominator(10**6) * 10**6)
        self.count = self.end = 0

    def used(self, now: int) -> Fraction:
        return Fraction(self.count if now < self.end else 0)

    def spend(self, now: int, permits: int) -> None:
        if not self.used(now):
            self.count, self.end = 0, now + self.period
        self.count += permits

    def refund(self, now: int, permits: int) -> None:
        self.count = max(0, self.count - permits)


class SlidingWindow:
    """When each permit of the last period was spent; what was spent exactly a period ago is forgotten."""

    def __init__(self, quota: Quota) -> None:
        self.period = int(Fraction(quota.period).limit_denominator(10**6) * 10**6)
        self.log: list[tuple[int, int]] = []

    def used(self, now: int) -> Fraction:
        return Fraction(sum(permits for time, permits in self.log if now < time + self.period))

    def spend(self, now: int, permits: int) -> None:
        self.log = [entry for entry in self.log if now < entry[0] + self.period]
        self.log.append((now, permits))

    def refund(self, now: int, permits: int) -> None:
        while permits and self.log:  # the newest are given back
            time, spent = self.log.pop()
            if spent > permits:
                self.log.append((time, spent - permits))
            permits -= min(permits, spent)


class SlidingWindowCounter(FixedWindow):
    """The current window, and as much of the previous one as the last period still covers."""

    def used(self, now: int) -> Fraction:
        window, elapsed = divmod(now, self.period)
        fading = Fraction(self.counts[window - 1] * (self.period - elapsed), self.period)
        return self.counts[window] + fading


MODELS: dict[str, Callable[[Quota], Model]] = {
    "token_bucket": Bucket,
    "leaky_bucket": Bucket,
    "gcra": Gcra,
    "fixed_window": FixedWindow,
    "first_window": FirstWindow,
    "sliding_window": SlidingWindow,
    "sliding_window_counter": SlidingWindowCounter,
}


class Oracle:
    """One key under one quota or under several: all must allow, else nothing is spent."""

    def __init__(self, algorithm: str, *quotas: Quota) -> None:
        self.algorithm, self.quotas = algorithm, quotas
        self.reset()

    def reset(self) -> None:
        self.models: list[Model] = [MODELS[self.algorithm](quota) for quota in self.quotas]

    def refusing(self, now: int, permits: int) -> list[Quota]:
        """The quotas that do not allow so many permits."""
        pairs = zip(self.models, self.quotas, strict=True)
        return [quota for model, quota in pairs if model.used(now) + permits > quota.capacity]

    def remaining(self, now: int) -> dict[Quota, int]:
        """What each quota has left."""
        pairs = zip(self.models, self.quotas, strict=True)
        return {quota: floor(quota.capacity - model.used(now)) for model, quota in pairs}

    def fresh(self, now: int) -> bool:
        """Whether the key is as good as never seen: nothing counts, now or later."""
        return all(model.used(now) == 0 for model in self.models)

    def spend(self, now: int, permits: int) -> None:
        for model in self.models:
            model.spend(now, permits)

    def refund(self, now: int, permits: int) -> None:
        for model in self.models:
            model.refund(now, permits)
