"""Markdown of the page: tables, numbers, bars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTHING = "not measured"
NUMBER = re.compile(r"[<>=~]* ?[\d.,]+(x|%| \w{1,2})?( \(.*\))?$")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a column whose cells all begin with a number is set to the right."""
    body = list(rows)
    columns = [[row[at] for row in body if row[at]] for at in range(len(head))]
    marks = [
        "---:" if cells and all(cell == NOTHING or NUMBER.match(cell) for cell in cells) else "---" for cells in columns
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, marks, *body])


def number(value: float) -> str:
    """Three digits that count, or all before the point: 0.123, 4.56, 78.9, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def times(value: float) -> str:
    """A ratio, as in 14x."""
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x" if value >= 2 else f"{value:.2f}x"


def duration(microseconds: float) -> str:
    """A time in the unit that fits."""
    if microseconds < 1000:
        return f"{number(microseconds)} µs"
    return f"{number(microseconds / 1000)} ms"


def promises(bars: Sequence[Mapping[str, Any]]) -> str:
    """What a part promises, and whether this run kept it."""
    if not bars:
        return ""
    rows = [(bar["what"], bar["need"], bar["measured"], "met" if bar["met"] else "**missed**") for bar in bars]
    return table(("promise", "needed", "measured", ""), rows)
