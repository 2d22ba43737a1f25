"""What limiters and stores count."""

import asyncio
import gc
import logging
import os
import threading
import weakref
from pathlib import Path

import pytest

from headgate import AsyncLimiter, HybridLimiter, Limiter, RateLimited, StoreUnavailable
from headgate.joint import JointCheck, try_acquire_all
from headgate.stores import RedisStore
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore
from headgate.telemetry import snapshot, watching
from headgate.telemetry.families import FAMILIES, prometheus_name
from headgate.telemetry.rows import merge_gauges
from headgate.testing import ManualClock
from tests.support.quotas import ALGORITHMS
from tests.support.servers import Server
from tests.telemetry.conftest import Figures

DECISIONS, PERMITS = "headgate.decisions", "headgate.permits"


@pytest.mark.parametrize("store", ["memory://", "shared"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_decisions(algorithm: str, store: str, figures: Figures, tmp_path: Path) -> None:
    """Every way to a decision is counted once, with its permits; what only looks is not counted."""
    url = store if store == "memory://" else f"shared://{tmp_path}/counts"
    limiter = Limiter("10/hour", algorithm=algorithm, name=figures.name, store=url)  # type: ignore[arg-type]  # by name
    for _ in range(3):
        assert limiter.try_acquire("k")
    assert limiter.try_acquire("k", 6)
    assert limiter.try_acquire("k")
    for permits in (1, 1, 5):
        assert not limiter.try_acquire("k", permits)
    limiter.peek("k")
    limiter.refund("k", 2)
    assert limiter.try_acquire("other", 2, floor=0.5)
    assert not limiter.try_acquire("other", 5, floor=0.5)
    assert figures(DECISIONS, result="allowed", degraded="false", algorithm=algorithm) == 6
    assert figures(DECISIONS, result="denied", degraded="false") == 4
    assert figures(PERMITS, result="allowed") == 12
    assert figures(PERMITS, result="denied") == 12
    limiter.close()


@pytest.mark.parametrize("kept", ["memory", pytest.param("redis", marks=pytest.mark.server)])
def test_joint_and_bookings(kept: str, figures: Figures, request: pytest.FixtureRequest) -> None:
    """Checks of several limiters, and bookings, are decisions too."""
    clock = ManualClock()
    store: Store = MemoryStore(clock=clock)
    if kept == "redis":
        store = RedisStore.from_url(request.getfixturevalue("redis_server").patient_url, clock=clock)
    limiters = [Limiter("2/hour", name=figures.name, algorithm=kind, store=store) for kind in ("gcra", "token_bucket")]
    for _ in range(3):
        try_acquire_all([JointCheck(limiter, "k") for limiter in limiters])
    assert figures(DECISIONS, result="allowed") == 4
    assert figures(DECISIONS, result="denied") == 2
    wide = Limiter("9/hour", name=figures.name, algorithm="fixed_window", store=store)
    try_acquire_all([JointCheck(wide, "k"), JointCheck(limiters[0], "k")])
    assert figures(DECISIONS, algorithm="fixed_window") == 0, "it has decided nothing: nothing was spent"
    slot = limiters[0].book("booked", "job")
    limiters[0].book("booked", "job")  # the same slot again
    with pytest.raises(RateLimited):
        limiters[0].book("booked", within=0.0, permits=2)
    assert slot.delay == 0
    assert figures(DECISIONS, result="allowed", algorithm="gcra") == 3
    assert figures(DECISIONS, result="denied", algorithm="gcra") == 3
    store.close()


def test_gauges_of_equal_labels() -> None:
    """The open breaker of one of several counts, and so does the failing report of one; the others are added up."""
    families = ("headgate.store.breaker.open", "headgate.lease.up", "headgate.keys")
    merged = merge_gauges((family, (), value) for value in (1, 0, 1) for family in families)
    assert [merged[family, ()] for family in families] == [1, 0, 2]


def test_a_full_store(figures: Figures) -> None:
    """A new key that finds no room is a denial."""
    limiter = Limiter("1/hour", name=figures.name, max_keys=1)
    assert limiter.try_acquire("a") and not limiter.try_acquire("b")
    assert (figures(DECISIONS, result="allowed"), figures(DECISIONS, result="denied")) == (1, 1)
    assert figures("headgate.keys") == 1


def test_threads(figures: Figures) -> None:
    """No count is lost between threads, in any build: the store's lock, or the interpreter's, is held."""
    limiter = Limiter("1000/hour", name=figures.name)
    threads = [threading.Thread(target=lambda: [limiter.try_acquire("k") for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (figures(DECISIONS, result="allowed"), figures(DECISIONS, result="denied")) == (1000, 7000)


def test_limiters_that_share_states(figures: Figures) -> None:
    """Limiters of one rule on one store, threads' and asyncio's, are counted once."""
    store = MemoryStore()
    first, second = (Limiter("5/hour", name=figures.name, store=store) for _ in range(2))
    twin = AsyncLimiter("5/hour", name=figures.name, store=store)
    first.try_acquire("k")
    second.with_timeout(1.0).try_acquire("k")
    asyncio.run(twin.try_acquire("k"))
    assert figures(DECISIONS) == 3


def test_waits(figures: Figures) -> None:
    """Calls that wait are counted by how they ended, with the time that they took."""
    limiter = Limiter("1/hour", name=figures.name)
    limiter.acquire("k")
    with pytest.raises(RateLimited):
        limiter.acquire("k", timeout=0.01)
    assert (figures("headgate.waits", result="allowed"), figures("headgate.waits", result="denied")) == (1, 1)
    assert 0.01 <= figures("headgate.wait.time") < 60
    assert figures("headgate.waiting") == 0


def test_a_collected_limiter(figures: Figures) -> None:
    """Telemetry keeps no limiter alive, and the counters of one that is gone stay as they are; its gauges go."""
    limiter = Limiter("5/hour", name=figures.name)
    limiter.acquire("k")
    gone = weakref.ref(limiter), weakref.ref(limiter.store)
    assert figures("headgate.keys") == 1
    del limiter
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert figures(DECISIONS) == 1 and figures("headgate.waits") == 1
    assert not figures.has("headgate.keys")
    Limiter("5/hour", name=figures.name).try_acquire("k")
    assert figures(DECISIONS) == 2


def test_collected_limiters_are_forgotten() -> None:
    """Limiters without end, and no scrape, do not fill the memory."""
    before = len(watching._entries)
    for _ in range(10 * watching.FOLD_AT):
        Limiter("5/hour", name="of a loop").try_acquire("k")
    assert len(watching._entries) < before + 2 * watching.FOLD_AT
    assert (
        sum(row.value for row in snapshot() if row.labels.get("limiter") == "of a loop" and row.name == DECISIONS)
        == 1000
    )


def test_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond a hundred names the rest is counted as one, and the log says so once."""
    with caplog.at_level(logging.WARNING, logger="headgate"):
        kept = [Limiter("5/hour", name=f"tenant {number}") for number in range(watching.MAX_NAMES + 5)]
        for limiter in kept:
            limiter.try_acquire("somebody@example.com")
    rows = [row for row in snapshot() if row.name == DECISIONS and row.labels["result"] == "allowed"]
    assert len({row.labels["limiter"] for row in rows} & {f"tenant {number}" for number in range(200)}) == 100
    assert sum(row.value for row in rows if row.labels["limiter"] == watching.OTHER) >= 5
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "more than 100 names" in caplog.text
    assert not any("example.com" in text for row in snapshot() for text in row.labels.values()), "a key is a label"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads of other tests
def test_fork(figures: Figures) -> None:
    """A child of a fork counts from 0: its parent reports what came before."""
    limiter = Limiter("5/hour", name=figures.name)
    limiter.try_acquire("k")
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        limiter.try_acquire("k")
        rows = [row.value for row in snapshot() if row.labels.get("limiter") == figures.name and row.name == DECISIONS]
        os.write(writable, f"{sum(rows):g}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(readable, 10) == b"1"
    os.close(readable)
    os.close(writable)
    assert figures(DECISIONS) == 1


def test_every_family_has_a_good_name() -> None:
    for name, family in FAMILIES.items():
        written = prometheus_name(name)
        assert written.endswith("_total") == (family.kind == "counter")
        assert ("_seconds" in written) == (family.unit == "s")
        assert family.text and not family.text.endswith(".")


# ---------------------------------------------------------------------------------------------------- with a server


@pytest.mark.store_timeout(2.0)
def test_store_calls(servers_apart: Server, figures: Figures) -> None:
    """Calls are counted by result with their time; an outage as failures, a breaker, degraded decisions and errors."""
    server = servers_apart
    limiter = Limiter("5/hour", name=figures.name, store=server.url)
    strict = Limiter("6/hour", name=figures.name, store=limiter.store, on_store_error="raise")
    other = Limiter("5/hour", name="other", store=server.url)  # with a breaker of its own
    for _ in range(7):
        limiter.try_acquire("k")
    store = Figures(limiter.store.display_name)  # type: ignore[attr-defined]  # a RedisStore
    limiter.try_acquire("k")
    assert store("headgate.store.calls", result="answered") == 1
    assert 0 < store("headgate.store.call.time") < 60
    assert figures(DECISIONS, result="allowed", store="redis") == 5
    assert figures(DECISIONS, result="denied", store="redis") == 3
    server.stop()
    for _ in range(6):
        limiter.try_acquire("k")
    with pytest.raises(StoreUnavailable):
        strict.try_acquire("k")
    assert store("headgate.store.calls", result="failed") == 3
    assert store("headgate.store.calls", result="skipped") == 4
    for _ in range(3):
        other.try_acquire("k")
    assert other.store_health().opened == limiter.store_health().opened == 1
    assert store("headgate.store.breaker.open") == 1
    assert store("headgate.store.breaker.opened") == 1
    assert figures(DECISIONS, result="allowed", degraded="true") == 6
    assert figures(DECISIONS, result="error") == 1
    other.close()
    limiter.close()


def test_hybrid(redis_url: str, figures: Figures) -> None:
    """A hybrid limiter reports its leases: permits by how they were decided, what is held, reports and trips."""
    limiter = HybridLimiter("100/hour", name=figures.name, store=redis_url)
    answers = [bool(limiter.try_acquire("k")) for _ in range(130)]
    stats = limiter.stats()
    assert sum(answers) == 100
    assert figures("headgate.lease.permits") == 130 == stats.local + stats.remote
    assert figures("headgate.lease.permits", decided="store") == stats.remote
    assert figures("headgate.lease.permits", decided="local", result="denied") > 0
    assert figures("headgate.lease.reports") > 0
    assert figures("headgate.lease.keys") == 1
    (owner,) = limiter.store.backends  # the leases of threads
    owner.spent -= 10  # as a scrape finds it while a lease is moved from one list to another
    assert figures("headgate.lease.permits") == 130, "no counter falls"
    owner.spent += 10
    server = Figures(limiter.store.store.display_name)  # type: ignore[attr-defined]  # a RedisStore
    assert server.has("headgate.lease.trips") and server.has("headgate.lease.up")
    gone = weakref.ref(limiter)
    limiter.close()
    del limiter
    gc.collect()
    assert gone() is None
    assert figures("headgate.lease.permits") == 130
    assert not figures.has("headgate.lease.keys")
