"""What happens now, as server-sent events: one a second, of all workers together."""

from __future__ import annotations

import asyncio
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

import headgate
from headgate.service import board as b
from headgate.service.denied import merged
from headgate.service.health import kind
from headgate.service.http import Exchange, Refusal, Reply, Scope
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.service.app import App

MAX_WATCHERS = 100  # in one worker
HEADERS = [("content-type", "text/event-stream"), ("cache-control", "no-store"), ("x-accel-buffering", "no")]


async def stream(app: App, scope: Scope, exchange: Exchange) -> None:
    """Send an event now and each second until the client leaves or the service stops."""
    app.state.tokens.demand("read", scope.headers)
    if app.watchers >= MAX_WATCHERS:
        raise Refusal(503, f"{MAX_WATCHERS} watch already; try again later", ("retry-after", "10"))
    full = app.state.tokens.allows("admin", scope.headers)
    transport = exchange.response_stream(200, list(HEADERS))
    app.watchers += 1
    gone = asyncio.ensure_future(exchange.client_disconnect())
    before = Counts(app.board)
    try:
        while not gone.done() and not app.board.header[b.STOPPING]:
            now = Counts(app.board)
            event = await _event(app, before, now, full)
            await transport.send_str(f"data: {msgspec.json.encode(event).decode()}\n\n")
            before = now
            await asyncio.wait({gone}, timeout=1.0)
    except Exception as error:
        # granian's own error for a client that is gone; it has no public base class but RuntimeError
        if not isinstance(error, RuntimeError):
            raise
    finally:
        app.watchers -= 1
        gone.cancel()


async def head(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """The head alone: there is no end to the rest."""
    app.state.tokens.demand("read", scope.headers)
    return 200, list(HEADERS), ""


class Counts:
    """All counters at one moment."""

    def __init__(self, board: b.Board) -> None:
        self.slots = dict(board.slots())
        timings = [board.timing(number) for number in range(b.TIMINGS)]
        self.buckets = [sum(column) for column in zip(*timings, strict=True)][1 : 2 + len(b.BOUNDS)]


async def _event(app: App, before: Counts, now: Counts, full: bool) -> dict[str, Any]:
    rules = []
    for name, counts in now.slots.items():
        rule, _, algorithm = name.rpartition(" ")
        old = before.slots.get(name, [0] * b.SLOT_WORDS)
        allowed, denied, degraded = (counts[word] - old[word] for word in (b.ALLOWED, b.DENIED, b.DEGRADED))
        if rule in app.state.book.rules:
            row = {"rule": rule, "algorithm": algorithm, "allowed": allowed, "denied": denied, "degraded": degraded}
            rules.append(row)
    buckets = [new - old for new, old in zip(now.buckets, before.buckets, strict=True)]
    event = {
        "at": time(),
        "rules": rules,
        "latency": {"p50": quantile(buckets, 0.5), "p99": quantile(buckets, 0.99)},
        "store": await _store(app),
        "workers": app.board.workers(),
        "uptime": max(0, int(time()) - app.board.header[b.STARTED_AT]),
        "version": headgate.__version__,
    }
    if full:
        event["denied_keys"] = merged(list(app.board.bodies()))
    return event


async def _store(app: App) -> dict[str, Any]:
    if isinstance(app.store, MemoryStore):
        keys = sum(app.board.gauge(b.KEYS))
        return {"state": "closed", "kind": "memory", "latency": 0.0, "detail": f"{keys:,} keys"}
    numbers = await app.redis.read(app.store)
    open_now = bool(max(app.board.gauge(b.BREAKER_OPEN))) or not numbers["up"]
    memory = numbers.get("memory_used_bytes", 0) / (1 << 20)
    detail = "does not answer; on_store_error answers" if open_now else f"{memory:.1f} MiB used"
    latency = numbers.get("response_seconds", 0.0)
    return {"state": "open" if open_now else "closed", "kind": kind(app), "latency": latency, "detail": detail}


def quantile(buckets: list[int], share: float) -> float:
    """The seconds within which *share* of the checks were decided, straight between the bounds of its bucket."""
    wanted, seen = share * sum(buckets), 0
    for i, count in enumerate(buckets):
        if count and seen + count >= wanted:
            low = b.BOUNDS[i - 1] if i else 0.0
            high = b.BOUNDS[i] if i < len(b.BOUNDS) else b.BOUNDS[-1]
            return low + (high - low) * (wanted - seen) / count
        seen += count
    return 0.0
