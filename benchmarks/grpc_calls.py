"""The gRPC port: calls of Envoy's rate-limit service a second, beside grpcio.aio and beside our own HTTP port.

One worker, one descriptor, 64 calls in flight. The peer answers every call with the bytes that headgate gave to the
same call, and decides nothing. On Redis the same worker is asked on its gRPC port and, by the same program, on its HTTP
port.

h2load (Debian: nghttp2-client) asks, since no client in Python could keep up. It sends a real message, but takes every
answer of HTTP for a success: so a client of grpcio calls before and after each turn, and the metrics of the service
must have counted as many admitted checks as h2load got answers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.figures import Bar
from benchmarks.progress import Progress
from benchmarks.server import START_SECONDS, free_port
from benchmarks.service import CHECK, process
from benchmarks.team import ROOT

METHOD = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
PEER, MEMORY, REDIS, HTTP = "(grpcio.aio)", "headgate, memory", "headgate, Redis", "headgate, Redis, HTTP"
CONNECTIONS, STREAMS = 8, 8  # for gRPC; HTTP/1.1 has as many connections as both make together
TIMES = 12.0  # as many calls as grpcio.aio: 60,000 a second where it answers 4,000 to 5,000
SHARE = 1.0  # of the requests that the HTTP port answers on the same Redis

QUOTA = 1_000_000_000  # an hour, which no run reaches
SETTINGS = f"""
[envoy]
files = ["limits.yaml"]

[rules.bench]
quotas = "{QUOTA}/hour"
algorithm = "fixed_window"
"""
LIMITS = f"""
domain: bench
descriptors:
- key: user
  rate_limit: {{unit: hour, requests_per_unit: {QUOTA}}}
"""
ENTRY = b"\x0a\x04user\x12\x05alice"
DESCRIPTOR = b"\x0a" + bytes([len(ENTRY)]) + ENTRY
MESSAGE = b"\x0a\x05bench\x12" + bytes([len(DESCRIPTOR)]) + DESCRIPTOR  # a RateLimitRequest
ALLOWED = 'allowed="true"'
OK = b"\x08\x01"  # how a RateLimitResponse begins that lets the request pass


@dataclass(slots=True)
class GrpcTarget:
    """One port; answers a second in each round."""

    name: str
    port: int
    pid: int
    http: int = 0  # the port of the service's metrics; 0 for the peer
    runs: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # of the server for each answer; 0 where it is not known

    @property
    def per_second(self) -> float:
        return median(self.runs)


def missing() -> str:
    """What is not installed, and how to get it; nothing if all is there."""
    if shutil.which("h2load") is None:
        return "there is no h2load on the path (Debian: apt-get install nghttp2-client; macOS: brew install nghttp2)"
    if find_spec("grpc") is None:
        return "there is no grpcio (pip install grpcio)"
    return ""


def call(port: int) -> bytes:
    """The answer to one call of a real client."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer: bytes = channel.unary_unary(METHOD)(MESSAGE, timeout=START_SECONDS, wait_for_ready=True)
    if not answer.startswith(OK):
        raise RuntimeError(f"port {port} does not let the call pass: {answer.hex()}")
    return answer


def admitted(http: int) -> int:
    """How many checks the store of the service has admitted, over all of its ports."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=START_SECONDS) as found:
        lines = found.read().decode().splitlines()
    counts = [(line, int(float(line.rpartition(" ")[2]))) for line in lines if not line.startswith("#")]
    passed = sum(count for line, count in counts if line.startswith("rate_limiter_requests_total{") and ALLOWED in line)
    return passed - sum(count for line, count in counts if line.startswith("rate_limiter_degraded_total"))


def load(command: list[str], seconds: float) -> tuple[int, float]:
    """The answers that h2load got, and how many that is a second; every answer must be a success."""
    done = subprocess.run(["h2load", f"-D{seconds:g}", "-t1", *command], capture_output=True, text=True, check=True)
    requests = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", done.stdout)
    rate = re.search(r"([\d.]+) req/s", done.stdout)
    if not requests or not rate or requests[1] == "0" or any(int(number) for number in requests.groups()[1:]):
        raise RuntimeError(f"h2load said: {done.stdout[-600:]}{done.stderr[-300:]}")
    return int(requests[1]), float(rate[1])


def cpu_seconds(pid: int) -> float:
    """The time that a process and its children have computed; 0 where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


