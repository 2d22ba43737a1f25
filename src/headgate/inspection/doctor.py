"""Whether a store is fit for limits: what it says of itself, and what can be tried.

Every finding is one of ok, warning, problem and unknown. Clouds hide settings, and then "unknown" is the result. Rights
are tried with a limiter and a semaphore of the doctor's own, whose keys are deleted in the end or expire in an hour.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from statistics import quantiles
from typing import Any, Literal, NamedTuple

from headgate.coordination import Semaphore
from headgate.errors import HeadgateError
from headgate.limiter import Limiter
from headgate.stores.base import Health, Store, open_store

FindingState = Literal["ok", "warning", "problem", "unknown"]

CALLS = 200  # whose latency is measured
SLOW, TOO_SLOW = 0.02, 0.08  # seconds of the 99th percentile; a check has 0.08 s if the URL says nothing else
SKEW = 1.0  # seconds that the server's clock may differ from this host's
OLDEST = (6, 2)  # of Redis
FULL, ALMOST_FULL = 0.95, 0.8  # of maxmemory


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    state: FindingState
    detail: str


def examine(url: str) -> list[Finding]:
    """All findings about the store at *url*; raises `ValueError` if that is no store."""
    store, _ = open_store(url, None, {})
    try:
        found = list(_rights(store))
        if found[0].state != "problem":
            found += _latency(store)
        found += _of_health(store)
        if hasattr(store, "aservers"):
            found += _of_servers(store)
        return found
    finally:
        store.close()


def worst(findings: list[Finding]) -> FindingState:
    """The worst state of all; unknown is no worse than ok."""
    states = {finding.state for finding in findings}
    return "problem" if "problem" in states else "warning" if "warning" in states else "ok"


def _rights(store: Store) -> Iterator[Finding]:
    """Try all that a limiter does, then what a semaphore does, where the store has such."""
    key = f"doctor:{secrets.token_hex(8)}"
    limiter = Limiter("10/second", store=store, name="doctor", on_store_error="raise")
    done = "try_acquire"
    try:
        limiter.try_acquire(key, 2)
        done = "peek"
        limiter.peek(key)
        done = "refund"
        limiter.refund(key)
        done = "reset"
        limiter.reset(key)
    except HeadgateError as error:
        yield Finding("limiters", "problem", f"{done} failed: {_cause(error)}")
        return
    yield Finding("limiters", "ok", "try_acquire, peek, refund and reset work")
    try:
        with Semaphore(key, limit=1, store=store, lease=5.0).acquire(timeout=1.0):
            pass
    except (HeadgateError, OSError) as error:
        yield Finding("locks and queues", "problem", f"a semaphore cannot be acquired: {_cause(error)}")
    except (TypeError, ValueError) as error:
        yield Finding("locks and queues", "unknown", f"not for this store: {error}")
    else:
        yield Finding("locks and queues", "ok", "a semaphore was acquired and released")


def _latency(store: Store) -> Iterator[Finding]:
    limiter = Limiter("1000000/second", store=store, name="doctor", on_store_error="raise")
    key, took = f"doctor:{secrets.token_hex(8)}", []
    try:
        for _ in range(CALLS):
            begun = time.perf_counter()
            limiter.try_acquire(key)
            took.append(time.perf_counter() - begun)
        limiter.reset(key)
    except HeadgateError as error:
        yield Finding("latency", "problem", f"call {len(took) + 1} of {CALLS} failed: {_cause(error)}")
        return
    cuts = quantiles(took, n=100)
    state: FindingState = "ok" if cuts[98] < SLOW else "warning" if cuts[98] < TOO_SLOW else "problem"
    yield Finding("latency", state, f"p50 {cuts[49] * 1000:.3f} ms, p99 {cuts[98] * 1000:.3f} ms of {CALLS} checks")


def _of_health(store: Store) -> Iterator[Finding]:
    ask = getattr(store, "health", None)
    if ask is None:
        yield Finding("health", "unknown", "this store has no server")
        return
    health: Health = ask()
    yield Finding("health", "ok" if health.healthy else "problem", health.reason)
    for problem in health.problems:
        yield Finding("health", "warning", problem)


def _of_servers(store: Any) -> list[Finding]:
    async def ask() -> Any:
        try:
            return await store.aservers(5.0)
        finally:
            await store.aclose()

    found: list[Finding] = []
    for server in asyncio.run(ask()):
        if not server.up:
            found.append(Finding(server.server, "problem", server.problem))
            continue
        found += [
            Finding(f"{server.server} {check}", state, detail)
            for check, state, detail in of_info(server.info, time.time())
        ]
    return found


def of_info(info: dict[str, str], now: float) -> Iterator[Finding]:
    """What the INFO of a Redis server says; fields that it hides are unknown."""
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
    role = info.get("role", "")
    replicas = info.get("connected_slaves")
    if not role or replicas is None:
        yield Finding("replicas", "unknown", "it does not say")
    elif role != "master":
        yield Finding("replicas", "problem", "it is a replica, which takes no writes")
    else:
        yield Finding("replicas", "ok", f"{replicas}; without one an outage of the server is one of the limits")
    if "server_time_usec" not in info:
        yield Finding("clock", "unknown", "it does not say")
    else:
        skew = int(info["server_time_usec"]) / 1_000_000 - now
        yield Finding("clock", "ok" if abs(skew) <= SKEW else "warning", f"{skew:+.3f} s beside this host's")


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


def _cause(error: BaseException) -> str:
    cause = str(error.__cause__ or "")
    return str(error) if cause in str(error) else f"{error} ({cause})"
