"""The simulator: the same node code on a clock of its own. Short runs here; docs/hybrid.md has the long ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headgate.hybrid.simulate import Scenario, main, naive, simulate

SHORT = Scenario(quota="2000/second", nodes=20, seconds=4)


@pytest.mark.parametrize("load", [0.5, 1.2, 3.0])
@pytest.mark.parametrize("skew", ["uniform", "moving"])
@pytest.mark.parametrize("trip", [1.0, 50.0])
def test_never_one_too_many(load: float, skew: str, trip: float) -> None:
    outcome = simulate(replace(SHORT, load=load, skew=skew, trip=trip))
    assert outcome.over == 0
    assert outcome.asked > 3000 * load and outcome.trips > 20
    if load < 1:
        assert outcome.admitted == outcome.exact, "below the rate nobody is refused"
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
def test_never_one_too_many_in_trouble(trouble: dict[str, object]) -> None:
    for seed in (1, 2):
        outcome = simulate(replace(SHORT, seed=seed, **trouble))  # type: ignore[arg-type]  # a table of fields
        assert outcome.over == 0
        assert outcome.admitted > 0


def test_an_outage_with_a_share_of_the_rate_is_bounded() -> None:
    """Each node goes on with its share, which starts empty: what it had on lease may add to that for a moment."""
    outcome = simulate(replace(SHORT, outage=(1.0, 3.0), policy="local"))
    assert outcome.over_percent < 5
    assert outcome.admitted > simulate(replace(SHORT, outage=(1.0, 3.0), policy="deny")).admitted


def test_a_thousand_nodes() -> None:
    outcome = simulate(Scenario(quota="20000/second", nodes=1000, seconds=0.5, load=2))
    assert outcome.over == 0 and outcome.admitted > 0.5 * outcome.exact


def test_the_same_question_has_the_same_answer() -> None:
    assert simulate(SHORT) == simulate(SHORT)
    assert simulate(SHORT) != simulate(replace(SHORT, seed=2))


def test_the_naive_design_is_what_it_is_said_to_be() -> None:
    assert naive(SHORT, 1.0).over_percent > 20
    assert naive(SHORT, 1.0, extrapolate=True).over_percent > 50
    assert naive(replace(SHORT, load=0.5), 1.0).over == 0


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "fleet.svg"
    main(["2000/second", "--nodes", "5", "--seconds", "1", "--svg", str(svg)])
    told = capsys.readouterr().out
    assert "leases, high" in told and "naive, every 30 s" in told and "over    0.00 %" in told
    assert len(ElementTree.parse(svg).getroot().findall("{*}path")) > 5


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"load": 0}, {"skew": "odd"}, {"accuracy": "odd"}, {"loss": 1.0}])
def test_bad_scenarios(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"nodes|load|skew|accuracy|loss"):
        Scenario(**wrong)  # type: ignore[arg-type]  # that is the test
