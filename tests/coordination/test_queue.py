"""First in, first out; the expired, the cancelled and the dead neither come out nor count."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis

from headgate.coordination import AsyncWaitQueue, WaitQueue, queue_heartbeat
from headgate.coordination.background_retry import _PENDING
from headgate.coordination.queue import FIRST_HEARTBEAT_TTL
from headgate.coordination.states.machine import Operation, Reply, StateMachine, entry_channel
from headgate.errors import HeadgateError, InvalidKey, QueueFull, StoreUnavailable
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.awaited import Tools
from tests.support.clocks import until_async
from tests.support.clusters import wait_until
from tests.support.proxy import FaultyProxy
from tests.support.retries import answered
from tests.support.servers import Server, Servers, free_port

ROOT = Path(__file__).parent.parent.parent
LONG = 20.0


async def test_fifo(tools: Tools, url: str, name: str, clock: ManualClock) -> None:
    """Entries come out in the order in which they were put in."""
    queue, plain = tools.WaitQueue(name, store=url, clock=clock), WaitQueue(name, store=url, clock=clock)
    assert await queue.dequeue() is None
    assert await queue.size() == 0
    assert [await queue.enqueue(id) for id in ("z", "m", "a")] == [0, 1, 2]
    assert await queue.size() == 3 == len(plain), "threads and tasks share it"
    assert await queue.enqueue("m") == 1 == await queue.position("m"), "it keeps its place"
    assert [await queue.dequeue() for _ in range(4)] == ["z", "m", "a", None]
    assert await queue.size() == 0
    assert plain, "a queue is a queue, empty or not"
    for id in ("z", "y", "x"):
        await queue.enqueue(id)
    assert await queue.cancel("y")
    assert [await queue.dequeue() for _ in range(3)] == ["z", "x", None], "the same name may come again"


def test_expired_ones_never_come_out(url: str, name: str, clock: ManualClock) -> None:
    """The 97 of 100 that are over cost nobody anything, and are not counted."""
    queue = WaitQueue(name, store=url, timeout=60.0, clock=clock)
    for number in range(100):
        queue.enqueue(f"r{number}", timeout=None if number in (50, 51, 99) else 30.0)
    clock.advance(30)
    assert len(queue) == 3
    assert queue.position("r0") is None
    assert queue.dequeue() == "r50"
    clock.advance(30)
    assert queue.dequeue() is None
    assert len(queue) == 0


def test_cancel(url: str, name: str, clock: ManualClock) -> None:
    """A cancelled entry never comes out."""
    queue = WaitQueue(name, store=url, clock=clock)
    for id in "abc":
        queue.enqueue(id)
    assert queue.cancel("a")
    assert not queue.cancel("a")
    assert not queue.cancel("nobody")
    assert len(queue) == 2
    assert queue.position("b") == 0
    assert queue.dequeue() == "b"


def test_max_length(url: str, name: str, clock: ManualClock) -> None:
    """One entry more is `QueueFull`."""
    queue = WaitQueue(name, store=url, max_length=2, timeout=60, clock=clock)
    queue.enqueue("a")
    queue.enqueue("b")
    with pytest.raises(QueueFull, match="2"):
        queue.enqueue("c")
    assert queue.enqueue("b") == 1
    clock.advance(60)
    assert queue.enqueue("c") == 0


def test_dequeue_waits(url: str, name: str) -> None:
    """`dequeue` waits for an entry, up to its time-out."""
    queue = WaitQueue(name, store=url)
    begun = time.monotonic()
    assert queue.dequeue(timeout=0.1) is None
    assert time.monotonic() - begun >= 0.09
    timer = threading.Timer(0.05, queue.enqueue, ("late",))
    timer.start()
    assert queue.dequeue(timeout=LONG) == "late"
    timer.join()


def test_wait(url: str, name: str) -> None:
    """Who stands in line is told when it is taken out."""
    queue, order = WaitQueue(name, store=url, timeout=LONG), []

    def stand(id: str) -> None:
        assert queue.wait(id)
        order.append(id)

    threads = [threading.Thread(target=stand, args=(id,)) for id in "abc"]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        wait_until(lambda: len(queue) == number, "it stands in line")  # noqa: B023  # called at once
    for number, id in enumerate("abc", start=1):
        assert queue.dequeue() == id
        wait_until(lambda: len(order) == number, "it knows")  # noqa: B023  # called at once
    assert order == ["a", "b", "c"]
    for thread in threads:
        thread.join()


def test_wait_timeout(url: str, name: str) -> None:
    """A `wait` whose time is over is False, and its entry is gone."""
    queue = WaitQueue(name, store=url)
    assert not queue.wait("a", timeout=0.1)
    wait_until(lambda: len(queue) == 0, "it is out of the line")
    timer = threading.Timer(0.1, queue.cancel, ("b",))
    timer.start()
    assert not queue.wait("b", timeout=LONG)
    timer.join()


async def test_wait_cancelled(url: str, name: str) -> None:
    """A cancelled `wait` leaves the line."""
    queue = AsyncWaitQueue(name, store=url)
    tasks = [asyncio.create_task(queue.wait(id)) for id in "abc"]
    while await queue.size() < 3:  # noqa: ASYNC110  # nobody tells when they stand in line
        await asyncio.sleep(0.01)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    while await queue.size() == 3:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.01)
    assert await queue.dequeue() in ("b", "c")
    assert await queue.dequeue() in ("b", "c")
    assert await asyncio.gather(*tasks[1:]) == [True, True]


WAIT = """
import asyncio, sys
from headgate.coordination import AsyncWaitQueue

