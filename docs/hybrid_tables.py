"""The tables and pictures of hybrid.md, from the simulator: the same numbers each time.

python docs/hybrid_tables.py        prints the tables, writes docs/img/hybrid_*.svg; takes some minutes
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headgate.simulate import Outcome, Scenario, naive, simulate
from headgate.simulate.plot import write

IMAGES = Path(__file__).parent / "img"


def table(head: str, rows: Iterable[list[str]]) -> None:
    print(f"\n| {head} |")
    print("|---" * (head.count("|") + 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def figures(outcome: Outcome) -> list[str]:
    trips = outcome.trips_per_second / outcome.scenario.nodes
    return [
        f"{outcome.over_percent:.1f} %" if outcome.over else "0",
        f"{outcome.under_percent:.2f} %",
        f"{outcome.local_percent:.2f} %",
        f"{trips:.2f}",
    ]


def fleets() -> Iterable[list[str]]:
    for load in (3.0, 1.2, 0.5):
        for skew in ("uniform", "moving"):
            for trip in (1.0, 50.0):
                scenario = Scenario(seconds=60, load=load, skew=skew, trip=trip)
                yield [f"{load:g}x", skew, f"{trip:g} ms", *figures(simulate(scenario))]


def designs() -> Iterable[list[str]]:
    for nodes in (10, 100):
        scenario = Scenario(seconds=60, nodes=nodes)
        for interval in (1.0, 30.0, 300.0):
            yield [str(nodes), f"naive, every {interval:g} s", *figures(naive(scenario, interval))]
        yield [str(nodes), "naive, every 1 s, extrapolated", *figures(naive(scenario, 1.0, extrapolate=True))]
        for accuracy in ("high", "medium", "low"):
            outcome = simulate(Scenario(seconds=60, nodes=nodes, accuracy=accuracy))
            yield [str(nodes), f"leases, `{accuracy}`", *figures(outcome)]


def edges() -> Iterable[list[str]]:
    for quota, nodes, load in [
        ("1000/s", 100, 3.0),
        ("1000/s", 100, 0.5),
        ("100/s", 10, 3.0),
        ("100/s", 100, 3.0),
        ("100/s", 100, 0.5),
        ("10000/s burst 1000", 100, 3.0),
        ("100/s burst 6000", 100, 3.0),
        ("5/minute", 10, 30.0),
        ("20000/s", 1000, 2.0),
    ]:
        for trip in (1.0, 50.0):
            seconds = 20 if nodes == 1000 else 60
            scenario = Scenario(quota=quota, nodes=nodes, load=load, trip=trip, seconds=seconds)
            yield [quota, str(nodes), f"{load:g}x", f"{trip:g} ms", *figures(simulate(scenario))]


def machines() -> Iterable[list[str]]:
    """Ten machines of four workers: a lease for each worker, and what one lease for each machine would give."""
    for quota in ("10000/s", "1000/s", "100/s"):
        for load in (3.0, 0.5):
            for leases in (40, 10):
                outcome = simulate(Scenario(quota=quota, nodes=leases, load=load, seconds=60))
                over, under, local, _ = figures(outcome)
                holder = "each worker" if leases == 40 else "each machine"
                yield [quota, f"{load:g}x", holder, over, under, local, f"{outcome.trips_per_second:.0f}"]


def troubles() -> Iterable[list[str]]:
    for name, scenario in {
        "2 % of all trips lost": Scenario(seconds=60, loss=0.02),
        "10 of 100 nodes killed": Scenario(seconds=60, crashes=10),
        "Redis away for 10 s, `deny`": Scenario(seconds=60, outage=(20, 30), policy="deny"),
        "Redis away for 10 s, `local`": Scenario(seconds=60, outage=(20, 30), policy="local"),
        "Redis away for 10 s, `allow`": Scenario(seconds=60, outage=(20, 30), policy="allow"),
    }.items():
        yield [name, *figures(simulate(scenario))]


def main() -> None:
    each = "over | under | local | trips/s a node"
    table(f"load | calls | trip | {each}", fleets())
    table(f"nodes | design | {each}", designs())
    table(f"quota | nodes | load | trip | {each}", edges())
    table(f"trouble | {each}", troubles())
    table("quota | load | a lease for | over | under | local | trips/s of all", machines())
    short = Scenario(seconds=20)
    outcomes = [simulate(short), naive(short, 1.0), naive(short, 1.0, extrapolate=True)]
    write(str(IMAGES / "hybrid_fleet.svg"), outcomes)
    outage = Scenario(seconds=20, outage=(6.0, 12.0))
    policies = [simulate(Scenario(**{**vars(outage), "policy": policy})) for policy in ("local", "deny", "allow")]
    for outcome in policies:
        outcome.name = f"on_store_error={outcome.scenario.policy}"
    write(str(IMAGES / "hybrid_outage.svg"), policies)


if __name__ == "__main__":
    main()
