"""PostgreSQL from an event loop: the executor that makes calls, and the batches in which they travel.

`headgate.stores.batching` says when a batch is sent. Here a batch is one statement, whatever the limiters and keys of
its calls: the database locks their rows in one order and decides them one after another.
"""

from __future__ import annotations

import asyncio
import functools
import select
from collections.abc import AsyncGenerator, Coroutine
from time import monotonic
from typing import Any

from headgate._lifecycle import at_loop_end
from headgate._plan import arun
from headgate.clock import Clock
from headgate.postgresql.backend import CallRequest, PostgresExecutor
from headgate.postgresql.connection import (
    Lost,
    NotConnected,
    PostgresConnection,
    ServerError,
    Wait,
    Waiting,
    hosts_to_resolve,
)
from headgate.postgresql.statements import LoneStatement, StatementMaker, answers
from headgate.postgresql.sync_client import check_speed
from headgate.postgresql.url import PostgresURL
from headgate.stores.batching import Batches, PendingCall, ServerTimeout, fail
from headgate.stores.breaker import Breaker, note_connected_at
from headgate.stores.probe import PROBE_TIMEOUT, start_in_task

MAX_TASKS = 2  # statements at a time, when there is more to send than one takes


class PostgresBatches(Batches):
    """The queue of one event loop, and the tasks that send it."""

    max_batch = 256

    def __init__(self, url: PostgresURL, statements: StatementMaker) -> None:
        super().__init__(min(MAX_TASKS, url.max_connections))
        self._url = url
        self._statements = statements

    async def warm_up(self, count: int, deadline: float) -> None:
        """Open connections by *deadline* until there are *count*, or as many as batches can travel at a time."""
        async with ServerTimeout(self.loop, max(deadline - monotonic(), 0.0)):
            while self._connection_count < min(count, self._max_tasks):
                connection = PostgresConnection(self._url)
                self._connection_count += 1
                try:
                    await connect(connection)
                finally:
                    self._idle.append(connection)

    async def aclose(self) -> None:
        """Finish what is under way, then close the connections."""
        await self._finish()
        self.close_idle()

    def close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
            self._connection_count -= 1

    def add(self, connection: PostgresConnection) -> None:
        """Take over an open connection, unless there are enough."""
        if self._connection_count < self._max_tasks:
            self._idle.append(connection)
            self._connection_count += 1
        else:
            connection.close()

    async def _round_trip(self, batch: list[PendingCall]) -> None:
        connection, sent = None, False
        try:
            async with ServerTimeout(self.loop, self._url.timeout):
                connection = self._idle.pop() if self._idle else self._make()
                clean = False
                try:
                    if connection.is_stale():
                        await connect(connection)
                    sent = True
                    await self._exchange(connection, batch)
                    clean = True
                except ServerError:
                    clean = connection.is_open
                    raise
                except OSError as error:
                    note_connected_at(connection, error)
                    raise
                finally:
                    if not clean:
                        connection.close()  # an answer may be left in it
                    self._idle.append(connection)
        except ServerError as error:
            if len(batch) > 1 and sent:
                await self._one_by_one(batch)  # a call that the server cannot make fails alone
            else:
                fail(batch, error)
        except OSError as error:
            if not str(error):  # our own time-out, which has no text; if there was no connection, nothing was sent
                error = (TimeoutError if sent else NotConnected)(f"no answer within {self._url.timeout} s")
            fail(batch, error)
            # the calls queued behind have waited as long for the same server
            fail(self._queue, NotConnected(f"gave up behind others: {error}"))
            self._queue.clear()
        except Exception as error:
            fail(batch, Lost(f"{type(error).__name__}: {error}"))
        except BaseException:
            fail(batch, Lost("the event loop stopped in mid-call"))
            raise

    async def _one_by_one(self, batch: list[PendingCall]) -> None:
        for pending in batch:
            await self._round_trip([pending])

    async def _exchange(self, connection: PostgresConnection, batch: list[PendingCall]) -> None:
        self.round_trips += 1
        asked = [pending.request.asked for pending in batch]
        value = await wait_for(connection.run(self._statements.statement(asked)), self.loop)
        for pending, answer in zip(batch, answers(asked, value), strict=True):
            self._deliver(pending, answer)

    def _make(self) -> PostgresConnection:
        self._connection_count += 1
        return PostgresConnection(self._url)

    def _quotas(self, pending: PendingCall) -> int:
        quotas: int = pending.request.asked[0].quota_count
        return quotas

    def _refunds(self, request: CallRequest, reply: Any) -> list[CallRequest]:
        statements, call = request.asked
        return [request._replace(asked=refund) for refund in statements.refunds(call, reply)]


