"""Calls that are awaited at the same time in one event loop travel together to one server, in one round trip.

The first call of a quiet moment leaves with everything else that asks in the same turn of the event loop; while
it is under way the next ones gather, and leave when it is back. So a lone call waits for nobody, and a crowd makes
few trips, and those of one limiter are one call of its script. A batch is bounded: 64 quotas of 5 to 20 microseconds
hold Redis for about a millisecond.

Whoever is cancelled loses nothing: a call that was not sent is dropped, and what a sent one took is given back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from time import monotonic
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from headgate.redis.breaker import broke
from headgate.redis.execute import ScriptRequest
from headgate.redis.script import still_owed
from headgate.redis.topology import Send, Unreached, pack, text
from headgate.redis.url import Address, RedisURL

MAX_BATCH = 64  # quotas looked at
LAST_TURNS = 3  # of the event loop, to read a reply that came while this process was held up
MAX_CARRIERS = 4  # batches under way to one server, when there is more to carry than one takes

_CONNECTIONS: dict[type, type] = {
    redis.Connection: redis.asyncio.Connection,
    redis.SSLConnection: redis.asyncio.SSLConnection,
    redis.UnixDomainSocketConnection: redis.asyncio.UnixDomainSocketConnection,
}


class PendingCall:
    """A request in the queue, and who waits for its reply."""

    __slots__ = ("done", "request")

    def __init__(self, request: Send | ScriptRequest, done: asyncio.Future[Any]) -> None:
        self.request = request
        self.done = done


Group = list[PendingCall]  # that one command can carry: of one limiter and one kind of call


class BatchSender:
    """The queue of one event loop for one server."""

    def __init__(self, source: RedisURL | redis.asyncio.ConnectionPool, address: Address, timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.trips = 0
        self._source = source
        self._address = address
        self._timeout = timeout
        self._most = min(MAX_CARRIERS, source.max_connections) if isinstance(source, RedisURL) else MAX_CARRIERS
        self._apart = isinstance(source, RedisURL) and source.kind == "cluster"
        self._waiting: deque[PendingCall] = deque()
        self._carriers: set[asyncio.Task[None]] = set()
        self._idle: list[Any] = []
        self._made = 0

    async def send(self, request: Send | ScriptRequest) -> Any:
        """The reply to one request. The time-out is for its trip, and begins when that does."""
        passenger = PendingCall(request, self.loop.create_future())
        self._queue(passenger)
        try:
            return await passenger.done
        except asyncio.CancelledError:
            if not passenger.done.cancelled() and not passenger.done.exception():
                self._return_permits(request, passenger.done.result())  # it came, and the caller will never see it
            raise

    def in_use(self) -> int:
        return self._made - len(self._idle)

    def idle(self) -> int:
        return len(self._idle)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def aclose(self) -> None:
        """Finish what is under way, then close the connections."""
        while self._carriers:
            await asyncio.gather(*self._carriers, return_exceptions=True)
        while self._idle:
            await self._idle.pop().disconnect()
            self._made -= 1

    async def drop(self) -> None:
        """Close the connections that are idle, in this turn of the event loop: it may be one of the last."""
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)
            self._made -= 1

    def adopt(self, other: BatchSender) -> None:
        """Take over the connections of *other*, which has done its work."""
        while other._idle and self._made < self._most:
            self._idle.append(other._idle.pop())
            self._made += 1
            other._made -= 1

    def _queue(self, passenger: PendingCall) -> None:
        self._waiting.append(passenger)
        if not self._carriers or (len(self._waiting) >= MAX_BATCH and len(self._carriers) < self._most):
            self._start_carrier()

    def _start_carrier(self) -> None:
        carrier = self.loop.create_task(self._carry())
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carrier_is_gone)

    def _carrier_is_gone(self, carrier: asyncio.Task[None]) -> None:
        """One that was cancelled, perhaps before it began, leaves others waiting."""
        self._carriers.discard(carrier)
        if self._waiting and not self._carriers and not self.loop.is_closed():
            self._start_carrier()

    async def _carry(self) -> None:
        try:
            while self._waiting:
                batch: list[PendingCall] = []
                weight = 0
                while self._waiting and weight < MAX_BATCH:
                    passenger = self._waiting.popleft()
                    if not passenger.done.cancelled():
                        batch.append(passenger)
                        weight += passenger.request.script.weight if isinstance(passenger.request, ScriptRequest) else 1
                if batch:
                    await self._trip(batch)
        finally:
            # here and not in a callback, which comes later: a call queued in between would wait for nobody
            self._carriers.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _trip(self, batch: list[PendingCall]) -> None:
        try:
            async with Silence(self.loop, self._timeout):
                connection = await self._borrow()
                try:
                    await self._exchange(connection, _groups(batch, self._apart))
                except BaseException as error:
                    broke(connection, error)
                    await connection.disconnect(nowait=True)  # replies may be left in it
                    raise
                finally:
                    await self._give_back(connection)
        except (RedisError, OSError) as error:
            _fail(batch, error if str(error) else TimeoutError(f"no answer within {self._timeout} s"))
            if not isinstance(error, ResponseError):  # those behind have waited as long, and for the same
                _fail(self._waiting, Unreached(f"gave up behind others: {error or 'no answer'}"))
                self._waiting.clear()
        except Exception as error:  # of an option that redis-py takes and cannot use, say
            _fail(batch, ConnectionError(f"{type(error).__name__}: {error}"))
        except BaseException:
            _fail(batch, ConnectionError("the event loop stopped in mid-call"))
            raise

    async def _exchange(self, connection: Any, groups: list[Group]) -> None:
        """One round trip."""
        self.trips += 1
        await connection.send_packed_command([_packed(group) for group in groups], check_health=False)
        for group in groups:
            request = group[0].request
            try:
                if isinstance(request, ScriptRequest) and request.asking:
                    reply = await _read_both(connection)
                else:
                    reply = await connection.read_response()
            except ResponseError as error:
                _fail(group, error)
            else:
                for i, passenger in enumerate(group):
                    self._tell(passenger, reply if len(group) == 1 else reply[5 * i : 5 * i + 5])

    def _tell(self, passenger: PendingCall, reply: Any) -> None:
        if passenger.done.done():
            self._return_permits(passenger.request, reply)
        elif isinstance(passenger.request, ScriptRequest) and passenger.request.script.joins and reply[0] < 0:
            passenger.done.set_exception(ResponseError(text(reply[1])))
        else:
            passenger.done.set_result(reply)

    async def _borrow(self) -> Any:
        """The connection used last, if it is still good; asking redis-py's pool each time costs as much as the trip."""
        if not isinstance(self._source, RedisURL):
            return await self._source.get_connection()
        if self._idle:
            connection = self._idle.pop()
        else:
            kind = _CONNECTIONS[self._source.connection]
            options = self._source.connection_options(self._address)
            # one time-out around a trip replaces redis-py's around every read and write
            connection = kind(**options, socket_timeout=None, retry=Retry(NoBackoff(), 0))
            self._made += 1
        try:
            if connection.is_connected and await _can_read(connection):  # nothing was asked: the server closed it
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                connection.since = monotonic()
                await connection.connect()
                if self._source.kind == "sentinel" and not self._address.sentinel:
                    await _check_role(connection)
        except BaseException as error:
            self._idle.append(connection)
            if isinstance(error, ReadOnlyError):
                await connection.disconnect(nowait=True)
                raise
            if isinstance(error, RedisError | OSError | ValueError):
                raise Unreached(f"{self._address.host}:{self._address.port}: {error}") from error
            raise
        return connection

    async def _give_back(self, connection: Any) -> None:
        if isinstance(self._source, RedisURL):
            self._idle.append(connection)
        else:
            await self._source.release(connection)

    def _return_permits(self, request: Send | ScriptRequest, reply: Any) -> None:
        """Give back what a call took for somebody who is gone."""
        if isinstance(request, ScriptRequest) and request.call.op == "take" and reply[0] == 1:
            self._refund(request, request.call.permits)

    def _refund(self, request: ScriptRequest, permits: int) -> None:
        def given_back(done: asyncio.Future[Any]) -> None:  # nobody else waits for it
            if not done.cancelled() and not done.exception():
                self._refund(request, still_owed(done.result()))

        if permits:
            call = request.call._replace(op="refund", permits=permits)
            done = self.loop.create_future()
            done.add_done_callback(given_back)
            self._queue(PendingCall(request._replace(call=call, send_source=True), done))


