"""Never more than the limit at once, in the order of arrival, whatever caller dies, forgets or comes late."""

import asyncio
import contextlib
import gc
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

from headgate.coordination import Adaptive, AsyncSemaphore, Semaphore, SemaphoreLease, SemaphoreStatus
from headgate.errors import InvalidKey, LockLost, LockTimeout, PermitsExceedLimit, StoreUnavailable
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.awaited import Awaited, Tools
from tests.support.clocks import until_async
from tests.support.clusters import wait_until
from tests.support.servers import Server, free_port

ROOT = Path(__file__).parent.parent.parent
LONG = 20.0  # seconds that nothing here takes on a machine that is not overloaded


async def test_no_more_than_the_limit(tools: Tools, url: str, name: str) -> None:
    """Leases weigh the limit together at most, fences grow, and what is released is free."""
    one, other = (tools.Semaphore(name, limit=3, store=url) for _ in "ab")
    heavy = await one.acquire(timeout=0, weight=2)
    light = await other.acquire(timeout=0)
    assert heavy.held and light.held and light.fence > heavy.fence > 0
    assert (heavy.weight, light.weight) == (2, 1)
    with pytest.raises(LockTimeout, match="no room for weight 1"):
        await one.acquire(timeout=0)
    with pytest.raises(LockTimeout):
        Semaphore(name, limit=3, store=url).acquire(timeout=0.01)  # threads and tasks share it
    assert await one.status() == SemaphoreStatus(limit=3, in_use=3, holders=2, waiting=0)
    await heavy.ensure_held()
    assert await heavy.release()
    assert not heavy.held and not await heavy.release(), "once"
    with pytest.raises(LockLost):
        await heavy.ensure_held()
    assert (await other.status()).available == 2
    async with other.acquire(weight=2) as entered:
        assert entered.held and entered.fence > light.fence
    assert await light.release()
    assert (await tools.Semaphore(name + "'", limit=1, store=url).acquire(timeout=0)).held, "another name is another"


def test_with(url: str, name: str) -> None:
    """`with` releases the lease, also after an exception; a lease that was released before is no error."""
    semaphore = Semaphore(name, limit=1, store=url)
    with semaphore.acquire(timeout=LONG) as lease:
        assert lease.held
    assert not lease.held
    with pytest.raises(ZeroDivisionError), semaphore.acquire(timeout=0):
        print(1 / 0)
    with semaphore.acquire(timeout=0) as lease:
        assert lease.release()
        semaphore.acquire(timeout=0).release()
    semaphore.acquire(timeout=0).release()


def test_threads(url: str, name: str) -> None:
    """Threads that share an object, or have their own, never weigh more than the limit inside."""
    shared, inside, most, guard = Semaphore(name, limit=4, store=url), 0, 0, threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        semaphore = shared if number % 2 else Semaphore(name, limit=4, store=url)
        for turn in range(10):
            weight = 1 + (number + turn) % 3
            with semaphore.acquire(timeout=LONG, weight=weight):
                with guard:
                    inside += weight
                    most = max(most, inside)
                time.sleep(0.001)
                with guard:
                    inside -= weight

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert 1 < most <= 4
    assert shared.status().in_use == 0


async def test_tasks(url: str, name: str) -> None:
    """200 tasks are never more than 5 at once."""
    semaphore, inside, most = AsyncSemaphore(name, limit=5, store=url), 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with semaphore.acquire(timeout=LONG):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.005)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(200)))
    assert 1 < most <= 5


def waits(semaphore: Semaphore, more: int = 1) -> Callable[[], bool]:
    """Whether so many callers wait for it in this process, and the first has asked the store."""
    backend, channel = semaphore._runner.backend, semaphore._runner.channel
    return lambda: len(backend.waiters.queues.get(channel, ())) >= more and semaphore.status().waiting > 0


