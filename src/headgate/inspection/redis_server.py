"""What a Redis or Valkey server says of itself, as findings, and whether its Sentinels could replace it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

from headgate.inspection.finding import Finding, FindingState, clock_finding, connections_finding

if TYPE_CHECKING:
    from headgate.stores.redis import RedisStore

OLDEST = (6, 2)
FULL, ALMOST_FULL = 0.95, 0.8  # of maxmemory
TIME_LIMIT = 5.0  # seconds to hear all servers


def of_servers(store: RedisStore, down: bool = False) -> Iterator[Finding]:
    """Every server that decides, then every Sentinel. Of a store that is *down*, those that can tell more than that."""

    async def ask() -> Any:
        try:
            return await store.aservers(TIME_LIMIT)
        finally:
            await store.aclose()

    alone = store.url is None or store.url.kind == "single"
    for server in () if alone and down else asyncio.run(ask()):
        if not server.up:
            yield Finding(server.server, "problem", server.problem)
            continue
        name = "" if alone else f"{server.server} "
        for check, state, detail in of_info(server.info, time.time(), alone):
            yield Finding(f"{name}{check}", state, detail)
    if store.url is not None and store.url.kind == "sentinel":
        yield from _of_sentinels(store)


def _of_sentinels(store: RedisStore) -> Iterator[Finding]:
    """Ask each Sentinel whether enough of them can agree on another primary."""
    from headgate.redis.script import pack, text
    from headgate.redis.servers import server_name
    from headgate.redis.topology import ServerCommand

    assert store.url is not None
    question = pack("SENTINEL", "CKQUORUM", store.url.service)
    for sentinel in store.url.hosts:
        try:
            reply = store.sync_executor().answer(ServerCommand(sentinel, question, monotonic() + TIME_LIMIT))
        except Exception as error:  # a Sentinel that is away, or says NOQUORUM, or hides the command: say so
            refused = "unknown" in str(error).lower() or "NOPERM" in str(error)
            yield Finding(f"Sentinel {server_name(sentinel)}", "unknown" if refused else "warning", str(error))
        else:
            yield Finding(f"Sentinel {server_name(sentinel)}", "ok", text(reply).removeprefix("OK "))


def of_info(info: dict[str, str], now: float, alone: bool = True) -> Iterator[Finding]:
    """What INFO says; fields that the server hides are unknown. *alone*: no other server could take over anyway."""
    version = info.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if not numbers:
        yield Finding("version", "unknown", "it does not say")
    else:
        yield Finding("version", "ok" if numbers >= OLDEST else "problem", f"{name}; 6.2 or newer is needed")
    yield _eviction(info)
    yield _persistence(info)
    yield _memory(info)
    yield _replicas(info, alone)
    if "connected_clients" not in info or "maxclients" not in info:
        yield Finding("connections", "unknown", "it does not say")
    else:
        yield connections_finding(int(info["connected_clients"]), int(info["maxclients"]))
    if "server_time_usec" not in info:
        yield Finding("clock", "unknown", "it does not say")
    else:
        yield clock_finding(int(info["server_time_usec"]) / 1_000_000 - now)


def _replicas(info: dict[str, str], alone: bool) -> Finding:
    role, replicas = info.get("role", ""), info.get("connected_slaves")
    if not role or replicas is None:
        return Finding("replicas", "unknown", "it does not say")
    if role != "master":
        return Finding("replicas", "problem", "it is a replica, which takes no writes")
    if replicas == "0" and not alone:
        return Finding("replicas", "warning", "0: no other server can take over")
    return Finding("replicas", "ok", f"{replicas}; without one an outage of the server is one of the limits")


def _eviction(info: dict[str, str]) -> Finding:
    policy = info.get("maxmemory_policy")
    if policy is None:
        return Finding("eviction", "unknown", "it does not say")
    if policy == "noeviction" or info.get("maxmemory") == "0":
        return Finding("eviction", "ok", f"{policy}, maxmemory {info.get('maxmemory_human', 'unknown')}")
    return Finding("eviction", "warning", f"{policy}: it may forget limits that are in use; set noeviction")


def _persistence(info: dict[str, str]) -> Finding:
    if "aof_enabled" not in info:
        return Finding("persistence", "unknown", "it does not say")
    if info["aof_enabled"] == "1":
        state: FindingState = "ok" if info.get("aof_last_write_status", "ok") == "ok" else "problem"
        return Finding("persistence", state, f"append-only file, last write {info.get('aof_last_write_status', 'ok')}")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        return Finding("persistence", "problem", "the last snapshot failed, after which Redis may refuse writes")
    return Finding("persistence", "warning", "no append-only file: a restart loses what the last snapshot has not")


def _memory(info: dict[str, str]) -> Finding:
    if "used_memory" not in info or "maxmemory" not in info:
        return Finding("memory", "unknown", "it does not say")
    used, most = int(info["used_memory"]), int(info["maxmemory"])
    if not most:
        return Finding("memory", "ok", f"{used:,} bytes in use, no maxmemory")
    share = used / most
    state: FindingState = "problem" if share > FULL else "warning" if share > ALMOST_FULL else "ok"
    return Finding("memory", state, f"{used:,} of {most:,} bytes in use ({share:.0%})")
