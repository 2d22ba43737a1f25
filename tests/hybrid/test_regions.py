"""No fleet in regions admits one too many, however it is cut apart: by Hypothesis, and by many random walks."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from headgate.hybrid.protocol import PROFILES
from tests.hybrid.test_fleet import SHRINK, Machine, again, which
from tests.support.hybrid_regions import STEPS, RegionFleet

RUNS = int(os.environ.get("HEADGATE_MACHINE_RUNS", "40"))  # `make soak` asks for thousands
WALKS = int(os.environ.get("HEADGATE_MACHINE_WALKS", "500"))


class RegionMachine(Machine):
    """The rules of `Machine`, and what happens between regions and home."""

    fleet: Any

    @initialize(
        quota=st.integers(0, 5),
        profile=st.sampled_from(sorted(PROFILES)),
        share=st.integers(0, 2),
        drifts=st.lists(st.integers(-5, 5), min_size=1, max_size=3),
        regions=st.integers(1, 3),
    )
    def begin(self, quota: int, profile: str, share: int, drifts: list[int], regions: int) -> None:
        self.fleet = RegionFleet(quota, profile, share, drifts, regions)

    @rule(by=st.sampled_from(STEPS[-3:]))
    def pause(self, by: int) -> None:
        self.fleet.advance(by)

    @rule(which=which, again=again)
    def fetch(self, which: int, again: bool) -> None:
        self.fleet.fetch(which, again)

    @rule(which=which, again=again)
    def deposit(self, which: int, again: bool) -> None:
        self.fleet.deposit(which, again)

    @rule(which=which)
    def drop(self, which: int) -> None:
        self.fleet.drop(which)

    @rule(which=which, times=st.integers(2, 8))
    def stock(self, which: int, times: int) -> None:
        self.fleet.stock(which, times)

    @rule(which=which, full=st.booleans())
    def slow(self, which: int, full: bool) -> None:
        self.fleet.slow(which, full)

    @rule(which=which)
    def step_back_and_cut(self, which: int) -> None:
        self.fleet.step_back_and_cut(which)

    @rule(which=which, by=st.sampled_from([200_000, 1_200_000, 11_000_000]))
    def late(self, which: int, by: int) -> None:
        self.fleet.late(which, by)

    @rule()
    def join(self) -> None:
        self.fleet.join()

    @rule()
    def hoard(self) -> None:
        self.fleet.hoard()


@pytest.mark.bounded(1800)
def test_rules_of_regions() -> None:
    """No order of events, as Hypothesis finds them, admits one too many in all regions together."""
    phases = tuple(Phase) if SHRINK else (Phase.generate,)
    chosen = settings(max_examples=RUNS, stateful_step_count=50, deadline=None, phases=phases)
    run_state_machine_as_test(RegionMachine, settings=chosen)


@pytest.mark.bounded(1800)
def test_random_walks_of_regions() -> None:
    """A hundred times as fast as the machine above, so that what is rare comes up too."""
    leased = 0
    for seed in range(WALKS):
        dice = random.Random(f"regions {seed}")
        drifts = [dice.randint(-5, 5) for _ in range(3)]
        fleet = RegionFleet(seed, dice.choice(sorted(PROFILES)), dice.randint(0, 2), drifts, dice.randint(1, 3))
        try:
            walk(fleet, dice, 60)
            leased += any(region.ledger.stock.out for region in fleet.regions)
            fleet.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert leased > WALKS // 4, "many end with a stock"


def walk(fleet: RegionFleet, dice: random.Random, steps: int) -> None:
    limit = fleet.params.limit
    events = {
        "trip": 6,
        "spend": 5,
        "advance": 5,
        "report": 2,
        "arrive": 2,
        "answer": 2,
        "fetch": 2,
        "deposit": 2,
        "drop": 0.7,
        "lose": 0.7,
        "stock": 1,
        "brink": 0.3,
        "echo": 0.3,
        "late": 0.3,
        "slow": 0.2,
        "step_back_and_cut": 0.2,
        "release": 0.4,
        "forget": 0.3,
        "crash": 0.2,
        "join": 0.2,
        "hoard": 0.2,
        "step_back": 0.2,
    }
    for event in dice.choices(list(events), list(events.values()), k=steps):
        which = dice.choice([-1, -1, 0, 1, 2, 3])
        wanted = dice.choice([0, 1, 5, 30, 500])
        needs = dice.choice([[], [], [(limit, 1)], [(dice.randint(1, 3), dice.randint(1, 4)), (1, 1)]])
        twice = dice.random() < 0.2
        match event:
            case "trip" | "report":
                getattr(fleet, event)(which, wanted, needs)
            case "spend":
                fleet.spend(which, dice.choice([1, 1, 1, 2]), dice.choice([1, 3, limit]))
            case "advance":
                fleet.advance(int(dice.choice(STEPS) * dice.random()))
            case "arrive" | "answer" | "fetch" | "deposit":
                getattr(fleet, event)(which, twice)
            case "stock":
                fleet.stock(which, dice.randint(2, 8))
            case "late":
                fleet.late(which, dice.choice([200_000, 1_200_000, 11_000_000]))
            case "slow":
                fleet.slow(which, dice.random() < 0.5)
            case "release":
                dice.choice([fleet.trip, fleet.report])(which, 0, (), "release")
            case "join" | "hoard":
                getattr(fleet, event)()
            case "step_back":
                fleet.step_back(dice.choice([2_000, 400_000, 40_000_000]))
            case "brink" | "echo":
                getattr(fleet, event)(which, wanted)
            case "lose":
                dice.choice([fleet.drop_request, fleet.drop_answer])(which)
            case _:
                getattr(fleet, event)(which)
