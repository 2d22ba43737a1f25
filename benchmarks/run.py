"""The command: run the parts that were chosen, each on a server if it needs one; report, and keep all figures."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import library_parts as library
from benchmarks import service_parts as service
from benchmarks.cluster_part import cluster
from benchmarks.latency_part import latency
from benchmarks.plan import MODULES, ON_REDIS, PARTS, Plan, Results, arguments, check_builds
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.sizing_part import sizing
from benchmarks.workload import QUOTA

ALONE: dict[str, Callable[[Plan, Results, Progress, Report], None]] = {
    "memory": library.memory,
    "postgresql": library.postgresql,
    "web": service.web,
    "latency": latency,
    "cluster": cluster,
    "sizing": sizing,
    "size": library.size,
}
WITH_SERVER = {
    "redis": library.redis,
    "async": library.asynchronous,
    "hybrid": library.hybrid,
    "lock": library.lock,
    "service": service.service,
    "resp": service.resp,
    "grpc": service.grpc,
    "shared": library.shared,
    "remote": library.remote,
    "budget": library.budget,
}


def run(plan: Plan, save: Callable[[Results], None]) -> Results:
    """Run the parts in turn. One that fails is named, and the others run all the same."""
    results, progress, report = Results(), Progress(), Report()
    check_builds(plan)
    missing = [name for name in MODULES if name not in plan.peers]
    if missing:
        report.say(f"Not installed, so not compared: {', '.join(missing)}")
    with redis_for(plan) as server:
        results.server = server and server.description
        for part in PARTS:
            if part not in plan.parts:
                continue
            begun = time.monotonic()
            try:
                if part in ALONE:
                    ALONE[part](plan, results, progress, report)
                else:
                    WITH_SERVER[part](plan, server, results, progress, report)
            except Exception as error:
                traceback.print_exc()
                results.missing[part] = f"{type(error).__name__}: {error}"
                results.failed.append(part)
            results.seconds[part] = round(time.monotonic() - begun, 1)
            if part in results.missing:
                report.say(f"{part}: not measured, {results.missing[part]}")
            save(results)
    report.bars([bar for bars in results.bars.values() for bar in bars])
    report.seconds(results.seconds)
    return results


def redis_for(plan: Plan) -> Any:
    """A server for the parts that share one; None where none of them was chosen."""
    if not set(ON_REDIS) & set(plan.parts):
        return nullcontext(None)
    from benchmarks.server import running  # memory and size need no Redis client

    return running(plan.server)


def processor() -> str:
    """What the system calls its processor; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def commit() -> str:
    """The commit that was measured; with `+` if files have changed since. Empty outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def as_json(plan: Plan, results: Results, started: datetime) -> dict[str, Any]:
    machine = {"cores": os.cpu_count(), "arch": platform.machine(), "system": platform.system()}
    return {
        "started": started.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine | {"processor": processor()},
        "python": platform.python_version(),
        "builds": list(plan.builds),
        "versions": results.versions,
        "server": results.server,
        "quota": QUOTA,
        "quick": plan.quick,
        "scale": asdict(plan.scale),
        "rounds": plan.rounds,
        "seconds": results.seconds,
        "missing": results.missing,
        "parts": results.parts,
        "bars": [{"part": part, **asdict(bar)} for part, bars in results.bars.items() for bar in bars],
    }


def main(argv: Sequence[str] | None = None) -> None:
    plan = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the workers are stopped, too
    started = datetime.now(UTC)
    plan.json.parent.mkdir(parents=True, exist_ok=True)

    def save(results: Results) -> None:
        plan.json.write_text(json.dumps(as_json(plan, results, started), indent=1) + "\n")

    results = run(plan, save)
    print(f"All rounds: {plan.json}")
    missed = [bar for bars in results.bars.values() for bar in bars if not bar.met]
    if results.failed or (plan.strict and missed):
        sys.exit(1)
