"""Metrics as Prometheus text, made from the shared counters at each scrape: any worker reports the sums of all."""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import headgate
from headgate.service import doors, hybrid_rules, redis_figures
from headgate.service import shared_counters as c
from headgate.service.redis_figures import ServerRow
from headgate.service.reports import WorkerReport, merge_busiest, merge_connections, read_reports
from headgate.service.rsgi import HTTPProtocol, Response, Scope
from headgate.stores.base import is_per_process

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
    redis, servers = await asyncio.gather(app.redis.read(app.store), app.redis.servers(app.store))
    text = "".join(_lines(app, redis, servers))
    if application := app.state.settings.application:
        text = with_label(text, f'application="{application}"')
    return 200, [("content-type", CONTENT_TYPE), ("cache-control", "no-store")], text


def _lines(app: App, redis: dict[str, float], servers: list[ServerRow]) -> Iterator[str]:
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
    reports = read_reports(list(counters.reports()))
    for found in redis_figures.families(redis, servers, counters, merge_connections(reports)):
        yield from family(*found)
    yield from _busiest(reports)
    for found in doors.families(app.listeners, reports):
        yield from family(*found)
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


def _busiest(reports: list[WorkerReport]) -> Iterator[str]:
    busiest: dict[str, float] = {}
    for rule, _, rate in merge_busiest(reports):
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
