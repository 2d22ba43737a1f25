"""The contract of a store: where the states of keys are kept, and what makes each step on them atomic.

A store is a class with the methods of `Store`: `open` returns a `Backend` for the rule of a limiter, `open_async` an
`AsyncBackend`. Limiters whose rules have an equal `Rule.label` share their states. CONTRIBUTING.md has the steps to add
one. If it can, it offers more: `leases()` for `HybridLimiter`, `states()` for locks, pools, queues and breakers,
`take_all()` for several limiters in one step.

Limiters, hybrid and coordination stay as they are. The tests in tests/stores run the same promises against every store.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable

from headgate.algorithms.booking import Booked, Booking
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.rule import Rule

if TYPE_CHECKING:
    from headgate.coordination.states.machine import Operation, StateMachine
    from headgate.hybrid.protocol import AccuracyProfile, LeaseReply, LeaseRequest, QuotaParams

    AsyncExchange = Callable[[Sequence["LeaseCall"]], Coroutine[Any, Any, list[LeaseReply | str]]]


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """How a limiter's store has served it so far, from the calls that were made anyway."""

    state: str  # "closed": in use. "open": it does not answer, the policy does, and a probe looks for its return
    failures: int = 0  # calls in a row without an answer
    opened: int = 0  # how often the circuit breaker has opened
    degraded: int = 0  # how many answers the policy has given
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """What a health check of the store has found. Healthy means: decisions can be made."""

    healthy: bool
    reason: str = "ok"  # or: down, slow, loading, read-only, cluster down, out of memory, refuses, pool exhausted
    problems: tuple[str, ...] = ()  # in words; also what will make trouble later
    latency: float = 0.0  # seconds of a PING
    role: str = ""
    version: str = ""
    connections: dict[str, int] = field(default_factory=dict)  # in_use, idle, waiting


# ---------------------------------------------------------------------------------------------- what every store has


class Backend(Protocol):
    """One rule on one store. Every method checks its arguments (`check_key`, `check_permits`), and is one atomic step.

    When the store does not answer, `try_acquire` and `peek` answer by `on_store_error`; `refund` and `reset` return
    True if the store did it, False if it could not. Where `on_store_error` is raise, all four raise `StoreUnavailable`.
    `headgate.fallback.Fallback` implements these policies for any store.
    """

    @property
    def clock(self) -> Clock:
        """What callers that wait for permits go by: the clock that the store was given, or else `SYSTEM_CLOCK`."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether no call does I/O, so that an event loop can make it too; if False, it is made in a thread."""
        ...

    def try_acquire(self, key: str, permits: int = 1) -> Decision: ...
    def peek(self, key: str, permits: int = 1) -> Decision: ...
    def refund(self, key: str, permits: int = 1) -> bool: ...
    def reset(self, key: str) -> bool: ...
    def store_health(self) -> StoreHealth: ...
    def with_timeout(self, seconds: float) -> Backend:
        """The same backend with *seconds* for a call, if that is less than the store's time-out."""
        ...


class AsyncBackend(Protocol):
    """The same, awaited. A task that is cancelled in `try_acquire` loses no permits."""

    @property
    def clock(self) -> Clock: ...
    @property
    def in_process(self) -> bool: ...
    def try_acquire(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]: ...
    def peek(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]: ...
    def refund(self, key: str, permits: int = 1) -> Coroutine[Any, Any, bool]: ...
    def reset(self, key: str) -> Coroutine[Any, Any, bool]: ...
    def store_health(self) -> StoreHealth: ...
    def with_timeout(self, seconds: float) -> AsyncBackend: ...


