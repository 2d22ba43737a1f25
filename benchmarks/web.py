"""What a limit costs at the doors of FastAPI and Flask: requests a second beside the same application without one.

Every contender is a server process of its own, with one limit in memory that is never reached. They are asked in turn,
round by round, over HTTP; what counts is the share of the bare application's requests a second in the same round.
All of them are started several times: two processes of the same program differ by a percent, as chance lays out their
memory, and that is as much as is to be measured.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Bar
from benchmarks.progress import Progress
from benchmarks.server import free_port
from benchmarks.service import Contender, finish_client, process, share, start_client

LEAST = 0.93
STARTS = 6
LIMITERS = {"fastapi": ("none", "headgate", "slowapi"), "flask": ("none", "headgate", "flask-limiter")}


def throughput(
    build: str | None, starts: int, rounds: int, seconds: float, script: Path, progress: Progress
) -> dict[str, list[Contender]]:
    """The contenders of each framework, the one without a limit first."""
    found: dict[str, list[Contender]] = {}
    for framework, limiters in LIMITERS.items():
        found[framework] = contenders = [Contender(limiter, free_port(), "/hello") for limiter in limiters]
        progress.begin(f"web, {framework}", starts * (rounds + 1) * len(contenders))
        for _ in range(starts):
            with ExitStack() as stack:
                for one in contenders:
                    command = ("-m", "benchmarks.web_server", framework, one.name, str(one.port))
                    stack.enter_context(process(one.port, *command, path=build))
                ask(framework, contenders, rounds, seconds, script, progress)
        progress.end()
    return found


def ask(
    framework: str, contenders: list[Contender], rounds: int, seconds: float, script: Path, progress: Progress
) -> None:
    """Ask servers that were just started: the first round warms up and does not count."""
    for number in range(rounds + 1):
        # the order turns, so that none is always asked after the same one
        turned = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        for one in turned:
            progress.step(one.name)
            run = finish_client(start_client(one.port, one.path, seconds, script))
            if run.refused:
                raise RuntimeError(f"{framework} with {one.name} refused {run.refused} of {run.requests}")
            if number:
                one.runs.append(run)


def bars(found: dict[str, list[Contender]]) -> list[Bar]:
    made = []
    for framework, (bare, ours, *_) in found.items():
        ratio = share(ours, bare)
        single = [
            (mine.requests / mine.seconds) / (its.requests / its.seconds)
            for mine, its in zip(ours.runs, bare.runs, strict=True)
        ]
        measured = f"{ratio:.3f} ({min(single):.2f} to {max(single):.2f})"
        what = f"web, {framework}: requests/s with one limit, of those without"
        made.append(Bar(what, f">= {LEAST:g}", measured, ratio >= LEAST))
    return made
