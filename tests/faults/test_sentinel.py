"""Sentinels elect another primary under load: no exception, checks flow again, and the limit holds but for what
asynchronous replication lost."""

import time
from collections.abc import Callable

import pytest

from headgate import Limiter
from headgate.errors import StoreUnavailable
from tests.support.clusters import Sentinels
from tests.support.load import Load

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults-sentinel")]

BUDGET = 0.4
TIMEOUTS = f"?timeout={BUDGET}&connect_timeout={BUDGET}"
LIMIT = 2500
PATIENT = "?timeout=20&connect_timeout=20"
RETURN = 1.0  # seconds after the election until it must be in use
REPLICATION = 0.5  # seconds of acknowledged calls that a replica may not have heard of

FAULTS: dict[str, Callable[[Sentinels], None]] = {
    "killed": lambda sentinels: sentinels.primary.kill(),
    "frozen": lambda sentinels: sentinels.primary.freeze(),
    "ordered": lambda sentinels: sentinels.fail_over(),
}


@pytest.mark.parametrize("how", ["threads", "tasks"])
@pytest.mark.parametrize("fault", FAULTS)
def test_failover_under_load(fault: str, how: str, sentinels: Sentinels) -> None:
    with Load(how, sentinels.bare_url + TIMEOUTS, f"{LIMIT}/30d", on_store_error="deny") as load:
        load.wait_for(lambda answer: answer.by_store)
        time.sleep(0.3)
        begin = time.monotonic()
        FAULTS[fault](sentinels)
        elected = sentinels.wait_for_failover()
        flows = load.wait_for(lambda answer: answer.by_store, since=elected)
        load.wait_for(lambda answer: answer.by_store and not answer.admitted, since=elected)
        if fault == "frozen":
            sentinels.primary.thaw()  # it still takes itself for the primary
            time.sleep(0.3)
    assert not load.errors
    assert flows.ended - elected <= RETURN + load.slack
    assert max(answer.took for answer in load.answers) <= BUDGET + load.slack
    # the old primary goes on for a moment when it is healthy; what it admits then is lost as well
    end = elected + RETURN if fault == "ordered" else begin
    unsure = sum(answer.admitted for answer in load.between(begin - REPLICATION, end))
    print(f"{load.admitted} admitted of {LIMIT}; flows {flows.ended - elected:+.3f} s after the election")
    assert load.admitted <= LIMIT + unsure


def test_replicas_are_never_asked(sentinels: Sentinels) -> None:
    with Limiter("100/30d", store=sentinels.bare_url + PATIENT) as limiter:
        for _ in range(20):
            assert not limiter.try_acquire("k").degraded
        assert limiter.peek("k", permits=0).remaining == 80
    calls = sentinels.replica.ask("INFO", "commandstats")
    assert sum("evalsha" in name for name in calls) == 0


def test_one_sentinel_is_enough(sentinels: Sentinels) -> None:
    """Two of three are dead when the application starts."""
    for sentinel in sentinels.sentinels[:2]:
        sentinel.kill()
    with Limiter("100/30d", store=sentinels.bare_url + PATIENT) as limiter:
        assert not limiter.try_acquire("k").degraded


def test_none_is_an_outage(sentinels: Sentinels) -> None:
    for sentinel in sentinels.sentinels:
        sentinel.kill()
    with Limiter("100/30d", store=sentinels.bare_url + TIMEOUTS) as limiter:
        assert limiter.try_acquire("k").degraded
    with (
        Limiter("100/30d", store=sentinels.bare_url + TIMEOUTS, on_store_error="raise") as limiter,
        pytest.raises(StoreUnavailable),
    ):
        limiter.try_acquire("k")