class InProcessAsync:
    """The `AsyncBackend` of a store in which no call waits: each method is that of the `Backend`."""

    in_process: bool = True

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.clock: Clock = backend.clock

    async def try_acquire(self, key: str, permits: int = 1) -> Decision:
        made: Decision = self.backend.try_acquire(key, permits)
        return made

    async def peek(self, key: str, permits: int = 1) -> Decision:
        made: Decision = self.backend.peek(key, permits)
        return made

    async def refund(self, key: str, permits: int = 1) -> bool:
        done: bool = self.backend.refund(key, permits)
        return done

    async def reset(self, key: str) -> bool:
        done: bool = self.backend.reset(key)
        return done

    async def try_acquire_above(self, key: str, permits: int, share: int) -> Decision:
        made: Decision = self.backend.try_acquire_above(key, permits, share)
        return made

    @property
    def books(self) -> bool:
        return takes_bookings(self.backend)

    async def book(self, asked: Booking) -> Booked:
        made: Booked = self.backend.book(asked)
        return made

    async def cancel_slot(self, key: str, id: str) -> bool:
        done: bool = self.backend.cancel_slot(key, id)
        return done

    def store_health(self) -> StoreHealth:
        health: StoreHealth = self.backend.store_health()
        return health

    def with_timeout(self, seconds: float) -> InProcessAsync:
        return self


class Store(Protocol):
    """A place for states, shared by any number of limiters. Thread-safe; usable in the child of a fork.

    It may say more of itself in class attributes, which `kind_of`, `is_in_process` and `is_per_process` read.
    """

    def open(self, rule: Rule, on_store_error: str = "allow") -> Backend: ...
    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncBackend: ...
    def health(self) -> Health: ...
    async def ahealth(self) -> Health: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...


def kind_of(store: Store) -> str:
    """What a store says that it is (its `kind`), for people and labels: memory, shared, redis, postgresql, service."""
    return str(getattr(store, "kind", "other"))


def is_in_process(store: Store) -> bool:
    """Whether no call of its backends does I/O (its `in_process`), so that an event loop can make it too."""
    return bool(getattr(store, "in_process", False))


def is_per_process(store: Store) -> bool:
    """Whether each process counts for itself (its `per_process`), so that several workers multiply a limit."""
    return bool(getattr(store, "per_process", False))


# ------------------------------------------------------------------------------------------- what a store may offer


class FloorBackend(Backend, Protocol):
    """A backend that takes ``floor=`` in `Limiter.try_acquire`; that for asyncio has the same, awaited."""

    def try_acquire_above(self, key: str, permits: int, share: int) -> Decision:
        """`try_acquire` that leaves *share*, in millionths of the capacity; the numbers were checked."""
        ...


def takes_floors(backend: Any) -> bool:
    """Whether *backend* is a `FloorBackend`; one of several stores is if all of them are."""
    return hasattr(backend, "try_acquire_above") and bool(getattr(backend, "takes_floors", True))


class BookingBackend(Backend, Protocol):
    """A backend that keeps slots for `Limiter.book`, for rules of buckets; that for asyncio has the same, awaited."""

    @property
    def books(self) -> bool:
        """Whether it does: some of its kind do not."""
        ...

    def book(self, asked: Booking) -> Booked:
        """The arguments were checked. In an outage `on_store_error` answers."""
        ...

    def cancel_slot(self, key: str, id: str) -> bool:
        """Give up a slot; whether its permits are given back."""
        ...


def takes_bookings(backend: Any) -> bool:
    """Whether *backend* is a `BookingBackend`."""
    return bool(getattr(backend, "books", False))


class LeaseCall(NamedTuple):
    """What one process asks of the ledger of one key."""

    key: str  # the ledger's key, from `LeaseBackend.key_function`
    params: QuotaParams
    profile: AccuracyProfile
    request: LeaseRequest


class LeaseBackend(Protocol):
    """Keeps the ledgers of leases: applies `headgate.hybrid.ledger` to many keys in one atomic round trip.

    All exchanges raise `StoreUnavailable` when the store does not answer. A text in place of a reply is an error that
    concerns that key alone.
    """

    partitioned: bool  # keys lie at several servers: one may fail alone, and one call takes keys of one partition

    def key_function(self, rule: Rule) -> Callable[[str], str]:
        """The function that turns a client's key into the key of its ledger."""
        ...

    def partition(self, key: str) -> int:
        """The partition of a ledger; the same number for all if the store is not partitioned."""
        ...

    def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> list[LeaseReply | str]: ...
    async def exchange_async(self, calls: Sequence[LeaseCall]) -> list[LeaseReply | str]: ...
    def closing_exchange(self, timeout: float) -> AbstractAsyncContextManager[AsyncExchange | None]:
        """`exchange_async` for the end of an event loop, on connections of its own; None if it can have none."""
        ...

    async def close_loop(self) -> None:
        """Close what the running event loop uses."""
        ...


