"""Time for what a busy machine may take, and nobody who goes on from one test into the next."""

from collections.abc import Iterator

import pytest

from headgate.hybrid import drivers

PATIENCE = 30.0  # seconds


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is closed gives back all that it holds, even on a machine that stands still for a second."""
    for module in (drivers, gates):
        monkeypatch.setattr(module, "RELEASE_TIMEOUT", PATIENCE)


@pytest.fixture(autouse=True)
def nobody_else() -> Iterator[None]:
    """Nobody whom a test did not close takes a spare permit from the next one, which uses the same server."""
    _dismiss_all()
    yield
    _dismiss_all()


def _dismiss_all() -> None:
    for driver in list(drivers._THREADS):
        for member in list(driver.limiters):
            member.release_all()
            driver.wait_until_released(member, 5.0)
        with driver.manager.lock:
            driver.manager.releases.discard_all()  # no test waits for what another could not tell
