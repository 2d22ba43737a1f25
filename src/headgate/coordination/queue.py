"""A queue for a whole fleet: first in, first out, and no entry stays in it beyond its time-out.

    queue = WaitQueue("tokens", store="redis://...", timeout=60.0)
    queue.enqueue("request-1")
    queue.dequeue()  # "request-1"

A worker that hands something out takes the first entry with `dequeue`. A caller that wants something joins with `wait`,
and its process sends heartbeats for its entry; the entry of a process that died is passed over. An entry that expired,
was cancelled or is dead is never dequeued and never counted. An id is in the queue once: a second `wait` with the same
id takes over the place of the first.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import check_count, check_seconds, deadline_after
from headgate.coordination.queue_heartbeat import HEARTBEAT_TTL, heartbeats
from headgate.coordination.runner import RETRY, AsyncTool, Plan, ThreadTool, Ticket, Tool, wait_in_queue
from headgate.coordination.states.machine import Operation
from headgate.coordination.states.queue import QUEUE, REPLY_TTL, queue_operation
from headgate.errors import QueueFull, StoreUnavailable
from headgate.keys import check_key
from headgate.stores.base import Store
from headgate.telemetry.watching import Sample

FIRST_HEARTBEAT_TTL = 10.0  # seconds, for a new entry: while thousands join at once, replies are late


class _AnyQueue(Tool):
    """What `WaitQueue` and `AsyncWaitQueue` share: the constructor, and plans (see `headgate._plan`)."""

    _kind = "queue"

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        timeout: float = 60.0,
        max_length: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._timeout = check_seconds("timeout", timeout)
        self._max_length = 0 if max_length is None else check_count("max_length", max_length)
        self._set_up(QUEUE, name, store, clock)
        self._clock = self._runner.clock
        self._length = -1  # as it was seen last; below 0: not yet

    def _gauges(self) -> Iterator[Sample]:
        yield from super()._gauges()
        if self._runner.backend.in_process:
            self._runner.run(self._size_plan())
        if self._length >= 0:
            yield Sample("headgate.queue.length", (), self._length)

    def _count(self, event: str) -> None:
        self._runner.counts.add(("headgate.queue.entries", (("event", event),)))

    def _enqueue_plan(self, id: str, timeout: float | None) -> Plan[int]:
        time = self._timeout if timeout is None else check_seconds("timeout", timeout)
        [position] = yield self._operation("enqueue", check_key(id, "id"), time)
        self._check_not_full(position)
        self._count("enqueued")
        return int(position)

    def _dequeue_plan(self, new_ticket: Callable[[], Ticket], timeout: float | None) -> Plan[str | None]:
        until, process = deadline_after(self._clock, timeout), os.getpid()
        dequeue = self._operation("dequeue")  # it has a call id, so it takes one entry out however often it is sent
        unconfirmed = False

        def attempt() -> Plan[tuple[str | None, float]]:
            nonlocal unconfirmed
            unconfirmed = True
            [id] = yield dequeue
            unconfirmed = False
            return id or None, self._runner.backend.states.poll

        try:
            taken = yield from wait_in_queue(self._runner, new_ticket, attempt, until)
            if taken is not None:
                self._count("dequeued")
            return taken
        except BaseException:
            if unconfirmed:
                self._undo(dequeue, process)
            raise

    def _wait_plan(self, ticket: Ticket, id: str, timeout: float | None) -> Plan[bool]:
        time = self._timeout if timeout is None else check_seconds("timeout", timeout)
        until = self._clock.now() + round(time * MICROSECONDS)
        token, process = secrets.token_hex(8), os.getpid()
        queued = False
        with ticket, self._runner.counts.acquiring() as request:
            try:
                queued = True  # for all we know, as soon as the request is sent
                yield from self._join(ticket, id, token, time, until if timeout else None)
                ticket.listen()
                with heartbeats(self._runner, id, token, ticket.waiter) as entry:
                    state, retry_in = "waiting", None  # None: sleep until woken, or until the time is over
                    while state == "waiting":
                        left = (until - self._clock.now()) / MICROSECONDS
                        if left > 0:
                            yield ticket.sleep(retry_in, left)
                        try:
                            state, retry_in = entry.state, None
                            if state == "waiting":
                                state, _ = yield self._operation("status", id, heartbeat_ttl=HEARTBEAT_TTL, token=token)
                        except StoreUnavailable:
                            if left <= 0:
                                raise
                            retry_in = RETRY
                        else:
                            if left <= 0:
                                break
                queued = state != "served"
                request.granted = not queued
                over = self._clock.now() >= until
                self._count("served" if not queued else "expired" if over else "cancelled")
                return not queued
            except QueueFull:
                queued = False
                raise
            finally:
                if queued:
                    cancel = self._operation("cancel", id, token=token)
                    self._runner.retry_in_background(cancel, self._clock.now() + REPLY_TTL, process)

    def _join(self, ticket: Ticket, id: str, token: str, time: float, until: int | None) -> Plan[None]:
        """Enqueue *id*, or take over the entry that has this id."""
        enqueue = self._operation("enqueue", id, time, FIRST_HEARTBEAT_TTL, token)
        while True:
            try:
                [position] = yield enqueue
            except StoreUnavailable:
                if until is None or self._clock.now() >= until:
                    raise
                yield ticket.sleep(RETRY, (until - self._clock.now()) / MICROSECONDS)
            else:
                return self._check_not_full(position)

    def _cancel_plan(self, id: str) -> Plan[bool]:
        [found] = yield self._operation("cancel", check_key(id, "id"))
        return bool(found)

    def _position_plan(self, id: str) -> Plan[int | None]:
        state, position = yield self._operation("status", check_key(id, "id"))
        return position if state == "waiting" else None

    def _size_plan(self) -> Plan[int]:
        [length] = yield self._operation("size")
        self._length = int(length)
        return self._length

    def _check_not_full(self, position: int) -> None:
        self._length = max(position + 1, self._max_length) if position < 0 else int(position) + 1
        if position < 0:
            self._count("full")
            raise QueueFull(f"the queue {self.name!r} has {self._max_length} entries already")

    def _operation(
        self, name: str, id: str = "", timeout: float | None = None, heartbeat_ttl: float = 0.0, token: str = ""
    ) -> Operation:
        call = "" if name in ("status", "size") else secrets.token_hex(8)
        time = round((timeout or self._timeout) * MICROSECONDS)
        return queue_operation(
            name,
            call=call,
            id=id,
            timeout=time,
            max_length=self._max_length,
            heartbeat_ttl=round(heartbeat_ttl * MICROSECONDS),
            waiter=token,
        )

    def _undo(self, dequeue: Operation, process: int) -> None:
        """Put the entry back that *dequeue* may have taken out: its reply was lost."""
        call, _, timeout, *_ = dequeue.arguments
        ttl = round(HEARTBEAT_TTL * MICROSECONDS)
        undo = queue_operation("undo", call=str(call), timeout=int(timeout), heartbeat_ttl=ttl)
        self._runner.retry_in_background(undo, self._clock.now() + REPLY_TTL, process)


class WaitQueue(_AnyQueue, ThreadTool):
    """A queue that threads and processes share: first in, first out.

    Args:
        name: what is waited for
        store: a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
        timeout: seconds after which an entry that was not dequeued is removed
        max_length: how many entries may wait; one more raises `QueueFull`. None: any number
        clock: a `headgate.testing.ManualClock`, in tests
    """

    def enqueue(self, id: str, timeout: float | None = None) -> int:
        """Put *id* at the end. An id that is in the queue keeps its place.

        Args:
            id: of the entry
            timeout: seconds that it stays; None: the queue's

        Returns:
            How many entries are before it.

        Raises:
            QueueFull: the queue has as many as it may
        """
        return self._runner.run(self._enqueue_plan(id, timeout))

    def dequeue(self, timeout: float | None = 0.0) -> str | None:
        """Take the first entry out.

        Args:
            timeout: seconds to wait; 0: not at all, None: for ever

        Returns:
            Its id; None if none comes in time.
        """
        return self._runner.run(self._dequeue_plan(self._runner.ticket, timeout))

    def wait(self, id: str, timeout: float | None = None) -> bool:
        """Queue until *id* is dequeued.

        Args:
            id: of the entry
            timeout: seconds; None: the queue's

        Returns:
            Whether it was. False also if it was cancelled, or if another caller that waits with the same id took over
            its place.
        """
        ticket = self._runner.ticket(check_key(id, "id"))
        return self._runner.run(self._wait_plan(ticket, id, timeout))

    def cancel(self, id: str) -> bool:
        """Take *id* out of the queue; whether it was there.

        Args:
            id: of the entry
        """
        return self._runner.run(self._cancel_plan(id))

    def position(self, id: str) -> int | None:
        """How many entries are before *id*; None if it is not in the queue.

        Args:
            id: of the entry
        """
        return self._runner.run(self._position_plan(id))

    def __len__(self) -> int:
        """How many entries wait; those that expired or are dead do not count."""
        return self._runner.run(self._size_plan())

    def __bool__(self) -> bool:
        """True for an empty queue, too."""
        return True


class AsyncWaitQueue(_AnyQueue, AsyncTool):
    """`WaitQueue` for asyncio: the same arguments, the same methods, awaited; ``await queue.size()`` for ``len``."""

    async def enqueue(self, id: str, timeout: float | None = None) -> int:
        """Put *id* at the end, for *timeout* seconds (None: the queue's); returns how many entries are before it.

        An id that is in the queue keeps its place.
        """
        return await self._runner.arun(self._enqueue_plan(id, timeout))

    async def dequeue(self, timeout: float | None = 0.0) -> str | None:
        """Take the first entry out; returns None if none comes within *timeout* seconds (None: wait for ever)."""
        return await self._runner.arun(self._dequeue_plan(self._runner.async_ticket, timeout))

    async def wait(self, id: str, timeout: float | None = None) -> bool:
        """Queue until *id* is dequeued, for *timeout* seconds (None: the queue's); whether it was.

        False also if it was cancelled, or if another caller that waits with the same id took over its place.
        """
        ticket = self._runner.async_ticket(check_key(id, "id"))
        return await self._runner.arun(self._wait_plan(ticket, id, timeout))

    async def cancel(self, id: str) -> bool:
        """Take *id* out of the queue; whether it was there."""
        return await self._runner.arun(self._cancel_plan(id))

    async def position(self, id: str) -> int | None:
        """How many entries are before *id*; None if it is not in the queue."""
        return await self._runner.arun(self._position_plan(id))

    async def size(self) -> int:
        """How many entries wait; those that expired or are dead do not count."""
        return await self._runner.arun(self._size_plan())
