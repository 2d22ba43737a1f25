"""`HybridLimiter` and `AsyncHybridLimiter`: decisions from a lease, without a round trip, and never one too many.

    limiter = HybridLimiter("10000/second", store="redis://localhost:6379/0")
    if limiter.try_acquire("tenant:42"):
        ...

The first decision about a key waits for one round trip; then a lease is held, and decisions are local.
"""

from __future__ import annotations

import weakref
from typing import Literal, Unpack

from headgate.clock import Clock
from headgate.hybrid.gates import HybridBackend, HybridStore
from headgate.hybrid.stats import Stats, stats_of
from headgate.limiter import AsyncLimiter, Limiter
from headgate.rule import AlgorithmName, OnStoreError, Quotas
from headgate.stores.base import SCHEMES, StoreOptions, open_store
from headgate.stores.redis import RedisStore

MAX_KEYS = 100_000
_NOT_GIVEN = {"options", "return", "max_keys"}

Accuracy = Literal["high", "medium", "low"]
Cold = Literal["wait", "optimistic"]


class HybridLimiter(Limiter):
    """`Limiter` on Redis without a round trip for each decision, and still never one too many.

    It has the methods of `Limiter` except `pace`, and `stats` beside them. `try_acquire` makes a round trip only where
    what is on lease here does not suffice; `close` gives that back.

    quota           one quota, as for `Limiter`
    store           the URL of a Redis, or a `RedisStore`; limiters that are given the same one share its trips
    algorithm       token_bucket, gcra, fixed_window or sliding_window_counter
    name            tells limiters on one store apart
    accuracy        high, medium or low: the lower, the fewer trips, and the more of the limit may be on lease elsewhere
                    when a burst comes here. Never one too many
    cold            wait: the first decision about a key waits for Redis. optimistic: it is granted at once and charged
                    afterwards, so each process may grant one call too many to a key that it has not seen for a while
    on_store_error  what to answer when a lease is used up and Redis cannot be asked: local (a share of the rate by the
                    number of processes last seen), deny, allow or raise
    max_local_keys  leases that are held at most; the one unused longest goes back for a new one
    clock           a `headgate.testing.ManualClock`, in tests
    options         prefix, hash_keys, timeout, connect_timeout, max_connections
    """

    _backend: HybridBackend

    def __init__(
        self,
        quota: Quotas,
        *,
        store: str | RedisStore = "redis://localhost:6379/0",
        algorithm: AlgorithmName | str = "token_bucket",
        name: str = "default",
        accuracy: Accuracy = "high",
        cold: Cold = "wait",
        on_store_error: OnStoreError | str = "local",
        max_local_keys: int = MAX_KEYS,
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        hybrid = _hybrid_store(store, clock, options, accuracy, cold, max_local_keys)
        super().__init__(quota, algorithm=algorithm, store=hybrid, name=name, on_store_error=on_store_error)
        self._owned = True  # the leases are ours to give back, whoever the connections belong to
        weakref.finalize(self, hybrid.retire).atexit = False

    def stats(self) -> Stats:
        """How it has decided so far; asks nobody."""
        return stats_of([self._backend.member])


class AsyncHybridLimiter(AsyncLimiter):
    """`HybridLimiter` for asyncio: the same arguments, the same methods, awaited. An event loop has its own leases."""

    store: HybridStore

    def __init__(
        self,
        quota: Quotas,
        *,
        store: str | RedisStore = "redis://localhost:6379/0",
        algorithm: AlgorithmName | str = "token_bucket",
        name: str = "default",
        accuracy: Accuracy = "high",
        cold: Cold = "wait",
        on_store_error: OnStoreError | str = "local",
        max_local_keys: int = MAX_KEYS,
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        hybrid = _hybrid_store(store, clock, options, accuracy, cold, max_local_keys)
        super().__init__(quota, algorithm=algorithm, store=hybrid, name=name, on_store_error=on_store_error)
        self._owned = True
        weakref.finalize(self, hybrid.retire).atexit = False

    def stats(self) -> Stats:
        """How it has decided so far, in all event loops that are open; asks nobody."""
        return stats_of([gate.member for gate in self.store.loops.values()])


def _hybrid_store(
    store: object, clock: Clock | None, options: StoreOptions, accuracy: str, cold: str, max_keys: int
) -> HybridStore:
    forms = f"give it a URL that starts with one of {', '.join(tuple(SCHEMES)[1:])}, or a RedisStore"
    if store == "memory://":
        raise ValueError("HybridLimiter shares a limit through Redis; memory:// has nobody to share with: use Limiter")
    if isinstance(store, str) and not store.startswith(tuple(SCHEMES)[1:]):
        scheme = store.partition("//")[0] + "//" if "//" in store else f"{store:.20}"  # behind it may be a password
        raise ValueError(f"unknown store {scheme!r}: HybridLimiter needs a Redis; {forms}")
    if not isinstance(store, str | RedisStore):
        raise ValueError(f"HybridLimiter needs a Redis; {forms}; got {type(store).__name__}")
    if "max_keys" in options:
        raise TypeError("HybridLimiter takes no max_keys, which is the memory store's; max_local_keys bounds leases")
    if unknown := options.keys() - StoreOptions.__annotations__.keys():
        known = sorted(
            (HybridLimiter.__init__.__annotations__.keys() | StoreOptions.__annotations__.keys()) - _NOT_GIVEN
        )
        raise TypeError(f"HybridLimiter takes no {', '.join(sorted(unknown))}; it takes {', '.join(known)}")
    opened, owned = open_store(store, clock, options)
    assert isinstance(opened, RedisStore)
    return HybridStore(opened, owned, accuracy, cold, max_keys)
