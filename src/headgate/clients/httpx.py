"""Transports for httpx: every request goes out with a member of a pool.

    pool = AsyncPool("tokens", store="redis://...", **CRAWLER)
    transport = AsyncPoolTransport(pool, header("Authorization", "Bearer {}"))
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get("https://api.example.com/")

The member is the request's until the head of the answer has come; the body may take longer. Raises `PoolExhausted` when
no member is free in time.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

try:
    import httpx
except ImportError as error:
    raise ImportError("headgate.clients.httpx needs httpx: pip install 'headgate[httpx]'") from error

from headgate.clients.retries import Authorize, Drop, Retries, Send, Take, Wait, deliver, header
from headgate.coordination.feedback import Feedback
from headgate.coordination.pool import AsyncPool, Pool
from headgate.plan import arun, run

__all__ = ["AsyncPoolTransport", "PoolTransport", "Retries", "header"]


def _repeatable(request: httpx.Request) -> bool:
    """Whether the body is at hand to be sent again."""
    return isinstance(request.stream, httpx.ByteStream)


class PoolTransport(httpx.BaseTransport):
    """For `httpx.Client`.

    pool       where members come from
    authorize  called with the request and the member before each attempt; see `header`
    transport  what sends the request; the usual one if not given
    retries    how often and how long to try
    """

    def __init__(
        self,
        pool: Pool,
        authorize: Authorize,
        *,
        transport: httpx.BaseTransport | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._pool = pool
        self._authorize = authorize
        self._inner = transport or httpx.HTTPTransport()
        self._retries = retries or Retries()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        def answer(wish: Take | Send | Drop | Wait) -> Any:
            if isinstance(wish, Take):
                return self._pool.acquire(timeout=wish.timeout)
            if isinstance(wish, Send):
                with wish.leased as leased:
                    self._authorize(request, leased.member)
                    try:
                        response = self._inner.handle_request(request)
                    except httpx.TransportError as error:
                        leased.release(failed=True)
                        return error, Feedback("failure")
                    return response, leased.observe(response)
            return wish.response.close() if isinstance(wish, Drop) else time.sleep(wish.seconds)

        response: httpx.Response = run(deliver(self._retries, request.method, _repeatable(request)), answer)
        return response

    def close(self) -> None:
        self._inner.close()


class AsyncPoolTransport(httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient`, with an `AsyncPool`; the rest as in `PoolTransport`."""

    def __init__(
        self,
        pool: AsyncPool,
        authorize: Authorize,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._pool = pool
        self._authorize = authorize
        self._inner = transport or httpx.AsyncHTTPTransport()
        self._retries = retries or Retries()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def answer(wish: Take | Send | Drop | Wait) -> Any:
            if isinstance(wish, Take):
                return await self._pool.acquire(timeout=wish.timeout)
            if isinstance(wish, Send):
                async with wish.leased as leased:
                    self._authorize(request, leased.member)
                    try:
                        response = await self._inner.handle_async_request(request)
                    except httpx.TransportError as error:
                        await leased.release(failed=True)
                        return error, Feedback("failure")
                    return response, leased.observe(response)
            return await (wish.response.aclose() if isinstance(wish, Drop) else asyncio.sleep(wish.seconds))

        response: httpx.Response = await arun(deliver(self._retries, request.method, _repeatable(request)), answer)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()
