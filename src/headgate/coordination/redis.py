"""Tools whose states are in a Redis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any, NoReturn

from redis import ConnectionPool
from redis.asyncio import ConnectionPool as AsyncConnectionPool
from redis.exceptions import RedisError, ResponseError

from headgate._lifecycle import renew_after_fork
from headgate._waiters import WaiterQueue
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.coordination.memory import POLL, Memory
from headgate.coordination.states.machine import (
    LUA_PRELUDE,
    Operation,
    Reply,
    StateMachine,
    entry_channel,
    wake_waiters,
)
from headgate.coordination.timers import Timers
from headgate.errors import StoreUnavailable
from headgate.redis.lua import Eval, Lua
from headgate.redis.pubsub import Subscription
from headgate.redis.url import RedisURL
from headgate.stores.base import NO_PICKLE
from headgate.stores.redis import RedisStore

POLL_UNHEARD = 0.05  # seconds after which whoever waits asks again where there is nobody to wake it


class Redis:
    """States in a Redis."""

    def __init__(self, store: RedisStore, owned: bool = True) -> None:
        self.store = store
        self._owned = owned
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.timers = Timers(self.clock)  # of its own: a Redis that hangs must not hold up what is kept at another
        self._target = store._source if isinstance(store._source, RedisURL) else None
        self.shown = self._target.safe_url if self._target else "the client's Redis"
        self._guards: dict[asyncio.AbstractEventLoop, AsyncGenerator[None]] = {}
        self.poll = POLL if self._target else POLL_UNHEARD
        self.fallback = Memory(self.clock)  # for tools that go on alone when Redis does not answer
        self.line = WaiterQueue()
        self.after_fork()
        renew_after_fork(self)

    def check(self, *, tasks: bool) -> None:
        """A client of redis-py that was handed in serves threads or tasks, not both."""
        if not tasks and isinstance(self.store._source, AsyncConnectionPool):
            raise TypeError("the store was given a redis.asyncio.Redis: use it with the Async tools, or give it a URL")
        if tasks and isinstance(self.store._source, ConnectionPool):
            raise TypeError("the store was given a redis.Redis: use it with the tools for threads, or give it a URL")

    def after_fork(self) -> None:
        self._subscription: Subscription | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def step(self, machine: StateMachine, name: str, step: Operation) -> Reply:
        script, call = self._call(machine, name, step)
        try:
            reply = _plain(self.store.threads().ask(script, call))
        except (RedisError, OSError) as error:
            raise _unavailable(name, error) from error
        wake_waiters(self.line, call.key, step, reply)  # those in this process need not wait for the message
        return reply

    async def astep(self, machine: StateMachine, name: str, step: Operation) -> Reply:
        script, call = self._call(machine, name, step)
        if (loop := asyncio.get_running_loop()) not in self._guards:
            await self._guard(loop)
        try:
            reply = _plain(await self.store.loop().ask(script, call))
        except (RedisError, OSError) as error:
            raise _unavailable(name, error) from error
        wake_waiters(self.line, call.key, step, reply)
        return reply

    def listen(self, channel: str) -> None:
        if self._target:
            with self._lock:
                if self._subscription is None:
                    self._subscription = Subscription(self._target, self._heard, self.line.wake_all)
            self._subscription.listen(channel)

    def leave(self, channel: str) -> None:
        if self._subscription:  # else it was a parent's, before a fork
            self._subscription.leave(channel)

    def close(self) -> None:
        if self._subscription:
            self._subscription.close()
        if self._owned:
            self.store.close()

    async def aclose(self) -> None:
        if self._subscription:
            await asyncio.to_thread(self._subscription.close)
        if self._owned:
            await self.store.aclose()

    def _heard(self, channel: str, who: str) -> None:
        self.line.wake(entry_channel(channel, who))

    def _call(self, machine: StateMachine, name: str, step: Operation) -> tuple[Lua, Eval]:
        script = _script(machine)
        now = self.store.clock.now() if self.store.clock else ""
        return script, script.with_keys(machine.keys(name), step.name, now, *step.arguments)

    async def _guard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close this loop's connections when it ends: nobody has to remember it.

        By itself a store closes those that are idle then; on another a step may be giving something back.
        """
        for closed in [other for other in self._guards if other.is_closed()]:
            del self._guards[closed]
        guard = self._guards[loop] = self._until_the_end()
        await anext(guard)  # an event loop that ends closes the generators that were begun in it

    async def _until_the_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            if self._owned:
                await self.store.aclose()
            else:
                await self.store.close_loop()  # the store is its owner's to close; this loop's connections end with it


@cache
def _script(machine: StateMachine) -> Lua:
    return Lua(LUA_PRELUDE + machine.lua, repeatable=True)


def _plain(reply: Any) -> Reply:
    return [part.decode() if isinstance(part, bytes) else part for part in reply]


def _unavailable(name: str, error: Exception) -> StoreUnavailable:
    what = "refused" if isinstance(error, ResponseError) else "did not answer"
    return StoreUnavailable(f"{name!r}: Redis {what}: {error}")