async def _can_read(connection: Any) -> bool:
    look = getattr(connection, "can_read", None) or connection.can_read_destructive  # before redis-py 8
    try:
        return bool(await look())
    except (RedisError, OSError):
        return True  # that it is closed


async def _read_both(connection: Any) -> Any:
    """The reply to what came behind ASKING. Both are read whatever they are, so that none is left for the next call."""
    refused = None
    try:
        await connection.read_response()
    except ResponseError as error:
        refused = error
    reply = await connection.read_response()
    if refused:
        raise refused
    return reply


async def _check_role(connection: Any) -> None:
    """A primary that was demoted cuts its clients off: the address is right no longer, and it would not say so."""
    await connection.send_packed_command([pack("ROLE")], check_health=False)
    if text((await connection.read_response())[0]) != "master":
        raise ReadOnlyError("READONLY it is not the primary any more")


def _groups(batch: list[PendingCall], apart: bool) -> list[Group]:
    """Who can share a command; in a Cluster nobody, since a script's keys must lie in one slot."""
    if apart:
        return [[passenger] for passenger in batch]
    return [list(group) for _, group in groupby(batch, key=_kind)]


def _kind(passenger: PendingCall) -> object:
    request = passenger.request
    if isinstance(request, ScriptRequest) and request.script.joins and not request.asking:
        return request.script, request.call.op, request.send_source
    return passenger


def _packed(group: Group) -> bytes:
    request = group[0].request
    if isinstance(request, Send):
        return request.command
    calls = [passenger.request.call for passenger in group if isinstance(passenger.request, ScriptRequest)]
    command = request.script.call(calls, request.send_source)
    return pack("ASKING") + command if request.asking else command


def _fail(batch: Iterable[PendingCall], error: Exception) -> None:
    for passenger in batch:
        if not passenger.done.done():
            passenger.done.set_exception(error)


class Silence:
    """A time-out for the server, not for this process: one that was held up reads what has come before it gives up."""

    __slots__ = ("_handle", "_loop", "_patience", "_timeout")

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._loop = loop
        self._patience = patience
        self._timeout = asyncio.timeout(None)
        self._handle: asyncio.Handle

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._handle = self._loop.call_later(self._patience, self._last_turns, LAST_TURNS)

    async def __aexit__(self, *raised: Any) -> None:
        self._handle.cancel()
        await self._timeout.__aexit__(*raised)

    def _last_turns(self, left: int) -> None:
        if left:
            self._handle = self._loop.call_soon(self._last_turns, left - 1)
        else:
            self._timeout.reschedule(self._loop.time())
