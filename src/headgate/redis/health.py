"""Checks of Redis itself: does it answer, how fast, in which role, and is it set up to keep limits?

A health check uses a connection of its own with a short time-out, never one that checks use, and runs at most once a
second: it must neither wait behind traffic nor add to it. `probe` is what a probe (see `headgate.stores.probe`) asks.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic, time
from typing import Any

import redis.exceptions
from redis.exceptions import BusyLoadingError, ClusterDownError, MasterDownError, RedisError, ResponseError

from headgate.redis.script import pack, text
from headgate.redis.topology import ServerCommand, Topology, Unreached, cluster_is_ok
from headgate.redis.url import Address
from headgate.stores.base import Health

HEALTH_TIMEOUT = 1.0  # seconds for the whole check
VERSIONS = ("headgate_version", "valkey_version", "redis_version")  # in INFO; the first that is there counts
SLOW = 0.05  # seconds for a PING that is slow
SKEW = 1.0  # seconds by which the server's clock may differ from this host's
RUN_SCRIPT = pack("EVAL", "return 1", 0)  # a server may answer PING and hold scripts up
LOST_AFTER = 0.6  # seconds of silence after which a probe gives up a server that may have been replaced


def examine(topology: Topology, check_timeout: float, deadline: float) -> Generator[ServerCommand, Any, Health]:
    """Check the first server that answers, by the deadline; one slower than *check_timeout* seconds is not healthy."""
    problem: Exception | None = None
    known_servers = topology.servers()
    candidates: list[Address | None] = [None, *known_servers] if topology.partitioned else [*known_servers]
    for known in candidates or [None]:
        try:
            # found anew where there are several: a server of the URL may be a replica by now
            address = known or (yield from topology.discover(0, deadline))
            return (yield from _examine(address, topology, check_timeout, deadline))
        except (RedisError, OSError) as error:
            problem = error
    return Health(False, _reason(problem), (f"{type(problem).__name__}: {problem}",))


def _examine(
    address: Address, topology: Topology, check_timeout: float, deadline: float
) -> Generator[ServerCommand, Any, Health]:
    yield ServerCommand(address, pack("PING"), deadline)  # connects
    begun = monotonic()
    try:
        yield ServerCommand(address, pack("PING"), deadline)
        latency = monotonic() - begun
        info = info_fields(text((yield ServerCommand(address, pack("INFO"), deadline))))
        seconds, micros = yield ServerCommand(address, pack("TIME"), deadline)
        skew = int(seconds) + int(micros) / 1_000_000 - time()
        if topology.readiness:
            yield ServerCommand(address, topology.readiness, deadline)
        down = topology.partitioned and not cluster_is_ok(
            (yield ServerCommand(address, pack("CLUSTER", "INFO"), deadline))
        )
    except (TimeoutError, redis.exceptions.TimeoutError):
        problem = f"it answers, but not everything within {HEALTH_TIMEOUT:.0f} s"
        return Health(False, "slow", (problem,), monotonic() - begun)
    role, version = info.get("role", ""), next((info[name] for name in VERSIONS if name in info), "")
    problems = []
    reason = "ok"
    if down:
        reason = "cluster down"
    elif info.get("loading") == "1":
        reason = "loading"
    elif role != "master":
        reason = "read-only"
    elif _out_of_memory(info):
        reason = "out of memory"
    elif latency > check_timeout:
        reason = "slow"
    if latency > SLOW:
        problems.append(f"slow: a PING took {1000 * latency:.0f} ms")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction" and info.get("maxmemory") != "0":
        problems.append(f"maxmemory-policy is {policy}: it may forget limits that are in use; set noeviction")
    if abs(skew) > SKEW:
        problems.append(f"its clock is {skew:+.1f} s off this host's: windows start by the server's")
    return Health(reason == "ok", reason, tuple(problems), latency, role, version)


def probe(topology: Topology, slot: int, check_timeout: float, deadline: float) -> Generator[ServerCommand, Any, None]:
    """Return if *slot* can be asked for in the *check_timeout* seconds that a check has; raise if not."""
    topology.mark_stale()
    address = yield from topology.discover(slot, deadline)
    if topology.has_other_servers:  # the next probe finds the primary that has replaced a silent one
        deadline = min(deadline, monotonic() + max(check_timeout, LOST_AFTER))
    yield ServerCommand(address, pack("PING"), deadline)  # connects, which may take longer
    begun = monotonic()
    yield ServerCommand(address, topology.readiness or RUN_SCRIPT, deadline)
    if (took := monotonic() - begun) > check_timeout:
        raise redis.exceptions.TimeoutError(f"it answers, but in {took:.2f} s, and a check has {check_timeout} s")
    if topology.partitioned and not cluster_is_ok((yield ServerCommand(address, pack("CLUSTER", "INFO"), deadline))):
        raise ClusterDownError("CLUSTERDOWN as the server itself says")


def info_fields(info: str) -> dict[str, str]:
    """The fields of a server's INFO by name."""
    lines = (line.partition(":") for line in info.splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in lines}


def _out_of_memory(info: dict[str, str]) -> bool:
    most = int(info.get("maxmemory", 0))
    return 0 < most <= int(info.get("used_memory", 0)) and info.get("maxmemory_policy", "") == "noeviction"


def _reason(error: Exception | None) -> str:
    error = error.__cause__ if isinstance(error, Unreached) and isinstance(error.__cause__, Exception) else error
    if isinstance(error, BusyLoadingError):
        return "loading"
    if isinstance(error, ClusterDownError) and not isinstance(error, MasterDownError):
        return "cluster down"
    if isinstance(error, ResponseError) and not isinstance(error, MasterDownError):
        return "refuses"
    return "down"
