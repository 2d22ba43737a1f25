"""Medians, ratios and bars, from rounds. No printing here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.team import Row
from benchmarks.workload import ALGORITHMS, Sample

OURS = "headgate"
HYBRID = "headgate hybrid"
FLOORS = ("(one clock read)", "(empty script)")
ONE_TASK = "redis-py, one task"
BYTES_PER_KEY = 300
REFERENCE = ("limits", "fixed_window")  # what the bars for memory are measured against


def times(row: Row) -> list[float]:
    return [sample.us_per_check for sample in row.samples]


def us(row: Row) -> float:
    return median(times(row))


def summary(row: Row) -> dict[str, Any]:
    """Give a contender's medians over its rounds; `min` and `max` show how steady they were."""
    base = {"worker": row.worker, "library": row.library, "algorithm": row.algorithm, "error": row.error}
    if not row.samples:
        return base
    figures = {
        "us": us(row),
        "us_min": min(times(row)),
        "us_max": max(times(row)),
        "checks_per_second": 1e6 / us(row),
        "admitted": sum(sample.admitted for sample in row.samples) / sum(sample.checks for sample in row.samples),
        "checks_per_round": row.samples[0].checks,
        "rounds": times(row),
    }
    first: Sample = row.samples[0]
    if first.p50_us is not None:
        figures["p50_us"] = median(sample.p50_us or 0.0 for sample in row.samples)
        figures["p99_us"] = median(sample.p99_us or 0.0 for sample in row.samples)
    if first.server:
        names = sorted({name for sample in row.samples for name in sample.server})
        figures["server"] = {name: median(sample.server.get(name, 0.0) for sample in row.samples) for name in names}
    return base | figures


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast *ours* is as *peer*: the ratio of medians, and the range of it over single rounds."""

    ours: Row
    peer: Row
    value: float
    low: float
    high: float


def ratio(ours: Row, peer: Row) -> Ratio:
    pairs = [theirs / mine for mine, theirs in zip(times(ours), times(peer), strict=True)]
    return Ratio(ours, peer, us(peer) / us(ours), min(pairs), max(pairs))


def pick(rows: Iterable[Row], library: str, algorithm: str | None = None, worker: str | None = None) -> list[Row]:
    """Choose the rows that ran; None matches anything."""
    return [
        row
        for row in rows
        if row.samples
        and row.library == library
        and (algorithm is None or row.algorithm == algorithm)
        and (worker is None or row.worker == worker)
    ]


def by_algorithm(rows: Iterable[Row]) -> list[Row]:
    """Order the rows that ran: algorithm by algorithm, fastest first."""
    place = {name: number for number, name in enumerate(ALGORITHMS)}
    ran = [row for row in rows if row.samples]
    return sorted(ran, key=lambda row: (place.get(row.algorithm, len(place)), us(row)))


def peers_of(rows: Sequence[Row], algorithm: str) -> list[Row]:
    """List the peers' rows of the same algorithm, fastest first, each library once."""
    first: dict[str, Row] = {}
    for row in by_algorithm(rows):
        if row.algorithm == algorithm and not row.library.startswith(OURS) and row.library not in (*FLOORS, ONE_TASK):
            first.setdefault(row.library, row)
    return list(first.values())


def fastest(rows: Iterable[Row], library: str) -> list[Row]:
    return sorted(pick(rows, library), key=us)[:1]


