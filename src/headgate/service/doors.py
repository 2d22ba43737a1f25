"""The ports that clients come in by: which are open, with TLS or without, and how many connections each has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from headgate.service.hybrid_rules import Family
from headgate.service.listeners import LISTENERS, Listener
from headgate.service.reports import WorkerReport, merge_doors

if TYPE_CHECKING:
    from headgate.service.app import App

SOCKET_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # of Linux
COUNT_EVERY = 5.0  # seconds between two readings of them: a table is long where there are many connections


class HTTPConnections:
    """Counts the connections to the HTTP port in the tables of the kernel: granian does not tell their number."""

    def __init__(self, port: int) -> None:
        self._established = re.compile(rb":%04X [0-9A-F]+:[0-9A-F]{4} 01 " % port)
        self._at = float("-inf")
        self._look: asyncio.Task[None] | None = None
        self.count: int | None = None  # of all workers; None: not known yet, or there are no such tables

    def refresh(self) -> None:
        """Count again in a thread, if the last count is old."""
        if self._look is None and monotonic() - self._at >= COUNT_EVERY:
            self._look = asyncio.ensure_future(self._count())

    async def _count(self) -> None:
        try:
            self.count = await asyncio.to_thread(self.read)
        finally:
            self._at, self._look = monotonic(), None

    def read(self) -> int | None:
        """The connections that are established now."""
        found = None
        for table in SOCKET_TABLES:
            try:
                found = (found or 0) + len(self._established.findall(Path(table).read_bytes()))
            except OSError:
                continue  # a system without this table
        return found

    async def aclose(self) -> None:
        """Wait for a count that is under way; it takes milliseconds."""
        if self._look is not None:
            await self._look


def rows(app: App, reports: list[WorkerReport]) -> list[dict[str, Any]]:
    """The doors as the live page shows them; one that is not open has no port."""
    app.http_connections.refresh()
    counts, opened = merge_doors(reports), {listener.name: listener for listener in app.listeners}
    shown: list[dict[str, Any]] = [
        {"name": "http", "port": app.http_port, "tls": False, "connections": app.http_connections.count}
    ]
    for name in LISTENERS:
        if name not in opened:
            shown.append({"name": name, "port": None})
            continue
        shown.append(opened[name].info() | {"connections": counts.get(name, 0)})
    return shown


def families(listeners: Sequence[Listener], reports: list[WorkerReport]) -> list[Family]:
    """The metric of the listeners beside HTTP; none where there are none."""
    counts = merge_doors(reports)
    samples = [("", f'listener="{one.name}"', float(counts.get(one.name, 0))) for one in listeners]
    text = "Connections of clients to the ports beside HTTP"
    return [("listener_connections", "gauge", text, samples)] if samples else []
