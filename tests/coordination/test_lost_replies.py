"""Replies that are lost, late, doubled or cut off in the middle, once for every operation of every state machine.

Each scenario runs on Redis and in memory. A proxy before Redis breaks the first reply to every operation, which is then
sent again. Memory runs every operation once, so equal replies mean that Redis did nothing twice and lost nothing.
"""

import asyncio
import importlib
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headgate.coordination import (
    AsyncLock,
    AsyncPool,
    AsyncSemaphore,
    AsyncWaitQueue,
    Lock,
    LockTimeout,
    Pool,
    Semaphore,
    WaitQueue,
    background_retry,
    states,
)
from headgate.coordination.states.breaker import BREAKER
from headgate.coordination.states.lock import LOCK
from headgate.coordination.states.machine import Operation, Reply, StateMachine
from headgate.coordination.states.pool import POOL
from headgate.coordination.states.queue import QUEUE
from headgate.coordination.states.semaphore import SEMAPHORE
from headgate.errors import StoreUnavailable
from tests.coordination.test_lock_twins import LockTwins, comparable
from tests.support.clocks import until, until_async
from tests.support.clusters import wait_until
from tests.support.proxy import FaultyProxy
from tests.support.retries import answered
from tests.support.servers import Server
from tests.support.twins import Twins

