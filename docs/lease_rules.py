"""The tables of hybrid.md about what leases learn and about intervals, from the simulator: the same numbers each time.

python docs/lease_rules.py          prints both tables; takes some minutes

Each candidate is today's rule with one change. None of them was tuned on these traces and seeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import ceil, sqrt
from typing import Any

from headgate.hybrid import limiter_leases
from headgate.hybrid.lease import SECOND, Lease
from headgate.simulate import Outcome, Scenario, simulate
from headgate.simulate.scenario import MOVES
from headgate.simulate.traces import TRACES

SEEDS = (11, 12)
RECENT = 0.2  # weight of the latest report in what a candidate learns


class HoltLease(Lease):
    """Level and trend: ask for what demand will be in the middle of the next interval."""

    __slots__ = ("trend",)

    def count_demand(self, now: int, params: Any, waiting: Any) -> None:
        before, passed = self.demand, max(now - self.last_count_at, 1) / SECOND
        super().count_demand(now, params, waiting)
        trend = getattr(self, "trend", 0.0)
        trend += RECENT * ((self.demand - before) / passed - trend)
        self.trend = trend

    def _target(self, now: int, params: Any, profile: Any, trip: int) -> tuple[int, int]:
        level = self.demand
        ahead = getattr(self, "trend", 0.0) * (self.report_interval / SECOND / 2)
        self.demand = min(max(level + ahead, level / 2), 2 * level)
        target = super()._target(now, params, profile, trip)
        self.demand = level
        return target


class BurstLease(Lease):
    """Burstiness: a margin by the error of past forecasts, in place of the square root of demand."""

    __slots__ = ("error",)

    def count_demand(self, now: int, params: Any, waiting: Any) -> None:
        likely = self.demand * (now - self.last_count_at) / SECOND
        requested = (self.balance_at_last_count - self.balance + self.denied) // params.cost
        error = getattr(self, "error", 0.0)
        self.error = error + RECENT * (abs(requested - likely) - error)
        super().count_demand(now, params, waiting)

    def _target(self, now: int, params: Any, profile: Any, trip: int) -> tuple[int, int]:
        target, is_reserve = super()._target(now, params, profile, trip)
        if is_reserve or target == 0:
            return target, is_reserve
        return max(ceil(target - sqrt(target) + 2 * getattr(self, "error", 0.0)), 1), 0


class CalmLease(Lease):
    """Longer while calm: forecasts are trusted while their recent errors are small, until the first large one."""

    __slots__ = ("calm", "patience")

    NEEDED, MOST, FREE = 6, 3.0, 0.65

    def count_demand(self, now: int, params: Any, waiting: Any) -> None:
        likely = self.demand * (now - self.last_count_at) / SECOND
        requested = (self.balance_at_last_count - self.balance + self.denied) // params.cost
        requested += sum(many * permits for many, permits in waiting)
        calm, patience = getattr(self, "calm", 0), getattr(self, "patience", self.NEEDED)
        if abs(requested - likely) <= 3 * sqrt(likely + 1) + likely / 8:
            self.calm = calm + 1
            self.patience = patience
        else:  # each surprise doubles the number of calm reports that the next trust needs
            self.patience = min(2 * patience, 4096)
            self.calm = 0
        super().count_demand(now, params, waiting)

    def _plan_next(self, now: int, reply: Any, request: Any, params: Any, longest: int, trip: int) -> None:
        super()._plan_next(now, reply, request, params, longest, trip)
        trusted = getattr(self, "calm", 0) - getattr(self, "patience", self.NEEDED)
        if (
            trusted <= 0
            or reply.wait
            or reply.oversubscribed
            or request.is_reserve
            or reply.free < self.FREE * params.capacity_units
        ):
            return
        planned = max(self.report_at if self.idle_check_at else self.due, now)
        interval = min(int(reply.report_interval * 1000 * min(1 + trusted / 4, self.MOST)), longest)
        if planned == now + self.report_interval and interval > self.report_interval:
            self.report_interval = interval
            self.due = now + interval
            self._plan_idle_check(now, params)


CANDIDATES: dict[str, tuple[type[Lease], str | float]] = {
    "today's rule": (Lease, "high"),
    "Holt: level and trend": (HoltLease, "high"),
    "burstiness": (BurstLease, "high"),
    "longer while calm": (CalmLease, "high"),
    "inflow, 2 s": (Lease, 2.0),
}


def table(head: str, rows: Iterable[list[str]]) -> None:
    print(f"\n| {head} |")
    print("|---" * (head.count("|") + 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def learned() -> Iterable[list[str]]:
    """Trips a second and node, and percent under, of each candidate on each trace, as the average over seeds."""
    for load in (0.7, 1.3):
        for name, (lease, accuracy) in CANDIDATES.items():
            vars(limiter_leases)["Lease"] = lease  # the candidate in place of the product's class
            cells = []
            for trace in TRACES:
                trips = under = 0.0
                for seed in SEEDS:
                    scenario = Scenario("400/s", 8, load, 60, trace=trace, accuracy=accuracy, seed=seed)
                    outcome = simulate(scenario)
                    assert outcome.over == 0
                    trips += outcome.trips_per_second / scenario.nodes / len(SEEDS)
                    under += outcome.under_percent / len(SEEDS)
                cells.append(f"{trips:.2f}, {under:.2f} %")
            vars(limiter_leases)["Lease"] = Lease
            yield [f"{load:g}x", name, *cells]


def intervals() -> Iterable[list[str]]:
    """What an interval costs: trips, under-admission, and how long inflow takes to follow callers that move."""
    for accuracy in ("high", 0.5, 5.0, 30.0, 300.0):
        cells = []
        for trace, load in (("steady", 3.0), ("steady", 0.7), ("moving", 1.2)):
            seconds = 900.0 if accuracy == 300.0 and trace == "steady" else 120.0
            outcome = simulate(Scenario("200/s", 8, load, seconds, trace=trace, accuracy=accuracy, seed=21))
            assert outcome.over == 0
            cells += [f"{outcome.trips_per_second / 8:.3f}", f"{outcome.under_percent:.2f} %"]
        yield [f"`{accuracy}`" if accuracy == "high" else f"{accuracy:g} s", *cells, f"{lag(outcome):.1f} s"]


def lag(outcome: Outcome) -> float:
    """Seconds after each move, on average, with less than nine tenths of what an exact bucket admits."""
    times = [(seconds, admitted, exact) for seconds, admitted, exact, _ in outcome.timeline if seconds >= MOVES]
    behind = 0.0
    for (began, before, exact_before), (ended, after, exact_after) in pairwise(times):
        if after - before < 0.9 * (exact_after - exact_before):
            behind += ended - began
    return behind / (outcome.scenario.seconds // MOVES - 1)


def main() -> None:
    table("load | rule | " + " | ".join(TRACES), learned())
    table("accuracy | 3x: trips/s | under | 0.7x: trips/s | under | moving, 1.2x: trips/s | under | lag", intervals())


if __name__ == "__main__":
    main()
