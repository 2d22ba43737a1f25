"""People replace limiters in their tests: what docs/testing.md says about that is so."""

import copy
import gc
import inspect
import sys
import weakref
from unittest import mock

import pytest

from headgate import COMPILED, AsyncLimiter, HybridLimiter, Limiter


def test_patched_object() -> None:
    limiter = Limiter("1/hour")
    with mock.patch.object(limiter, "try_acquire", return_value="mocked"):
        assert limiter.try_acquire("k") == "mocked"
    assert limiter.try_acquire("k")
    assert not limiter.try_acquire("k")


def test_made_while_patched() -> None:
    """A limiter that is made while its class is patched is patched."""
    with mock.patch.object(Limiter, "try_acquire", autospec=True, return_value="mocked"):
        limiter = Limiter("1/hour")
        assert limiter.try_acquire("k") == "mocked"
        assert limiter.with_timeout(1.0).try_acquire("k") == "mocked"
        with limiter.limit("k") as decision:
            assert decision == "mocked"
    assert limiter.try_acquire("k")


def test_patched_class() -> None:
    """A patch of the class reaches every limiter, also one that was made before."""
    limiter = Limiter("1/hour")
    with mock.patch.object(Limiter, "try_acquire", autospec=True, return_value="mocked"):
        assert limiter.try_acquire("k") == "mocked"
        assert limiter.with_timeout(1.0).try_acquire("k") == "mocked"
    assert limiter.try_acquire("k")
    assert not limiter.try_acquire("k")


@pytest.mark.parametrize("patched", [Limiter, HybridLimiter])
def test_patched_hybrid_class(patched: type[Limiter]) -> None:
    """A patch of `HybridLimiter`, or of `Limiter`, reaches every `HybridLimiter`."""
    with HybridLimiter("1/hour", store="redis://127.0.0.1:1/0") as limiter:
        with mock.patch.object(patched, "try_acquire", autospec=True, return_value="mocked"):
            assert limiter.try_acquire("k") == "mocked"
            assert limiter.with_timeout(1.0).try_acquire("k") == "mocked"
        assert limiter.try_acquire("k")
        assert not copy.copy(limiter).with_timeout(1.0).try_acquire("k")


async def test_patched_async_class() -> None:
    """The same for `AsyncLimiter`."""
    limiter = AsyncLimiter("1/hour")
    with mock.patch.object(AsyncLimiter, "try_acquire", return_value="mocked"):
        assert await limiter.try_acquire("k") == "mocked"
    assert await limiter.try_acquire("k")


def test_a_copy_is_the_same_limiter() -> None:
    """`copy.copy` gives a limiter with the same state."""
    limiter = Limiter("1/hour")
    assert copy.copy(limiter).try_acquire("k")
    assert not limiter.try_acquire("k")


def test_within_is_with_timeout() -> None:
    """The older name still works."""
    limiter = Limiter("1/hour")
    assert limiter.within(1.0).try_acquire("k")
    assert not limiter.with_timeout(1.0).try_acquire("k")


async def test_patched_async_object() -> None:
    with mock.patch.object(AsyncLimiter, "try_acquire", autospec=True, return_value="mocked"):
        limiter = AsyncLimiter("1/hour")
        assert await limiter.try_acquire("k") == "mocked"
    assert await limiter.try_acquire("k")
    with mock.patch.object(limiter, "try_acquire", return_value="mocked"):
        assert await limiter.try_acquire("k") == "mocked"


def test_a_subclass_may_have_its_own() -> None:
    class Loud(Limiter):
        def try_acquire(self, key: str, permits: int = 1):  # type: ignore[no-untyped-def, override]  # as people write it
            return super().try_acquire(key.upper(), permits)

    limiter = Loud("1/hour")
    assert limiter.try_acquire("k")
    assert not limiter.try_acquire("K")


def test_autospec() -> None:
    """A stand-in that mock makes has the same methods."""
    stand_in = mock.create_autospec(Limiter, instance=True)
    stand_in.try_acquire("k", permits=2)
    with pytest.raises(TypeError):
        stand_in.peek()
    with pytest.raises(TypeError):
        inspect.signature(Limiter.try_acquire).bind(stand_in)
    if not COMPILED:  # mock does not look at the arguments of methods in C
        with pytest.raises(TypeError):
            stand_in.try_acquire()


@pytest.mark.parametrize("kind", [Limiter, HybridLimiter])
def test_weak_references(kind: type[Limiter]) -> None:
    """A weak reference to a limiter survives garbage collections, and ends with the limiter."""
    limiter = kind("1/hour", store="memory://" if kind is Limiter else "redis://127.0.0.1:1/0")
    reference = weakref.ref(limiter)
    held = sys.getrefcount(reference)
    gc.collect()
    limiter.close()
    assert reference() is limiter
    del limiter
    gc.collect()
    assert reference() is None
    assert sys.getrefcount(reference) == held, "freed once"
