"""How the service ends, and how it does not."""

import os
import signal
import sys
import time

import pytest

from tests.service.conftest import Start
from tests.support.service import eventually, runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_everybody_stops_it_as_one_to_the_main_process_does(
    start: Start, number: signal.Signals, workers: str
) -> None:
    service = start("--workers", workers)
    eventually(lambda: len(service.workers()) == int(workers), "all have been started")
    children = service.workers()
    os.killpg(service.process.pid, number)
    assert service.process.wait(60) == 0
    assert "Unexpected" not in service.log() and "Traceback" not in service.log()
    assert not any(runs(child) for child in children)


def test_a_worker_that_was_told_to_stop_as_well_has_not_failed(start: Start) -> None:
    """As systemd does it when it signals everybody in the group of its own."""
    service = start()
    [child] = service.workers()
    service.signal(signal.SIGTERM)
    try:
        os.kill(child, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it was quick
    assert service.process.wait(60) == 0


def test_a_worker_that_stopped_before_the_main_process_heard_of_it_has_not_failed(start: Start) -> None:
    """The same on a busy machine: the main process gets no turn until its worker is gone."""
    service = start()
    [child] = service.workers()
    service.signal(signal.SIGSTOP)
    os.kill(child, signal.SIGTERM)
    eventually(lambda: not runs(child), "the worker stops")
    service.signal(signal.SIGTERM)
    service.signal(signal.SIGCONT)
    assert service.process.wait(60) == 0


def test_a_worker_that_dies_again_and_again_leaves_the_other_alone(start: Start) -> None:
    service = start("--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both at work")
    healthy, victim = service.workers()
    for _ in range(3):
        os.kill(victim, signal.SIGKILL)
        dead = victim
        eventually(lambda dead=dead: len(found := service.workers()) == 2 and dead not in found, "another worker")
        [victim] = set(service.workers()) - {healthy}
    assert runs(healthy) and service.process.poll() is None
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both at work")


def test_it_may_be_told_again_and_again_until_it_is_gone(start: Start) -> None:
    for _ in range(3):
        service = start()
        deadline = time.monotonic() + 60
        while service.process.poll() is None and time.monotonic() < deadline:
            service.signal(signal.SIGTERM)
            time.sleep(0.001)
        assert service.process.returncode == 0, service.log()
