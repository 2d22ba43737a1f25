"""Registration in `limits`: schemes, strategies, `install`; and the strategies that headgate adds."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import limits.aio.storage
import limits.storage
import pytest
from limits import RateLimitItemPerMinute
from limits.errors import ConfigurationError
from limits.storage import storage_from_string

import headgate.limits
from headgate.testing import ManualClock
from tests.limits.conftest import FOR_ASYNCIO, FOR_THREADS, Blocking, Place

KINDS = ["memory", "redis", "rediss", "redis+unix", "redis+sentinel", "redis+cluster"]
VALKEY = ["valkey", "valkeys", "valkey+unix", "valkey+sentinel", "valkey+cluster"]
BUCKETS = ["token-bucket", "leaky-bucket", "gcra"]

SCHEMES: dict[str, Any] = limits.storage.SCHEMES  # type: ignore[attr-defined]  # limits has no other name for it


def python(code: str) -> str:
    """What a fresh interpreter prints that runs *code*."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_import_registers() -> None:
    code = "import headgate.limits; from limits.storage import SCHEMES, storage_from_string; print(*SCHEMES); "
    code += "print(type(storage_from_string('memory://')).__module__)"
    schemes, memory = python(code).splitlines()
    wanted = {f"headgate+{kind}" for kind in KINDS} | {f"async+headgate+{kind}" for kind in KINDS}
    assert wanted <= set(schemes.split())
    assert memory == "limits.storage.memory", "the import alone takes nothing over"


def test_without_limits() -> None:
    """The error names the extra to install."""
    said = python("import sys; sys.modules['limits'] = None; import headgate.limits")
    assert "ImportError" in said
    assert "headgate[limits]" in said


def test_install_and_uninstall() -> None:
    """Schemes are taken over and given back, however often that is called; storages that exist stay as they are."""
    before = dict(SCHEMES)
    storage = storage_from_string("memory://")
    for _ in range(2):
        headgate.limits.install()
        for kind in KINDS + VALKEY:
            assert SCHEMES[kind] is headgate.limits.HeadgateStorage
            assert SCHEMES[f"async+{kind}"] is headgate.limits.AsyncHeadgateStorage
    assert isinstance(storage_from_string("memory://"), headgate.limits.HeadgateStorage)
    assert isinstance(storage, limits.storage.MemoryStorage)
    for _ in range(2):
        headgate.limits.uninstall()
        assert before == SCHEMES
    assert isinstance(storage_from_string("memory://"), limits.storage.MemoryStorage)


def test_uninstall_leaves_what_another_has_taken(installed: None) -> None:
    mine = SCHEMES["redis"] = type("Mine", (), {})
    headgate.limits.uninstall()
    assert SCHEMES.pop("redis") is mine
    SCHEMES["redis"] = limits.storage.RedisStorage


@pytest.mark.parametrize("strategy", BUCKETS)
def test_bucket(strategy: str, memory: Place, clock: ManualClock) -> None:
    """Ten at once, then one every six seconds; the reset time is when the next one comes, or all are back."""
    limiter = memory.limiter(strategy, memory.storage(clock=clock))
    item = RateLimitItemPerMinute(10)

    def stats() -> tuple[float, int]:
        seen = limiter.get_window_stats(item, "k")
        return round(seen.reset_time - time.time(), 1), seen.remaining

    assert stats() == (0, 10)
    assert limiter.hit(item, "k", cost=4)
    assert stats() == (24, 6)
    assert limiter.hit(item, "k", cost=6)
    assert stats() == (6, 0)
    assert not limiter.hit(item, "k")
    clock.advance(6)
    assert limiter.test(item, "k")
    assert not limiter.test(item, "k", cost=2)
    assert limiter.hit(item, "k")
    assert not limiter.hit(item, "k")
    limiter.clear(item, "k")
    assert stats() == (0, 10)


@pytest.mark.parametrize("strategy", BUCKETS)
def test_bucket_on_the_fallback_of_an_extension(strategy: str, loop: Any) -> None:
    """Extensions make a memory storage of `limits` for outages; a bucket then has one of headgate instead."""
    item = RateLimitItemPerMinute(2)
    plain = FOR_THREADS[strategy](limits.storage.MemoryStorage())
    fallback = limits.aio.storage.MemoryStorage()
    asynchronous = Blocking(loop, FOR_ASYNCIO[strategy](fallback))
    for limiter in (plain, asynchronous):
        assert limiter.hit(item, "k", cost=2)
        assert not limiter.hit(item, "k")


@pytest.mark.parametrize("strategy", BUCKETS)
def test_bucket_needs_headgate(strategy: str) -> None:
    with pytest.raises(ConfigurationError, match="headgate"):
        FOR_THREADS[strategy](limits.storage.RedisStorage("redis://127.0.0.1:1"))
    with pytest.raises(ConfigurationError, match="headgate"):
        FOR_ASYNCIO[strategy](limits.storage.MemoryStorage())
