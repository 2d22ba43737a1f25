"""The command: choose parts, start workers and a server, interleave rounds, report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks import figures
from benchmarks.figures import ONE_TASK, OURS, REFERENCE, Bar
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.size import CONTENDERS as SIZED
from benchmarks.size import SPENT, SPENT_FLOOD
from benchmarks.team import ROOT, Row, Worker, interleave, speed_order
from benchmarks.workload import QUICK, QUOTA, Scale

JSON = Path("build/bench.json")
PARTS: tuple[str, ...] = ("memory", "redis", "async", "hybrid", "lock", "size", "service", "resp", "grpc", "web")
PARTS += ("shared", "postgresql", "remote", "budget")
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
    def main_build(self) -> tuple[str, str | None]:
        return next(iter(self.builds.items()))


@dataclass(slots=True)
class Results:
    parts: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    server: str | None = None


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
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench.json"), metavar="FILE", help="default: %(default)s"
    )
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
    results.bars += figures.memory_bars(rows)


def redis(plan: Plan, url: str, results: Results, progress: Progress, report: Report) -> None:
    """All in one process: the server and the round trip weigh more than anything a neighbour could do."""
    name, path = plan.main_build
    libraries = [OURS, *(peer for peer in plan.peers if peer != "token-bucket"), "(empty script)"]
    with Worker(name, speed_order("redis", libraries, plan.scale, url), path) as worker:
        rows = interleave("redis", [worker], plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "redis", rows, [worker])
    report.times(f"Redis ({results.server}), one thread, {plan.scale.redis_keys:,} keys, {QUOTA}", rows)
    report.commands(rows)
    report.ratios("Redis: headgate is this many times as fast as", rows)
    results.bars += figures.redis_bars(rows)

    libraries.remove("(empty script)")
    with Worker(name, speed_order("redis threads", libraries, plan.scale, url), path) as worker:
        rows = interleave("redis threads", [worker], plan.rounds, progress, beside_limits)
        keep(results, "redis threads", rows, [worker])
    report.times(f"Redis ({results.server}), {plan.scale.redis_threads} threads, {QUOTA}", rows)
    against = {row.title: row for row in figures.fastest(rows, "limits")}
    report.ratios("Redis, threads: headgate is this many times as fast as", rows, against)
    results.bars += figures.threads_bars(rows)


def asynchronous(plan: Plan, url: str, results: Results, progress: Progress, report: Report) -> None:
    name, path = plan.main_build
    peers = [peer for peer in plan.peers if peer != "token-bucket"]
    libraries = [OURS, *peers, "headgate, one task", ONE_TASK]
    with Worker(name, speed_order("async", libraries, plan.scale, url), path) as worker:
        rows = interleave("async", [worker], plan.rounds, progress, beside_limits)
        keep(results, "async", rows, [worker])
    report.times(f"Async Redis ({results.server}), {plan.scale.async_tasks} tasks at once, {QUOTA}", rows)
    against = {row.title: row for library in ("limits", ONE_TASK) for row in figures.fastest(rows, library)}
    report.ratios("Async Redis: headgate is this many times as fast as", rows, against)
    results.bars += figures.async_bars(rows)

    libraries = [OURS, *(peer for peer in peers if peer != "pyrate-limiter")]
    with Worker(name, speed_order("async memory", libraries, plan.scale), path) as worker:
        rows = interleave("async memory", [worker], plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "async memory", rows, [worker])
    report.times(f"Async memory, one task, {plan.scale.memory_keys:,} keys, {QUOTA}", rows)
    report.ratios("Async memory: headgate is this many times as fast as", rows)


def hybrid(plan: Plan, url: str, results: Results, progress: Progress, report: Report) -> None:
    """Each build beside our memory limiter and the reference peer, in one process; then figures of single calls."""
    name, path = plan.main_build
    libraries = [figures.HYBRID, OURS, *(["limits"] if "limits" in plan.peers else [])]
    with Worker(name, speed_order("hybrid", libraries, plan.scale, url), path) as worker:
        rows = interleave("hybrid", [worker], plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "hybrid", rows, [worker])
    report.times(f"Hybrid, one warm key, one thread, Redis behind it ({name})", rows)
    found: dict[str, Any] = {}
    weights = []
    progress.begin("hybrid", 4)
    for what in ("figures", "weight", "weight", "weight"):  # what a process grows by is never twice the same
        progress.step(what)
        with Worker(name, {"part": "hybrid figures", "libraries": [figures.HYBRID], "url": url}, path) as child:
            message = child.run(figures.HYBRID, what)
        result = message.get("result", message)
        found |= result
        if "bytes_per_key" in result:
            weights.append(result["bytes_per_key"])
    progress.end()
    if weights:
        found |= {"bytes_per_key": statistics.median(weights), "bytes_per_key_rounds": weights}
    results.parts["hybrid figures"] = found
    results.bars += figures.hybrid_bars(rows, found, name)


def lock(plan: Plan, url: str, results: Results, report: Report) -> None:
    """In a process of its own, which imports the build and starts another to hand locks over."""
    _, path = plan.main_build
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks.lock", "measure", url, str(plan.rounds)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results.parts["lock"] = found = json.loads(done.stdout)
    report.locks(f"Lock ({results.server}), milliseconds to acquire", found)
    results.bars += figures.lock_bars(found)


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
    results.bars += figures.size_bars(live, floods)


def service(plan: Plan, url: str, results: Results, progress: Progress, report: Report) -> None:
    """Over HTTP: one worker on memory and on Redis beside a bare handler, and two instances that share a limit."""
    from benchmarks import service as http  # needs granian, which the other parts do not

    _, path = plan.main_build
    quick = plan.scale is QUICK
    with http.script() as script:
        contenders = http.throughput(url, path, plan.rounds, 1 if quick else 3, script, progress)
        shared = http.overload(url, path, 4 if quick else 20, script, progress)
        hybrid = http.overload(url, path, 4 if quick else 20, script, progress, "hybrid = true\n")
    results.parts["service"] = {
        "client": http.client_name(),
        "contenders": [asdict(one) for one in contenders],
        "overload": asdict(shared),
        "overload_hybrid": asdict(hybrid),
    }
    report.service(contenders, http.client_name())
    results.bars += http.bars(contenders, shared, hybrid)


def resp(plan: Plan, url: str, results: Results, progress: Progress, report: Report) -> None:
    """Over the Redis protocol: one worker on memory and on Redis beside a PING of Redis."""
    from benchmarks import resp as protocol

    if not protocol.available():
        report.say("resp: not measured, there is no redis-benchmark on the path")
        return
    targets = protocol.throughput(url, plan.main_build[1], plan.rounds, plan.scale is QUICK, progress)
    results.parts["resp"] = [asdict(one) for one in targets]
    report.resp(targets)
    results.bars += protocol.bars(targets)


def grpc(plan: Plan, url: str, results: Results, progress: Progress, report: Report) -> None:
    """Envoy's rate-limit service: one worker on memory beside grpcio.aio, and on Redis beside its HTTP port."""
    from benchmarks import grpc_calls as calls

    if absent := calls.missing():
        report.say(f"grpc: not measured, {absent}")
        return
    targets = calls.throughput(url, plan.main_build[1], plan.rounds, 1 if plan.scale is QUICK else 3, progress)
    results.parts["grpc"] = [asdict(one) for one in targets]
    report.grpc(targets)
    results.bars += calls.bars(targets)
    if plan.grpc_floods:
        from benchmarks import grpc_floods

        seconds = 1 if plan.scale is QUICK else 3
        floods = grpc_floods.measure(plan.main_build[1], min(plan.rounds, 3), seconds, progress)
        results.parts["grpc floods"] = [asdict(one) for one in floods]
        report.grpc_floods(floods)
        results.bars += grpc_floods.bars(floods)


