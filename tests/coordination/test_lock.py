"""One holder at a time, whoever dies, forgets or comes late."""

import asyncio
import gc
import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headgate.coordination import AsyncLock, Lock
from headgate.coordination.states.machine import Operation
from headgate.errors import HeadgateError, InvalidKey, LockLost, LockTimeout, StoreUnavailable
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.awaited import Tools
from tests.support.clocks import until_async
from tests.support.clusters import wait_until
from tests.support.proxy import FaultyProxy
from tests.support.servers import Server, free_port

ROOT = Path(__file__).parent.parent.parent
LONG = 20.0  # seconds that nothing here takes on a machine that is not on fire


async def test_one_holder_at_a_time(tools: Tools, url: str, name: str) -> None:
    """Only the holder can renew or release the lock, and fences grow."""
    one, other = tools.Lock(name, store=url), tools.Lock(name, store=url)
    assert await one.acquire(timeout=0)
    assert one.held and not other.held
    assert not await other.acquire(timeout=0)
    assert not await other.release(), "owner only"
    assert one.held
    await one.ensure_held()
    assert not Lock(name, store=url).acquire(timeout=0), "threads and tasks share it"
    assert await one.release()
    assert not one.held
    assert not await one.release()
    assert await tools.Lock(name + "'", store=url).acquire(timeout=0), "another name is another lock"
    async with other as held:
        assert held.fence > one.fence


def test_with(url: str, name: str) -> None:
    """`with` acquires and releases it, or raises `LockTimeout`."""
    with Lock(name, store=url, ttl=5) as lock:
        assert lock.held
        with pytest.raises(LockTimeout, match="free"), Lock(name, store=url, timeout=0.01):
            raise AssertionError("two holders")
    assert not lock.held
    with pytest.raises(ZeroDivisionError), lock:
        print(1 / 0)
    assert lock.acquire(timeout=0), "it was released"
    lock.release()


def test_shared_object(url: str, name: str) -> None:
    """Threads that share one object hold the lock one at a time."""
    lock, inside, most = Lock(name, store=url), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_shared_object_own_acquisitions(redis_server: Server, name: str) -> None:
    """One has lost the lock and another has it, through the same object: each knows of its own."""
    lock, taken, leave = Lock(name, store=redis_server.url), threading.Event(), threading.Event()
    assert lock.acquire()
    fence = lock.fence
    redis_server.client().delete(f"lock:{{{name}}}")
    seen: list[Any] = []

    def other() -> None:
        with lock:
            seen.append(lock.fence)
            taken.set()
            assert leave.wait(LONG)
            seen.append(lock.held)
            lock.ensure_held()

    thread = threading.Thread(target=other)
    thread.start()
    assert taken.wait(LONG)
    assert lock.fence == fence < seen[0], "it would write with the other's"
    with pytest.raises(LockLost):
        lock.ensure_held()
    assert lock.lost.is_set() and not lock.held
    assert not lock.release()
    leave.set()
    thread.join()
    assert seen[1:] == [True], "it was released by one who had lost it"
    assert lock.acquire(timeout=LONG)
    lock.release()


def test_released_by_another_thread(url: str, name: str) -> None:
    """A thread without an acquisition of its own speaks for the holder."""
    lock = Lock(name, store=url)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    assert lock.held
    assert lock.release()
    assert not lock.held and not lock.release()


def test_threads_of_an_executor(url: str, name: str) -> None:
    """Acquired in one thread, left in another, though both have used it: as `asyncio.to_thread` may do it."""
    lock = Lock(name, store=url)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for executor in (one, other):
            assert executor.submit(lock.acquire, LONG).result()
            assert executor.submit(lock.release).result()
        assert one.submit(lock.acquire).result()
        assert other.submit(lambda: lock.held and lock.fence).result() == one.submit(lambda: lock.fence).result()
        other.submit(lock.ensure_held).result()
        assert other.submit(lock.release).result()
        assert not one.submit(lambda: lock.held).result()
        assert not one.submit(lock.release).result(), "once"
        assert Lock(name, store=url).acquire(timeout=0), "it was released"


