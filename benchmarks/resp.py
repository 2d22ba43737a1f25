"""The Redis protocol: CL.THROTTLE of one worker beside a PING of a real Redis, asked by redis-benchmark in turn.

50 connections, 10,000 keys, single commands and pipelines of 16. redis-benchmark (Debian: redis-tools) must be on the
path, since no client in Python could keep up.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from benchmarks.figures import Bar
from benchmarks.progress import Progress
from benchmarks.server import free_port
from benchmarks.service import process

CONNECTIONS = 50
KEYS = 10_000
PING = "(PING of Redis)"
MEMORY, REDIS = "headgate, memory", "headgate, Redis"
COMMANDS = {1: 100_000, 16: 400_000}  # by the length of a pipeline
THROTTLE = ("CL.THROTTLE", "user:__rand_int__", "15", "30", "60")
LEAST = {1: 0.5, 16: 1.875}  # of a lone PING: 40,000 and 150,000 a second where Redis does 80,000


@dataclass(slots=True)
class Target:
    """One server and one length of pipeline; commands a second in each round."""

    name: str
    port: int
    pipeline: int
    command: Sequence[str]
    runs: list[float] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.name}, pipelines of {self.pipeline}" if self.pipeline > 1 else self.name


def available() -> bool:
    return shutil.which("redis-benchmark") is not None


def ask(one: Target, count: int) -> float:
    """Commands a second, as redis-benchmark reports them."""
    options = ["-p", str(one.port), "-c", str(CONNECTIONS), "-n", str(count), "-P", str(one.pipeline), "-r", str(KEYS)]
    done = subprocess.run(["redis-benchmark", *options, "-q", *one.command], capture_output=True, text=True, check=True)
    found = re.findall(r"([\d.]+) requests per second", done.stdout)
    if not found:
        raise RuntimeError(f"redis-benchmark said: {done.stdout[-300:]}{done.stderr[-300:]}")
    return float(found[-1])


def throughput(url: str, build: str | None, rounds: int, quick: bool, progress: Progress) -> list[Target]:
    """All in turn, round by round; the first round warms up and does not count."""
    redis_port = int(url.rpartition(":")[2].partition("/")[0])
    ports = {MEMORY: free_port(), REDIS: free_port()}
    targets = [Target(PING, redis_port, 1, ["PING"])]
    targets += [Target(name, port, pipeline, THROTTLE) for name, port in ports.items() for pipeline in COMMANDS]
    with ExitStack() as stack:
        for name, port in ports.items():
            http = free_port()
            more = ("--store", f"{url}?timeout=5") if name == REDIS else ()
            serve = ("-m", "headgate", "serve", "--port", str(http), "--resp-port", str(port), *more)
            stack.enter_context(process(http, *serve, path=build))
        progress.begin("resp", (rounds + 1) * len(targets))
        for number in range(rounds + 1):
            for one in targets:
                progress.step(one.title)
                found = ask(one, COMMANDS[one.pipeline] // (5 if quick else 1))
                if number:
                    one.runs.append(found)
        progress.end()
    return targets


def share(one: Target, ping: Target) -> float:
    """How fast *one* is beside *ping*: the median over the rounds, in each of which both had the same neighbours."""
    return median(mine / its for mine, its in zip(one.runs, ping.runs, strict=True))


def bars(targets: list[Target]) -> list[Bar]:
    """What the memory store promises, as a share of a lone PING."""
    found = []
    for one in targets:
        if one.name == MEMORY:
            ratio, least = share(one, targets[0]), LEAST[one.pipeline]
            measured = f"{ratio:.2f}, {median(one.runs):,.0f}/s"
            found.append(Bar(f"resp, {one.title}: of a PING of Redis", f">= {least:g}", measured, ratio >= least))
    return found