def web(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """Over HTTP: FastAPI and Flask with one limit, beside the same application without, and beside a peer."""
    from benchmarks import web as doors  # needs frameworks and servers, which the other parts do not
    from benchmarks.service import client_name, script

    _, path = plan.main_build
    with script() as file:
        # gunicorn's threads make single turns differ by a tenth and more: many short ones, whose median holds still
        rounds, seconds = (plan.rounds, 1) if plan.scale is QUICK else (3 * plan.rounds, 2)
        found = doors.throughput(path, rounds, seconds, file, progress)
    results.parts["web"] = {
        "client": client_name(),
        **{framework: [asdict(one) for one in contenders] for framework, contenders in found.items()},
    }
    for framework, contenders in found.items():
        report.web(framework, contenders, client_name())
    results.bars += doors.bars(found)


def shared(plan: Plan, socket: str, results: Results, progress: Progress, report: Report) -> None:
    """Each build beside our memory limiter in one process; then four processes, beside what else they could share."""
    from benchmarks import shared as many

    with ExitStack() as stack:
        order = speed_order("shared", [many.OURS, OURS], plan.scale)
        workers = [stack.enter_context(Worker(name, order, path)) for name, path in plan.builds.items()]
        rows = interleave("shared", workers, plan.rounds, progress, attrgetter("algorithm"))
        keep(results, "shared", rows, workers)
    report.times(f"Shared, one process, {plan.scale.memory_keys:,} keys, {QUOTA}, beside memory", rows)
    seconds = 0.3 if plan.scale is QUICK else 2.0
    cases = [(name, keys) for name in many.CONTENDERS for keys in (1, 1000)]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {"1": [], "1000": []} for name in many.CONTENDERS}
    progress.begin("processes", plan.rounds * len(cases))
    for _ in range(plan.rounds):
        for name, keys in cases:
            progress.step(f"{name}, {keys} keys")
            done = many.measure(name, many.PROCESSES, keys, seconds, socket, plan.main_build[1])
            found[name][str(keys)].append(done)
    progress.end()
    results.parts["shared processes"] = found
    report.processes(f"{many.PROCESSES} processes, one limit for all, a quota that is never reached", found)
    results.bars += figures.shared_bars(rows, many.OURS)


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
    results.bars += figures.postgresql_bars(found)


