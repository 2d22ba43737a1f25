"""Sections of the page about the service and web frameworks: from the figures of a part to Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.figures import OURS
from benchmarks.markdown import number, table, times
from benchmarks.page_library import Parts


def rate(run: dict[str, Any]) -> float:
    return float(run["requests"] / run["seconds"])


def requests(contenders: Sequence[dict[str, Any]], against: str) -> str:
    """Requests a second, p99, and the share of the first contender in the same rounds."""
    first = contenders[0]["runs"]
    body = []
    for one in contenders:
        share = median(rate(mine) / rate(its) for mine, its in zip(one["runs"], first, strict=True))
        name = f"**{one['name']}**" if one["name"].startswith(OURS) else one["name"]
        p99 = median(run["p99_us"] for run in one["runs"]) / 1000
        body.append((name, f"{share:.0%}", f"{median(map(rate, one['runs'])):,.0f}", number(p99)))
    return table(("", against, "requests/s", "p99, ms"), body)


def service(parts: Parts) -> list[str]:
    found = parts["service"]
    blocks = [
        f"One worker, 32 connections, asked by {found['client']}:",
        requests(found["contenders"], "of a bare handler"),
    ]
    body = []
    for name, title in (("overload", "plain"), ("overload_hybrid", "hybrid")):
        one = found[name]
        cells = (
            f"{one['offered']:,}",
            f"{one['most']:,.0f}",
            f"{one['admitted']:,}",
            f"{one['admitted'] / one['most']:.1%}",
        )
        body.append((title, *cells))
    head = ("two instances on one Redis, overloaded", "asked", "limit", "admitted", "of the limit")
    return [*blocks, table(head, body)]


def resp(parts: Parts) -> list[str]:
    targets = parts["resp"]
    ping = targets[0]["runs"]
    body = []
    for one in targets:
        title = one["name"] + (f", pipelines of {one['pipeline']}" if one["pipeline"] > 1 else "")
        share = median(mine / its for mine, its in zip(one["runs"], ping, strict=True))
        name = f"**{title}**" if title.startswith(OURS) else title
        body.append((name, times(share), f"{median(one['runs']):,.0f}"))
    return [table(("`CL.THROTTLE`, one worker, 50 connections", "of a PING of Redis", "commands/s"), body)]


def grpc(parts: Parts) -> list[str]:
    targets = parts["grpc"]
    first = targets[0]["runs"]
    body = []
    for one in targets:
        share = median(mine / its for mine, its in zip(one["runs"], first, strict=True))
        name = f"**{one['name']}**" if one["name"].startswith(OURS) else one["name"]
        body.append((name, times(share), f"{median(one['runs']):,.0f}", number(median(one["cpu_us"]))))
    head = ("`ShouldRateLimit`, one worker, 64 calls in flight", f"of {targets[0]['name']}", "calls/s", "CPU µs a call")
    return [table(head, body)]


def web(parts: Parts) -> list[str]:
    found = parts["web"]
    blocks: list[str] = []
    for framework, contenders in found.items():
        if framework != "client":
            named = [{**one, "name": "no limit" if one["name"] == "none" else one["name"]} for one in contenders]
            blocks += [f"**{framework}**, one worker, 32 connections:", requests(named, "of no limit")]
    return blocks
