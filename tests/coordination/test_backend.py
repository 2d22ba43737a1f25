"""What all tools share: connections that nobody has to close, timers, wake-ups."""

import asyncio
import contextlib
import gc
import itertools
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from headgate import Budget, coordination
from headgate.clock import SYSTEM_CLOCK, SystemClock
from headgate.coordination import (
    AsyncCircuitBreaker,
    AsyncLock,
    AsyncPool,
    AsyncWaitQueue,
    CircuitBreaker,
    Lock,
    Pool,
    Semaphore,
    WaitQueue,
    background_retry,
)
from headgate.coordination.backend import MemoryStates, open_backend
from headgate.coordination.background_retry import BackgroundRetry
from headgate.coordination.runner import Plan, Runner, Ticket
from headgate.coordination.states.lock import LOCK, LockState
from headgate.coordination.states.machine import Operation, Reply, StateMachine
from headgate.coordination.timers import MAX_THREADS, Timers
from headgate.errors import CircuitOpen, LockLost, LockTimeout, PoolExhausted, QueueFull, StoreUnavailable
from headgate.redis.pubsub import Subscription
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.clocks import until_async
from tests.support.clusters import wait_until
from tests.support.servers import PASSWORD, Server, free_port
from tests.support.signals import done_by_another, signal_at

ROOT = Path(__file__).parent.parent.parent

# An event loop that ends while a call is on its way, begun that many turns before.
ENDS = """
import asyncio, sys
from headgate.coordination import AsyncPool

async def main():
    pool = AsyncPool("x", store=sys.argv[1])
    await pool.add("a")
    asyncio.ensure_future(pool.status())
    asyncio.ensure_future(pool.acquire())
    for _ in range(int(sys.argv[2])):
        await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_loop_ends_during_a_call(turns: int, redis_server: Server) -> None:
    """Nothing hangs, and nothing is left open, although nobody closed anything."""
    command = [sys.executable, "-W", "error", "-c", ENDS, redis_server.patient_url, str(turns)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stderr) == (0, "")


def test_client_of_the_wrong_kind(redis_server: Server) -> None:
    """A client of redis-py that was handed in serves one kind of tools only; it says which."""
    for tool in (Lock, CircuitBreaker, Pool, WaitQueue):
        with pytest.raises(TypeError, match="Async"):
            tool("x", store=RedisStore(redis.asyncio.Redis(port=redis_server.port)))
    with redis.Redis(port=redis_server.port) as client:
        plain = RedisStore(client)
        for other_tool in (AsyncLock, AsyncCircuitBreaker, AsyncPool, AsyncWaitQueue):
            with pytest.raises(TypeError, match="threads"):
                other_tool("x", store=plain)
        one, other = Lock("x", store=plain), Lock("x", store=redis_server.patient_url)
        with one:
            assert not other.acquire(timeout=0.01)
            timer = threading.Timer(0.05, one.release)
            timer.start()
            assert other.acquire(timeout=20)
            timer = threading.Timer(0.05, other.release)
            timer.start()
            assert one.acquire(timeout=20), "it has nobody to wake it, and looks often"
            timer.join()


def test_close_leaves_a_given_store(redis_server: Server) -> None:
    """Closing a tool does not close a store that was handed in."""
    store = RedisStore(redis_server.url)
    lock = Lock("x", store=store)
    with lock:
        executor = store.sync_executor()
        lock.close()
        assert store.sync_executor() is executor
    store.close()


def test_loop_end_leaves_a_given_store(redis_server: Server) -> None:
    """It is its owner's to close; only what the loop itself had is closed, by the store."""
    closed = []

    class Watched(RedisStore):
        async def aclose(self) -> None:
            closed.append(self)
            await super().aclose()

    async def use() -> None:
        async with AsyncLock("x", store=store):
            pass

    def connections() -> int:
        return int(redis_server.client().info("clients")["connected_clients"])

    store = Watched(redis_server.url)
    with Lock("y", store=store):
        pass
    executor, before = store.sync_executor(), connections()
    asyncio.run(use())
    assert not closed
    assert store.sync_executor() is executor
    wait_until(lambda: connections() <= before, "the connections of the loop are closed")
    store.close()