def remote(plan: Plan, redis: str, results: Results, progress: Progress, report: Report) -> None:
    """A service as the store, beside Redis itself: half and hundredth slowest of the checks."""
    from benchmarks import remote as stores

    path = plan.main_build[1]
    with stores.running(redis, path) as urls:
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
    results.bars += stores.bars(rounds)


def budget(plan: Plan, redis: str, results: Results, progress: Progress, report: Report) -> None:
    """A reservation and its settlement, beside a check of a limiter."""
    from benchmarks import budget as budgets

    build, path = plan.main_build
    times = 200 if plan.scale is QUICK else 1000
    progress.begin("budget", plan.rounds)
    rounds = []
    for _ in range(plan.rounds):
        progress.step("budget")
        rounds.append(budgets.measure(redis, times, path))
    progress.end()
    results.parts["budget"] = rounds
    report.remote(f"Budget, {budgets.QUOTA}, two amounts, microseconds", budgets.medians(rounds))
    results.bars += budgets.bars(rounds, build == "compiled")


def weigh(worker: str, path: str | None, library: str, algorithm: str, keys: int, progress: Progress) -> dict[str, Any]:
    progress.begin("size", 100)
    with Worker(worker, {"part": "size", "libraries": [library], "keys": keys}, path) as child:
        text = f"{library} {algorithm} ({worker}), {keys:,} keys"
        message = child.run(library, algorithm, lambda share: progress.part(share, text))
    progress.end()
    found: dict[str, Any] = message.get("result", message)
    return {"worker": worker, "library": library, "algorithm": algorithm} | found


def keep(results: Results, part: str, rows: Sequence[Row], workers: Sequence[Worker]) -> None:
    results.parts[part] = [figures.summary(row) for row in rows]
    for worker in workers:
        results.versions.update(worker.versions)


def as_json(plan: Plan, results: Results, started: datetime) -> dict[str, Any]:
    return {
        "started": started.isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "arch": platform.machine(), "system": platform.system()},
        "python": platform.python_version(),
        "versions": results.versions,
        "server": results.server,
        "quota": QUOTA,
        "scale": asdict(plan.scale),
        "rounds": plan.rounds,
        "parts": results.parts,
        "bars": [asdict(bar) for bar in results.bars],
    }


def run(plan: Plan) -> Results:
    results, progress, report = Results(), Progress(), Report()
    check_builds(plan)
    missing = [name for name in MODULES if name not in plan.peers]
    if missing:
        report.say(f"Not installed, so not compared: {', '.join(missing)}")
    if "memory" in plan.parts:
        memory(plan, results, progress, report)
    if {"redis", "async", "hybrid", "lock", "service", "resp", "grpc", "shared", "remote", "budget"} & set(plan.parts):
        from benchmarks.server import running  # memory and size need no Redis client

        with running(plan.server) as server:
            results.server = server.description
            if "redis" in plan.parts:
                redis(plan, server.url, results, progress, report)
            if "async" in plan.parts:
                asynchronous(plan, server.url, results, progress, report)
            if "hybrid" in plan.parts:
                hybrid(plan, server.url, results, progress, report)
            if "lock" in plan.parts:
                lock(plan, server.url, results, report)
            if "service" in plan.parts:
                service(plan, server.url, results, progress, report)
            if "resp" in plan.parts:
                resp(plan, server.url, results, progress, report)
            if "grpc" in plan.parts:
                grpc(plan, server.url, results, progress, report)
            if "shared" in plan.parts:
                shared(plan, server.socket, results, progress, report)
            if "remote" in plan.parts:
                remote(plan, server.url, results, progress, report)
            if "budget" in plan.parts:
                budget(plan, server.url, results, progress, report)
    if "postgresql" in plan.parts:
        postgresql(plan, results, progress, report)
    if "web" in plan.parts:
        web(plan, results, progress, report)
    if "size" in plan.parts:
        size(plan, results, progress, report)
    report.bars(results.bars)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    plan = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the workers are stopped, too
    started = datetime.now(UTC)
    results = run(plan)
    plan.json.parent.mkdir(parents=True, exist_ok=True)
    plan.json.write_text(json.dumps(as_json(plan, results, started), indent=1) + "\n")
    print(f"All rounds: {plan.json}")
    if plan.strict and not all(bar.met for bar in results.bars):
        sys.exit(1)
