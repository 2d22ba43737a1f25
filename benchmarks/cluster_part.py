"""The part `cluster`: the same load on more and more nodes."""

from __future__ import annotations

from typing import Any

from benchmarks.plan import Plan, Results
from benchmarks.progress import Progress
from benchmarks.report import Report


def cluster(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """Checks a second, the servers' time a check and the spread of keys, over one to six nodes."""
    from benchmarks import cluster as spread
    from benchmarks.cluster_nodes import running

    loads = (spread.THREADS_LOAD, spread.TASKS_LOAD)
    rounds = 1 if plan.quick else min(plan.rounds, 3)
    counts = (1, 6) if plan.quick else spread.COUNTS
    found: dict[str, dict[str, Any]] = {load: {} for load in loads}
    progress.begin("cluster", len(counts) * len(loads) * rounds)
    version = ""
    for count in counts:
        with running(plan.server, count) as nodes:
            info = nodes[0].client.info("server")
            version = str(info.get("valkey_version", info["redis_version"]))
            made: dict[str, list[dict[str, Any]]] = {load: [] for load in loads}
            for _ in range(rounds):
                for load in loads:
                    progress.step(f"{count} nodes, {load}")
                    made[load].append(spread.measure(load, nodes, 0.5 if plan.quick else 2.0, plan.main_build[1]))
            for load in loads:
                found[load][str(count)] = spread.medians(made[load])
    progress.end()
    results.parts["cluster"] = {"version": version, "loads": found}
    report.cluster(f"A Cluster of {counts[0]} to {counts[-1]} nodes ({version}), all on this machine", found)
    results.judge("cluster", spread.bars(found))
