"""A line for a whole fleet: first in, first out, and nobody stands in it longer than its time.

    queue = WaitQueue("tokens", store="redis://...", timeout=60.0)
    queue.enqueue("request-1")
    queue.dequeue()  # "request-1"

Whoever hands something out takes the next from the front with `dequeue`. Whoever wants it stands in line with `wait`,
and its process says now and then that it is still there; one that died is passed over. Those that are expired,
cancelled or dead never come out and are never counted. An id stands in line once: who waits with the id of somebody who
waits takes over its place.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import count, deadline, seconds
from headgate.coordination.crowd import ALIVE, standing
from headgate.coordination.site import RETRY, Plan, Site, Turn, shorter
from headgate.coordination.states.machine import Operation
from headgate.coordination.states.queue import QUEUE, REPLY_TTL
from headgate.errors import QueueFull, StoreUnavailable
from headgate.keys import check_key
from headgate.stores.base import Store

T = TypeVar("T")

JOINING = 10.0  # seconds without a word at first: where thousands join at once, each hears late that it has


class Plans:
    """What both queues do."""

    def __init__(
        self, name: str, store: str | Store, timeout: float, max_length: int | None, clock: Clock | None
    ) -> None:
        self.timeout = seconds("timeout", timeout)
        self.most = 0 if max_length is None else count("max_length", max_length)
        self.site = Site(QUEUE, name, store, clock)
        self.clock = self.site.clock

    def enqueue(self, id: str, timeout: float | None) -> Plan[int]:
        time = self.timeout if timeout is None else seconds("timeout", timeout)
        [place] = yield self._step("enqueue", check_key(id, "id"), time)
        self._check(place)
        return int(place)

    def dequeue(self, turn: Turn, timeout: float | None) -> Plan[str | None]:
        until = deadline(self.clock, timeout)
        process = os.getpid()
        step = self._step("dequeue")  # one call, however often it is sent: whom it took out once it gives out again
        asked = under_way = False
        problem = None
        with turn:
            try:
                while True:
                    pause: float | None = None  # until it is first
                    # who may not wait asks once, first or not
                    if turn.first or not (asked or until is None or self.clock.now() < until):
                        asked, under_way, pause = True, True, self.site.place.poll
                        try:
                            [id] = yield step
                        except StoreUnavailable as error:
                            problem, pause = error, RETRY
                        else:
                            problem, under_way = None, False
                            if id:
                                return str(id)
                        turn.listen()
                    left = None if until is None else (until - self.clock.now()) / MICROSECONDS
                    if problem and (left is None or left <= 0):
                        raise problem
                    if left is not None and left <= 0:
                        return None
                    yield shorter(pause, left)
            except BaseException:
                if under_way:
                    self._undo(step, process)
                raise

    def wait(self, turn: Turn, id: str, timeout: float | None) -> Plan[bool]:
        time = self.timeout if timeout is None else seconds("timeout", timeout)
        until = self.clock.now() + round(time * MICROSECONDS)
        waiter, process = secrets.token_hex(8), os.getpid()
        stands = False
        with turn:
            try:
                stands = True  # for all we know, from when it was asked for
                yield from self._join(id, waiter, time, until if timeout else None)
                turn.listen()
                with standing(self.site, id, waiter, turn) as one:
                    state, pause = "waiting", None  # until it is told, or the time is over
                    while state == "waiting":
                        left = (until - self.clock.now()) / MICROSECONDS
                        if left > 0:
                            yield shorter(pause, left)
                        try:
                            state, pause = one.state, None
                            if state == "waiting":
                                state, _ = yield self._step("status", id, alive=ALIVE, waiter=waiter)
                        except StoreUnavailable:
                            if left <= 0:
                                raise
                            pause = RETRY
                        else:
                            if left <= 0:
                                break
                stands = state != "served"
                return not stands
            except QueueFull:
                stands = False
                raise
            finally:
                if stands:
                    self.site.insist(self._step("cancel", id, waiter=waiter), self.clock.now() + REPLY_TTL, process)

    def _join(self, id: str, waiter: str, time: float, until: int | None) -> Plan[None]:
        """Stand in line, and keep the place of whoever stood there with that id before."""
        step = self._step("enqueue", id, time, JOINING, waiter)
        while True:
            try:
                [place] = yield step
            except StoreUnavailable:
                if until is None or self.clock.now() >= until:
                    raise
                yield shorter(RETRY, (until - self.clock.now()) / MICROSECONDS)
            else:
                return self._check(place)

    def cancel(self, id: str) -> Plan[bool]:
        [found] = yield self._step("cancel", check_key(id, "id"))
        return bool(found)

    def position(self, id: str) -> Plan[int | None]:
        state, place = yield self._step("status", check_key(id, "id"))
        return place if state == "waiting" else None

    def size(self) -> Plan[int]:
        [length] = yield self._step("size")
        return int(length)

    def _check(self, place: int) -> None:
        if place < 0:
            raise QueueFull(f"the queue {self.site.name!r} has {self.most} already")

    def _step(
        self, op: str, id: str = "", timeout: float | None = None, alive: float = 0.0, waiter: str = ""
    ) -> Operation:
        call = "" if op in ("status", "size") else secrets.token_hex(8)
        time = round((timeout or self.timeout) * MICROSECONDS)
        return Operation(op, (call, id, time, self.most, round(alive * MICROSECONDS), waiter))

    def _undo(self, dequeue: Operation, process: int) -> None:
        """Nobody heard whom it took out: back to its place."""
        call, _, time, most, *_ = dequeue.arguments
        step = Operation("undo", (call, "", time, most, round(ALIVE * MICROSECONDS)))
        self.site.insist(step, self.clock.now() + REPLY_TTL, process)


class WaitQueue:
    """A line that threads and processes share: first in, first out.

    name        what is waited for
    store       a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
    timeout     seconds after which whoever was not served is out
    max_length  how many may wait; one more is `QueueFull`. None: any number
    clock       a `headgate.testing.ManualClock`, in tests
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        timeout: float = 60.0,
        max_length: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, timeout, max_length, clock)
        self._plans.site.place.check(tasks=False)
        self.name = name

    def __repr__(self) -> str:
        return f"<WaitQueue {self._plans.site!r}>"

    def enqueue(self, id: str, timeout: float | None = None) -> int:
        """Put *id* at the end, for *timeout* seconds (None: the queue's); how many are before it.

        One that is in line keeps its place.
        """
        return self._run(lambda _: self._plans.enqueue(id, timeout))

    def dequeue(self, timeout: float | None = 0.0) -> str | None:
        """Take the first out; None if nobody comes within *timeout* seconds (None: wait for ever)."""
        return self._run(lambda turn: self._plans.dequeue(turn, timeout))

    def wait(self, id: str, timeout: float | None = None) -> bool:
        """Stand in line until somebody takes *id* out, for *timeout* seconds (None: the queue's); whether it was.

        False also if it was cancelled, or somebody else who waits with the same id took over the place.
        """
        return self._plans.site.run(lambda turn: self._plans.wait(turn, id, timeout), check_key(id, "id"))

    def cancel(self, id: str) -> bool:
        """Take *id* out, wherever it stands; whether it was there."""
        return self._run(lambda _: self._plans.cancel(id))

    def position(self, id: str) -> int | None:
        """How many are before *id*; None if it is not in line."""
        return self._run(lambda _: self._plans.position(id))

    def __len__(self) -> int:
        """How many wait: alive, and in time."""
        return self._run(lambda _: self._plans.size())

    def __bool__(self) -> bool:
        """A queue is a queue, empty or not."""
        return True

    def close(self) -> None:
        """Let go of the connections, which all tools on this store share; the next call makes new ones."""
        self._plans.site.place.close()

    def _run(self, plan: Callable[[Turn], Plan[T]]) -> T:
        return self._plans.site.run(plan)


