"""Long time-outs for a busy machine, and no leases that one test leaves to the next."""

from collections.abc import Iterator

import pytest

from headgate.hybrid import background

PATIENCE = 30.0  # seconds


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limiter that closes gives back everything, even on a machine that stands still for a second."""
    monkeypatch.setattr(background, "RELEASE_TIMEOUT", PATIENCE)


@pytest.fixture(autouse=True)
def no_other_leases() -> Iterator[None]:
    """A limiter that a test did not close takes no spare permit from the next test, which uses the same server."""
    _release_all()
    yield
    _release_all()


def _release_all() -> None:
    for manager in list(background._THREADS):
        for limiter in list(manager.limiters):
            limiter.release_all()
            manager.wait_until_released(limiter, 5.0)
        with manager.lock:
            manager.releases.discard_all()  # no test waits for releases that another could not send