@runtime_checkable
class LeaseStore(Store, Protocol):
    """A store that `HybridLimiter` can use."""

    clock: Clock | None
    shared_objects: dict[str, Any]  # what hybrid and coordination keep here, for all that use this store

    def leases(self) -> LeaseBackend: ...


@runtime_checkable
class ConnectedStore(Store, Protocol):
    """A store with connections to a server."""

    async def awarm_up(self) -> None:
        """Open the running event loop's connections before they are needed. Raises `StoreUnavailable`."""
        ...

    def connections(self) -> dict[str, int]:
        """The event loop's connections: in_use, idle, and the calls that are waiting."""
        ...


class StateBackend(Protocol):
    """Runs operations on the states of locks, pools, queues and breakers, each atomically, and announces changes.

    `run` raises `StoreUnavailable` when the store does not answer. Operations are idempotent, so it may send one twice.
    """

    poll: float  # seconds after which a waiter asks again, woken or not
    display_name: str  # for messages, without secrets

    def run(self, machine: StateMachine, name: str, operation: Operation) -> list[Any]: ...
    async def run_async(self, machine: StateMachine, name: str, operation: Operation) -> list[Any]: ...
    def check(self, *, tasks: bool) -> None:
        """Raise a TypeError if threads (or *tasks*) cannot use this store."""
        ...

    def subscribe(self, on_message: Callable[[str, str], object], on_gap: Callable[[], object]) -> None:
        """Call *on_message* with channel and message when another process announces a change.

        Call *on_gap* when messages may have been lost: every waiter asks again.
        """
        ...

    def listen(self, channel: str) -> None:
        """Add a waiter to *channel*, whose messages are received until its last waiter calls `leave`."""
        ...

    def leave(self, channel: str) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class StateStore(Store, Protocol):
    """A store that coordination can use."""

    clock: Clock | None
    shared_objects: dict[str, Any]

    def states(self) -> StateBackend: ...


AnyBackend = TypeVar("AnyBackend")
StoreCheck = tuple[AnyBackend, str, int]  # what is asked of a backend in a joint check: key and permits


@runtime_checkable
class JointStore(Store, Protocol):
    """A store that decides checks of several limiters in one atomic step; `headgate.joint` uses it.

    `take_all` and `take_all_async` check all arguments first. They spend all of the checks or none, and return a
    decision for each, in order. When nothing is spent, the limiters that refuse say so and the others report their
    state as it is; all decisions are true if and only if everything was spent. Checks that share a state add up. In an
    outage each check is answered by `on_store_error` of its backend, and all are granted or none. A task that is
    cancelled loses no permits.
    """

    partitioned: bool  # whether a call takes checks of one partition only

    def partition(self, key: str) -> int:
        """The partition of a client's key, if the store is partitioned."""
        ...

    def take_all(self, checks: Sequence[StoreCheck[Any]]) -> list[Decision]:
        """The backends are from `open` of this store."""
        ...

    async def take_all_async(self, checks: Sequence[StoreCheck[Any]]) -> list[Decision]:
        """The backends are from `open_async` of this store."""
        ...


# ------------------------------------------------------------------------------------------------ stores from URLs


Agree = Literal["first", "majority"]  # how several stores decide as one


class StoreOptions(TypedDict, total=False):
    """What a limiter hands on to the store that it opens from a URL. A store ignores the options of others."""

    max_keys: int  # memory, shared
    prefix: str  # redis, postgresql
    hash_keys: bool  # redis, postgresql, service
    timeout: float  # redis, postgresql, service
    connect_timeout: float  # redis, postgresql, service
    max_connections: int  # redis, postgresql, service
    min_connections: int  # redis, postgresql, service
    retries: int  # redis, service
    retry_pause: float  # redis, service


class URLStore(Store, Protocol):
    """A store class that `SCHEMES` can name."""

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Unpack[StoreOptions]) -> Store:
        """The store that *url* names; *clock* is for tests. Raises a ValueError that says what would be right."""
        ...