@pytest.mark.parametrize("place", ["memory", "one process", "processes"])
def test_heavy_waiter_is_not_starved(place: str, redis_server: Server, name: str) -> None:
    """Light callers that come later do not take what a heavy one waits for, with or without a time-out."""
    here = "memory://" if place == "memory" else redis_server.patient_url
    there = RedisStore(redis_server.patient_url) if place == "processes" else here
    near, far = Semaphore(name, limit=4, store=here), Semaphore(name, limit=4, store=there)
    order: list[tuple[int, str]] = []  # by fence: threads may run in another order

    def take(semaphore: Semaphore, weight: int, label: str) -> None:
        with semaphore.acquire(timeout=LONG, weight=weight) as acquired:
            order.append((acquired.fence, label))

    first, second = near.acquire(weight=2), near.acquire()
    with ThreadPoolExecutor() as threads:
        heavy = threads.submit(take, near, 4, "heavy")
        wait_until(waits(near), "the heavy one waits")
        lights = [threads.submit(take, far, 1, "light") for _ in range(3)]
        wait_until(waits(far, 1 if place == "processes" else 4), "light ones wait")
        for semaphore in (near, far):
            with pytest.raises(LockTimeout):
                semaphore.acquire(timeout=0)
        assert not order and near.status().available == 1
        second.release()
        with pytest.raises(LockTimeout):
            far.acquire(timeout=0.05)
        assert not order and near.status().available == 2, "there is room for the light ones, but not their turn"
        first.release()
        for done in (heavy, *lights):
            done.result(LONG)
    assert [label for _, label in sorted(order)] == ["heavy", *["light"] * 3]
    if isinstance(there, RedisStore):
        there.close()


