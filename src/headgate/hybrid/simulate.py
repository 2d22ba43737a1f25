"""What will my 200 pods do with 10,000/second and 20 ms to Redis? A fleet in one process, on a clock of its own.

    python -m headgate.hybrid.simulate "10000/second" --nodes 200 --trip 20 --load 3 --svg fleet.svg

The nodes are the real ones (`headgate.hybrid.node`) and so is the ledger, in Python; only the network, the callers and
the clock are made up, from a seed: the same question has the same answer. Every admission is put before an exact
bucket in the end. `naive` is what one would try first, for comparison: a full bucket on every node, and now and then
a look at what the others have used.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headgate.algorithms.bucket import Bucket
from headgate.decision import Decision
from headgate.hybrid.lease import MILLISECOND, SECOND
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.node import Errand, Member, Node, Waiter
from headgate.hybrid.protocol import STYLES, Reply
from headgate.quota import Quota
from headgate.rule import Rule

TIMEOUT = SECOND // 4
BUCKETS = 200  # points of a time line
ZIPF = 1.2
MOVES = 10  # seconds after which a hot spot is somewhere else


@dataclass(frozen=True)
class Scenario:
    """A fleet and what is asked of it."""

    quota: str = "10000/second"
    nodes: int = 100
    load: float = 3.0  # calls, as a multiple of the rate
    seconds: float = 20.0
    trip: float = 1.0  # milliseconds to Redis and back, give or take a fifth
    skew: str = "uniform"  # or "moving": a few nodes have most of the calls, and every ten seconds it is others
    accuracy: str = "high"
    loss: float = 0.0  # part of all trips that are lost, half of them on the way back
    crashes: int = 0  # nodes that die half-way, each replaced by a new one
    outage: tuple[float, float] = (0.0, 0.0)  # seconds between which Redis does not answer
    policy: str = "local"
    seed: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 10_000:
            raise ValueError(f"nodes must be from 1 to 10,000, got {self.nodes}")
        if not (self.load > 0 and self.seconds > 0 and self.trip > 0 and 0 <= self.loss < 1):
            raise ValueError("load, seconds and trip must be above 0, and loss from 0 to below 1")
        if self.skew not in ("uniform", "moving"):
            raise ValueError(f"skew must be uniform or moving, got {self.skew!r:.40}")
        if self.accuracy not in STYLES:
            raise ValueError(f"accuracy must be one of {', '.join(STYLES)}, got {self.accuracy!r:.40}")


@dataclass
class Outcome:
    """What came of it. `timeline` has admissions, exact ones and calls so far, at even steps."""

    name: str
    scenario: Scenario
    asked: int = 0
    admitted: int = 0
    exact: int = 0  # what one exact bucket would have admitted of the same calls
    over: int = 0  # admissions that an exact bucket refuses
    waited: int = 0  # calls that waited for Redis
    trips: int = 0
    syncs: int = 0
    burned: int = 0
    timeline: list[tuple[float, int, int, int]] = field(default_factory=list)

    @property
    def over_percent(self) -> float:
        return 100 * self.over / max(self.exact, 1)

    @property
    def under_percent(self) -> float:
        return 100 * (self.exact - self.admitted) / max(self.exact, 1)

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


class Exact:
    """One exact bucket."""

    def __init__(self, quota: Quota) -> None:
        self.law = Bucket(quota)
        self.paid = 0
        self.admitted = self.refused = 0

    def ask(self, now: int) -> bool:
        """*now* in nanoseconds."""
        start = now // 1000 * self.law.rate
        debt = max(self.paid - start, 0) + self.law.cost
        if debt > self.law.room:
            self.refused += 1
            return False
        self.paid = start + debt
        self.admitted += 1
        return True


def calls(scenario: Scenario, dice: random.Random) -> Iterator[tuple[int, int]]:
    """(nanosecond, node) of every call, in order: evenly random in time, over nodes as the scenario says."""
    quota = Quota.parse(scenario.quota)
    gap = quota.period * SECOND / (quota.limit * scenario.load)
    order = list(range(scenario.nodes))
    weights = [1.0 if scenario.skew == "uniform" else (place + 1) ** -ZIPF for place in range(scenario.nodes)]
    sums = list(itertools.accumulate(weights))
    now, moves_at = float(SECOND), SECOND + MOVES * SECOND
    end = SECOND + scenario.seconds * SECOND
    while True:
        now += dice.expovariate(1.0) * gap
        if now >= end:
            return
        if now >= moves_at:
            dice.shuffle(order)
            moves_at += MOVES * SECOND
        yield int(now), order[bisect(sums, dice.random() * sums[-1])]


class Recorder:
    """Counts calls, and what an exact bucket says of them."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.outcome = Outcome(name, scenario)
        self.exact = Exact(Quota.parse(scenario.quota))
        self.admissions: list[int] = []
        self._step = int(scenario.seconds * SECOND / BUCKETS)
        self._next = SECOND

    def asked(self, now: int) -> None:
        while now >= self._next:
            at = (self._next - SECOND) / SECOND
            self.outcome.timeline.append((at, len(self.admissions), self.exact.admitted, self.outcome.asked))
            self._next += self._step
        self.outcome.asked += 1
        self.exact.ask(now)

    def finish(self) -> Outcome:
        outcome = self.outcome
        outcome.exact, outcome.admitted = self.exact.admitted, len(self.admissions)
        check = Exact(Quota.parse(outcome.scenario.quota))
        for now in sorted(self.admissions):
            check.ask(now)
        outcome.over = check.refused
        return outcome


