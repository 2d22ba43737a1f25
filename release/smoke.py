"""Try an installed headgate with the standard library alone: what every platform that gets a wheel must do.

    python -I release/smoke.py [compiled|plain]

Decisions of every algorithm on a clock that is moved, threads, tasks, and two processes on one shared store: exact in
all of them. Without an interpreter lock, importing headgate must leave it off.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import headgate
from headgate import AsyncLimiter, Limiter
from headgate.algorithms import ALGORITHMS
from headgate.testing import ManualClock

LIMIT, CALLS = 1000, 3000
SPEND = (
    f"import sys; from headgate import Limiter; limiter = Limiter('{LIMIT}/day', store=sys.argv[1], algorithm='gcra'); "
    f"print(sum(bool(limiter.try_acquire('key')) for _ in range({CALLS})))"
)


def of_build(wanted: str | None) -> None:
    """The metadata and the code are of one version, and the code is what the wheel's name says."""
    assert version("headgate") == headgate.__version__, (version("headgate"), headgate.__version__)
    found = "compiled" if headgate.COMPILED else "plain"
    assert wanted in (None, found), f"this build is {found}, wanted {wanted}"
    if wanted == "compiled":
        from headgate.stores import memory

        assert memory.__file__.endswith((".so", ".pyd")), memory.__file__


def of_algorithms() -> None:
    """Each admits five, denies the sixth, and admits again exactly after retry_after."""
    for algorithm in ALGORITHMS:
        clock = ManualClock()
        limiter = Limiter("5/minute", algorithm=algorithm, clock=clock)
        answers = [limiter.try_acquire("key") for _ in range(6)]
        assert [bool(answer) for answer in answers] == [True] * 5 + [False], (algorithm, answers)
        clock.advance(answers[-1].retry_after)
        assert limiter.try_acquire("key"), algorithm


def of_threads() -> None:
    """Threads that decide at once get the limit, and not one more."""
    limiter = Limiter(f"{LIMIT}/day", algorithm="fixed_window")

    def spend(_: int) -> int:
        return sum(bool(limiter.try_acquire("key")) for _ in range(CALLS))

    with ThreadPoolExecutor(4) as pool:
        admitted = sum(pool.map(spend, range(4)))
    assert admitted == LIMIT, admitted


async def of_tasks() -> None:
    async with AsyncLimiter("5/day") as limiter:
        answers = await asyncio.gather(*(limiter.try_acquire("key") for _ in range(9)))
    assert sum(map(bool, answers)) == 5, answers


def of_processes() -> None:
    """Two processes on one shared store get the limit together (and what a day refills meanwhile: one at most)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", SPEND, f"shared://{folder}/limits"]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        admitted = sum(int(process.communicate()[0]) for process in running)
    assert LIMIT <= admitted <= LIMIT + 1, admitted


def main() -> None:
    of_build(sys.argv[1] if len(sys.argv) > 1 else None)
    of_algorithms()
    of_threads()
    asyncio.run(of_tasks())
    of_processes()
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    assert locked or "free-threading" in sys.version
    assert not (locked and "free-threading" in sys.version), "importing headgate turned the interpreter lock on"
    build = "compiled" if headgate.COMPILED else "plain"
    print(f"headgate {headgate.__version__}, {build}, Python {sys.version.split()[0]}: works")


if __name__ == "__main__":
    main()
