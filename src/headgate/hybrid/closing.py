"""The exchange by which leases go back in the last moments of an event loop, on connections of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from headgate.hybrid.protocol import LeaseReply
from headgate.stores.base import LeaseCall

if TYPE_CHECKING:
    from headgate.stores.base import AsyncExchange


class Closable(Protocol):
    """What makes the calls, and is closed with the exchange."""

    async def aclose(self) -> None: ...


class ClosingExchange:
    """A class and not a generator: an event loop that ends refuses new async generators."""

    def __init__(
        self,
        exchange: Callable[[Any, Sequence[LeaseCall]], Coroutine[Any, Any, list[LeaseReply | str]]],
        executor: Closable | None,
    ) -> None:
        self._exchange = exchange
        self._executor = executor

    async def __aenter__(self) -> AsyncExchange | None:
        return partial(self._exchange, self._executor) if self._executor else None

    async def __aexit__(self, *_: object) -> None:
        if self._executor:
            await self._executor.aclose()
