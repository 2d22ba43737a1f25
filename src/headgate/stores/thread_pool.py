"""A backend that blocks, behind awaitable methods: each call runs in a thread of the event loop's pool.

It serves async functions under a plain `Limiter`, whose connections belong to threads. A task that is cancelled in
mid-call loses nothing: what its thread takes afterwards is refunded.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TypeVar

from headgate.clock import Clock
from headgate.decision import Decision
from headgate.rule import Rule
from headgate.stores.base import Backend, Health, Store, StoreHealth, kind_of

R = TypeVar("R")


class ThreadPoolStore:
    """Both the store and its only backend."""

    in_process = False

    def __init__(self, store: Store, backend: Backend) -> None:
        self._store = store
        self.kind = kind_of(store)
        self._backend = backend

    @property
    def clock(self) -> Clock:
        return self._backend.clock

    def open(self, rule: Rule, on_store_error: str = "allow") -> Backend:
        return self._backend

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> ThreadPoolStore:
        return self

    def health(self) -> Health:
        return self._store.health()

    async def ahealth(self) -> Health:
        return await self._run(self._store.health)

    def close(self) -> None:
        """The backend belongs to the limiter that lent it."""

    async def aclose(self) -> None:
        """The backend belongs to the limiter that lent it."""

    async def try_acquire(self, key: str, permits: int = 1) -> Decision:
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(None, self._backend.try_acquire, key, permits)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(functools.partial(self._refund_unread, loop, key, permits))
            raise

    async def peek(self, key: str, permits: int = 1) -> Decision:
        return await self._run(self._backend.peek, key, permits)

    async def refund(self, key: str, permits: int = 1) -> bool:
        return await self._run(self._backend.refund, key, permits)

    async def reset(self, key: str) -> bool:
        return await self._run(self._backend.reset, key)

    def store_health(self) -> StoreHealth:
        return self._backend.store_health()

    def with_timeout(self, seconds: float) -> ThreadPoolStore:
        return ThreadPoolStore(self._store, self._backend.with_timeout(seconds))

    async def _run(self, function: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)

    def _refund_unread(
        self, loop: asyncio.AbstractEventLoop, key: str, permits: int, call: asyncio.Future[Decision]
    ) -> None:
        if not call.cancelled() and not call.exception() and call.result().allowed and not call.result().degraded:
            loop.run_in_executor(None, self._backend.refund, key, permits)
