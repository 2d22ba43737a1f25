"""The simulator: the real managers on a clock of its own. Short runs here; docs/hybrid.md has the long ones."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headgate.hybrid.fallback_policy import LAST_RETRY
from headgate.hybrid.lease import SECOND
from headgate.quota import Quota
from headgate.simulate import Scenario, naive, simulate
from headgate.simulate import __main__ as simulation
from headgate.simulate.__main__ import main

SHORT = Scenario(quota="2000/second", nodes=20, seconds=4)


@pytest.mark.parametrize("load", [0.5, 1.2, 3.0])
@pytest.mark.parametrize("skew", ["uniform", "moving"])
@pytest.mark.parametrize("trip", [1.0, 50.0])
def test_never_over(load: float, skew: str, trip: float) -> None:
    """A fleet never admits one too many, and below the rate denies none."""
    outcome = simulate(replace(SHORT, load=load, skew=skew, trip=trip))
    assert outcome.over == 0
    assert outcome.asked > 3000 * load and outcome.trips > 20
    if load < 1:
        assert outcome.admitted == outcome.exact, "below the rate no call is denied"
    else:
        assert outcome.under_percent < 8, "a short run, of which the start is a part"
    assert outcome.local_percent > (97 if trip < 10 else 80)


@pytest.mark.parametrize(
    "trouble",
    [
        {"loss": 0.05},
        {"crashes": 5},
        {"outage": (1.0, 3.0), "policy": "deny"},
        {"accuracy": "medium"},
        {"accuracy": "low"},
        {"quota": "200/second burst 20"},
        {"quota": "20/second", "load": 10.0},
        {"quota": "5/minute", "load": 300.0},
    ],
    ids=str,
)
def test_never_over_in_trouble(trouble: dict[str, object]) -> None:
    """Nor with lost trips, crashes or an outage."""
    for seed in (1, 2):
        outcome = simulate(replace(SHORT, seed=seed, **trouble))  # type: ignore[arg-type]  # a table of fields
        assert outcome.over == 0
        assert outcome.admitted > 0


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario("1000/second", nodes=1, seconds=6),
        Scenario("1000/second", nodes=10, seconds=6),
        Scenario("100/second", nodes=10, seconds=20),
        Scenario("100/second", nodes=5, load=1.5, accuracy="low", skew="moving", seconds=20),
        Scenario("1000/second burst 100", nodes=10, trip=50, skew="moving", seconds=10),
        Scenario("500/second burst 50", nodes=1, trip=50, accuracy="medium", seconds=10),
        Scenario("2000/second burst 500", nodes=2, load=1.05, trip=50, accuracy="low", skew="moving", seconds=10),
    ],
    ids=lambda s: f"{s.quota}, {s.nodes} nodes, {s.load}x, {s.trip} ms, {s.accuracy}",
)
def test_little_is_lost(scenario: Scenario) -> None:
    """What is short at any moment waits in Redis or on a lease; only what finds no room in the bucket is lost."""
    outcome = simulate(scenario)
    assert outcome.over == 0
    assert outcome.lost_percent < (2 if scenario.accuracy == "high" else 6), "callers move, and inflow follows later"
    quick = scenario.accuracy == "high" and scenario.trip < 10
    assert not quick or outcome.lost <= 0.02 * Quota.parse(scenario.quota).capacity, "no refill, but for the start"


@pytest.mark.parametrize("load", [0.5, 0.9, 1.0, 1.05, 1.5, 3.0])
@pytest.mark.parametrize("nodes", [1, 8])
def test_ten_trips_a_second_at_most(load: float, nodes: int) -> None:
    outcome = simulate(Scenario("1000/second", nodes=nodes, load=load, seconds=8))
    assert outcome.trips_per_second / nodes <= 10
    assert outcome.local_percent > 99


@pytest.mark.slow
@pytest.mark.parametrize("quota", ["5/second", "20/second", "20/second burst 10", "1000/second"])
def test_many_callers_rarely_wait(quota: str) -> None:
    """Permits that a caller was told to retry for may be taken by others: that is no reason to ask Redis again."""
    rate = Quota.parse(quota).limit / Quota.parse(quota).period
    outcome = simulate(Scenario(quota, nodes=1, load=3, seconds=8000 / rate if rate < 100 else 8))
    assert outcome.over == 0 and outcome.lost_percent < 1
    assert outcome.trips_per_second <= 9
    assert outcome.local_percent > 99.5


def test_crash_loses_its_leases() -> None:
    """A process that dies loses what it held and no more."""
    scenario = replace(SHORT, seconds=8)
    before, after = simulate(scenario), simulate(replace(scenario, crashes=8))
    assert after.burned > 20
    assert after.lost - before.lost <= after.burned + 0.01 * after.exact


def test_outage_costs_its_refill() -> None:
    """And of that not what finds room in the bucket."""
    outcome = simulate(replace(SHORT, seconds=8, outage=(2.0, 5.0), policy="deny"))
    until_somebody_asks = 3.0 + 1.2 * LAST_RETRY / SECOND
    assert 2000 * 3 * 0.5 < outcome.lost <= 2000 * (until_somebody_asks - 0.5) + 0.01 * outcome.exact


def test_outage_with_local_is_bounded() -> None:
    """Each node goes on with its share, which starts empty: what it had on lease may add to that for a moment."""
    outcome = simulate(replace(SHORT, outage=(1.0, 3.0), policy="local"))
    assert outcome.over_percent < 5
    assert outcome.admitted > simulate(replace(SHORT, outage=(1.0, 3.0), policy="deny")).admitted


@pytest.mark.slow
def test_a_thousand_nodes() -> None:
    outcome = simulate(Scenario(quota="20000/second", nodes=1000, seconds=0.5, load=2))
    assert outcome.over == 0 and outcome.admitted > 0.5 * outcome.exact


def test_same_seed_same_outcome() -> None:
    """The same scenario has the same outcome."""
    assert simulate(SHORT) == simulate(SHORT)
    assert simulate(SHORT) != simulate(replace(SHORT, seed=2))


def test_naive_admits_too_many() -> None:
    """The naive design admits too many above the rate, and none too many below it."""
    assert naive(SHORT, 1.0).over_percent > 20
    assert naive(SHORT, 1.0, extrapolate=True).over_percent > 50
    assert naive(replace(SHORT, load=0.5), 1.0).over == 0


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "fleet.svg"
    main(["2000/second", "--nodes", "5", "--seconds", "1", "--svg", str(svg)])
    told = capsys.readouterr().out
    assert "leases, high" in told and "naive, every 30 s" in told and "over    0.00 %" in told
    assert len(ElementTree.parse(svg).getroot().findall("{*}path")) > 5


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["nonsense"], "quota: .*100/minute"),
        (["--nodes", "0"], "--nodes must be from 1 to 10,000"),
        (["--nodes", "many"], "--nodes: must be a whole number, got 'many'"),
        (["--trip", "-1"], "--trip must be a number above 0"),
        (["--load", "nan"], "--load must be a number above 0"),
        (["--accuracy", "0.1"], "--accuracy must be one of high, medium, low, or the seconds between two reports"),
        (["--seconds", "inf"], "--seconds must be a number above 0"),
        (["--load", "1e9"], "--load: .* lower it"),
        (["--svg", "/nowhere/to be found/x.svg"], "--svg: cannot write"),
    ],
)
def test_bad_command_lines(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(told, line)


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "monotonic", itertools.count(0.0, 0.5).__next__)
    main(["200/second", "--nodes", "2", "--seconds", "1"])
    assert re.search(r"leases, high: \d+%", capsys.readouterr().err)


@pytest.mark.parametrize(
    "wrong", [{"nodes": 0}, {"load": 0}, {"skew": "odd"}, {"accuracy": "odd"}, {"loss": 1.0}, {"trace": "x"}]
)
def test_bad_scenarios(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"nodes|load|skew|accuracy|loss|trace"):
        Scenario(**wrong)  # type: ignore[arg-type]  # that is the test


def test_regions_lose_little() -> None:
    """Three regions 150 ms from home admit at least 95 % of what an exact bucket does, and never one too many."""
    for load in (1.2, 0.5):
        outcome = simulate(Scenario("100/second", nodes=6, load=load, seconds=40, regions=3, home_trip=150))
        assert outcome.over == 0
        assert outcome.under_percent <= 5
        assert 0 < outcome.home_trips / 40 / 3 < 10, "a region asks home a few times a second"


def test_region_that_is_cut_off() -> None:
    """A region that is cut off for a minute lives on its floor, the others on the rest; nothing is too many."""
    cut = Scenario("100/second", nodes=6, load=1.2, seconds=90, regions=3, cuts=((0, 15.0, 75.0),))
    outcome = simulate(cut)
    assert outcome.over == 0
    lonely, *joined = ([at for at in times if 55 <= at / 1e9 - 1 < 75] for times in outcome.by_region)
    assert 4.5 <= len(lonely) / 20 <= 5, "its floor, a twentieth"
    assert all(33 <= len(times) / 20 <= 47 for times in joined), "most of what they ask for, 40"
    rejoined = [at for at in outcome.by_region[0] if at / 1e9 - 1 >= 78]
    assert len(rejoined) / 12 > 22


def test_more_regions_than_nodes() -> None:
    """More regions than nodes are refused."""
    with pytest.raises(ValueError, match="regions must be from 0 to the number of nodes, 2, got 3"):
        Scenario(nodes=2, regions=3)