async def stand(queue, number):
    if await queue.wait(f"{sys.argv[3]}-{number}", timeout=40):
        print(f"{sys.argv[3]}-{number}", flush=True)

async def main():
    queue = AsyncWaitQueue(sys.argv[2], store=sys.argv[1])
    await asyncio.gather(*(stand(queue, number) for number in range(int(sys.argv[4]))))

asyncio.run(main())
"""


def test_100_waiters_50_killed_20_cancelled(redis_server: Server, name: str) -> None:
    """Five processes with 20 each stand in line, some die, some are cancelled: the rest is served, in order."""
    url = redis_server.patient_url
    queue, dice = WaitQueue(name, store=url), random.Random(3)
    processes: dict[str, Any] = {}
    for kind in ("live1", "dies1", "live2", "dies2", "live3"):
        count = "25" if kind.startswith("dies") else "17" if kind != "live3" else "16"
        command = [sys.executable, "-c", WAIT, url, name, kind, count]
        processes[kind] = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(queue) == 100, "all stand in line", timeout=40)
    order = redis_server.client().zrange(f"token_queue:{{{name}}}", 0, -1)
    for kind in ("dies1", "dies2"):
        os.kill(processes[kind].pid, signal.SIGKILL)
    cancelled = set(dice.sample([id for id in order if id.startswith("live")], 20))
    assert all(queue.cancel(id) for id in cancelled)
    wait_until(
        lambda: len(queue) == 30,
        "the dead are out, in their window and what a busy machine adds",
        timeout=FIRST_HEARTBEAT_TTL + 8.0,
    )
    expected = [id for id in order if id.startswith("live") and id not in cancelled]
    served = []
    while (id := queue.dequeue()) is not None:
        served.append(id)
    assert served == expected
    told = "".join(process.communicate(timeout=LONG)[0] for process in processes.values()).split()
    assert sorted(told) == sorted(expected), "each of them, and nobody else, was told"


@pytest.mark.bounded(300)
async def test_10_000_entries(redis_server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than one who says nothing is taken for alive, in the right order, and on few connections."""
    alive = queue_heartbeat.HEARTBEAT_TTL
    # A slow machine takes long to get them there.
    monkeypatch.setattr("headgate.coordination.queue.FIRST_HEARTBEAT_TTL", 300.0)
    monkeypatch.setattr(queue_heartbeat, "HEARTBEAT_TTL", 300.0)
    queue = AsyncWaitQueue(name, store=redis_server.patient_url, timeout=300.0)
    assert await queue.size() == 0
    before = len(redis_server.client().client_list())
    tasks = [asyncio.create_task(queue.wait(f"r{number}")) for number in range(10_000)]
    async with asyncio.timeout(120):
        while await queue.size() < 10_000:  # noqa: ASYNC110  # nobody tells when they stand in line
            await asyncio.sleep(0.1)
    monkeypatch.setattr(queue_heartbeat, "HEARTBEAT_TTL", alive)
    ours = queue_heartbeat._HEARTBEATS[queue._runner.backend, queue._runner.channel]
    await until_async(lambda: len(ours._entries) == 10_000)  # the last reply may be on its way
    begun = ours._round_began
    await asyncio.sleep(alive + queue_heartbeat.INTERVAL)
    await until_async(lambda: ours._round_began > begun)  # they were spoken for meanwhile
    assert await queue.size() == 10_000
    assert not any(task.done() for task in tasks)
    assert len(redis_server.client().client_list()) - before <= 8
    served = [await queue.dequeue() for _ in range(20)]
    assert len(set(served)) == 20
    async with asyncio.timeout(60):
        assert all(await asyncio.gather(*(tasks[int(id[1:])] for id in served if id)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(120):
        while await queue.size():  # noqa: ASYNC110  # nobody tells when they are out
            await asyncio.sleep(0.1)


async def test_10_000_takers(redis_server: Server, name: str) -> None:
    """For somebody to come, of whom only the first asks; or in line themselves, for whom their process speaks."""
    queue = AsyncWaitQueue(name, store=redis_server.patient_url)
    assert await queue.size() == 0
    before = len(redis_server.client().client_list())
    takers = [asyncio.create_task(queue.dequeue(timeout=None)) for _ in range(10_000)]
    await asyncio.sleep(1.2)  # longer than anybody sleeps before it looks again
    line = AsyncWaitQueue(f"{name}'", store=redis_server.patient_url)
    standing = [asyncio.create_task(line.wait(f"r{number}", timeout=5 * LONG)) for number in range(1_000)]
    while await line.size() < 1_000:  # noqa: ASYNC110  # nobody tells when they stand in line
        await asyncio.sleep(0.01)
    assert len(redis_server.client().client_list()) - before <= 6
    await queue.enqueue("one")
    assert await asyncio.wait_for(takers[0], LONG) == "one"
    for task in (*takers[1:], *standing):
        task.cancel()
    await asyncio.gather(*takers[1:], *standing, return_exceptions=True)
    # each is taken out of the line in the background; the next test wants a server at rest
    while any(retry.runner is line._runner for retry in list(_PENDING)):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)
    assert await line.size() == 0


def test_same_id_takes_over(url: str, name: str) -> None:
    """One dequeue serves one, and who gives up takes nobody else out."""
    queue, ended = WaitQueue(name, store=url), []

    def stand(who: str, timeout: float) -> None:
        ended.append((who, queue.wait("same", timeout=timeout)))

    threads = [threading.Thread(target=stand, args=("first", 5 * LONG))]
    threads[0].start()
    wait_until(lambda: len(queue) == 1, "it stands in line")
    queue.enqueue("later")
    threads.append(threading.Thread(target=stand, args=("second", LONG)))
    threads[1].start()
    wait_until(lambda: ended == [("first", False)], "its place was taken over")
    assert len(queue) == 2 and queue.position("same") == 0, "by the second, who keeps it"
    assert queue.dequeue() == "same"
    for thread in threads:
        thread.join()
    assert ended == [("first", False), ("second", True)]
    assert queue.dequeue() == "later"


def test_take_over_extends(url: str, name: str, clock: ManualClock) -> None:
    """A caller that takes over a place may wait for longer than the first."""
    queue = WaitQueue(name, store=url, clock=clock)
    queue.enqueue("a", timeout=1)
    queue._runner.execute(Operation("enqueue", ("call", "a", 60_000_000, 0, 90_000_000, "w")))
    clock.advance(59)
    assert queue.position("a") == 0
    queue._runner.execute(Operation("cancel", ("other", "a", 60_000_000, 0, 0, "v")))
    assert queue.position("a") == 0, "of whoever waits for it no longer"
    clock.advance(1)
    assert queue.position("a") is None


async def test_wait_without_messages(redis_server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was handed in serves tasks only, and brings no messages: its event loop speaks for who waits."""
    monkeypatch.setattr("headgate.coordination.queue.FIRST_HEARTBEAT_TTL", 2.0)
    monkeypatch.setattr(queue_heartbeat, "HEARTBEAT_TTL", 2.0)
    monkeypatch.setattr(queue_heartbeat, "INTERVAL", 0.5)
    async with AsyncRedis.from_url(redis_server.bare_url) as client:
        queue = AsyncWaitQueue(name, store=RedisStore(client))
        direct = WaitQueue(name, store=redis_server.patient_url)
        task = asyncio.create_task(queue.wait("a", timeout=5 * LONG))
        await asyncio.to_thread(wait_until, lambda: len(direct) == 1, "it stands in line")
        await asyncio.sleep(2.5)  # longer than one who says nothing is taken for alive
        assert await asyncio.to_thread(direct.dequeue) == "a"
        async with asyncio.timeout(LONG):
            assert await task


def test_full_queue_cancels_no_entry(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `wait` that finds the queue full cancels nothing."""
    queue, retries = WaitQueue(name, store=url, max_length=1), []
    monkeypatch.setattr(queue._runner, "retry_in_background", lambda *retry: retries.append(retry))
    queue.enqueue("a")
    with pytest.raises(QueueFull):
        queue.wait("b")
    assert not retries


def test_wait_is_told_by_message(redis_server: Server, name: str) -> None:
    """A waiter hears at once that it was served."""
    queue, channel = WaitQueue(name, store=redis_server.patient_url), f"token_queue:{{{name}}}"
    with redis_server.client().pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(channel)
        heard.get_message(timeout=LONG)
        queue.enqueue("a")
        queue.enqueue("b")
        assert queue.cancel("a")
        assert queue.dequeue() == "b"
        told: list[str] = []

        def hear() -> bool:
            if message := heard.get_message(timeout=0.1):
                told.append(message["data"])
            return len(told) == 4

        wait_until(hear, "all are heard")
        assert told == ["", "", "a", "b"]


def test_replies_are_forgotten(url: str, name: str, clock: ManualClock, servers: Servers) -> None:
    """Neither answers nor who was served; and who comes again was not served."""
    queue = WaitQueue(name, store=url, clock=clock)
    runner = queue._runner

    def look() -> str:
        return str(runner.execute(Operation("status", ("", "a", 1, 0, 0)))[0])

    queue.enqueue("a", timeout=3)
    assert queue.dequeue() == "a" and look() == "served"
    queue.enqueue("a", timeout=3)
    assert look() == "waiting"
    clock.advance(3)
    assert look() == "gone", "the second time its time was over"
    queue.enqueue("a", timeout=3)
    assert queue.dequeue() == "a" and look() == "served"
    clock.advance(60.001)
    assert look() == "gone"
    if url == "memory://":
        state = runner.backend.states._states.get(("token_queue", name))  # type: ignore[attr-defined]  # that of memory has them
        assert state is None or not (state.answers or state.called or state.served or state.told or state.waiters)
    else:
        assert (server := servers.at(url))
        assert [key for key in server.names() if name in key] == [f"token_queue:{{{name}}}:order"]


def test_redis_comes_back(node: Any, name: str) -> None:
    """Neither the first word nor a later one needs an answer, as long as there is time."""
    queue, served = WaitQueue(name, store=f"{node.bare_url}?timeout=0.5"), []
    assert answered(lambda: len(queue)) == 0
    node.freeze()
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable):
        queue.wait("a", timeout=1.0)
    assert time.monotonic() - begun >= 0.99, "when the time is over"
    thread = threading.Thread(target=lambda: served.append(queue.wait("b", timeout=5 * LONG)))
    thread.start()
    time.sleep(0.7)
    node.thaw()
    wait_until(lambda: _position(queue, "b") is not None, "it stands in line")
    node.freeze()
    queue._runner.backend.waiters.wake(entry_channel(queue._runner.channel, "b"))  # as a message would
    time.sleep(0.7)
    assert thread.is_alive()
    node.thaw()
    wait_until(lambda: _dequeued(queue) == "b", "it is served")
    thread.join(LONG)
    assert served == [True]
    queue.close()


def _position(queue: WaitQueue, id: str) -> int | None:
    try:
        return queue.position(id)
    except StoreUnavailable:
        return None


def _dequeued(queue: WaitQueue) -> str | None:
    try:
        return queue.dequeue()
    except StoreUnavailable:
        return None


def test_redis_is_down(name: str) -> None:
    """All methods raise `StoreUnavailable`."""
    queue = WaitQueue(name, store=f"redis://127.0.0.1:{free_port()}?timeout=0.5")
    for call in (lambda: queue.enqueue("a"), queue.dequeue, lambda: len(queue), lambda: queue.wait("a")):
        with pytest.raises(StoreUnavailable):
            call()
    queue.close()


def test_redis_keys(redis_server: Server) -> None:
    """The documented keys, which expire."""
    queue = WaitQueue("tokens", store=redis_server.url, timeout=60.0)
    queue.enqueue("request-1")
    client = redis_server.client()
    assert all(key.startswith("token_queue:{tokens}") for key in redis_server.names())
    assert all(0 < client.pttl(key) <= 180_000 for key in redis_server.names()), "nothing stays for ever"
    queue.dequeue()
    assert all(0 < client.pttl(key) <= 180_000 for key in redis_server.names())


HOSTILE = ["a b", "토큰", "{}", "1:2:3:4", ":", "-", "%", "0", "*", "'; return 1 --", "a\\b"]


def test_hostile_ids(url: str, name: str) -> None:
    """Any text can be an id."""
    queue = WaitQueue(name, store=url)
    for id in HOSTILE:
        queue.enqueue(id)
    assert [queue.dequeue() for _ in HOSTILE] == HOSTILE


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, InvalidKey, "256"),
    ({"name": "x", "timeout": 0}, ValueError, "timeout"),
    ({"name": "x", "timeout": "60"}, ValueError, "timeout"),
    ({"name": "x", "max_length": 0}, ValueError, "max_length"),
    ({"name": "x", "max_length": 1.5}, ValueError, "max_length"),
]


