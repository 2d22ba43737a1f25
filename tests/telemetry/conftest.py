"""Figures of one test: names are bounded for a process, and other tests have used many."""

from collections.abc import Iterator

import pytest

from headgate.telemetry import snapshot, watching
from tests.support.servers import KINDS, Server


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_names", {})
    # Only what this test makes: OpenTelemetry folds series beyond 2,000, and the tests before have made more.
    for kept in ("_entries", "_totals"):
        monkeypatch.setattr(watching, kept, {})


class Figures:
    """The counters and gauges of this process under one name, counters since the test began."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._before = self._read()

    def __call__(self, family: str, **labels: str) -> float:
        """The sum of all series of *family* that have these labels."""
        now = self._read()
        wanted = set(labels.items())
        return sum(
            value - self._before.get(series, 0)
            for series, value in now.items()
            if series[0] == family and wanted <= series[1]
        )

    def has(self, family: str) -> bool:
        return any(series[0] == family for series in self._read())

    def _read(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (row.name, frozenset(row.labels.items())): row.value
            for row in snapshot()
            if self.name in row.labels.values()
        }


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Figures of the name that the test has."""
    return Figures(request.node.name)


@pytest.fixture
def servers_apart() -> Iterator[Server]:
    """A server that the test may stop."""
    server = Server(KINDS[0])
    yield server
    server.stop()
