"""Requests that are awaited at the same time in one event loop travel to a server together, in one round trip.

The first request of a quiet moment is sent with every other request of the same turn of the event loop. While it is
under way the next requests gather; they are sent when it is back. So a lone request does not wait for others, many
requests need few round trips.

A task that is cancelled loses nothing: a request that was not sent is dropped, and what a sent one took is refunded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

GRACE_TURNS = 3  # of the event loop, to read a reply that came while this process was held up


class PendingCall:
    """A request in the queue, and the future that its caller awaits."""

    __slots__ = ("done", "request")

    def __init__(self, request: Any, done: asyncio.Future[Any]) -> None:
        self.request = request
        self.done = done


class Batches:
    """The queue of one event loop for one server, and the tasks that send it; a subclass knows the protocol."""

    max_batch = 1  # quotas that one round trip decides

    def __init__(self, max_tasks: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.round_trips = 0
        self._max_tasks = max_tasks
        self._queue: deque[PendingCall] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[Any] = []
        self._connection_count = 0

    async def _round_trip(self, batch: list[PendingCall]) -> None:
        """Send *batch* and set the outcome of each of its calls, whatever happens."""
        raise NotImplementedError

    def _quotas(self, pending: PendingCall) -> int:
        """How many quotas a call decides."""
        raise NotImplementedError

    def _refunds(self, request: Any, reply: Any) -> list[Any]:
        """The requests that give back what *request* took, by its *reply*."""
        raise NotImplementedError

    async def send(self, request: Any) -> Any:
        """The reply to one request. Its time-out starts when the round trip starts."""
        pending = PendingCall(request, self.loop.create_future())
        self._enqueue(pending)
        try:
            return await pending.done
        except asyncio.CancelledError:
            if not pending.done.cancelled() and not pending.done.exception():
                self._refund_unread(request, pending.done.result())  # the reply came, and the caller will not see it
            raise

    def in_use(self) -> int:
        return self._connection_count - len(self._idle)

    def idle(self) -> int:
        return len(self._idle)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def _finish(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, pending: PendingCall) -> None:
        self._queue.append(pending)
        if not self._tasks or (len(self._queue) >= self.max_batch and len(self._tasks) < self._max_tasks):
            self._start_task()

    def _start_task(self) -> None:
        task = self.loop.create_task(self._send_batches())
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Start another if calls are left: a task may be cancelled, even before it began."""
        self._tasks.discard(task)
        if self._queue and not self._tasks and not self.loop.is_closed():
            self._start_task()

    async def _send_batches(self) -> None:
        try:
            while self._queue:
                batch: list[PendingCall] = []
                quotas = 0
                while self._queue and quotas < self.max_batch:
                    pending = self._queue.popleft()
                    if not pending.done.cancelled():
                        batch.append(pending)
                        quotas += self._quotas(pending)
                if batch:
                    await self._round_trip(batch)
        finally:
            # here and not in the callback, which runs later: a call queued in between would start no task
            self._tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _refund_unread(self, request: Any, reply: Any) -> None:
        """Refund what a call took whose caller is gone."""
        for refund in self._refunds(request, reply):
            done = self.loop.create_future()  # no task awaits it
            done.add_done_callback(_retrieve)
            self._enqueue(PendingCall(refund, done))

    def _deliver(self, pending: PendingCall, answer: Any) -> None:
        """Hand the reply to its caller; an exception is raised there."""
        if isinstance(answer, Exception):
            fail([pending], answer)
        elif pending.done.done():
            self._refund_unread(pending.request, answer)
        else:
            pending.done.set_result(answer)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not report an error as one that was never retrieved."""
    if not done.cancelled():
        done.exception()


def fail(calls: Iterable[PendingCall], error: Exception) -> None:
    for pending in calls:
        if not pending.done.done():
            pending.done.set_exception(error)


class ServerTimeout:
    """A time-out for the server, not for this process: if we were held up, a reply that has come is read first."""

    __slots__ = ("_handle", "_loop", "_seconds", "_timeout")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._handle: asyncio.Handle

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._handle = self._loop.call_later(self._seconds, self._expire, GRACE_TURNS)

    async def __aexit__(self, *raised: Any) -> None:
        self._handle.cancel()
        await self._timeout.__aexit__(*raised)

    def _expire(self, turns: int) -> None:
        if turns:
            self._handle = self._loop.call_soon(self._expire, turns - 1)
        else:
            self._timeout.reschedule(self._loop.time())