@pytest.mark.parametrize("door", [WaitQueue, AsyncWaitQueue])
@pytest.mark.parametrize(
    ("arguments", "error", "word"), BAD, ids=[", ".join(row[0]) + f" {number}" for number, row in enumerate(BAD)]
)
def test_bad_arguments(door: Any, arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    """The error says what would be right."""
    with pytest.raises(error, match=word):
        door(**arguments)


def test_bad_calls(url: str, name: str) -> None:
    """The error says what would be right."""
    queue = WaitQueue(name, store=url)
    for id in ("", None, 5, "a\nb", "k" * 300):
        for call in (queue.enqueue, queue.cancel, queue.wait, queue.position):
            with pytest.raises(InvalidKey):
                call(id)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="timeout"):
        queue.enqueue("a", timeout=-1)
    with pytest.raises(ValueError, match="timeout"):
        queue.dequeue(timeout=-1)
    assert len(queue) == 0
    assert issubclass(QueueFull, HeadgateError)


def test_dequeue_without_waiting(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that may not wait asks once, though another caller is first in line."""
    queue, asked = WaitQueue(name, store=url), 0
    states = queue._runner.backend.states
    run = states.run

    def count(machine: StateMachine, name: str, what: Operation) -> Reply:
        nonlocal asked
        asked += threading.current_thread() is threading.main_thread()
        return run(machine, name, what)

    monkeypatch.setattr(states, "run", count)
    thread = threading.Thread(target=queue.dequeue, args=(LONG,))
    thread.start()
    line = queue._runner.backend.waiters
    wait_until(lambda: len(line.queues.get(queue._runner.channel, ())) == 1, "it waits")
    for _ in range(50):
        assert queue.dequeue(timeout=0) is None
    assert asked == 50
    assert len(line.queues[queue._runner.channel]) == 1, "places of those who left are kept"
    queue.enqueue("1")
    thread.join()


async def test_cancelled_while_joining(redis_server: Server, name: str) -> None:
    """An entry whose `enqueue` was cancelled is taken out again."""
    direct = WaitQueue(name, store=redis_server.patient_url)
    with FaultyProxy(redis_server.port) as proxy:
        queue = AsyncWaitQueue(name, store=f"{proxy.bare_url}?timeout=10")
        assert await queue.size() == 0
        proxy.delay = 0.2
        task = asyncio.create_task(queue.wait("ghost"))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        calls = f"token_queue:{{{name}}}:calls"
        client = redis_server.client()
        await asyncio.to_thread(wait_until, lambda: client.zcard(calls) == 2, "it joined, and was taken out")
        await asyncio.to_thread(wait_until, lambda: len(direct) == 0, "no ghost waits")
        await queue.aclose()
