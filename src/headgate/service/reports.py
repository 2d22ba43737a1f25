"""What a worker tells the others once a second, and the sums over all workers: keys, connections, doors.

A report is JSON beside the worker's counters. It is for what has a name that is not known before: a key, a server.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.service.busy_keys import SHOWN, Row

if TYPE_CHECKING:
    from headgate.service.app import App

SHOWN_KEYS = 20

ConnectionCounts = tuple[int, int, int]  # connections in use, idle ones, and calls that wait for one


class WorkerReport(msgspec.Struct):
    """The most denied and the busiest keys of a worker, and its connections."""

    denied: list[tuple[str, str, int]] = []
    busiest: list[Row] = []
    connections: dict[str, ConnectionCounts] = {}  # to each Redis server
    doors: dict[str, int] = {}  # clients' connections to each listener


def make_report(app: App) -> WorkerReport:
    """The report of this worker."""
    by_server: Callable[[], dict[str, dict[str, int]]] = getattr(app.store, "connections_by_server", dict)
    return WorkerReport(
        app.denied.top(),
        app.busiest.top(),
        {server: (one["in_use"], one["idle"], one["waiting"]) for server, one in by_server().items()},
        {listener.name: len(listener.connections) for listener in app.listeners},
    )


def read_reports(reports: list[bytes]) -> list[WorkerReport]:
    """The reports of all workers. One that was read while it was being written is left out."""
    found = []
    for report in reports:
        try:
            found.append(msgspec.json.decode(report, type=WorkerReport) if report else WorkerReport())
        except msgspec.DecodeError:
            continue
    return found


def merge_busiest(reports: list[WorkerReport]) -> list[Row]:
    """The busiest keys of all workers."""
    rates: dict[tuple[str, str], float] = {}
    for report in reports:
        for rule, key, rate in report.busiest:
            rates[rule, key] = rates.get((rule, key), 0.0) + rate
    top = nlargest(SHOWN, rates.items(), key=itemgetter(1))
    return [(rule, key, round(rate, 1)) for (rule, key), rate in top]


def merge_denied(reports: list[WorkerReport]) -> list[dict[str, Any]]:
    """The most denied keys of all workers."""
    counts: dict[tuple[str, str], int] = {}
    for report in reports:
        for rule, key, count in report.denied:
            counts[rule, key] = counts.get((rule, key), 0) + count
    top = nlargest(SHOWN_KEYS, counts.items(), key=itemgetter(1))
    return [{"key": key, "rule": rule, "denied": count} for (rule, key), count in top]


def merge_connections(reports: list[WorkerReport]) -> dict[str, ConnectionCounts]:
    """The connections of all workers to each server."""
    sums: dict[str, ConnectionCounts] = {}
    for report in reports:
        for server, (in_use, idle, waiting) in report.connections.items():
            before = sums.get(server, (0, 0, 0))
            sums[server] = before[0] + in_use, before[1] + idle, before[2] + waiting
    return sums


def merge_doors(reports: list[WorkerReport]) -> dict[str, int]:
    """The clients' connections to each listener of all workers."""
    sums: dict[str, int] = {}
    for report in reports:
        for name, count in report.doors.items():
            sums[name] = sums.get(name, 0) + count
    return sums
