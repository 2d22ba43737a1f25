"""Asking Redis from an event loop: calls that are awaited at the same time travel together, in one round trip.

The first call of a quiet moment leaves with everything else that asks in the same turn of the event loop; while
it is under way the next ones gather, and leave when it is back. So a lone call waits for nobody, and a crowd makes
few trips, and those of one limiter are one call of its script. A batch is bounded: 64 quotas of 5 to 20 microseconds
hold Redis for about a millisecond. Each server has its own batches, so those to several servers of a Cluster are under
way at the same time.

Whoever is cancelled loses nothing: a call that was not sent is dropped, and what a sent one took is given back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from functools import partial
from itertools import groupby
from time import monotonic
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from headgate.plan import arun
from headgate.redis.address import Address, Target
from headgate.redis.asking import SILENCE, Ask, Request, ask, probe
from headgate.redis.breaker import PROBE_TIMEOUT, Breaker, Breakers, pauses
from headgate.redis.health import examine
from headgate.redis.lua import Eval, Lua
from headgate.redis.script import Call, Script
from headgate.redis.topology import Send, Single, Unreached, pack, text, topology
from headgate.stores import Health

MAX_BATCH = 64  # quotas looked at
LAST_TURNS = 3  # of the event loop, to read a reply that came while this process was held up
MAX_CARRIERS = 4  # batches under way to one server, when there is more to carry than one takes

_CONNECTIONS: dict[type, type] = {
    redis.Connection: redis.asyncio.Connection,
    redis.SSLConnection: redis.asyncio.SSLConnection,
    redis.UnixDomainSocketConnection: redis.asyncio.UnixDomainSocketConnection,
}


class Passenger:
    """A request in the queue, and who waits for its reply, and how long a trip may take for it."""

    __slots__ = ("done", "patience", "request")

    def __init__(self, request: Send | Ask, done: asyncio.Future[Any], patience: float) -> None:
        self.request = request
        self.done = done
        self.patience = patience


Group = list[Passenger]  # that one command can carry: of one limiter and one kind of call


class Batches:
    """The queue of one event loop for one server."""

    def __init__(self, source: Target | redis.asyncio.ConnectionPool, address: Address, timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.trips = 0
        self._source = source
        self._address = address
        self._timeout = timeout
        self._most = min(MAX_CARRIERS, source.max_connections) if isinstance(source, Target) else MAX_CARRIERS
        self._apart = isinstance(source, Target) and source.kind == "cluster"
        self._waiting: deque[Passenger] = deque()
        self._carriers: set[asyncio.Task[None]] = set()
        self._idle: list[Any] = []
        self._made = 0

    async def send(self, request: Send | Ask, patience: float) -> Any:
        """The reply to one request; *patience* is for the trip, and begins when it does."""
        passenger = Passenger(request, self.loop.create_future(), patience)
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

    def _queue(self, passenger: Passenger) -> None:
        self._waiting.append(passenger)
        if not self._carriers or (len(self._waiting) >= MAX_BATCH and len(self._carriers) < self._most):
            carrier = self.loop.create_task(self._carry())
            self._carriers.add(carrier)
            carrier.add_done_callback(
                self._carriers.discard
            )  # one that is cancelled before it begins ends nowhere else

    async def _carry(self) -> None:
        try:
            while self._waiting:
                batch: list[Passenger] = []
                weight, patience = 0, 0.0
                while self._waiting and weight < MAX_BATCH:
                    passenger = self._waiting.popleft()
                    if not passenger.done.cancelled():
                        batch.append(passenger)
                        patience = max(patience, passenger.patience)
                        weight += passenger.request.script.weight if isinstance(passenger.request, Ask) else 1
                if batch:
                    await self._trip(batch, patience)
        finally:
            # here and not in a callback, which comes later: a call queued in between would wait for nobody
            self._carriers.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _trip(self, batch: list[Passenger], patience: float) -> None:
        try:
            async with _Silence(self.loop, patience):
                connection = await self._borrow()
                try:
                    await self._exchange(connection, _groups(batch, self._apart))
                except BaseException:
                    await connection.disconnect(nowait=True)  # replies may be left in it
                    raise
                finally:
                    await self._give_back(connection)
        except (RedisError, OSError) as error:
            _fail(batch, error if str(error) else TimeoutError(f"no answer within {patience} s"))
            if not isinstance(error, ResponseError):  # those behind have waited as long, and for the same
                _fail(self._waiting, Unreached(f"gave up behind others: {error or 'no answer'}"))
                self._waiting.clear()
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
                if isinstance(request, Ask) and request.asking:
                    reply = await _read_both(connection)
                else:
                    reply = await connection.read_response()
            except ResponseError as error:
                _fail(group, error)
            else:
                for i, passenger in enumerate(group):
                    self._tell(passenger, reply if len(group) == 1 else reply[5 * i : 5 * i + 5])

    def _tell(self, passenger: Passenger, reply: Any) -> None:
        if passenger.done.done():
            self._return_permits(passenger.request, reply)
        elif isinstance(passenger.request, Ask) and passenger.request.script.joins and reply[0] < 0:
            passenger.done.set_exception(ResponseError(text(reply[1])))
        else:
            passenger.done.set_result(reply)

    async def _borrow(self) -> Any:
        """The connection used last, if it is still good; asking redis-py's pool each time costs as much as the trip."""
        if not isinstance(self._source, Target):
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
            if connection.is_connected and await connection.can_read():  # nothing was asked: the server closed it
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
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
        if isinstance(self._source, Target):
            self._idle.append(connection)
        else:
            await self._source.release(connection)

    def _return_permits(self, request: Send | Ask, reply: Any) -> None:
        """Give back what a call took for somebody who is gone."""
        if isinstance(request, Ask) and request.call.op == "take" and reply[0] == 1:
            done = self.loop.create_future()
            done.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for it
            refund = request._replace(call=request.call._replace(op="refund"), whole=True)
            self._queue(Passenger(refund, done, self._timeout))


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


