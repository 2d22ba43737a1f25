"""Everybody at once on one key: exactly the limit is admitted, never one more, never one less.

Periods are so long that nothing comes back during a test.
"""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headgate import AsyncLimiter
from headgate.testing import ManualClock
from tests.support.places import ALGORITHMS, Place
from tests.support.servers import Server

ROOT = Path(__file__).parent.parent

# quotas, permits of each call, permits admitted in the end
CASES = [
    pytest.param(["100/30d"], 1, 100, id="100"),
    pytest.param(["100/30d"], 3, 99, id="100 by threes"),
    pytest.param(["250/60d", "100/30d"], 1, 100, id="100 of several"),
    pytest.param(["100/60d", "250/30d"], 7, 98, id="100 of several by sevens"),
]


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns a thousand times as often, to meet where they should not."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[], int]) -> int:
    """Run *work* in so many threads that start together; sum up what they return."""
    results: list[int] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        results.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count, "a thread died"
    return sum(results)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize(("quotas", "permits", "admitted"), CASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_64_threads(algorithm: str, quotas: list[str], permits: int, admitted: int, place: Place) -> None:
    limiter = place.limiter(quotas, algorithm=algorithm)
    calls = 5 if place.server else 40
    assert 64 * calls * permits > admitted

    def work() -> int:
        return permits * sum(limiter.try_acquire("k", permits=permits).allowed for _ in range(calls))

    assert in_threads(64, work) == admitted
    assert limiter.peek("k", permits=0).remaining == 100 - admitted


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_64_threads_that_give_back(algorithm: str, place: Place) -> None:
    """What is refunded can be had again, and no more: in the end everything is there."""
    limiter = place.limiter("10/30d", algorithm=algorithm)

    def work() -> int:
        spent = 0
        for _ in range(5 if place.server else 40):
            if limiter.try_acquire("k"):
                spent += 1
                limiter.refund("k")
        return spent

    assert in_threads(64, work) >= 10
    assert limiter.peek("k", permits=0).remaining == 10


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_64_threads_on_many_keys(algorithm: str, place: Place) -> None:
    limiter = place.limiter("3/30d", algorithm=algorithm)
    keys = [f"k{i}" for i in range(5 if place.server else 50)]

    def work() -> int:
        return sum(limiter.try_acquire(key).allowed for key in keys)

    assert in_threads(64, work) == 3 * len(keys)


@pytest.mark.parametrize(("quotas", "permits", "admitted"), CASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_500_tasks(algorithm: str, quotas: list[str], permits: int, admitted: int, place: Place) -> None:
    async def check() -> None:
        async with place.async_limiter(quotas, algorithm=algorithm) as limiter:
            decisions = await asyncio.gather(*(limiter.try_acquire("k", permits=permits) for _ in range(500)))
            assert permits * sum(decision.allowed for decision in decisions) == admitted
            assert (await limiter.peek("k", permits=0)).remaining == 100 - admitted

    asyncio.run(check())


def test_event_loops_in_threads(place: Place) -> None:
    """Eight threads, each with an event loop and an `AsyncLimiter`, on one store; memory:// is one for each."""
    limiters: list[AsyncLimiter] = []

    async def check() -> int:
        async with place.async_limiter("100/30d") as limiter:
            limiters.append(limiter)
            return sum([bool(d) for d in await asyncio.gather(*(limiter.try_acquire("k") for _ in range(200)))])

    assert in_threads(8, lambda: asyncio.run(check())) == (100 if place.server else 800)


Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def _processes() -> Iterator[list[Process]]:
    """Those that were started, for all tests of this file: Python is slow to start, and eight times slower at once."""
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def processes(_processes: list[Process], redis_server: Server) -> list[Process]:
    """Eight of them."""
    command = [sys.executable, "-m", "tests.support.spender", redis_server.patient_url]
    while len(_processes) < 8:
        _processes.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    return _processes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_8_processes_on_one_redis(algorithm: str, processes: list[Process]) -> None:
    assert spend(processes, f"{algorithm} 60 1 100/30d") == 100


def test_8_processes_by_sevens_from_several_quotas(processes: list[Process]) -> None:
    assert spend(processes, "sliding_window 60 7 100/60d 250/30d") == 98


def spend(processes: list[Process], order: str) -> int:
    """Let all of them ask, as in `tests.support.spender`, at the same time; sum up what they were granted."""
    for process in processes:
        tell(process, order)
    assert [hear(process) for process in processes] == ["ready"] * len(processes)
    for process in processes:
        tell(process, "go")
    return sum(int(hear(process)) for process in processes)


def tell(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_threads_and_time_that_moves() -> None:
    """Time moves while 16 threads spend: never more than the capacity and what has come in since."""
    clock = ManualClock()
    with Place(None) as place:
        limiter = place.limiter("10/second burst 20", clock=clock)

        def work() -> int:
            spent = 0
            for _ in range(200):
                clock.advance(0.001)
                spent += limiter.try_acquire("k").allowed
            return spent

        most = 20 + 16 * 200 * 0.001 * 10
        assert most - 2 <= in_threads(16, work) <= most  # a little is lost while the bucket is still full
