"""What will my 200 pods do with 10,000/second and 20 ms to Redis? A fleet in one process, on a clock of its own.

    python -m headgate.hybrid.simulate "10000/second" --nodes 200 --trip 20 --load 3 --svg fleet.svg

The nodes are the real ones (`headgate.hybrid.node`) and so is the ledger, in Python; only the network, the callers and
the clock are made up, from a seed: the same question has the same answer. Every admission is put before an exact
bucket in the end.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, NoReturn

from headgate.algorithms.bucket import Bucket
from headgate.decision import Decision
from headgate.hybrid.errand import Errand, Waiter
from headgate.hybrid.lease import MILLISECOND, SECOND
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.member import Member
from headgate.hybrid.naive import naive
from headgate.hybrid.node import Node
from headgate.hybrid.protocol import STYLES, Ask, Reply
from headgate.hybrid.scenario import Outcome, Recorder, Scenario, calls
from headgate.rule import Rule

TIMEOUT = SECOND // 4
MOST_CALLS = 100_000_000  # on the command line: hours


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
        if not self.member.wait(key, waiter, self.fleet.now) and not self.under_way:
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
        exact = outcome.exact + self.recorder.exact.left(self.now)
        outcome.lost = exact - outcome.admitted - self._left()
        return outcome

    def _left(self) -> int:
        """Permits that are free, or on lease and not spent."""
        member = self.processes[0].member
        look = Ask("peek", member.id, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0)
        free = self.ledger.sync(self.now // 1000, member.law, member.style, look).free
        leases = [lease for process in self.processes for lease in process.member.table.leases.values()]
        return (free + sum(lease.balance for lease in leases if self.now < lease.expires)) // member.law.cost


def simulate(scenario: Scenario) -> Outcome:
    """Run *scenario* with leases."""
    if not isinstance(Rule(scenario.quota).algorithm, Bucket):
        raise ValueError("the simulator has buckets only")
    return Fleet(scenario).run()


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class Progress:
    """Tells on the terminal how far it is, where that takes longer than a second."""

    def __init__(self) -> None:
        self.next = monotonic() + 1
        self.width = 0

    def __call__(self, name: str, part: float) -> None:
        if monotonic() >= self.next:
            self.next = monotonic() + 1
            self._say(f"{name}: {part:.0%}")

    def done(self) -> None:
        if self.width:
            self._say("")

    def _say(self, words: str) -> None:
        end = "\r" if sys.stderr.isatty() else "\n"
        if words or end == "\r":
            print(words.ljust(self.width), end=end, file=sys.stderr, flush=True)
        self.width = len(words)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r:.40}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r:.40}") from None


def main(arguments: list[str] | None = None) -> None:
    """Answer the question of the command line with a table, and with a picture if asked for."""
    parser = Parser(prog="python -m headgate.hybrid.simulate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("quota", nargs="?", default=Scenario.quota, help="such as '10000/second' or '100/s burst 500'")
    parser.add_argument("--nodes", type=_whole, default=Scenario.nodes, help="processes (default %(default)s)")
    parser.add_argument(
        "--load", type=_number, default=Scenario.load, help="calls, in multiples of the rate (%(default)s)"
    )
    parser.add_argument(
        "--trip", type=_number, default=Scenario.trip, help="milliseconds to Redis and back (%(default)s)"
    )
    parser.add_argument("--seconds", type=_number, default=Scenario.seconds, help="simulated time (%(default)s)")
    parser.add_argument("--skew", choices=("uniform", "moving"), default=Scenario.skew)
    parser.add_argument("--accuracy", choices=tuple(STYLES), default=Scenario.accuracy)
    parser.add_argument("--seed", type=_whole, default=Scenario.seed)
    parser.add_argument("--svg", metavar="FILE", help="draw what was admitted over time")
    chosen = vars(parser.parse_args(arguments))
    svg = chosen.pop("svg")
    progress = Progress()
    try:
        scenario = Scenario(**chosen, watch=progress)
    except ValueError as error:
        parser.error(f"argument --{error}")
    try:
        many = scenario.calls
    except ValueError as error:
        parser.error(f"argument quota: {error}")
    if many > MOST_CALLS:
        parser.error(f"argument --load: {many:,.0f} calls are too many, {MOST_CALLS:,} can be: lower it, or --seconds")
    try:
        if svg:
            with open(svg, "ab"):  # before the work, not after
                pass
    except OSError as error:
        parser.error(f"argument --svg: cannot write {svg!r}: {error.strerror}; name a file in a folder that is there")
    outcomes = [simulate(scenario), naive(scenario, 1.0), naive(scenario, 1.0, extrapolate=True), naive(scenario, 30.0)]
    progress.done()
    print(f"{scenario.nodes} nodes, {scenario.quota}, {scenario.load:g} times the rate, {scenario.trip:g} ms to Redis")
    for outcome in outcomes:
        print(outcome.row())
    print(f"Of what leases are short, {max(outcomes[0].lost, 0):,} are lost: the rest is free or on lease, spent next.")
    if svg:
        from headgate.hybrid.plot import write

        write(svg, outcomes)
        print(f"wrote {svg}")


__all__ = ["Outcome", "Scenario", "main", "naive", "simulate"]

if __name__ == "__main__":
    main()