ROOT = Path(__file__).parent.parent.parent
LONG = 20.0
TTL = 30_000
SECOND = 1_000_000
RULES = (2, 10 * SECOND, 2, 4 * SECOND, 0, 60 * SECOND, 5)
BY_RATE = (2, 10 * SECOND, 2, 4 * SECOND, 500_000, 60 * SECOND, 3)
SLOTS = (10 * SECOND, 3)
POOL_RULES = (5 * SECOND, 2 * SECOND, "1,2,10000000,2,3,20000000")
SCENARIOS: dict[str, list[tuple[Any, ...]]] = {
    "lock": [
        ("acquire", "a", TTL, ""),
        ("acquire", "b", TTL, ""),
        ("renew", "a", TTL),
        ("renew", "b", TTL),
        ("release", "b", TTL),
        ("release", "a", TTL),
        ("acquire", "c", TTL, ""),
        ("acquire", "d", TTL, "c"),
        ("release", "c", TTL),
        ("release", "d", TTL),
        ("acquire", "e", TTL, ""),
        ("peek", "e", TTL),
        ("evict", "f", TTL),
        ("release", "e", TTL),
        ("acquire", "g", TTL, ""),
        ("evict", "f", TTL),
        ("peek", "g", TTL),
    ],
    "semaphore": [
        ("acquire", "a", *SLOTS, 2),
        ("acquire", "b", *SLOTS, 1),
        ("acquire", "c", *SLOTS, 1),
        ("renew", "a", *SLOTS, 1),
        ("renew", "c", *SLOTS, 1),
        ("release", "c", *SLOTS, 1),
        ("release", "a", *SLOTS, 1),
        ("acquire", "a", *SLOTS, 1),
        ("peek", "b", *SLOTS, 1),
        ("evict", "d", *SLOTS, 1),
        ("acquire", "e", *SLOTS, 3),
        ("evict", "d", *SLOTS, 1),
        ("peek", "e", *SLOTS, 1),
        (11.0,),
        ("evict", "f", *SLOTS, 1),
        ("claim", "g", *SLOTS, 2, 5 * SECOND, 1),
        ("claim", "h", *SLOTS, 2, 5 * SECOND, 0),
        ("status", "", *SLOTS, 1),
        ("release", "g", *SLOTS, 2),
        ("claim", "h", *SLOTS, 2, 5 * SECOND, 0),
    ],
    "breaker": [
        ("admit", "a", -1, "", *RULES),
        ("report", "a", 0, "failure", *RULES),
        ("report", "b", 0, "failure", *RULES),
        ("peek", "", -1, "", *RULES),
        ("admit", "c", -1, "", *RULES),
        ("force", "d", -1, "CLOSED", *RULES),
        ("force", "e", -1, "", *RULES),
        ("report", "f", -1, "failure", *RULES),
        ("report", "g", -1, "failure", *RULES),
        (11.0,),
        ("recover", "h", -1, "", *RULES),
        ("admit", "i", -1, "", *RULES),
        ("admit", "j", -1, "", *RULES),
        ("admit", "k", -1, "", *RULES),
        ("report", "i", 5, "success", *RULES),
        ("report", "j", 5, "ignored", *RULES),
        ("admit", "l", -1, "", *RULES),
        ("report", "l", 5, "refused", *RULES),
        ("admit", "p", -1, "", *RULES),
        ("admit", "q", -1, "", *RULES),
        ("report", "q", 5, "success", *RULES),
        ("report", "m", -1, "failure", *BY_RATE),
        ("report", "n", -1, "success", *BY_RATE),
        ("report", "o", -1, "failure", *BY_RATE),
    ],
    "pool": [
        ("add", "", *POOL_RULES, "a", "b"),
        ("acquire", "1", *POOL_RULES, 0),
        ("acquire", "2", *POOL_RULES, 0),
        ("acquire", "3", *POOL_RULES, 1),
        ("renew", "1", *POOL_RULES),
        ("settle", "1", *POOL_RULES, "failure", 0, 0, 1),
        ("acquire", "4", *POOL_RULES, 0),
        ("acquire", "3", *POOL_RULES, 1),
        ("settle", "3", *POOL_RULES, "failure", 0, 0, 1),
        ("status", "", *POOL_RULES),
        (11.0,),
        ("renew", "2", *POOL_RULES),
        ("settle", "2", *POOL_RULES, "success", 0, 0, 1),
        ("acquire", "5", *POOL_RULES, 0),
        ("settle", "5", *POOL_RULES, "", 5 * SECOND, 1, 1),
        ("retire", "", *POOL_RULES, "b"),
        ("add_new", "", *POOL_RULES, "b"),
        ("add", "", *POOL_RULES, "b"),
        ("status", "", *POOL_RULES),
    ],
    "queue": [
        ("enqueue", "1", "a", 10 * SECOND, 3, 0),
        ("enqueue", "2", "b", 10 * SECOND, 3, 2 * SECOND),
        ("enqueue", "3", "c", 10 * SECOND, 3, 0),
        ("enqueue", "4", "d", 10 * SECOND, 3, 0),
        ("enqueue", "5", "a", 10 * SECOND, 3, 0),
        ("status", "", "b", 10 * SECOND, 3, 2 * SECOND),
        ("heartbeat", "", "", 10 * SECOND, 3, 2 * SECOND, "", "b", "", "c", "w", "nobody", "w"),
        ("dequeue", "6", "", 10 * SECOND, 3, 0),
        ("undo", "6", "", 10 * SECOND, 3, 2 * SECOND),
        ("dequeue", "7", "", 10 * SECOND, 3, 0),
        ("cancel", "8", "c", 10 * SECOND, 3, 0),
        ("size", "", "", 10 * SECOND, 3, 0),
        ("dequeue", "9", "", 10 * SECOND, 3, 0),
        ("dequeue", "10", "", 10 * SECOND, 3, 0),
        ("status", "", "b", 10 * SECOND, 3, 0),
    ],
}


CALLERS = ["threads", "tasks"]
MACHINES = {"lock": LOCK, "semaphore": SEMAPHORE, "breaker": BREAKER, "pool": POOL, "queue": QUEUE}


class Fault(NamedTuple):
    """How to break the next reply, how many were broken so far, and the time-out of an operation meanwhile."""

    begin: Callable[[FaultyProxy], None]
    count: Callable[[FaultyProxy], int]
    timeout: float = 10.0


def lose_one(proxy: FaultyProxy) -> None:
    proxy.truncate = 0


def cut_one(proxy: FaultyProxy) -> None:
    proxy.truncate = 5


def double_one(proxy: FaultyProxy) -> None:
    proxy.double = True


def hold_one_back(proxy: FaultyProxy) -> None:
    proxy.hold_back = 0.12


