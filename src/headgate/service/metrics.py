"""Metrics as Prometheus text, made from the shared counters at each scrape: any worker reports the sums of all."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

import headgate
from headgate.service import hybrid_rules
from headgate.service import shared_counters as c
from headgate.service.busy_keys import merge_busiest, read_reports
from headgate.service.rsgi import HTTPProtocol, Response, Scope
from headgate.stores.base import Store, is_per_process

if TYPE_CHECKING:
    from headgate.service.app import App

CONCURRENCY = c.KINDS[-1].upper()
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BY_RULE = {
    "degraded_total": (c.DEGRADED, "Answers that on_store_error gave because the store could not"),
    "shadow_denied_total": (c.SHADOW, "Checks that a shadow rule would have denied"),
    "near_limit_total": (c.NEAR, "Checks that were allowed with a fifth of the limit or less remaining"),
    "unanswered_total": (c.UNANSWERED, "Checks that got 503, because on_store_error is raise"),
}

Sample = tuple[str, str, float]  # suffix of the name, labels, value


async def scrape(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """All metrics."""
    app.state.tokens.demand("read", scope.headers)
    redis = await app.redis.read(app.store)
    text = "".join(_lines(app, redis))
    if application := app.state.settings.application:
        text = with_label(text, f'application="{application}"')
    return 200, [("content-type", CONTENT_TYPE), ("cache-control", "no-store")], text


def _lines(app: App, redis: dict[str, float]) -> Iterator[str]:
    counters = app.counters
    timings = [counters.timing(number) for number in range(c.TIMINGS)]
    yield from family(
        "requests_total",
        "counter",
        "Checks, by algorithm and outcome",
        (("", _outcome(i), sum(timing[1:])) for i, timing in enumerate(timings)),
    )
    yield from family("check_seconds", "histogram", "Time to decide a check", _histograms(timings))
    slots = [(name.rpartition(" "), counts) for name, counts in counters.slots()]
    yield from family(
        "rule_requests_total",
        "counter",
        "Checks, by rule, algorithm and outcome",
        (
            ("", f'rule="{rule}",algorithm="{kind}",allowed="{allowed}"', counts[word])
            for (rule, _, kind), counts in slots
            for allowed, word in (("true", c.ALLOWED), ("false", c.DENIED))
        ),
    )
    for name, (word, text) in BY_RULE.items():
        samples = [("", f'rule="{rule}",algorithm="{kind}"', counts[word]) for (rule, _, kind), counts in slots]
        yield from family(name, "counter", text, samples)
    released = [("", f'rule="{rule}"', counts[c.RELEASED]) for (rule, _, kind), counts in slots if kind == CONCURRENCY]
    if released:
        text = "Leases of rules with concurrency that clients released"
        yield from family("released_total", "counter", text, released)
    errors = sum(counts[c.DEGRADED] + counts[c.UNANSWERED] for _, counts in slots)
    yield from one("store_errors_total", "counter", "Checks that the store did not answer", errors)
    opened = sum(counters.gauge(c.BREAKER_OPENED))
    yield from one(
        "breaker_open", "gauge", "1 while a worker has given the store up", max(counters.gauge(c.BREAKER_OPEN))
    )
    yield from one("breaker_opened_total", "counter", "Times that a worker gave the store up", opened)
    if is_per_process(app.store):
        yield from one("keys", "gauge", "Keys in the memory stores of all workers", sum(counters.gauge(c.KEYS)))
        most = app.state.settings.max_keys * counters.workers()
        yield from one("keys_limit", "gauge", "Keys that the memory stores of all workers hold at most", most)
    yield from one("problems_total", "counter", "Requests answered with a problem", sum(counters.gauge(c.PROBLEMS)))
    yield from _reloads(counters)
    for found in hybrid_rules.families(counters):
        yield from family(*found)
    yield from _redis(redis)
    if redis:
        yield from _connections(counters)
    yield from _busiest(counters)
    yield from one("workers", "gauge", "Worker processes", counters.workers())
    yield from one("start_time_seconds", "gauge", "When the service started", counters.header[c.STARTED_AT])
    build = "compiled" if headgate.COMPILED else "pure"
    labels = f'version="{headgate.__version__}",python="{platform.python_version()}",build="{build}"'
    yield from family("build_info", "gauge", "What is running", [("", labels, 1)])


def _reloads(counters: c.SharedCounters) -> Iterator[str]:
    good, bad = sum(counters.gauge(c.RELOADS)), sum(counters.gauge(c.RELOADS_FAILED))
    results = [("", 'result="success"', good), ("", 'result="failure"', bad)]
    yield from family("config_reloads_total", "counter", "Times that a worker read the settings again", results)
    last_good = min(counters.gauge(c.RELOAD_OK))
    yield from one("config_reload_success", "gauge", "0 while the last file is one that cannot be used", last_good)
    at = max(counters.gauge(c.RELOADED_AT))
    yield from one("config_last_reload_timestamp_seconds", "gauge", "When settings were last taken over", at)


def _redis(numbers: dict[str, float]) -> Iterator[str]:
    for name, (kind, text) in REDIS.items():
        if name in numbers:
            yield from one("redis_" + name, kind, text, numbers[name])


def _connections(counters: c.SharedCounters) -> Iterator[str]:
    states = (("in_use", c.IN_USE), ("idle", c.IDLE))
    samples = [("", f'state="{state}"', float(sum(counters.gauge(gauge)))) for state, gauge in states]
    yield from family("redis_connections", "gauge", "Connections of all workers to Redis", samples)
    waiting = sum(counters.gauge(c.WAITING))
    yield from one("redis_waiting_calls", "gauge", "Checks of all workers that wait for their turn to be sent", waiting)


def _busiest(counters: c.SharedCounters) -> Iterator[str]:
    busiest: dict[str, float] = {}
    for rule, _, rate in merge_busiest(read_reports(list(counters.reports()))):
        busiest[rule] = max(rate, busiest.get(rule, 0.0))
    samples = [("", f'rule="{rule}"', rate) for rule, rate in busiest.items()]
    yield from family("busiest_key_checks", "gauge", "Checks a second of the busiest key of a rule, estimated", samples)


def with_label(text: str, label: str) -> str:
    """Metrics with one more label in every series."""
    text = re.sub(r"^([a-z_]+)\{", rf"\1{{{label},", text, flags=re.MULTILINE)
    return re.sub(r"^([a-z_]+) ", rf"\1{{{label}}} ", text, flags=re.MULTILINE)


def _histograms(timings: list[list[int]]) -> Iterator[Sample]:
    for i, timing in enumerate(timings):
        labels, count = _outcome(i), 0
        for bound, within in zip(c.BOUNDS, timing[1:], strict=False):
            count += within
            yield "_bucket", f'{labels},le="{bound:g}"', count
        count += timing[1 + len(c.BOUNDS)]
        yield "_bucket", f'{labels},le="+Inf"', count
        yield "_sum", labels, timing[0] / 1e9
        yield "_count", labels, count


def _outcome(number: int) -> str:
    """The labels of a timing: denied and allowed in turn, for each algorithm."""
    return f'algorithm="{c.KINDS[number // 2].upper()}",allowed="{"true" if number % 2 else "false"}"'


def family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    name = "rate_limiter_" + name
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for suffix, labels, value in samples:
        yield f"{name}{suffix}{{{labels}}} {value}\n" if labels else f"{name}{suffix} {value}\n"


def one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    return family(name, kind, text, [("", "", value)])


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


class RedisNumbers:
    """The numbers of Redis' own INFO, asked over the connections of the checks, at most once a second."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._at = float("-inf")

    async def read(self, store: Store) -> dict[str, float]:
        """The numbers by metric; none unless the store is a Redis. Of a Cluster they are those of one server."""
        if not hasattr(store, "async_executor"):
            return {}
        if monotonic() - self._at >= 1.0:
            self._last = await _ask(store)
            self._at = monotonic()
        return self._last


async def _ask(store: Any) -> dict[str, float]:
    from redis.exceptions import RedisError

    from headgate.redis.script import LuaScript

    info = LuaScript("return redis.call('INFO')", repeatable=True)
    began = monotonic()
    try:
        reply = await store.async_executor().execute(info, info.call([f"{store.prefix}:{{info}}"]))
    except (RedisError, OSError):
        return {"up": 0}
    numbers: dict[str, float] = {"up": 1, "response_seconds": monotonic() - began}
    for line in (reply.decode() if isinstance(reply, bytes) else str(reply)).splitlines():
        field, _, value = line.partition(":")
        if field in _FIELDS:
            numbers[_FIELDS[field]] = float(value)
    return numbers
