"""Pictures for the page: bars and lines as SVG, which follow the reader's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 800
STYLE = """
  .ground { fill: #ffffff } .grid { stroke: #d8dee4 }
  .mark { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 5 4 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2328 }
  .head { font-size: 16px; font-weight: 600 } .soft { fill: #57606a } .right { text-anchor: end }
  .middle { text-anchor: middle } .small { font-size: 12px }
  .ours { fill: #0969da } .other { fill: #8c959f } .second { fill: #1a7f37 }
  .line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
  .l0 { stroke: #8c959f; stroke-dasharray: 5 4 } .l1 { stroke: #0969da } .l2 { stroke: #bc4c00 } .l3 { stroke: #1a7f37 }
  .l4 { stroke: #cf222e } .l5 { stroke: #8250df }
  .t0 { fill: #57606a } .t1 { fill: #0969da } .t2 { fill: #bc4c00 } .t3 { fill: #1a7f37 } .t4 { fill: #cf222e }
  .t5 { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } .grid { stroke: #30363d } .mark { stroke: #ff7b72 }
    text { fill: #e6edf3 } .soft { fill: #9aa4ae }
    .ours { fill: #58a6ff } .other { fill: #6e7681 } .second { fill: #56d364 }
    .l0 { stroke: #9aa4ae } .l1 { stroke: #58a6ff } .l2 { stroke: #ffa657 } .l3 { stroke: #56d364 }
    .l4 { stroke: #ff7b72 } .l5 { stroke: #bc8cff }
    .t0 { fill: #9aa4ae } .t1 { fill: #58a6ff } .t2 { fill: #ffa657 } .t3 { fill: #56d364 } .t4 { fill: #ff7b72 }
    .t5 { fill: #bc8cff }
  }
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One bar: its label, its length, the text at its end, and whose it is: `ours`, `second` or `other`."""

    label: str
    value: float
    text: str
    style: str = "ours"


def svg(height: float, title: str, about: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title about">',
        f'<title id="title">{escape(title, quote=False)}</title>',
        f'<desc id="about">{escape(about, quote=False)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height:g}" class="ground"/>',
        text(20, 28, title, "head"),
        text(20, 48, about, "soft small"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(words, quote=False)}</text>'


def segment(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}" class="{style}"/>'


def bars(
    title: str, about: str, rows: Sequence[Row], *, log: bool = False, mark: tuple[float, str] | None = None
) -> str:
    """Horizontal bars; with *log* their length is the logarithm. *mark* is an upright line and what it means."""
    left, right, step, top = 270.0, WIDTH - 130.0, 26.0, 70.0
    most = max([row.value for row in rows] + ([mark[0]] if mark else []))
    low = min(1.0, *(row.value for row in rows)) * 0.8 if log else 0.0

    def x(value: float) -> float:
        if log:
            return left + (right - left) * math.log(value / low) / math.log(most / low)
        return left + (right - left) * value / most

    parts: list[str] = []
    bottom = top + step * len(rows)
    for number, row in enumerate(rows):
        y = top + step * number
        parts.append(text(left - 10, y + 16, row.label, "right"))
        width = max(1.0, x(row.value) - left)
        parts.append(f'<rect x="{left:g}" y="{y + 4:g}" width="{width:.1f}" height="17" rx="2" class="{row.style}"/>')
        parts.append(text(left + width + 6, y + 17, row.text, "small"))
    if mark:
        parts.append(segment(x(mark[0]), top - 4, x(mark[0]), bottom + 4, "mark"))
        parts.append(text(x(mark[0]), bottom + 20, mark[1], "soft small middle"))
    return svg(bottom + (34 if mark else 16), title, about, parts)


def lines(
    title: str, about: str, across: Sequence[str], series: Mapping[str, Sequence[float]], ticks: Mapping[float, str]
) -> str:
    """Lines over the points of *across*, upright scale logarithmic; *ticks* are its marks with their texts."""
    left, right, top, bottom = 70.0, WIDTH - 210.0, 74.0, 350.0
    low, high = math.log(min(ticks)), math.log(max(ticks))

    def x(number: int) -> float:
        return left + (right - left) * number / max(1, len(across) - 1)

    def y(value: float) -> float:
        share = (math.log(value) - low) / (high - low)
        return bottom - (bottom - top) * min(1.0, max(0.0, share))

    parts: list[str] = []
    for value, label in ticks.items():
        parts += [
            segment(left, y(value), right, y(value), "grid"),
            text(left - 8, y(value) + 4, label, "soft small right"),
        ]
    parts += [text(x(number), bottom + 20, label, "soft small middle") for number, label in enumerate(across)]
    heights: list[float] = []
    for number, (_, values) in sorted(enumerate(series.items()), key=lambda item: y(item[1][1][-1])):
        way = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in enumerate(values))
        parts.append(f'<path d="M{way}" class="line l{number % 6}"/>')
        at = max([y(values[-1]) + 4, *(height + 16 for height in heights[-1:])])  # labels do not cover each other
        heights.append(at)
        parts.append(text(right + 10, at, list(series)[number], f"small t{number % 6}"))
    return svg(bottom + 34, title, about, parts)
