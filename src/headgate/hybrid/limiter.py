"""`HybridLimiter` and `AsyncHybridLimiter`: decisions from a lease, without a round trip, and never one too many.

    limiter = HybridLimiter("10000/second", store="redis://localhost:6379/0")
    if limiter.try_acquire("tenant:42"):
        ...

The first decision about a key waits for one round trip; then the process holds a lease, and decisions are local.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

from headgate._plan import arun, run
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.hybrid.backend import AsyncHybridBackend, HybridBackend, HybridStore
from headgate.hybrid.figures import watch_hybrid
from headgate.hybrid.limiter_leases import LimiterLeases
from headgate.hybrid.protocol import accuracy_profile
from headgate.hybrid.region_store import RegionState, RegionStore, region_store
from headgate.hybrid.table import LeaseTable, TryAcquireFromLease
from headgate.limiter import AsyncLimiter, Limiter
from headgate.rule import AlgorithmName, OnStoreError, Quotas
from headgate.stores.base import SCHEMES, Agree, Backend, LeaseStore, StoreClass, StoreOptions, open_store, scheme_of

MAX_KEYS = 100_000
LEASES_AT_ONCE = 500  # that `stats_async` adds up before it lets other tasks run: about half a millisecond
_NOT_GIVEN = {"options", "return", "max_keys"}

Accuracy = Literal["high", "medium", "low"] | float
Cold = Literal["wait", "optimistic"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Permits, since the limiter was made; `keys`, `held` and `unreported` as of now."""

    local: int  # asked for and answered without waiting: from a lease, or by the policy while Redis is down
    remote: int  # asked for by callers that had to wait for Redis
    degraded: int  # calls that the policy answered, whether they waited or not
    syncs: int  # reports, one for each key
    trips: int  # round trips that carried them, those of other limiters on the same store included
    failures: int  # trips that failed
    keys: int  # keys with a lease, or a denial, in this process
    held: int  # permits on lease in this process
    unreported: int  # spent here, not known to Redis yet: the divergence of the two
    burned: int  # permits of leases that ran out before they were spent
    voided: int  # leases that Redis did not know any more
    trip_seconds: float  # how long a trip takes, on average
    nodes: int  # processes at one key, lately
    backend: str  # "up" or "down"
    region: RegionState | None = None  # of a limiter with a home

    @property
    def local_ratio(self) -> float:
        """The part of all decisions that did not wait for Redis."""
        total = self.local + self.remote
        return self.local / total if total else 1.0


def stats_of(limiters: Sequence[LimiterLeases], store: HybridStore | None = None) -> Stats:
    """The figures of *limiters*, added up; with those of the region, if *store* has one."""
    return run(_stats(limiters, store), lambda _: None)


