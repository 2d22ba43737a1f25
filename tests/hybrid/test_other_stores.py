"""Hybrid limiters on PostgreSQL and on ``shared://``: what they promise on Redis, in short."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import AsyncHybridLimiter, HybridLimiter, Limiter, StoreUnavailable
from headgate.rule import AlgorithmName, OnStoreError
from headgate.stores import SharedStore
from headgate.testing import ManualClock
from tests.hybrid.test_limiter import EXIT, EXIT_OF_A_LOOP, KINDS, SLOW
from tests.hybrid.test_outages import looked_around
from tests.support.clocks import WatchedClock, until
from tests.support.hybrid_exact import overdrawn
from tests.support.hybrid_herd import herd, outcome
from tests.support.stores import OpenStore, OpenStores, Shared

STORES = [pytest.param("postgresql", marks=pytest.mark.server), pytest.param("shared")]
POLICIES: tuple[OnStoreError, ...] = ("allow", "deny", "local", "raise")
HASTY = "?timeout=0.3&connect_timeout=0.3"
OURS = os.environ | {"PYTHONPATH": str(Path(headgate.__file__).parent.parent)}


@pytest.fixture(params=STORES)
def opened(request: pytest.FixtureRequest, open_stores: OpenStores) -> OpenStore:
    """Each store in turn, empty."""
    return open_stores.empty(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_limit(kind: AlgorithmName, opened: OpenStore) -> None:
    """Three limiters together admit the quota, all of it and no more."""
    clock = WatchedClock()
    limiters = [HybridLimiter(SLOW, algorithm=kind, store=opened.patient_url, clock=clock) for _ in range(3)]
    admitted = sum(limiters[turn % 3].try_acquire("k").allowed for turn in range(300))
    assert admitted <= 100

    def all_spent() -> bool:  # what one holds in vain goes back, a spare after 20 seconds, and another has it
        nonlocal admitted
        clock.advance(0.5)
        until(looked_around, clock, *limiters)
        admitted += limiters[0].try_acquire("k").allowed
        return admitted >= 100

    until(all_spent)
    refusals = [limiter.try_acquire("k") for limiter in limiters]
    assert not any(refusals) and all(refusal.retry_after > 0 and not refusal.degraded for refusal in refusals)
    for limiter in limiters:
        limiter.close()
    assert admitted == 100


def test_calls(opened: OpenStore) -> None:
    """Permits, peek, refund, reset and close; names tell limiters apart, and keys are any text."""
    with HybridLimiter(SLOW, store=opened.patient_url) as limiter:
        assert limiter.try_acquire("k", 60) and not limiter.try_acquire("k", 60) and limiter.try_acquire("k", 30)
        assert limiter.refund("k", 10)
        until(lambda: limiter.peek("k", 0).remaining == 20)
        for strange in ("{}", "%", "a:b", "키", "k" * 256, "' \\ \""):
            assert limiter.try_acquire(strange).remaining == 99
    with HybridLimiter(SLOW, store=opened.patient_url, name="a:b") as other:
        assert other.peek("k", 0).remaining == 100
    with HybridLimiter(SLOW, store=opened.patient_url) as limiter:
        assert limiter.peek("k", 0).remaining == 20, "close gave everything back"
        assert limiter.reset("k") and limiter.try_acquire("k", 100)
    with Limiter(SLOW, store=opened.patient_url) as exact:
        assert exact.peek("k", 0).remaining == 100, "a Limiter counts apart"
    with HybridLimiter("10/360d", store=opened.patient_url) as smaller:
        assert not smaller.try_acquire("k"), "a changed quota keeps what was spent"


async def test_calls_for_asyncio(opened: OpenStore) -> None:
    """The same for asyncio, beside checks of an exact limiter in the same event loop."""
    async with AsyncHybridLimiter(SLOW, store=opened.patient_url) as limiter:
        made = await asyncio.gather(*[limiter.try_acquire("k") for _ in range(150)])
        assert sum(map(bool, made)) == 100 and not any(decision.degraded for decision in made)
        assert await limiter.reset("k")
        assert (await limiter.peek("k", 0)).remaining == 100
        while limiter.stats().held < 2:
            assert await limiter.try_acquire("k")
            await asyncio.sleep(0)
        spent = 100 - (await limiter.peek("k", 0)).remaining
    async with AsyncHybridLimiter(SLOW, store=opened.patient_url) as other:
        assert (await other.peek("k", 0)).remaining == 100 - spent, "aclose gave the rest back"


@pytest.mark.parametrize("script", [EXIT, EXIT_OF_A_LOOP], ids=["thread", "event loop"])
def test_exit_releases(script: str, opened: OpenStore) -> None:
    """A process that ends without close() gives its leases back."""
    command = [sys.executable, "-c", script, opened.patient_url]
    done = subprocess.run(command, env=OURS, capture_output=True, text=True, timeout=50, check=True)
    assert done.stderr == ""
    with HybridLimiter("1000/day", store=opened.patient_url) as limiter:
        assert limiter.peek("k", 0).remaining == 1000 - int(done.stdout)


def test_ending_loop_releases(opened: OpenStore) -> None:
    """An event loop that ends as it should gives its leases back without aclose()."""

    async def use() -> int:
        limiter, spent = AsyncHybridLimiter("1000/day", store=opened.patient_url), 0
        while limiter.stats().held < 2:
            spent += (await limiter.try_acquire("k")).allowed
            await asyncio.sleep(0)
        return spent

    spent = asyncio.run(use())
    with HybridLimiter("1000/day", store=opened.patient_url) as limiter:
        assert limiter.peek("k", 0).remaining == 1000 - spent


def test_fork(opened: OpenStore) -> None:
    """A forked child has leases of its own; parent and child share the quota."""
    limiter = HybridLimiter("200/360d", store=opened.patient_url)
    until(lambda: limiter.try_acquire("k").allowed and limiter.stats().held > 1)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            many = sum(bool(limiter.try_acquire("k")) for _ in range(400))
            limiter.close()
            os.write(write, str(many).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        admitted = int(pipe.read()) + limiter.stats().local + limiter.stats().remote
    assert os.waitpid(child, 0)[1] == 0

    def all_spent() -> bool:
        nonlocal admitted
        admitted += sum(bool(limiter.try_acquire("k")) for _ in range(400))
        return admitted >= 200

    until(all_spent)
    assert admitted == 200
    limiter.close()


HOLDS = """
import sys, time
from headgate import HybridLimiter
from headgate.testing import ManualClock
limiter = HybridLimiter("100/360d", store=sys.argv[1], clock=ManualClock())
spent = 0
while limiter.stats().held < 5:
    spent += limiter.try_acquire("k").allowed
