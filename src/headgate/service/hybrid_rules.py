"""The limiters of hybrid rules in one worker: made once, kept while their rule stays as it is, counted, given back.

A hybrid rule decides from leases that its worker holds (docs/hybrid.md): most checks need no round trip. A reload keeps
the leases of rules that have not changed. Those of a rule that was changed or removed go back to Redis as soon as no
check waits for them, and all of them when the worker stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Any, NamedTuple

from headgate.hybrid.limiter import AsyncHybridLimiter, Stats
from headgate.rule import AlgorithmName, OnStoreError, Quotas, Rule
from headgate.service import shared_counters as c
from headgate.service.lease_settings import Accuracy
from headgate.stores.base import LeaseStore, Store, kind_of

SHOWN_ROWS = 20
RETIRE_TIMEOUT = 10.0  # seconds that checks of a rule that was changed or removed may wait for Redis


class HybridIdentity(NamedTuple):
    """What must stay the same for a limiter to keep its leases across a reload."""

    name: str
    algorithm: AlgorithmName
    quotas: tuple[str, ...]
    on_store_error: OnStoreError
    accuracy: Accuracy


class CountedLimiter:
    """A limiter, the slot of its counters, and the figures that were added to them so far."""

    def __init__(self, limiter: AsyncHybridLimiter, slot: int) -> None:
        self.limiter = limiter
        self.slot = slot
        self.counted = dict.fromkeys(c.HYBRID_COUNTERS, 0)


class HybridLimiters:
    """All hybrid limiters of a worker; they share the store's connections and the round trips of its leases."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[HybridIdentity, CountedLimiter] = {}
        self._retiring: dict[asyncio.Task[None], CountedLimiter] = {}
        self._trips = [0, 0]  # all and failed, as far as they were counted

    def get(
        self,
        name: str,
        algorithm: AlgorithmName,
        quotas: Quotas,
        on_store_error: OnStoreError,
        accuracy: Accuracy,
        slot: int,
    ) -> AsyncHybridLimiter:
        """The limiter for these settings: the one that is there, with its leases, or a new one."""
        store = self.check_store()
        texts = tuple(str(quota) for quota in Rule(quotas, algorithm, name).quotas)
        identity = HybridIdentity(name, algorithm, texts, on_store_error, accuracy)
        found = self._open.get(identity)
        if found is None:
            limiter = AsyncHybridLimiter(
                quotas,
                store=store,
                algorithm=algorithm,
                name=name,
                on_store_error=on_store_error,
                accuracy=accuracy,
            )
            found = self._open[identity] = CountedLimiter(limiter, slot)
        return found.limiter

    def check_store(self) -> LeaseStore:
        """The store; raises ValueError if it keeps no leases."""
        if not isinstance(self._store, LeaseStore):
            kind = kind_of(self._store)
            raise ValueError(f"hybrid needs a server, and the service runs on a {kind} store; restart it with a Redis")
        return self._store

    def pairs(self) -> list[tuple[str, str]]:
        """The name and the algorithm of each limiter."""
        return list(dict.fromkeys((identity.name, identity.algorithm) for identity in self._open))

    def keep(self, used: Iterable[object]) -> None:
        """Retire every limiter that is not in *used*."""
        kept = {id(limiter) for limiter in used}
        for identity, counted in list(self._open.items()):
            if id(counted.limiter) not in kept:
                del self._open[identity]
                self._retiring[asyncio.ensure_future(self._retire(counted))] = counted

    async def _retire(self, counted: CountedLimiter) -> None:
        """Give back the leases that no check waits for, until there are no others."""
        limiter, deadline = counted.limiter, monotonic() + RETIRE_TIMEOUT
        while True:
            limiter.release()
            if monotonic() > deadline or not (await limiter.stats_async()).keys:
                break
            await asyncio.sleep(0.05)
        await limiter.aclose()

    async def aclose(self) -> None:
        """Give all leases back, within about a second."""
        limiters = [counted.limiter for counted in (*self._open.values(), *self._retiring.values())]
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(limiter.aclose() for limiter in limiters))

    async def count(self, own: c.WorkerCounters) -> None:
        """Bring the counters of this worker up to date. A counter never falls: the figures are not of one moment."""
        if not self._open and not self._retiring:
            return
        levels: dict[int, list[int]] = {}
        stats: list[Stats] = []
        for counted in [*self._open.values(), *self._retiring.values()]:
            found = await counted.limiter.stats_async()
            await asyncio.sleep(0)  # there may be thousands of rules
            stats.append(found)
            at = counted.slot * c.HYBRID_WORDS
            own.hybrid[at + c.IS_HYBRID] = 1
            for word, figure in zip(c.HYBRID_COUNTERS, _counters(found), strict=True):
                own.hybrid[at + word] += max(figure - counted.counted[word], 0)
                counted.counted[word] = max(figure, counted.counted[word])
            level = levels.setdefault(counted.slot, [0] * len(c.HYBRID_GAUGES))
            for i, figure in enumerate((found.keys, found.held, found.unreported)):
                level[i] += figure
        for slot, level in levels.items():
            for word, figure in zip(c.HYBRID_GAUGES, level, strict=True):
                own.hybrid[slot * c.HYBRID_WORDS + word] = figure
        self._count_trips(own, stats)
        for task in [task for task in self._retiring if task.done()]:
            counted = self._retiring.pop(task)
            if counted.slot not in {other.slot for other in self._open.values()}:
                for word in c.HYBRID_GAUGES:
                    own.hybrid[counted.slot * c.HYBRID_WORDS + word] = 0

    def _count_trips(self, own: c.WorkerCounters, stats: list[Stats]) -> None:
        """Trips carry the leases of all rules, so each limiter reports all of them."""
        now = [max(found.trips for found in stats), max(found.failures for found in stats)]
        for i, gauge in enumerate((c.HYBRID_TRIPS, c.HYBRID_FAILED_TRIPS)):
            own.gauges[gauge] += max(now[i] - self._trips[i], 0)
            self._trips[i] = max(now[i], self._trips[i])
        own.gauges[c.HYBRID_DOWN] = any(found.backend == "down" for found in stats)


