"""The pictures of the page, each from the figures of a part."""

from __future__ import annotations

from benchmarks import charts
from benchmarks.charts import Row
from benchmarks.figures import HYBRID as HYBRID_LIBRARY
from benchmarks.figures import OURS
from benchmarks.latency import ASYNC, ASYNC_PEER, HYBRID, PEER_STATS, PING, SYNC
from benchmarks.markdown import times
from benchmarks.page_library import Parts, builds, us
from benchmarks.page_proof import tasks_and_threads
from benchmarks.sizing import FLOOR, PROMISED_LOCAL, SMALLEST


def headlines(parts: Parts) -> list[tuple[str, float, str]]:
    """How many times as fast we are as `limits`: what is compared, the ratio, and the part it is from."""
    found: list[tuple[str, float, str]] = []

    def compare(what: str, ours: float | None, peer: float | None, part: str) -> None:
        if ours and peer:
            found.append((what, peer / ours, part))

    rows = parts.get("memory", [])
    for worker in builds(rows):
        name = "compiled" if worker == "compiled" else "plain Python"
        compare(
            f"in memory, {name}", us(rows, OURS, "token_bucket", worker), us(rows, "limits", "fixed_window"), "memory"
        )
    rows = parts.get("hybrid", [])
    compare(
        "hybrid, beside limits in memory",
        us(rows, HYBRID_LIBRARY, "admitted", right=False),
        us(rows, "limits", "admitted", right=False),
        "hybrid",
    )
    rows = parts.get("redis", [])
    compare("Redis, one thread", us(rows, OURS, "token_bucket"), us(rows, "limits"), "redis")
    rows = parts.get("redis threads", [])
    compare("Redis, 16 threads", us(rows, OURS, "token_bucket"), us(rows, "limits"), "redis")
    rows = parts.get("async", [])
    compare("Redis, 256 tasks", us(rows, OURS, "token_bucket"), us(rows, "limits"), "async")
    return found


def ratios(parts: Parts) -> str:
    rows = [Row(what, value, times(value)) for what, value, _ in headlines(parts)]
    about = "Token bucket of headgate beside the fastest strategy of limits in the same run; logarithmic scale"
    return charts.bars("Times as fast as limits", about, rows, log=True, mark=(1.0, "limits"))


def latency(parts: Parts) -> str:
    delays = parts["latency"]["delays"]
    series = {
        name: [by[name]["p50"] for by in delays.values()]
        for name in (PING, SYNC, PEER_STATS, HYBRID, ASYNC_PEER, ASYNC)
    }
    ticks = {
        0.1: "0.1 µs",
        1.0: "1 µs",
        10.0: "10 µs",
        100.0: "100 µs",
        1e3: "1 ms",
        1e4: "10 ms",
        1e5: "100 ms",
        2e5: "",
    }
    about = "p50 of a check, by the delay that a proxy adds to each reply of Redis"
    return charts.lines("A Redis that is farther away", about, [f"{delay} ms" for delay in delays], series, ticks)


def cluster(parts: Parts) -> str:
    rows = []
    for by, style in zip(tasks_and_threads(parts), ("ours", "second"), strict=True):
        first = next(iter(by.values()))["full_at"]
        name = "256 tasks" if style == "ours" else "4 threads"
        for count, one in by.items():
            label = f"{count} node{'s' * (count != '1')}, {name}"
            rows.append(Row(label, one["full_at"], f"{one['full_at']:,.0f} ({times(one['full_at'] / first)})", style))
    about = "Checks a second, computed: a whole core for the busiest node, by the CPU time that checks took there"
    return charts.bars("When the busiest node of a Cluster is full", about, rows)


def sizing(parts: Parts) -> str:
    found = parts["sizing"]
    rows = [Row(f"shared://, {SMALLEST}", found["shared"][SMALLEST], f"{found['shared'][SMALLEST]:.0f}")]
    rows += [
        Row(f"in memory, {SMALLEST}", found["process"][SMALLEST]["grown"], f"{found['process'][SMALLEST]['grown']:.0f}")
    ]
    for name, by in found["servers"].items():
        for rule, style in ((FLOOR, "other"), (SMALLEST, "ours"), ("token_bucket", "ours")):
            value = by["keys"][rule]["grown"]
            rows.append(Row(f"{name}, {rule}", value, f"{value:.0f}", style))
    rows.append(Row("hybrid, a warm key", found["hybrid"], f"{found['hybrid']:.0f}", "second"))
    about = "All in: the key's text, the state and the tables around them"
    mark = (float(PROMISED_LOCAL), f"{PROMISED_LOCAL} bytes, promised locally")
    return charts.bars("Bytes a user", about, rows, mark=mark)


PICTURES = {
    "bench_ratios.svg": (ratios, "memory"),
    "bench_latency.svg": (latency, "latency"),
    "bench_cluster.svg": (cluster, "cluster"),
    "bench_sizing.svg": (sizing, "sizing"),
}  # by file: how it is drawn, and the part without which it is not