def beside(rows: Iterable[Row], ours: Row, peer: Row) -> Row:
    """Prefer the run of *peer* in the same process as *ours*, where there is one."""
    same = pick(rows, peer.library, peer.algorithm, ours.worker)
    return same[0] if same else peer


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise of speed or size, and what this run says of it."""

    what: str
    need: str
    measured: str
    met: bool


def at_least(what: str, need: float, found: Ratio) -> Bar:
    measured = f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
    return Bar(what, f">= {need:g}", measured, found.value >= need)


def memory_bars(rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for worker, need in (("compiled", 15.0), ("pure", 4.0)):
        for ours in pick(rows, OURS, "token_bucket", worker):
            for peer in pick(rows, *REFERENCE, worker):
                what = f"memory, {worker}, token_bucket: times as fast as {peer.title}"
                bars.append(at_least(what, need, ratio(ours, peer)))
    return bars


def redis_bars(rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for algorithm, need in (("token_bucket", 1.0), ("sliding_window_counter", 1.0), ("fixed_window", 0.9)):
        for ours in pick(rows, OURS, algorithm):
            for peer in peers_of(rows, algorithm)[:1]:
                what = f"redis, {algorithm}: times as fast as the fastest peer, {peer.library}"
                bars.append(at_least(what, need, ratio(ours, peer)))
    for ours in pick(rows, OURS):
        trips = median(sample.server["round_trips"] for sample in ours.samples)
        bars.append(Bar(f"redis, {ours.algorithm}: round trips a check", "1", f"{trips:.4f}", abs(trips - 1) < 0.001))
    return bars


def threads_bars(rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for ours in pick(rows, OURS, "token_bucket"):
        for peer in fastest(rows, "limits"):
            what = f"redis, threads, token_bucket: times as fast as {peer.title}"
            bars.append(at_least(what, 2.5, ratio(ours, peer)))
    return bars


def async_bars(rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for ours in pick(rows, OURS, "token_bucket"):
        for peer in [*fastest(rows, "limits"), *fastest(rows, ONE_TASK)]:
            bars.append(at_least(f"async redis, token_bucket: times as fast as {peer.title}", 5.0, ratio(ours, peer)))
    return bars


def hybrid_bars(rows: Sequence[Row], found: dict[str, Any], build: str) -> list[Bar]:
    bars = []
    for ours in pick(rows, HYBRID, "admitted"):
        for peer in pick(rows, "limits", "admitted"):
            need = 10.0 if build == "compiled" else 2.0
            bars.append(at_least(f"hybrid, {build}: times as fast as limits in memory", need, ratio(ours, peer)))
        for memory in pick(rows, OURS, "admitted"):
            cost = ratio(memory, ours)
            measured = f"{cost.value:.2f} ({cost.low:.2f} to {cost.high:.2f})"
            what = f"hybrid, {build}: cost of a call, in those of our memory limiter"
            bars.append(Bar(what, "<= 2.5", measured, cost.value <= 2.5))
    if "error" in found:
        return [*bars, Bar("hybrid: figures of single calls", "to run", found["error"], False)]
    most = {
        "p99_us": ("p99 of a call, us, while the synchroniser works", 5.0),
        "p99_away_us": ("p99 of a call, us, while Redis is away", 5.0),
        "trips_per_second": ("round trips a second for one hot key", 10.0),
        "trips_per_second_many": ("round trips a second for 2,000 warm keys", 100.0),
        "bytes_per_key": ("bytes a warm key", 600.0),
    }
    for name, (what, limit) in most.items():
        bars.append(Bar(f"hybrid, {build}: {what}", f"<= {limit:g}", f"{found[name]:.2f}", found[name] <= limit))
    return bars


def lock_bars(found: dict[str, dict[str, dict[str, float]]]) -> list[Bar]:
    bars = []
    for what, by in found.items():
        ours, peer = by[OURS]["p99_ms"], by["redis-py"]["p99_ms"]
        measured = f"{ours:.2f} (redis-py {peer:.2f})"
        bars.append(Bar(f"lock, {what}: p99 of an acquisition, ms", "< 50", measured, ours < 50))
    return bars


def shared_bars(rows: Sequence[Row], library: str) -> list[Bar]:
    """Compiled: against our memory limiter in the same process. Plain: microseconds."""
    bars = []
    for row in by_algorithm(rows):
        if row.library == library and row.worker == "pure":
            bars.append(Bar(f"shared, plain, {row.algorithm}, us", "<= 5", f"{us(row):.2f}", us(row) <= 5))
        elif row.library == library:
            memory = us(row) / us(pick(rows, OURS, row.algorithm, row.worker)[0])
            bars.append(Bar(f"shared, {row.algorithm}, time of memory", "<= 2.5", f"{memory:.2f}", memory <= 2.5))
    return bars


def postgresql_bars(found: Mapping[str, float]) -> list[Bar]:
    """Checks against the fastest peer's, and many tasks' against a bare statement; *found*: microseconds by name."""
    bars = []
    peer = min((took for name, took in found.items() if not name.startswith((OURS, "SELECT 1"))), default=None)
    for name, took in found.items():
        if name.startswith(OURS) and "tasks" in name:
            times = found["SELECT 1 async"] / took
            bars.append(Bar(f"postgresql, {name}: times SELECT 1", ">= 1.25", f"{times:.2f}", times >= 1.25))
        elif name.startswith(OURS) and peer is not None:
            times = peer / took
            bars.append(Bar(f"postgresql, {name}: times the fastest peer", ">= 3", f"{times:.1f}", times >= 3))
    return bars


def size_bars(live: Sequence[dict[str, Any]], floods: Sequence[dict[str, Any]]) -> list[Bar]:
    bars = []
    for figures in live:
        if figures["library"] == OURS and "error" not in figures:
            size = figures["bytes_per_key"]
            what = f"memory store, {figures['worker']}, {figures['algorithm']}: bytes/key of {figures['keys']:,}"
            bars.append(Bar(what, f"<= {BYTES_PER_KEY}", f"{size:.0f}", size <= BYTES_PER_KEY))
    for figures in floods:
        if "error" not in figures:
            flood = f"flood of {figures['sent']:,} keys at {figures['quota']}"
            held, most, kept = figures["held"], figures["max_keys"], figures["spent_key_kept"]
            bars.append(Bar(f"{flood}: keys held", f"<= {most:,}", f"{held:,}", held <= most))
            bars.append(Bar(f"{flood}: a key that was spent is still", "yes", "yes" if kept else "no", kept))
    return bars
