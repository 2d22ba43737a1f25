"""The part `latency`: a proxy before the server, farther away in each step."""

from __future__ import annotations

from benchmarks.plan import Plan, Results
from benchmarks.progress import Progress
from benchmarks.report import Report


def latency(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """Half and hundredth slowest of the checks, with replies that come 0 to 50 ms later."""
    from benchmarks import latency as sweep
    from benchmarks.delay_proxy import delayed
    from benchmarks.server import running

    delays = (0, 10, 50) if plan.quick else sweep.DELAYS_MS
    found: dict[str, sweep.Figures] = {}
    progress.begin("latency", len(delays))
    with running(plan.server) as server:
        for delay in delays:
            progress.step(f"{delay} ms")
            with delayed(server.port, delay) as port:
                found[str(delay)] = sweep.measure(port, 0.3 if plan.quick else 1.5, plan.main_build[1])
    progress.end()
    results.parts["latency"] = {"server": server.description, "delays": found}
    report.latency(f"A Redis that is farther away ({server.description}), milliseconds, p50 and p99", found)
    results.judge("latency", sweep.bars(found))
