"""How limiters and the stores below them are watched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from headgate.telemetry.tally import DecisionSamples
from headgate.telemetry.watching import Sample, Watched, watch


def watch_backend(rule: Any, store: Any, kind: str, backend: Any) -> None:
    """Report the decisions of *backend*, once however many limiters share it. Hybrid limiters report by themselves."""
    backend = getattr(backend, "backend", backend)  # of asyncio, in front of one in memory
    counts = getattr(backend, "counts", None)
    if counts is None or backend.watched is not None:
        return
    labels = (("algorithm", rule.kind), ("store", kind))
    gauges = partial(_keys, label=rule.label) if kind == "memory" else None
    backend.watched = watch("limiter", rule.name, labels, DecisionSamples(counts), store, gauges)


def _keys(store: Any, label: object) -> Iterator[Sample]:
    table = store.tables.get(label)
    if table is not None:
        yield Sample("headgate.keys", (), len(table.states))


def watch_waits(rule: Any, kind: str, limiter: Any) -> Watched:
    """Report the waits of *limiter*."""
    labels = (("algorithm", rule.kind), ("store", kind))
    return watch("limiter", rule.name, labels, limiter._waits, limiter, _waiting)


def _waiting(limiter: Any) -> Iterator[Sample]:
    yield Sample("headgate.waiting", (), len(limiter._waiters))


def watch_executor(executor: Any, kind: str, server: str) -> None:
    """Report the calls that *executor* makes to a store, its breakers and its connections."""
    executor.watched = watch("server", server, (("store", kind),), executor.calls, executor, _server)


def _server(executor: Any) -> Iterator[Sample]:
    yield Sample("headgate.store.breaker.open", (), max((int(one.open) for one in executor.breakers()), default=0))
    connections = executor.connection_counts()
    for state in ("in_use", "idle", "waiting"):
        yield Sample("headgate.store.connections", (("state", state),), connections[state])
