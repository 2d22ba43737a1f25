"""Calls that are awaited at the same time travel together, on one connection, in one round trip.

The first call of a quiet moment leaves with everything else that asks in the same turn of the event loop; while
it is under way the next ones gather, and leave when it is back. So a lone call waits for nobody, and a crowd makes
few trips, and those of one limiter are one call of its script. A batch is bounded: 64 quotas of 5 to 20 microseconds
hold Redis for about a millisecond.

Whoever is cancelled loses nothing: a call that was not sent is dropped, and what a sent one took is given back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import groupby
from typing import Any, cast

from redis.asyncio import Connection, ConnectionPool
from redis.exceptions import NoScriptError, RedisError, ResponseError

from headgate.redis.connect import TIMEOUT
from headgate.redis.script import Call, Script

MAX_BATCH = 64  # quotas looked at
MAX_CARRIERS = 4  # batches under way at the same time, when there is more to carry than one takes


class Passenger:
    """A call in the queue, and who waits for its reply."""

    __slots__ = ("call", "done", "script")

    def __init__(self, script: Script, call: Call, done: asyncio.Future[Any]) -> None:
        self.script = script
        self.call = call
        self.done = done


class Batcher:
    """The queue of one event loop for one Redis."""

    def __init__(self, pool: ConnectionPool, own: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.trips = 0
        self._pool = pool
        self._own = own
        self._waiting: deque[Passenger] = deque()
        self._carriers: set[asyncio.Task[None]] = set()
        self._idle: list[Connection] = []

    async def call(self, script: Script, call: Call) -> Any:
        """The reply of *script* to one call."""
        passenger = Passenger(script, call, self.loop.create_future())
        self._queue(passenger)
        try:
            return await passenger.done
        except asyncio.CancelledError:
            if not passenger.done.cancelled() and not passenger.done.exception():
                self._return_permits(passenger, passenger.done.result())  # it came, and the caller will never see it
            raise

    async def aclose(self) -> None:
        """Finish what is under way, then close the connections, unless the pool is somebody else's."""
        while self._carriers:
            await asyncio.gather(*self._carriers, return_exceptions=True)
        while self._idle:
            connection = self._idle.pop()
            await connection.disconnect()
            await self._pool.release(connection)
        if self._own:
            await self._pool.disconnect()

    def _queue(self, passenger: Passenger) -> None:
        self._waiting.append(passenger)
        if not self._carriers or (len(self._waiting) >= MAX_BATCH and len(self._carriers) < MAX_CARRIERS):
            self._carriers.add(self.loop.create_task(self._carry()))

    async def _carry(self) -> None:
        try:
            while self._waiting:
                batch: list[Passenger] = []
                weight = 0
                while self._waiting and weight < MAX_BATCH:
                    passenger = self._waiting.popleft()
                    if not passenger.done.cancelled():
                        batch.append(passenger)
                        weight += passenger.script.weight
                if batch:
                    await self._trip(batch)
        finally:
            # here and not in a callback, which comes later: a call queued in between would wait for nobody
            self._carriers.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _trip(self, batch: list[Passenger]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                connection = await self._borrow()
                try:
                    groups = _groups(batch)
                    unknown = await self._exchange(connection, groups, whole=False)
                    if unknown:  # a new server, or its cache was flushed
                        await self._exchange(connection, unknown, whole=True)
                except BaseException:
                    await connection.disconnect(nowait=True)  # replies may be left in it
                    raise
                finally:
                    await self._give_back(connection)
        except (RedisError, OSError) as error:
            _fail(batch, error)
        except BaseException:
            _fail(batch, ConnectionError("the event loop stopped in mid-call"))
            raise

    async def _borrow(self) -> Connection:
        """The connection used last, if it is still good; asking redis-py's pool each time costs as much as the trip."""
        connection: Connection = self._idle.pop() if self._idle else await self._pool.get_connection()
        if connection.is_connected and await connection.can_read():  # nothing was asked: it is closed, or not ours
            await connection.disconnect(nowait=True)  # the next command connects again
        return connection

    async def _give_back(self, connection: Connection) -> None:
        if self._own:
            self._idle.append(connection)
        else:
            await self._pool.release(connection)

    async def _exchange(self, connection: Connection, groups: list[Group], whole: bool) -> list[Group]:
        """One round trip. Returns those whose script the server did not know."""
        self.trips += 1
        unknown = []
        packed = [group[0].script.call([p.call for p in group], whole) for group in groups]
        await connection.send_packed_command(packed, check_health=False)
        for group in groups:
            try:
                reply = await connection.read_response()
            except NoScriptError:
                unknown.append(group)
            except ResponseError as error:
                _fail(group, error)
            else:
                for i, passenger in enumerate(group):
                    self._tell(passenger, reply[5 * i : 5 * i + 5])
        return unknown

    def _tell(self, passenger: Passenger, reply: list[Any]) -> None:
        if passenger.done.done():
            self._return_permits(passenger, reply)
        elif reply[0] < 0:
            passenger.done.set_exception(ResponseError(reply[1]))
        else:
            passenger.done.set_result(reply)

    def _return_permits(self, passenger: Passenger, reply: Any) -> None:
        """Return what a call took for somebody who is gone."""
        call = passenger.call
        if call.op == "take" and reply[0] == 1:
            done = self.loop.create_future()
            done.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for it
            self._queue(Passenger(passenger.script, call._replace(op="refund"), done))


Group = list[Passenger]  # of one limiter and one kind of call, so that one call of the script can carry them


def _groups(batch: list[Passenger]) -> list[Group]:
    return [list(group) for _, group in groupby(batch, key=lambda p: (p.script, p.call.op))]


def _fail(batch: list[Passenger], error: Exception) -> None:
    for passenger in batch:
        if not passenger.done.done():
            passenger.done.set_exception(error)
