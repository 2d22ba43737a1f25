"""Real workers of job queues: jobs run at their slots, in order, with one reschedule each, and keep their retries."""

import importlib.util
import threading

import pytest

from headgate import Limiter
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


@pytest.mark.parametrize(
    ("arguments", "words"), [({"key": 5}, "key must be"), ({"key": "k", "max_delay": 0}, "at least 1")]
)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        JobSlots(Limiter("1/second"), **arguments)  # type: ignore[arg-type]  # that is the point