def ask(target: GrpcTarget, seconds: float, body: Path) -> tuple[float, float]:
    """Answers a second, and microseconds for each; with a call of a real client before and after."""
    before, cpu_before = admitted(target.http) if target.http else 0, cpu_seconds(target.pid)
    if target.name == HTTP:
        url = f"http://127.0.0.1:{target.port}{CHECK}?rule=bench&key=alice"
        answers, rate = load([f"-c{CONNECTIONS * STREAMS}", "--h1", url], seconds)
    else:
        call(target.port)
        url = f"http://127.0.0.1:{target.port}{METHOD}"
        headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        answers, rate = load([f"-c{CONNECTIONS}", f"-m{STREAMS}", *headers, "-d", str(body), url], seconds)
        call(target.port)
    cpu_us = (cpu_seconds(target.pid) - cpu_before) / answers * 1e6
    if target.http and admitted(target.http) - before < answers:
        counted = admitted(target.http) - before
        raise RuntimeError(f"{target.name}: {answers} answers, but only {counted} admitted checks")
    return rate, cpu_us


@contextmanager
def serving(build: str | None, store: str) -> Iterator[tuple[int, int, int]]:
    """A service with one worker: its gRPC port, its process id and its HTTP port."""
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        settings = Path(folder) / "headgate.toml"
        settings.write_text(SETTINGS)
        (Path(folder) / "limits.yaml").write_text(LIMITS)
        port, http = free_port(), free_port()
        options = ("--config", str(settings), "--port", str(http), "--grpc-port", str(port), "--store", store)
        with process(http, "-m", "headgate", "serve", *options, path=build) as pid:
            yield port, pid, http


@contextmanager
def peer(answer: bytes) -> Iterator[tuple[int, int]]:
    """The peer's port and process id."""
    port = free_port()
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.grpc_peer", str(port), METHOD, answer.hex()], cwd=ROOT
    )
    try:
        if call(port) != answer:
            raise RuntimeError("the peer does not answer with the bytes that it was given")
        yield port, running.pid
    finally:
        running.terminate()
        running.wait()


def throughput(url: str, build: str | None, rounds: int, seconds: float, progress: Progress) -> list[GrpcTarget]:
    """All in turn, round by round; the first round warms up and does not count."""
    with ExitStack() as stack:
        body = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-bench-"))) / "call"
        body.write_bytes(b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE)
        memory = stack.enter_context(serving(build, "memory://"))
        redis = stack.enter_context(serving(build, f"{url}?timeout=5"))
        targets = [
            GrpcTarget(PEER, *stack.enter_context(peer(call(memory[0])))),
            GrpcTarget(MEMORY, *memory),
            GrpcTarget(HTTP, redis[2], *redis[1:]),
            GrpcTarget(REDIS, *redis),
        ]
        progress.begin("grpc", (rounds + 1) * len(targets))
        for number in range(rounds + 1):
            for one in targets:
                progress.step(one.name)
                rate, cpu_us = ask(one, seconds, body)
                if number:
                    one.runs.append(rate)
                    one.cpu_us.append(cpu_us)
        progress.end()
    return targets


def beside(one: GrpcTarget, other: GrpcTarget) -> float:
    """How many times as fast *one* is: the median over the rounds, in each of which both had the same neighbours."""
    return median(mine / its for mine, its in zip(one.runs, other.runs, strict=True))


def less_cpu(one: GrpcTarget, other: GrpcTarget) -> str:
    """How much less *one* computes for an answer: not as dependent on other work of the machine as its speed is."""
    mine, its = median(one.cpu_us), median(other.cpu_us)
    return f"CPU 1/{its / mine:.1f}" if mine and its else "CPU not known"


def bars(targets: list[GrpcTarget]) -> list[Bar]:
    """What the port promises beside grpcio.aio, and beside HTTP."""
    by_name = {one.name: one for one in targets}
    found = []
    for name, other, least in ((MEMORY, PEER, TIMES), (REDIS, HTTP, SHARE)):
        one = by_name[name]
        times = beside(one, by_name[other])
        what = f"grpc, {name}: times as many calls as {other.strip('()')}"
        measured = f"{times:.2f}, {one.per_second:,.0f}/s, {less_cpu(one, by_name[other])}"
        found.append(Bar(what, f">= {least:g}", measured, times >= least))
    return found