def test_refused_caller_releases_nothing(url: str, name: str) -> None:
    """Of one object, as of two: it would end what it could not have."""
    lock = Lock(name, store=url, timeout=0)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire).result()
        assert not lock.acquire(timeout=0)
        assert not lock.held and not lock.release(), "it is the other's"
        with pytest.raises(LockTimeout), lock:
            raise AssertionError("it is the other's")
        assert other.submit(lambda: lock.held and lock.release()).result()


def test_second_release_ends_no_other(url: str, name: str) -> None:
    """Released within ``with``; by its end another thread may have the lock."""
    lock = Lock(name, store=url)
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(LockLost), lock:  # noqa: PT012  # what raises is the end of the block
            assert lock.release()
            assert other.submit(lock.acquire, LONG).result()
        assert other.submit(lambda: lock.held and lock.release()).result()


async def test_refused_task_releases_nothing(url: str, name: str) -> None:
    """Neither a refused task nor one that has released ends the acquisition of another."""
    lock = AsyncLock(name, store=url)
    taken, leave = asyncio.Event(), asyncio.Event()

    async def other() -> bool:
        assert await lock.acquire()
        taken.set()
        await leave.wait()
        return lock.held and await lock.release()

    task = asyncio.create_task(other())
    await taken.wait()
    assert not await lock.acquire(timeout=0)
    assert not lock.held and not await lock.release()
    leave.set()
    assert await task
    taken.clear()
    leave.clear()
    with pytest.raises(LockLost):  # noqa: PT012  # what raises is the end of the block
        async with lock:
            assert await lock.release()
            task = asyncio.create_task(other())
            await taken.wait()
    leave.set()
    assert await task


def test_holder_thread_died(name: str, clock: ManualClock) -> None:
    """Another thread can release what a thread that has ended acquired."""
    lock = Lock(name, ttl=30, max_hold=20, clock=clock)
    for _ in range(3):  # two lose it and say nothing, the third holds it when it ends
        clock.advance(31)
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
    del thread
    gc.collect()
    assert lock.release()
    assert not lock.release()
    assert Lock(name, clock=clock).acquire(timeout=0)


async def test_not_reentrant(tools: Tools, url: str, name: str) -> None:
    """A holder that would wait for itself for ever gets an error; with a time-out it is refused."""
    lock = tools.Lock(name, store=url)
    async with lock:
        with pytest.raises(RuntimeError, match="reentrant"):
            await lock.acquire()
        with pytest.raises(RuntimeError, match="reentrant"):
            async with lock:
                raise AssertionError("it would wait for itself")
        assert not await lock.acquire(timeout=0)
        assert lock.held
    assert await lock.acquire(timeout=0)
    await lock.release()


async def test_another_task_may_wait(url: str, name: str) -> None:
    """A task may wait for a lock that another task holds through the same object."""
    lock = AsyncLock(name, store=url)
    async with lock:
        waiter = asyncio.create_task(enter(lock))
        await asyncio.sleep(0.01)
    assert await waiter


async def enter(lock: AsyncLock) -> bool:
    async with lock:
        return lock.held


async def test_owner_is_the_calling_task(name: str, clock: ManualClock) -> None:
    """`asyncio.wait_for` may acquire it in a task of its own."""
    lock = AsyncLock(name, ttl=10, max_hold=5, clock=clock)
    lost = asyncio.Event()

    async def one() -> list[bool]:
        await asyncio.wait_for(lock.acquire(), LONG)
        clock.advance(11)
        lost.set()
        await taken.wait()
        return [lock.held, await lock.release()]

    async def other() -> list[bool]:
        await lost.wait()
        granted = await asyncio.wait_for(lock.acquire(timeout=0), LONG)
        taken.set()
        seen = await first
        return [granted, lock.held, await lock.release(), *seen]

    taken = asyncio.Event()
    first = asyncio.create_task(one())
    assert await other() == [True, True, True, False, False]