def _groups(batch: list[Passenger], apart: bool) -> list[Group]:
    """Who can share a command; in a Cluster nobody, since a script's keys must lie in one slot."""
    if apart:
        return [[passenger] for passenger in batch]
    return [list(group) for _, group in groupby(batch, key=_kind)]


def _kind(passenger: Passenger) -> object:
    request = passenger.request
    if isinstance(request, Ask) and request.script.joins and not request.asking:
        return request.script, request.call.op, request.whole
    return passenger


def _packed(group: Group) -> bytes:
    request = group[0].request
    if isinstance(request, Send):
        return request.command
    calls = [passenger.request.call for passenger in group if isinstance(passenger.request, Ask)]
    command = request.script.call(calls, request.whole)
    return pack("ASKING") + command if request.asking else command


def _fail(batch: Iterable[Passenger], error: Exception) -> None:
    for passenger in batch:
        if not passenger.done.done():
            passenger.done.set_exception(error)


class _Silence:
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


class LoopLink:
    """A Redis, single, behind Sentinels or a Cluster, for one event loop."""

    def __init__(self, source: Target | redis.asyncio.ConnectionPool, shown: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.timeout = source.timeout if isinstance(source, Target) else 1.0
        self._source = source
        self._shown = shown
        self._topology = topology(source) if isinstance(source, Target) else Single(Address("", 0))
        self._nodes: dict[Address, Batches] = {}
        self._breakers = Breakers(self._shown, self._topology.sliced)
        self._probes: set[asyncio.Task[None]] = set()

    async def ask(self, script: Script | Lua, call: Call | Eval, within: float | None = None) -> Any:
        """The reply to *call*, *within* seconds or the time-out; raises at once while the breaker is open."""
        slot = script.slot(call.key) if self._topology.sliced else 0
        breaker = self._breakers.of(self._topology.address(slot))
        patience = self.timeout if within is None else within
        until = monotonic() + patience
        try:
            reply = await arun(ask(self._topology, script, call, until), partial(self._answer, until, patience))
        except SILENCE as error:
            breaker.failed(error, lambda: self._probe_later(breaker, slot), 0.0 if within is None else self.timeout)
            raise
        if breaker.failures:
            breaker.answered()
        return reply

    async def examine(self, within: float) -> Health:
        """Look at the server, *within* seconds; not through the breaker."""
        answer = partial(self._answer, monotonic() + within, within)
        return await arun(examine(self._topology, self.timeout), answer)

    def breakers(self) -> list[Breaker]:
        return self._breakers.all()

    def connections(self) -> list[Batches]:
        return list(self._nodes.values())

    @property
    def trips(self) -> int:
        return sum(batches.trips for batches in self._nodes.values())

    async def aclose(self) -> None:
        for task in self._probes:
            task.cancel()
        for batches in list(self._nodes.values()):
            await batches.aclose()

    def _answer(self, until: float, patience: float, request: Request) -> Coroutine[Any, Any, Any]:
        if isinstance(request, float):
            return asyncio.sleep(request)
        batches = self._nodes.get(request.address)
        if batches is None:
            batches = self._nodes[request.address] = Batches(self._source, request.address, self.timeout)
        reply = batches.send(request, patience)
        if isinstance(request, Ask) and not request.again and patience >= self.timeout:
            return reply  # the trip has a time-out; to wait until others of this process are served is no silence
        left = max(until - monotonic(), 0.0)
        return self._soon(reply, left if isinstance(request, Ask) else left * request.share)

    async def _soon(self, reply: Coroutine[Any, Any, Any], left: float) -> Any:
        async with _Silence(self.loop, left):
            return await reply

    def _probe_later(self, breaker: Breaker, slot: int) -> None:
        probe = self.loop.create_task(self._probe(breaker, slot))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, breaker: Breaker, slot: int) -> None:
        for pause in pauses():
            await asyncio.sleep(pause)
            if not breaker.open:
                return
            try:
                patience = max(self.timeout, PROBE_TIMEOUT)
                await arun(probe(self._topology, slot), partial(self._answer, monotonic() + patience, patience))
            except (RedisError, OSError):
                continue
            breaker.answered()
            return