print(spent, flush=True)
time.sleep(60)
"""


def test_killed_holder(opened: OpenStore) -> None:
    """The lease of a process that was killed (-9) runs out: what it held is lost, and nothing is spent twice."""
    command = [sys.executable, "-c", HOLDS, opened.patient_url]
    with subprocess.Popen(command, env=OURS, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        spent = int(holder.stdout.readline())
        holder.kill()
    clock = ManualClock()
    with HybridLimiter(SLOW, store=opened.patient_url, clock=clock) as limiter:
        assert not limiter.try_acquire("k", 100 - spent), "what it held is its own while the lease lasts"
        clock.advance(60.0)
        left = limiter.peek("k", 0).remaining
        assert 20 <= left < 100 - spent, "half of the limit is leased at most"
        assert limiter.try_acquire("k", left) and not limiter.try_acquire("k")


def test_lost_data(opened: OpenStore) -> None:
    """Lost data is not worth a second quota."""
    limiter, admitted = HybridLimiter("1000/day", store=opened.patient_url), 0
    while limiter.stats().held < 5:
        admitted += limiter.try_acquire("k").allowed
    opened.clear()
    admitted += sum(bool(limiter.try_acquire("k")) for _ in range(3000))
    assert admitted <= 1000
    limiter.close()


@pytest.mark.slow
@pytest.mark.xdist_group("herd")
def test_processes(opened: OpenStore) -> None:
    """Four processes at three times the rate, one killed and one stopped for a while: never one too many."""
    rate, seconds, dice = 1000, 2.0, random.Random()
    with herd(opened.patient_url, f"{rate}/second", 4, seconds, 3 * rate) as workers:
        until(lambda: all(worker.begun() for worker in workers))
        killed, frozen = dice.sample(workers, 2)
        time.sleep(dice.uniform(0.2, 0.5))
        killed.process.send_signal(signal.SIGKILL)
        frozen.process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        frozen.process.send_signal(signal.SIGCONT)
        found = outcome(workers, 60)
    assert overdrawn(rate, rate, found.calls) == 0
    assert len(found.stats) == 3 and found.admitted > rate, "more than the bucket that they began with"


# ------------------------------------------------------------------------------------------------------------- outages


@contextmanager
def lock_held(opened: OpenStore) -> Iterator[None]:
    """The lock of the leases in a shared store is taken, as by a process that was stopped in an exchange."""
    assert isinstance(opened, Shared)
    with open(Path(opened.root) / "system-clock" / "leases" / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


OUTAGES: dict[str, tuple[str, Callable[[OpenStore], AbstractContextManager[None]]]] = {
    "killed": ("postgresql", lambda opened: opened.gone()),
    "frozen": ("postgresql", lambda opened: opened.silent()),
    "locked": ("shared", lock_held),
}
ROWS = [pytest.param(name, marks=[pytest.mark.server] * (name != "locked")) for name in OUTAGES]


@pytest.mark.slow
@pytest.mark.parametrize("outage", ROWS)
def test_outages(outage: str, open_stores: OpenStores) -> None:
    """The policy answers until the store is back, and then the store does."""
    kind, begin = OUTAGES[outage]
    opened = open_stores.empty(kind)
    url = opened.url + (HASTY if kind == "postgresql" else "")
    with ExitStack() as stack:
        limiters = {
            policy: stack.enter_context(HybridLimiter(SLOW, store=url, name=policy, on_store_error=policy))
            for policy in POLICIES
        }
        until(lambda: not any(limiters[policy].peek("k").degraded for policy in POLICIES))
        with begin(opened):
            answers: dict[str, Any] = {policy: limiters[policy].try_acquire("new") for policy in POLICIES[:3]}
            assert all(answer.degraded for answer in answers.values())
            assert answers["allow"] and not answers["deny"]
            with pytest.raises(StoreUnavailable):
                limiters["raise"].try_acquire("new")
            assert not limiters["deny"].reset("k") and limiters["deny"].stats().backend == "down"
        for policy in POLICIES[:3]:
            until(lambda limiter: not limiter.try_acquire(os.urandom(4).hex()).degraded, limiters[policy])
        until(lambda: limiters["deny"].stats().backend == "up")
        owing = limiters["allow"]._backend.leases["new"]
        until(lambda: owing.debt == 0)
        assert limiters["allow"].peek("new", 0).remaining <= 99, "what was allowed in the outage was charged afterwards"


@pytest.mark.parametrize("outage", ROWS[1:])
async def test_outages_for_asyncio(outage: str, open_stores: OpenStores) -> None:
    """The same for asyncio; the event loop goes on meanwhile."""
    kind, begin = OUTAGES[outage]
    opened = open_stores.empty(kind)
    url = opened.url + (HASTY if kind == "postgresql" else "")
    async with AsyncHybridLimiter(SLOW, store=url, on_store_error="deny") as limiter:
        assert not (await limiter.peek("k")).degraded
        with begin(opened):
            asked, turns = asyncio.create_task(limiter.try_acquire("k")), 0
            while not asked.done():
                turns += 1
                await asyncio.sleep(0.001)
            assert (await asked).degraded and turns > 10
            assert (await limiter.with_timeout(0.01).try_acquire("other")).degraded

        async def is_back() -> bool:
            return not (await limiter.try_acquire(os.urandom(4).hex())).degraded

        deadline = time.monotonic() + 30
        while not await is_back():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


def test_shared_leases_need_no_table(tmp_path: Path) -> None:
    """A hybrid limiter on shared:// makes the files of its leases, and none for decisions that it does not make."""
    store = SharedStore(f"shared://{tmp_path}/store")
    with HybridLimiter(SLOW, store=store) as limiter:
        assert limiter.try_acquire("k")
        assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["leases"]
    store.close()
