"""The batches of an event loop to a Redis server: `headgate.stores.batching` says when they are sent, this file how.

A batch is one write of several commands and one read of their replies. Calls of one limiter are one command.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from headgate._plan import arun
from headgate.redis.execute import ScriptRequest, reply_after_asking
from headgate.redis.merging import MAX_BATCH, groups, packed, quotas_of, replies
from headgate.redis.script import pack
from headgate.redis.topology import ServerCommand, Unreached, check_role
from headgate.redis.url import Address, RedisURL
from headgate.stores.batching import Batches, PendingCall, ServerTimeout, fail
from headgate.stores.breaker import note_connected_at

MAX_TASKS = 4  # round trips to one server at a time, when there is more to send than one takes

_CONNECTIONS: dict[type, type] = {
    redis.Connection: redis.asyncio.Connection,
    redis.SSLConnection: redis.asyncio.SSLConnection,
    redis.UnixDomainSocketConnection: redis.asyncio.UnixDomainSocketConnection,
}


Group = list[PendingCall]  # calls that are one command: of one limiter and one kind


class BatchSender(Batches):
    """The queue of one event loop for one server, and the tasks that send it."""

    max_batch = MAX_BATCH

    def __init__(self, source: RedisURL | redis.asyncio.ConnectionPool, address: Address, timeout: float) -> None:
        super().__init__(min(MAX_TASKS, source.max_connections) if isinstance(source, RedisURL) else MAX_TASKS)
        self._source = source
        self._address = address
        self._timeout = timeout
        self._partitioned = isinstance(source, RedisURL) and source.kind == "cluster"

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
        await self._finish()
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
            fail(batch, error)
            if not isinstance(error, ResponseError):  # the calls queued behind have waited as long for the same server
                fail(self._queue, Unreached(f"gave up behind others: {error or 'no answer'}"))
                self._queue.clear()
        except Exception as error:  # of an option that redis-py takes and cannot use, say
            fail(batch, ConnectionError(f"{type(error).__name__}: {error}"))
        except BaseException:
            fail(batch, ConnectionError("the event loop stopped in mid-call"))
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
                fail(group, error)
            else:
                for pending, answer in zip(group, replies(group, reply), strict=True):
                    self._deliver(pending, answer)

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
        kind = getattr(url.connection, "asyncio_class", None) or _CONNECTIONS[url.connection]
        made = kind(**options, socket_timeout=None, retry=Retry(NoBackoff(), 0))
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

    def _quotas(self, pending: PendingCall) -> int:
        return quotas_of(pending)

    def _refunds(self, request: ServerCommand | ScriptRequest, reply: Any) -> list[Any]:
        if not isinstance(request, ScriptRequest):
            return []
        made = request.script.refunds(request.call, reply)
        return [request._replace(script=script, call=call, send_source=True) for script, call in made]


async def _can_read(connection: Any) -> bool:
    can_read = getattr(connection, "can_read", None) or connection.can_read_destructive  # before redis-py 8
    try:
        return bool(await can_read())
    except (RedisError, OSError):
        return True  # it is closed
