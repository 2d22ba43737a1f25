"""Where the tools keep their states: in memory or in the store that they were given.

A store that coordination can use offers `states()` (see `headgate.stores.base.StateStore`). All tools of a process on
one store share one `CoordinationBackend`: its connections, its timers and its queues of waiters.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from headgate._lifecycle import in_each_child, renew_after_fork
from headgate._waiters import WaiterQueue
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.coordination.states.machine import Operation, Reply, StateMachine, entry_channel
from headgate.coordination.timers import Timers
from headgate.errors import StoreUnavailable
from headgate.stores.base import NO_PICKLE, StateStore, Store, StoreOptions, kind_of, open_store

POLL = 1.0  # seconds after which a waiter asks again, woken or not
TIMEOUT = 2.0  # seconds for an operation, unless the URL has a time-out; longer than for a check of a limiter

_SYSTEM_TIMERS = Timers(SYSTEM_CLOCK)


class MemoryStates:
    """States in the memory of this process, shared by all its threads and event loops."""

    poll = POLL
    display_name = "memory://"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.max_states = sys.maxsize
        self._states: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def run(self, machine: StateMachine, name: str, operation: Operation) -> Reply:
        key = (machine.prefix, name)
        with self._lock:
            now = self.clock.now()
            if key not in self._states:
                self._make_room(now)
                self._states[key] = machine.state()
            reply: Reply = self._apply(key, operation.name, now, *operation.arguments)
            self._sweep(now)
        return reply

    async def run_async(self, machine: StateMachine, name: str, operation: Operation) -> Reply:
        return self.run(machine, name, operation)

    def _apply(self, key: tuple[str, str], method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._states[key], method)(*arguments)
        except BaseException:  # a signal handler may raise anywhere
            self.mend(key)
            raise

    def mend(self, key: Any) -> None:
        """Repair a state that may be half changed; drop it if it cannot be repaired."""
        repair = getattr(self._states.get(key), "repair", None)
        whole = False
        try:
            if repair is not None:
                repair()
                whole = True
        finally:
            if not whole:
                self._states.pop(key, None)

    def _make_room(self, now: int) -> None:
        """Raise `StoreUnavailable` if there are *max_states* states that have not expired."""
        if len(self._states) >= self.max_states:
            self._sweep(now)
            if len(self._states) >= self.max_states:
                raise StoreUnavailable(f"there are {len(self._states)} states in memory, as many as it may hold")

    def _sweep(self, now: int) -> None:
        """Drop expired states. Each operation checks the next two: it adds one at most, so they do not pile up."""
        for _ in range(min(2, len(self._states))):
            key = next(iter(self._states))
            if self._apply(key, "is_expired", now):
                del self._states[key]
            else:
                self._states.move_to_end(key)

    def check(self, *, tasks: bool) -> None:
        """Do nothing: threads and tasks can use it."""

    # No other process can change a state here, so there are no messages.
    def subscribe(self, on_message: Callable[[str, str], object], on_gap: Callable[[], object]) -> None: ...
    def listen(self, channel: str) -> None: ...
    def leave(self, channel: str) -> None: ...
    def close(self) -> None: ...


class CoordinationBackend:
    """The states of one store, and the waiters of this process that wait for them to change."""

    def __init__(self, store: StateStore, owned: Store | None) -> None:
        self.kind = kind_of(store)
        self.states = store.states()
        self._owned = owned
        self.clock = clock = store.clock or SYSTEM_CLOCK
        self.in_process = isinstance(self.states, MemoryStates)
        # Each Redis has timer threads of its own: a server that hangs must not delay renewals at another.
        self.timers = _SYSTEM_TIMERS if self.in_process and clock is SYSTEM_CLOCK else Timers(clock)
        self.waiters = WaiterQueue()
        self.asking: set[str] = set()  # channels for which a caller that found no queue asks the store now
        self.local_states = MemoryStates(clock)  # for breakers that decide alone while the store does not answer
        self.states.subscribe(self._on_message, self.waiters.wake_all)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def serves(self, *, tasks: bool) -> bool:
        """Whether threads (or *tasks*) can use it: a redis-py client that was handed in serves one of the two."""
        try:
            self.states.check(tasks=tasks)
        except TypeError:
            return False
        return True

    def close(self) -> None:
        self.states.close()
        if self._owned:
            self._owned.close()

    async def aclose(self) -> None:
        if not self.in_process:
            await asyncio.to_thread(self.states.close)
        if self._owned:
            await self._owned.aclose()

    def _on_message(self, channel: str, entry: str) -> None:
        self.waiters.wake(entry_channel(channel, entry))


# Backends by URL and clock. Those with the system's clock are kept for ever; one with the clock of a test lives as long
# as its tools. The backend of a store object is kept in the store's `shared_objects`.
_BACKENDS: weakref.WeakValueDictionary[tuple[str, int], CoordinationBackend] = weakref.WeakValueDictionary()
_KEPT: list[CoordinationBackend] = []
_OPENING = threading.Lock()


def open_backend(store: str | Store, clock: Clock | None) -> CoordinationBackend:
    """The backend of a URL or a store object; the same URL or object gives the same backend."""
    with _OPENING:
        if isinstance(store, list | tuple):
            raise TypeError(f"coordination needs {_KINDS}, got a list")
        if not isinstance(store, str):
            open_store(store, clock, {})  # raises if it is not a store, or if a clock was given, too
            shared_objects = _states_of(store).shared_objects
            if "coordination" not in shared_objects:
                shared_objects["coordination"] = CoordinationBackend(_states_of(store), None)
            kept: CoordinationBackend = shared_objects["coordination"]
            return kept
        key = (store, id(clock or SYSTEM_CLOCK))
        backend = _BACKENDS.get(key)
        if backend is None:
            options: StoreOptions = {} if re.search(r"[?&](socket_)?timeout=", store) else {"timeout": TIMEOUT}
            opened, _ = open_store(store, clock, options)
            backend = _BACKENDS[key] = CoordinationBackend(_states_of(opened), opened)
            if clock is None:
                _KEPT.append(backend)
        return backend


_KINDS = "one store that has states: memory://, redis:// (also Sentinel and Cluster) or such a store object"


def _states_of(store: Store) -> StateStore:
    if not isinstance(store, StateStore):
        raise TypeError(f"coordination needs {_KINDS}, got {type(store).__name__}")
    return store


@in_each_child
def _after_fork() -> None:
    global _OPENING
    _OPENING = threading.Lock()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that the caller is in, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def running_task() -> asyncio.Task[Any] | None:
    """The task that the caller is in, if any."""
    return asyncio.current_task() if running_loop() else None