def test_waiter_is_woken(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the release: nothing else would make it look again in time."""
    holder, waiter = (Lock(name, store=url, ttl=300) for _ in "ab")
    backend = waiter._runner.backend
    monkeypatch.setattr(backend.states, "poll", 300.0)
    with ThreadPoolExecutor(1) as executor:
        for _ in range(5):
            assert holder.acquire(timeout=LONG)
            waits = executor.submit(waiter.acquire, 2 * LONG)
            wait_until(lambda: waiter._runner.channel in backend.waiters.queues, "it waits")
            time.sleep(0.02)  # mostly it has asked by then
            holder.release()
            assert waits.result(LONG)
            assert waiter.release()


def test_other_processes_are_woken(redis_server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the subscription: nothing else in this process knows of the release."""
    url = redis_server.patient_url
    elsewhere = Lock(name, store=RedisStore(url), ttl=300)  # shares nothing with what the URL opens but the server
    waiter = Lock(name, store=url, ttl=300)
    monkeypatch.setattr(waiter._runner.backend.states, "poll", 300.0)
    with ThreadPoolExecutor(1) as executor:
        for _ in range(5):
            assert elsewhere.acquire(timeout=LONG)
            waits = executor.submit(waiter.acquire, 2 * LONG)
            wait_until(lambda: redis_server.client().pubsub_numsub(f"lock:{{{name}}}")[0][1], "it listens")
            time.sleep(0.05)  # mostly it has asked by then
            elsewhere.release()
            assert waits.result(LONG)
            assert waiter.release()


def test_fence_without_its_counter(redis_server: Server, name: str) -> None:
    """Fences grow even if the key of the counter is lost."""
    lock = Lock(name, store=redis_server.url)
    seen = 0
    for _ in range(5):
        with lock:
            assert lock.fence > seen
            seen = lock.fence
        redis_server.client().flushall()


def test_redis_keys(redis_server: Server) -> None:
    """The documented keys, with a time to live."""
    client = redis_server.client()
    with Lock("re{in}dex", store=redis_server.url, ttl=12.0):
        assert redis_server.names() == ["lock:{re%7Bin%7Ddex}", "lock:{re%7Bin%7Ddex}:fence"]
        assert 0 < client.pttl("lock:{re%7Bin%7Ddex}") <= 12_000
        assert client.type("lock:{re%7Bin%7Ddex}") == "string"
    assert not client.exists("lock:{re%7Bin%7Ddex}")
    assert all(client.pttl(key) > 0 for key in client.keys("*")), "nothing stays for ever"


def left(lock: Lock | AsyncLock) -> float:
    """Seconds until somebody else can have it, as its store says to who asks in vain."""
    [granted, _, wait] = lock._runner.execute(Operation("acquire", ("somebody", 1000, "")))
    assert granted == 0, "somebody else could have it"
    return float(wait / 1000)


# A third of it is what these tests take, more than half what a machine may stand still meanwhile.
TTL = 6.0


@pytest.mark.slow
async def test_renewed_while_held(tools: Tools, redis_server: Server, name: str) -> None:
    """The lock is renewed before its TTL is over."""
    async with tools.Lock(name, store=redis_server.url, ttl=TTL) as lock:
        await asyncio.to_thread(wait_until, lambda: left(lock) < TTL - 1, "its time goes by")
        await asyncio.to_thread(wait_until, lambda: left(lock) > TTL - 1, "it is renewed")
        assert lock.held and not lock.lost.is_set()


def test_dropped_object(url: str, name: str) -> None:
    """A lock whose object was dropped expires."""
    Lock(name, store=url, ttl=0.3).acquire()
    gc.collect()  # an exception on the way may refer to it
    assert Lock(name, store=url).acquire(timeout=LONG)


def test_max_hold(url: str, name: str) -> None:
    """After *max_hold* it is not renewed, so it is lost when its TTL is over."""
    hung = Lock(name, store=url, ttl=0.3, max_hold=0.3)
    assert hung.acquire()
    assert hung.lost.wait(LONG)
    assert Lock(name, store=url).acquire(timeout=LONG)
    assert not hung.release()


def test_expiry(name: str, clock: ManualClock) -> None:
    """After its TTL the lock is free, and the old holder can neither renew nor release it."""
    one, other = (Lock(name, store="memory://", ttl=30.0, clock=clock) for _ in "ab")
    assert one.acquire()
    fence = one.fence
    clock.advance(31)
    assert not one.held
    with pytest.raises(LockLost):
        one.ensure_held()
    assert other.acquire(timeout=0)
    assert other.fence > fence
    assert not one.release()
    assert other.held


@pytest.mark.parametrize(("step", "times"), [(1, 100), (9.9, 10)])
async def test_renewed_within_advance(tools: Tools, step: float, times: int, name: str, clock: ManualClock) -> None:
    """The call that moves the clock renews what is due, so that it is the same every time."""
    pool, lock = tools.Pool(name, lease=30, clock=clock), tools.Lock(name, ttl=30, clock=clock)
    await pool.add("a")
    assert await lock.acquire()
    async with pool.acquire() as leased:
        for _ in range(times):
            clock.advance(step)
        assert lock.held and not leased.lost
        clock.advance(31)
        assert not lock.held and leased.lost, "a leap over the whole TTL is a pause of the process"
        assert lock.lost.is_set()
    assert await lock.acquire(timeout=0)


def test_many_locks_far_away(redis_server: Server, name: str) -> None:
    """One after the other they would take longer than their TTL."""

    def ends() -> list[int]:
        return [acquisition.until for lock in locks if (acquisition := lock._current())]

    with FaultyProxy(redis_server.port) as proxy:
        locks = [Lock(f"{name} {number}", store=f"{proxy.bare_url}?timeout=10", ttl=6.0) for number in range(60)]
        with ThreadPoolExecutor(10) as executor:
            assert all(executor.map(Lock.acquire, locks))
            proxy.delay = 0.15
            granted = ends()
            wait_until(lambda: all(map(operator.gt, ends(), granted)), "all are renewed")
            assert [lock.held for lock in locks] == [True] * 60
            proxy.delay = 0
            assert all(executor.map(Lock.release, locks))
        locks[0].close()


def test_taken_away(redis_server: Server, name: str) -> None:
    """Somebody deletes the key: whoever asks hears of it at once, the others within a third of the TTL."""

    def body(lock: Lock, then: Callable[[], object]) -> None:
        with lock:
            redis_server.client().delete(f"lock:{{{name}}}")
            then()

    lock = Lock(name, store=redis_server.url, ttl=30.0)
    with pytest.raises(LockLost, match="test_taken_away"):
        body(lock, lock.ensure_held)
    assert lock.lost.is_set() and not lock.held
    with pytest.raises(LockLost):
        body(lock, lambda: None)
    with pytest.raises(ZeroDivisionError):
        body(lock, lambda: 1 / 0)
    short = Lock(name, store=redis_server.url, ttl=0.5)
    with pytest.raises(LockLost):
        body(short, lambda: short.lost.wait(LONG) or print(1 / 0))


async def test_cancel_when_lost(redis_server: Server, name: str) -> None:
    """With *cancel_when_lost* the body is cancelled, and `LockLost` raised."""
    lock = AsyncLock(name, store=redis_server.url, ttl=0.5, cancel_when_lost=True)

    async def body() -> None:
        async with lock:
            redis_server.client().delete(f"lock:{{{name}}}")
            await asyncio.sleep(LONG)

    with pytest.raises(LockLost):
        await body()
    assert lock.lost.is_set()
    await asyncio.sleep(0)  # nothing is left of the cancellation
    assert await lock.acquire(timeout=LONG)
    await lock.release()


async def test_cancelled_while_waiting(url: str, name: str) -> None:
    """A cancelled waiter leaves the line, and the next one gets the lock."""
    async with AsyncLock(name, store=url, ttl=30):
        waiter = asyncio.create_task(AsyncLock(name, store=url).acquire())
        await asyncio.sleep(0.05)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    assert await AsyncLock(name, store=url).acquire(timeout=LONG), "long before its TTL is over"


async def test_cancelled_in_mid_acquire(redis_server: Server, name: str) -> None:
    """At every turn of the event loop: the lock is free afterwards, long before its TTL is over."""
    lock = AsyncLock(name, store=redis_server.patient_url)
    await lock.acquire()
    await lock.release()
    for turns in range(12):
        task = asyncio.create_task(lock.acquire())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            if await task:
                await lock.release()
        except asyncio.CancelledError:
            pass
        other = AsyncLock(name, store=redis_server.patient_url)
        assert await other.acquire(timeout=LONG), f"after {turns} turns"
        await other.release()


async def test_10_000_waiters(redis_server: Server, name: str) -> None:
    """10,000 waiting tasks need a handful of connections."""
    holder = AsyncLock(name, store=redis_server.patient_url)
    assert await holder.acquire()
    lock = AsyncLock(name, store=redis_server.patient_url)
    before = len(redis_server.client().client_list())
    tasks = [asyncio.create_task(lock.acquire()) for _ in range(10_000)]
    await asyncio.sleep(1.2)  # longer than anybody sleeps before it looks again
    assert len(redis_server.client().client_list()) - before <= 6
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    await holder.release()
    assert await tasks[0]
    await lock.release()


def test_redis_is_down(name: str) -> None:
    """It raises `StoreUnavailable`: at once, or when the time is over."""
    lock = Lock(name, store=f"redis://127.0.0.1:{free_port()}?timeout=0.5")
    with pytest.raises(StoreUnavailable, match=re.escape(name)):
        lock.acquire()
    with pytest.raises(StoreUnavailable):
        lock.acquire(timeout=0.3)
    lock.close()


def test_redis_goes_away_and_comes_back(mortal_server: Server, name: str) -> None:
    """The holder is told before anybody else can have it; whoever waits with a time-out waits on."""
    url = mortal_server.patient_url
    holder, waiter = Lock(name, store=url, ttl=1.0), Lock(name, store=url)
    assert holder.acquire()
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(waiter.acquire(timeout=LONG)))
    thread.start()
    mortal_server.kill()
    assert holder.lost.wait(LONG)
    assert not holder.held
    mortal_server.restart()
    thread.join()
    assert got == [True]
    assert not holder.release()
    waiter.release()
    waiter.close()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, InvalidKey, "256"),
    ({"name": "a\nb"}, InvalidKey, "control"),
    ({"name": None}, InvalidKey, "text"),
    ({"name": "x", "ttl": 0}, ValueError, "ttl"),
    ({"name": "x", "ttl": -1}, ValueError, "ttl"),
    ({"name": "x", "ttl": 0.001}, ValueError, "0.01"),
    ({"name": "x", "ttl": float("nan")}, ValueError, "ttl"),
    ({"name": "x", "ttl": float("inf")}, ValueError, "ttl"),
    ({"name": "x", "ttl": "30"}, ValueError, "ttl"),
    ({"name": "x", "ttl": True}, ValueError, "ttl"),
    ({"name": "x", "max_hold": 0}, ValueError, "max_hold"),
    ({"name": "x", "timeout": -1}, ValueError, "timeout"),
    ({"name": "x", "store": "mongodb://h"}, ValueError, "memory://"),
    ({"name": "x", "store": 5}, ValueError, "store"),
    ({"name": "x", "store": MemoryStore(), "clock": ManualClock()}, ValueError, "clock"),
]


