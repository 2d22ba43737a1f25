"""Asking Redis from an event loop: batches to each server, a breaker before them, a probe that finds the way back.

Each server has its own batches, so those to several servers of a Cluster are under way at the same time.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from time import monotonic
from typing import Any

import redis.asyncio

from headgate._plan import arun
from headgate.redis.batching import BatchSender, Silence
from headgate.redis.breaker import PROBE_TIMEOUT, Breaker, Breakers, pauses
from headgate.redis.execute import NO_REPLY_ERRORS, Request, ScriptRequest, execute, probe
from headgate.redis.health import examine
from headgate.redis.lua import Eval, Lua
from headgate.redis.script import Call, Script
from headgate.redis.topology import Single, Unreached, topology
from headgate.redis.url import Address, RedisURL
from headgate.stores.base import Health


class AsyncExecutor:
    """A Redis, single, behind Sentinels or a Cluster, for one event loop."""

    def __init__(
        self, source: RedisURL | redis.asyncio.ConnectionPool, shown: str, timeout: float | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        own = source.timeout if isinstance(source, RedisURL) else source.connection_kwargs.get("socket_timeout") or 1.0
        self.timeout: float = timeout or own
        self.closed = False
        self._source = source
        self._shown = shown
        self._topology = topology(source) if isinstance(source, RedisURL) else Single(Address("", 0))
        self._nodes: dict[Address, BatchSender] = {}
        self._breakers = Breakers(self._shown, self._topology.sliced)
        self._probes: set[asyncio.Task[None]] = set()
        self._end: AsyncGenerator[None, None] | None = None

    def close_with_loop(self) -> None:
        """Have the connections closed at the end of the event loop, or of this link: not everybody calls `aclose`."""
        self._end = _until_the_end(self._nodes)
        try:
            self._end.asend(None).send(None)  # to its yield; the event loop closes generators that have begun
        except StopIteration:
            pass

    async def ask(self, script: Script | Lua, call: Call | Eval, within: float | None = None) -> Any:
        """The reply to *call*, *within* seconds or the time-out; raises at once while the breaker is open."""
        slot = script.slot(call.key) if self._topology.sliced else 0
        breaker = self._breakers.of(self._topology.address(slot))
        if breaker.open:
            self._probe_later(breaker, slot)
            raise Unreached(f"{breaker.who} does not answer: {breaker.last_error}")
        begun = monotonic()
        hasty = within is not None and within < self.timeout
        until = begun + (within if hasty and within else self.timeout)
        try:
            reply = await arun(execute(self._topology, script, call, until), partial(self._answer, until, hasty))
        except NO_REPLY_ERRORS as error:
            if breaker.failed(error, begun, self.timeout if hasty else 0.0):
                self._probe_later(breaker, slot)
            raise
        if breaker.failures:
            breaker.answered()
        return reply

    async def examine(self, within: float, patience: float) -> Health:
        """Look at the server, *within* seconds; not through the breaker. A check has *patience* seconds."""
        return await arun(examine(self._topology, patience), partial(self._answer, monotonic() + within, True))

    def breakers(self) -> list[Breaker]:
        return self._breakers.all()

    def connections(self) -> list[BatchSender]:
        return list(self._nodes.values())

    @property
    def trips(self) -> int:
        return sum(batches.trips for batches in self._nodes.values())

    async def aclose(self) -> None:
        self.closed = True
        for task in self._probes:
            task.cancel()
        for batches in list(self._nodes.values()):
            await batches.aclose()
        end, self._end = self._end, None
        if end is not None:
            await end.aclose()

    def _answer(self, until: float, hasty: bool, request: Request) -> Coroutine[Any, Any, Any]:
        if isinstance(request, float):
            return asyncio.sleep(request)
        reply = self._batches(request.address).send(request)
        if isinstance(request, ScriptRequest) and not request.is_retry and not hasty:
            return reply  # the trip has a time-out; to wait until others of this process are served is no silence
        left = max(until - monotonic(), 0.0)
        return self._soon(reply, left if isinstance(request, ScriptRequest) else left * request.share)

    def _batches(self, address: Address) -> BatchSender:
        batches = self._nodes.get(address)
        if batches is None:
            batches = self._nodes[address] = BatchSender(self._source, address, self.timeout)
        return batches

    async def _soon(self, reply: Coroutine[Any, Any, Any], left: float) -> Any:
        async with Silence(self.loop, left):
            return await reply

    def _probe_later(self, breaker: Breaker, slot: int) -> None:
        if self.closed or not breaker.start_probe():
            return
        # weak: a limiter that nobody has any more needs no probe
        probe = self.loop.create_task(_probe(weakref.ref(self), breaker, slot))
        probes = self._probes
        probes.add(probe)

        def over(probe: asyncio.Task[None]) -> None:
            probes.discard(probe)
            breaker.end_probe()

        probe.add_done_callback(over)

    async def _probe(self, slot: int) -> None:
        """On a link of its own, which has more time; the connection that it made is left to the calls."""
        within = max(self.timeout, PROBE_TIMEOUT)
        link = AsyncExecutor(self._source, self._shown, within)
        try:
            plan = probe(link._topology, slot, self.timeout)
            await arun(plan, partial(link._answer, monotonic() + within, True))
            for address, batches in link._nodes.items():
                if not address.sentinel and not self.closed:
                    self._batches(address).adopt(batches)
        finally:
            await link.aclose()


async def _until_the_end(nodes: dict[Address, BatchSender]) -> AsyncGenerator[None, None]:
    """A generator, because that is what an event loop closes, when it ends or when nobody has it any more."""
    try:
        yield
    finally:
        for batches in list(nodes.values()):
            await batches.drop()


async def _probe(link: weakref.ref[AsyncExecutor], breaker: Breaker, slot: int) -> None:
    for pause in pauses():
        await asyncio.sleep(pause if breaker.open else 0)
        alive = link()
        if alive is None or alive.closed or not breaker.failures:
            return
        try:
            await alive._probe(slot)
        except Exception as error:  # whatever it is, there is nobody to hear it but the next try
            breaker.give_up(error)
            del alive
        else:
            breaker.answered()
            return
