"""The parts about the service and web frameworks: one function each, which measures, reports and judges."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.plan import Plan, Results
from benchmarks.progress import Progress
from benchmarks.report import Report
from benchmarks.server import Server


def service(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """Over HTTP: one worker on memory and on Redis beside a bare handler, and two instances that share a limit."""
    from benchmarks import service as http  # needs granian, which the other parts do not

    _, path = plan.main_build
    quick = plan.quick
    with http.script() as script:
        contenders = http.throughput(server.url, path, plan.rounds, 1 if quick else 3, script, progress)
        shared = http.overload(server.url, path, 4 if quick else 20, script, progress)
        hybrid = http.overload(server.url, path, 4 if quick else 20, script, progress, "hybrid = true\n")
    results.parts["service"] = {
        "client": http.client_name(),
        "contenders": [asdict(one) for one in contenders],
        "overload": asdict(shared),
        "overload_hybrid": asdict(hybrid),
    }
    report.service(contenders, http.client_name())
    results.judge("service", http.bars(contenders, shared, hybrid))


def resp(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """Over the Redis protocol: one worker on memory and on Redis beside a PING of Redis."""
    from benchmarks import resp as protocol

    if not protocol.available():
        results.missing["resp"] = "there is no redis-benchmark on the path"
        return
    targets = protocol.throughput(server.url, plan.main_build[1], plan.rounds, plan.quick, progress)
    results.parts["resp"] = [asdict(one) for one in targets]
    report.resp(targets)
    results.judge("resp", protocol.bars(targets))


def grpc(plan: Plan, server: Server, results: Results, progress: Progress, report: Report) -> None:
    """Envoy's rate-limit service: one worker on memory beside grpcio.aio, and on Redis beside its HTTP port."""
    from benchmarks import grpc_calls as calls

    if absent := calls.missing():
        results.missing["grpc"] = absent
        return
    targets = calls.throughput(server.url, plan.main_build[1], plan.rounds, 1 if plan.quick else 3, progress)
    results.parts["grpc"] = [asdict(one) for one in targets]
    report.grpc(targets)
    results.judge("grpc", calls.bars(targets))
    if plan.grpc_floods:
        from benchmarks import grpc_floods

        seconds = 1 if plan.quick else 3
        floods = grpc_floods.measure(plan.main_build[1], min(plan.rounds, 3), seconds, progress)
        results.parts["grpc floods"] = [asdict(one) for one in floods]
        report.grpc_floods(floods)
        results.judge("grpc", grpc_floods.bars(floods))


def web(plan: Plan, results: Results, progress: Progress, report: Report) -> None:
    """Over HTTP: FastAPI and Flask with one limit, beside the same application without, and beside a peer."""
    from benchmarks import web as doors  # needs frameworks and servers, which the other parts do not
    from benchmarks.service import client_name, script

    _, path = plan.main_build
    with script() as file:
        # gunicorn's threads make single turns differ by a tenth and more: many short ones, whose median holds still
        found = doors.throughput(path, 1 if plan.quick else doors.STARTS, plan.rounds, 1, file, progress)
    results.parts["web"] = {
        "client": client_name(),
        **{framework: [asdict(one) for one in contenders] for framework, contenders in found.items()},
    }
    for framework, contenders in found.items():
        report.web(framework, contenders, client_name())
    results.judge("web", doors.bars(found))