# Operations that change nothing.
READS = {
    "lock": Operation("renew", ("no-owner", TTL)),
    "semaphore": Operation("peek", ("", *SLOTS, 1)),
    "circuit_breaker": Operation("peek", ("", -1, "", *RULES)),
    "pool": Operation("status", ("", *POOL_RULES)),
    "token_queue": Operation("size", ("", "", SECOND, 0, 0)),
}

FAULTS = {
    "lost": Fault(lose_one, lambda proxy: proxy.truncated),
    "cut off": Fault(cut_one, lambda proxy: proxy.truncated),
    "doubled": Fault(double_one, lambda proxy: proxy.doubled),
    "late": Fault(hold_one_back, lambda proxy: proxy.held_back, timeout=0.06),  # after the time-out of the caller
}


class DistantTwins(Twins):
    """Twins that send each operation to Redis, from a thread or a task, until there is a reply."""

    def __init__(self, machine: StateMachine, server: Server, url: str, timeout: float, caller: str) -> None:
        super().__init__(machine, server, url=url, timeout=timeout)
        states = self.redis
        self.loop = asyncio.Runner()

        def once(machine: StateMachine, name: str, step: Operation) -> Reply:
            if caller == "threads":
                return states.run(machine, name, step)
            return self.loop.run(states.run_async(machine, name, step))

        def until_answered(machine: StateMachine, name: str, step: Operation) -> Reply:
            until = time.monotonic() + 20
            while True:
                try:
                    return once(machine, name, step)
                except StoreUnavailable:
                    assert time.monotonic() < until, "no reply in 20 seconds"
                if name == self.name:  # the next operation must not get the reply that comes late
                    aside = self.memory.run(machine, "aside", READS[machine.prefix])
                    assert until_answered(machine, "aside", READS[machine.prefix]) == aside

        self.ask = until_answered

    def comparable(self, answer: Sequence[Any]) -> Sequence[Any]:
        return comparable(answer) if self.machine is LOCK else answer

    def close(self) -> None:
        self.loop.close()
        super().close()


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("tool", SCENARIOS)
def test_every_operation(tool: str, kind: str, caller: str, redis_server: Server) -> None:
    """An operation that is sent again after a broken reply has its effect once."""
    machine, steps, fault = MACHINES[tool], SCENARIOS[tool], FAULTS[kind]
    with FaultyProxy(redis_server.port) as proxy:
        twins = DistantTwins(machine, redis_server, proxy.url, fault.timeout, caller)
        # the server knows the script from now on, so the broken reply is that of an operation
        twins.ask(machine, "warm-up", Operation(steps[0][0], steps[0][1:]))
        for op, *arguments in steps:
            twins.clock.advance(op if isinstance(op, float) else 0.000_001)
            if isinstance(op, str):
                before = fault.count(proxy)
                fault.begin(proxy)
                twins.step(op, *arguments)
                assert fault.count(proxy) == before + 1, "no reply was broken"
        twins.close()


def test_all_operations_have_a_row() -> None:
    """A new state machine or operation must be tried with broken replies, too."""
    found = {
        module.name: importlib.import_module(f"{states.__name__}.{module.name}")
        for module in pkgutil.iter_modules(states.__path__)
    }
    machines = {
        name: value
        for name, module in found.items()
        for value in vars(module).values()
        if isinstance(value, StateMachine)
    }
    assert machines == MACHINES and SCENARIOS.keys() == MACHINES.keys()
    for tool, machine in MACHINES.items():
        state = machine.state
        assert isinstance(state, type)
        known = {name for name, value in vars(state).items() if callable(value) and name[0] != "_"} - {"is_expired"}
        in_lua = set(re.findall(r"op == '(\w+)'", machine.lua))
        tried = {row[0] for row in SCENARIOS[tool] if isinstance(row[0], str)}
        assert in_lua <= known == tried, tool


def through(proxy: FaultyProxy, timeout: float = 10) -> str:
    return f"{proxy.bare_url}?timeout={timeout}"


