"""Where the tools keep their states: this process's memory, or a Redis. Both run the same steps."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.coordination.machine import Machine, Reply, Step
from headgate.coordination.memory import Memory
from headgate.coordination.redis import Redis
from headgate.coordination.timers import Timers
from headgate.stores import SCHEMES, Store, open_store
from headgate.stores.memory import MemoryStore
from headgate.waiting import Line

TIMEOUT = 2.0  # seconds for a step on Redis, unless the URL says: a lock is worth more patience than a check


class Place(Protocol):
    """States of any number of tools, and who in this process waits for them to change."""

    clock: Clock
    timers: Timers
    line: Line
    poll: float
    shown: str  # without secrets

    def step(self, machine: Machine, name: str, step: Step) -> Reply: ...
    async def astep(self, machine: Machine, name: str, step: Step) -> Reply: ...
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
                _ALL.add(place)
                setattr(store, "_coordination", place)  # noqa: B010  # no store needs to know of us
            return place
        key = (store, id(clock or SYSTEM_CLOCK))
        place = _PLACES.get(key)
        if place is None:
            place = _PLACES[key] = _make(store, clock)
            _ALL.add(place)
            if clock is None:
                _KEPT.append(place)
        return place


def _make(store: str | Store, clock: Clock | None) -> Memory | Redis:
    if isinstance(store, MemoryStore):
        return Memory(store.clock or SYSTEM_CLOCK)
    if store == "memory://":
        return Memory(clock or SYSTEM_CLOCK)
    if isinstance(store, str) and store.startswith(SCHEMES[1:]):
        from headgate.stores.redis import RedisStore  # which says what to install

        return Redis(RedisStore(store, timeout=_timeout(store), clock=clock))
    if isinstance(store, str):
        open_store(store, clock, {})  # says what would be right
    if not hasattr(store, "threads"):
        raise TypeError(f"coordination needs a MemoryStore or a RedisStore, got {type(store).__name__}")
    return Redis(store, owned=False)


def _timeout(url: str) -> float | None:
    from headgate.redis import address

    return None if "timeout=" in url else max(TIMEOUT, address.TIMEOUT)


def _after_fork() -> None:
    global _MAKING
    _MAKING = threading.Lock()
    for place in list(_ALL):
        place.restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