class AsyncWaitQueue:
    """`WaitQueue` for asyncio: the same arguments, the same methods, awaited; ``await queue.size()`` for ``len``."""

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        timeout: float = 60.0,
        max_length: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, timeout, max_length, clock)
        self._plans.site.place.check(tasks=True)
        self.name = name

    def __repr__(self) -> str:
        return f"<AsyncWaitQueue {self._plans.site!r}>"

    async def enqueue(self, id: str, timeout: float | None = None) -> int:
        """Put *id* at the end, for *timeout* seconds (None: the queue's); how many are before it.

        One that is in line keeps its place.
        """
        return await self._run(lambda _: self._plans.enqueue(id, timeout))

    async def dequeue(self, timeout: float | None = 0.0) -> str | None:
        """Take the first out; None if nobody comes within *timeout* seconds (None: wait for ever)."""
        return await self._run(lambda turn: self._plans.dequeue(turn, timeout))

    async def wait(self, id: str, timeout: float | None = None) -> bool:
        """Stand in line until somebody takes *id* out, for *timeout* seconds (None: the queue's); whether it was.

        False also if it was cancelled, or somebody else who waits with the same id took over the place.
        """
        return await self._plans.site.arun(lambda turn: self._plans.wait(turn, id, timeout), check_key(id, "id"))

    async def cancel(self, id: str) -> bool:
        """Take *id* out, wherever it stands; whether it was there."""
        return await self._run(lambda _: self._plans.cancel(id))

    async def position(self, id: str) -> int | None:
        """How many are before *id*; None if it is not in line."""
        return await self._run(lambda _: self._plans.position(id))

    async def size(self) -> int:
        """How many wait: alive, and in time."""
        return await self._run(lambda _: self._plans.size())

    async def aclose(self) -> None:
        """Let go of this event loop's connections; it does so itself when it ends."""
        await self._plans.site.place.aclose()

    def _run(self, plan: Callable[[Turn], Plan[T]]) -> Coroutine[Any, Any, T]:
        return self._plans.site.arun(plan)