def test_waiter_is_woken(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release wakes the next waiter, and so does a waiter before it that gives up: nothing else would in time."""
    semaphore = Semaphore(name, limit=2, store=url, lease=300)
    monkeypatch.setattr(semaphore._runner.backend.states, "poll", 300.0)
    monkeypatch.setattr("headgate.coordination.semaphore_leases.WAITER_TTL", 300.0)
    with ThreadPoolExecutor() as threads:
        for _ in range(3):
            lease = semaphore.acquire(timeout=LONG, weight=2)
            waiting = threads.submit(semaphore.acquire, 2 * LONG)
            wait_until(waits(semaphore), "it waits")
            assert lease.release()
            assert waiting.result(LONG).release()
        with semaphore.acquire(timeout=LONG):
            gives_up = threads.submit(semaphore.acquire, 0.3, 2)
            wait_until(waits(semaphore), "the heavy one waits")
            waiting = threads.submit(semaphore.acquire, 2 * LONG)
            with pytest.raises(LockTimeout):
                gives_up.result(LONG)
            assert waiting.result(LONG).release()


def test_other_processes_are_woken(redis_server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of the server wakes a waiter: nothing else in its process knows of the release, or of a new limit."""
    url = redis_server.patient_url
    store = RedisStore(url)  # shares nothing with what the URL opens but the server
    elsewhere, here = Semaphore(name, limit=1, store=store, lease=300), Semaphore(name, limit=1, store=url, lease=300)
    monkeypatch.setattr(here._runner.backend.states, "poll", 300.0)
    monkeypatch.setattr("headgate.coordination.semaphore_leases.WAITER_TTL", 300.0)
    client = redis_server.client()
    with ThreadPoolExecutor() as threads:
        for change in ("release", "evict", "limit"):
            lease = elsewhere.acquire(timeout=LONG)
            waiting = threads.submit(here.acquire, 2 * LONG)
            wait_until(lambda: client.pubsub_numsub(f"semaphore:{{{name}}}")[0][1], "it listens")
            wait_until(lambda: elsewhere.status().waiting, "it waits")
            time.sleep(0.05)  # mostly its subscription is complete by then
            others = [lease]
            if change == "release":
                lease.release()
            elif change == "evict":
                assert elsewhere.force_release()
            else:
                others.append(Semaphore(name, limit=3, store=store).acquire(timeout=LONG))
            assert waiting.result(LONG).release()
            for each in others:
                each.release()
    store.close()


async def test_renewed_and_lost(tools: Tools, name: str, clock: ManualClock) -> None:
    """A lease is renewed while it is held; a pause for longer than its time loses it, and the holder is told."""
    semaphore = tools.Semaphore(name, limit=2, lease=30, clock=clock)
    first = await semaphore.acquire(weight=2)
    for _ in range(20):
        clock.advance(9.9)
        assert first.held and not first.lost.is_set()
    clock.advance(31)
    assert not first.held and first.lost.is_set()
    async with semaphore.acquire(timeout=0, weight=2) as second:
        assert second.fence > first.fence
        with pytest.raises(LockLost, match=re.escape(name)):
            await first.ensure_held()
        assert not await first.release()
        assert second.held and (await semaphore.status()).in_use == 2, "a lost lease frees nothing"
    with pytest.raises(LockLost):
        async with semaphore.acquire():
            clock.advance(31)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # what the body raises is not hidden
        async with semaphore.acquire():
            clock.advance(31)
            print(1 / 0)


async def test_max_hold(tools: Tools, name: str, clock: ManualClock) -> None:
    """After *max_hold* a lease is not renewed."""
    lease = await tools.Semaphore(name, limit=1, lease=30, max_hold=60, clock=clock).acquire()
    for _ in range(6):
        clock.advance(9.9)
    assert lease.held
    for _ in range(4):
        clock.advance(9.9)
    assert not lease.held and lease.lost.is_set()


def test_dropped_lease(url: str, name: str) -> None:
    """A lease whose object was dropped is not renewed, so its room comes back."""
    semaphore = Semaphore(name, limit=1, store=url, lease=0.3)
    semaphore.acquire()
    gc.collect()
    semaphore.acquire(timeout=LONG).release()


def test_taken_away(redis_server: Server, name: str) -> None:
    """An operator ends all leases: a holder that asks learns of it at once, the others within a third of the lease."""
    semaphore = Semaphore(name, limit=3, store=redis_server.url, lease=3.0)
    assert not semaphore.force_release()
    asks, sleeps = semaphore.acquire(), semaphore.acquire(weight=2)
    assert semaphore.force_release()
    with pytest.raises(LockLost):
        asks.ensure_held()
    assert asks.lost.is_set()
    assert sleeps.lost.wait(LONG)
    semaphore.acquire(timeout=0, weight=3).release()


async def test_cancel_when_lost(redis_server: Server, name: str) -> None:
    """With *cancel_when_lost* the body is cancelled, and `LockLost` raised."""
    semaphore = AsyncSemaphore(name, limit=1, store=redis_server.url, lease=3.0, cancel_when_lost=True)

    async def body() -> None:
        async with semaphore.acquire():
            assert await semaphore.force_release()
            await asyncio.sleep(LONG)

    with pytest.raises(LockLost):
        await body()
    await asyncio.sleep(0)  # nothing is left of the cancellation
    async with semaphore.acquire(timeout=LONG):
        pass


async def test_cancelled_waiter_leaves(url: str, name: str) -> None:
    """A cancelled waiter leaves the queue, in the process and in the store."""
    semaphore = AsyncSemaphore(name, limit=2, store=url)
    async with semaphore.acquire():
        heavy = asyncio.ensure_future(semaphore.acquire(weight=2))
        light = None
        async with asyncio.timeout(LONG):
            while not (await semaphore.status()).waiting:  # noqa: ASYNC110  # Redis has no event for it
                await asyncio.sleep(0.01)
            light = asyncio.ensure_future(semaphore.acquire())
            heavy.cancel()
            assert (await light).held
        assert (await asyncio.gather(heavy, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        await light.result().release()
    assert (await semaphore.status()).in_use == 0


async def test_the_last_limit_holds(tools: Tools, url: str, name: str) -> None:
    """The limit of the object that was used for the first time last holds for all, whatever limit they have."""
    old, new = tools.Semaphore(name, limit=4, store=url), tools.Semaphore(name, limit=2, store=url)
    leases = [await old.acquire(timeout=0) for _ in range(3)]
    with pytest.raises(LockTimeout):
        await new.acquire(timeout=0)
    assert (await old.status()) == SemaphoreStatus(limit=2, in_use=3, holders=3, waiting=0)
    assert (await old.status()).available == 0
    for lease in leases[:2]:
        assert lease.held, "a lower limit takes nothing away"
        assert await lease.release()
    last = await old.acquire(timeout=0)
    with pytest.raises(LockTimeout):
        await old.acquire(timeout=0)
    with pytest.raises(PermitsExceedLimit, match="weight 3 is more than the limit of 2"):
        await old.acquire(weight=3)
    raised = tools.Semaphore(name, limit=5, store=url)
    async with raised.acquire(timeout=0, weight=3):
        assert (await new.status()) == SemaphoreStatus(limit=5, in_use=5, holders=3, waiting=0)
    assert await last.release() and await leases[2].release()


def test_the_last_process_sets_the_limit(redis_server: Server, name: str) -> None:
    """A process that has set its limit does not set it again after another process set a new one."""
    url = redis_server.patient_url
    store = RedisStore(url)  # shares nothing with what the URL opens but the server, as another process would
    old, new = Semaphore(name, limit=4, store=url), Semaphore(name, limit=2, store=store)
    for semaphore in (old, new, old, Semaphore(name, limit=4, store=url)):
        semaphore.acquire(timeout=LONG).release()
    assert old.status().limit == new.status().limit == 2
    Semaphore(name, limit=3, store=url).acquire(timeout=LONG).release()
    assert new.status().limit == 3
    store.close()


async def test_limit_is_lowered_while_one_waits(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that is too heavy for the new limit gets an error, and holds up no caller behind it."""
    semaphore = AsyncSemaphore(name, limit=3, store=url)
    monkeypatch.setattr(semaphore._runner.backend.states, "poll", 300.0)
    monkeypatch.setattr("headgate.coordination.semaphore_leases.WAITER_TTL", 300.0)
    async with semaphore.acquire():
        heavy = asyncio.ensure_future(semaphore.acquire(weight=3))
        async with asyncio.timeout(LONG):
            while not (await semaphore.status()).waiting:  # noqa: ASYNC110  # Redis has no event for it
                await asyncio.sleep(0.01)
            async with AsyncSemaphore(name, limit=2, store=url).acquire():
                with pytest.raises(PermitsExceedLimit):
                    await heavy


async def end(semaphore: Any, error: Exception | None = None, seconds: float = 0.0, overloaded: bool = False) -> int:
    """The limit after a call that fills it and ended so."""
    limit = (await semaphore.status()).limit
    others = [await semaphore.acquire(timeout=LONG) for _ in range(limit - 1)]
    with contextlib.suppress(*[type(error)] if error else []):
        async with semaphore.acquire(timeout=LONG) as lease:
            if overloaded:
                (lease.tool if isinstance(lease, Awaited) else lease).overloaded()
            if seconds:
                semaphore._runner.clock.advance(seconds)
            if error:
                raise error
    for lease in others:
        (lease.tool if isinstance(lease, Awaited) else lease)._acquisition.outcome = 0
        await lease.release()
    return int((await semaphore.status()).limit)


async def test_adaptive_limit(tools: Tools, url: str, name: str) -> None:
    """Successes raise it, exceptions that mean overload and `overloaded()` lower it, other exceptions do nothing."""
    adaptive = Adaptive(min=2, max=5, grow_after=1, shrink=0.5, overload=(TimeoutError, ConnectionError))
    semaphore = tools.Semaphore(name, limit=4, store=url, adaptive=adaptive)
    assert await end(semaphore) == 5
    assert await end(semaphore) == 5, "max"
    assert await end(semaphore, ConnectionResetError()) == 2
    assert await end(semaphore, ValueError()) == 2
    assert await end(semaphore) == 3
    assert await end(tools.Semaphore(name, limit=4, store=url, adaptive=adaptive)) == 4, "the same settings join"
    assert await end(semaphore, overloaded=True) == 2
    with pytest.raises(PermitsExceedLimit, match="weight 3 is more than the limit of 2"):
        await semaphore.acquire(weight=3)
    lease = await semaphore.acquire(timeout=0, weight=2)
    assert await lease.release() and (await semaphore.status()).limit == 3, "released without `with`: a success"
    async with tools.Semaphore(name, limit=4, store=url).acquire(timeout=0, weight=4):
        assert (await semaphore.status()).limit == 4, "a fixed limit that is set later holds for all"


async def test_adaptive_limit_by_latency(tools: Tools, name: str, clock: ManualClock) -> None:
    """A lease that was held for longer than the target lowers the limit, with or without an exception."""
    adaptive = Adaptive(max=20, target=0.5)
    semaphore = tools.Semaphore(name, limit=10, clock=clock, adaptive=adaptive)
    assert await end(semaphore, seconds=0.5) == 10
    assert await end(semaphore, seconds=0.501) == 9
    assert await end(semaphore, ValueError(), seconds=0.501) == 8


def test_adaptive_limit_finds_what_a_server_bears(name: str) -> None:
    """Calls that are overloaded beyond 30 at once keep the limit near 30, from above and from below."""
    for start in (5, 200):
        semaphore = Semaphore(f"{name}{start}", limit=start, adaptive=Adaptive(max=200))
        limits = []
        for _ in range(120):
            limits.append(semaphore.status().limit)
            leases = [semaphore.acquire(timeout=0) for _ in range(limits[-1])]
            for number, lease in enumerate(leases):
                if number >= 30:
                    lease.overloaded()
                lease.release()
        assert 26 <= min(limits[-40:]) and max(limits[-40:]) <= 31


def test_a_classifier_that_fails(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets the error of the call, the log that of the classifier, and the limit stays."""
    adaptive = Adaptive(max=9, overload=lambda error: error.status == 503)  # type: ignore[attr-defined]  # the mistake
    semaphore = Semaphore(name, limit=4, adaptive=adaptive)
    with pytest.raises(ZeroDivisionError), semaphore.acquire(timeout=0):
        print(1 / 0)
    assert semaphore.status().limit == 4 and "overload" in caplog.text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max": 0}, "max"),
        ({"max": 5, "min": 6}, "at most max, which is 5, got 6"),
        ({"max": 5, "grow_after": 0}, "grow_after"),
        ({"max": 5, "shrink": 1.0}, "0.999"),
        ({"max": 5, "shrink": "half"}, "such as 0.9"),
        ({"max": 5, "target": 0}, "target"),
        ({"max": 5, "overload": "TimeoutError"}, "overload must be a type"),
    ],
    ids=repr,
)
def test_bad_adaptive(options: Any, word: str) -> None:
    """The error says what would be right."""
    with pytest.raises(ValueError, match=word):
        Adaptive(**options)


def test_redis_is_down(name: str) -> None:
    """It raises `StoreUnavailable`: at once, or when the time is over."""
    semaphore = Semaphore(name, limit=1, store=f"redis://127.0.0.1:{free_port()}?timeout=0.5")
    with pytest.raises(StoreUnavailable, match=re.escape(name)):
        semaphore.acquire()
    with pytest.raises(StoreUnavailable):
        semaphore.acquire(timeout=0.3)
    semaphore.close()


def test_redis_goes_away_and_comes_back(mortal_server: Server, name: str) -> None:
    """Holders are told before another caller can have their room; a waiter with a time-out waits on."""
    url = mortal_server.patient_url
    holders, waiter = Semaphore(name, limit=2, store=url, lease=1.0), Semaphore(name, limit=2, store=url)
    leases = [holders.acquire() for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(waiter.acquire, LONG, 2)
        mortal_server.kill()
        for lease in leases:
            assert lease.lost.wait(LONG) and not lease.held
        mortal_server.restart()
        got = waiting.result()
    assert got.fence > max(lease.fence for lease in leases), "fences grow although the server lost everything"
    assert not any(lease.release() for lease in leases)
    assert got.release()
    waiter.close()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, InvalidKey, "256"),
    ({"name": "x", "limit": 0}, ValueError, "limit must be a whole number from 1"),
    ({"name": "x", "limit": -1}, ValueError, "limit"),
    ({"name": "x", "limit": 2.5}, ValueError, "limit"),
    ({"name": "x", "limit": True}, ValueError, "limit"),
    ({"name": "x", "limit": "50"}, ValueError, "limit"),
    ({"name": "x", "lease": 0}, ValueError, "lease"),
    ({"name": "x", "lease": 0.001}, ValueError, "0.01"),
    ({"name": "x", "max_hold": 0}, ValueError, "max_hold"),
    ({"name": "x", "store": "mongodb://h"}, ValueError, "memory://"),
    ({"name": "x", "adaptive": 200}, TypeError, r"Adaptive\(min=5, max=200\)"),
    ({"name": "x", "limit": 9, "adaptive": Adaptive(max=8)}, ValueError, "from min=1 to max=8, got 9"),
    ({"name": "x", "limit": 1, "adaptive": Adaptive(min=2, max=8)}, ValueError, "from min=2"),
]


@pytest.mark.parametrize("door", [Semaphore, AsyncSemaphore])
@pytest.mark.parametrize(("arguments", "error", "word"), BAD)
def test_bad_arguments(door: Any, arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    """The error says what would be right."""
    with pytest.raises(error, match=word):
        door(**{"limit": 5, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"weight": 0}, ValueError, "weight must be a whole number from 1"),
        ({"weight": 1.5}, ValueError, "weight"),
        ({"weight": 6}, PermitsExceedLimit, "weight 6 is more than the limit of 5"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"timeout": "soon"}, ValueError, "timeout"),
    ],
)
async def test_bad_calls(tools: Tools, arguments: Any, error: type[Exception], word: str, url: str, name: str) -> None:
    """A bad call is an error, and takes nothing."""
    semaphore = tools.Semaphore(name, limit=5, store=url)
    with pytest.raises(error, match=word):
        await semaphore.acquire(**arguments)
    assert (await semaphore.status()).in_use == 0


