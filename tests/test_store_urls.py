"""A store is added by one row of a table: limiters and coordination find it by its URL and by what it offers."""

import asyncio
from typing import Any

import pytest

from headgate import AsyncLimiter, HybridLimiter, Limiter
from headgate.clock import Clock
from headgate.coordination import Lock
from headgate.rule import Rule
from headgate.stores import MemoryStore
from headgate.stores.base import SCHEMES, AsyncBackend, Backend, Health, StoreClass
from headgate.testing import ManualClock


class ToyStore:
    """The least that a store must have; its states are in a memory store."""

    def __init__(self, url: str, clock: Clock | None, options: dict[str, Any]) -> None:
        self.url, self.options, self.closed = url, options, False
        self.memory = MemoryStore(clock=clock)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Any) -> "ToyStore":
        return cls(url, clock, options)

    def open(self, rule: Rule, on_store_error: str = "allow") -> Backend:
        return self.memory.open(rule, on_store_error)

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncBackend:
        return self.memory.open_async(rule, on_store_error)

    def health(self) -> Health:
        return Health(True, role="toy")

    async def ahealth(self) -> Health:
        return self.health()

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.close()


@pytest.fixture(autouse=True)
def toy_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "toy://", StoreClass(__name__, "ToyStore"))
    monkeypatch.setitem(SCHEMES, "gone://", StoreClass("no_such_module_at_all", "GoneStore", "gone"))


def test_a_limiter_opens_and_closes_it() -> None:
    """The class gets the whole URL, the clock and the options; the limiter that opened it closes it."""
    clock = ManualClock()
    with Limiter("2/minute", store="toy://shelf?x=1", clock=clock, prefix="p", max_keys=7) as limiter:
        assert [bool(limiter.try_acquire("k")) for _ in range(3)] == [True, True, False]
        clock.advance(30.0)
        assert limiter.try_acquire("k")
        assert limiter.health().role == "toy"
        store: Any = limiter.store
        assert (store.url, store.options) == ("toy://shelf?x=1", {"prefix": "p", "max_keys": 7})
    assert store.closed


def test_an_async_limiter_opens_and_closes_it() -> None:
    async def check() -> Any:
        async with AsyncLimiter("1/minute", store="toy://") as limiter:
            assert [bool(await limiter.try_acquire("k")) for _ in range(2)] == [True, False]
            return limiter.store

    assert asyncio.run(check()).closed


def test_what_it_does_not_offer_is_said() -> None:
    """A store without leases or states is refused by name, before anything is used."""
    with pytest.raises(ValueError, match=r"needs a store that keeps leases.*redis://.*got toy://"):
        HybridLimiter("1/minute", store="toy://")
    with pytest.raises(TypeError, match=r"coordination needs .*got ToyStore"):
        Lock("a", store="toy://")


def test_the_extra_that_it_needs_is_named() -> None:
    with pytest.raises(ImportError, match=r"pip install 'headgate\[gone\]'"):
        Limiter("1/minute", store="gone://")


def test_a_scheme_that_no_store_has() -> None:
    """What follows the scheme may be a password, so it is not shown."""
    with pytest.raises(
        ValueError, match="unknown store 'http://'; use a URL that starts with one of memory://"
    ) as said:
        Limiter("1/minute", store="http://me:secret@host")
    assert "secret" not in str(said.value)
