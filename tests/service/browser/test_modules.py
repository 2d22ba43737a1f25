"""The page's modules that know no document, called in the browser that runs them: tables of what goes in and out."""

import json
from typing import Any

import pytest

from tests.service.browser.conftest import Open
from tests.support.service import Service

pytestmark = pytest.mark.xdist_group("browser")  # one browser, whatever the number of workers


def lease(local: int, trips: int) -> str:
    """The lease figures of an event with one rule."""
    row = {"rule": "r", "algorithm": "GCRA", "local": local, "redis": 10}
    return json.dumps({"rules": [row], "trips": trips, "failedTrips": 0, "up": True})


def after_two_seconds(one: str, other: str) -> str:
    """The rates of the second of two events."""
    return f"(past => {{ leaseRates(past, 9, {one}); return leaseRates(past, 11, {other}) }})([])"


TABLE: dict[str, list[tuple[str, Any]]] = {
    "format": [
        ("count(0)", "0"),
        ("count(0.25)", "0.3"),
        ("count(7)", "7"),
        ("count(88.66)", "89"),
        ("count(1234.4)", "1,234"),
        ("count(12345)", "12.3k"),
        ("count(150000)", "150k"),
        ("count(2500000)", "2.5M"),
        ("count(NaN)", "–"),
        ("duration(0)", "0"),
        ("duration(0.000042)", "42 µs"),
        ("duration(0.0012)", "1.2 ms"),
        ("duration(0.9996)", "1 s"),
        ("duration(12.34)", "12.3 s"),
        ("duration(60)", "1 min"),
        ("duration(75)", "1 min 15 s"),
        ("duration(3600)", "1 h"),
        ("duration(4000)", "1 h 6 min"),
        ("duration(200000)", "2 d 7 h"),
        ("duration(null)", "–"),
        ("duration(-1)", "–"),
        ("bytes(0)", "0 B"),
        ("bytes(1023)", "1023 B"),
        ("bytes(1536)", "1.5 KiB"),
        ("bytes(2.7 * 2 ** 20)", "2.7 MiB"),
        ("bytes(2 ** 50)", "1024 TiB"),
        ("bytes(NaN)", "–"),
        ("percent(0, 0)", "–"),
        ("percent(1, 3)", "33.3 %"),
        ("percent(1, 10000)", "<0.1 %"),
        ("percent(0, 9)", "0 %"),
        ("steps(10)", [0, 5, 10]),
        ("steps(7)", [0, 5, 10]),
        ("steps(3)", [0, 1, 2, 3]),
        ("steps(1900)", [0, 1000, 2000]),
        ("steps(0.0003).length", 4),
    ],
    "events": [
        ("takeEvents('')", [[], ""]),
        ("takeEvents('data: 1\\n\\nda')", [["1"], "da"]),
        ("takeEvents('data:1\\r\\n\\r\\n: still here\\n\\ndata: 2\\n\\n')", [["1", "2"], ""]),
        ("takeEvents('event: x\\ndata: a\\ndata: b\\n\\n')", [["a\nb"], ""]),
    ],
    "leases": [
        # one event: all that there is; two: what happened in between
        (f"leaseRates([], 9, {lease(30, 4)}).rules[0].local", 30),
        (f"{after_two_seconds(lease(30, 4), lease(90, 8))}.trips", 2),
        (f"{after_two_seconds(lease(30, 4), lease(90, 8))}.rules[0].local", 60),
        # nothing asked in between: the share since the start
        (f"{after_two_seconds(lease(30, 4), lease(30, 8))}.rules[0].local", 30),
        # started again: the old totals do not count
        (f"{after_two_seconds(lease(30, 4), lease(5, 1))}.trips", 0),
        (f"(p => {{ for (let at = 0; at < 200; at++) leaseRates(p, at, {lease(1, 1)}); return p.length }})([])", 61),
    ],
    "history": [
        ("sampleOf({at: 9, rules: []}).allowed", 0),
        ("sampleOf({at: 9, rules: [{rule: 'r', algorithm: 'A', allowed: 6, denied: 2}]}, {at: 7}).allowed", 3),
        # a first event, or one after a gap: as of one second
        ("sampleOf({at: 99, rules: [{rule: 'r', algorithm: 'A', allowed: 6, denied: 2}]}, {at: 7}).allowed", 6),
        # no checks, no latency
        ("sampleOf({at: 9, rules: [], latency: {p50: 0, p99: 0}}).p99", None),
        ("(h => { add(h, {at: 1}); add(h, {at: 2}); add(h, {at: 2}); return h.length })([])", 2),
        ("(h => { add(h, {at: 50}); add(h, {at: 2}); return h.map(s => s.at) })([])", [2]),
        ("(h => { [1, 2, KEPT + 1.5].forEach(at => add(h, {at})); return h.map(s => s.at) })([])", [2, 901.5]),
        ("since([{at: 1}, {at: 2}, {at: 3}], 2.5).map(s => s.at)", [2, 3]),
        ("since([{at: 1}], 2)", []),
    ],
}


def test_tables(service: Service, look: Open) -> None:
    page = look(service)
    for module, rows in TABLE.items():
        names = page.value(f"import('/page/{module}.js').then(found => Object.keys(found))")
        calls = ", ".join(f"() => {call}" for call, _ in rows)
        given = f"({{{', '.join(names)}}}) => JSON.stringify([{calls}].map(call => call()))"
        results = json.loads(page.value(f"import('/page/{module}.js').then({given})"))
        assert dict(zip([call for call, _ in rows], results, strict=True)) == dict(rows)