async def test_sync_client_in_a_loop(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: what is to be repeated is repeated by a thread, since the loop could not use the client."""
    with redis.Redis.from_url(redis_server.bare_url) as client:
        store = RedisStore(client)
        lock = Lock("x", store=store)
        lock.acquire()

        def lose(*_: object) -> Reply:
            monkeypatch.undo()
            raise StoreUnavailable("once")

        monkeypatch.setattr(lock._runner.backend.states, "run", lose)
        assert lock.release()
        assert await asyncio.to_thread(Lock("x", store=store).acquire, 20.0)


def test_the_log_is_right_for_tools_too(caplog: pytest.LogCaptureFixture) -> None:
    """A policy named on_store_error is a limiter's; these have none."""
    port = free_port()
    lock = Lock("x", store=f"redis://127.0.0.1:{port}?timeout=0.5")

    def told() -> list[str]:
        with pytest.raises(StoreUnavailable):
            lock.acquire(timeout=0)
        lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        return [line for line in lines if str(port) in line]  # earlier tests may still try to reach others

    wait_until(told, "it was tried often enough to tell")
    [line] = told()
    assert "does not answer" in line and "on_store_error" not in line
    lock.close()


def test_a_manual_clock_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is renewed by whoever moves the clock; 50 tests that forget to release leave nothing behind."""
    begun: list[threading.Thread] = []
    start, here = threading.Thread.start, threading.current_thread()

    def watched(thread: threading.Thread) -> None:
        if threading.current_thread() is here:  # what earlier tests left behind may need one
            begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    for _ in range(50):
        clock = ManualClock()
        lock = Lock("x", clock=clock)
        assert lock.acquire()
        clock.advance(11)
        assert lock.held
    assert not begun


def test_short_locks_share_a_thread() -> None:
    """To start one for each would cost ten times as much as the lock."""
    lock = Lock("moments", clock=SystemClock())  # not what others use
    for _ in range(50):
        with lock:
            pass
    assert lock._runner.backend.timers._threads == 1


def test_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes long holds up no other; they end when nothing is left to do."""
    monkeypatch.setattr("headgate.coordination.timers.CHECK_EVERY", 0.02)
    here, seen, hangs = Timers(SYSTEM_CLOCK), list[int](), threading.Event()
    for number in (3, 1, 2):
        here.later(number / 100, partial(seen.append, number))
    here.later(0.015, partial(seen.append, 0)).cancel()
    wait_until(lambda: len(seen) == 3, "all were called")
    assert sorted(seen) == [1, 2, 3]
    for _ in range(MAX_THREADS - 1):
        here.later(0, partial(hangs.wait, 20))
    here.later(0, lambda: 1 / 0)
    here.later(0, partial(seen.append, 4))
    wait_until(lambda: seen[-1] == 4, "one thread is left for it")
    assert here._threads <= MAX_THREADS
    hangs.set()
    for number in (5, 6):
        wait_until(lambda: not here._threads, "nothing is left to do")
        here.later(0.05, partial(seen.append, number))
        wait_until(lambda: seen[-1] == number, "another thread does it")  # noqa: B023  # it is called at once


def test_no_right_to_publish(redis_server: Server) -> None:
    """Whoever waits looks once a second; nothing else is different."""
    redis_server.client().acl_setuser(
        "mute", enabled=True, reset=True, passwords="+x", keys=["*"], categories=["+@all"], commands=["-publish"]
    )
    url = f"redis://mute:x@127.0.0.1:{redis_server.port}/0?timeout=10"
    elsewhere, waiter = Lock("mute", store=RedisStore(url)), Lock("mute", store=url)
    assert elsewhere.acquire(timeout=20)
    timer = threading.Timer(0.2, elsewhere.release)
    timer.start()
    assert waiter.acquire(timeout=20)
    timer.join()
    assert waiter.release()
    waiter.close()


def test_timers_of_their_own(redis_server: Server) -> None:
    """A Redis that hangs does not delay the timers of another."""
    one, other = (open_backend(f"{redis_server.bare_url}?timeout={seconds}", None) for seconds in (10, 11))
    hangs, done = threading.Event(), threading.Event()
    one.timers.later(0, lambda: hangs.wait(20))
    other.timers.later(0, done.set)
    assert done.wait(20) and not hangs.is_set()
    hangs.set()


def test_documented_rights(redis_server: Server) -> None:
    """The user of docs/redis.md who has no limiter."""
    [rights] = re.findall(r"^user headgate on (.* ~lock:.*)$", (ROOT / "docs" / "redis.md").read_text(), re.M)
    redis_server.client().execute_command("ACL", "SETUSER", "alone", "reset", "on", *rights.split())
    url = f"redis://alone:secret@127.0.0.1:{redis_server.port}/0?timeout=10"
    with Lock("x", store=url) as lock:
        lock.ensure_held()
    breaker = CircuitBreaker("x", store=url, rate=0.5, failures=1)
    breaker.record_failure()
    breaker.force_open()
    breaker.reset()
    assert breaker.state == "CLOSED"
    pool = Pool("x", store=url, quota="5/minute", failures=1)
    pool.add("a", "b")
    with pool.acquire(timeout=20) as leased:
        assert leased.renew()
    pool.retire("b")
    assert pool.status().members
    queue = WaitQueue("x", store=url)
    assert queue.enqueue("1") == 0 and queue.enqueue("2") == 1
    assert queue.cancel("2") and queue.dequeue() == "1" and len(queue) == 0
    lock.close()


def test_memory_is_swept(clock: ManualClock) -> None:
    """A few states a step, so that no step takes long however many there are; and fences still grow."""
    memory = open_backend("memory://", clock).states
    assert isinstance(memory, MemoryStates)
    fences = dict[str, int]()
    for round in range(3):
        for number in range(1000):
            lock = Lock(f"job {number}" if number < 10 else f"job {round} {number}", clock=clock)
            with lock:
                assert lock.fence > fences.get(lock.name, 0)
                fences[lock.name] = lock.fence
        clock.advance(601)
    looked = 0

    class Watched(LockState):
        def is_expired(self, now: int) -> bool:
            nonlocal looked
            looked += 1
            return super().is_expired(now)

    for number in range(5000):
        memory.run(StateMachine("watched", ("",), "", Watched), str(number), Operation("acquire", ("a", 30_000, "")))
        assert looked <= 2 * (number + 1)
    assert len([name for machine, name in memory._states if machine == "lock"]) == 0
    assert len(memory._states) == 5000, "what is held stays"


TOOLS = [Lock, AsyncLock, CircuitBreaker, AsyncCircuitBreaker, Pool, AsyncPool, WaitQueue, AsyncWaitQueue]


@pytest.mark.parametrize("tool", TOOLS)
def test_repr(tool: Any, redis_server: Server) -> None:
    """Its kind, its name and where it is, and no password."""
    assert repr(tool("x")) == f"<{tool.__name__} 'x' at memory://>"
    shown = repr(tool("x", store=redis_server.patient_url))
    assert str(redis_server.port) in shown and "redis://" in shown and PASSWORD not in shown


SAYS = [
    ("", 2.0),
    ("?connect_timeout=1", 2.0),
    ("?retry_on_timeout=1", 2.0),
    ("?timeout=7", 7.0),
    ("?db=1&socket_timeout=7", 7.0),
]


@pytest.mark.parametrize("store", ["shared://tools-are-not-there", ["memory://", "memory://"]])
def test_stores_without_tools(store: Any) -> None:
    """The error names the stores that have tools and budgets, and no argument that they do not take."""
    for make in (lambda: Semaphore("s", limit=1, store=store), lambda: Budget(tokens="5/day", store=store)):
        with pytest.raises(TypeError, match=r"coordination needs .*memory://.* redis://.*, got (SharedStore|a list)$"):
            make()


@pytest.mark.parametrize("query, seconds", SAYS)
def test_timeout_of_an_operation(query: str, seconds: float) -> None:
    """A time to connect says nothing about that."""
    source = vars(open_backend(f"redis://timeout=:1@127.0.0.1:1/0{query}", None))["_owned"].url
    assert source.timeout == seconds


@pytest.mark.parametrize("timeout", [1e308, 10**400, float("inf"), -1, float("nan"), "5", True], ids=str)
def test_bad_timeouts(timeout: Any) -> None:
    """The error says what would be right."""
    for wait in (Lock("x").acquire, Pool("x").acquire, WaitQueue("x").dequeue, partial(WaitQueue("x").wait, "1")):
        with pytest.raises(ValueError, match="at most a year"):
            wait(timeout=timeout)
    with pytest.raises(ValueError, match="at most a year"):
        Lock("x", timeout=timeout)


WAITS: dict[str, Any] = {
    "lock": lambda name, url: Lock(name, store=url).acquire(timeout=0.3),
    "pool": lambda name, url: Pool(name, store=url).acquire(timeout=0.3),
    "dequeue": lambda name, url: WaitQueue(name, store=url).dequeue(timeout=0.3),
    "wait": lambda name, url: WaitQueue(name, store=url).wait("a", timeout=0.3),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_waiters_ask_seldom(wait: Any, url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it comes, when the subscription stands, when the time is over; and not when its own question is answered."""
    assert Lock(name, store=url).acquire()
    states = open_backend(url, None).states
    run, asked = states.run, 0

    def count(machine: StateMachine, name: str, what: Operation) -> Reply:
        nonlocal asked
        asked += threading.current_thread() is threading.main_thread()
        return run(machine, name, what)

    monkeypatch.setattr(states, "run", count)
    with contextlib.suppress(PoolExhausted):
        assert not wait(name, url)
    assert 1 <= asked <= 10


def test_signal_during_an_operation(name: str) -> None:
    """What it left half done is forgotten, as if it had never been; nobody else notices."""
    queue, other = WaitQueue(name), WaitQueue(f"{name}'")
    queue.enqueue("a")
    other.enqueue("b")
    memory = open_backend("memory://", None).states
    assert isinstance(memory, MemoryStates)
    state = memory._states["token_queue", name]

    def interrupted(id: str) -> None:
        state.queue.clear()
        raise KeyboardInterrupt

    state._take_out = interrupted
    with pytest.raises(KeyboardInterrupt):
        queue.dequeue()
    assert (len(queue), queue.dequeue(), queue.enqueue("c"), queue.dequeue()) == (0, None, 0, "c")
    state = memory._states["token_queue", name]
    state.is_expired = lambda now: interrupted("c")
    memory._states.move_to_end(("token_queue", name), last=False)
    with pytest.raises(KeyboardInterrupt):
        len(other)
    assert (len(queue), other.dequeue()) == (0, "b")


def test_errors_are_exported() -> None:
    """All errors of the tools can be imported from headgate.coordination."""
    for error in (CircuitOpen, LockLost, LockTimeout, PoolExhausted, QueueFull, StoreUnavailable):
        assert getattr(coordination, error.__name__) is error
        assert error.__name__ in coordination.__all__


def test_missed_messages(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscription breaks; it is made again at once, and whoever waits looks what happened meanwhile."""
    monkeypatch.setattr("headgate.redis.pubsub.PAUSE", 30.0)
    url = f"{redis_server.bare_url}?timeout=12"
    elsewhere, lock = Lock("x", store=RedisStore(url)), Lock("x", store=url)
    queue, desk = WaitQueue("x", store=url), WaitQueue("x", store=RedisStore(url))
    monkeypatch.setattr(lock._runner.backend.states, "poll", 60.0)  # nothing but a message wakes anybody
    monkeypatch.setattr("headgate.coordination.queue_heartbeat.INTERVAL", 60.0)
    monkeypatch.setattr("headgate.coordination.queue_heartbeat.HEARTBEAT_TTL", 60.0)
    go_on, client, connect = threading.Event(), redis_server.client(), Subscription._connect

    def connect_later(self: Subscription) -> Any:
        assert go_on.wait(20)
        return connect(self)

    assert elsewhere.acquire()
    with ThreadPoolExecutor(2) as executor:
        acquired = executor.submit(lock.acquire, 40)
        wait_until(lambda: client.pubsub_numsub("lock:{x}")[0][1], "it listens")
        waited = executor.submit(queue.wait, "1", 40)
        wait_until(lambda: client.pubsub_numsub("token_queue:{x}")[0][1] and len(desk), "both listen")
        wait_until(lambda: acquired.running() and waited.running(), "both wait")
        monkeypatch.setattr(Subscription, "_connect", connect_later)
        client.client_kill_filter(_type="pubsub")
        elsewhere.release()
        assert desk.dequeue(timeout=20) == "1"
        go_on.set()
        assert acquired.result(20) and waited.result(20)
    lock.release()
    lock.close()


def test_background_retry_ends() -> None:
    """From threads and from tasks: nobody tries for ever to reach a Redis that is gone."""
    runner = Runner(LOCK, "x", f"redis://127.0.0.1:{free_port()}?timeout=0.5", None, tasks=False)
    release = Operation("release", ("a", 1000))
    mine = BackgroundRetry(runner, release, runner.clock.now() + 600_000)
    wait_until(lambda: mine not in background_retry._PENDING, "it ends")
    assert runner.clock.now() >= mine._until

    async def in_a_task() -> None:
        mine = BackgroundRetry(runner, release, runner.clock.now() + 600_000)
        await until_async(mine._task.done)
        assert not mine._task.cancelled() and runner.clock.now() >= mine._until

    asyncio.run(in_a_task())
    runner.backend.close()


def test_change_before_the_subscription(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody lets go after the question and before the answer to SUBSCRIBE: then it is asked again."""
    url = f"{redis_server.bare_url}?timeout=13"
    elsewhere, other = Lock("x", store=RedisStore(url)), Lock("y", store=RedisStore(url))
    lock, first = Lock("x", store=url), Lock("y", store=url)
    monkeypatch.setattr(lock._runner.backend.states, "poll", 60.0)
    assert elsewhere.acquire() and other.acquire()
    listen = Subscription.listen

    def release_and_listen(self: Subscription, channel: str) -> None:
        elsewhere.release()
        listen(self, channel)

    with ThreadPoolExecutor(2) as executor:
        waits = executor.submit(first.acquire, 40)  # there is a connection before
        wait_until(lambda: redis_server.client().pubsub_numsub("lock:{y}")[0][1], "it listens")
        monkeypatch.setattr(Subscription, "listen", release_and_listen)
        assert executor.submit(lock.acquire, 40).result(20)
        other.release()
        assert waits.result(20)
    lock.close()


def test_signal_in_a_timer() -> None:
    """What others put off is done all the same."""
    for number in itertools.count(1):
        timers, done = Timers(SYSTEM_CLOCK), threading.Event()
        timers.later(0.0, bool)
        wait_until(partial(lambda timers: timers._waiting == 1, timers), "a thread is there")
        interrupted = signal_at(number, partial(timers.later, 0.0, bool))
        assert done_by_another(partial(timers.later, 0.0, done.set))
        assert done.wait(20)
        if not interrupted:
            assert number > 1
            return


def test_signal_while_waiting(name: str) -> None:
    """Whoever wakes it is not held up."""
    runner = Runner(LOCK, name, "memory://", None, tasks=False)
    tickets: list[Ticket] = []

    def pause() -> Plan[None]:
        tickets.append(runner.ticket())
        yield tickets[-1].sleep(0.001)

    def wait() -> None:
        runner.run(pause())

    for number in itertools.count(1):
        interrupted = signal_at(number, wait)
        assert all(done_by_another(ticket.waiter.wake) for ticket in tickets)
        tickets.clear()
        if not interrupted:
            assert number > 1
            return


def test_signal_while_waiting_for_the_loss(name: str) -> None:
    """The thread that renews it is not held up when it says so."""
    with Lock(name) as lock:
        acquisition = lock._current()
        assert acquisition
        for number in itertools.count(1):
            interrupted = signal_at(number, partial(lock.lost.wait, 0.001))
            assert done_by_another(acquisition.lost.set)
            assert lock.lost.is_set()
            lock.lost.clear()
            if not interrupted:
                assert number > 1
                return


@pytest.mark.parametrize("at", ["join", "leave"])
@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_signal_while_joining_or_leaving(
    wait: Any, at: str, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody stays there who has gone: those who come later would wait behind it for ever."""
    assert Lock(name, store=url).acquire()
    line = open_backend(url, None).waiters
    real = getattr(line, at)

    def interrupted(*arguments: Any) -> None:
        monkeypatch.undo()
        if at == "join":
            real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(line, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait(name, url)
    gc.collect()
    assert not any(name in key for key in line.queues)


async def test_callers_at_once(redis_server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask two questions at a time at most, however many they are: one outside the queue and the first in it."""
    lock, at_once, most = AsyncLock(name, store=redis_server.url), 0, 0
    states = lock._runner.backend.states
    run = states.run_async

    async def count(machine: StateMachine, name: str, operation: Operation) -> Reply:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            return await run(machine, name, operation)
        finally:
            at_once -= 1

    assert await AsyncLock(name, store=redis_server.url).acquire()
    monkeypatch.setattr(states, "run_async", count)
    tasks = [asyncio.create_task(lock.acquire()) for _ in range(200)]
    line = lock._runner.backend.waiters.queues
    await until_async(lambda: len(line.get(lock._runner.channel, ())) == 200)
    assert most <= 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_callers_at_once_beside_one_that_does_not_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with ``timeout=0`` asks beside the two that may, and lets no third one ask."""
    lock, go_on, asking = AsyncLock(name), asyncio.Event(), 0
    states = lock._runner.backend.states
    run = states.run_async

    async def wait_and_run(machine: StateMachine, name: str, operation: Operation) -> Reply:
        nonlocal asking
        asking += 1
        await go_on.wait()
        return await run(machine, name, operation)

    assert await AsyncLock(name).acquire()
    with monkeypatch.context() as patched:
        patched.setattr(states, "run_async", wait_and_run)
        tasks = [asyncio.create_task(lock.acquire())]
        await until_async(lambda: asking == 1)
    assert not await lock.acquire(timeout=0)
    monkeypatch.setattr(states, "run_async", wait_and_run)
    tasks += [asyncio.create_task(lock.acquire()) for _ in range(3)]
    queues = lock._runner.backend.waiters.queues
    await until_async(lambda: len(queues.get(lock._runner.channel, ())) == 3 and asking >= 2)
    assert asking == 2, "one that found no queue, and the first in the queue"
    go_on.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
