"""The parts about the library: one function each, which measures, reports and judges."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from benchmarks import figures
from benchmarks.figures import ONE_TASK, OURS, REFERENCE
from benchmarks.plan import Plan, Results, keep
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.size import CONTENDERS as SIZED
from benchmarks.size import SPENT, SPENT_FLOOD
from benchmarks.team import ROOT, Row, Worker, interleave, speed_order
from benchmarks.workload import QUOTA

if TYPE_CHECKING:
    from benchmarks.server import Server  # memory and size need no Redis client


def beside_reference(row: Row) -> str:
    """Put what a bar for memory compares next to each other, and of the rest each algorithm."""
    return row.worker if (row.library, row.algorithm) in ((OURS, "token_bucket"), REFERENCE) else row.algorithm


def beside_limits(row: Row) -> str:
    """Put what a bar for threads or asyncio compares next to each other, and of the rest each algorithm."""
    compared = row.library in ("limits", ONE_TASK) or (row.library, row.algorithm) == (OURS, "token_bucket")
    return "bar" if compared else row.algorithm


def memory(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """Each build beside the reference peer in one process; all other peers in a process of their own."""
    library, algorithm = REFERENCE
    beside = [library] if library in plan.peers else []
    with ExitStack() as stack:
        workers = []
        for name, path in plan.builds.items():
            worker = stack.enter_context(Worker(name, speed_order("memory", [OURS, *beside], plan.scale), path))
            worker.contenders = [one for one in worker.contenders if one[0] == OURS or one == REFERENCE]
            workers.append(worker)
        others = stack.enter_context(
            Worker("peers", speed_order("memory", [*plan.peers, "(one clock read)"], plan.scale))
        )
        others.contenders = [one for one in others.contenders if one != REFERENCE]
        rows = interleave("memory", [*workers, others], plan.rounds, progress, beside_reference)
        keep(results, "memory", rows, [*workers, others])
    report.times(f"Memory, one thread, {plan.scale.memory_keys:,} keys, {QUOTA}", rows)
    against = {row.title: row for row in figures.pick(rows, library, algorithm)}
    report.ratios("Memory: headgate is this many times as fast as", rows, against)
    results.judge("memory", figures.memory_bars(rows))


def redis(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """All in one process: the server and the round trip weigh more than anything a neighbour could do."""
    name, path = plan.main_build
    libraries = [OURS, *(peer for peer in plan.peers if peer != "token-bucket"), "(empty script)"]
    with Worker(name, speed_order("redis", libraries, plan.scale, server.url), path) as worker:
        rows = interleave("redis", [worker], plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "redis", rows, [worker])
    report.times(f"Redis ({results.server}), one thread, {plan.scale.redis_keys:,} keys, {QUOTA}", rows)
    report.commands(rows)
    report.ratios("Redis: headgate is this many times as fast as", rows)
    results.judge("redis", figures.redis_bars(rows))

    libraries.remove("(empty script)")
    with Worker(name, speed_order("redis threads", libraries, plan.scale, server.url), path) as worker:
        rows = interleave("redis threads", [worker], plan.rounds, progress, beside_limits)
        keep(results, "redis threads", rows, [worker])
    report.times(f"Redis ({results.server}), {plan.scale.redis_threads} threads, {QUOTA}", rows)
    against = {row.title: row for row in figures.fastest(rows, "limits")}
    report.ratios("Redis, threads: headgate is this many times as fast as", rows, against)
    results.judge("redis", figures.threads_bars(rows))


def asynchronous(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    name, path = plan.main_build
    peers = [peer for peer in plan.peers if peer != "token-bucket"]
    libraries = [OURS, *peers, "headgate, one task", ONE_TASK]
    with Worker(name, speed_order("async", libraries, plan.scale, server.url), path) as worker:
        rows = interleave("async", [worker], plan.rounds, progress, beside_limits)
        keep(results, "async", rows, [worker])
    report.times(f"Async Redis ({results.server}), {plan.scale.async_tasks} tasks at once, {QUOTA}", rows)
    against = {row.title: row for library in ("limits", ONE_TASK) for row in figures.fastest(rows, library)}
    report.ratios("Async Redis: headgate is this many times as fast as", rows, against)
    results.judge("async", figures.async_bars(rows))

    libraries = [OURS, *(peer for peer in peers if peer != "pyrate-limiter")]
    with Worker(name, speed_order("async memory", libraries, plan.scale), path) as worker:
        rows = interleave("async memory", [worker], plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "async memory", rows, [worker])
    report.times(f"Async memory, one task, {plan.scale.memory_keys:,} keys, {QUOTA}", rows)
    report.ratios("Async memory: headgate is this many times as fast as", rows)


def hybrid(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """Each build beside our memory limiter and the reference peer, in one process; then figures of single calls."""
    name, path = plan.main_build
    libraries = [figures.HYBRID, OURS, *(["limits"] if "limits" in plan.peers else [])]
    with Worker(name, speed_order("hybrid", libraries, plan.scale, server.url), path) as worker:
        rows = interleave("hybrid", [worker], plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "hybrid", rows, [worker])
    report.times(f"Hybrid, one warm key, one thread, Redis behind it ({name})", rows)
    found: dict[str, Any] = {}
    weights = []
    progress.begin("hybrid", 4)
    for what in ("figures", "weight", "weight", "weight"):  # what a process grows by is never twice the same
        progress.step(what)
        with Worker(name, {"part": "hybrid figures", "libraries": [figures.HYBRID], "url": server.url}, path) as child:
            message = child.run(figures.HYBRID, what)
        result = message.get("result", message)
        found |= result
        if "bytes_per_key" in result:
            weights.append(result["bytes_per_key"])
    progress.end()
    if weights:
        found |= {"bytes_per_key": statistics.median(weights), "bytes_per_key_rounds": weights}
    results.parts["hybrid figures"] = found
    results.judge("hybrid", figures.hybrid_bars(rows, found, name))


def lock(plan: Plan, server: Server, results: Results, _progress: Progress, report: Report) -> None:
    """In a process of its own, which imports the build and starts another to hand locks over."""
    _, path = plan.main_build
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks.lock", "measure", server.url, str(plan.rounds)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results.parts["lock"] = found = json.loads(done.stdout)
    report.locks(f"Lock ({results.server}), milliseconds to acquire", found)
    results.judge("lock", figures.lock_bars(found))


def size(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """One fresh process for each figure: memory that was freed before would hide what is taken now."""
    live = []
    for library, algorithms in SIZED.items():
        peer: list[tuple[str, str | None]] = [("peers", None)] if library in plan.peers else []
        processes = list(plan.builds.items()) if library == OURS else peer
        for name, path in processes:
            for algorithm in algorithms:
                live.append(weigh(name, path, library, algorithm, plan.scale.size_keys, progress))
    name, path = plan.main_build
    floods = [
        weigh(name, path, "flood", QUOTA, plan.flood, progress),
        weigh(name, path, "flood", SPENT, min(plan.flood, SPENT_FLOOD), progress),
    ]
    results.parts["size"] = {"live": live, "floods": floods}
    report.sizes(live)
    report.floods(floods)
    results.judge("size", figures.size_bars(live, floods))


def shared(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """Each build beside our memory limiter in one process; then four processes, beside what else they could share."""
    from benchmarks import shared as many

    with ExitStack() as stack:
        order = speed_order("shared", [many.OURS, OURS], plan.scale)
        workers = [stack.enter_context(Worker(name, order, path)) for name, path in plan.builds.items()]
        rows = interleave("shared", workers, plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "shared", rows, workers)
    report.times(f"Shared, one process, {plan.scale.memory_keys:,} keys, {QUOTA}, beside memory", rows)
    seconds = 0.3 if plan.quick else 2.0
    cases = [(name, keys) for name in many.CONTENDERS for keys in (1, 1000)]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {"1": [], "1000": []} for name in many.CONTENDERS}
    progress.begin("processes", plan.rounds * len(cases))
    for _ in range(plan.rounds):
        for name, keys in cases:
            progress.step(f"{name}, {keys} keys")
            done = many.measure(name, many.PROCESSES, keys, seconds, server.socket, plan.main_build[1])
            found[name][str(keys)].append(done)
    progress.end()
    results.parts["shared processes"] = found
    report.processes(f"{many.PROCESSES} processes, one limit for all, a quota that is never reached", found)
    results.judge("shared", figures.shared_bars(rows, many.OURS))


def postgresql(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """Each algorithm, a peer, and what the round trip costs by itself."""
    from benchmarks import postgresql as database

    with database.running() as (url, description):
        progress.begin("postgresql", plan.rounds + 1)
        rounds = []
        for number in range(plan.rounds + 1):
            progress.step(description)
            done = database.measure(url, plan.scale.redis_keys, plan.main_build[1])
            if number:  # the first is for warming up
                rounds.append(done)
        progress.end()
    results.parts["postgresql"] = {"server": description, "rounds": rounds}
    found = database.medians(rounds)
    report.postgresql(f"{description}, {QUOTA}, one check after another, and {database.TASKS} tasks", found)
    results.judge("postgresql", figures.postgresql_bars(found))


def remote(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """A service as the store, beside Redis itself: half and hundredth slowest of the checks."""
    from benchmarks import remote as stores

    path = plan.main_build[1]
    with stores.running(server.url, path) as urls:
        progress.begin("remote", plan.rounds + 1)
        rounds = []
        for number in range(plan.rounds + 1):
            progress.step("headgate://")
            done = stores.measure(urls, plan.scale.redis_keys, path)
            if number:  # the first is for warming up
                rounds.append(done)
        progress.end()
    results.parts["remote"] = rounds
    report.remote(f"A service as a store, {QUOTA}, microseconds", stores.medians(rounds))
    results.judge("remote", stores.bars(rounds))


def budget(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """A reservation and its settlement, beside a check of a limiter."""
    from benchmarks import budget as budgets

    build, path = plan.main_build
    times = 200 if plan.quick else 1000
    progress.begin("budget", plan.rounds)
    rounds = []
    for _ in range(plan.rounds):
        progress.step("budget")
        rounds.append(budgets.measure(server.url, times, path))
    progress.end()
    results.parts["budget"] = rounds
    report.remote(f"Budget, {budgets.QUOTA}, two amounts, microseconds", budgets.medians(rounds))
    results.judge("budget", budgets.bars(rounds, build == "compiled"))


def weigh(worker: str, path: str | None, library: str, algorithm: str, keys: int, progress: Progress) -> dict[str, Any]:
    progress.begin("size", 100)
    with Worker(worker, {"part": "size", "libraries": [library], "keys": keys}, path) as child:
        text = f"{library} {algorithm} ({worker}), {keys:,} keys"
        message = child.run(library, algorithm, lambda share: progress.part(share, text))
    progress.end()
    found: dict[str, Any] = message.get("result", message)
    return {"worker": worker, "library": library, "algorithm": algorithm} | found
