"""Health: is the process alive, should it get traffic, how is the store; and what is running here.

Without its store the service still answers, by `on_store_error`, so it stays ready: to take every instance out of the
rotation because Redis is away would turn an outage of Redis into one of everything. Where the default is to refuse, it
is not ready then, and asks the store itself to know: a fresh instance has made no checks by which it could tell.
"""

from __future__ import annotations

import asyncio
from time import time
from typing import TYPE_CHECKING, Any

import headgate
from headgate.service.board import STARTED_AT, STOPPING
from headgate.service.http import Exchange, Reply, Scope, as_json
from headgate.service.rules import info as rules_info
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.service.app import App

PATIENCE = 2.0  # seconds for the store to say how it is


async def health(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """UP, or DOWN (503) when the store does not answer."""
    store = await examine(app)
    up = store["status"] == "UP"
    return as_json({"status": store["status"], "components": {"store": store}}, 200 if up else 503)


async def liveness(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """UP as long as the process answers."""
    return as_json({"status": "UP"})


async def readiness(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """UP unless the service is stopping, or would refuse by default because it has no store."""
    if app.board.header[STOPPING]:
        return as_json({"status": "OUT_OF_SERVICE"}, 503)
    if app.state.book.rules["default"].on_store_error in ("deny", "raise"):
        breaker = app.state.book.lane(None, None).limiter.store_health()
        if breaker.state == "open" or (await examine(app))["status"] != "UP":
            return as_json({"status": "OUT_OF_SERVICE"}, 503)
    return as_json({"status": "UP"})


async def info(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """Version, store and rules."""
    app.state.tokens.demand("read", scope.headers)
    return as_json(
        {
            "name": "headgate",
            "version": headgate.__version__,
            "build": "compiled" if headgate.COMPILED else "pure Python",
            "store": kind(app),
            "workers": app.board.workers(),
            "uptimeSeconds": max(0, int(time()) - app.board.header[STARTED_AT]),
            "rules": rules_info(app.state.book),
        }
    )


def kind(app: App) -> str:
    return "memory" if isinstance(app.store, MemoryStore) else "redis"


async def examine(app: App) -> dict[str, Any]:
    """How the store is, asked of the store itself, which looks at most once a second."""
    store: Any = app.store
    if isinstance(store, MemoryStore):
        return {"status": "UP", "kind": "memory", "keys": len(store)}
    seen = app.state.book.lane(None, None).limiter.store_health()
    try:
        async with asyncio.timeout(PATIENCE):
            found = await store.ahealth()
    except TimeoutError:
        return {"status": "DOWN", "kind": "redis", "reason": "no answer", "breaker": seen.state}
    shown = {"status": "UP" if found.healthy else "DOWN", "kind": "redis", "reason": found.reason}
    return shown | {
        "breaker": seen.state,
        "latencySeconds": round(found.latency, 6),
        "role": found.role,
        "version": found.version,
        "problems": list(found.problems),
    }
