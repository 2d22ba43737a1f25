"""Redis from an event loop: the executor that makes calls, batched to each server.

Each server has a `BatchSender` of its own, so batches to several servers of a Cluster are under way at the same time.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Coroutine
from time import monotonic
from typing import Any

import redis.asyncio

from headgate._lifecycle import at_loop_end
from headgate._plan import arun
from headgate.redis.batching import BatchSender
from headgate.redis.execute import Executor, Request, ScriptRequest
from headgate.redis.health import examine, probe
from headgate.redis.script import Script, ScriptCall
from headgate.redis.servers import ServerFigures, server_name, survey
from headgate.redis.topology import deciding_servers
from headgate.redis.url import Address, RedisURL
from headgate.stores.base import Health
from headgate.stores.batching import ServerTimeout
from headgate.stores.breaker import Breaker
from headgate.stores.probe import PROBE_TIMEOUT, start_in_task
from headgate.stores.remote import LimiterCall


class AsyncExecutor(Executor):
    """Makes calls from one event loop."""

    def __init__(
        self, source: RedisURL | redis.asyncio.ConnectionPool, display_name: str, timeout: float | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._source = source
        if isinstance(source, RedisURL):
            super().__init__(source, display_name, timeout or source.timeout)
        else:
            super().__init__(None, display_name, timeout or source.connection_kwargs.get("socket_timeout") or 1.0)
        self._servers: dict[Address, BatchSender] = {}
        self._probes: set[asyncio.Task[None]] = set()
        self._loop_end: AsyncGenerator[None] | None = None

    def close_with_loop(self) -> None:
        """Close the connections at the end of the event loop, or of this executor: not every caller uses `aclose`."""
        self._loop_end = at_loop_end(functools.partial(_close_idle, self._servers))

    async def execute(self, script: Script, call: LimiterCall | ScriptCall, time_limit: float | None = None) -> Any:
        """The reply to *call*; raises at once while the breaker is open. *time_limit*: None for the time-out."""
        return await arun(self.plan(script, call, time_limit), self.answer)

    async def examine(self, time_limit: float, check_timeout: float) -> Health:
        """Check the server's health within *time_limit* seconds, past the breaker."""
        return await arun(examine(self._topology, check_timeout, monotonic() + time_limit), self.answer)

    async def survey(self, time_limit: float) -> list[ServerFigures]:
        """The figures of every server that decides, within *time_limit* seconds, on connections of their own."""
        spare = AsyncExecutor(self._source, self._display_name, time_limit / 2)
        try:
            return await survey(self._topology, spare.answer, time_limit)
        finally:
            await spare.aclose()

    async def warm_up(self, count: int) -> None:
        """Open *count* connections to each server that decides, within the time-out; at most as many as it may have."""
        deadline = monotonic() + self.timeout
        for address in await arun(deciding_servers(self._topology, deadline), self.answer):
            await self._sender(address).warm_up(count, deadline)

    def connections(self) -> list[BatchSender]:
        return list(self._servers.values())

    def connections_by_server(self) -> dict[str, BatchSender]:
        """The connections to each server by its name, those to Sentinels left out."""
        return {server_name(address): sender for address, sender in self._servers.items() if not address.sentinel}

    @property
    def round_trips(self) -> int:
        return sum(sender.round_trips for sender in self._servers.values())

    async def aclose(self) -> None:
        self.closed = True
        probes = list(self._probes)
        for task in probes:
            task.cancel()
        for sender in list(self._servers.values()):
            await sender.aclose()
        await asyncio.gather(*probes, return_exceptions=True)  # an event loop that ends would cancel them once more
        end, self._loop_end = self._loop_end, None
        if end is not None:
            await end.aclose()

    def answer(self, request: Request) -> Coroutine[Any, Any, Any]:
        """Do what a plan (see `headgate._plan`) requests: sleep, or have the request sent with the next batch."""
        if isinstance(request, float):
            return asyncio.sleep(request)
        sender = self._servers.get(request.address)
        if sender is None:
            sender = self._sender(request.address)
        if isinstance(request, ScriptRequest) and not request.counts_queue_time:
            return sender.send(request)  # the batch has the time-out
        return self._send_by(sender, request)

    def _sender(self, address: Address) -> BatchSender:
        """What sends batches to *address*, made when it is first needed."""
        if address not in self._servers:
            self._servers[address] = BatchSender(self._source, address, self.timeout)
        return self._servers[address]

    async def _send_by(self, sender: BatchSender, request: Any) -> Any:
        async with ServerTimeout(self.loop, max(request.deadline - monotonic(), 0.0)):
            return await sender.send(request)

    def start_probe(self, breaker: Breaker, slot: int) -> None:
        start_in_task(self, breaker, slot, self._probes)

    async def probe(self, slot: int) -> None:
        """Probe on an executor that has more time; the connections that it made are handed to the calls."""
        timeout = max(self.timeout, PROBE_TIMEOUT)
        spare = AsyncExecutor(self._source, self._display_name, timeout)
        try:
            await arun(probe(self._topology, slot, self.timeout, monotonic() + timeout), spare.answer)
            for address, made in spare._servers.items():
                if not address.sentinel and not self.closed:
                    own = self._servers.setdefault(address, BatchSender(self._source, address, self.timeout))
                    own.take_connections(made)
        finally:
            for sender in spare.connections():
                await sender.abort()  # does not wait: a cancelled probe may be cancelled again


async def _close_idle(servers: dict[Address, BatchSender]) -> None:
    for sender in list(servers.values()):
        await sender.close_idle()
