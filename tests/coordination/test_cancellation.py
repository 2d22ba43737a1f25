"""Each call of asyncio is cancelled at each of its awaits; no lock stays held, no room taken, no member leased."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol

import pytest

from headgate.coordination import AsyncCircuitBreaker, AsyncLock, AsyncPool, AsyncSemaphore, AsyncWaitQueue
from headgate.errors import CircuitOpen, LockTimeout, PoolExhausted

MOST = 40  # awaits of one call; more would be an endless loop
LONG = 20.0


class CancelAt:
    """Await *work*, and cancel the task at its await of that *number*: while it waits, or when the answer came."""

    def __init__(self, work: Awaitable[Any], number: int, answered: bool) -> None:
        self.work = work
        self.number = number
        self.answered = answered
        self.reached = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.work.__await__()
        task = asyncio.current_task()
        assert task
        step: Callable[[], Any] = lambda: next(steps)  # noqa: E731  # the next step, as a value
        while True:
            try:
                awaited = step()
            except StopIteration as done:
                return done.value
            self.reached += 1
            if self.reached == self.number:
                if self.answered and awaited is not None:
                    awaited.add_done_callback(lambda _: task.cancel())
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield awaited
                step = lambda: next(steps)  # noqa: E731
            except BaseException as error:
                step = lambda thrown=error: steps.throw(thrown)  # type: ignore[misc]  # noqa: E731


class Case(Protocol):
    """A call that is cancelled. *leftover* is true while it has left something behind."""

    def __init__(self, name: str, url: str) -> None: ...
    async def prepare(self) -> None: ...
    async def operate(self) -> None: ...
    async def leftover(self, cancelled: bool) -> object: ...


class FreeLock:
    def __init__(self, name: str, url: str) -> None:
        self.lock, self.other = AsyncLock(name, store=url), AsyncLock(name, store=url)

    async def prepare(self) -> None: ...

    async def operate(self) -> None:
        async with self.lock:
            await asyncio.sleep(0)

    async def leftover(self, cancelled: bool) -> object:
        return not (await self.other.acquire(0) and await self.other.release())


class BusyLock(FreeLock):
    async def prepare(self) -> None:
        await self.other.acquire()
        self.releases = asyncio.get_running_loop().create_task(self.release())

    async def release(self) -> None:
        await asyncio.sleep(0.03)
        await self.other.release()

    async def leftover(self, cancelled: bool) -> object:
        await self.releases
        return await super().leftover(cancelled)


class FreeSemaphore:
    def __init__(self, name: str, url: str) -> None:
        self.semaphore = AsyncSemaphore(name, limit=3, store=url)

    async def prepare(self) -> None: ...

    async def operate(self) -> None:
        async with self.semaphore.acquire(weight=2):
            await asyncio.sleep(0)

    async def leftover(self, cancelled: bool) -> object:
        status = await self.semaphore.status()
        return status.in_use or status.waiting


class BusySemaphore(FreeSemaphore):
    async def prepare(self) -> None:
        lease = await self.semaphore.acquire(weight=2)

        async def release() -> None:
            await asyncio.sleep(0.03)
            await lease.release()

        self.releases = asyncio.get_running_loop().create_task(release())

    async def leftover(self, cancelled: bool) -> object:
        await self.releases
        return await super().leftover(cancelled)


class FullSemaphore(FreeSemaphore):
    async def prepare(self) -> None:
        self.lease = await self.semaphore.acquire(weight=2)

    async def operate(self) -> None:
        with pytest.raises(LockTimeout):
            await self.semaphore.acquire(timeout=0.005, weight=2)

    async def leftover(self, cancelled: bool) -> object:
        await self.lease.release()
        return await super().leftover(cancelled)


class FreePool:
    def __init__(self, name: str, url: str) -> None:
        self.pool = AsyncPool(name, store=url, slots=1)

    async def prepare(self) -> None:
        await self.pool.add("a")

    async def operate(self) -> None:
        async with self.pool.acquire():
            await asyncio.sleep(0)

    async def leftover(self, cancelled: bool) -> object:
        status = await self.pool.status()
        return status.leased or status.waiting


class BusyPool(FreePool):
    async def prepare(self) -> None:
        await super().prepare()
        leased = await self.pool.acquire()

        async def release() -> None:
            await asyncio.sleep(0.03)
            await leased.release()

        self.releases = asyncio.get_running_loop().create_task(release())

    async def leftover(self, cancelled: bool) -> object:
        await self.releases
        return await super().leftover(cancelled)


class Exhausted(FreePool):
    async def prepare(self) -> None:
        await super().prepare()
        self.leased = await self.pool.acquire()

    async def operate(self) -> None:
        with pytest.raises(PoolExhausted):
            await self.pool.acquire(timeout=0.005)

    async def leftover(self, cancelled: bool) -> object:
        await self.leased.release()
        return await super().leftover(cancelled)


class Waiting:
    def __init__(self, name: str, url: str) -> None:
        self.queue = AsyncWaitQueue(name, store=url)

    async def prepare(self) -> None:
        async def serve() -> None:
            await asyncio.sleep(0.03)
            await self.queue.dequeue()

        self.serves = asyncio.get_running_loop().create_task(serve())

    async def operate(self) -> None:
        await self.queue.wait("a", timeout=10 * LONG)

    async def leftover(self, cancelled: bool) -> object:
        if cancelled:
            self.serves.cancel()  # it would take the leftover entry out
        await asyncio.wait([self.serves])
        return await self.queue.size()


class Serving(Waiting):
    """The entry that a cancelled dequeue took out goes back to its position."""

    async def prepare(self) -> None:
        async def enqueue() -> None:
            await asyncio.sleep(0.03)
            await self.queue.enqueue("a")

        self.serves = asyncio.get_running_loop().create_task(enqueue())

    async def operate(self) -> None:
        assert await self.queue.dequeue(timeout=LONG) == "a"

    async def leftover(self, cancelled: bool) -> object:
        await self.serves
        return (await self.queue.size()) != cancelled


class Probe:
    def __init__(self, name: str, url: str) -> None:
        self.breaker = AsyncCircuitBreaker(name, store=url, failures=1, open_for=0.001, successes=1)

    async def prepare(self) -> None:
        await self.breaker.record_failure()
        await asyncio.sleep(0.002)

    async def operate(self) -> None:
        async with self.breaker:
            await asyncio.sleep(0)

    async def leftover(self, cancelled: bool) -> object:
        try:
            async with self.breaker:
                return None
        except CircuitOpen as refused:
            return refused


SEMAPHORES: list[type[Case]] = [FreeSemaphore, BusySemaphore, FullSemaphore]
CASES: list[type[Case]] = [FreeLock, BusyLock, *SEMAPHORES, FreePool, BusyPool, Exhausted, Waiting, Serving, Probe]


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("make", CASES)
async def test_at_every_await(
    make: type[Case], answered: bool, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a cancelled call had begun is undone."""
    # No expiry may hide a leftover.
    ttls = "queue.FIRST_HEARTBEAT_TTL", "queue.HEARTBEAT_TTL", "queue_heartbeat.HEARTBEAT_TTL"
    for ttl in ("leases.WAITER_TTL", "semaphore_leases.WAITER_TTL", *ttls):
        monkeypatch.setattr(f"headgate.coordination.{ttl}", 10 * LONG)
    for number in range(MOST + 1):  # 0 is not cancelled: the server knows the scripts from then on
        case = make(f"{name} {number}", url)
        await case.prepare()
        cancelled = CancelAt(case.operate(), number, answered)
        task: asyncio.Future[Any] = asyncio.ensure_future(cancelled)
        await asyncio.wait([task])
        assert task.cancelled() or task.result() is None
        async with asyncio.timeout(LONG):
            while await case.leftover(task.cancelled()):  # noqa: ASYNC110  # it is undone in the background
                await asyncio.sleep(0.01)
        if cancelled.reached < number:
            return
    pytest.fail(f"more than {MOST} awaits")
