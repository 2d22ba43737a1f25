"""The live page's server-sent events: one a second, with the counts of all workers, and the most denied keys."""

from __future__ import annotations

import asyncio
from heapq import nlargest
from operator import itemgetter
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

import headgate
from headgate.service import doors, hybrid_rules
from headgate.service import shared_counters as c
from headgate.service.busy_keys import rows_for_page
from headgate.service.health import store_kind
from headgate.service.redis_figures import rows_for_people
from headgate.service.reports import (
    SHOWN_KEYS,
    WorkerReport,
    merge_busiest,
    merge_connections,
    merge_denied,
    read_reports,
)
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.settings import THROTTLE_RULE
from headgate.stores.base import is_per_process

if TYPE_CHECKING:
    from headgate.service.app import App

MAX_WATCHERS = 100  # in one worker
KEPT_KEYS = 500
HEADERS = [("content-type", "text/event-stream"), ("cache-control", "no-store"), ("x-accel-buffering", "no")]


async def stream(app: App, scope: Scope, protocol: HTTPProtocol) -> None:
    """Send an event now and each second until the client disconnects or the service stops."""
    app.state.tokens.demand("read", scope.headers)
    if app.watchers >= MAX_WATCHERS:
        raise HTTPError(503, f"{MAX_WATCHERS} watch already; try again later", ("retry-after", "10"))
    full = app.state.tokens.allows("admin", scope.headers)
    transport = protocol.response_stream(200, list(HEADERS))
    app.watchers += 1
    disconnected = asyncio.ensure_future(protocol.client_disconnect())
    before = Counts(app.counters)
    try:
        while not disconnected.done() and not app.counters.header[c.STOPPING]:
            now = Counts(app.counters)
            event = await _event(app, before, now, full)
            await transport.send_str(f"data: {msgspec.json.encode(event).decode()}\n\n")
            before = now
            await asyncio.wait({disconnected}, timeout=1.0)
    except Exception as error:
        # granian's own error for a client that has disconnected; it has no public base class but RuntimeError
        if not isinstance(error, RuntimeError):
            raise
    finally:
        app.watchers -= 1
        disconnected.cancel()


async def head(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """The headers of the stream."""
    app.state.tokens.demand("read", scope.headers)
    return 200, list(HEADERS), ""


class Counts:
    """All counters at one moment; the difference of two is what happened in between."""

    def __init__(self, counters: c.SharedCounters) -> None:
        self.slots = dict(counters.slots())
        timings = [counters.timing(number) for number in range(c.TIMINGS)]
        self.buckets = [sum(column) for column in zip(*timings, strict=True)][1 : 2 + len(c.BOUNDS)]


async def _event(app: App, before: Counts, now: Counts, full: bool) -> dict[str, Any]:
    rules = []
    for name, counts in now.slots.items():
        rule, _, algorithm = name.rpartition(" ")
        old = before.slots.get(name, [0] * c.SLOT_WORDS)
        allowed, denied, degraded = (counts[word] - old[word] for word in (c.ALLOWED, c.DENIED, c.DEGRADED))
        if rule in app.state.rule_set.rules or rule == THROTTLE_RULE or rule.startswith("envoy/"):
            row = {"rule": rule, "algorithm": algorithm, "allowed": allowed, "denied": denied, "degraded": degraded}
            rules.append(row)
    buckets = [new - old for new, old in zip(now.buckets, before.buckets, strict=True)]
    reports = read_reports(list(app.counters.reports()))
    event = {
        "at": time(),
        "rules": rules,
        "doors": doors.rows(app, reports),
        "hybrid": hybrid_rules.lease_rows(app.counters),
        "latency": {"p50": quantile(buckets, 0.5), "p99": quantile(buckets, 0.99)},
        "store": await _store(app, reports),
        "workers": app.counters.workers(),
        "uptime": max(0, int(time()) - app.counters.header[c.STARTED_AT]),
        "version": headgate.__version__,
    }
    if full:
        event["denied_keys"] = merge_denied(reports)
        event["busiest_keys"] = rows_for_page(merge_busiest(reports), app.state.asks_redis)
    return event


async def _store(app: App, reports: list[WorkerReport]) -> dict[str, Any]:
    if is_per_process(app.store):
        keys = sum(app.counters.gauge(c.KEYS))
        return {"state": "closed", "kind": "memory", "latency": 0.0, "detail": f"{keys:,} keys"}
    numbers = await app.redis.read(app.store)
    if not numbers:
        return {"state": "closed", "kind": store_kind(app), "latency": 0.0, "detail": "shared by all workers"}
    open_now = bool(max(app.counters.gauge(c.BREAKER_OPEN))) or not numbers["up"]
    memory = numbers.get("memory_used_bytes", 0) / (1 << 20)
    detail = "does not answer; on_store_error answers" if open_now else f"{memory:.1f} MiB used"
    latency = numbers.get("response_seconds", 0.0)
    shown = {"state": "open" if open_now else "closed", "kind": store_kind(app), "latency": latency, "detail": detail}
    return shown | {"servers": rows_for_people(app.redis.known_servers(app.store), merge_connections(reports))}


def quantile(buckets: list[int], share: float) -> float:
    """The seconds within which *share* of the checks were decided; linear inside a bucket."""
    wanted, seen = share * sum(buckets), 0
    for i, count in enumerate(buckets):
        if count and seen + count >= wanted:
            low = c.BOUNDS[i - 1] if i else 0.0
            high = c.BOUNDS[i] if i < len(c.BOUNDS) else c.BOUNDS[-1]
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return 0.0


class DeniedKeys:
    """Counts denials by rule and key, within a bound: when it is full, the least denied keys are dropped.

    Every count is halved once a minute. The keys are shown to the operator and are never labels of a metric.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def add(self, rule: str, key: str) -> None:
        entry = rule, key
        count = self.counts.get(entry)
        if count is not None:
            self.counts[entry] = count + 1
            return
        if len(self.counts) >= 2 * KEPT_KEYS:
            self.counts = dict(nlargest(KEPT_KEYS, self.counts.items(), key=itemgetter(1)))
        self.counts[entry] = 1

    def halve(self) -> None:
        self.counts = {entry: count // 2 for entry, count in self.counts.items() if count > 1}

    def top(self) -> list[tuple[str, str, int]]:
        """The most denied keys, for the report that other workers read."""
        found = nlargest(SHOWN_KEYS, self.counts.items(), key=itemgetter(1))
        return [(rule, key, count) for (rule, key), count in found]
