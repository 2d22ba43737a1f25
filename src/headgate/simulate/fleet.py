"""A simulated fleet: real lease managers and the real ledger, on a network, callers and a clock that a seed makes up.

The same scenario has the same outcome. Every admission is put before an exact bucket in the end. `naive` runs the same
scenario with the design that one would try first, for comparison.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headgate.algorithms.bucket import Bucket
from headgate.hybrid.lease import MILLISECOND, SECOND
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.limiter_leases import LeaseWaiter, LimiterLeases
from headgate.hybrid.manager import LeaseManager, SyncItem
from headgate.hybrid.protocol import LeaseReply, LeaseRequest, accuracy_profile
from headgate.quota import Quota
from headgate.rule import Rule
from headgate.simulate.scenario import ExactBucket, Outcome, Recorder, Scenario, calls

TIMEOUT = SECOND // 4


class Process:
    """One process of the fleet: its manager, its limiter, and a background task made of events."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        scenario = fleet.scenario
        self.fleet = fleet
        self.manager = LeaseManager(fleet.read_clock, random.Random(f"{scenario.seed} {number}"))
        profile = accuracy_profile(scenario.accuracy)
        self.limiter = LimiterLeases(self.manager, fleet.rule, profile, scenario.policy, max_keys=1000)
        self.limiter.node_id = f"node {number}"
        self.under_way = False
        self.wakes_at = 0
        self.dead = False

    def call(self) -> None:
        """One call, now. An answer that has to wait for Redis is recorded when it comes, as of when it was decided."""
        decision = self.limiter.try_acquire("k")
        if decision is not None:
            if decision:
                self.fleet.admit(self, self.fleet.now)
            return
        self.fleet.recorder.outcome.waited += 1
        waiter = LeaseWaiter("take", 1, lambda: None)
        waiter.wake = partial(self._record_answer, waiter)
        if not self.limiter.queue_waiter("k", waiter, self.fleet.now) and not self.under_way:
            self.run_background()

    def _record_answer(self, waiter: LeaseWaiter) -> None:
        if waiter.result:
            self.fleet.admit(self, self.fleet.decided_at or self.fleet.now)

    def run_background(self) -> None:
        """What the background task does when it wakes up."""
        if self.under_way or self.dead:
            return
        items = self.manager.gather(self.fleet.now)
        if items:
            self.under_way = True
            self.fleet.send(self, items)
            return
        seconds = self.manager.seconds_until_work(self.fleet.now)
        if seconds is not None:
            at = self.fleet.now + max(int(seconds * SECOND), 1)
            if not self.fleet.now < self.wakes_at <= at:
                self.wakes_at = at
                self.fleet.schedule(at, self.run_background)

    def end_trip(self, items: Sequence[SyncItem], replies: list[LeaseReply] | None, decided_at: int) -> None:
        """Take in the replies; None: they were lost."""
        self.under_way = False
        if self.dead:
            return
        self.fleet.decided_at = decided_at
        if replies is None:
            self.manager.fail(self.fleet.now, items, TimeoutError("lost"))
        else:
            self.manager.deliver(self.fleet.now, items, replies)
        self.fleet.decided_at = 0
        self.run_background()


