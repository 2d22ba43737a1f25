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
from time import monotonic
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from headgate._plan import arun
from headgate.redis.breaker import note_connected_at
from headgate.redis.execute import ScriptRequest, reply_after_asking
from headgate.redis.merging import MAX_BATCH, groups, packed, quotas_of, replies
from headgate.redis.script import pack
from headgate.redis.topology import ServerCommand, Unreached, check_role
from headgate.redis.url import Address, RedisURL

MAX_TASKS = 4  # round trips to one server at a time, when there is more to send than one takes
GRACE_TURNS = 3  # of the event loop, to read a reply that came while this process was held up

_CONNECTIONS: dict[type, type] = {
    redis.Connection: redis.asyncio.Connection,
    redis.SSLConnection: redis.asyncio.SSLConnection,
    redis.UnixDomainSocketConnection: redis.asyncio.UnixDomainSocketConnection,
}


class PendingCall:
    """A request in the queue, and the future that its caller awaits."""

    __slots__ = ("done", "request")

    def __init__(self, request: ServerCommand | ScriptRequest, done: asyncio.Future[Any]) -> None:
        self.request = request
        self.done = done


Group = list[PendingCall]  # calls that are one command: of one limiter and one kind


class BatchSender:
    """The queue of one event loop for one server, and the tasks that send it."""

    def __init__(self, source: RedisURL | redis.asyncio.ConnectionPool, address: Address, timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.round_trips = 0
        self._source = source
        self._address = address
        self._timeout = timeout
        self._max_tasks = min(MAX_TASKS, source.max_connections) if isinstance(source, RedisURL) else MAX_TASKS
        self._partitioned = isinstance(source, RedisURL) and source.kind == "cluster"
        self._queue: deque[PendingCall] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[Any] = []
        self._connection_count = 0

    async def send(self, request: ServerCommand | ScriptRequest) -> Any:
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

    async def warm_up(self, count: int, deadline: float) -> None:
        """Open connections by *deadline* until there are *count*, or as many as batches can travel at a time.

        A client that was handed in opens its own.
        """
        url = self._source
        if not isinstance(url, RedisURL):
            return
        async with ServerTimeout(self.loop, max(deadline - monotonic(), 0.0)):
            while self._connection_count < min(count, self._max_tasks):
                connection = self._make(url)
                try:
                    await self._connect(connection, url)
                finally:
                    self._idle.append(connection)

    async def aclose(self) -> None:
        """Finish what is under way, then close the connections."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._idle:
            await self._idle.pop().disconnect()
            self._connection_count -= 1

    async def abort(self) -> None:
        """Give up what is under way and close the connections, in this turn of the event loop and the next."""
        for task in self._tasks:
            task.cancel()  # it disconnects
        await self.close_idle()

    async def close_idle(self) -> None:
        """Close the idle connections in this turn of the event loop: it may be one of the last."""
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)
            self._connection_count -= 1

    def take_connections(self, other: BatchSender) -> None:
        """Take over the idle connections of *other*, which is about to be closed."""
        while other._idle and self._connection_count < self._max_tasks:
            self._idle.append(other._idle.pop())
            self._connection_count += 1
            other._connection_count -= 1

    def _enqueue(self, pending: PendingCall) -> None:
        self._queue.append(pending)
        if not self._tasks or (len(self._queue) >= MAX_BATCH and len(self._tasks) < self._max_tasks):
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
                while self._queue and quotas < MAX_BATCH:
                    pending = self._queue.popleft()
                    if not pending.done.cancelled():
                        batch.append(pending)
                        quotas += quotas_of(pending)
                if batch:
                    await self._round_trip(batch)
        finally:
            # here and not in the callback, which runs later: a call queued in between would start no task
            self._tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _round_trip(self, batch: list[PendingCall]) -> None:
        connection = None
        try:
            async with ServerTimeout(self.loop, self._timeout):
                connection = await self._acquire()
                try:
                    await self._exchange(connection, groups(batch, self._partitioned))
                except BaseException as error:
                    note_connected_at(connection, error)
                    await connection.disconnect(nowait=True)  # replies may be left in it
                    raise
                finally:
                    await self._release(connection)
        except (RedisError, OSError) as error:
            if not str(error):  # our own time-out, which has no text; if there was no connection, nothing was sent
                error = (TimeoutError if connection else Unreached)(f"no answer within {self._timeout} s")
            _fail(batch, error)
            if not isinstance(error, ResponseError):  # the calls queued behind have waited as long for the same server
                _fail(self._queue, Unreached(f"gave up behind others: {error or 'no answer'}"))
                self._queue.clear()
        except Exception as error:  # of an option that redis-py takes and cannot use, say
            _fail(batch, ConnectionError(f"{type(error).__name__}: {error}"))
        except BaseException:
            _fail(batch, ConnectionError("the event loop stopped in mid-call"))
            raise

    async def _exchange(self, connection: Any, sent: list[Group]) -> None:
        """Send all groups, then read their replies."""
        self.round_trips += 1
        await connection.send_packed_command(list(map(packed, sent)), check_health=False)
        for group in sent:
            request = group[0].request
            try:
                if isinstance(request, ScriptRequest) and request.asking:
                    reply = await arun(reply_after_asking(), lambda _: connection.read_response())
                else:
                    reply = await connection.read_response()
            except ResponseError as error:
                _fail(group, error)
            else:
                for pending, answer in zip(group, replies(group, reply), strict=True):
                    self._deliver(pending, answer)

    def _deliver(self, pending: PendingCall, answer: Any) -> None:
        if isinstance(answer, ResponseError):
            _fail([pending], answer)
        elif pending.done.done():
            self._refund_unread(pending.request, answer)
        else:
            pending.done.set_result(answer)

    async def _acquire(self) -> Any:
        """The connection used last, if it is still good; redis-py's pool would cost as much as the round trip."""
        if not isinstance(self._source, RedisURL):
            return await self._source.get_connection()
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = self._make(self._source)
        try:
            if connection.is_connected and await _can_read(connection):  # readable while idle: the server closed it
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                await self._connect(connection, self._source)
        except BaseException as error:
            self._idle.append(connection)
            if isinstance(error, ReadOnlyError):
                await connection.disconnect(nowait=True)
                raise
            if isinstance(error, RedisError | OSError | ValueError):
                raise Unreached(f"{self._address.host}:{self._address.port}: {error}") from error
            raise
        return connection

    def _make(self, url: RedisURL) -> Any:
        """A new connection, not connected yet."""
        options = url.connection_options(self._address)
        # one time-out around a round trip replaces redis-py's around every read and write
        made = _CONNECTIONS[url.connection](**options, socket_timeout=None, retry=Retry(NoBackoff(), 0))
        self._connection_count += 1
        return made

    async def _connect(self, connection: Any, url: RedisURL) -> None:
        connection.connected_at = monotonic()
        await connection.connect()
        if url.kind == "sentinel" and not self._address.sentinel:
            await connection.send_packed_command([pack("ROLE")], check_health=False)
            check_role(await connection.read_response())

    async def _release(self, connection: Any) -> None:
        if isinstance(self._source, RedisURL):
            self._idle.append(connection)
        else:
            await self._source.release(connection)

    def _refund_unread(self, request: ServerCommand | ScriptRequest, reply: Any) -> None:
        """Refund what a call took whose caller is gone."""
        if isinstance(request, ScriptRequest):
            for script, call in request.script.refunds(request.call, reply):
                refund = request._replace(script=script, call=call, send_source=True)
                done = self.loop.create_future()  # no task awaits it
                done.add_done_callback(_retrieve)
                self._enqueue(PendingCall(refund, done))


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Look at the outcome, so that asyncio does not report an error as one that was never retrieved."""
    if not done.cancelled():
        done.exception()


async def _can_read(connection: Any) -> bool:
    can_read = getattr(connection, "can_read", None) or connection.can_read_destructive  # before redis-py 8
    try:
        return bool(await can_read())
    except (RedisError, OSError):
        return True  # it is closed


def _fail(calls: Iterable[PendingCall], error: Exception) -> None:
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