class Process:
    """One node of the fleet, and its driver."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.node = Node(random.Random(f"{fleet.scenario.seed} {number}"))
        scenario = fleet.scenario
        style, clock = STYLES[scenario.accuracy], fleet.clock
        self.member = Member(self.node, fleet.rule, style, scenario.policy, str, clock, self._remote, 1000)
        self.member.id = f"node {number}"
        self.under_way = False
        self.wakes_at = 0
        self.dead = False

    def call(self) -> None:
        """One call, now."""
        if self.member.table.try_acquire("k"):
            self.fleet.recorder.admissions.append(self.fleet.now)

    def _remote(self, key: str, permits: int) -> Decision | None:
        """Wait. The answer is noted when it comes, as of when it was decided."""
        waiter = Waiter("take", permits, lambda: None)
        self.fleet.recorder.outcome.waited += 1
        waiter.wake = lambda: self._answered(waiter)
        if not self.node.wait(self.member, key, waiter, self.fleet.now) and not self.under_way:
            self.drive()
        return None

    def _answered(self, waiter: Waiter) -> None:
        if waiter.result:
            self.fleet.recorder.admissions.append(self.fleet.decided_at or self.fleet.now)

    def drive(self) -> None:
        """What a synchroniser does when it wakes up."""
        if self.under_way or self.dead:
            return
        errands = self.node.gather(self.fleet.now)
        if errands:
            self.under_way = True
            self.fleet.send(self, errands)
            return
        pause = self.node.pause(self.fleet.now)
        if pause is not None:
            at = self.fleet.now + max(int(pause * SECOND), 1)
            if not self.fleet.now < self.wakes_at <= at:
                self.wakes_at = at
                self.fleet.later(at, self.drive)

    def back(self, errands: list[Errand], replies: list[Reply] | None, decided_at: int) -> None:
        """A trip is over, one way or the other."""
        self.under_way = False
        if self.dead:
            return
        self.fleet.decided_at = decided_at
        if replies is None:
            self.node.fail(self.fleet.now, errands, TimeoutError("lost"))
        else:
            self.node.deliver(self.fleet.now, errands, replies)
        self.fleet.decided_at = 0
        self.drive()


class Fleet:
    """The clock, the network, Redis and all nodes."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rule = Rule(scenario.quota)
        self.now = SECOND
        self.decided_at = 0
        self.ledger = Ledger()
        self.recorder = Recorder(f"leases, {scenario.accuracy}", scenario)
        self.trips = self.syncs = self.burned = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._dice = random.Random(f"network {scenario.seed}")
        self._numbers = itertools.count()
        self.processes = [Process(self, next(self._numbers)) for _ in range(scenario.nodes)]

    def clock(self) -> int:
        return self.now

    def later(self, at: int, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at, next(self._order), what, arguments))

    def send(self, process: Process, errands: list[Errand]) -> None:
        half = int(self.scenario.trip * MILLISECOND * self._dice.uniform(0.4, 0.6))
        lost = self._dice.random() < self.scenario.loss
        if lost and self._dice.random() < 0.5:
            self.later(self.now + TIMEOUT, process.back, errands, None, 0)
        else:
            self.later(self.now + half, self._arrive, process, errands, self.now, lost)

    def _arrive(self, process: Process, errands: list[Errand], sent_at: int, lost: bool) -> None:
        start, end = self.scenario.outage
        seconds = (self.now - SECOND) / SECOND
        if start <= seconds < end:
            self.later(sent_at + TIMEOUT, process.back, errands, None, 0)
            return
        self.trips += 1
        self.syncs += len(errands)
        law, style = process.member.law, process.member.style
        before = self.ledger.out
        replies = [self.ledger.sync(self.now // 1000, law, style, errand.ask) for errand in errands]
        assert self.ledger.out <= law.limit, f"{self.ledger.out} were leased, {before} before"
        if lost:
            self.later(sent_at + TIMEOUT, process.back, errands, None, 0)
            return
        half = int(self.scenario.trip * MILLISECOND * self._dice.uniform(0.4, 0.6))
        self.later(self.now + half, process.back, errands, replies, self.now)

    def _crash(self) -> None:
        for place in self._dice.sample(range(len(self.processes)), min(self.scenario.crashes, len(self.processes))):
            dead = self.processes[place]
            dead.dead = True
            self.burned += sum(lease.balance // dead.member.law.cost for lease in dead.member.table.leases.values())
            self.processes[place] = Process(self, next(self._numbers))

    def run(self) -> Outcome:
        if self.scenario.crashes:
            self.later(SECOND + int(self.scenario.seconds * SECOND / 2), self._crash)
        for at, place in calls(self.scenario, random.Random(self.scenario.seed)):
            while self._events and self._events[0][0] <= at:
                self.now, _, what, arguments = heapq.heappop(self._events)
                what(*arguments)
            self.now = at
            self.recorder.asked(at)
            self.processes[place].call()
        outcome = self.recorder.finish()
        outcome.trips, outcome.syncs, outcome.burned = self.trips, self.syncs, self.burned
        return outcome


def simulate(scenario: Scenario) -> Outcome:
    """Run *scenario* with leases."""
    if not isinstance(Rule(scenario.quota).algorithm, Bucket):
        raise ValueError("the simulator has buckets only")
    return Fleet(scenario).run()


def naive(scenario: Scenario, interval: float, extrapolate: bool = False) -> Outcome:
    """The same with a full bucket on each node and a look at the others every *interval* seconds.

    A node admits what its own bucket has and what was left in all, when it last looked, minus its own use since;
    *extrapolate* adds what has refilled since. Reports are sent and answered without delay or loss, to be kind; a
    bucket that is asked for more than it has is empty, and owes nothing.
    """
    quota = Quota.parse(scenario.quota)
    how = ", extrapolated" if extrapolate else ""
    recorder = Recorder(f"naive, every {interval:g} s{how}", scenario)
    dice = random.Random(f"naive {scenario.seed}")
    rate = quota.limit / quota.period / SECOND
    capacity = float(quota.capacity)
    locals_ = [Exact(quota) for _ in range(scenario.nodes)]
    looks_at = [SECOND + int(dice.random() * interval * SECOND) for _ in range(scenario.nodes)]
    looked = [float(SECOND)] * scenario.nodes
    left = [capacity] * scenario.nodes
    used = [0] * scenario.nodes
    level, level_at = capacity, SECOND
    for now, place in calls(scenario, random.Random(scenario.seed)):
        recorder.asked(now)
        if now >= looks_at[place]:
            level = max(min(level + (now - level_at) * rate, capacity) - used[place], 0.0)
            level_at = now
            left[place], used[place], looked[place] = level, 0, float(now)
            looks_at[place] = now + int(interval * SECOND)
            recorder.outcome.trips += 1
        there = left[place]
        if extrapolate:
            there = min(there + (now - looked[place]) * rate, capacity)
        if used[place] < there and locals_[place].ask(now):
            used[place] += 1
            recorder.admissions.append(now)
    return recorder.finish()


def main(arguments: list[str] | None = None) -> None:
    """Answer the question of the command line with a table, and with a picture if asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m headgate.hybrid.simulate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("quota", nargs="?", default=Scenario.quota, help="such as '10000/second' or '100/s burst 500'")
    parser.add_argument("--nodes", type=int, default=Scenario.nodes, help="processes (default %(default)s)")
    parser.add_argument(
        "--load", type=float, default=Scenario.load, help="calls, in multiples of the rate (%(default)s)"
    )
    parser.add_argument(
        "--trip", type=float, default=Scenario.trip, help="milliseconds to Redis and back (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=Scenario.seconds, help="simulated time (%(default)s)")
    parser.add_argument("--skew", choices=("uniform", "moving"), default=Scenario.skew)
    parser.add_argument("--accuracy", choices=tuple(STYLES), default=Scenario.accuracy)
    parser.add_argument("--seed", type=int, default=Scenario.seed)
    parser.add_argument("--svg", metavar="FILE", help="draw what was admitted over time")
    chosen = vars(parser.parse_args(arguments))
    svg = chosen.pop("svg")
    scenario = Scenario(**chosen)
    outcomes = [simulate(scenario), naive(scenario, 1.0), naive(scenario, 1.0, extrapolate=True), naive(scenario, 30.0)]
    print(f"{scenario.nodes} nodes, {scenario.quota}, {scenario.load:g} times the rate, {scenario.trip:g} ms to Redis")
    for outcome in outcomes:
        print(outcome.row())
    if svg:
        from headgate.hybrid.plot import write

        write(svg, outcomes)
        print(f"wrote {svg}")


if __name__ == "__main__":
    main()
