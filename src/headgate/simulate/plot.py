"""A picture, as SVG, of what a simulated fleet admitted over time: with leases, with naive designs, and exactly."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.simulate.scenario import Outcome

WIDTH, HEIGHT = 800, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 560, 64, 372
STYLE = """
  .ground { fill: #ffffff } .grid { stroke: #d0d7de } .line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2328 }
  .head { font-size: 17px; font-weight: 600 } .soft { fill: #57606a } .right { text-anchor: end }
  .middle { text-anchor: middle }
  .exact { stroke: #57606a; stroke-dasharray: 6 4 } .c0 { stroke: #0969da } .c1 { stroke: #cf222e }
  .c2 { stroke: #bc4c00 } .c3 { stroke: #8250df } .c4 { stroke: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } .grid { stroke: #30363d } text { fill: #e6edf3 } .soft { fill: #9aa4ae }
    .exact { stroke: #9aa4ae } .c0 { stroke: #58a6ff } .c1 { stroke: #ff7b72 } .c2 { stroke: #ffa657 }
    .c3 { stroke: #bc8cff } .c4 { stroke: #56d364 }
  }
"""


def draw(outcomes: Sequence[Outcome]) -> str:
    """The picture of *outcomes* of one scenario; the first gives the exact line."""
    first = outcomes[0]
    scenario = first.scenario
    lines = [("exact", "exact", [(at, exact) for at, _, exact, _ in first.timeline])]
    for number, outcome in enumerate(outcomes):
        lines.append((outcome.name, f"c{number % 5}", [(at, admitted) for at, admitted, _, _ in outcome.timeline]))
    top = max(max(value for _, value in points) for _, _, points in lines) * 1.05 or 1

    def x(at: float) -> float:
        return LEFT + (RIGHT - LEFT) * at / scenario.seconds

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="head" x="16" y="28">{escape(_title(first))}</text>',
        '<text class="soft" x="16" y="48">admitted so far, all nodes together</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = top / 1.05 * share
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{RIGHT}"/>')
        parts.append(f'<text class="soft right" x="{LEFT - 8}" y="{y(value) + 4:.1f}">{_short(value)}</text>')
        at = scenario.seconds * share
        parts.append(f'<text class="soft middle" x="{x(at):.1f}" y="{BOTTOM + 20}">{at:g} s</text>')
    labels: list[tuple[float, str, str]] = []
    for name, kind, points in lines[1:] + lines[:1]:  # exact on top of the others
        path = "".join(f"{'L' if i else 'M'}{x(at):.1f} {y(value):.1f}" for i, (at, value) in enumerate(points))
        parts.append(f'<path class="line {kind}" d="{path}"/>')
        labels.append((y(points[-1][1]), name, kind))
    below = TOP - 20.0
    for height, name, kind in sorted(labels):
        below = max(height, below + 20)
        parts.append(f'<path class="line {kind}" d="M{RIGHT + 12} {below:.1f}h22"/>')
        parts.append(f'<text x="{RIGHT + 42}" y="{below + 4:.1f}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(path: str, outcomes: Sequence[Outcome]) -> None:
    """Write the picture to *path*."""
    Path(path).write_text(draw(outcomes), encoding="utf-8")


def _title(outcome: Outcome) -> str:
    s = outcome.scenario
    spread = "" if s.skew == "uniform" else ", a hot spot that moves"
    return f"{s.nodes} nodes, {s.quota}, {s.load:g} times the rate, {s.trip:g} ms to Redis{spread}"


def _short(value: float) -> str:
    return f"{value / 1000:.0f} k" if value >= 10_000 else f"{value:.0f}"
