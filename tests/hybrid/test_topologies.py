"""Leases through a Cluster and behind Sentinels: by the same connections as everything else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate import AsyncHybridLimiter, HybridLimiter
from tests.clocks import until
from tests.faults.clusters import Cluster, Sentinels
from tests.servers import KINDS

pytestmark = [pytest.mark.xdist_group("hybrid-topologies"), pytest.mark.bounded(60)]
PATIENT = "?timeout=5&connect_timeout=5"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(KINDS[0])
    cluster.heal()
    yield cluster
    cluster.stop()


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    sentinels = Sentinels(KINDS[0])
    yield sentinels
    sentinels.stop()


def test_keys_all_over_a_cluster(cluster: Cluster) -> None:
    cluster.flush()
    with HybridLimiter("20/day", store=cluster.url + PATIENT) as limiter:
        keys = [f"user:{number}" for number in range(30)]
        counts = {key: sum(bool(limiter.try_acquire(key)) for _ in range(40)) for key in keys}
        assert set(counts.values()) == {20}
    with HybridLimiter("20/day", store=cluster.url + PATIENT) as limiter:
        assert not any(limiter.try_acquire(key) for key in keys), "closed limiters gave back nothing that was spent"


async def test_keys_all_over_a_cluster_for_asyncio(cluster: Cluster) -> None:
    cluster.flush()
    async with AsyncHybridLimiter("20/day", store=cluster.url + PATIENT) as limiter:
        for number in range(30):
            assert sum([bool(await limiter.try_acquire(f"user:{number}")) for _ in range(40)]) == 20


def test_a_failover_behind_sentinels(sentinels: Sentinels) -> None:
    with HybridLimiter("5000/day", store=sentinels.url + PATIENT, on_store_error="deny") as limiter:
        admitted = 0
        while limiter.stats().held < 20:
            admitted += limiter.try_acquire("k").allowed
        sentinels.fail_over()
        sentinels.wait_for_failover()
        before = limiter.stats().trips

        def asked_again() -> bool:
            nonlocal admitted
            admitted += limiter.try_acquire("k").allowed
            return limiter.stats().trips > before + 2

        until(asked_again)
        admitted += sum(bool(limiter.try_acquire("k")) for _ in range(20_000))
    assert admitted <= 2 * 5000, "what a failover forgets is bounded by the capacity"
