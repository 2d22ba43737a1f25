"""What the command line asks for, and what a run has found so far."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import OURS, Bar
from benchmarks.team import Row, Worker, speed_order
from benchmarks.workload import QUICK, Scale

JSON = Path("build/bench.json")
ON_REDIS = ("redis", "async", "hybrid", "lock", "service", "resp", "grpc", "shared", "remote", "budget")
WITHOUT_REDIS = ("postgresql", "web", "latency", "cluster", "sizing", "size")  # or with servers of their own
PARTS = ("memory", *ON_REDIS, *WITHOUT_REDIS)
MODULES = {
    "limits": "limits",
    "throttled-py": "throttled",
    "pyrate-limiter": "pyrate_limiter",
    "token-bucket": "token_bucket",
}


@dataclass(slots=True)
class Plan:
    """What the command line asked for. *builds* maps a worker's name to what goes first on its module path."""

    parts: list[str]
    rounds: int
    scale: Scale
    flood: int
    server: str
    builds: dict[str, str | None]
    peers: list[str]
    strict: bool
    json: Path
    grpc_floods: bool = False

    @property
    def quick(self) -> bool:
        return self.scale is QUICK

    @property
    def main_build(self) -> tuple[str, str | None]:
        return next(iter(self.builds.items()))


@dataclass(slots=True)
class Results:
    """What was found. *bars* and *seconds* are by part; *missing* says why a part has no figures."""

    parts: dict[str, Any] = field(default_factory=dict)
    bars: dict[str, list[Bar]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # parts that raised an error
    versions: dict[str, str] = field(default_factory=dict)
    server: str | None = None

    def judge(self, part: str, bars: Sequence[Bar]) -> None:
        self.bars.setdefault(part, []).extend(bars)


def arguments(argv: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="headgate side by side with its peers")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only (may be given again)")
    parser.add_argument("--rounds", type=int, help="rounds that count, after one of warm-up (default 7; quick 3)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the traffic: to see that it works")
    parser.add_argument("--flood", type=int, help="distinct keys in the flood (default 10,000,000; quick 1,500,000)")
    parser.add_argument("--floods", action="store_true", help="grpc: p99 of a polite client beside floods of frames")
    parser.add_argument("--server", default="redis", help="redis (default), valkey, or the path of a server program")
    parser.add_argument("--compiled-path", metavar="DIR", help="import the compiled headgate from here")
    parser.add_argument("--pure-path", metavar="DIR", help="import the pure Python headgate from here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    builds = {"compiled": options.compiled_path, "pure": options.pure_path}
    given: dict[str, str | None] = {name: str(Path(path).resolve()) for name, path in builds.items() if path}
    return Plan(
        parts=options.only or list(PARTS),
        rounds=options.rounds or (3 if options.quick else 7),
        scale=QUICK if options.quick else Scale(),
        flood=options.flood or (1_500_000 if options.quick else 10_000_000),
        server=options.server,
        builds=given or {"installed": None},
        peers=[name for name, module in MODULES.items() if find_spec(module) is not None],
        strict=options.strict,
        json=options.json,
        grpc_floods=options.floods,
    )


def check_builds(plan: Plan) -> None:
    """Ask each build whether it is compiled: a benchmark of the wrong build is worse than none."""
    named: dict[str, str | None] = {}
    for name, path in plan.builds.items():
        with Worker(name, speed_order("memory", [OURS], QUICK), path) as worker:
            actual = "compiled" if worker.compiled else "pure"
        if name != "installed" and name != actual:
            sys.exit(f"--{name}-path {path}: the headgate found there is {actual}")
        named[actual] = path
    plan.builds = named


def keep(results: Results, part: str, rows: Sequence[Row], workers: Sequence[Worker]) -> None:
    results.parts[part] = [figures.summary(row) for row in rows]
    for worker in workers:
        results.versions.update(worker.versions)
