"""What will my 200 pods do with 10,000/second and 20 ms to Redis? Simulate the fleet in one process.

python -m headgate.simulate "10000/second" --nodes 200 --trip 20 --load 3 --svg fleet.svg
"""

from __future__ import annotations

import argparse
import sys
from time import monotonic
from typing import NoReturn

from headgate.simulate.fleet import naive, simulate
from headgate.simulate.plot import write
from headgate.simulate.scenario import Scenario
from headgate.simulate.traces import TRACES

MOST_CALLS = 100_000_000  # hours of computing


class SimulateParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class Progress:
    """Shows on the terminal how far the simulation is, if it takes longer than a second."""

    def __init__(self) -> None:
        self.next = monotonic() + 1
        self.width = 0

    def __call__(self, name: str, part: float) -> None:
        if monotonic() >= self.next:
            self.next = monotonic() + 1
            self._print(f"{name}: {part:.0%}")

    def done(self) -> None:
        if self.width:
            self._print("")

    def _print(self, text: str) -> None:
        end = "\r" if sys.stderr.isatty() else "\n"
        if text or end == "\r":
            print(text.ljust(self.width), end=end, file=sys.stderr, flush=True)
        self.width = len(text)


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


def _accuracy(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def main(arguments: list[str] | None = None) -> None:
    """Simulate what the command line describes; print a table, and write a picture if asked to."""
    parser = SimulateParser(prog="python -m headgate.simulate", description=(__doc__ or "").split("\n")[0])
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
    parser.add_argument(
        "--trace", choices=TRACES, default=Scenario.trace, help="how calls come over time (%(default)s)"
    )
    parser.add_argument(
        "--accuracy", type=_accuracy, default=Scenario.accuracy, help="high, medium, low, or seconds (%(default)s)"
    )
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
            with open(svg, "ab"):  # fail before the work, not after
                pass
    except OSError as error:
        parser.error(f"argument --svg: cannot write {svg!r}: {error.strerror}; name a file in a folder that is there")
    outcomes = [simulate(scenario), naive(scenario, 1.0), naive(scenario, 1.0, extrapolate=True), naive(scenario, 30.0)]
    progress.done()
    print(f"{scenario.nodes} nodes, {scenario.quota}, {scenario.load:g} times the rate, {scenario.trip:g} ms to Redis")
    for outcome in outcomes:
        print(outcome.row())
    print(f"Of the permits that leases are short, {max(outcomes[0].lost, 0):,} are lost; the rest is free or on lease.")
    if svg:
        write(svg, outcomes)
        print(f"wrote {svg}")


if __name__ == "__main__":
    main()
