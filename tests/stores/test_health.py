"""What a limiter says of its store, and what the store says of itself."""

from tests.support.callers import Callers
from tests.support.clocks import until


def test_healthy(any_callers: Callers) -> None:
    limiter = any_callers.limiter("5/minute")
    assert not limiter.try_acquire("k").degraded
    health, served = limiter.health(), limiter.store_health()
    assert (health.healthy, health.reason, health.problems) == (True, "ok", ())
    assert health.role
    assert (served.state, served.failures, served.opened, served.degraded) == ("closed", 0, 0, 0)


def test_gone(failing_callers: Callers) -> None:
    """The store is down, the policy answers; when the store is back it is found without a call."""
    limiter = failing_callers.limiter("1000/30d", on_store_error="allow")
    assert not limiter.try_acquire("k").degraded
    with failing_callers.store.gone():
        for _ in range(100):
            assert limiter.try_acquire("k").degraded
        served, health = limiter.store_health(), limiter.health()
        assert (served.state, served.degraded, served.opened) == ("open", 100, 1)
        assert served.failures >= 1 and served.last_error
        assert (health.healthy, health.reason) == (False, "down")
        assert health.problems
    until(lambda: limiter.store_health().state == "closed")
    assert not limiter.try_acquire("k").degraded
