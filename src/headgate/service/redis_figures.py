"""The figures of Redis' own INFO, for metrics, health and the live page: of the server of one key, and of each server.

Both are asked at most once a second, whatever the number of readers, and take at most `LOOK_TIMEOUT` seconds. A server
that does not answer in that time is down; the figures of the others are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any, NamedTuple

from headgate.service import shared_counters as c
from headgate.service.hybrid_rules import Family
from headgate.service.reports import ConnectionCounts
from headgate.stores.base import Store

LOOK_TIMEOUT = 2.0  # seconds
FRESH = 1.0  # seconds for which an answer is used again

REDIS = {
    "up": ("gauge", "1 when Redis answered the last look at it"),
    "response_seconds": ("gauge", "Time that Redis took to answer the last look at it"),
    "expired_keys_total": ("counter", "Keys that Redis let expire"),
    "evicted_keys_total": ("counter", "Keys that Redis evicted: limits that were forgotten"),
    "memory_used_bytes": ("gauge", "Memory that Redis uses"),
    "memory_max_bytes": ("gauge", "Memory that Redis may use, 0 for any"),
    "connected_clients": ("gauge", "Connections to Redis"),
    "commands_total": ("counter", "Commands that Redis has run"),
    "network_input_bytes_total": ("counter", "Bytes that Redis has read"),
    "network_output_bytes_total": ("counter", "Bytes that Redis has written"),
}
_FIELDS = {
    "expired_keys": "expired_keys_total",
    "evicted_keys": "evicted_keys_total",
    "used_memory": "memory_used_bytes",
    "maxmemory": "memory_max_bytes",
    "connected_clients": "connected_clients",
    "total_commands_processed": "commands_total",
    "total_net_input_bytes": "network_input_bytes_total",
    "total_net_output_bytes": "network_output_bytes_total",
}


class ServerRow(NamedTuple):
    """One server: its numbers by metric, and commands a second as it counts them itself."""

    server: str  # host:port
    numbers: dict[str, float]
    per_second: float
    problem: str


class RedisFigures:
    """Reads the figures of a store; there are none unless the store is a Redis."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._at = float("-inf")
        self._rows: list[ServerRow] = []
        self._rows_at = float("-inf")
        self._look: asyncio.Task[None] | None = None

    async def read(self, store: Store) -> dict[str, float]:
        """The numbers by metric, over the connections of the checks. Of a Cluster they are those of one server."""
        if not hasattr(store, "async_executor"):
            return {}
        if monotonic() - self._at >= FRESH:
            self._last = await _ask(store)
            self._at = monotonic()
        return self._last

    async def servers(self, store: Store) -> list[ServerRow]:
        """A row for each server that decides."""
        if look := self._refresh(store):
            await asyncio.shield(look)
        return self._rows

    def known_servers(self, store: Store) -> list[ServerRow]:
        """The rows of the last look, for readers that do not wait; a new look begins when they are old."""
        self._refresh(store)
        return self._rows

    def _refresh(self, store: Store) -> asyncio.Task[None] | None:
        """The look that is under way, begun if the rows are old."""
        if self._look is None and monotonic() - self._rows_at >= FRESH and hasattr(store, "aservers"):
            self._look = asyncio.ensure_future(self._look_at(store))
        return self._look

    async def _look_at(self, store: Any) -> None:
        try:
            self._rows = [_row(found) for found in await store.aservers(LOOK_TIMEOUT)]
        finally:
            self._rows_at, self._look = monotonic(), None

    async def aclose(self) -> None:
        """End a look that is under way."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)


async def _ask(store: Any) -> dict[str, float]:
    from redis.exceptions import RedisError

    from headgate.redis.health import info_fields
    from headgate.redis.script import LuaScript, text

    info = LuaScript("return redis.call('INFO')", repeatable=True)
    began = monotonic()
    try:
        async with asyncio.timeout(LOOK_TIMEOUT):
            reply = await store.async_executor().execute(info, info.call([f"{store.prefix}:{{info}}"]))
    except (RedisError, OSError):
        return {"up": 0}
    return _numbers(info_fields(text(reply)), monotonic() - began)


def _numbers(info: dict[str, str], seconds: float) -> dict[str, float]:
    found = {name: float(info[field]) for field, name in _FIELDS.items() if field in info}
    return {"up": 1, "response_seconds": seconds, **found}


def _row(found: Any) -> ServerRow:
    numbers = _numbers(found.info, found.seconds) if found.up else {"up": 0.0}
    return ServerRow(found.server, numbers, float(found.info.get("instantaneous_ops_per_sec", 0)), found.problem)


def families(
    redis: dict[str, float],
    servers: list[ServerRow],
    counters: c.SharedCounters,
    connections: dict[str, ConnectionCounts],
) -> Iterator[Family]:
    """The metrics of Redis; none unless the store is one."""
    for name, (kind, text) in REDIS.items():
        if name in redis:
            yield "redis_" + name, kind, text, [("", "", redis[name])]
    if not redis:
        return
    states = (("in_use", c.IN_USE), ("idle", c.IDLE))
    samples = [("", f'state="{state}"', float(sum(counters.gauge(gauge)))) for state, gauge in states]
    yield "redis_connections", "gauge", "Connections of all workers to Redis", samples
    waiting, text = float(sum(counters.gauge(c.WAITING))), "Checks of all workers that wait for their turn to be sent"
    yield "redis_waiting_calls", "gauge", text, [("", "", waiting)]
    for name, (kind, text) in REDIS.items():
        rows = [("", _label(row.server), row.numbers[name]) for row in servers if name in row.numbers]
        yield "redis_server_" + name, kind, f"{text}, by server", rows
    counts = [(_label(row.server), connections.get(row.server, (0, 0, 0))) for row in servers]
    samples = [
        ("", f'{label},state="{state}"', float(count))
        for label, (in_use, idle, _) in counts
        for state, count in (("in_use", in_use), ("idle", idle))
    ]
    yield "redis_server_connections", "gauge", "Connections of all workers to each server", samples
    samples = [("", label, float(waiting)) for label, (_, _, waiting) in counts]
    yield "redis_server_waiting_calls", "gauge", "Checks of all workers that wait to be sent to each server", samples


def _label(server: str) -> str:
    """The label of a server; its name may come from a Cluster's own map."""
    escaped = server.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'server="{escaped}"'


def rows_for_people(servers: list[ServerRow], connections: dict[str, ConnectionCounts]) -> list[dict[str, Any]]:
    """The servers as health and the live page show them."""
    shown = []
    for row in servers:
        numbers, (in_use, idle, waiting) = row.numbers, connections.get(row.server, (0, 0, 0))
        one: dict[str, Any] = {"server": row.server, "status": "UP" if numbers["up"] else "DOWN"}
        if numbers["up"]:
            one |= {
                "responseSeconds": round(numbers["response_seconds"], 6),
                "memoryUsedBytes": int(numbers.get("memory_used_bytes", 0)),
                "memoryMaxBytes": int(numbers.get("memory_max_bytes", 0)),
                "connectedClients": int(numbers.get("connected_clients", 0)),
                "commandsPerSecond": int(row.per_second),
                "evictedKeys": int(numbers.get("evicted_keys_total", 0)),
            }
        else:
            one["problem"] = row.problem
        shown.append(one | {"connections": {"inUse": in_use, "idle": idle, "waiting": waiting}})
    return shown
