"""Transports for httpx: every request goes out with a member of a pool.

    pool = AsyncPool("tokens", store="redis://...", **CRAWLER)
    transport = AsyncPoolTransport(pool, header("Authorization", "Bearer {}"))
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get("https://api.example.com/")

The request has the member until the headers of the answer have come; the body may take longer. Raises `PoolExhausted`
when no member is ready in time.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

try:
    import httpx
except ImportError as error:
    raise ImportError("headgate.clients.httpx needs httpx: pip install 'headgate[httpx]'") from error

from headgate.clients.authorize import Authorize, header
from headgate.clients.retries import Retries
from headgate.clients.sender import PooledSender, check_pool, passed_through
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.coordination.pool import AsyncPool, Pool

__all__ = ["AsyncPoolTransport", "Feedback", "PoolTransport", "Retries", "header", "of_response", "of_stranger"]

AnyPool = TypeVar("AnyPool", bound=Pool | AsyncPool)
AnyTransport = TypeVar("AnyTransport", bound=httpx.BaseTransport | httpx.AsyncBaseTransport)

# Faults of the caller, or of this process: nothing was sent.
_OURS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.PoolTimeout)
_UNSENT = (*_OURS, httpx.ConnectError, httpx.ConnectTimeout)


def _may_be_sent(error: Exception) -> bool:
    # with asyncio, early versions of httpcore let the SSL error of a handshake through as it is
    return not isinstance(error, _UNSENT) and not passed_through(error, "do_handshake")


def _is_failure(error: Exception) -> bool:
    # with asyncio, httpx lets the SSL error of a read through as it is
    return isinstance(error, httpx.TransportError | ssl.SSLError) and not isinstance(error, _OURS)


def _is_repeatable(request: httpx.Request) -> bool:
    """Whether the body is at hand to be sent again."""
    return isinstance(request.stream, httpx.ByteStream)


def _copy(request: httpx.Request) -> httpx.Request:
    return httpx.Request(
        request.method, request.url, headers=request.headers, stream=request.stream, extensions=request.extensions
    )


class _PooledTransport(Generic[AnyPool, AnyTransport]):
    """The arguments of both transports."""

    _pool_type: ClassVar[type[Pool | AsyncPool]]
    _transport_type: ClassVar[type[Any]]  # httpx's own

    def __init__(
        self,
        pool: AnyPool,
        authorize: Authorize,
        *,
        transport: AnyTransport | None = None,
        retries: Retries | None = None,
        origins: str | Iterable[str] | None = None,
        learn: Learn | None = None,
    ) -> None:
        check_pool(self, pool, self._pool_type)
        self._pool: AnyPool = pool
        self._sender = PooledSender(
            authorize, retries, origins, learn, may_be_sent=_may_be_sent, is_failure=_is_failure
        )
        self._inner: AnyTransport = self._transport_type() if transport is None else transport


class PoolTransport(_PooledTransport[Pool, httpx.BaseTransport], httpx.BaseTransport):
    """For `httpx.Client`.

    Args:
        pool: where members come from
        authorize: called with the request and the member before each attempt; see `header`
        transport: what sends the request; httpx's own if not given
        retries: how often and how long a request is tried
        origins: URLs of the servers that members are for; if not given, that of the first request. Requests to other
            servers, to which a redirect may lead, go out without a member. ``"*"``: members are for all servers
        learn: what an answer says about the member, as a function of the response that returns a `Feedback`: if not
            given `of_response`, or `of_stranger` where members are for all servers
    """

    _pool_type = Pool
    _transport_type = httpx.HTTPTransport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        send = self._inner.handle_request
        if request.url not in self._sender.origins:
            return send(request)
        return self._sender.send(self._pool, request.method, _is_repeatable(request), partial(_copy, request), send)

    def close(self) -> None:
        self._inner.close()


class AsyncPoolTransport(_PooledTransport[AsyncPool, httpx.AsyncBaseTransport], httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient`, with an `AsyncPool`; the rest as in `PoolTransport`."""

    _pool_type = AsyncPool
    _transport_type = httpx.AsyncHTTPTransport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        send = self._inner.handle_async_request
        if request.url not in self._sender.origins:
            return await send(request)
        copy = partial(_copy, request)
        repeatable = _is_repeatable(request)
        return await self._sender.asend(self._pool, request.method, repeatable, copy, send, close=httpx.Response.aclose)

    async def aclose(self) -> None:
        await self._inner.aclose()