class StoreClass(NamedTuple):
    """Where the class of a store is, and the extra that installs what it needs."""

    module: str
    name: str
    extra: str = ""

    def load(self) -> type[URLStore]:
        try:
            found: type[URLStore] = getattr(importlib.import_module(self.module), self.name)
        except ModuleNotFoundError as error:
            if not self.extra or (error.name or "").startswith("headgate"):
                raise
            raise ImportError(f"a {self.name} needs more: pip install 'headgate[{self.extra}]' ({error})") from error
        return found


_MEMORY = StoreClass("headgate.stores.memory", "MemoryStore")
_SHARED = StoreClass("headgate.stores.shared", "SharedStore")
_REDIS = StoreClass("headgate.stores.redis", "RedisStore", "redis")
_POSTGRESQL = StoreClass("headgate.stores.postgresql", "PostgreSQLStore", "postgresql")
_SERVICE = StoreClass("headgate.stores.service", "ServiceStore", "redis")
_SEVERAL = StoreClass("headgate.stores.several", "SeveralStore")
STORE_CLASSES = {kind.name: kind for kind in (_MEMORY, _SHARED, _REDIS, _POSTGRESQL, _SERVICE, _SEVERAL)}

SCHEMES = {
    "memory://": _MEMORY,
    "shared://": _SHARED,
    "redis://": _REDIS,
    "rediss://": _REDIS,
    "unix://": _REDIS,
    "redis+sentinel://": _REDIS,
    "redis+cluster://": _REDIS,
    "postgresql://": _POSTGRESQL,
    "postgres://": _POSTGRESQL,
    "headgate://": _SERVICE,
    "headgates://": _SERVICE,
    "headgate+http://": _SERVICE,
    "headgate+https://": _SERVICE,
}


def scheme_of(url: str) -> str:
    """The scheme of *url* with its slashes, and nothing behind it, where a password may be."""
    return url.partition("//")[0] + "//" if "//" in url else f"{url:.20}"


def open_store(
    store: str | Store | Sequence[str | Store], clock: Clock | None, options: StoreOptions, agree: Agree | None = None
) -> tuple[Store, bool]:
    """The store of a URL, or the one that was handed in, or several as one; and whether the caller must close it."""
    if isinstance(store, list | tuple):
        from headgate.stores.several import SeveralStore  # it needs this module

        if agree is None:
            raise ValueError(
                "a list of stores needs agree='first' (the first that answers decides) or agree='majority'"
            )
        return SeveralStore(store, agree, clock, **options), True
    if agree is not None:
        raise ValueError(f"agree={agree!r:.40} is for a list of stores, such as store=['redis://a', 'redis://b']")
    if clock is not None and not callable(getattr(clock, "now", None)):
        raise ValueError(f"clock must have now(), as a ManualClock does, got {type(clock).__name__} {clock!r:.40}")
    if isinstance(store, str):
        if unknown := options.keys() - StoreOptions.__annotations__.keys():
            known = ", ".join(sorted(StoreOptions.__annotations__))
            raise TypeError(f"a limiter takes no {', '.join(sorted(unknown))}; for its store it takes {known}")
        kind = SCHEMES.get(scheme_of(store))
        if kind is None:
            raise ValueError(f"unknown store {scheme_of(store)!r}; {_FORMS}")
        return kind.load().from_url(store, clock, **options), True
    if type(store).__module__.partition(".")[0] in ("redis", "valkey"):
        raise ValueError(
            f"store is a client, {type(store).__name__}; put a store around it: RedisStore(client), which "
            "you import from headgate.stores"
        )
    if isinstance(store, Sequence | type) or not hasattr(store, "open_async"):
        raise ValueError(f"store must be a URL (text) or a store object, got {type(store).__name__}; {_FORMS}")
    if clock is not None or options:
        raise ValueError("clock and store options go to the store itself when you hand one in")
    return store, False


_FORMS = f"use a URL that starts with one of {', '.join(SCHEMES)}, or a store object: {', '.join(STORE_CLASSES)}"

# The error of a limiter, a store or a coordination tool that is pickled.
NO_PICKLE = "limiters, locks, pools and their stores belong to one process and cannot be pickled: make one in each"
