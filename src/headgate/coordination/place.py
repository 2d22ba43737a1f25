"""Where the tools keep their states: this process's memory, or a Redis. Both run the same steps.

A tool is a `Machine`: a few operations, written in Lua for Redis and as a plain Python class for memory. Every
operation carries an id that its caller chose, and to run it twice is to run it once; so a call whose reply was lost is
sent again.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.coordination.timers import Timers
from headgate.errors import StoreUnavailable
from headgate.keys import hash_tag
from headgate.stores import SCHEMES, Store, open_store
from headgate.stores.memory import MemoryStore
from headgate.waiting import Line

Reply = list[Any]  # of int and str

TIMEOUT = 2.0  # seconds for a step on Redis, unless the URL says: a lock is worth more patience than a check
POLL = 1.0  # seconds after which whoever waits asks again, woken or not
POLL_UNHEARD = 0.05  # the same where there is nobody to wake it

# What every script starts with: the operation, and the time in microseconds ('' for the server's).
LUA_START = """
local op, now = ARGV[1], tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local function whole(number) return string.format('%.0f', number) end
"""


@dataclass(frozen=True)
class Machine:
    """A tool's operations, twice: *lua* for Redis, *state* for memory, whose methods are the operations."""

    prefix: str
    suffixes: tuple[str, ...]  # of its Redis keys; the first has none
    lua: str
    state: Callable[[], Any]

    def keys(self, name: str) -> list[str]:
        tag = f"{self.prefix}:{hash_tag(name)}"
        return [tag + suffix for suffix in self.suffixes]


def forget(times: dict[str, int], now: int) -> list[str]:
    """Drop those whose time has come, and say who they were. All live equally long, so the oldest are the first."""
    gone = []
    for each, until in times.items():
        if until > now:
            break
        gone.append(each)
    for each in gone:
        del times[each]
    return gone


class Step(NamedTuple):
    """Run this operation; the answer is its reply."""

    op: str
    arguments: tuple[str | int, ...]


class Place(Protocol):
    """States of any number of tools, and who in this process waits for them to change."""

    clock: Clock
    timers: Timers
    line: Line
    poll: float

    def step(self, machine: Machine, name: str, step: Step) -> Reply: ...
    async def astep(self, machine: Machine, name: str, step: Step) -> Reply: ...
    def check(self, *, tasks: bool) -> None: ...
    def listen(self, channel: str) -> None: ...
    def leave(self, channel: str) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


_SYSTEM_TIMERS = Timers(SYSTEM_CLOCK)


def _timers(clock: Clock) -> Timers:
    return _SYSTEM_TIMERS if clock is SYSTEM_CLOCK else Timers(clock)


class Memory:
    """States in this process: shared by all threads and event loops, gone when it ends."""

    poll = POLL

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.timers = _timers(clock)
        self.restart()
        _ALL.add(self)
        self._states: dict[tuple[str, str], Any] = {}
        self._steps = 0

    def restart(self) -> None:
        self.line = Line()
        self._lock = threading.RLock()

    def step(self, machine: Machine, name: str, step: Step) -> Reply:
        key = (machine.prefix, name)
        with self._lock:
            now = self.clock.now()
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = machine.state()
            reply: Reply = getattr(state, step.op)(now, *step.arguments)
            self._steps += 1
            if self._steps % 1024 == 0:
                for old in [key for key, state in self._states.items() if state.idle(now)]:
                    del self._states[old]
        _wake(self.line, machine.keys(name)[0], step, reply)
        return reply

    async def astep(self, machine: Machine, name: str, step: Step) -> Reply:
        return self.step(machine, name, step)

    def check(self, *, tasks: bool) -> None:
        """It serves everybody."""

    def listen(self, channel: str) -> None:
        """Whoever changes a state wakes the line itself."""

    def leave(self, channel: str) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


# Operations that may let somebody else go on.
WAKING = frozenset({"release", "settle", "add", "enqueue", "undo"})


def _wake(line: Line, channel: str, step: Step, reply: Reply) -> None:
    if step.op in WAKING:
        line.wake(channel)
    elif step.op in ("dequeue", "cancel"):
        line.wake(about(channel, str(reply[0] if step.op == "dequeue" else step.arguments[1])))


def about(channel: str, who: str) -> str:
    """The line of those who wait to hear of *who*, and not of the channel as a whole."""
    return f"{channel}\n{who}" if who else channel  # no name has a line feed


