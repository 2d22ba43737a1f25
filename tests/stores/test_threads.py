"""Threads that run at the same time for longer than they take to start, as they do without an interpreter lock.

Periods are so long that nothing comes back during a test. With an interpreter lock the threads only take turns.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate import COMPILED, Limiter
from headgate._mypyc import FREE_THREADED
from headgate.hybrid import table
from headgate.stores import MemoryStore, SharedStore, key_table
from headgate.stores.base import Store
from tests.support.callers import in_threads
from tests.support.quotas import LAWS, law

ROOT = Path(__file__).parent.parent.parent
THREADS = 4
LIMIT = 1000


@pytest.fixture(params=["memory", "shared"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store in this process or on this machine; small, so that keys are neighbours in it."""
    if request.param == "memory":
        yield MemoryStore(max_keys=1000)
        return
    root = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"headgate-threads-{os.getpid()}"
    root.mkdir(mode=0o700)
    yield SharedStore(f"shared://{root}", max_keys=1000)
    shutil.rmtree(root)


@pytest.mark.parametrize("algorithm", LAWS)
def test_one_key(algorithm: str, store: Store) -> None:
    """Threads that spend from one key until it is empty get exactly its limit."""
    limiter = Limiter(f"{LIMIT}/3660d", store=store, **law(algorithm))

    def spend() -> int:
        spent = 0
        while limiter.try_acquire("k"):
            spent += 1
        return spent

    assert sum(in_threads(THREADS, spend)) == LIMIT


@pytest.mark.parametrize("quotas", [f"{LIMIT}/3660d", [f"{LIMIT}/3660d", f"{2 * LIMIT}/3660d"]])
@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window"])
def test_a_key_for_each_thread(algorithm: str, quotas: str | list[str], store: Store) -> None:
    """Each thread gets all of its own key, and nothing of another."""
    limiter = Limiter(quotas, store=store, **law(algorithm))

    def spend() -> int:
        key, spent = f"of thread {threading.get_ident()}", 0
        while limiter.try_acquire(key):
            spent += 1
        return spent

    assert in_threads(THREADS, spend) == [LIMIT] * THREADS


@pytest.mark.parametrize("quotas", ["2/3660d", ["2/3660d", "9/3660d"]])
@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window"])
def test_new_keys(algorithm: str, quotas: str | list[str], store: Store) -> None:
    """Threads that meet at the first call of each of many keys get the limit of each."""
    limiter = Limiter(quotas, store=store, **law(algorithm))
    keys = [f"k{number}" for number in range(200)]
    spent = in_threads(THREADS, lambda: [limiter.try_acquire(key).allowed for key in keys])
    assert [sum(of_key) for of_key in zip(*spent, strict=True)] == [2] * len(keys)


@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window"])
def test_full(algorithm: str, store: Store) -> None:
    """A key at its limit stays there while threads fill the store with other keys, over and over."""
    limiter = Limiter("2/3660d", store=store, **law(algorithm))
    assert limiter.try_acquire("k", permits=2)

    def flood() -> int:
        own, too_many = threading.get_ident(), 0
        for number in range(600):
            limiter.try_acquire(f"{own} {number}")
            too_many += limiter.try_acquire("k").allowed
        return too_many

    assert in_threads(THREADS, flood) == [0] * THREADS
    if isinstance(store, MemoryStore):
        assert len(store) <= store.max_keys


def test_the_build_is_known() -> None:
    """A build without an interpreter lock decides under a lock of its own, compiled or not."""
    assert bool(sysconfig.get_config_var("Py_GIL_DISABLED")) == FREE_THREADED
    assert (key_table.LOCKED, table.LOCKED) == (not COMPILED or FREE_THREADED,) * 2


if FREE_THREADED:

    @pytest.mark.server
    def test_the_interpreter_lock_stays_off() -> None:
        """No compiled module of ours makes Python turn its interpreter lock on."""
        code = "import headgate.stores.shared.store, headgate.hybrid, sys; print(sys._is_gil_enabled())"
        command = [sys.executable, "-W", "error", "-c", code]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False\n"
