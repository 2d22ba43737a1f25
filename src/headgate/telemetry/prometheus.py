"""A collector for prometheus_client, which reads all figures when Prometheus asks, and costs nothing between.

from prometheus_client import REGISTRY
from headgate.telemetry.prometheus import Collector

REGISTRY.register(Collector())
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import groupby

from headgate.telemetry.families import FAMILIES, prometheus_name
from headgate.telemetry.rows import Row, snapshot
from headgate.telemetry.workers import shared_figures

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector as AnyCollector
except ModuleNotFoundError as error:
    raise ImportError(
        f"headgate.telemetry.prometheus needs more: pip install 'headgate[prometheus]' ({error})"
    ) from error

logger = logging.getLogger("headgate")

DIRECTORY = "HEADGATE_TELEMETRY_DIR"
CLIENT_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # of prometheus_client


class Collector(AnyCollector):
    """The figures of headgate, for a registry of prometheus_client.

    Args:
        directory: for several worker processes: each of them makes a collector with the same directory, and a scrape at
            any shows the sums of all. None: the environment variable HEADGATE_TELEMETRY_DIR; or the folder ``headgate``
            in PROMETHEUS_MULTIPROC_DIR, if prometheus_client runs in that mode; or else this process alone
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        found = _directory() if directory is None else _check_directory(directory)
        self._shared = shared_figures(found) if found else None
        self._closed = False

    def collect(self) -> Iterator[Metric]:
        """All families that have a series; none while the directory cannot be written, as some workers' would fall."""
        try:
            rows = self._shared.rows() if self._shared else snapshot()
        except OSError as error:
            logger.warning("telemetry: a scrape has no figures of headgate: %s", error)
            return
        for name, of_family in groupby(rows, key=lambda row: row.name):
            yield _family(name, list(of_family))

    def describe(self) -> list[Metric]:
        """Nothing: a registry need not scrape to know the names, which are ours alone."""
        return []

    def close(self) -> None:
        """Stop the thread that writes for other workers."""
        if self._shared and not self._closed:
            self._closed = True
            self._shared.close()


def _family(name: str, rows: list[Row]) -> Metric:
    kind = CounterMetricFamily if FAMILIES[name].kind == "counter" else GaugeMetricFamily
    metric = kind(prometheus_name(name), FAMILIES[name].text)
    for row in rows:
        metric.add_sample(prometheus_name(name), row.labels, row.value)
    return metric


def _check_directory(directory: object) -> str:
    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"directory must be the path of a folder, or None for one process, got {directory!r:.80}")
    return path


def _directory() -> str:
    own, client = os.environ.get(DIRECTORY, ""), os.environ.get(CLIENT_DIRECTORY, "")
    return own or (os.path.join(client, "headgate") if client else "")
