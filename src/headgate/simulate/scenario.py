"""Scenarios of a simulated fleet and their outcomes: calls from a seed, which an exact bucket sees too."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headgate.algorithms.bucket import Bucket
from headgate.hybrid.lease import SECOND
from headgate.hybrid.protocol import accuracy_profile
from headgate.quota import Quota
from headgate.simulate.traces import TRACES, intensity

BUCKETS = 200  # points of a time line
ZIPF = 1.2
MOVES = 10  # seconds after which a hot spot is somewhere else


@dataclass(frozen=True)
class Scenario:
    """A fleet, its quota, its network and the calls that come."""

    quota: str = "10000/second"
    nodes: int = 100
    load: float = 3.0  # calls, as a multiple of the rate
    seconds: float = 20.0
    trip: float = 1.0  # milliseconds to Redis and back, give or take a fifth
    skew: str = "uniform"  # or "moving": a few nodes have most of the calls, other nodes every ten seconds
    trace: str = "steady"  # how calls come over time: one of `headgate.simulate.traces`
    accuracy: str | float = "high"
    loss: float = 0.0  # part of all trips that are lost, half of them on the way back
    crashes: int = 0  # nodes that die half-way, each replaced by a new one
    outage: tuple[float, float] = (0.0, 0.0)  # seconds between which Redis does not answer
    policy: str = "local"
    regions: int = 0  # each with a Redis of its own, `trip` away from its nodes; 0: one Redis for all
    home_trip: float = 150.0  # milliseconds from a region to home and back, give or take a fifth
    floor: float = 0.05  # of each region
    cuts: tuple[tuple[int, float, float], ...] = ()  # (region, from second, to second): it cannot reach home
    seed: int = 1
    # called now and then with the name of a design and the part of its time that has passed
    watch: Callable[[str, float], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 10_000:
            raise ValueError(f"nodes must be from 1 to 10,000, got {self.nodes}")
        if not 0 <= self.regions <= self.nodes:
            raise ValueError(f"regions must be from 0 to the number of nodes, {self.nodes}, got {self.regions}")
        for what in ("load", "seconds", "trip", "home_trip"):
            if not 0 < (given := getattr(self, what)) < math.inf:
                raise ValueError(f"{what} must be a number above 0, got {given}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss must be from 0 to below 1, got {self.loss}")
        if self.skew not in ("uniform", "moving"):
            raise ValueError(f"skew must be uniform or moving, got {self.skew!r:.40}")
        if self.trace not in TRACES:
            raise ValueError(f"trace must be one of {', '.join(TRACES)}, got {self.trace!r:.40}")
        accuracy_profile(self.accuracy)

    @property
    def calls(self) -> float:
        """The number of calls, on average."""
        quota = Quota.parse(self.quota)
        return quota.limit / quota.period * self.load * self.seconds


@dataclass
class Outcome:
    """What a design admitted. `timeline` has (second, admissions, exact admissions, calls so far) at even steps."""

    name: str
    scenario: Scenario
    asked: int = 0
    admitted: int = 0
    exact: int = 0  # what one exact bucket would have admitted of the same calls
    over: int = 0  # admissions that an exact bucket denies
    waited: int = 0  # calls that waited for Redis
    trips: int = 0
    syncs: int = 0
    burned: int = 0
    home_trips: int = 0  # from regions to home
    by_region: list[list[int]] = field(default_factory=list)  # the times of admissions, nanoseconds
    lost: int = 0  # permits that no call can get any more; those free or on lease in the end do not count
    timeline: list[tuple[float, int, int, int]] = field(default_factory=list)

    @property
    def over_percent(self) -> float:
        return 100 * self.over / max(self.exact, 1)

    @property
    def under_percent(self) -> float:
        return 100 * (self.exact - self.admitted) / max(self.exact, 1)

    @property
    def lost_percent(self) -> float:
        return 100 * self.lost / max(self.exact, 1)

    @property
    def local_percent(self) -> float:
        return 100 * (1 - self.waited / max(self.asked, 1))

    @property
    def trips_per_second(self) -> float:
        """Of all nodes together."""
        return self.trips / self.scenario.seconds

    def row(self) -> str:
        return (
            f"{self.name:<30} over {self.over_percent:7.2f} %   under {self.under_percent:7.2f} %   "
            f"local {self.local_percent:6.2f} %   {self.trips_per_second:8.1f} trips/s"
        )


class ExactBucket:
    """One exact bucket for all calls."""

    def __init__(self, quota: Quota) -> None:
        self.bucket = Bucket(quota)
        self.state = self.bucket.initial()
        self.admitted = self.denied = 0

    def try_acquire(self, now: int) -> bool:
        """Spend one permit at *now* (nanoseconds)."""
        if self.remaining(now) < 1:
            self.denied += 1
            return False
        self.state = self.bucket.consume(self.state, now // 1000, 1)
        self.admitted += 1
        return True

    def remaining(self, now: int) -> int:
        """Permits that it has at *now*."""
        return self.bucket.remaining(self.state, now // 1000)


def calls(scenario: Scenario, dice: random.Random) -> Iterator[tuple[int, int]]:
    """(nanosecond, node) of every call, in order: over time and nodes as the scenario says."""
    quota = Quota.parse(scenario.quota)
    gap = quota.period * SECOND / (quota.limit * scenario.load)
    order = list(range(scenario.nodes))
    moving = scenario.skew == "moving" or scenario.trace == "moving"
    weights = [(place + 1) ** -ZIPF if moving else 1.0 for place in range(scenario.nodes)]
    times_average = intensity(scenario.trace, scenario.seconds, random.Random(f"trace {scenario.seed}"))
    sums = list(itertools.accumulate(weights))
    now, moves_at = float(SECOND), SECOND + MOVES * SECOND
    end = SECOND + scenario.seconds * SECOND
    while True:
        now += dice.expovariate(1.0) * gap / times_average(now)
        if now >= end:
            return
        if now >= moves_at:
            dice.shuffle(order)
            moves_at += MOVES * SECOND
        yield int(now), order[bisect(sums, dice.random() * sums[-1])]


class Recorder:
    """Counts calls and admissions, beside those of an exact bucket."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.outcome = Outcome(name, scenario)
        self.exact = ExactBucket(Quota.parse(scenario.quota))
        self.admissions: list[int] = []
        self._step = max(int(scenario.seconds * SECOND / BUCKETS), 1)
        self._next = SECOND

    def record_call(self, now: int) -> None:
        while now >= self._next:
            at = (self._next - SECOND) / SECOND
            self.outcome.timeline.append((at, len(self.admissions), self.exact.admitted, self.outcome.asked))
            if self.outcome.scenario.watch:
                self.outcome.scenario.watch(self.outcome.name, at / self.outcome.scenario.seconds)
            self._next += self._step
        self.outcome.asked += 1
        self.exact.try_acquire(now)

    def finish(self) -> Outcome:
        outcome = self.outcome
        outcome.exact, outcome.admitted = self.exact.admitted, len(self.admissions)
        check = ExactBucket(Quota.parse(outcome.scenario.quota))
        for now in sorted(self.admissions):
            check.try_acquire(now)
        outcome.over = check.denied
        return outcome
