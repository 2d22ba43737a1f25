"""Sections of the page about distance, nodes and memory: from the figures of a part to Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.cluster import TASKS_LOAD, THREADS_LOAD
from benchmarks.figures import OURS
from benchmarks.latency import COLD, HYBRID, PEER_STATS, PING, SYNC
from benchmarks.markdown import NOTHING, duration, number, table, times
from benchmarks.page_library import Parts, details
from benchmarks.sizing import FLOOR, PROMISED_CONTENT, PROMISED_LOCAL, PROMISED_MILLION, SMALLEST, TTL_BYTES

CLUSTER_NOTE = """
*Full at* is computed: a whole core for the busiest node, by the CPU time that its share of the checks took. *Measured
here* is what one client got while it shared the machine with all nodes: it cannot grow with them. A check is the same
commands on one node or on six; its CPU time grows because a node with less to do wakes up for single checks, and
because nodes on the same cores take each other's caches.
""".strip()


def latency(parts: Parts) -> list[str]:
    delays: dict[str, dict[str, dict[str, float]]] = parts["latency"]["delays"]
    names = list(next(iter(delays.values())))
    far = [delay for delay in delays if float(delay) >= 5]
    trips = []
    for name in names:
        if name != PING:
            cells = [f"{by[name]['p50'] / by[PING]['p50']:.2f}" for by in (delays[delay] for delay in far)]
            trips.append((name, *(cell if name != HYBRID else "0" for cell in cells)))
    body = [
        (name, *(f"{duration(by[name]['p50'])}, {duration(by[name]['p99'])}" for by in delays.values()))
        for name in names
    ]
    blocks = ["![Half of the checks are done within this time](img/bench_latency.svg)"]
    blocks += ["Round trips that half of the checks pay at most (p50 over that of a PING):"]
    blocks += [table(("", *(f"{delay} ms" for delay in far)), trips)]
    blocks += [details("p50 and p99", table(("", *(f"{delay} ms" for delay in delays)), body))]
    by = delays[far[-1]] if far else {}
    if by and by[PEER_STATS]["p50"] > 1.5 * by[SYNC]["p50"]:
        blocks.append(
            f"At {far[-1]} ms a check of ours takes {duration(by[SYNC]['p50'])} and says what remains and when to come "
            "back; `hit` and `get_window_stats` of limits, which give the same, take "
            f"{duration(by[PEER_STATS]['p50'])}. "
            f"The first call of a key takes a `HybridLimiter` {duration(by[COLD]['p50'])}, every later one "
            f"{duration(by[HYBRID]['p50'])}: a process has one round trip under way at a time, so a key that is new "
            "waits for that one, and then for its own."
        )
    return blocks


def cluster(parts: Parts) -> list[str]:
    loads: dict[str, dict[str, dict[str, Any]]] = parts["cluster"]["loads"]
    blocks = ["![Checks a second until the busiest node is full](img/bench_cluster.svg)"]
    for load, by in loads.items():
        first = next(iter(by.values()))
        body = []
        for count, one in by.items():
            uneven = one["fullest"] * int(count)
            cells = [f"{one['commands']:.2f}", number(one["server_us"]), f"{one['checks_per_trip']:.1f}"]
            cells += [f"{uneven:.3f}", f"{one['busiest']:.1%}", f"{one['full_at']:,.0f}"]
            body.append((count, *cells, times(one["full_at"] / first["full_at"]), f"{one['per_second']:,.0f}"))
        head = [
            "nodes",
            "commands a check",
            "servers' CPU µs",
            "checks a trip",
            "fullest, of a fair share",
            "busiest has",
        ]
        head += ["full at, checks/s", "of one node", "measured here"]
        blocks += [f"**{load}**, Redis {parts['cluster']['version']}:", table(head, body)]
    return [*blocks, CLUSTER_NOTE]


def sizing(parts: Parts) -> list[str]:
    found = parts["sizing"]
    servers: dict[str, Any] = found["servers"]
    head = ["bytes a key"]
    for name in servers:
        head += [f"{name}: `MEMORY USAGE`", "all in"]
    head += ["in process", "`shared://`"]
    content = next(iter(servers.values()))["keys"]
    head.insert(1, "key and value")
    body = []
    for rule in content:
        cells = [f"{content[rule]['content']:.0f}"]
        cells += [f"{by['keys'][rule][what]:.0f}" for by in servers.values() for what in ("usage", "grown")]
        local = [found["process"][rule]["grown"], found["shared"][rule]] if rule in found["process"] else []
        body.append(
            (rule if rule == FLOOR else f"`{rule}`", *cells, *(f"{v:.0f}" for v in local), *[""] * (2 - len(local)))
        )
    blocks = ["![Bytes a user, where the state is kept](img/bench_sizing.svg)"]
    blocks += [promised(found), "Keys such as `user:0000001`, one call each; *all in* counts the server's tables, too:"]
    blocks += [table(head, body), f"A warm key of a `HybridLimiter` takes {found['hybrid']:.0f} bytes in the process."]
    rows = [
        (length, *(f"{by['logs'][length]:,}" for by in servers.values()), f"{size:,.0f}")
        for length, size in found["process logs"].items()
    ]
    blocks += ["Only the log of `sliding_window` grows with use (bytes by the calls in it):"]
    blocks += [table(("calls", *(f"{name}: `MEMORY USAGE`" for name in servers), "in process"), rows)]
    kinds = [
        details(f"The log as Sorted Set, Stream and String, {name}", logs(by["log kinds"]))
        for name, by in servers.items()
    ]
    return [*blocks, *kinds]


def promised(found: dict[str, Any]) -> str:
    """The documents' three promises, beside what was measured."""
    servers: dict[str, Any] = found["servers"]
    sizes = {name: by["keys"][SMALLEST]["content"] for name, by in servers.items()}
    real = {name: by["million"][SMALLEST] for name, by in servers.items()}
    bare = {name: by["keys"][FLOOR]["grown"] for name, by in servers.items()}
    size = max(sizes.values())
    counted = size + TTL_BYTES
    tables = ", ".join(f"{one['used'] / one['keys']:.0f} MB in {name}" for name, one in real.items())
    floor = ", ".join(f"{value:.0f} MB in {name}" for name, value in bare.items())
    local, shared = found["process"][SMALLEST]["grown"], found["shared"][SMALLEST]
    rows = [
        (
            f"about {PROMISED_CONTENT} bytes of key and value a user",
            f"{size:.0f} (`{SMALLEST}`); {counted:.0f} with {TTL_BYTES} for the TTL",
        ),
        (
            f"{PROMISED_MILLION} MB for a million users, counted as key, value and {TTL_BYTES} bytes of TTL",
            f"{counted:.0f} MB",
        ),
        ("the same with the server's own tables", f"{tables}; a bare `SET` with `EX`: {floor}"),
        (
            f"{PROMISED_LOCAL} bytes a user locally",
            f"{shared:.0f} in `shared://`, {local:.0f} in memory, {found['hybrid']:.0f} hybrid",
        ),
    ]
    return "\n".join(["| promised | measured |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def logs(by_length: dict[str, dict[str, dict[str, float]]]) -> str:
    kinds = list(next(iter(by_length.values())))
    head = ["calls", *(f"{kind}, {what}" for kind in kinds for what in ("bytes", "admitted, µs", "denied, µs"))]
    body = []
    for length, row in by_length.items():
        cells = [length]
        for one in row.values():
            cells += [f"{one['bytes']:,.0f}", f"{one['admitted']:.1f}", f"{one['denied']:.1f}"]
        body.append(cells)
    return table(head, body)


def size(parts: Parts) -> list[str]:
    live, floods = parts["size"]["live"], parts["size"]["floods"]
    body = []
    for one in live:
        name = f"**{one['library']}**, {one['worker']}" if one["library"] == OURS else one["library"]
        figure = f"{one['bytes_per_key']:.0f}" if "error" not in one else NOTHING
        body.append((name, one["algorithm"], f"{one.get('keys', 0):,}", figure))
    blocks = [table(("library", "algorithm", "live keys", "bytes a key"), body)]
    rows = [
        (
            one["quota"],
            f"{one['sent']:,}",
            f"{one['held']:,}",
            number(one["us_per_check"]),
            f"{one['rss_after'] / 1e6:,.0f}",
        )
        for one in floods
        if "error" not in one
    ]
    head = ("a flood of distinct keys at", "keys sent", "keys held", "µs a check", "process after, MB")
    return [*blocks, table(head, rows)]


def tasks_and_threads(parts: Parts) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two loads on the Cluster, by the number of nodes."""
    loads = parts["cluster"]["loads"]
    return loads[TASKS_LOAD], loads[THREADS_LOAD]
