"""What headgate does, in numbers: counters that are always on, for Prometheus and OpenTelemetry.

    from prometheus_client import REGISTRY
    from headgate.telemetry.prometheus import Collector

    REGISTRY.register(Collector())

counts.py         what limiters count in the step that decides
tally.py          what everything else counts: calls to stores, waits, locks, pools, queues, budgets
limiters.py       how limiters and stores are watched
watching.py       who counts, found by weak references; the bound of names; totals of what is gone
families.py       the table of all families: kind, unit, meaning
rows.py           `snapshot`: all figures as rows
workers.py        the figures of several processes, by a directory that they share
prometheus.py     `Collector` for prometheus_client
opentelemetry.py  `instrument` for OpenTelemetry
"""

from headgate.telemetry.rows import Row as Row
from headgate.telemetry.rows import snapshot as snapshot

__all__ = ["Row", "snapshot"]
