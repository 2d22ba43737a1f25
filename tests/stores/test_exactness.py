"""All callers at once on one key: exactly the limit is admitted, never one more, never one less.

Periods are so long that nothing comes back during a test.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import Callers, in_threads
from tests.support.quotas import ALGORITHMS, LAWS

ROOT = Path(__file__).parent.parent.parent

# quotas, permits of each call, permits admitted in the end
CASES = [
    (["100/30d"], 1, 100),
    (["100/30d"], 3, 99),
    (["250/60d", "100/30d"], 1, 100),
    (["100/60d", "250/30d"], 7, 98),
]


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns a thousand times as often, to meet where they should not."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("algorithm", LAWS)
def test_exact(algorithm: str, any_callers: Callers) -> None:
    """Ten times as many permits are asked for, from 64 threads or as many tasks as calls."""
    for number, (quotas, permits, admitted) in enumerate(CASES if any_callers.whole else CASES[-1:]):
        limiter = any_callers.limiter(quotas, algorithm=algorithm, name=f"case {number}")
        decisions = any_callers.at_once(limiter.try_acquire, 1000 // permits, "k", permits=permits)
        assert permits * sum(decision.allowed for decision in decisions) == admitted
        assert limiter.peek("k", permits=0).remaining == 100 - admitted


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("algorithm", LAWS)
def test_give_back(algorithm: str, callers: Callers) -> None:
    """What is refunded can be had again, and no more: in the end everything is there."""
    limiter = callers.limiter("10/30d", algorithm=algorithm)

    def work() -> int:
        return sum(limiter.try_acquire("k").allowed and limiter.refund("k") for _ in range(5))

    assert sum(in_threads(64, work)) >= 10
    assert limiter.peek("k", permits=0).remaining == 10


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("algorithm", LAWS)
def test_many_keys(algorithm: str, callers: Callers) -> None:
    """Each key has its own limit."""
    limiter = callers.limiter("3/30d", algorithm=algorithm)
    keys = [f"k{i}" for i in range(5)]
    assert sum(in_threads(64, lambda: sum(limiter.try_acquire(key).allowed for key in keys))) == 3 * len(keys)


def test_event_loops(async_callers: Callers) -> None:
    """Eight threads, each with an event loop and an `AsyncLimiter`, on one store."""
    async_callers.limiter("100/30d").peek("k")

    def work() -> int:
        with Callers(async_callers.store, "async") as callers:
            decisions = callers.at_once(callers.limiter("100/30d").try_acquire, 200, "k")
        return sum(decision.allowed for decision in decisions)

    assert sum(in_threads(8, work)) == 100


Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    """Eight for all tests of this file: Python is slow to start, and eight times slower at once."""
    command = [sys.executable, "-m", "tests.support.spender"]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(8)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


ORDERS = [(f"{algorithm} 60 1 100/30d", 100) for algorithm in ALGORITHMS]
ORDERS += [("sliding_window 60 7 100/60d 250/30d", 98)]
ORDERS += [("token_bucket+sliding_window 60 3 99/30d", 99), ("gcra+fixed_window+leaky_bucket 60 7 100/60d 250/30d", 98)]


@pytest.mark.server
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(("order", "admitted"), ORDERS)
def test_processes(order: str, admitted: int, processes: list[Process], shared_url: str) -> None:
    """Eight processes ask at the same time, as in `tests.support.spender`."""
    for process in processes:
        tell(process, f"{shared_url} {order}")
    assert [hear(process) for process in processes] == ["ready"] * len(processes)
    for process in processes:
        tell(process, "go")
    assert sum(int(hear(process)) for process in processes) == admitted


def tell(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
