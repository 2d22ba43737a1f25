"""What a polite client of the gRPC port notices of floods: its p99 beside each of them, and beside none.

    python -m benchmarks.grpc_floods PORT NAME        flood a port until standard input ends

The floods are those of the tests: four connections, in a process of their own, that are opened anew whenever the
service closes them. The polite client is one of grpcio that makes a call every few milliseconds. It runs without a
flood as well, and beside a process that only computes: on a machine with few cores that alone costs it some time. The
flood has a low priority, because a real one would not take the processor of the service's machine. On Linux the report
also has what the service computed while a call waited: it depends less on what else the machine does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.figures import Bar
from benchmarks.grpc_calls import MESSAGE, METHOD, OK, serving
from benchmarks.progress import Progress
from benchmarks.server import START_SECONDS
from benchmarks.team import ROOT

CONNECTIONS = 4
PAUSE = 0.005  # seconds from the beginning of a call to that of the next, at least
MOST_MS = 20.0  # p99 of the polite client
NOTHING, COMPUTING = "(nothing)", "(a process that computes)"


@dataclass(slots=True)
class FloodResult:
    """One flood; the milliseconds of the polite client's calls, and what became of the flood, over all rounds."""

    name: str
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    cpu_p99_ms: list[float] = field(default_factory=list)  # of the service while a call waited; 0 if not on Linux
    most_ms: float = 0.0
    calls: int = 0
    cut_off: int = 0  # connections
    sent: int = 0  # bytes


class WorkerTime:
    """The milliseconds that the threads of a service's worker have computed."""

    def __init__(self, main: int) -> None:
        children = Path(f"/proc/{main}/task/{main}/children")
        workers = children.read_text().split() if children.exists() else []
        self._files = [path.open() for pid in workers for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]

    def now(self) -> float:
        total = 0
        for file in self._files:
            file.seek(0)
            total += int(file.read().split()[0])
        return total / 1e6

    def close(self) -> None:
        for file in self._files:
            file.close()


def call_politely(port: int, main: int, seconds: float) -> list[tuple[float, float]]:
    """The milliseconds of each call, and those that the service computed meanwhile; every call is answered."""
    import grpc

    found = []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, closing(WorkerTime(main)) as worker:
        method = channel.unary_unary(METHOD)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            computed, began = worker.now(), time.perf_counter()
            answer: bytes = method(MESSAGE, timeout=START_SECONDS)
            elapsed = time.perf_counter() - began
            found.append((elapsed * 1000, worker.now() - computed))
            if not answer.startswith(OK):
                raise RuntimeError(f"the polite client got {answer.hex()}")
            time.sleep(max(0.0, PAUSE - elapsed))
    return found


def p99(numbers: Sequence[float]) -> float:
    return quantiles(numbers, n=100)[98]


@contextmanager
def flooding(name: str, port: int, result: FloodResult) -> Iterator[None]:
    """A process that floods *port*; at its end it tells what became of the flood."""
    if name == NOTHING:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.grpc_floods", str(port), name]
    running = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        if running.stdout.readline() != "started\n":
            raise RuntimeError(f"the flood {name} does not start")
        yield
    finally:
        said, _ = running.communicate(timeout=START_SECONDS * 3)
        cut_off, sent = map(int, said.split() or (0, 0))
        result.cut_off += cut_off
        result.sent += sent


def measure(build: str | None, rounds: int, seconds: float, progress: Progress) -> list[FloodResult]:
    """All in turn, round by round, against one service on memory."""
    from tests.support.floods import OVER_SOCKETS

    results = [FloodResult(name) for name in (NOTHING, COMPUTING, *OVER_SOCKETS)]
    with serving(build, "memory://") as (port, main, _):
        call_politely(port, main, seconds)
        progress.begin("grpc floods", rounds * len(results))
        for _ in range(rounds):
            for one in results:
                progress.step(one.name)
                with flooding(one.name, port, one):
                    times, computed = zip(*call_politely(port, main, seconds), strict=True)
                one.p50_ms.append(median(times))
                one.p99_ms.append(p99(times))
                one.cpu_p99_ms.append(p99(computed))
                one.most_ms = max(one.most_ms, *times)
                one.calls += len(times)
        progress.end()
    return results


def bars(results: list[FloodResult]) -> list[Bar]:
    """What the port promises to a client beside the worst flood."""
    nothing = results[0]
    worst = max(results[2:], key=lambda one: median(one.p99_ms))
    found = median(worst.p99_ms)
    measured = f"{found:.1f} ms beside {worst.name}, {median(nothing.p99_ms):.1f} ms without"
    return [Bar("grpc: p99 of a polite client beside any flood", f"< {MOST_MS:g} ms", measured, found < MOST_MS)]


def flood(port: int, name: str) -> None:
    """Flood until standard input ends, then say how many connections were closed, and how many bytes sent."""
    os.nice(10)
    if name == COMPUTING:
        threading.Thread(target=compute, daemon=True).start()
        print("started", flush=True)
        sys.stdin.read()
        return
    from tests.support.floods import Flooder

    flooder = Flooder(name, port, CONNECTIONS)
    print("started", flush=True)
    sys.stdin.read()
    flooder.stop()
    print(flooder.cut_off, flooder.sent)


def compute() -> None:
    while True:
        pass


if __name__ == "__main__":
    flood(int(sys.argv[1]), sys.argv[2])
