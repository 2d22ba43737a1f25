"""The timeline of a replay as an SVG, and the whole report as an HTML page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 240, 60, 40
ALLOWED, REFUSED = "#6b8fb5", "#c0392b"


def as_svg(found: dict[str, Any]) -> str:
    """The requests over time, those that the limit refuses on top in red."""
    bars = found["limit"]["timeline"]
    highest = max((bar["requests"] for bar in bars), default=0) or 1
    width = (WIDTH - LEFT - 10) / max(len(bars), 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
            "<style>text{font-size:12px}</style>",
            f"<title>{escape(found['limit']['rule'])}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT - 6}" y="16" text-anchor="end">{highest:,}</text>',
            f'<text x="{LEFT - 6}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>',
            *(line for number, bar in enumerate(bars) for line in _bar(bar, LEFT + number * width, width, highest)),
            f'<text x="{LEFT}" y="{HEIGHT - 22}">{escape(str(found["from"]))}</text>',
            f'<text x="{WIDTH - 10}" y="{HEIGHT - 22}" text-anchor="end">{escape(str(found["to"]))}</text>',
            f'<text x="{LEFT}" y="{HEIGHT - 5}" fill="{ALLOWED}">allowed</text>',
            f'<text x="{LEFT + 60}" y="{HEIGHT - 5}" fill="{REFUSED}">refused ({found["limit"]["share"]:.3%})</text>',
            "</svg>",
        ]
    )


def _bar(bar: dict[str, Any], left: float, width: float, highest: int) -> Iterator[str]:
    scale, base = (HEIGHT - BOTTOM - 10) / highest, HEIGHT - BOTTOM
    allowed = (bar["requests"] - bar["refused"]) * scale
    refused = bar["refused"] * scale
    for top, height, colour in ((base - allowed, allowed, ALLOWED), (base - allowed - refused, refused, REFUSED)):
        if height:
            place = f'x="{left:.1f}" y="{top:.1f}" width="{max(width - 1, 0.5):.1f}" height="{height:.1f}"'
            told = escape(f"{bar['from']}: {bar['requests']:,} requests, {bar['refused']:,} refused")
            yield f'<rect {place} fill="{colour}"><title>{told}</title></rect>'


def as_html(found: dict[str, Any], lines: Iterator[str]) -> str:
    """The picture, the keys that were refused most, and the text of the report."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><title>headgate replay</title>',
            "<style>body{font-family:sans-serif;margin:2em auto;max-width:60em}td,th{padding:.2em .8em}</style>",
            "</head><body><h1>headgate replay</h1>",
            f"<p>{escape(found['limit']['rule'])}</p>",
            as_svg(found),
            _table(found["limit"]["worst"], "Most refused"),
            _table(found.get("newly_refused_keys", []), "Newly refused"),
            f"<pre>{escape(chr(10).join(lines))}</pre>",
            "</body></html>",
        ]
    )


def _table(rows: list[dict[str, Any]], title: str) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table>"
