"""aiohttp: ``web.Application(middlewares=[limits.middleware])``, and ``@limits.limit("5/minute")`` on a handler.

Headers are added when a response is prepared, so that streams, WebSockets and errors carry them.
"""

from __future__ import annotations

import asyncio
import functools
from contextvars import ContextVar

from headgate.decision import Decision
from headgate.web.exchange import CLIENT_LEFT, ResponseInfo
from headgate.web.handlers import HandlerExchange, HandlerLimit, HandlerRateLimits, LimitedRoute

try:
    from aiohttp import hdrs, web
    from aiohttp.typedefs import Handler
    from aiosignal import Signal
except ImportError as error:
    raise ImportError("headgate.web.aiohttp needs aiohttp: pip install 'headgate[aiohttp]'") from error

__all__ = ["RateLimits"]

# The exchange of the request that this task serves: a middleware before ours may have made a copy of the request.
_current: ContextVar[AiohttpExchange | None] = ContextVar("headgate_exchange", default=None)


def _known_key(key: str) -> str:
    """A key of requests. aiohttp warns of the first use of each text as a key, unless it is in this set."""
    seen: set[str] = getattr(web.BaseRequest, "_seen_str_keys", set())
    seen.add(key)
    return key


DECISION = _known_key("rate_limit")
TIGHTEST = _known_key("headgate_decision")  # the same, whatever the application does with that one


class AiohttpExchange(HandlerExchange):
    """A request of an aiohttp server."""

    __slots__ = ()

    def peer(self) -> str:
        # `request.remote` may be what a middleware took from a header
        transport = self.request.transport
        peer = transport.get_extra_info("peername") if transport is not None else self.request.remote
        return str(peer[0]) if isinstance(peer, tuple | list) else peer or ""


class AiohttpLimit(HandlerLimit):
    """A limit as a decorator of a handler, a `web.View` or one of its methods."""


class RateLimits(HandlerRateLimits[AiohttpLimit]):
    """The limits of an aiohttp application. The decision is ``request["rate_limit"]``."""

    limit_class = AiohttpLimit
    exchange_class = AiohttpExchange
    view_class = web.View
    request_class = web.Request
    application_class = web.Application
    installation = "web.Application(middlewares=[limits.middleware])"

    @functools.cached_property
    def request_key(self) -> str:
        return _known_key(f"headgate_{id(self)}")

    @functools.cached_property
    def _routes(self) -> dict[tuple[web.AbstractRoute, str], LimitedRoute]:
        return {}

    def exchange_of(self, request: web.Request) -> AiohttpExchange | None:
        exchange: AiohttpExchange | None = request.get(self.request_key)
        return exchange

    def decision_of(self, request: web.Request) -> Decision | None:
        made: Decision | None = request.get(TIGHTEST)
        return made

    def publish(self, request: web.Request, made: Decision | None) -> None:
        request[DECISION] = request[TIGHTEST] = made

    def response(self, status: int, headers: list[tuple[str, str]], body: bytes) -> web.Response:
        return web.Response(status=status, headers=headers, body=body)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """For ``web.Application(middlewares=[limits.middleware])``."""
        if not self.enabled or self.request_key in request:
            return await handler(request)  # a second installation counts nothing
        known = self._route(request) if request.match_info.http_exception is None else None
        exchange = request[self.request_key] = AiohttpExchange(self, request, known)
        request.setdefault(DECISION, None)
        _current.set(exchange)
        application = request.match_info.apps[0]
        if self._on_prepare not in application.on_response_prepare:
            self._listen(application)
        denial: web.StreamResponse | None = await self.meet(exchange)
        if denial is not None:
            return denial
        try:
            return await handler(request)
        except asyncio.CancelledError:
            if self.needs_settling(exchange):
                await self.settle_later(exchange, ResponseInfo(CLIENT_LEFT))
            raise

    def _route(self, request: web.Request) -> LimitedRoute:
        method = request.method if request.method in hdrs.METH_ALL else hdrs.METH_ANY
        route = request.match_info.route
        known = self._routes.get((route, method))
        if known is None:
            handler = request.match_info.handler
            functions = [handler]
            if isinstance(handler, type):  # a view is one handler for each method
                functions.append(getattr(handler, method.lower(), handler))
                named = method
            else:
                named = route.method
            template = route.resource.canonical if route.resource is not None else ""
            text = f"{'GET' if named == 'HEAD' else named} {template}"
            known = LimitedRoute(text, self.limits_on(functions), self.are_exempt(functions))
            self._routes[route, method] = known
        return known

    def _listen(self, application: web.Application) -> None:
        """Have `_on_prepare` called. The signals of an application that runs are frozen: a copy takes their place."""
        signal: Signal[web.Request, web.StreamResponse] = Signal(application)
        signal.extend([*application.on_response_prepare, self._on_prepare])
        signal.freeze()
        application._on_response_prepare = signal

    async def _on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Called by aiohttp before the headers of any response are sent."""
        exchange = self.exchange_of(request) or _current.get()
        if exchange is None or exchange.limits is not self:
            return
        self.add_headers(exchange, response.headers)
        if self.needs_settling(exchange):
            headers = {name.lower(): value for name, value in response.headers.items()}
            await self.settle_later(exchange, ResponseInfo(response.status, headers, response))
