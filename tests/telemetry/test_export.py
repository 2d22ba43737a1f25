"""What Prometheus and OpenTelemetry see, in one process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headgate import Limiter
from headgate.coordination import Lock
from headgate.telemetry.families import FAMILIES
from headgate.telemetry.opentelemetry import instrument
from headgate.telemetry.prometheus import Collector
from tests.telemetry.conftest import Figures

pytestmark = pytest.mark.once


def test_prometheus(figures: Figures) -> None:
    """A scrape has the counts as of now, in text that a parser takes."""
    limiter, lock = Limiter("2/hour", name=figures.name), Lock(figures.name)
    registry = CollectorRegistry()
    registry.register(Collector())
    for _ in range(3):
        limiter.try_acquire("k")
    with lock:
        text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["headgate_decisions"].type == "counter"
    assert families["headgate_lock_held"].type == "gauge"
    decisions = {
        sample.labels["result"]: sample.value
        for sample in families["headgate_decisions"].samples
        if sample.labels["limiter"] == figures.name and sample.labels["degraded"] == "false"
    }
    assert decisions == {"allowed": 2, "denied": 1}
    assert {sample.name for sample in families["headgate_decisions"].samples} == {"headgate_decisions_total"}
    held = [sample for sample in families["headgate_lock_held"].samples if sample.labels["lock"] == figures.name]
    assert [sample.value for sample in held] == [1] and held[0].labels["store"] == "memory"
    limiter.try_acquire("k")
    labels = {"limiter": figures.name, "algorithm": "token_bucket", "store": "memory", "result": "denied"}
    assert registry.get_sample_value("headgate_decisions_total", {**labels, "degraded": "false"}) == 2


def test_opentelemetry(figures: Figures) -> None:
    """An export has the same figures, with units."""
    limiter = Limiter("2/hour", name=figures.name)
    reader = InMemoryMetricReader()
    instrument(MeterProvider(metric_readers=[reader]))
    limiter.try_acquire("k", 2)
    limiter.try_acquire("k")
    data: Any = reader.get_metrics_data()
    metrics = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    assert metrics.keys() <= FAMILIES.keys()
    assert metrics["headgate.permits"].unit == "{permit}" and metrics["headgate.permits"].data.is_monotonic
    found = {
        (name, point.attributes["result"]): point.value
        for name in ("headgate.decisions", "headgate.permits")
        for point in metrics[name].data.data_points
        if point.attributes["limiter"] == figures.name and point.attributes.get("degraded", "false") == "false"
    }
    assert found["headgate.decisions", "allowed"] == 1 and found["headgate.permits", "allowed"] == 2
    assert found["headgate.decisions", "denied"] == 1


@pytest.mark.parametrize("directory", [3, True, b"x", [], "", "a\0b"])
def test_wrong_directories(directory: Any) -> None:
    """They are named, with what would be right."""
    with pytest.raises(ValueError, match="directory must be the path of a folder, or None"):
        Collector(directory=directory)


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    """The error names it, and says what telemetry needs."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"telemetry needs a folder that this user may write to .*/file"):
        Collector(directory=tmp_path / "file")


@pytest.mark.parametrize("provider", ["x", 0, MeterProvider])
def test_wrong_meter_providers(provider: Any) -> None:
    """They are named, with what would be right."""
    with pytest.raises(ValueError, match="meter_provider must be a MeterProvider, or None"):
        instrument(provider)


@pytest.mark.server
@pytest.mark.parametrize("module", ["prometheus", "opentelemetry"])
def test_without_the_package(module: str) -> None:
    """The error names the extra; `snapshot` needs none of them."""
    package = {"prometheus": "prometheus_client"}.get(module, module)
    code = (
        f"import sys; sys.modules['{package}'] = None; from headgate.telemetry import snapshot; snapshot()\n"
        f"import headgate.telemetry.{module}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert f"ImportError: headgate.telemetry.{module} needs more: pip install 'headgate[{module}]'" in done.stderr