class LoneStatements(PostgresBatches):
    """The queue of statements that travel alone: they hold up no checks, and have one connection."""

    max_batch = 1

    def __init__(self, url: PostgresURL, statements: StatementMaker) -> None:
        super().__init__(url, statements)
        self._max_tasks = 1


async def connect(connection: PostgresConnection) -> None:
    """Connect; host names are looked up without blocking the event loop."""
    loop = asyncio.get_running_loop()
    addresses = []
    for host in hosts_to_resolve(connection.url):
        found = await loop.getaddrinfo(host, None)
        addresses.append(str(found[0][4][0]))
    await wait_for(connection.connect(",".join(addresses)), loop)


async def wait_for(plan: Waiting, loop: asyncio.AbstractEventLoop) -> Any:
    """What *plan* returns."""
    return await arun(plan, functools.partial(_ready, loop))


async def _ready(loop: asyncio.AbstractEventLoop, request: Wait) -> None:
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    socket, events = request
    try:
        if events & select.POLLIN:
            loop.add_reader(socket, wake)
        if events & select.POLLOUT:
            loop.add_writer(socket, wake)
        await ready
    finally:
        loop.remove_reader(socket)
        loop.remove_writer(socket)


class PostgresTasks(PostgresExecutor):
    """Makes calls from one event loop."""

    def __init__(self, url: PostgresURL, display_name: str, clock: Clock | None) -> None:
        super().__init__(url, display_name, clock)
        self.loop = asyncio.get_running_loop()
        self.connections: PostgresBatches = PostgresBatches(url, self.statements)
        self._lone = LoneStatements(url, self.statements)
        self._probes: set[asyncio.Task[None]] = set()
        self._loop_end: AsyncGenerator[None] | None = None

    def close_with_loop(self) -> None:
        """Close the connections at the end of the event loop, or of this executor: not every caller uses `aclose`."""
        self._loop_end = at_loop_end(functools.partial(_close_idle, self.connections, self._lone))

    @property
    def round_trips(self) -> int:
        return self.connections.round_trips + self._lone.round_trips

    def answer(self, request: CallRequest) -> Coroutine[Any, Any, Any]:
        """Do what a plan (see `headgate._plan`) requests: have the call sent with the next batch."""
        queue = self._lone if isinstance(request.asked[0], LoneStatement) else self.connections
        if request.counts_queue_time:
            return self._send_by(queue, request)
        return queue.send(request)  # the batch has the time-out

    async def _send_by(self, queue: PostgresBatches, request: CallRequest) -> Any:
        async with ServerTimeout(self.loop, max(request.deadline - monotonic(), 0.0)):
            return await queue.send(request)

    async def warm_up(self, count: int) -> None:
        """Open *count* connections within the time-out; the first makes the tables, for which it has longer."""
        await self.connections.warm_up(count, monotonic() + max(self.timeout, PROBE_TIMEOUT))

    async def aclose(self) -> None:
        self.closed = True
        probes = list(self._probes)
        for task in probes:
            task.cancel()
        await self.connections.aclose()
        await self._lone.aclose()
        await asyncio.gather(*probes, return_exceptions=True)  # an event loop that ends would cancel them once more
        end, self._loop_end = self._loop_end, None
        if end is not None:
            await end.aclose()

    def start_probe(self, breaker: Breaker) -> None:
        start_in_task(self, breaker, 0, self._probes)

    async def probe(self, slot: int) -> None:
        """Raise if the server does not let us connect, or answers later than a check can wait."""
        connection, keep = PostgresConnection(self.url), False
        try:
            async with ServerTimeout(self.loop, max(self.timeout, PROBE_TIMEOUT)):
                await connect(connection)
                begun = monotonic()
                await wait_for(connection.ask("SELECT 1"), self.loop)
                check_speed(monotonic() - begun, self.timeout)
                keep = not self.closed
        except ServerError:
            pass  # it answers; what it says is for the calls
        finally:
            if keep:
                self.connections.add(connection)
            else:
                connection.close()


async def _close_idle(*queues: PostgresBatches) -> None:
    for queue in queues:
        queue.close_idle()