def test_lock(redis_server: Server, name: str) -> None:
    """Acquire, renewal and release whose reply is lost succeed all the same."""
    with FaultyProxy(redis_server.port) as proxy:
        lock, other = Lock(name, store=through(proxy)), Lock(name, store=redis_server.patient_url)
        with lock:
            pass
        for _ in range(3):
            lose_one(proxy)
            assert lock.acquire(timeout=0), "no caller would know that it holds the lock"
            assert not other.acquire(timeout=0)
            lose_one(proxy)
            lock.ensure_held()
            lose_one(proxy)
            assert lock.release()
            assert other.acquire(timeout=0)
            other.release()
        assert proxy.truncated == 9
        lock.close()


def test_lock_without_any_reply(redis_server: Server, name: str) -> None:
    """An acquire that failed for its caller is undone, or taken over by the next acquire of the same lock."""
    with FaultyProxy(redis_server.port) as proxy:
        lock, other = Lock(name, store=through(proxy, 1.0)), Lock(name, store=redis_server.patient_url)
        assert lock.acquire(timeout=LONG) and lock.release()
        proxy.swallow_replies = True
        with pytest.raises(StoreUnavailable):
            lock.acquire(timeout=0)
        proxy.swallow_replies = False
        assert lock.acquire(timeout=LONG), "its own acquisition blocks it"
        assert not other.acquire(timeout=0)
        proxy.swallow_replies = True
        assert lock.release(), "it was held until now"
        proxy.swallow_replies = False
        assert other.acquire(timeout=LONG)
        other.release()
        lock.close()