@pytest.mark.parametrize("door", [Lock, AsyncLock])
@pytest.mark.parametrize(
    ("arguments", "error", "word"), BAD, ids=[", ".join(row[0]) + f" {number}" for number, row in enumerate(BAD)]
)
def test_bad_arguments(door: Any, arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    """The error says what would be right."""
    with pytest.raises(error, match=word):
        door(**arguments)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
def test_bad_timeout(timeout: Any, url: str, name: str) -> None:
    """A bad time-out is an error, and the lock stays free."""
    lock = Lock(name, store=url)
    with pytest.raises(ValueError, match="timeout"):
        lock.acquire(timeout=timeout)
    assert lock.acquire(timeout=0)
    lock.release()


def test_exceptions() -> None:
    """Errors of a lock are errors of headgate; `LockTimeout` is a `TimeoutError`."""
    assert issubclass(LockLost, HeadgateError)
    assert issubclass(LockTimeout, TimeoutError)


def test_same_store(name: str) -> None:
    """Equal URLs share states; store objects have states of their own in memory."""
    memory = MemoryStore()
    with Lock(name, store=memory):
        assert not Lock(name, store=memory).acquire(timeout=0)
        assert Lock(name, store=MemoryStore()).acquire(timeout=0), "another store"
        assert Lock(name).acquire(timeout=0), "the process's own"


HOLD = """
import sys, time
from headgate.coordination import Lock
lock = Lock(sys.argv[2], store=sys.argv[1], ttl=2.0)
assert lock.acquire(timeout=20)
print(lock.fence, flush=True)
time.sleep(60)
"""


def test_killed_holder(redis_server: Server, name: str) -> None:
    """The lock of a killed process is free after its TTL."""
    command = [sys.executable, "-c", HOLD, redis_server.patient_url, name]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout
    fence = int(holder.stdout.readline())
    lock = Lock(name, store=redis_server.patient_url)
    assert not lock.acquire(timeout=0)
    os.kill(holder.pid, signal.SIGKILL)
    assert lock.acquire(timeout=LONG)
    assert lock.fence > fence
    lock.release()
    holder.communicate()


FORK = """
import os, sys
from headgate.coordination import Lock, LockLost
lock = Lock(sys.argv[2], store=sys.argv[1])
assert lock.acquire(timeout=20)
child = os.fork()
if child == 0:
    other = Lock(sys.argv[2], store=sys.argv[1])
    assert not lock.held and not lock.release()
    try:
        lock.ensure_held()
    except LockLost:
        pass
    else:
        os._exit(2)
    os._exit(0 if not other.acquire(timeout=0.2) and Lock("else", store=sys.argv[1]).acquire(timeout=5) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
lock.ensure_held()
"""


def test_fork(redis_server: Server, name: str) -> None:
    """A forked child does not hold its parent's lock, and can use the object."""
    command = [sys.executable, "-c", FORK, redis_server.patient_url, name]
    subprocess.run(command, cwd=ROOT, check=True, timeout=40)


FORK_AMID = """
import os, signal, threading
from headgate.coordination import Lock
holder, lock = Lock("x", ttl=1.0), Lock("x")
assert holder.acquire()
threading.Thread(target=lock.acquire, daemon=True).start()
while not lock._runner.backend.waiters.queues:
    pass
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if Lock("x").acquire() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_fork_while_others_wait() -> None:
    """Those threads are not in the child, and it does not wait behind them."""
    subprocess.run([sys.executable, "-c", FORK_AMID], cwd=ROOT, check=True, timeout=40)


# Tasks that wait, or are about to hear that they need not, are copied by a fork. The child ends its copies, the
# first before it listens itself and the others after.
FORK_TASKS = """
import asyncio, os, sys, time
import redis
from headgate.coordination import AsyncCircuitBreaker, AsyncLock, AsyncPool, AsyncWaitQueue, Lock, background_retry

PROBES = "circuit_breaker:{b}:probes"

async def main():
    url = sys.argv[1]
    holder, lock, slow = AsyncLock("x", store=url), AsyncLock("x", store=url), AsyncLock("slow", store=sys.argv[2])
    pool, queue = AsyncPool("p", store=url), AsyncWaitQueue("q", store=url)
    breaker, probes = (AsyncCircuitBreaker("b", store=each, failures=1, open_for=0.01) for each in (url, sys.argv[2]))
    await breaker.record_failure()
    while not await breaker.try_recover():
        await asyncio.sleep(0.01)
    await holder.acquire()
    waits = [asyncio.create_task(lock.acquire()) for _ in range(2)]
    others = [asyncio.create_task(wait) for wait in (pool.acquire(), queue.wait("a"))]
    client = redis.Redis(port=int(sys.argv[3]))
    while len(lock._runner.backend.waiters.queues.get(lock._runner.channel, ())) < 2:
        await asyncio.sleep(0.01)
    while not (await queue.size() and (await pool.status()).waiting):
        await asyncio.sleep(0.01)
    others += [asyncio.create_task(call) for call in (slow.acquire(), probes.__aenter__())]  # until the answer comes
    while client.exists("lock:{slow}", PROBES) < 2:
        await asyncio.sleep(0.001)
    if (child := os.fork()) == 0:
        waits[0].get_coro().close()
        Lock("y", store=url).acquire()
        assert not Lock("y", store=url).acquire(timeout=0.1)
        for task in (waits[1], *others):
            task.get_coro().close()
        assert not asyncio.run(slow.acquire(timeout=0))
        while background_retry._PENDING:
            time.sleep(0.01)
        os._exit(0)
    assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
    await holder.release()
    await pool.add("m")
    assert await queue.dequeue() == "a"
    for task in (waits[0], *others):
        await asyncio.wait_for(task, 20)
    await slow.ensure_held()
    assert client.exists(PROBES), "nobody else may probe"

asyncio.run(main())
"""


def test_a_fork_while_tasks_wait(redis_server: Server) -> None:
    """They are the parent's: to end them in the child ends nothing else."""
    with FaultyProxy(redis_server.port) as proxy:
        proxy.delay = 0.3
        urls = [redis_server.patient_url, f"{proxy.bare_url}?timeout=10"]
        command = [sys.executable, "-c", FORK_TASKS, *urls, str(redis_server.port)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=40)


def test_stopped_loop(url: str, name: str) -> None:
    """A waiter in an event loop that does not run holds up no other."""
    holder, other = Lock(name, store=url), Lock(name, store=url)
    assert holder.acquire()
    loop = asyncio.new_event_loop()

    async def wait_in_line() -> asyncio.Task[bool]:
        task = asyncio.create_task(AsyncLock(name, store=url).acquire())
        await asyncio.sleep(0.05)
        return task

    task = loop.run_until_complete(wait_in_line())
    holder.release()
    assert other.acquire(timeout=LONG)
    other.release()
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_blocked_loop(url: str, name: str) -> None:
    """One who is not first asks when its time is over: the first may not have looked for as long."""
    holder, lock = Lock(name, store=url), Lock(name, store=url)
    assert holder.acquire()
    blocked, go_on = threading.Event(), threading.Event()

    async def block() -> None:
        waiter = asyncio.create_task(AsyncLock(name, store=url).acquire())
        await asyncio.sleep(0.05)
        blocked.set()
        go_on.wait(LONG)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(block(),))
    thread.start()
    assert blocked.wait(LONG)
    holder.release()
    try:
        assert lock.acquire(timeout=0)
        lock.release()
        assert lock.acquire(timeout=0.1)
        lock.release()
    finally:
        go_on.set()
        thread.join()


