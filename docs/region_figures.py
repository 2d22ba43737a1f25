"""The table and the picture of regions.md, from the simulator: the same numbers each time.

python docs/region_figures.py       prints the tables, writes docs/img/regions_cut.svg; takes some minutes
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from headgate.simulate import Outcome, Scenario, simulate

IMAGE = Path(__file__).parent / "img" / "regions_cut.svg"
SECOND = 1_000_000_000
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 760, 330, 52, 40, 40, 110
COLOURS = ["#c2410c", "#2563eb", "#0d9488"]
CUT = (20.0, 80.0)
NAMES = ["cut off", "joined", "joined"]


def connected() -> Iterable[list[str]]:
    for quota, nodes, load, trip in [
        ("10000/second", 60, 1.2, 150.0),
        ("1000/second", 60, 1.2, 150.0),
        ("100/second", 12, 1.2, 150.0),
        ("100/second", 60, 1.2, 150.0),
        ("1000/second", 60, 1.2, 50.0),
        ("1000/second", 60, 3.0, 150.0),
        ("1000/second", 60, 0.5, 150.0),
    ]:
        scenario = Scenario(quota, nodes=nodes, load=load, seconds=60, regions=3, home_trip=trip)
        outcome = simulate(scenario)
        yield [
            quota,
            str(nodes),
            f"{load:g}x",
            f"{trip:g} ms",
            str(outcome.over),
            f"{outcome.under_percent:.2f} %",
            f"{outcome.local_percent:.1f} %",
            f"{outcome.trips_per_second / nodes:.1f}",
            f"{outcome.home_trips / scenario.seconds / 3:.1f}",
        ]


def partition() -> Outcome:
    return simulate(Scenario("1000/second", nodes=30, load=1.2, seconds=110, regions=3, cuts=((0, *CUT),)))


def rates(times: list[int], seconds: int) -> list[int]:
    """Admissions in each second."""
    found = [0] * seconds
    for at in times:
        found[min((at - SECOND) // SECOND, seconds - 1)] += 1
    return found


def picture(outcome: Outcome) -> str:
    """Admissions a second of every region and of all, and the shaded time of the cut."""
    seconds = int(outcome.scenario.seconds)
    most = 1250
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(second: float) -> float:
        return LEFT + second / seconds * wide

    def y(rate: float) -> float:
        return TOP + high - min(rate, most) / most * high

    regions = [rates(times, seconds) for times in outcome.by_region]
    total = [sum(each) for each in zip(*regions, strict=True)]
    lines = [(total, "#111827", "all", 2.0)]
    lines += [(rate, colour, name, 1.5) for rate, colour, name in zip(regions, COLOURS, NAMES, strict=True)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12">',
        "<style>text { font-family: sans-serif }</style>",
        "<title>Admissions a second in three regions, of which one is cut off from home for a minute</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<rect x="{x(CUT[0]):.1f}" y="{TOP}" width="{x(CUT[1]) - x(CUT[0]):.1f}" height="{high}" fill="#fee2e2"/>',
        f'<text x="{x(CUT[0]) + 6:.1f}" y="{TOP - 8}" fill="#991b1b">cut off from home for a minute</text>',
        (
            f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y(1000):.1f}" y2="{y(1000):.1f}" stroke="#9ca3af" '
            'stroke-dasharray="4 3"/>'
        ),
        f'<text x="{LEFT + wide + 6}" y="{y(1000) - 8:.1f}" fill="#6b7280">quota 1000/s</text>',
    ]
    for rate in range(0, most + 1, 250):
        parts.append(f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end" fill="#374151">{rate}</text>')
    for second in range(0, seconds + 1, 10):
        where = f'x="{x(second):.1f}" y="{TOP + high + 18}"'
        parts.append(f'<text {where} text-anchor="middle" fill="#374151">{second} s</text>')
    for number, (line, colour, name, width) in enumerate(lines):
        points = " ".join(f"{x(second + 0.5):.1f},{y(rate):.1f}" for second, rate in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        if number != 3:  # the two regions that stay joined lie on each other
            beside = y(line[-1]) + (4 if number != 1 else 16)
            parts.append(f'<text x="{LEFT + wide + 6}" y="{beside:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    outcome = partition()
    IMAGE.write_text(picture(outcome), encoding="utf-8", newline="\n")
    cut = [sum(CUT[0] <= (at - SECOND) / SECOND < CUT[1] for at in times) / 60 for times in outcome.by_region]
    after = [sum(40 + CUT[0] <= (at - SECOND) / SECOND < CUT[1] for at in times) / 20 for times in outcome.by_region]
    print(f"over {outcome.over}; a second while cut: {cut}; in its last 20 s: {after}")
    if "picture" in sys.argv:
        return
    print("| quota | processes | load | trip to home | over | under | local | trips | trips to home |")
    print("|---" * 9 + "|")
    for row in connected():
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
