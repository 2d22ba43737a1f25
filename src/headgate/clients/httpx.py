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
from collections.abc import Iterable
from typing import Any

try:
    import httpx
except ImportError as error:
    raise ImportError("headgate.clients.httpx needs httpx: pip install 'headgate[httpx]'") from error

from headgate._plan import arun, run
from headgate.clients.authorize import Authorize, header
from headgate.clients.retries import Delivery, Drop, Retries, Send, Take, Wait
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.coordination.leases import AsyncLeased, Leased
from headgate.coordination.pool import AsyncPool, Pool

__all__ = ["AsyncPoolTransport", "Feedback", "PoolTransport", "Retries", "header", "of_response", "of_stranger"]


def _repeatable(request: httpx.Request) -> bool:
    """Whether the body is at hand to be sent again."""
    return isinstance(request.stream, httpx.ByteStream)


def _copy(request: httpx.Request) -> httpx.Request:
    """To write the member into: what follows a redirect takes over the headers of the request as it was."""
    return httpx.Request(
        request.method, request.url, headers=request.headers, stream=request.stream, extensions=request.extensions
    )


# No fault of the member's: nothing was sent.
_OURS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.PoolTimeout)
_UNSENT = (*_OURS, httpx.ConnectError, httpx.ConnectTimeout)


class PoolTransport(httpx.BaseTransport):
    """For `httpx.Client`.

    pool       where members come from
    authorize  called with the request and the member before each attempt; see `header`
    transport  what sends the request; the usual one if not given
    retries    how often and how long to try
    origins    URLs of the servers that members are for; if not given, that of the first request. Requests to others, to
               which a redirect may lead, go out without a member. ``"*"``: members are for all servers
    learn      what an answer says about the member, as a function of the response that returns a `Feedback`: if not
               given `of_response`, or `of_stranger` where members are for all servers
    """

    def __init__(
        self,
        pool: Pool,
        authorize: Authorize,
        *,
        transport: httpx.BaseTransport | None = None,
        retries: Retries | None = None,
        origins: str | Iterable[str] | None = None,
        learn: Learn | None = None,
    ) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"PoolTransport takes a Pool, got {type(pool).__name__}; AsyncPoolTransport an AsyncPool")
        self._pool = pool
        self._delivery = Delivery(authorize, retries, origins, learn)
        self._inner = transport or httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url not in self._delivery.origins:
            return self._inner.handle_request(request)

        def answer(wish: Take | Send | Drop | Wait) -> Any:
            if isinstance(wish, Take):
                return self._pool.acquire(timeout=wish.timeout)
            if isinstance(wish, Send):
                return self._send(request, wish.leased)
            return wish.response.close() if isinstance(wish, Drop) else time.sleep(wish.seconds)

        response: httpx.Response = run(self._delivery.plan(request.method, _repeatable(request)), answer)
        return response

    def _send(self, request: httpx.Request, lease: Leased) -> tuple[httpx.Response | Exception, Feedback]:
        response = None
        try:
            with lease as leased:
                leased.excuse()
                mine = _copy(request)
                self._delivery.authorize(mine, leased.member)
                leased.unanswered = True
                try:
                    response = self._inner.handle_request(mine)
                    leased.unanswered = False
                except httpx.TransportError as error:
                    leased.unanswered = not isinstance(error, _UNSENT)
                    if isinstance(error, _OURS):
                        raise
                    leased.release(failed=True)
                    return error, Feedback("failure")
                verdict = leased.observe(response, self._delivery.learn)
        except BaseException:
            if response is not None:
                response.close()
            raise
        return response, verdict

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
        origins: str | Iterable[str] | None = None,
        learn: Learn | None = None,
    ) -> None:
        if not isinstance(pool, AsyncPool):
            raise TypeError(f"AsyncPoolTransport takes an AsyncPool, got {type(pool).__name__}; PoolTransport a Pool")
        self._pool = pool
        self._delivery = Delivery(authorize, retries, origins, learn)
        self._inner = transport or httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url not in self._delivery.origins:
            return await self._inner.handle_async_request(request)

        async def answer(wish: Take | Send | Drop | Wait) -> Any:
            if isinstance(wish, Take):
                return await self._pool.acquire(timeout=wish.timeout)
            if isinstance(wish, Send):
                return await self._send(request, wish.leased)
            return await (wish.response.aclose() if isinstance(wish, Drop) else asyncio.sleep(wish.seconds))

        response: httpx.Response = await arun(self._delivery.plan(request.method, _repeatable(request)), answer)
        return response

    async def _send(self, request: httpx.Request, lease: AsyncLeased) -> tuple[httpx.Response | Exception, Feedback]:
        response = None
        try:
            async with lease as leased:
                leased.excuse()
                mine = _copy(request)
                self._delivery.authorize(mine, leased.member)
                leased.unanswered = True
                try:
                    response = await self._inner.handle_async_request(mine)
                    leased.unanswered = False
                except httpx.TransportError as error:
                    leased.unanswered = not isinstance(error, _UNSENT)
                    if isinstance(error, _OURS):
                        raise
                    await leased.release(failed=True)
                    return error, Feedback("failure")
                verdict = leased.observe(response, self._delivery.learn)
        except BaseException:
            if response is not None:
                await response.aclose()
            raise
        return response, verdict

    async def aclose(self) -> None:
        await self._inner.aclose()
