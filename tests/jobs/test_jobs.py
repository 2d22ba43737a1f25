"""Real workers of job queues: jobs run at their slots, in order, with one reschedule each, and keep their retries."""

import importlib
import importlib.util
import threading
from typing import Any

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.jobs import JobSlots
from headgate.jobs.turns import Turns
from headgate.testing import ManualClock
from tests.jobs.drain import COMMANDS, WORKERS, drain
from tests.support.clusters import wait_until
from tests.support.servers import Server


@pytest.mark.filterwarnings("ignore:Call to .__init__. function with deprecated")  # by arq, of redis-py
@pytest.mark.bounded(100)
@pytest.mark.once
@pytest.mark.parametrize("queue", COMMANDS)
def test_a_queue(queue: str, redis_server: Server) -> None:
    """40 jobs at 40 a second, and one that fails once and has a single retry: all run, none faster than the rate."""
    if importlib.util.find_spec(queue) is None:
        pytest.skip(f"{queue} is not installed")
    names = [str(number) for number in range(40)]
    found = drain(queue, f"redis://127.0.0.1:{redis_server.port}/0", [*names, "fails once"], "40/second burst 1", 60)
    assert sorted(found.names) == sorted([*names, "fails once", "fails once"])
    assert found.seconds >= 40 / 40 - 0.1
    assert found.results == ["0", "fails once"]
    assert found.asked <= 2 * len(found.names) + 8
    plain = found._replace(names=[name for name in found.names if name != "fails once"])
    if queue != "taskiq":  # whose scheduler looks once a second, and sends all that is due
        assert plain.displaced() < 3 * WORKERS


def test_turns() -> None:
    """Threads that wait have their turn by place, whatever the order in which they came."""
    turns, order = Turns(patience=60.0), list[int]()  # a slow machine must not start them out of turn

    def take(place: int) -> None:
        with turns.turn(place):
            order.append(place)

    threads = [threading.Thread(target=take, args=(place,)) for place in (3, 1, 2)]
    with turns.turn(0):
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda: len(turns._waiting) == number, "it waits")  # noqa: B023  # waits here
    for thread in threads:
        thread.join()
    assert order == [1, 2, 3]


def test_delays() -> None:
    """A job has to come again at its slot, in no more than max_delay, and starts when it has come."""
    clock = ManualClock()
    limiter = Limiter("1/second", clock=clock)
    slots = JobSlots(limiter, lambda tenant, urgent: f"{tenant} {urgent}", max_delay=2, within=5)
    assert [slots.delay(str(number), ("a",), {"urgent": True}) for number in range(4)] == [0, 1, 2, 2]
    assert slots.delay("0", ("b",), {"urgent": True}) == 0
    clock.advance(2)
    assert slots.delay("3", ("a",), {"urgent": True}) == 1
    assert [slots.delay(str(number), ("a",), {"urgent": True}) for number in range(4, 9)] == [2, 2, 2, 2, 1]


BAD: list[tuple[dict[str, object], str]] = [
    ({"key": 5}, "key must be"),
    ({"max_delay": 0}, "at least 1"),
    ({"permits": 0}, "permits must be"),
    ({"permits": 2}, "permits must be at most 1, the capacity"),
    ({"within": -1}, "within must be a number of seconds"),
    ({"grace": "1"}, "grace must be a number of seconds"),
    ({"limiter": AsyncLimiter("1/second")}, "limiter of JobSlots must be a Limiter, got AsyncLimiter"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    """They raise where they are written: every job would raise them."""
    given: Any = {"limiter": Limiter("1/second"), "key": "k", **arguments}
    with pytest.raises((TypeError, ValueError), match=words):
        JobSlots(**given)


def test_a_dramatiq_job_without_a_slot(caplog: pytest.LogCaptureFixture) -> None:
    """If no slot can be booked, the job fails, and does not run at a pace of its own."""
    dramatiq = pytest.importorskip("dramatiq")
    stub = pytest.importorskip("dramatiq.brokers.stub")
    adapter = importlib.import_module("headgate.jobs.dramatiq")
    broker = stub.StubBroker(middleware=[adapter.Slots()])
    ran: list[str] = []
    nowhere = Limiter("1/second", store="redis://127.0.0.1:9/0", on_store_error="raise")
    rows = {
        "keyless": JobSlots(Limiter("1/second"), lambda: "k"),
        "window": JobSlots(Limiter("1/second", algorithm="fixed_window"), "k"),
        "down": JobSlots(nowhere, "k"),
        "fine": JobSlots(Limiter("1/second"), "k"),
    }
    for name, slots in rows.items():
        dramatiq.actor(ran.append, actor_name=name, queue_name=name, broker=broker, slots=slots)
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    try:
        for name in rows:
            broker.enqueue(broker.get_actor(name).message(name))
            broker.join(name, fail_fast=False)
        worker.join()
    finally:
        worker.stop()
        broker.close()
    assert ran == ["fine"]
    assert "Unexpected failure" not in caplog.text and "StoreUnavailable" in caplog.text
