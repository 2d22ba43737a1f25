"""Sections of the page about the library: from the figures of a part to Markdown, ratios first."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.figures import FLOORS, HYBRID, ONE_TASK, OURS
from benchmarks.markdown import NOTHING, duration, number, table, times
from benchmarks.workload import ALGORITHMS

RIGHT = (0.49, 0.51)  # the admitted share of a limiter that counts right: of the traffic that all of them get, half
PEERS = ("limits", "throttled-py", "pyrate-limiter", "token-bucket")

Rows = Sequence[dict[str, Any]]  # of figures.summary
Parts = dict[str, Any]


def us(
    rows: Rows, library: str, algorithm: str | None = None, worker: str | None = None, *, right: bool = True
) -> float | None:
    """Microseconds a check of the fastest row that fits and counts right; None if there is none."""
    fits = [
        row["us"]
        for row in rows
        if "us" in row
        and (not right or RIGHT[0] <= row["admitted"] <= RIGHT[1])
        and row["library"] == library
        and algorithm in (None, row["algorithm"])
        and worker in (None, row["worker"])
    ]
    return min(fits, default=None)


def builds(rows: Rows) -> list[str]:
    """The builds of headgate that ran, the compiled one first."""
    return sorted({row["worker"] for row in rows if row["library"].startswith(OURS)})


def beside_peers(rows: Rows, worker: str, library: str = OURS) -> str:
    """A table: time of a check, then how many times as long each peer takes with the same algorithm."""
    peers = [peer for peer in PEERS if us(rows, peer) is not None]
    body = []
    for algorithm in ALGORITHMS:
        ours = us(rows, library, algorithm, worker)
        if ours is None:
            continue
        cells = [times(theirs / ours) if (theirs := us(rows, peer, algorithm)) else "" for peer in peers]
        body.append((f"`{algorithm}`", duration(ours), f"{1e6 / ours:,.0f}", *cells))
    shown = table(("algorithm", "a check", "checks/s", *(f"{peer} takes" for peer in peers)), body)
    wrong = {(row["library"], f"{row['admitted']:.0%}") for row in rows if "us" in row and miscounts(row)}
    notes = [
        f"{name} admitted {share} in place of half of the checks, and is left out." for name, share in sorted(wrong)
    ]
    return "\n\n".join([shown, *notes])


def miscounts(row: dict[str, Any]) -> bool:
    """Whether a limiter admitted another share than it should; a floor is none."""
    return row["library"] not in FLOORS and not RIGHT[0] <= row["admitted"] <= RIGHT[1]


def absolute(rows: Rows) -> str:
    """All contenders, algorithm by algorithm, fastest first."""
    place = {name: at for at, name in enumerate(ALGORITHMS)}
    ran = sorted((row for row in rows if "us" in row), key=lambda row: (place.get(row["algorithm"], 99), row["us"]))
    processes = len({row["worker"] for row in ran}) > 1
    body = []
    for row in ran:
        name = f"**{row['library']}**" if row["library"].startswith(OURS) else row["library"]
        build = [row["worker"]] if processes else []
        spread = f"{number(row['us_min'])} to {number(row['us_max'])}"
        body.append((row["algorithm"], name, *build, number(row["us"]), spread, f"{row['admitted']:.1%}"))
    head = ("algorithm", "library", *(["process"] if processes else []), "µs a check", "range", "admitted")
    return details("All contenders", table(head, body))


def details(title: str, body: str) -> str:
    """What few want to read, folded."""
    return f"<details markdown><summary>{title}</summary>\n\n{body}\n\n</details>"


def memory(parts: Parts) -> list[str]:
    rows: Rows = parts["memory"]
    blocks = []
    for worker in builds(rows):
        build = "Compiled" if worker == "compiled" else "Plain Python"
        blocks += [f"**{build}**, one thread, beside the same algorithm of each peer:", beside_peers(rows, worker)]
    return [*blocks, absolute(rows)]


def redis(parts: Parts) -> list[str]:
    rows: Rows = parts["redis"]
    body = []
    for row in rows:
        if "us" not in row or row["library"] in FLOORS:
            continue
        server = row["server"]
        name = f"**{row['library']}**" if row["library"] == OURS else row["library"]
        cells = [duration(row[what]) for what in ("p50_us", "p99_us")]
        cells += [f"{server['round_trips']:.2f}", number(server["server_us"])]
        body.append((f"`{row['algorithm']}`", name, *cells))
    place = {f"`{name}`": at for at, name in enumerate(ALGORITHMS)}
    body.sort(key=lambda row: (place.get(row[0], 99), row[1]))
    floor = us(rows, "(empty script)", right=False)
    blocks = ["One thread, one check after another, beside the same algorithm of each peer:"]
    blocks += [beside_peers(rows, builds(rows)[0])]
    if floor:
        blocks.append(
            f"An empty script takes {duration(floor)}: that much is redis-py, the wire and the server's loop."
        )
    head = ("algorithm", "library", "p50", "p99", "round trips", "µs in Redis")
    blocks.append(details("Percentiles, round trips and the server's own time", table(head, body)))
    if "redis threads" in parts:
        threads: Rows = parts["redis threads"]
        blocks += ["Sixteen threads at once:", beside_peers(threads, builds(threads)[0]), absolute(threads)]
    return blocks


def asynchronous(parts: Parts) -> list[str]:
    rows: Rows = parts["async"]
    blocks = ["On Redis, 256 tasks at once:", beside_peers(rows, builds(rows)[0])]
    ours, bare = us(rows, OURS, "token_bucket"), us(rows, ONE_TASK)
    if ours and bare:
        blocks.append(f"A script of the same work by redis-py and one task takes {times(bare / ours)} as long a check.")
    blocks.append(absolute(rows))
    if "async memory" in parts:
        memory: Rows = parts["async memory"]
        blocks += ["In memory, one task:", beside_peers(memory, builds(memory)[0])]
    return blocks


def hybrid(parts: Parts) -> list[str]:
    rows: Rows = parts["hybrid"]
    body = []
    for case in ("admitted", "refused", "Redis away"):
        ours = us(rows, HYBRID, case, right=False)
        if ours is None:
            continue
        others = [us(rows, library, case, right=False) for library in (OURS, "limits")]
        body.append((case, duration(ours), f"{1e6 / ours:,.0f}", *(times(o / ours) if o else "" for o in others)))
    head = ("a call is", "hybrid", "calls/s", "our memory limiter takes", "limits in memory takes")
    found = parts.get("hybrid figures", {})
    names = {
        "p99_us": "p99 of a call while leases are renewed, µs",
        "p99_away_us": "p99 of a call while Redis is away, µs",
        "local_ratio": "share of calls decided without Redis",
        "trips_per_second": "round trips a second, one hot key",
        "trips_per_second_many": "round trips a second, 2,000 warm keys",
        "bytes_per_key": "bytes a warm key",
    }
    figures = [(text, number(found[name])) for name, text in names.items() if name in found]
    return ["One warm key, one thread, a real Redis behind it:", table(head, body), table(("figure", ""), figures)]


def lock(parts: Parts) -> list[str]:
    body = []
    for what, by in parts["lock"].items():
        for library, row in by.items():
            body.append((what, library, *(number(row[name]) for name in ("p50_ms", "p99_ms", "most_ms"))))
    return [table(("lock", "library", "p50, ms", "p99, ms", "most, ms"), body)]


def shared(parts: Parts) -> list[str]:
    rows: Rows = parts["shared"]
    library = next(row["library"] for row in rows if row["library"] != OURS)
    workers = builds(rows)
    body = []
    for algorithm in ALGORITHMS:
        cells: list[str] = []
        for worker in workers:
            ours, memory = us(rows, library, algorithm, worker), us(rows, OURS, algorithm, worker)
            cells += [duration(ours), times(ours / memory)] if ours and memory else ["", ""]
        body.append((f"`{algorithm}`", *cells))
    head = ("one process", *(text for worker in workers for text in (f"a check, {worker}", "times memory")))
    blocks = [table(head, body)]
    if many := parts.get("shared processes"):
        body = []
        for name, by_keys in many.items():
            cells = []
            for rounds in by_keys.values():
                ran = [one["per_second"] for one in rounds if "error" not in one]
                cells.append(f"{median(ran):,.0f}" if ran else NOTHING)
            body.append((f"**{name}**" if name.startswith(OURS) else name, *cells))
        head = ("four processes, decisions a second of all together", "one key", "1,000 keys")
        blocks.append(table(head, body))
    return blocks


def postgresql(parts: Parts) -> list[str]:
    rounds = parts["postgresql"]["rounds"]
    found = {name: median(one[name]["us"] for one in rounds) for name in rounds[0]}
    peer = found.get("pyrate-limiter")
    body = []
    for name, took in found.items():
        against = times(peer / took) if peer and name.startswith(OURS) else ""
        body.append((f"**{name}**" if name.startswith(OURS) else name, duration(took), f"{1e6 / took:,.0f}", against))
    return [f"{parts['postgresql']['server']}:", table(("", "a check", "checks/s", "pyrate-limiter takes"), body)]


def remote(parts: Parts) -> list[str]:
    rounds = parts["remote"]
    found = {one: {name: median(each[one][name] for each in rounds) for name in rounds[0][one]} for one in rounds[0]}
    first = next(iter(found.values()))
    body = [
        (name, *(text for what, value in row.items() for text in (duration(value), times(value / first[what]))))
        for name, row in found.items()
    ]
    return [table(("store", *(text for what in first for text in (what, "of Redis"))), body)]


def budget(parts: Parts) -> list[str]:
    rounds = parts["budget"]
    names = list(next(iter(rounds[0].values())))
    body = []
    for store in rounds[0]:
        taken = {name: median(each[store][name] for each in rounds) for name in names}
        pair, check = taken["reserve and settle"], taken["check"]
        body.append((store, duration(pair), duration(check), times(pair / check)))
    return [table(("store", "reserve and settle", "a check of a limiter", "ratio"), body)]