def test_redis_keys(redis_server: Server) -> None:
    """The documented keys, each with a time to live."""
    client = redis_server.client()
    key = "semaphore:{e%7Br%7Dp}"
    semaphore = Semaphore("e{r}p", limit=2, store=redis_server.url, lease=12.0)
    with semaphore.acquire():
        assert redis_server.names() == [key, f"{key}:extra", f"{key}:last"]
        assert 0 < client.pttl(key) <= 12_000
        assert client.zcard(key) == 1
    assert redis_server.names() == [f"{key}:gone", f"{key}:last"]
    assert all(client.pttl(each) > 0 for each in client.keys("*")), "nothing stays for ever"


HOLD = """
import sys, time
from headgate.coordination import Semaphore
lease = Semaphore(sys.argv[2], limit=3, store=sys.argv[1], lease=2.5).acquire(timeout=20, weight=2)
print(lease.fence, flush=True)
time.sleep(60)
"""


def test_killed_holder(redis_server: Server, name: str) -> None:
    """The room of a killed process comes back within its lease."""
    command = [sys.executable, "-c", HOLD, redis_server.patient_url, name]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout
    fence = int(holder.stdout.readline())
    semaphore = Semaphore(name, limit=3, store=redis_server.patient_url)
    with pytest.raises(LockTimeout):
        semaphore.acquire(timeout=0, weight=2)
    os.kill(holder.pid, signal.SIGKILL)
    with semaphore.acquire(timeout=LONG, weight=2) as lease:
        assert lease.fence > fence
    holder.communicate()


