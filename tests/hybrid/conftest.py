"""Time for what a busy machine may take."""

import pytest

from headgate.hybrid import drivers, gates


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is closed gives back all that it holds, even on a machine that stands still for a second."""
    for module in (drivers, gates):
        monkeypatch.setattr(module, "FAREWELL", 30.0)
