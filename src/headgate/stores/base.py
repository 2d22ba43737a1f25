"""Stores: what keeps the states and makes a step atomic. This page is the whole contract of a backend.

A store opens a gate for each limiter's rule; a gate answers for keys. The scenario tables of the tests are the
acceptance test of a new one.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from headgate.clock import Clock
from headgate.decision import Decision
from headgate.rule import Rule


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """How a limiter's store has served it so far, from the calls that were made anyway."""

    state: str  # "closed": in use. "open": it does not answer, the policy does, and a probe looks for its return
    failures: int = 0  # calls in a row without an answer
    opened: int = 0  # times that it was given up, ever
    degraded: int = 0  # answers that the policy gave, ever
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """What a look at the store has seen. Healthy means: decisions can be made."""

    healthy: bool
    reason: str = "ok"  # or: down, slow, loading, read-only, cluster down, out of memory, refuses, pool exhausted
    problems: tuple[str, ...] = ()  # in words; also what will make trouble later
    latency: float = 0.0  # seconds of a PING
    role: str = ""
    version: str = ""
    connections: dict[str, int] = field(default_factory=dict)  # in_use, idle, waiting


class Backend(Protocol):
    """One rule, enforced. Every method is one atomic step.

    `refund` and `reset` return True if the store did it, False if it could not and `on_store_error` is allow, deny or
    local; with raise they raise `StoreUnavailable`.
    """

    @property
    def clock(self) -> Clock: ...
    @property
    def in_process(self) -> bool: ...
    def try_acquire(self, key: str, permits: int = 1) -> Decision: ...
    def peek(self, key: str, permits: int = 1) -> Decision: ...
    def refund(self, key: str, permits: int = 1) -> bool: ...
    def reset(self, key: str) -> bool: ...
    def store_health(self) -> StoreHealth: ...
    def within(self, seconds: float) -> Backend:
        """The same gate with so much time for a call; itself where a call never waits."""
        ...


class AsyncBackend(Protocol):
    """The same, awaited."""

    @property
    def clock(self) -> Clock: ...
    @property
    def in_process(self) -> bool: ...
    def try_acquire(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]: ...
    def peek(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]: ...
    def refund(self, key: str, permits: int = 1) -> Coroutine[Any, Any, bool]: ...
    def reset(self, key: str) -> Coroutine[Any, Any, bool]: ...
    def store_health(self) -> StoreHealth: ...
    def within(self, seconds: float) -> AsyncBackend: ...


class Store(Protocol):
    """Where states live."""

    def open(self, rule: Rule, on_store_error: str = "allow") -> Backend: ...
    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncBackend: ...
    def health(self) -> Health: ...
    async def ahealth(self) -> Health: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


class StoreOptions(TypedDict, total=False):
    """What a limiter hands on to the store that it opens from a URL."""

    max_keys: int  # memory
    prefix: str  # redis
    hash_keys: bool  # redis
    timeout: float  # redis
    connect_timeout: float  # redis
    max_connections: int  # redis


# said by whatever a limiter or a tool would take with it
NO_PICKLE = "limiters, locks, pools and their stores belong to one process and cannot be pickled: make one in each"

SCHEMES = ("memory://", "redis://", "rediss://", "unix://", "redis+sentinel://", "redis+cluster://")


def open_store(store: str | Store, clock: Clock | None, options: StoreOptions) -> tuple[Store, bool]:
    """The store of a URL, or the one that was handed in; and whether it is ours to close."""
    if clock is not None and not callable(getattr(clock, "now", None)):
        raise ValueError(f"clock must have now(), as a ManualClock does, got {type(clock).__name__} {clock!r:.40}")
    if not isinstance(store, str):
        if type(store).__module__.partition(".")[0] in ("redis", "valkey"):
            raise ValueError(
                f"store is a client, {type(store).__name__}; put a store around it: RedisStore(client), which "
                "you import from headgate.stores"
            )
        if not hasattr(store, "open_async"):
            raise ValueError(f"store must be a URL (text) or a store object, got {type(store).__name__}; {_forms()}")
        if clock is not None or options:
            raise ValueError("clock and store options go to the store itself when you hand one in")
        return store, False
    if unknown := options.keys() - StoreOptions.__annotations__.keys():
        known = ", ".join(sorted(StoreOptions.__annotations__))
        raise TypeError(f"a limiter takes no {', '.join(sorted(unknown))}; for its store it takes {known}")
    if store == "memory://":
        from headgate.stores.memory import MemoryStore

        return MemoryStore(max_keys=options.get("max_keys", 1_000_000), clock=clock), True
    if store.startswith(SCHEMES[1:]):
        from headgate.stores.redis import RedisStore

        return RedisStore(
            store,
            prefix=options.get("prefix", "rate_limiter"),
            hash_keys=options.get("hash_keys", False),
            timeout=options.get("timeout"),
            connect_timeout=options.get("connect_timeout"),
            max_connections=options.get("max_connections"),
            clock=clock,
        ), True
    if store.startswith("memory://"):
        raise ValueError(f"memory:// has nothing behind it, got {store!r:.40}; its bound is an argument, max_keys=")
    scheme = store.partition("//")[0] + "//" if "//" in store else f"{store:.20}"  # behind it may be a password
    raise ValueError(f"unknown store {scheme!r}; {_forms()}")


def _forms() -> str:
    return f"use a URL that starts with one of {', '.join(SCHEMES)}, or a MemoryStore or RedisStore"
