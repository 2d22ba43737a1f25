"""Health: whether the process is alive, whether it should get traffic, and how the store is; and /actuator/info.

Without its store the service still answers by `on_store_error`, so it stays ready: taking every instance out of the
rotation because Redis is down would make the outage worse. When the default rule denies or raises without a store, the
service is not ready; readiness then asks the store itself, as a fresh instance has made no checks that could tell.
"""

from __future__ import annotations

import asyncio
from time import time
from typing import TYPE_CHECKING, Any

import headgate
from headgate.service.redis_figures import rows_for_people
from headgate.service.reports import merge_connections, read_reports
from headgate.service.rsgi import HTTPProtocol, Response, Scope, json_response
from headgate.service.shared_counters import STARTED_AT, STOPPING
from headgate.stores.base import is_per_process, kind_of

if TYPE_CHECKING:
    from headgate.service.app import App

STORE_TIMEOUT = 2.0  # seconds


async def health(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """UP, or DOWN (503) when the store does not answer."""
    if app.state.tokens.allows("read", scope.headers):  # where servers are is not for every client
        store, servers = await asyncio.gather(store_status(app), app.redis.servers(app.store))
    else:
        store, servers = await store_status(app), []
        store.pop("problems", None)  # an error of a connection names its server
    if servers:
        connections = merge_connections(read_reports(list(app.counters.reports())))
        store["servers"] = rows_for_people(servers, connections)
    up = store["status"] == "UP"
    return json_response({"status": store["status"], "components": {"store": store}}, 200 if up else 503)


async def liveness(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """UP as long as the process answers."""
    return json_response({"status": "UP"})


async def readiness(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """UP unless the service is stopping, or would refuse by default because it has no store."""
    if app.counters.header[STOPPING]:
        return json_response({"status": "OUT_OF_SERVICE"}, 503)
    if app.state.rule_set.rules["default"].on_store_error in ("deny", "raise"):
        breaker = app.state.rule_set.get(None, None).limiter.store_health()
        if breaker.state == "open" or (await store_status(app))["status"] != "UP":
            return json_response({"status": "OUT_OF_SERVICE"}, 503)
    return json_response({"status": "UP"})


async def info(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Version, store and rules."""
    app.state.tokens.demand("read", scope.headers)
    return json_response(
        {
            "name": "headgate",
            "version": headgate.__version__,
            "build": "compiled" if headgate.COMPILED else "pure Python",
            "store": store_kind(app),
            "workers": app.counters.workers(),
            "uptimeSeconds": max(0, int(time()) - app.counters.header[STARTED_AT]),
            "listeners": [listener.info() for listener in app.listeners],
            "rules": app.state.rule_set.info(),
            "envoy": app.state.envoy.info() if app.state.envoy else [],
        }
    )


def _camel(connections: dict[str, int]) -> dict[str, int]:
    return {"inUse" if name == "in_use" else name: count for name, count in connections.items()}


def store_kind(app: App) -> str:
    return kind_of(app.store)


async def store_status(app: App) -> dict[str, Any]:
    """The status of the store, asked of the store itself, which asks its server at most once a second."""
    store: Any = app.store
    kind = kind_of(store)
    if is_per_process(store):
        return {"status": "UP", "kind": kind, "keys": len(store)}
    seen = app.state.rule_set.get(None, None).limiter.store_health()
    try:
        async with asyncio.timeout(STORE_TIMEOUT):
            found = await store.ahealth()
    except TimeoutError:
        return {"status": "DOWN", "kind": kind, "reason": "no answer", "breaker": seen.state}
    shown = {"status": "UP" if found.healthy else "DOWN", "kind": kind, "reason": found.reason}
    return (
        shown
        | {
            "breaker": seen.state,
            "latencySeconds": round(found.latency, 6),
            "role": found.role,
            "version": found.version,
            "problems": list(found.problems),
        }
        | ({"connections": _camel(found.connections)} if found.connections else {})
    )