def _stats(limiters: Sequence[LimiterLeases], store: HybridStore | None) -> Generator[None, None, Stats]:
    """The plan (see `headgate._plan`) of `stats_of`; it yields after every LEASES_AT_ONCE leases."""
    managers = {limiter.manager for limiter in limiters}
    leases = [(lease, limiter.cost) for limiter in limiters for lease in list(limiter.leases.values())]
    releases = [item for manager in managers for item in list(manager.releases.items())]
    released = [(lease, limiter.cost) for (limiter, _), lease in releases if limiter in limiters]
    uncounted = held = unreported = 0
    for start in range(0, len(leases), LEASES_AT_ONCE):
        if start:
            yield
        for lease, cost in leases[start : start + LEASES_AT_ONCE]:
            spent = lease.balance_at_last_count - lease.balance
            uncounted += (spent + lease.denied) // cost
            held += lease.balance // cost
            unreported += max(spent, 0) // cost
    uncounted += sum((lease.balance_at_last_count - lease.balance + lease.denied) // cost for lease, cost in released)
    return Stats(
        local=sum(_without_waiting(limiter) for limiter in limiters) + uncounted,
        remote=sum(limiter.waited for limiter in limiters),
        degraded=sum(limiter.policy.answers for limiter in limiters),
        syncs=sum(limiter.syncs for limiter in limiters),
        trips=sum(manager.trips for manager in managers),
        failures=sum(manager.health.failures for manager in managers),
        keys=len(leases),
        held=held,
        unreported=unreported,
        burned=sum(limiter.burned for limiter in limiters),
        voided=sum(limiter.voided for limiter in limiters),
        trip_seconds=max((manager.trip_time for manager in managers), default=0) / 1e9,
        nodes=max((manager.nodes_seen for manager in managers), default=1),
        backend="down" if any(each.health.current_error(each.read_clock()) for each in managers) else "up",
        region=store.store.state() if store and isinstance(store.store, RegionStore) else None,
    )


def _without_waiting(limiter: LimiterLeases) -> int:
    """Permits that were asked for and answered at once, except those that a lease has not reported yet."""
    return limiter.spent + limiter.denied + limiter.policy.requested + limiter.refunded // limiter.cost


class _HybridConstructor:
    """The constructor of both limiters: leases around the store, and then the constructor of `Limiter`'s kind."""

    def __init__(
        self,
        quota: Quotas,
        *,
        store: str | LeaseStore | Sequence[str | LeaseStore] = "redis://localhost:6379/0",
        agree: Agree | None = None,
        home: str | LeaseStore | None = None,
        region: str | None = None,
        floor: float | None = None,
        accuracy: Accuracy = "high",
        cold: Cold = "wait",
        algorithm: AlgorithmName = "token_bucket",
        name: str = "default",
        on_store_error: OnStoreError = "local",
        max_local_keys: int = MAX_KEYS,
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        hybrid = _hybrid_store(store, agree, clock, options, accuracy, cold, max_local_keys, (home, region, floor))
        super().__init__(  # type: ignore[call-arg]  # of Limiter or AsyncLimiter, the next class in line
            quota, algorithm=algorithm, store=hybrid, name=name, on_store_error=on_store_error
        )
        self._owned = True  # the leases are this limiter's to give back, even if the store is not its own
        weakref.finalize(self, hybrid.release_later).atexit = False
        self._watched_leases = watch_hybrid(self)


class HybridLimiter(_HybridConstructor, Limiter, TryAcquireFromLease):  # a patch of Limiter comes first
    """`Limiter` on a server without a round trip for each decision, and still never one too many.

    It has the methods of `Limiter` except `pace`, and `stats` beside them. `try_acquire` makes a round trip only where
    the lease of this process does not suffice; `close` gives the lease back.

    Redis stands here, and in the names of this package, for whichever of these stores keeps the ledgers.

    Args:
        quota: one quota, as for `Limiter`
        store: the URL of a Redis or PostgreSQL, shared://name, or a store; limiters on one object share its trips. Or a
            list of those, with *agree*
        agree: how several stores lend together: majority or first (docs/several.md)
        home: for a limiter in several regions: the Redis that all regions lease from; *store* is that of this one
        region: the name of this region
        floor: the share of the quota that this region always has; 0.05 if not given
        algorithm: token_bucket, gcra, fixed_window or sliding_window_counter; with a home one of the first two
        name: tells limiters on one store apart
        accuracy: high: several reports a second on a busy key. medium and low: a lease of a bucket refills by itself
            with a part of the rate, and reports are 5 and 30 seconds apart, or as many as are given, 0.5 to 300. Fewer
            trips, and a share of the rate lies idle longer where callers have gone. Never one too many. With a home:
            high
        cold: wait: the first decision about a key waits for Redis. optimistic: it is granted at once and charged
            afterwards, so each process may grant one call too many to a key that it has not seen for a while
        on_store_error: what to answer when a lease is used up and Redis cannot be asked: local (a share of the rate by
            the number of processes last seen), deny, allow or raise
        max_local_keys: leases that are held at most; the one unused longest goes back for a new one
        clock: a `headgate.testing.ManualClock`, in tests
        **options: prefix, hash_keys, timeout, connect_timeout, max_connections, min_connections, retries, retry_pause
    """

    store: HybridStore
    _backend: HybridBackend

    def _use(self, backend: Backend) -> None:
        super()._use(backend)
        self._leases = backend if isinstance(backend, LeaseTable) else None

    def stats(self) -> Stats:
        """How it has decided so far, without a round trip."""
        return stats_of([(self._origin or self)._backend], self.store)


class AsyncHybridLimiter(_HybridConstructor, AsyncLimiter):
    """`HybridLimiter` for asyncio: the same arguments, the same methods, awaited. An event loop has its own leases."""

    store: HybridStore
    _backend: AsyncHybridBackend

    def try_acquire_now(self, key: str, permits: int = 1) -> Decision | Awaitable[Decision]:
        """`try_acquire` without a coroutine where the lease suffices: the decision, or what has to be awaited for it.

        For callers that decide so often that a coroutine for each decision would cost more than the decision.

        Args:
            key: the client's, such as `user:123`: text of at most 256 bytes
            permits: how many to spend
        """
        return self._backend.try_acquire_now(key, permits)

    def stats(self) -> Stats:
        """How it has decided so far, in all event loops that are open, without a round trip."""
        return stats_of(list(self.store.loops.values()), self.store)

    async def stats_async(self) -> Stats:
        """The same, added up in steps between which other tasks run: for limiters with many keys.

        Counters move on meanwhile, so `local` may be a little above what it was at any one moment.
        """
        return await arun(_stats(list(self.store.loops.values()), self.store), lambda _: asyncio.sleep(0))

    def release(self) -> None:
        """Give back what no caller waits for, in the background. The limiter stays usable."""
        for leases in self.store.loops.values():
            leases.release_unawaited()
            leases.manager.wake_background()


def _hybrid_store(
    store: str | LeaseStore | Sequence[str | LeaseStore],
    agree: Agree | None,
    clock: Clock | None,
    options: StoreOptions,
    accuracy: str | float,
    cold: str,
    max_keys: int,
    place: tuple[str | LeaseStore | None, str | None, float | None],
) -> HybridStore:
    """*store* behind leases, if it can keep them; *place*: home, region and floor."""
    home, region, floor = place
    several = isinstance(store, list | tuple) or getattr(store, "kind", "") == "several"
    if several:
        _check_several(store, agree or getattr(store, "agree", None), accuracy, home)
    if home is None and (region is not None or floor is not None):
        raise ValueError(
            "region and floor are for a limiter with a home: give home= the URL of the Redis that has the rest"
        )
    if accuracy_profile(accuracy).inflow and home is not None:
        raise ValueError(
            f"a limiter with a home takes accuracy='high', got {accuracy!r:.40}: what a region has from home ends soon "
            "when it is cut off, and a lease that refills by itself would go on"
        )
    if isinstance(store, str) and scheme_of(store) == "memory://":
        raise ValueError("HybridLimiter shares a limit between processes; memory:// belongs to one: use Limiter")
    if isinstance(store, str) and scheme_of(store) not in SCHEMES:
        raise ValueError(f"unknown store {scheme_of(store)!r}: {_needs_leases()}")
    if not several and not isinstance(store, str | LeaseStore):
        raise ValueError(f"{_needs_leases()}; got {type(store).__name__}")
    if "max_keys" in options:
        raise TypeError("HybridLimiter takes no max_keys, which is for Limiter; max_local_keys bounds leases")
    if unknown := options.keys() - StoreOptions.__annotations__.keys():
        known = HybridLimiter.__init__.__annotations__.keys() | StoreOptions.__annotations__.keys()
        given = ", ".join(sorted(known - _NOT_GIVEN))
        raise TypeError(f"HybridLimiter takes no {', '.join(sorted(unknown))}; it takes {given}")
    opened, owned = open_store(store, clock, options, agree)
    if not isinstance(opened, LeaseStore):
        opened.close()
        raise ValueError(f"{_needs_leases()}; got {scheme_of(str(store))}")
    if home is not None:
        regional: LeaseStore = region_store(opened, owned, home, region, floor)
        return HybridStore(regional, True, accuracy, cold, max_keys)
    return HybridStore(opened, owned, accuracy, cold, max_keys)


def _check_several(store: object, agree: object, accuracy: str | float, home: object) -> None:
    """Refuse what several stores cannot do."""
    if agree is None:
        raise ValueError(
            "a list of stores needs agree='majority': a majority of them must lend; or agree='first': the first that "
            "answers lends"
        )
    if isinstance(store, list | tuple) and len(store) == 1:
        raise ValueError("store is a list of one store; give the store itself, without a list and without agree")
    if home is not None:
        raise ValueError("a limiter with a home takes one store, the Redis of its region, and no list of stores")
    if accuracy_profile(accuracy).inflow:
        raise ValueError(
            f"a limiter with several stores takes accuracy='high', got {accuracy!r:.40}: a lease that refills by "
            "itself would refill at each store by that store's clock"
        )


def _needs_leases() -> str:
    kinds = {kind.name: kind for kind in SCHEMES.values() if _keeps_leases(kind)}
    schemes = [scheme for scheme, kind in SCHEMES.items() if kind.name in kinds]
    return (
        "HybridLimiter needs a store that keeps leases: give it a URL that starts with one of "
        f"{', '.join(schemes)}, or a {' or '.join(kinds)}"
    )


def _keeps_leases(kind: StoreClass) -> bool:
    try:
        return hasattr(kind.load(), "leases")
    except ImportError:  # what it needs is not installed
        return False
