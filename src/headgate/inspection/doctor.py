"""Whether a store is fit for limits: what can be tried, and what it says of itself.

Every finding is one of ok, warning, problem and unknown. Clouds hide settings, and then "unknown" is the result. Rights
are tried with a limiter and a semaphore of the doctor's own, whose keys are deleted in the end or expire in an hour.
On a Cluster they are tried at each server that decides, since each has users of its own. In the directory of a shared
store, they are tried in a folder of the doctor's own, which is removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import quantiles
from typing import Any

from headgate.coordination import Semaphore
from headgate.errors import HeadgateError
from headgate.inspection.finding import Finding, FindingState
from headgate.limiter import Limiter
from headgate.stores.base import Agree, Health, Store, open_store, scheme_of

CALLS = 200  # whose latency is measured, for each server
SLOW, TOO_SLOW = 0.02, 0.08  # seconds of the 99th percentile; a check has 0.08 s if the URL says nothing else
KEYS_TRIED = 1000  # until one of them lies at each server of a Cluster


def examine(*urls: str) -> list[Finding]:
    """All findings about the store at *urls*, several of which decide together by majority.

    Raises `ValueError` if one of them is no store.
    """
    with ExitStack() as opened:
        stores: list[Store] = []
        found: list[Finding] = []
        for url in urls:
            store, first = _open(url, opened)
            name = f"{url if store is None or first else _name(store)} " if len(urls) > 1 else ""
            if store is not None:
                stores.append(store)
                first += _examine(store)
            found += [Finding(f"{name}{check}", state, detail) for check, state, detail in first]
        if 1 < len(urls) == len(stores):
            found += _together(stores)
        elif len(urls) > 1:
            found.append(Finding("together", "unknown", "not tried, as one of the stores is not there"))
        return found


def _open(url: str, opened: ExitStack) -> tuple[Store | None, list[Finding]]:
    """The store of *url* if there is one, and what is to be said before it is tried."""
    if scheme_of(url) == "shared://":
        from headgate.inspection.shared_directory import trial_store

        trial, finding = opened.enter_context(trial_store(url))
        return trial, [finding]
    store = open_store(url, None, {})[0]
    opened.callback(store.close)
    return store, []


def worst(findings: list[Finding]) -> FindingState:
    """The worst state of all; unknown is no worse than ok."""
    states = {finding.state for finding in findings}
    return "problem" if "problem" in states else "warning" if "warning" in states else "ok"


def _examine(store: Store) -> Iterator[Finding]:
    keys = _key_of_each_server(store)
    rights = [finding for server, key in keys.items() for finding in _rights(store, key, server)]
    works = all(finding.state != "problem" for finding in rights)
    health = store.health() if hasattr(store, "health") else None
    down = not works and health is not None and health.reason == "down"
    yield from rights
    if works:
        yield _coordination(store)
        for server, key in keys.items():
            yield from _latency(store, key, server)
    if down:  # the cause was told, and is the same for all of these
        missing = "locks and queues, latency, health and settings: not looked at, as the store does not answer"
        yield Finding("the rest", "unknown", missing)
    else:
        yield from _of_health(health)
    if hasattr(store, "aservers"):
        from headgate.inspection.redis_server import of_servers

        yield from of_servers(store, down)  # type: ignore[arg-type]  # only a RedisStore has aservers
    if getattr(store, "kind", "") == "postgresql" and not down:
        from headgate.inspection.postgresql_server import of_postgresql

        yield from of_postgresql(store)  # type: ignore[arg-type]  # only a PostgreSQLStore is of that kind


def _key_of_each_server(store: Any) -> dict[str, str]:
    """A new key that lies at each server, by the name of the server; one key without a name where there is only one."""
    mark = f"doctor:{secrets.token_hex(8)}"
    if not getattr(store, "partitioned", False):
        return {"": mark}
    from headgate.redis.servers import server_name

    executor = store.sync_executor()
    try:
        executor.warm_up(1)  # finds the servers
    except Exception:  # trying the limiter says why
        return {"": mark}
    found: dict[str, str] = {}
    for number in range(KEYS_TRIED):
        address = executor.server_of(store.partition(f"{mark}:{number}"))
        if address is not None:
            found.setdefault(server_name(address), f"{mark}:{number}")
    return found or {"": mark}


def _rights(store: Store, key: str, server: str) -> Iterator[Finding]:
    """Try all that a limiter does."""
    limiter = Limiter("10/second", store=store, name="doctor", on_store_error="raise")
    check, done = f"{server} limiters".strip(), "try_acquire"
    try:
        limiter.try_acquire(key, 2)
        done = "peek"
        limiter.peek(key)
        done = "refund"
        limiter.refund(key)
        done = "reset"
        limiter.reset(key)
    except HeadgateError as error:
        yield Finding(check, "problem", f"{done} failed: {_cause(error)}")
        return
    yield Finding(check, "ok", "try_acquire, peek, refund and reset work")


def _coordination(store: Store) -> Finding:
    """Try what a semaphore does, where the store has such."""
    try:
        with Semaphore(f"doctor:{secrets.token_hex(8)}", limit=1, store=store, lease=5.0).acquire(timeout=1.0):
            return Finding("locks and queues", "ok", "a semaphore was acquired and released")
    except (HeadgateError, OSError) as error:
        return Finding("locks and queues", "problem", f"a semaphore cannot be acquired: {_cause(error)}")
    except (TypeError, ValueError):
        return Finding("locks and queues", "unknown", "this store is for limiters alone; locks need Redis or memory")


def _latency(store: Store, key: str, server: str) -> Iterator[Finding]:
    limiter = Limiter("1000000/second", store=store, name="doctor", on_store_error="raise")
    check, took = f"{server} latency".strip(), []
    try:
        for _ in range(CALLS):
            begun = time.perf_counter()
            limiter.try_acquire(key)
            took.append(time.perf_counter() - begun)
        limiter.reset(key)
    except HeadgateError as error:
        yield Finding(check, "problem", f"call {len(took) + 1} of {CALLS} failed: {_cause(error)}")
        return
    cuts = quantiles(took, n=100)
    state: FindingState = "ok" if cuts[98] < SLOW else "warning" if cuts[98] < TOO_SLOW else "problem"
    yield Finding(check, state, f"p50 {cuts[49] * 1000:.3f} ms, p99 {cuts[98] * 1000:.3f} ms of {CALLS} checks")


def _of_health(health: Health | None) -> Iterator[Finding]:
    if health is None:
        yield Finding("health", "unknown", "this store has no server")
    elif not health.healthy:
        yield Finding("health", "problem", "; ".join([health.reason, *health.problems]))
    else:
        yield Finding("health", "ok", health.reason)
        for problem in health.problems:
            yield Finding("health", "warning", problem)


def _together(stores: list[Store]) -> Iterator[Finding]:
    """Whether the stores decide as one: a majority of them, or of two the first that answers."""
    agree: Agree = "majority" if len(stores) > 2 else "first"
    if len(stores) == 2:
        yield Finding("majority", "warning", "of two stores it needs both: name three, or use agree='first'")
    try:
        store, _ = open_store(stores, None, {}, agree)
    except ValueError as error:
        yield Finding(agree, "problem", str(error))
        return
    yield from _rights(store, f"doctor:{secrets.token_hex(8)}", agree)


def _name(store: Store) -> str:
    return str(getattr(store, "display_name", None) or store)


def _cause(error: BaseException) -> str:
    cause = str(error.__cause__ or "")
    return str(error) if cause in str(error) else f"{error} ({cause})"
