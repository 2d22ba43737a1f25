"""The parent's side: workers as objects, and rounds interleaved over them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.progress import Progress
from benchmarks.workload import Sample, Scale

ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """A child process with some contenders. *path* goes first on its module path: it picks the build of headgate."""

    def __init__(self, name: str, order: dict[str, Any], path: str | None = None) -> None:
        self.name = name
        environment = dict(os.environ, PYTHONHASHSEED="0")  # the same dict layout in every worker
        if path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(order)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            hello = self._read()
        except RuntimeError:
            self.close()
            raise
        self.contenders: list[tuple[str, str]] = [(library, algorithm) for library, algorithm in hello["contenders"]]
        self.versions: dict[str, str] = hello["versions"]
        self.compiled: bool | None = hello["compiled"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker {self.name!r} ended early; what it said is above")
        message: dict[str, Any] = json.loads(line)
        return message

    def run(self, library: str, algorithm: str, tell: Callable[[float], None] | None = None) -> dict[str, Any]:
        """Run one round and wait for it. Returns `{"result": ...}` or `{"error": text}`."""
        assert self.process.stdin is not None
        print(json.dumps([library, algorithm]), file=self.process.stdin, flush=True)
        while True:
            message = self._read()
            if "progress" not in message:
                return message
            if tell is not None:
                tell(message["progress"])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()  # a worker ends when nobody can ask it anything more
        self.process.stdout.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class Row:
    """All rounds of one contender in one worker."""

    worker: str
    library: str
    algorithm: str
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None

    @property
    def title(self) -> str:
        return self.library if "," in self.library else f"{self.library} {self.algorithm}"


def speed_order(part: str, libraries: Sequence[str], scale: Scale, url: str = "") -> dict[str, Any]:
    return {"part": part, "libraries": list(libraries), "scale": asdict(scale), "url": url}


def interleave(
    part: str, workers: Sequence[Worker], rounds: int, progress: Progress, together: Callable[[Row], str]
) -> list[Row]:
    """Run every contender once a round; the first round is warm-up and is not kept.

    The order is new in each round, but contenders for which *together* gives the same text run next to each other:
    they will be compared, so they should meet the same weather. One that fails keeps its error and runs no more.
    """
    rows = [Row(worker.name, *contender) for worker in workers for contender in worker.contenders]
    staff = {worker.name: worker for worker in workers}
    dice = random.Random(part)
    progress.begin(part, (rounds + 1) * len(rows))
    for number in range(rounds + 1):
        place = {name: dice.random() for name in sorted({together(row) for row in rows})}
        for row in sorted(dice.sample(rows, len(rows)), key=lambda row: place[together(row)]):
            progress.step(f"{f'round {number}/{rounds}' if number else 'warm-up'}: {row.title} ({row.worker})")
            if row.error is not None:
                continue
            message = staff[row.worker].run(row.library, row.algorithm)
            if "error" in message:
                row.error = message["error"]
            elif number > 0:
                row.samples.append(Sample(**message["result"]))
    progress.end()
    return rows