def _counters(stats: Stats) -> tuple[int, int, int, int]:
    """The figures that only grow, in the order of HYBRID_COUNTERS."""
    return stats.local, stats.remote, stats.syncs, stats.burned


Family = tuple[str, str, str, list[tuple[str, str, float]]]  # as `headgate.service.metrics.family` takes it


def families(counters: c.SharedCounters) -> list[Family]:
    """The metrics of hybrid rules; none before there is such a rule."""
    rows = [(name.rpartition(" "), words) for name, words in counters.hybrid_slots()]
    if not rows:
        return []
    labelled = [(f'rule="{rule}",algorithm="{kind}"', words) for (rule, _, kind), words in rows]
    decided = [
        ("", f'{labels},decided="{where}"', float(words[word]))
        for labels, words in labelled
        for where, word in (("local", c.LOCAL), ("redis", c.ASKED))
    ]
    text = "Permits that checks asked for: decided from a lease of this service, or by Redis while the check waited"
    found: list[Family] = [("hybrid_permits_total", "counter", text, decided)]
    for name, kind, text, word in (
        ("hybrid_reports_total", "counter", "Reports about one key each, sent to Redis", c.REPORTS),
        ("hybrid_burned_total", "counter", "Permits of leases that expired before they were spent", c.BURNED),
        ("hybrid_keys", "gauge", "Keys with a lease, or a denial, in a worker", c.LEASED_KEYS),
        ("hybrid_held", "gauge", "Permits on lease", c.HELD),
        ("hybrid_unreported", "gauge", "Permits that were spent and that Redis does not know of yet", c.UNREPORTED),
    ):
        found.append((name, kind, text, [("", labels, float(words[word])) for labels, words in labelled]))
    trips, failed = sum(counters.gauge(c.HYBRID_TRIPS)), sum(counters.gauge(c.HYBRID_FAILED_TRIPS))
    up = 1 - max(counters.gauge(c.HYBRID_DOWN))
    found.append(("hybrid_trips_total", "counter", "Round trips that carried reports", [("", "", float(trips))]))
    found.append(("hybrid_failed_trips_total", "counter", "Those that failed", [("", "", float(failed))]))
    found.append(("hybrid_up", "gauge", "0 while a worker cannot report its leases", [("", "", float(up))]))
    return found


def lease_rows(counters: c.SharedCounters) -> dict[str, Any] | None:
    """The leases as the live page shows them, the busiest rules first; None before there is a hybrid rule."""
    found = sorted(counters.hybrid_slots(), key=lambda row: -(row[1][c.LOCAL] + row[1][c.ASKED]))
    if not found:
        return None
    names = {"local": c.LOCAL, "redis": c.ASKED, "keys": c.LEASED_KEYS, "held": c.HELD, "unreported": c.UNREPORTED}
    rows = [
        {"rule": name.rpartition(" ")[0], "algorithm": name.rpartition(" ")[2]}
        | {field: words[word] for field, word in names.items()}
        for name, words in found[:SHOWN_ROWS]
    ]
    return {
        "rules": rows,
        "trips": sum(counters.gauge(c.HYBRID_TRIPS)),
        "failedTrips": sum(counters.gauge(c.HYBRID_FAILED_TRIPS)),
        "up": not any(counters.gauge(c.HYBRID_DOWN)),
    }