def test_lost_a_little_early(mortal_server: Server, name: str, clock: ManualClock) -> None:
    """A twentieth of the TTL: what two clocks may differ by."""
    locks = [Lock(name + each, store=mortal_server.patient_url, ttl=20, clock=clock) for each in "ab"]
    assert all(lock.acquire() for lock in locks)
    mortal_server.kill()
    clock.advance(18.9)
    assert all(lock.held for lock in locks)
    clock.advance(0.2)
    assert not any(lock.held for lock in locks) and all(lock.lost.is_set() for lock in locks)
    assert not locks[0].release(), "lost, though nobody can be asked"
    locks[0].close()


@pytest.mark.parametrize("renewed", [False, True])
def test_ttl_begins_with_the_request(
    renewed: bool, name: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the answer, which may come late."""
    lock = Lock(name, ttl=30, clock=clock)
    states = lock._runner.backend.states
    run = states.run

    def late(*arguments: Any) -> Any:
        reply = run(*arguments)
        clock.advance(5)
        return reply

    def never(*_: Any) -> Any:
        raise StoreUnavailable(name)

    if renewed:
        assert lock.acquire()
    monkeypatch.setattr(states, "run", late)
    if renewed:
        lock.ensure_held()
    else:
        assert lock.acquire()
    monkeypatch.setattr(states, "run", never)
    clock.advance(24)
    assert lock.held
    clock.advance(1)
    assert not lock.held


def test_release_is_retried(redis_server: Server, name: str) -> None:
    """A release without an answer is retried in the background."""
    with FaultyProxy(redis_server.port) as proxy:
        lock = Lock(name, store=f"{proxy.bare_url}?timeout=0.5", ttl=100)
        assert lock.acquire(timeout=LONG)
        proxy.swallow_requests = True
        assert lock.release(), "it was ours"
        assert redis_server.client().exists(f"lock:{{{name}}}")
        proxy.swallow_requests = False
        assert Lock(name, store=redis_server.patient_url).acquire(timeout=LONG)
        lock.close()


async def test_cancelled_release_is_retried(redis_server: Server, name: str) -> None:
    """A release that was cancelled is retried in the background."""
    with FaultyProxy(redis_server.port) as proxy:
        lock = AsyncLock(name, store=f"{proxy.bare_url}?timeout=10", ttl=100)
        assert await lock.acquire(timeout=LONG)
        proxy.swallow_requests = True
        task = asyncio.create_task(lock.release())
        await until_async(lambda: proxy.swallowed)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert redis_server.client().exists(f"lock:{{{name}}}")
        proxy.swallow_requests = False
        proxy.cut()  # nobody waits for what was swallowed
        assert await AsyncLock(name, store=redis_server.patient_url).acquire(timeout=LONG)
        await lock.aclose()


def test_counter_is_renewed(redis_server: Server, name: str) -> None:
    """The counter of fences does not expire while the lock is renewed."""
    client = redis_server.client()
    with Lock(name, store=redis_server.patient_url) as lock:
        client.pexpire(f"lock:{{{name}}}:fence", 60_000)
        lock.ensure_held()
        assert client.pttl(f"lock:{{{name}}}:fence") > 60_000


async def test_ensure_held_after_max_hold(tools: Tools, redis_server: Server, name: str) -> None:
    """It asks, although it renews no more: the lock may have been taken away."""
    lock = tools.Lock(name, store=redis_server.patient_url, max_hold=0.01)
    other = tools.Lock(name, store=redis_server.patient_url)
    assert await lock.acquire()
    await asyncio.sleep(0.02)
    await lock.ensure_held()
    redis_server.client().delete(f"lock:{{{name}}}")
    assert await other.acquire(timeout=0)
    with pytest.raises(LockLost):
        await lock.ensure_held()
    assert not lock.held and lock.lost.is_set()
    await other.release()


async def test_locked(tools: Tools, url: str, name: str) -> None:
    """Whether the lock is held at all, through this object or another."""
    lock, other = tools.Lock(name, store=url), tools.Lock(name, store=url)
    assert not await lock.locked()
    assert await other.acquire()
    assert await lock.locked() and await other.locked()
    assert await other.release()
    assert not await lock.locked()


async def test_force_release(tools: Tools, url: str, name: str) -> None:
    """An operator takes the lock from its holder, which learns of it; the next fence is larger."""
    lock, operator, other = (tools.Lock(name, store=url) for _ in range(3))
    assert not await operator.force_release(), "it is not held"
    assert await lock.acquire()
    assert await operator.force_release()
    assert not await operator.locked()
    assert not await operator.force_release()
    assert await other.acquire(timeout=0)
    assert other.fence > lock.fence
    with pytest.raises(LockLost):
        await lock.ensure_held()
    assert not lock.held and lock.lost.is_set()
    assert not await lock.release()
    assert await other.locked(), "the release of the old holder ends nothing"
    await other.release()
    with pytest.raises(LockLost):
        async with lock:
            await operator.force_release()


def test_force_release_wakes_a_waiter(url: str, name: str) -> None:
    """A waiter gets the lock at once."""
    lock, waiter = Lock(name, store=url), Lock(name, store=url)
    assert lock.acquire()
    with ThreadPoolExecutor(1) as executor:
        acquired = executor.submit(waiter.acquire, LONG)
        wait_until(lambda: not acquired.done(), "it waits")
        assert lock.force_release()
        assert acquired.result()
    waiter.release()