async def test_async_lock(redis_server: Server, name: str) -> None:
    """The same for asyncio; and an acquire that is cancelled leaves the lock free."""
    with FaultyProxy(redis_server.port) as proxy:
        lock = AsyncLock(name, store=through(proxy))
        async with lock:
            pass
        lose_one(proxy)
        assert await lock.acquire(timeout=0)
        lose_one(proxy)
        assert await lock.release()
        proxy.delay = 0.05
        tasks = [asyncio.create_task(AsyncLock(name, store=through(proxy)).acquire()) for _ in range(3)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        proxy.delay = 0
        assert await AsyncLock(name, store=redis_server.patient_url).acquire(timeout=LONG)
        await lock.aclose()


def test_semaphore(redis_server: Server, name: str) -> None:
    """An acquire, a renewal and a release whose reply is lost succeed, and what is in use is what is held."""
    with FaultyProxy(redis_server.port) as proxy:
        semaphore = Semaphore(name, limit=4, store=through(proxy))
        direct = Semaphore(name, limit=4, store=redis_server.patient_url)
        semaphore.status()
        with semaphore.acquire():
            pass  # the server knows the script from now on
        for _ in range(3):
            lose_one(proxy)
            lease = semaphore.acquire(timeout=0, weight=3)
            assert direct.status().in_use == 3
            lose_one(proxy)
            lease.ensure_held()
            lose_one(proxy)
            with pytest.raises(LockTimeout):
                semaphore.acquire(timeout=0, weight=2)
            lose_one(proxy)
            assert lease.release()
            assert direct.status().in_use == 0
        assert proxy.truncated == 12
        semaphore.close()


def test_semaphore_without_any_reply(redis_server: Server, name: str) -> None:
    """Room that its caller never heard of, or a place in the queue, is given back in the background."""
    with FaultyProxy(redis_server.port) as proxy:
        semaphore = Semaphore(name, limit=1, store=through(proxy, 0.5))
        direct = Semaphore(name, limit=1, store=redis_server.patient_url)
        answered(semaphore.status)
        proxy.swallow_replies = True
        with pytest.raises(StoreUnavailable):
            semaphore.acquire(timeout=0)
        proxy.swallow_replies = False
        with direct.acquire(timeout=LONG) as lease:  # long before the lease would end
            proxy.swallow_replies = True
            with pytest.raises(StoreUnavailable):
                semaphore.acquire(timeout=0.2)
            proxy.swallow_replies = False
            wait_until(lambda: direct.status().waiting == 0, "it has left the queue")
            assert lease.held
        own = semaphore.acquire(timeout=LONG)
        proxy.swallow_requests = True
        assert own.release(), "it was held until now"
        proxy.swallow_requests = False
        direct.acquire(timeout=LONG).release()
        semaphore.close()


async def test_semaphore_cancelled(redis_server: Server, name: str) -> None:
    """An acquire that is cancelled before its reply leaves nothing behind."""
    with FaultyProxy(redis_server.port) as proxy:
        semaphore = AsyncSemaphore(name, limit=2, store=through(proxy))
        direct = AsyncSemaphore(name, limit=2, store=redis_server.patient_url)
        await semaphore.status()
        proxy.delay = 0.05
        tasks = [asyncio.ensure_future(semaphore.acquire(weight=2)) for _ in range(3)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        proxy.delay = 0
        async with direct.acquire(timeout=LONG, weight=2):
            pass
        await semaphore.aclose()


def test_pool(redis_server: Server, name: str) -> None:
    """Ready, leased and retired members always add up to all members, whatever reply is lost."""

    def members() -> int:
        status = direct.status()
        return status.ready + status.leased + status.retired

    with FaultyProxy(redis_server.port) as proxy:
        pool, direct = Pool(name, store=through(proxy)), Pool(name, store=redis_server.patient_url)
        pool.status()
        lose_one(proxy)
        pool.add(*"abcde")
        taken = []
        for leases in range(1, 4):
            lose_one(proxy)
            taken.append(pool.acquire(timeout=0))
            assert (members(), direct.status().leased) == (5, leases)
        lose_one(proxy)
        assert taken[0].renew()
        for leases in (2, 1, 0):
            lose_one(proxy)
            assert taken.pop().release(retire=leases == 0)
            assert (members(), direct.status().leased) == (5, leases)
        assert direct.status().retired == 1
        assert proxy.truncated == 8
        pool.close()


def test_pool_without_any_reply(redis_server: Server, name: str) -> None:
    """A lease that its caller never heard of is settled in the background."""
    with FaultyProxy(redis_server.port) as proxy:
        pool, direct = Pool(name, store=through(proxy, 1.0)), Pool(name, store=redis_server.patient_url)
        answered(lambda: pool.add("a"))
        proxy.swallow_replies = True
        with pytest.raises(StoreUnavailable):
            pool.acquire(timeout=0)
        proxy.swallow_replies = False
        with direct.acquire(timeout=LONG) as leased:
            assert leased.member == "a", "long before the lease would end"
        pool.close()


async def test_pool_cancelled(redis_server: Server, name: str) -> None:
    """An acquire that is cancelled before its reply leaves no lease."""
    with FaultyProxy(redis_server.port) as proxy:
        pool, direct = AsyncPool(name, store=through(proxy)), AsyncPool(name, store=redis_server.patient_url)
        await pool.add("a")
        proxy.delay = 0.05
        tasks = [asyncio.ensure_future(pool.acquire()) for _ in range(3)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        proxy.delay = 0
        async with direct.acquire(timeout=LONG) as leased:
            assert leased.member == "a"
        await pool.aclose()


def test_queue(redis_server: Server, name: str) -> None:
    """An entry is served once, although every reply to enqueue and to each second dequeue is lost."""
    with FaultyProxy(redis_server.port) as proxy:
        queue, direct = WaitQueue(name, store=through(proxy)), WaitQueue(name, store=redis_server.patient_url)
        assert len(queue) == 0
        seen = []
        for number in range(10):
            lose_one(proxy)
            queue.enqueue(f"r{number}")
            if number % 2:
                lose_one(proxy)
                seen.append(queue.dequeue())
                seen.append(direct.dequeue())
        assert seen == [f"r{number}" for number in range(10)]
        assert len(direct) == 0
        queue.close()


def test_queue_without_any_reply(redis_server: Server, name: str) -> None:
    """An entry that was taken out by a dequeue that failed is put back."""
    with FaultyProxy(redis_server.port) as proxy:
        queue, direct = WaitQueue(name, store=through(proxy, 1.0)), WaitQueue(name, store=redis_server.patient_url)
        for id in ("a", "b"):
            direct.enqueue(id)
        assert answered(lambda: len(queue)) == 2
        proxy.swallow_replies = True
        with pytest.raises(StoreUnavailable):
            queue.dequeue()
        proxy.swallow_replies = False
        wait_until(lambda: direct.position("a") == 0, "the entry is the first again")
        assert [direct.dequeue(), direct.dequeue(), direct.dequeue()] == ["a", "b", None]
        queue.close()


async def test_queue_cancelled(redis_server: Server, name: str) -> None:
    """The entry that a cancelled dequeue took out is put back."""
    with FaultyProxy(redis_server.port) as proxy:
        queue, direct = AsyncWaitQueue(name, store=through(proxy)), AsyncWaitQueue(name, store=redis_server.patient_url)
        await direct.enqueue("a")
        assert await queue.size() == 1
        proxy.delay = 0.05
        task = asyncio.create_task(queue.dequeue())
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        proxy.delay = 0
        assert await direct.dequeue(timeout=LONG) == "a"
        await queue.aclose()


async def test_pool_cancelled_without_waiting(redis_server: Server, name: str) -> None:
    """The same for an acquire that does not wait."""
    with FaultyProxy(redis_server.port) as proxy:
        pool, direct = AsyncPool(name, store=through(proxy)), AsyncPool(name, store=redis_server.patient_url)
        await pool.add("a")
        proxy.delay = 0.2
        task = asyncio.ensure_future(pool.acquire(timeout=0))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        proxy.delay = 0
        async with direct.acquire(timeout=LONG) as leased:
            assert leased.member == "a"
        await pool.aclose()


@pytest.mark.parametrize("cancels", [True, False])
def test_event_loop_ends(cancels: bool, redis_server: Server, name: str) -> None:
    """A thread undoes what was under way: the tasks that would do so are cancelled with the loop."""
    direct = Pool(name, store=redis_server.patient_url)
    direct.add("a")
    queue, lock = WaitQueue(name, store=redis_server.patient_url), Lock(name, store=redis_server.patient_url)
    queue.enqueue("first")
    with lock:
        pass  # the server knows all scripts from now on
    others = background_retry._PENDING.copy()  # of other tests
    with FaultyProxy(redis_server.port) as proxy:

        async def take() -> None:
            await AsyncPool(name, store=through(proxy)).acquire(timeout=LONG)

        async def end_during(work: Any) -> None:
            before, proxy.hold_back = proxy.held_back, 30.0
            task = asyncio.ensure_future(work())
            await until_async(lambda: proxy.held_back > before)  # the server has run it, and this process has no reply
            if cancels:
                task.cancel()
                await task  # else the loop cancels it when it ends

        for work in (
            AsyncLock(name, store=through(proxy)).acquire,
            take,
            AsyncWaitQueue(name, store=through(proxy)).dequeue,
        ):
            with pytest.raises(asyncio.CancelledError) if cancels else nullcontext():
                asyncio.run(end_during(work))
            until(lambda: background_retry._PENDING <= others)
        assert lock.acquire(timeout=LONG)
        assert direct.acquire(timeout=LONG).member == "a"
        assert queue.dequeue(timeout=LONG) == "first"
        lock.release()


def test_event_loop_stops(redis_server: Server, name: str) -> None:
    """A thread undoes what was under way in an event loop that does not run any more."""
    with FaultyProxy(redis_server.port) as proxy:
        lock, loop = AsyncLock(name, store=through(proxy, 3.0)), asyncio.new_event_loop()

        async def warm_up() -> None:
            async with lock:
                pass

        async def stop_during() -> None:
            task = asyncio.create_task(lock.acquire())
            while not client.exists(f"lock:{{{name}}}"):  # noqa: ASYNC110  # Redis has no event for it
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        client = redis_server.client()
        loop.run_until_complete(warm_up())
        proxy.delay = 30.0
        loop.run_until_complete(stop_during())
        proxy.delay = 0.0
        assert Lock(name, store=redis_server.patient_url).acquire(timeout=LONG)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


# Acquires a lock, is cancelled before it gets the reply, and ends; before each step it waits for a line of input.
ENDS = """
import asyncio, sys
import redis
from headgate.coordination import AsyncLock, background_retry

background_retry.AT_EXIT = 20.0  # a busy machine may take longer than 2 seconds

async def main():
    lock = AsyncLock(sys.argv[2], store=sys.argv[1], ttl=300)
    async with lock:
        pass
    print("warm", flush=True)
    sys.stdin.readline()
    seen = redis.Redis(port=int(sys.argv[3]))
    task = asyncio.create_task(lock.acquire())
    while not seen.exists("lock:{" + sys.argv[2] + "}"):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    print("cancelled", flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


def test_process_ends(redis_server: Server, name: str) -> None:
    """A process undoes what was under way before it exits."""
    with FaultyProxy(redis_server.port) as proxy:
        command = [sys.executable, "-c", ENDS, through(proxy), name, str(redis_server.port)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdin and process.stdout
            assert process.stdout.readline() == "warm\n"
            proxy.delay = 30.0  # longer than the test takes: the reply never comes
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "cancelled\n"
            proxy.delay = 0.0
            print(file=process.stdin, flush=True)
            assert process.wait(40) == 0
        finally:
            process.kill()
            process.communicate()
        assert Lock(name, store=redis_server.patient_url).acquire(timeout=0), "the lock is still held for its TTL"


def test_undo_keeps_the_ttl(redis_server: Server) -> None:
    """The key of a line that was empty meanwhile lives as long as the entry that was put back."""
    twins = Twins(QUEUE, redis_server)
    line = QUEUE.keys(twins.name)[0]
    twins.step("enqueue", "1", "a", 3600 * SECOND, 0, 0)
    twins.step("dequeue", "2", "", SECOND, 0, 0)
    twins.step("undo", "2", "", SECOND, 0, 0)
    assert redis_server.client().pttl(line) > 3_000_000
    twins.close()


# Operations and the start of each reply. Earlier operations come again, late, and change nothing.
Row = tuple[tuple[Any, ...], list[Any]]
LATE: dict[str, list[Row]] = {
    "lock": [
        (("acquire", "a", TTL, ""), [1]),
        (("release", "a", TTL), [1]),
        (("acquire", "a", TTL, ""), [-1]),
        (("acquire", "b", TTL, ""), [1]),
        (("release", "c", TTL), [0]),
        (("release", "b", TTL), [1]),
        (("acquire", "a", TTL, ""), [-1]),
        (("acquire", "c", TTL, ""), [-1]),
        (("release", "a", TTL), [1]),
    ],
    "semaphore": [
        (("claim", "a", *SLOTS, 3, 5 * SECOND, 1), [1, 3]),
        (("claim", "b", *SLOTS, 1, 5 * SECOND, 0), [0, 3]),
        (("release", "a", *SLOTS, 3), [1, 0]),
        (("release", "b", *SLOTS, 1), [0, 0]),
        (("claim", "c", 10 * SECOND, 2, 1, 5 * SECOND, 1), [1, 1]),
        (("claim", "a", *SLOTS, 3, 5 * SECOND, 1), [-1]),
        (("claim", "b", *SLOTS, 1, 5 * SECOND, 0), [-1]),
        (("release", "a", *SLOTS, 3), [1]),
        (("status", "", *SLOTS, 1), [1, 1, 0, 2]),
    ],
    "pool": [
        (("add", "", *POOL_RULES, "m"), [1]),
        (("acquire", "1", *POOL_RULES, 0), [1, "m"]),
        (("settle", "1", *POOL_RULES, "", 0, 0, 1), [1]),
        (("acquire", "1", *POOL_RULES, 0), [-1]),
        (("acquire", "2", *POOL_RULES, 0), [1, "m"]),
        (("settle", "1", *POOL_RULES, "", 0, 1, 1), [1]),
        (("acquire", "2", *POOL_RULES, 0), [1, "m"]),
    ],
    "queue": [
        (("enqueue", "1", "a", 10 * SECOND, 3, 0), [0]),
        (("dequeue", "2", "", 10 * SECOND, 3, 0), ["a"]),
        (("enqueue", "1", "a", 10 * SECOND, 3, 0), [0]),
        (("size", "", "", 10 * SECOND, 3, 0), [0]),
        (("dequeue", "2", "", 10 * SECOND, 3, 0), ["a"]),
        (("undo", "2", "", 10 * SECOND, 3, 0), [1]),
        (("dequeue", "2", "", 10 * SECOND, 3, 0), [""]),
        (("dequeue", "3", "", 10 * SECOND, 3, 0), ["a"]),
    ],
}


@pytest.mark.parametrize("tool", LATE)
def test_late_request(tool: str, redis_server: Server) -> None:
    """A request that was delayed in the network, and arrives when other callers have gone on, changes nothing."""
    twins = (LockTwins if tool == "lock" else Twins)(MACHINES[tool], redis_server)
    for (op, *arguments), expected in LATE[tool]:
        twins.clock.advance(0.1)
        assert twins.step(op, *arguments)[: len(expected)] == expected, (op, arguments)
    twins.close()


# A dequeue whose reply was lost is undone. Whatever happened meanwhile, the entry is served at most once more, and not
# at all if it was cancelled.
BEAT = 5 * SECOND
IN_LINE: list[Row] = [(("enqueue", "1", "a", 60 * SECOND, 0, BEAT), [0]), (("dequeue", "2", "", SECOND, 0, 0), ["a"])]
UNDONE: dict[str, list[Row]] = {
    "the waiter learned that it was served": [
        (("status", "", "a", SECOND, 0, BEAT), ["served"]),
        (("undo", "2", "", SECOND, 0, BEAT), [1]),
        ((6.0,), []),  # the waiter sends no more heartbeats
        (("dequeue", "3", "", SECOND, 0, 0), ["a"]),
        (("dequeue", "4", "", SECOND, 0, 0), [""]),
    ],
    "the waiter died": [
        (("status", "", "a", SECOND, 0, 0), ["served"]),  # not from the waiter: without a heartbeat
        (("undo", "2", "", SECOND, 0, BEAT), [1]),
        ((6.0,), []),
        (("dequeue", "3", "", SECOND, 0, 0), [""]),
    ],
    "cancelled": [
        (("cancel", "3", "a", SECOND, 0, 0), [0]),
        (("undo", "2", "", SECOND, 0, BEAT), [1]),
        (("size", "", "", SECOND, 0, 0), [0]),
    ],
    "enqueued again": [
        (("enqueue", "3", "a", 60 * SECOND, 0, 0), [0]),
        (("undo", "2", "", SECOND, 0, BEAT), [1]),
        (("dequeue", "4", "", SECOND, 0, 0), ["a"]),
        (("dequeue", "5", "", SECOND, 0, 0), [""]),
    ],
    "enqueued again and served": [
        (("enqueue", "3", "a", 60 * SECOND, 0, 0), [0]),
        (("dequeue", "4", "", SECOND, 0, 0), ["a"]),
        (("undo", "2", "", SECOND, 0, BEAT), [1]),
        (("dequeue", "5", "", SECOND, 0, 0), [""]),
    ],
}


@pytest.mark.parametrize("case", UNDONE)
def test_undone_dequeue(case: str, redis_server: Server) -> None:
    """Each case of UNDONE."""
    twins = Twins(QUEUE, redis_server)
    for (op, *arguments), expected in [*IN_LINE, *UNDONE[case]]:
        if isinstance(op, float):
            twins.clock.advance(op)
        else:
            assert twins.step(op, *arguments)[: len(expected)] == expected, (op, arguments)
    twins.close()


def test_dequeue_repeats_its_call(redis_server: Server, name: str) -> None:
    """A dequeue that may wait sends the same call again, and gets the entry that it took out."""
    with FaultyProxy(redis_server.port) as proxy, ThreadPoolExecutor() as threads:
        queue, direct = WaitQueue(name, store=through(proxy, 0.5)), WaitQueue(name, store=redis_server.patient_url)
        assert answered(lambda: len(queue)) == 0
        for id in "abc":
            direct.enqueue(id)
        proxy.swallow_replies = True
        taken = threads.submit(queue.dequeue, LONG)
        wait_until(lambda: len(direct) == 2, "the first entry is taken out")
        proxy.swallow_replies = False
        assert taken.result() == "a"
        assert [direct.dequeue(), direct.dequeue(), direct.dequeue()] == ["b", "c", None]
        queue.close()