class Redis:
    """States in a Redis."""

    def __init__(self, store: Any, owned: bool = True) -> None:
        from headgate.redis.address import Target

        self.store = store
        self._owned = owned
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.timers = Timers(self.clock)  # of its own: a Redis that hangs must not hold up what is kept at another
        self._target = store._source if isinstance(store._source, Target) else None
        self._guards: dict[asyncio.AbstractEventLoop, AsyncGenerator[None]] = {}
        self.poll = POLL if self._target else POLL_UNHEARD
        self.fallback = Memory(self.clock)  # for tools that go on alone when Redis does not answer
        self.restart()
        _ALL.add(self)

    def check(self, *, tasks: bool) -> None:
        """A client of redis-py that was handed in serves threads or tasks, not both."""
        from redis import ConnectionPool
        from redis.asyncio import ConnectionPool as AsyncConnectionPool

        if not tasks and isinstance(self.store._source, AsyncConnectionPool):
            raise TypeError("the store was given a redis.asyncio.Redis: use it with the Async tools, or give it a URL")
        if tasks and isinstance(self.store._source, ConnectionPool):
            raise TypeError("the store was given a redis.Redis: use it with the tools for threads, or give it a URL")

    def restart(self) -> None:
        self.line = Line()
        self._subscription: Any = None
        self._lock = threading.Lock()

    def step(self, machine: Machine, name: str, step: Step) -> Reply:
        from redis.exceptions import RedisError

        script, call = self._call(machine, name, step)
        try:
            reply = _plain(self.store.threads().ask(script, call))
        except (RedisError, OSError) as error:
            raise _unavailable(name, error) from error
        _wake(self.line, call.key, step, reply)  # those in this process need not wait for the message
        return reply

    async def astep(self, machine: Machine, name: str, step: Step) -> Reply:
        from redis.exceptions import RedisError

        script, call = self._call(machine, name, step)
        if (loop := asyncio.get_running_loop()) not in self._guards:
            await self._guard(loop)
        try:
            reply = _plain(await self.store.loop().ask(script, call))
        except (RedisError, OSError) as error:
            raise _unavailable(name, error) from error
        _wake(self.line, call.key, step, reply)
        return reply

    def listen(self, channel: str) -> None:
        if self._target:
            with self._lock:
                if self._subscription is None:
                    from headgate.coordination.wake import Subscription

                    self._subscription = Subscription(self._target, self._heard)
            self._subscription.listen(channel)

    def leave(self, channel: str) -> None:
        if self._target:
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
        self.line.wake(about(channel, who))

    def _call(self, machine: Machine, name: str, step: Step) -> Any:
        script = _script(machine)
        now = self.store.clock.now() if self.store.clock else ""
        return script, script.with_keys(machine.keys(name), step.op, now, *step.arguments)

    async def _guard(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close this loop's connections when it ends: nobody has to remember it."""
        for closed in [other for other in self._guards if other.is_closed()]:
            del self._guards[closed]
        guard = self._guards[loop] = self._until_the_end()
        await anext(guard)  # an event loop that ends closes the generators that were begun in it

    async def _until_the_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await self.store.aclose()


_SCRIPTS: dict[int, Any] = {}


def _script(machine: Machine) -> Any:
    """The machine's Lua, to be called; made late, since memory needs no Redis client."""
    script = _SCRIPTS.get(id(machine))
    if script is None:
        from headgate.redis.lua import Lua

        script = _SCRIPTS[id(machine)] = Lua(LUA_START + machine.lua, repeatable=True)
    return script


def _plain(reply: Any) -> Reply:
    return [part.decode() if isinstance(part, bytes) else part for part in reply]


def _unavailable(name: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"{name!r}: Redis did not answer: {error}")


# One place for each store, so that all tools of a process share connections, the subscription and the line. Those by
# the system's clock are kept; those of a test's clock live as long as their tools, those of a store as long as it.
_PLACES: weakref.WeakValueDictionary[tuple[str, int], Memory | Redis] = weakref.WeakValueDictionary()
_KEPT: list[Memory | Redis] = []
_ALL: weakref.WeakSet[Memory | Redis] = weakref.WeakSet()
_MAKING = threading.Lock()


def place_of(store: str | Store, clock: Clock | None) -> Place:
    """The place that a URL or a store object names; the same name gives the same place."""
    with _MAKING:
        if not isinstance(store, str):
            open_store(store, clock, {})  # refuses what is no store, and a clock beside one
            place: Memory | Redis | None = getattr(store, "_coordination", None)
            if place is None:
                place = _make(store, None)
                setattr(store, "_coordination", place)  # noqa: B010  # no store needs to know of us
            return place
        key = (store, id(clock or SYSTEM_CLOCK))
        place = _PLACES.get(key)
        if place is None:
            place = _PLACES[key] = _make(store, clock)
            if clock is None:
                _KEPT.append(place)
        return place


def _make(store: str | Store, clock: Clock | None) -> Memory | Redis:
    if isinstance(store, MemoryStore):
        return Memory(store.clock or SYSTEM_CLOCK)
    if store == "memory://":
        return Memory(clock or SYSTEM_CLOCK)
    if isinstance(store, str) and store.startswith(SCHEMES[1:]):
        from headgate.redis import address
        from headgate.stores.redis import RedisStore

        asked = None if "timeout=" in store else max(TIMEOUT, address.TIMEOUT)
        return Redis(RedisStore(store, timeout=asked, clock=clock))
    if isinstance(store, str):
        open_store(store, clock, {})  # says what would be right
    if not hasattr(store, "threads"):
        raise TypeError(f"coordination needs a MemoryStore or a RedisStore, got {type(store).__name__}")
    return Redis(store, owned=False)


def _after_fork() -> None:
    global _MAKING
    _MAKING = threading.Lock()
    for place in list(_ALL):
        place.restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
