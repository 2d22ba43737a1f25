"""Observable instruments for OpenTelemetry: its reader asks when it exports, and nothing is done between.

from headgate.telemetry.opentelemetry import instrument

instrument()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import monotonic

from headgate import __version__
from headgate.telemetry.families import FAMILIES
from headgate.telemetry.rows import Row, snapshot

try:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider
except ModuleNotFoundError as error:
    raise ImportError(
        f"headgate.telemetry.opentelemetry needs more: pip install 'headgate[opentelemetry]' ({error})"
    ) from error

FRESH = 0.1  # seconds for which the instruments of one export share a snapshot


def instrument(meter_provider: MeterProvider | None = None) -> None:
    """Report the figures of this process to *meter_provider*, or to the global one. Call it once, after a fork.

    Workers export for themselves: give each a ``service.instance.id`` of its own.

    Args:
        meter_provider: of your SDK; None: the global one
    """
    provider = get_meter_provider() if meter_provider is None else meter_provider
    if isinstance(provider, type) or not hasattr(provider, "get_meter"):
        raise ValueError(f"meter_provider must be a MeterProvider, or None for the global one, got {provider!r:.80}")
    meter = provider.get_meter("headgate", __version__)
    figures = _Figures()
    for name, family in FAMILIES.items():
        make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_gauge
        make(name, callbacks=[figures.callback(name)], unit=family.unit, description=family.text)


class _Figures:
    """One snapshot for all instruments of an export, which are read one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, list[Row]] = {}
        self._at = float("-inf")

    def callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(row.value, row.labels) for row in self._read().get(name, ())]

        return observe

    def _read(self) -> dict[str, list[Row]]:
        with self._lock:
            if monotonic() - self._at > FRESH:
                rows: dict[str, list[Row]] = {}
                for row in snapshot():
                    rows.setdefault(row.name, []).append(row)
                self._rows, self._at = rows, monotonic()
            return self._rows
