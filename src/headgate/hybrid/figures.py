"""What hybrid limiters report to telemetry: the figures that they and their lease managers keep anyway."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from headgate.hybrid.limiter_leases import LimiterLeases
from headgate.stores.base import kind_of
from headgate.telemetry.watching import Sample, Watched, watch

NAMES = {
    "degraded": "headgate.lease.degraded",
    "reports": "headgate.lease.reports",
    "burned": "headgate.lease.burned",
    "voided": "headgate.lease.voided",
}
PERMITS = (("local", "allowed"), ("local", "denied"), ("policy", "unknown"), ("store", "unknown"))


class LeaseCounts:
    """The counters of one limiter in this process, in all its event loops; those of a loop that has ended stay.

    It refers to the limiter's store, and not to the limiter. When that is collected, `finish` drops the store.
    """

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        self._known: set[LimiterLeases] = set()
        self._ended: dict[Any, int] = {}
        self._at_fork: dict[Any, int] = {}
        self._highest: dict[Any, int] = {}  # leases move between the lists that are added up: no counter falls for it

        self._totals()

    def finish(self) -> None:
        """The limiter is gone: keep its counters, and let go of its leases."""
        store, self._store = self._store, None
        for leases in _leases(store):
            _add(self._ended, leases)
        self._known = set()

    def reset(self) -> None:
        self._ended, self._highest, self._at_fork = {}, {}, {}
        self._at_fork = self._totals()

    def samples(self) -> Iterator[Sample]:
        for series, value in self._totals().items():
            self._highest[series] = highest = max(value, self._highest.get(series, 0))
            family, labels = series
            yield Sample(family, labels, highest)

    def _totals(self) -> dict[Any, int]:
        there = set() if self._store is None else set(_leases(self._store))
        for leases in there - self._known:
            watch_trips(leases.manager, self._store.store)
        for ended in self._known - there:
            _add(self._ended, ended)
        self._known = there
        totals = dict(self._ended)
        for leases in there:
            _add(totals, leases)
        return {series: value - self._at_fork.get(series, 0) for series, value in totals.items()}


def _leases(store: Any) -> list[LimiterLeases]:
    return [*store.backends, *list(store.loops.values())]


def _add(totals: dict[Any, int], owner: LimiterLeases) -> None:
    spent, denied = owner.spent + owner.refunded // owner.cost, owner.denied
    releases = [lease for (limiter, _), lease in list(owner.manager.releases.items()) if limiter is owner]
    for lease in [*list(owner.leases.values()), *releases]:
        spent += (lease.balance_at_last_count - lease.balance) // owner.cost
        denied += lease.denied // owner.cost
    counts = (spent, denied, owner.policy.requested, owner.waited)
    for (decided, result), value in zip(PERMITS, counts, strict=True):
        series = ("headgate.lease.permits", (("decided", decided), ("result", result)))
        totals[series] = totals.get(series, 0) + value
    figures = {
        "degraded": owner.policy.answers,
        "reports": owner.syncs,
        "burned": owner.burned,
        "voided": owner.voided,
    }
    for name, value in figures.items():
        totals[NAMES[name], ()] = totals.get((NAMES[name], ()), 0) + value


def _gauges(limiter: Any) -> Iterator[Sample]:
    keys = held = unreported = 0
    for owner in _leases(limiter.store):
        for lease in list(owner.leases.values()):
            keys += 1
            held += lease.balance // owner.cost
            unreported += max(lease.balance_at_last_count - lease.balance, 0) // owner.cost
    yield Sample("headgate.lease.keys", (), keys)
    yield Sample("headgate.lease.held", (), held)
    yield Sample("headgate.lease.unreported", (), unreported)


class TripCounts:
    """The round trips of one lease manager, which carry the reports of all limiters on a store.

    The reference to the manager is weak: what it counts between the last scrape and its end is lost.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = weakref.ref(manager)
        self._last = self._at_fork = (0, 0)

    def reset(self) -> None:
        self._read()
        self._at_fork = self._last

    def samples(self) -> Iterator[Sample]:
        self._read()
        trips, failed = (now - before for now, before in zip(self._last, self._at_fork, strict=True))
        yield Sample("headgate.lease.trips", (), trips)
        yield Sample("headgate.lease.failed_trips", (), failed)

    def _read(self) -> None:
        manager = self._manager()
        if manager is not None:
            self._last = (manager.trips, manager.health.failures)


def _up(manager: Any) -> Iterator[Sample]:
    yield Sample("headgate.lease.up", (), int(manager.health.current_error(manager.read_clock()) is None))


def watch_trips(manager: Any, store: Any) -> None:
    """Report the trips of *manager*, once however many limiters share it."""
    if not hasattr(manager, "watched"):
        kind, server = kind_of(store), str(getattr(store, "display_name", store))
        manager.watched = watch("server", server, (("store", kind),), TripCounts(manager), manager, _up)


def watch_hybrid(limiter: Any) -> Watched:
    """Report the leases of a hybrid limiter, which keeps the result."""
    rule, store = limiter.rule, limiter.store
    counts = LeaseCounts(store)
    weakref.finalize(limiter, counts.finish).atexit = False
    labels = (("algorithm", rule.kind), ("store", kind_of(store.store)))
    return watch("limiter", rule.name, labels, counts, limiter, _gauges)
