"""No fleet admits one too many, whatever the network does: by Hypothesis, and by many random walks."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from headgate.hybrid.protocol import PROFILES, accuracy_profile, quota_params
from headgate.rule import Rule
from tests.support.hybrid_fleet import QUOTAS, START, STEPS, Fleet, Process

RUNS = int(os.environ.get("HEADGATE_MACHINE_RUNS", "60"))  # of each machine; `make soak` asks for thousands
WALKS = int(os.environ.get("HEADGATE_MACHINE_WALKS", "800"))
SHRINK = os.environ.get("HEADGATE_MACHINE_SHRINK") != "0"

which = st.integers(-1, 9)
again = st.sampled_from([False, False, False, True])
demand = st.sampled_from([0, 1, 5, 30, 500])
waiting: st.SearchStrategy[list[tuple[int, int]]] = st.one_of(
    st.just([]), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=2)
)


class Machine(RuleBasedStateMachine):
    kind = "token_bucket"

    @initialize(
        quota=st.integers(0, 9),
        profile=st.sampled_from(sorted(PROFILES)),
        drifts=st.lists(st.integers(-5, 5), min_size=2, max_size=4),
    )
    def begin(self, quota: int, profile: str, drifts: list[int]) -> None:
        self.fleet = Fleet(self.kind, quota, profile, drifts)

    @rule(by=st.sampled_from(STEPS), share=st.integers(1, 10))
    def advance(self, by: int, share: int) -> None:
        self.fleet.advance(by * share // 10)

    @rule(which=which, permits=st.sampled_from([1, 1, 2, 3]), times=st.sampled_from([1, 20]))
    def spend(self, which: int, permits: int, times: int) -> None:
        self.fleet.spend(which, permits, times)

    @rule(which=which, demand=demand, waiting=waiting)
    def trip(self, which: int, demand: int, waiting: list[tuple[int, int]]) -> None:
        self.fleet.trip(which, demand, waiting)

    @rule(which=which, demand=demand, waiting=waiting, op=st.sampled_from(["sync", "sync", "sync", "release"]))
    def report(self, which: int, demand: int, waiting: list[tuple[int, int]], op: str) -> None:
        self.fleet.report(which, demand, waiting, op)

    @rule(which=which, again=again)
    def arrive(self, which: int, again: bool) -> None:
        self.fleet.arrive(which, again)

    @rule(which=which, again=again)
    def answer(self, which: int, again: bool) -> None:
        self.fleet.answer(which, again)

    @rule(which=which, demand=demand)
    def brink(self, which: int, demand: int) -> None:
        self.fleet.brink(which, demand)

    @rule(which=which, demand=demand)
    def echo(self, which: int, demand: int) -> None:
        self.fleet.echo(which, demand)

    @rule(which=which)
    def drop_request(self, which: int) -> None:
        self.fleet.drop_request(which)

    @rule(which=which)
    def drop_answer(self, which: int) -> None:
        self.fleet.drop_answer(which)

    @rule(which=which)
    def crash(self, which: int) -> None:
        self.fleet.crash(which)

    @rule(which=which)
    def forget(self, which: int) -> None:
        self.fleet.forget(which)

    @rule(by=st.sampled_from([2_000, 400_000, 40_000_000]))
    def step_back(self, by: int) -> None:
        self.fleet.step_back(by)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.finish()


@pytest.mark.bounded(1800)
@pytest.mark.parametrize("kind", QUOTAS)
def test_rules_of_the_protocol(kind: str) -> None:
    """No order of events, as Hypothesis finds them, admits one too many."""
    machine = type(f"Machine_{kind}", (Machine,), {"kind": kind})
    runs = RUNS if kind != "gcra" else RUNS // 4  # the same rules as the token bucket
    phases = tuple(Phase) if SHRINK else (Phase.generate,)
    chosen = settings(max_examples=runs, stateful_step_count=50, deadline=None, phases=phases)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.bounded(1800)
@pytest.mark.parametrize("kind", QUOTAS)
def test_random_walks(kind: str) -> None:
    """A hundred times as fast as the machine above, so that what is rare comes up too."""
    for seed in range(WALKS if kind != "gcra" else WALKS // 4):
        dice = random.Random(f"{kind} {seed}")
        fleet = Fleet(
            kind, seed, dice.choice(sorted(PROFILES)), [dice.randint(-5, 5) for _ in range(dice.randint(1, 4))]
        )
        try:
            walk(fleet, dice, 60)
            fleet.finish()
        except AssertionError as error:
            raise AssertionError(f"{kind}, seed {seed}") from error


@pytest.mark.bounded(1800)
def test_walks_with_inflow() -> None:
    """Leases that refill by themselves: full ones, ended ones, slow trips, lost replies, clocks that run fast."""
    grew = 0
    for seed in range(WALKS):
        dice = random.Random(f"inflow {seed}")
        fleet = Fleet("token_bucket", 0, "low", [dice.randint(-5, 5) for _ in range(dice.randint(2, 4))])
        fleet.rule = Rule(
            dice.choice(["50/second burst 40", "9/second burst 60", "400/second burst 100", "2/second burst 30"])
        )
        fleet.params = quota_params(fleet.rule)
        fleet.profile = accuracy_profile(dice.choice([1.0, 5.0, 300.0]))
        try:
            for _ in range(15):
                walk_with_inflow(fleet, dice)
                grew += any(process.lease.inflow is not None for process in fleet.processes)
            fleet.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert grew > 5 * WALKS, "most of the time a lease had inflow"


def walk_with_inflow(fleet: Fleet, dice: random.Random) -> None:
    """A few steps, in which two processes or more share the rate."""
    limit, wanted = fleet.params.limit, dice.choice([5, 30, 30, 500])
    which, other = dice.randint(0, 3), dice.randint(0, 3)
    waiting = [(limit, 1)] if dice.random() < 0.3 else []
    match dice.choice(["trips", "trips", "slow", "slow", "lost", "idle", "long", "brink", "crash", "walk"]):
        case "trips":
            for number, process in enumerate(fleet.processes):
                if dice.random() < 0.5:
                    process.lease.report_interval = fleet.profile.longest * 1000  # as after many reports
                fleet.trip(number, wanted, waiting)
        case "slow":  # there and back take time, and callers go on meanwhile
            fleet.report(which, wanted, waiting)
            for step in (fleet.arrive, fleet.answer):
                fleet.spend(which, 1, dice.choice([0, limit]))
                fleet.advance(dice.choice([1_000, 200_000, 2_000_000]))
                fleet.spend(other, 1, dice.choice([0, limit]))
                step(-1)
        case "lost":  # its inflow has changed there, perhaps, and others take the rest
            fleet.report(which, dice.choice([5, wanted]))
            if dice.random() < 0.7:
                fleet.arrive(-1)
            fleet.lose(which)
            fleet.trip(which + 1, 500, waiting)
            for _ in range(3):
                fleet.advance(dice.choice([1_000, 200_000, 1_000_000]))
                fleet.spend(which, 1, limit)
                fleet.spend(which + 1, 1, limit)
            fleet.trip(which + 1, 500, [(limit, 1)])
        case "long":  # until the leases end, everybody takes what comes in
            for _ in range(20):
                fleet.advance(dice.choice([500_000, 2_000_000, 10_000_000]))
                for number in range(len(fleet.processes)):
                    fleet.spend(number, 1, limit)
        case "idle":  # a lease that is full stays so for a while; then all of it goes at once, and all that comes in
            fleet.advance(dice.choice([200_000, 1_000_000, 5_000_000]))
            for _ in range(3):
                fleet.spend(which, 1, limit)
                fleet.advance(dice.choice([0, 10_000, 300_000]))
        case "brink":
            left = fleet.processes[which % len(fleet.processes)].lease.expires // 1000 - (fleet.true - START)
            if left > 0:
                fleet.advance(left + dice.choice([-10_000, 10_000, 1_000_000]))
            fleet.spend(which, 1, limit)
            fleet.trip(other, wanted, [(limit, 1)])
        case "crash":
            fleet.crash(which)
        case "walk":
            walk(fleet, dice, 3)
    fleet.advance(dice.choice([0, 1_000, 50_000, 400_000]))
    for number in range(len(fleet.processes)):
        if dice.random() < 0.5:
            fleet.spend(number, dice.choice([1, 1, 3]), dice.choice([1, limit]))


def test_lowered_quota() -> None:
    """Old leases are spent, and beside those no more than the new quota: whatever is more of the two, and the rate."""
    above = 0
    for seed in range(WALKS // 4):
        dice = random.Random(f"lowered {seed}")
        fleet = Fleet("token_bucket", 0, dice.choice(sorted(PROFILES)), [0, 0])
        fleet.rule = Rule("200/second")
        fleet.params = quota_params(fleet.rule)
        for _ in range(dice.randint(2, 6)):
            fleet.trip(dice.randint(0, 1), 500)
            fleet.advance(dice.choice([1_000, 20_000]))
        old, leased, start = fleet.processes, fleet.ledger.leased_out, fleet.true
        fleet.rule = Rule(dice.choice(["10/second burst 5", "3/minute", "7/second burst 20"]))
        fleet.params, params = quota_params(fleet.rule), fleet.params
        fleet.processes = [Process(f"new{i}", 0) for i in range(2)]
        fleet.requests, fleet.answers, fleet.admitted = [], [], []
        for _ in range(20):
            walk(fleet, dice, 3)
            for process in old:  # a process that has not heard of the new quota goes on with what it has
                while process.now(fleet.true) < process.lease.expires and process.lease.balance >= params.cost:
                    process.lease.balance -= params.cost
                    fleet.admitted.append((fleet.true, 1))
                    if dice.random() < 0.2:
                        break
        admitted = sum(permits for _, permits in fleet.admitted)
        came_in = (fleet.true - start) * fleet.params.rate // fleet.params.cost + 1
        assert admitted <= max(fleet.params.limit, leased) + came_in, f"seed {seed}"
        above += leased > fleet.params.limit
    assert above > WALKS // 10, "most had more out than the new quota has"


def walk(fleet: Fleet, dice: random.Random, steps: int) -> None:
    limit = fleet.params.limit

    def some_needs() -> list[tuple[int, int]]:
        return dice.choice([[], [], [(limit, 1)], [(dice.randint(1, 3), dice.randint(1, 4)), (1, 1)]])

    events = {
        "trip": 6,
        "spend": 5,
        "advance": 5,
        "report": 2,
        "arrive": 2,
        "answer": 2,
        "drop": 1,
        "brink": 0.3,
        "echo": 0.3,
        "release": 0.4,
        "forget": 0.3,
        "crash": 0.2,
        "step_back": 0.2,
    }
    for event in dice.choices(list(events), list(events.values()), k=steps):
        which = dice.choice([-1, -1, 0, 1, 2, 3])
        wanted = dice.choice([0, 1, 5, 30, 500])
        match event:
            case "trip":
                fleet.trip(which, wanted, some_needs())
            case "spend":
                fleet.spend(which, dice.choice([1, 1, 1, 2]), dice.choice([1, 3, limit]))
            case "advance":
                fleet.advance(int(dice.choice(STEPS) * dice.random()))
            case "report":
                fleet.report(which, wanted, some_needs())
            case "arrive":
                fleet.arrive(which, dice.random() < 0.2)
            case "answer":
                fleet.answer(which, dice.random() < 0.2)
            case "brink":
                fleet.brink(which, wanted)
            case "echo":
                fleet.echo(which, wanted)
            case "drop":
                dice.choice([fleet.drop_request, fleet.drop_answer])(which)
            case "release":
                dice.choice([fleet.trip, fleet.report])(which, 0, (), "release")
            case "forget":
                fleet.forget(which)
            case "crash":
                fleet.crash(which)
            case "step_back":
                fleet.step_back(dice.choice([2_000, 400_000, 40_000_000]))
