"""Time for what a busy machine may take, and nobody who goes on from one test into the next."""

from collections.abc import Iterator

import pytest

from headgate.hybrid import drivers

PATIENCE = 30.0  # seconds


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is closed gives back all that it holds, even on a machine that stands still for a second."""
    monkeypatch.setattr(drivers, "RELEASE_TIMEOUT", PATIENCE)


@pytest.fixture(autouse=True)
def nobody_else() -> Iterator[None]:
    """Nobody whom a test did not close takes a spare permit from the next one, which uses the same server."""
    _release_all()
    yield
    _release_all()


def _release_all() -> None:
    for manager in list(drivers._THREADS):
        for limiter in list(manager.limiters):
            limiter.release_all()
            manager.wait_until_released(limiter, 5.0)
        with manager.lock:
            manager.releases.discard_all()  # no test waits for what another could not tell
