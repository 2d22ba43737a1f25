"""The storage classes of `limits`, one for threads and one for asyncio, for all schemes; and `install`.

Each method runs an operation of `headgate.limits.operations`. When the store does not answer they raise
`headgate.StoreUnavailable`, or `limits.errors.StorageError` around it with ``wrap_exceptions=True``.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, TypeVar

import limits.aio.storage
import limits.storage
from limits.errors import StorageError
from limits.storage.base import TimestampedSlidingWindow

from headgate._plan import arun, run
from headgate.errors import StoreUnavailable
from headgate.limits.operations import MOVING, SLIDING, Plan
from headgate.limits.options import SCHEMES
from headgate.limits.stores import operations
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore

T = TypeVar("T")


def _plain(value: T) -> T:
    return value


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class OnHeadgate:
    """What both classes share: the store below, and the error when it does not answer."""

    blocking: ClassVar[bool]

    def __init__(self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)  # type: ignore[call-arg]  # a Storage of limits is next
        self._operations = operations(uri or "memory://", options, blocking=self.blocking)

    @property
    def storage(self) -> MemoryStore | RedisStore:
        """The store."""
        return self._operations.store

    @property
    def base_exceptions(self) -> type[Exception]:
        return StoreUnavailable


class HeadgateStorage(
    OnHeadgate,
    limits.storage.Storage,
    limits.storage.MovingWindowSupport,
    limits.storage.SlidingWindowCounterSupport,
    TimestampedSlidingWindow,
):
    """A storage of `limits` on a store of headgate, for threads."""

    STORAGE_SCHEME = [f"headgate+{scheme}" for scheme in SCHEMES]  # noqa: RUF012  # limits declares it so
    blocking = True

    def _run(self, plan: Plan[T]) -> T:
        try:
            return run(plan, _plain)
        except StoreUnavailable as error:
            if self.wrap_exceptions:
                raise StorageError(error) from error
            raise

    def incr(self, key: str, expiry: float, amount: float = 1) -> int:
        """Count *amount* in the window that the key's first hit started; returns what the counter would be."""
        return self._run(self._operations.incr(key, expiry, amount))

    def get(self, key: str) -> int:
        """The counter of a fixed window."""
        return self._run(self._operations.get(key))

    def get_expiry(self, key: str) -> float:
        """When a fixed window ends, in epoch seconds."""
        return self._run(self._operations.get_expiry(key))

    def check(self) -> bool:
        """Whether the store can decide; the answer is good for a second."""
        return self._run(self._operations.check())

    def reset(self) -> int:
        """Forget all keys with this storage's prefix; returns how many records that were."""
        return self._run(self._operations.reset())

    def clear(self, key: str) -> None:
        """Forget *key*, in every strategy."""
        self._run(self._operations.clear(key))

    def acquire_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        return self._run(self._operations.take(MOVING, key, limit, expiry, amount))

    def get_moving_window(self, key: str, limit: int, expiry: float) -> tuple[float, int]:
        return self._run(self._operations.moving_window(key, limit, expiry))

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        return self._run(self._operations.take(SLIDING, key, limit, expiry, amount))

    def get_sliding_window(self, key: str, expiry: float) -> tuple[int, float, int, float]:
        return self._run(self._operations.sliding_window(key, expiry))

    def clear_sliding_window(self, key: str, expiry: float) -> None:
        self.clear(key)

    def take(self, kind: str, key: str, limit: int, expiry: float, amount: float) -> bool:
        """Spend from a bucket."""
        return self._run(self._operations.take(kind, key, limit, expiry, amount))

    def test(self, kind: str, key: str, limit: int, expiry: float, amount: float) -> bool:
        """The answer that `take` would give."""
        return self._run(self._operations.test(kind, key, limit, expiry, amount))

    def stats(self, kind: str, key: str, limit: int, expiry: float) -> tuple[float, int]:
        """When a bucket has its next permits, in epoch seconds, and how many it has."""
        return self._run(self._operations.stats(kind, key, limit, expiry))


class AsyncHeadgateStorage(
    OnHeadgate,
    limits.aio.storage.Storage,
    limits.aio.storage.MovingWindowSupport,
    limits.aio.storage.SlidingWindowCounterSupport,
    TimestampedSlidingWindow,
):
    """The same for asyncio."""

    STORAGE_SCHEME = [f"async+headgate+{scheme}" for scheme in SCHEMES]  # noqa: RUF012  # limits declares it so
    blocking = False

    async def _run(self, plan: Plan[T]) -> T:
        try:
            return await arun(plan, _awaited)
        except StoreUnavailable as error:
            if self.wrap_exceptions:
                raise StorageError(error) from error
            raise

    async def incr(self, key: str, expiry: float, amount: float = 1) -> int:
        return await self._run(self._operations.incr(key, expiry, amount))

    async def get(self, key: str) -> int:
        return await self._run(self._operations.get(key))

    async def get_expiry(self, key: str) -> float:
        return await self._run(self._operations.get_expiry(key))

    async def check(self) -> bool:
        return await self._run(self._operations.check())

    async def reset(self) -> int:
        return await self._run(self._operations.reset())

    async def clear(self, key: str) -> None:
        await self._run(self._operations.clear(key))

    async def acquire_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        return await self._run(self._operations.take(MOVING, key, limit, expiry, amount))

    async def get_moving_window(self, key: str, limit: int, expiry: float) -> tuple[float, int]:
        return await self._run(self._operations.moving_window(key, limit, expiry))

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        return await self._run(self._operations.take(SLIDING, key, limit, expiry, amount))

    async def get_sliding_window(self, key: str, expiry: float) -> tuple[int, float, int, float]:
        return await self._run(self._operations.sliding_window(key, expiry))

    async def clear_sliding_window(self, key: str, expiry: float) -> None:
        await self.clear(key)

    async def take(self, kind: str, key: str, limit: int, expiry: float, amount: float) -> bool:
        return await self._run(self._operations.take(kind, key, limit, expiry, amount))

    async def test(self, kind: str, key: str, limit: int, expiry: float, amount: float) -> bool:
        return await self._run(self._operations.test(kind, key, limit, expiry, amount))

    async def stats(self, kind: str, key: str, limit: int, expiry: float) -> tuple[float, int]:
        return await self._run(self._operations.stats(kind, key, limit, expiry))


# ------------------------------------------------------------------------------------------------- taking over schemes

_REGISTRY: dict[str, Any] = limits.storage.SCHEMES  # type: ignore[attr-defined]  # limits has no other name for it
_TAKEN: dict[str, Any] = {
    **dict.fromkeys(SCHEMES, HeadgateStorage),
    **{f"async+{scheme}": AsyncHeadgateStorage for scheme in SCHEMES},
}
_before: dict[str, Any] = {}


def install() -> None:
    """Take over ``memory://``, ``redis://`` and their kin in `limits`, for storages that are made from now on."""
    for scheme, ours in _TAKEN.items():
        if _REGISTRY.get(scheme) is not ours:
            _before[scheme] = _REGISTRY.get(scheme)
            _REGISTRY[scheme] = ours


def uninstall() -> None:
    """Give the schemes back to the classes that had them before `install`."""
    while _before:
        scheme, theirs = _before.popitem()
        if _REGISTRY.get(scheme) is _TAKEN[scheme]:
            _REGISTRY[scheme] = theirs
            if theirs is None:
                del _REGISTRY[scheme]
