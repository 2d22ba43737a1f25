"""What a running service does now: its rules with their rates, from two readings of its metrics."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import BadStatusLine, IncompleteRead
from time import monotonic
from typing import NamedTuple

SERIES = re.compile(
    r'rate_limiter_rule_requests_total\{rule="([^"]*)",algorithm="([^"]*)",allowed="(true|false)"\} (\d+)'
)
SINGLE = re.compile(r"^rate_limiter_(breaker_open|store_errors_total|workers) ([\d.]+)", re.MULTILINE)
BUSIEST = re.compile(r'rate_limiter_busiest_key_checks\{rule="([^"]*)"\} ([\d.e+-]+)')
TIMEOUT = 5.0


class Reading(NamedTuple):
    """What the metrics of a service said at one moment."""

    at: float
    counts: dict[tuple[str, str], tuple[int, int]]  # allowed and denied, by rule and algorithm
    busiest: dict[str, float]  # checks a second of the busiest key, by rule
    single: dict[str, float]


class Rate(NamedTuple):
    """One rule between two readings."""

    rule: str
    algorithm: str
    allowed: float  # a second
    denied: float
    total: int  # since the service started
    busiest_key: float


def read_metrics(url: str, token: str | None = None) -> Reading:
    """Ask the service at *url*; raises OSError if it does not answer, ValueError if it is no headgate."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if not url.startswith(("http://", "https://")) or "@" in url:
        raise ValueError("the URL of a service is such as http://127.0.0.1:8080; a token goes into HEADGATE_TOKEN")
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return parse(answer.read().decode("utf-8", "replace"), monotonic())
    except urllib.error.HTTPError as error:
        error.close()
        wanted = "; its metrics need a token, in HEADGATE_TOKEN" if error.code in (401, 403) else ""
        raise OSError(f"it answers {error.code} {error.reason!s:.80}{wanted}") from error
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from error
    except (BadStatusLine, IncompleteRead) as error:
        raise OSError(f"it does not answer as a web server does ({error!r:.80})") from error


def parse(text: str, at: float) -> Reading:
    """The reading that a scrape gives."""
    single = {name: float(value) for name, value in SINGLE.findall(text)}
    if "workers" not in single:
        raise ValueError("what answers there is no headgate service: it has no metric rate_limiter_workers")
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for rule, algorithm, allowed, value in SERIES.findall(text):
        yes, no = counts.get((rule, algorithm), (0, 0))
        counts[rule, algorithm] = (yes + int(value), no) if allowed == "true" else (yes, no + int(value))
    return Reading(at, counts, {rule: float(rate) for rule, rate in BUSIEST.findall(text)}, single)


def rates(before: Reading, now: Reading) -> list[Rate]:
    """The rules between two readings, the busiest first. A service that was restarted has counted from 0 again."""
    seconds = max(now.at - before.at, 1e-9)
    rows = []
    for (rule, algorithm), (allowed, denied) in now.counts.items():
        was_allowed, was_denied = before.counts.get((rule, algorithm), (0, 0))
        if allowed < was_allowed or denied < was_denied:
            was_allowed = was_denied = 0
        gained = (allowed - was_allowed) / seconds, (denied - was_denied) / seconds
        rows.append(Rate(rule, algorithm, *gained, allowed + denied, now.busiest.get(rule, 0.0)))
    return sorted(rows, key=lambda row: (-row.allowed - row.denied, -row.total, row.rule))


COLUMNS = ("rule", "algorithm", "allowed/s", "denied/s", "total", "busiest key/s")


def cells(row: Rate) -> tuple[str, ...]:
    return (
        row.rule,
        row.algorithm,
        f"{row.allowed:,.1f}",
        f"{row.denied:,.1f}",
        f"{row.total:,}",
        f"{row.busiest_key:,.0f}",
    )


def as_lines(rows: list[Rate]) -> Iterator[str]:
    """The rows as text in columns."""
    table = [COLUMNS, *map(cells, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        yield "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()


def headline(url: str, now: Reading) -> str:
    store = "the store does not answer" if now.single.get("breaker_open") else "the store answers"
    errors = f"{now.single.get('store_errors_total', 0):,.0f} store errors"
    return f"{url}: {now.single['workers']:.0f} workers, {store}, {errors}"