FORK = """
import os, sys
from headgate.coordination import LockLost, LockTimeout, Semaphore
semaphore = Semaphore(sys.argv[2], limit=2, store=sys.argv[1])
lease = semaphore.acquire(timeout=20)
child = os.fork()
if child == 0:
    assert not lease.held and not lease.release()
    try:
        lease.ensure_held()
    except LockLost:
        pass
    else:
        os._exit(2)
    with semaphore.acquire(timeout=5):
        try:
            semaphore.acquire(timeout=0)
        except LockTimeout:
            os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
lease.ensure_held()
"""


def test_fork(redis_server: Server, name: str) -> None:
    """A forked child does not hold its parent's lease, and can use the object."""
    command = [sys.executable, "-c", FORK, redis_server.patient_url, name]
    subprocess.run(command, cwd=ROOT, check=True, timeout=40)


FORK_AMID = """
import os, signal, threading
from headgate.coordination import Semaphore, semaphore_leases
semaphore_leases.WAITER_TTL = 0.5  # seconds: the child waits for as long
holder, semaphore = Semaphore("x", limit=1, lease=0.5), Semaphore("x", limit=1)
lease = holder.acquire()
threading.Thread(target=semaphore.acquire, daemon=True).start()
while not semaphore.status().waiting:
    pass
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if Semaphore("x", limit=1).acquire().held else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_fork_while_others_wait() -> None:
    """Those threads are not in the child: their places in the copied queue expire, as the lease does."""
    subprocess.run([sys.executable, "-c", FORK_AMID], cwd=ROOT, check=True, timeout=40)


async def test_what_it_shows(name: str) -> None:
    """Representations name the semaphore and its store."""
    assert repr(Semaphore(name, limit=2)) == f"<Semaphore {name!r} at memory://>"
    lease = Semaphore(name, limit=2).acquire(weight=2)
    assert isinstance(lease, SemaphoreLease)
    assert repr(lease) == f"<SemaphoreLease of {name!r} at memory://, weight 2>"
    lease.release()
    task = asyncio.ensure_future(AsyncSemaphore(name, limit=2).acquire())
    await until_async(task.done)
    assert task.result().weight == 1
