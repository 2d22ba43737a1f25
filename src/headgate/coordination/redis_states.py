"""The states of locks, pools, queues and breakers in a Redis: one script for each kind, and messages about changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from redis.exceptions import RedisError, ResponseError

from headgate._lifecycle import at_loop_end, renew_after_fork
from headgate.coordination.backend import POLL
from headgate.coordination.states.machine import LUA_PRELUDE, Operation, Reply, StateMachine
from headgate.errors import StoreUnavailable
from headgate.redis.pubsub import Subscription
from headgate.redis.script import LuaScript, ScriptCall, pack_arguments

if TYPE_CHECKING:
    from headgate.stores.redis import RedisStore

POLL_WITHOUT_MESSAGES = 0.05  # seconds; we do not subscribe on a client that was handed in


class RedisStates:
    """The states in one Redis. See `headgate.stores.base.StateBackend` for what the methods promise."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.display_name = store.display_name
        self.poll = POLL if store.url else POLL_WITHOUT_MESSAGES
        self._loop_ends: dict[asyncio.AbstractEventLoop, AsyncGenerator[None]] = {}
        self._listeners: tuple[Callable[[str, str], object], Callable[[], object]] | None = None
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._subscription: Subscription | None = None
        self._lock = threading.Lock()

    def check(self, *, tasks: bool) -> None:
        """Raise a TypeError if the client of redis-py that was handed in is for the other kind of tools."""
        if not tasks and not self._store.serves_threads:
            raise TypeError("the store was given a redis.asyncio.Redis: use it with the Async tools, or give it a URL")
        if tasks and not self._store.serves_tasks:
            raise TypeError("the store was given a redis.Redis: use it with the tools for threads, or give it a URL")

    def run(self, machine: StateMachine, name: str, operation: Operation) -> Reply:
        script, call = self._call(machine, name, operation)
        try:
            reply = self._store.sync_executor().execute(script, call)
        except (RedisError, OSError) as error:
            raise _unavailable(name, error) from error
        return _decoded(reply)

    def packed_operation(self, machine: StateMachine, name: str, operation: str, arguments: int) -> PackedOperation:
        """The *operation* with so many *arguments* on the state *name*, for callers that repeat it often."""
        return PackedOperation(self._store, machine, name, operation, arguments)

    async def run_async(self, machine: StateMachine, name: str, operation: Operation) -> Reply:
        script, call = self._call(machine, name, operation)
        if (loop := asyncio.get_running_loop()) not in self._loop_ends:
            self._close_at_end_of(loop)
        try:
            reply = await self._store.async_executor().execute(script, call)
        except (RedisError, OSError) as error:
            raise _unavailable(name, error) from error
        return _decoded(reply)

    def subscribe(self, on_message: Callable[[str, str], object], on_gap: Callable[[], object]) -> None:
        self._listeners = on_message, on_gap

    def listen(self, channel: str) -> None:
        if self._store.url and self._listeners:
            with self._lock:
                if self._subscription is None:
                    self._subscription = Subscription(self._store.url, *self._listeners)
            self._subscription.listen(channel)

    def leave(self, channel: str) -> None:
        if self._subscription:  # None: the caller subscribed before a fork, in the parent
            self._subscription.leave(channel)

    def close(self) -> None:
        """End the subscription; the next `listen` makes a new one."""
        if self._subscription:
            self._subscription.close()

    def _call(self, machine: StateMachine, name: str, operation: Operation) -> tuple[LuaScript, ScriptCall]:
        script, key, keys, size = _prepared(machine, name)
        now = self._store.clock.now() if self._store.clock else ""
        arguments = pack_arguments(operation.name, now, *operation.arguments)
        return script, ScriptCall(key, keys + arguments, size + 2 + len(operation.arguments))

    def _close_at_end_of(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections of *loop* when it ends, those of a background retry included.

        By itself a store closes only idle connections then. Those of other loops stay open.
        """
        for closed in [other for other in list(self._loop_ends) if other.is_closed()]:
            self._loop_ends.pop(closed, None)
        self._loop_ends[loop] = at_loop_end(self._store.close_loop)


class PackedOperation:
    """One operation on one state, packed once but for its arguments: half of the time of `RedisStates.run`."""

    __slots__ = ("_key", "_name", "_script", "_size", "_start", "_store")

    def __init__(self, store: RedisStore, machine: StateMachine, name: str, operation: str, arguments: int) -> None:
        self._store = store
        self._name = name
        self._script, self._key, keys, size = _prepared(machine, name)
        self._start = keys + pack_arguments(operation)
        self._size = size + 2 + arguments

    def run(self, arguments: bytes) -> Reply:
        """What `RedisStates.run` does, with *arguments* that `pack_arguments` has packed."""
        store = self._store
        now = pack_arguments(store.clock.now()) if store.clock else _NO_TIME
        try:
            call = ScriptCall(self._key, self._start + now + arguments, self._size)
            reply: Reply = store.sync_executor().execute(self._script, call)
        except (RedisError, OSError) as error:
            raise _unavailable(self._name, error) from error
        return reply if type(reply[-1]) is int else _decoded(reply)


_NO_TIME = pack_arguments("")  # the script takes the server's


def _decoded(reply: Reply) -> Reply:
    return [part.decode() if isinstance(part, bytes) else part for part in reply]


@lru_cache(1000)
def _prepared(machine: StateMachine, name: str) -> tuple[LuaScript, str, bytes, int]:
    """What all operations on a state have in common: the script, the first key, all keys packed, and their size."""
    keys = machine.keys(name)
    script = _script(machine.lua)
    return script, keys[0], pack_arguments(len(keys), *keys), 1 + len(keys)


@cache
def _script(lua: str) -> LuaScript:
    return LuaScript(LUA_PRELUDE + lua, repeatable=True)


def _unavailable(name: str, error: Exception) -> StoreUnavailable:
    what = "refused" if isinstance(error, ResponseError) else "did not answer"
    return StoreUnavailable(f"{name!r}: Redis {what}: {error}")
