"""Where the tools keep their states: this process's memory, or a Redis. Both run the same steps."""

from __future__ import annotations

import re
import threading
import weakref
from typing import TYPE_CHECKING, Protocol, cast

from headgate._lifecycle import in_each_child
from headgate._waiters import WaiterQueue
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.coordination.memory import Memory
from headgate.coordination.states.machine import Operation, Reply, StateMachine
from headgate.coordination.timers import Timers
from headgate.stores.base import Store, StoreOptions, open_store
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.stores.redis import RedisStore

TIMEOUT = 2.0  # seconds for a step on Redis, unless the URL says: a lock is worth more patience than a check


class Place(Protocol):
    """States of any number of tools, and who in this process waits for them to change."""

    clock: Clock
    timers: Timers
    line: WaiterQueue
    poll: float
    shown: str  # without secrets

    def step(self, machine: StateMachine, name: str, step: Operation) -> Reply: ...
    async def astep(self, machine: StateMachine, name: str, step: Operation) -> Reply: ...
    def check(self, *, tasks: bool) -> None: ...
    def listen(self, channel: str) -> None: ...
    def leave(self, channel: str) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


def serves(place: Place, *, tasks: bool) -> bool:
    """Whether threads, or *tasks*, can use it; a client of redis-py that was handed in is for one of them."""
    try:
        place.check(tasks=tasks)
    except TypeError:
        return False
    return True


# One place for each store, so that all tools of a process share connections, the subscription and the line. Those by
# the system's clock are kept; those of a test's clock live as long as their tools, those of a store as long as it.
_PLACES: weakref.WeakValueDictionary[tuple[str, int], Place] = weakref.WeakValueDictionary()
_KEPT: list[Place] = []
_MAKING = threading.Lock()


def place_of(store: str | Store, clock: Clock | None) -> Place:
    """The place that a URL or a store object names; the same name gives the same place."""
    with _MAKING:
        if not isinstance(store, str):
            open_store(store, clock, {})  # refuses what is no store, and a clock beside one
            place: Place | None = getattr(store, "_coordination", None)
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


def _make(store: str | Store, clock: Clock | None) -> Place:
    options: StoreOptions = {}
    if isinstance(store, str) and not re.search(r"[?&](socket_)?timeout=", store):
        options = {"timeout": TIMEOUT}
    opened, owned = open_store(store, clock, options)
    if isinstance(opened, MemoryStore):
        return Memory(opened.clock or SYSTEM_CLOCK)
    if not hasattr(opened, "threads"):
        raise TypeError(f"coordination needs a MemoryStore or a RedisStore, got {type(opened).__name__}")
    from headgate.coordination.redis import Redis  # not before there is one: memory needs no redis-py

    return Redis(cast("RedisStore", opened), owned)


@in_each_child
def _after_fork() -> None:
    global _MAKING
    _MAKING = threading.Lock()
