"""Sentinels elect another primary under load: no exception, checks flow again, and the limit holds but for what
asynchronous replication lost."""

import asyncio
import time
from collections.abc import Callable

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.errors import StoreUnavailable
from tests.support.clusters import Sentinels, wait_until
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
    """Two of three are dead when the application starts; without the third there is an outage."""
    for sentinel in sentinels.sentinels[:2]:
        sentinel.kill()
    with Limiter("100/30d", store=sentinels.bare_url + PATIENT) as limiter:
        assert not limiter.try_acquire("k").degraded
    sentinels.sentinels[2].kill()
    with Limiter("100/30d", store=sentinels.bare_url + TIMEOUTS) as limiter:
        assert limiter.try_acquire("k").degraded
    with (
        Limiter("100/30d", store=sentinels.bare_url + TIMEOUTS, on_store_error="raise") as limiter,
        pytest.raises(StoreUnavailable),
    ):
        limiter.try_acquire("k")


def test_demoted_primary(sentinels: Sentinels) -> None:
    """No call was made during the failover; the old primary, a replica now, would deny by its copy."""
    old = sentinels.primary

    def demote() -> None:
        sentinels.fail_over()
        sentinels.wait_for_failover()
        # as the Sentinels would do it, after eight seconds
        old.ask("REPLICAOF", "127.0.0.1", sentinels.replica.port)
        old.ask("CLIENT", "KILL", "TYPE", "normal")
        wait_until(lambda: old.replication()["role"] == "slave", "the old primary follows")
        wait_until(lambda: old.replication()["master_link_status"] == "up", "it has caught up")
        old.ask("CONFIG", "RESETSTAT")

    async def check() -> None:
        with Limiter("3/30d", store=sentinels.bare_url + PATIENT) as threads:
            async with AsyncLimiter("3/30d", store=sentinels.bare_url + PATIENT) as tasks:
                assert [threads.try_acquire("by threads").remaining for _ in range(3)] == [2, 1, 0]
                assert [(await tasks.try_acquire("by tasks")).remaining for _ in range(3)] == [2, 1, 0]
                await asyncio.to_thread(demote)
                assert not threads.try_acquire("by threads").allowed
                assert not (await tasks.try_acquire("by tasks")).allowed

    asyncio.run(check())
    asked = old.ask("INFO", "commandstats")
    assert "cmdstat_evalsha" not in asked