class Fleet:
    """The clock, the network, Redis and all processes."""

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

    def read_clock(self) -> int:
        return self.now

    def admit(self, process: Process, at: int) -> None:
        self.recorder.admissions.append(at)

    def schedule(self, at: int, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at, next(self._order), event, arguments))

    def send(self, process: Process, items: Sequence[SyncItem]) -> None:
        half = int(self.scenario.trip * MILLISECOND * self._dice.uniform(0.4, 0.6))
        lost = self._dice.random() < self.scenario.loss
        if lost and self._dice.random() < 0.5:
            self.schedule(self.now + TIMEOUT, process.end_trip, items, None, 0)
        else:
            self.schedule(self.now + half, self._arrive, process, items, self.now, lost)

    def _arrive(self, process: Process, items: Sequence[SyncItem], sent_at: int, lost: bool) -> None:
        start, end = self.scenario.outage
        seconds = (self.now - SECOND) / SECOND
        if start <= seconds < end:
            self.schedule(sent_at + TIMEOUT, process.end_trip, items, None, 0)
            return
        self.trips += 1
        self.syncs += len(items)
        replies = self.decide(process, [item.request for item in items])
        if lost:
            self.schedule(sent_at + TIMEOUT, process.end_trip, items, None, 0)
            return
        half = int(self.scenario.trip * MILLISECOND * self._dice.uniform(0.4, 0.6))
        self.schedule(self.now + half, process.end_trip, items, replies, self.now)

    def decide(self, process: Process, requests: list[LeaseRequest]) -> list[LeaseReply]:
        """What Redis answers to *process*."""
        params, profile = process.limiter.params, process.limiter.profile
        before = self.ledger.leased_out
        replies = [self.ledger.sync(self.now // 1000, params, profile, request) for request in requests]
        assert self.ledger.leased_out <= params.limit, f"{self.ledger.leased_out} were leased, {before} before"
        return replies

    def _crash(self) -> None:
        for place in self._dice.sample(range(len(self.processes)), min(self.scenario.crashes, len(self.processes))):
            dead = self.processes[place]
            dead.dead = True
            self.burned += sum(lease.balance // dead.limiter.cost for lease in dead.limiter.leases.values())
            self.processes[place] = Process(self, next(self._numbers))

    def run(self) -> Outcome:
        if self.scenario.crashes:
            self.schedule(SECOND + int(self.scenario.seconds * SECOND / 2), self._crash)
        for at, place in calls(self.scenario, random.Random(self.scenario.seed)):
            while self._events and self._events[0][0] <= at:
                self.now, _, event, arguments = heapq.heappop(self._events)
                event(*arguments)
            self.now = at
            self.recorder.record_call(at)
            self.processes[place].call()
        outcome = self.recorder.finish()
        outcome.trips, outcome.syncs, outcome.burned = self.trips, self.syncs, self.burned
        exact = outcome.exact + self.recorder.exact.remaining(self.now)
        outcome.lost = exact - outcome.admitted - self._unspent()
        return outcome

    def _unspent(self) -> int:
        """Permits that are free, or on lease and not spent."""
        limiter = self.processes[0].limiter
        peek = LeaseRequest("peek", limiter.node_id, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0)
        free = self.ledger.sync(self.now // 1000, limiter.params, limiter.profile, peek).free
        leases = [lease for process in self.processes for lease in process.limiter.leases.values()]
        return (free + sum(lease.balance for lease in leases if self.now < lease.expires)) // limiter.cost


def simulate(scenario: Scenario) -> Outcome:
    """Run *scenario* with leases."""
    if not isinstance(Rule(scenario.quota).algorithm, Bucket):
        raise ValueError("the simulator has buckets only")
    if scenario.regions:
        from headgate.simulate.regions import RegionFleet  # it is a Fleet

        return RegionFleet(scenario).run()
    return Fleet(scenario).run()


def naive(scenario: Scenario, interval: float, extrapolate: bool = False) -> Outcome:
    """Run *scenario* with a full bucket in each process and a report to all others every *interval* seconds.

    A process admits what its own bucket has and what was left in all at its last report, minus its own use since;
    *extrapolate* adds what has refilled since. In its favour reports are sent and answered without delay or loss; a
    bucket that is asked for more than it has is empty, and owes nothing.
    """
    quota = Quota.parse(scenario.quota)
    how = ", extrapolated" if extrapolate else ""
    recorder = Recorder(f"naive, every {interval:g} s{how}", scenario)
    dice = random.Random(f"naive {scenario.seed}")
    rate = quota.limit / quota.period / SECOND
    capacity = float(quota.capacity)
    buckets = [ExactBucket(quota) for _ in range(scenario.nodes)]
    reports_at = [SECOND + int(dice.random() * interval * SECOND) for _ in range(scenario.nodes)]
    reported_at = [float(SECOND)] * scenario.nodes
    left = [capacity] * scenario.nodes
    used = [0] * scenario.nodes
    level, level_at = capacity, SECOND
    for now, place in calls(scenario, random.Random(scenario.seed)):
        recorder.record_call(now)
        if now >= reports_at[place]:
            level = max(min(level + (now - level_at) * rate, capacity) - used[place], 0.0)
            level_at = now
            left[place], used[place], reported_at[place] = level, 0, float(now)
            reports_at[place] = now + int(interval * SECOND)
            recorder.outcome.trips += 1
        available = left[place]
        if extrapolate:
            available = min(available + (now - reported_at[place]) * rate, capacity)
        if used[place] < available and buckets[place].try_acquire(now):
            used[place] += 1
            recorder.admissions.append(now)
    return recorder.finish()
