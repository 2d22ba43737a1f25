"""Leases through a Cluster and behind Sentinels: by the same connections as everything else."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator

import pytest

from headgate import AsyncHybridLimiter, HybridLimiter
from headgate.redis.script import slot_of
from tests.support.clocks import until
from tests.support.clusters import Cluster, Member, Sentinels, slots_of, wait_until
from tests.support.servers import KINDS, Server

pytestmark = pytest.mark.xdist_group("hybrid-topologies")
PATIENT = "?timeout=20&connect_timeout=20"
SICK = slots_of(0)  # of a server that is frozen


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Cluster that replaces no server: neither one that a test froze, nor one that stands still with the machine."""
    cluster = Cluster(KINDS[0])
    for member in cluster.members:
        member.ask("CONFIG", "SET", "cluster-node-timeout", 120_000)
    yield cluster
    cluster.stop()


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    sentinels = Sentinels(KINDS[0])
    yield sentinels
    sentinels.stop()


def test_cluster_keys(cluster: Cluster) -> None:
    """Keys on all servers of a Cluster are exact, also after the limiter was closed."""
    cluster.flush()
    with HybridLimiter("20/day", store=cluster.bare_url + PATIENT) as limiter:
        keys = [f"user:{number}" for number in range(30)]
        counts = {key: sum(bool(limiter.try_acquire(key)) for _ in range(40)) for key in keys}
        assert set(counts.values()) == {20}
    with HybridLimiter("20/day", store=cluster.bare_url + PATIENT) as limiter:
        assert not any(limiter.try_acquire(key) for key in keys), "closed limiters gave back nothing that was spent"


def test_cluster_fork(cluster: Cluster) -> None:
    """A forked child works in a Cluster."""
    cluster.flush()
    with HybridLimiter("20/day", store=cluster.bare_url + PATIENT, on_store_error="deny") as limiter:
        keys = [f"user:{number}" for number in range(20)]
        assert all(limiter.try_acquire(key) for key in keys)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if all(sum(bool(limiter.try_acquire(key)) for _ in range(5)) == 5 for key in keys) else 2
                limiter.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert {sum(bool(limiter.try_acquire(key)) for _ in range(30)) for key in keys} == {14}


async def test_cluster_keys_for_asyncio(cluster: Cluster) -> None:
    """The same for asyncio."""
    cluster.flush()
    async with AsyncHybridLimiter("20/day", store=cluster.bare_url + PATIENT) as limiter:
        for number in range(30):
            assert sum([bool(await limiter.try_acquire(f"user:{number}")) for _ in range(40)]) == 20


def test_region_on_a_cluster(cluster: Cluster, redis_server: Server) -> None:
    """The store of a region can be a Cluster: keys of all its servers get permits from home."""
    cluster.flush()
    keys = [f"key {number}" for number in range(12)]
    with HybridLimiter(
        "1000/30d", store=cluster.bare_url + PATIENT, home=redis_server.url, region="eu", floor=0.01
    ) as limiter:
        admitted = dict.fromkeys(keys, 0)

        def take() -> bool:
            for key in keys:
                admitted[key] += bool(limiter.try_acquire(key))
            return min(admitted.values()) > 20

        until(take)  # the floor is 10
        region = limiter.stats().region
        assert region and region.home == "up" and region.fetches >= len(keys)


def test_sentinel_failover(sentinels: Sentinels) -> None:
    """A failover behind Sentinels forgets one capacity of permits at most."""

    def ordered() -> bool:
        sentinels.fail_over()
        return True

    with HybridLimiter("5000/day", store=sentinels.bare_url + PATIENT, on_store_error="deny") as limiter:
        admitted = 0
        while limiter.stats().held < 20:
            admitted += limiter.try_acquire("k").allowed
        wait_until(ordered, "the Sentinels find all servers well, and obey")
        sentinels.wait_for_failover()
        before = limiter.stats().trips

        def asked_again() -> bool:
            nonlocal admitted
            admitted += limiter.try_acquire("k").allowed
            return limiter.stats().trips > before + 2

        until(asked_again)
        admitted += sum(bool(limiter.try_acquire("k")) for _ in range(20_000))
    assert admitted <= 2 * 5000, "what a failover forgets is bounded by the capacity"


def keys_in(slots: range, *, there: bool) -> Iterator[str]:
    """Keys that lie in *slots*, or that do not."""
    for number in itertools.count():
        key = f"user:{number}"
        if (slot_of("{" + key + "}") in slots) == there:
            yield key


@pytest.fixture
def frozen(cluster: Cluster) -> Iterator[Member]:
    """The primary of `SICK`, which a test may freeze."""
    cluster.flush()
    frozen = cluster.primary(SICK[0])
    yield frozen
    frozen.thaw()


def test_frozen_server(cluster: Cluster, frozen: Member) -> None:
    """A frozen server degrades the answers for its own keys only."""
    sick, well = keys_in(SICK, there=True), keys_in(SICK, there=False)
    with HybridLimiter("20/day", store=f"{cluster.bare_url}?timeout=2", on_store_error="deny") as limiter:
        assert limiter.try_acquire(next(sick)) and limiter.try_acquire(next(well))
        frozen.freeze()
        first = next(sick)
        until(lambda: limiter.try_acquire(first).degraded and limiter.store_health().state == "open")
        for slow, fine in itertools.islice(zip(sick, well, strict=True), 60):
            assert limiter.try_acquire(slow).degraded
            made = limiter.try_acquire(fine)
            assert made.allowed and not made.degraded
        frozen.thaw()  # nor does closing have to wait for it


def test_frozen_server_delays_its_keys_only(cluster: Cluster, frozen: Member) -> None:
    """Only calls for keys on a frozen server wait for it."""
    sick, well = keys_in(SICK, there=True), keys_in(SICK, there=False)
    with HybridLimiter("20/day", store=cluster.bare_url + "?timeout=20", on_store_error="deny") as limiter:
        assert limiter.try_acquire(next(sick)) and limiter.try_acquire(next(well))
        frozen.freeze()
        caller = threading.Thread(target=limiter.try_acquire, args=(next(sick),), daemon=True)
        caller.start()
        until(lambda: limiter._backend.manager.trip_under_way)
        for _ in range(10):
            assert limiter.try_acquire(next(well))
        assert caller.is_alive(), "it waits, and no other caller"
        frozen.thaw()
        caller.join(30)
        assert not caller.is_alive()


async def test_frozen_server_for_asyncio(cluster: Cluster, frozen: Member) -> None:
    """The same for asyncio."""
    sick, well = keys_in(SICK, there=True), keys_in(SICK, there=False)
    async with AsyncHybridLimiter("20/day", store=cluster.bare_url + "?timeout=20", on_store_error="deny") as limiter:
        assert await limiter.try_acquire(next(sick)) and await limiter.try_acquire(next(well))
        frozen.freeze()
        caller = asyncio.create_task(limiter.try_acquire(next(sick)))
        await asyncio.sleep(0)
        for _ in range(10):
            assert await limiter.try_acquire(next(well))
        assert not caller.done()
        frozen.thaw()
        await asyncio.wait_for(caller, 30)
