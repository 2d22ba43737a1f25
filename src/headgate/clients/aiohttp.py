"""A client middleware for aiohttp: every request goes out with a member of a pool.

    pool = AsyncPool("tokens", store="redis://...", **CRAWLER)
    middleware = PoolMiddleware(pool, header("Authorization", "Bearer {}"))
    async with aiohttp.ClientSession(middlewares=[middleware]) as session:
        await session.get("https://api.example.com/")

The request has the member until the headers of the answer have come; the body may take longer. Raises `PoolExhausted`
when no member is ready in time. The session's total time-out covers waiting for a member and all attempts.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from contextvars import ContextVar

try:
    import aiohttp
    from aiohttp import ClientHandlerType, payload
except ImportError as error:
    raise ImportError("headgate.clients.aiohttp needs aiohttp >= 3.12: pip install 'headgate[aiohttp]'") from error

from headgate.clients.authorize import Authorize, header
from headgate.clients.retries import Retries
from headgate.clients.sender import PooledSender, check_pool, passed_through
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.coordination.pool import AsyncPool

__all__ = ["Feedback", "PoolMiddleware", "Retries", "header", "of_response", "of_stranger"]

_UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)  # of TCP, TLS and proxies
_REPEATED_BY_AIOHTTP = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)

# The timer of a request that has failed, and its error: see `PoolMiddleware.__call__`.
_FAILED: ContextVar[tuple[object, Exception] | None] = ContextVar("failed request of aiohttp", default=None)


def _may_be_sent(error: Exception) -> bool:
    return not isinstance(error, _UNSENT)


def _is_failure(error: Exception) -> bool:
    if isinstance(error, aiohttp.ConnectionTimeoutError):  # unless all connections of this session were in use
        return not passed_through(error, "_wait_for_available_connection")
    broken = aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | aiohttp.ClientResponseError
    return isinstance(error, broken | TimeoutError | ssl.SSLError)


async def _close(response: aiohttp.ClientResponse) -> None:
    response.release()


class PoolMiddleware:
    """For ``aiohttp.ClientSession(middlewares=[...])``.

    Args:
        pool: where members come from
        authorize: called with the request and the member before each attempt; see `header`
        retries: how often and how long a request is tried
        origins: URLs of the servers that members are for; if not given, that of the first request. Requests to other
            servers, to which a redirect may lead, go out without a member. ``"*"``: members are for all servers
        learn: what an answer says about the member, as a function of the response that returns a `Feedback`: if not
            given `of_response`, or `of_stranger` where members are for all servers
    """

    def __init__(
        self,
        pool: AsyncPool,
        authorize: Authorize,
        *,
        retries: Retries | None = None,
        origins: str | Iterable[str] | None = None,
        learn: Learn | None = None,
    ) -> None:
        check_pool(self, pool, AsyncPool)
        self._pool = pool
        self._sender = PooledSender(
            authorize, retries, origins, learn, may_be_sent=_may_be_sent, is_failure=_is_failure
        )

    async def __call__(self, request: aiohttp.ClientRequest, handler: ClientHandlerType) -> aiohttp.ClientResponse:
        """Send *request* with members of the pool until there is an answer, or no more time.

        aiohttp repeats an idempotent request whose connection broke once more, through all its middlewares. The
        attempts are used up by then, so that repetition ends at once with the same error. It is known by its timer,
        which aiohttp makes once for each call of the session.
        """
        if request.url not in self._sender.origins:
            return await handler(request)
        timer, failed = getattr(request, "_timer", None), _FAILED.get()
        if failed is not None:
            _FAILED.set(None)
            if failed[0] is timer:
                raise failed[1]
        original, url = request.headers.copy(), request.url

        async def send(request: aiohttp.ClientRequest) -> aiohttp.ClientResponse:
            try:
                return await handler(request)
            finally:  # responses and errors show the headers of the request, which must not have the secret
                request.headers.clear()
                request.headers.extend(original)
                request.url = url

        repeatable = not request.body or isinstance(request.body, payload.BytesPayload)
        try:
            return await self._sender.asend(self._pool, request.method, repeatable, lambda: request, send, close=_close)
        except _REPEATED_BY_AIOHTTP as error:
            if timer is not None:
                _FAILED.set((timer, error))
            raise
