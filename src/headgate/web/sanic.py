"""Sanic: ``limits = RateLimits(app)``, and ``@limits.limit("5/minute")`` on a handler, a view or a blueprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Unpack

from headgate.decision import Decision
from headgate.web.asgi import TRY_AGAIN_LATER
from headgate.web.core import RateLimitsOptions
from headgate.web.exchange import CLIENT_LEFT, ResponseInfo
from headgate.web.handlers import (
    EXEMPT,
    LIMITS,
    HandlerExchange,
    HandlerLimit,
    HandlerRateLimits,
    LimitedRoute,
)
from headgate.web.limit import SetupError

try:
    from sanic import Blueprint, HTTPResponse, Request, Sanic
    from sanic.blueprints import BlueprintGroup
    from sanic.views import HTTPMethodView
except ImportError as error:
    raise ImportError("headgate.web.sanic needs Sanic: pip install 'headgate[sanic]'") from error

__all__ = ["RateLimits"]

Target = TypeVar("Target")

GROUP, BLUEPRINT, HANDLER = 1, 2, 3  # from the outside in: what is exempt is free of the limits around it
SWITCHING_PROTOCOLS = 101
DECISION = "headgate_decision"  # the tightest one, of all limits around an application
FIRST = 1_000_000  # the priority of a middleware that runs before all others


class SanicExchange(HandlerExchange):
    """A request of a Sanic application."""

    __slots__ = ("end_watch",)

    def __init__(self, limits: RateLimits, request: Request, known: LimitedRoute | None) -> None:
        super().__init__(limits, request, known)
        self.end_watch: Callable[[], object] | None = None

    def peer(self) -> str:
        # `request.ip` is empty in a request that could not be read, and others may be what a header says
        peer = self.request.transport.get_extra_info("peername") if self.request.transport else None
        return str(peer[0]) if isinstance(peer, tuple | list) and peer else ""

    def is_multiprocess(self) -> bool:
        return bool(self.request.app.state.workers > 1)


class SanicLimit(HandlerLimit):
    """A limit as a decorator of a handler or a view; a blueprint or a group is limited by ``limits.limit(...)(it)``."""

    limits: RateLimits

    def __call__(self, target: Target) -> Target:
        if not isinstance(target, Blueprint | BlueprintGroup):
            return super().__call__(target)
        self.limits.blueprint_marks.append((target, LIMITS, self))

        def check(request: Request) -> None:  # a blueprint takes no method
            if self.limits.exchange_of(request) is None:
                self.check_installed()

        applications = {app for each in _blueprints(target) if each.registered for app in each.apps}
        if not applications:
            target.on_request(check)
        elif not applications <= self.limits.applications:  # Sanic would register it again, to add the check
            raise SetupError(f"{target!r} is in an application without its limits: {self.limits.installation} first")
        return target


class RateLimits(HandlerRateLimits[SanicLimit]):
    """The limits of a Sanic application. The decision is ``request.ctx.rate_limit``.

    Args:
        app: the application; None: `init_app` gets it
        **options: what `RateLimitsBase` takes
    """

    limit_class = SanicLimit
    exchange_class = SanicExchange
    view_class = HTTPMethodView
    request_class = Request
    application_class = Sanic
    installation = "RateLimits(app) or limits.init_app(app)"

    def __init__(self, app: Sanic[Any, Any] | None = None, **options: Unpack[RateLimitsOptions]) -> None:
        if app is not None and not isinstance(app, Sanic):
            raise TypeError(self.unnamed_text(app))
        super().__init__(**options)
        self.applications: set[Sanic[Any, Any]] = set()
        self.blueprint_marks: list[tuple[Blueprint | BlueprintGroup, str, Any]] = []
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Sanic[Any, Any]) -> None:
        """Limit *app*. May be called for several applications.

        Args:
            app: the application
        """
        if not isinstance(app, Sanic):
            raise TypeError(f"init_app takes a Sanic application, got {app!r:.60}")
        self.applications.add(app)
        app.on_request(self._on_request, priority=FIRST)
        # a middleware of responses that returns one ends the others: ours is the first of them
        app.on_response(self._on_response, priority=-FIRST)  # type: ignore[no-untyped-call]  # by Sanic

    def exempt(self, target: Target) -> Target:
        """Free a handler, a view, a blueprint or a group from the default and from the limits around it.

        Args:
            target: what is freed
        """
        if not isinstance(target, Blueprint | BlueprintGroup):
            return super().exempt(target)
        self.blueprint_marks.append((target, EXEMPT, True))
        return target

    def exchange_of(self, request: Request) -> SanicExchange | None:
        exchange: SanicExchange | None = getattr(request.ctx, self.request_key, None)
        return exchange

    def decision_of(self, request: Request) -> Decision | None:
        made: Decision | None = getattr(request.ctx, DECISION, None)
        return made

    def publish(self, request: Request, made: Decision | None) -> None:
        request.ctx.rate_limit = made
        setattr(request.ctx, DECISION, made)

    def response(self, status: int, headers: list[tuple[str, str]], body: bytes) -> HTTPResponse:
        return HTTPResponse(body, status, dict(headers))

    async def _on_request(self, request: Request) -> HTTPResponse | None:
        if not self.enabled or self.exchange_of(request) is not None:
            return None  # a second installation counts nothing
        exchange = SanicExchange(self, request, self._route(request) if request.route else None)
        setattr(request.ctx, self.request_key, exchange)
        self.publish(request, self.decision_of(request))
        denial: HTTPResponse | None = await self.meet(exchange)
        if denial is not None and getattr(request.transport, "scope", {}).get("type") == "websocket":
            _answer_websocket(request.transport)
        if self.needs_settling(exchange):
            if hasattr(request.route and request.route.handler, "is_websocket"):
                await self.settle_later(exchange, ResponseInfo(SWITCHING_PROTOCOLS))  # Sanic answers it by itself
            else:
                exchange.end_watch = self.settle_at_end(exchange)
        return denial

    async def _on_response(self, request: Request, response: Any) -> None:
        exchange = self.exchange_of(request)
        if exchange is None:
            return
        self.add_headers(exchange, response.headers)
        if exchange.end_watch is not None:
            exchange.end_watch()
        if self.needs_settling(exchange):
            headers = {name.lower(): value for name, value in response.headers.items()}
            lost = request.conn_info is not None and request.conn_info.lost  # Sanic makes an answer to it all the same
            status = CLIENT_LEFT if lost else response.status
            await self.settle_later(exchange, ResponseInfo(status, headers, response))

    def _route(self, request: Request) -> LimitedRoute:
        route: Any = request.route
        view = getattr(route.handler, "view_class", None)  # a view is one handler for each method
        name = f"{self.request_key}_{request.method}" if view else self.request_key
        known: LimitedRoute | None = getattr(route.ctx, name, None)
        if known is None:
            functions = [route.handler]
            methods = set(route.methods) - {"HEAD", "OPTIONS"} or route.methods
            if view is not None:
                functions += [view, getattr(view, request.method.lower(), None) or getattr(view, "get", view)]
                methods = {"GET" if request.method == "HEAD" else request.method}
            said = [*self._said_of_blueprints(route), (HANDLER, EXEMPT, self.are_exempt(functions))]
            exempt = max((level for level, what, value in said if what == EXEMPT and value), default=0)
            limits = [value for level, what, value in said if what == LIMITS and level >= exempt]
            limits += self.limits_on(functions)
            known = LimitedRoute(f"{','.join(sorted(methods))} /{route.path}", limits, exempt > 0)
            setattr(route.ctx, name, known)
        return known

    def _said_of_blueprints(self, route: Any) -> Iterator[tuple[int, str, Any]]:
        """What was said of the blueprint of *route*, and of the groups that it is in; the groups' first."""
        for target, what, value in sorted(self.blueprint_marks, key=lambda said: isinstance(said[0], Blueprint)):
            if any(each is route for blueprint in _blueprints(target) for each in blueprint.routes):
                yield BLUEPRINT if isinstance(target, Blueprint) else GROUP, what, value


def _blueprints(target: Any) -> Iterator[Blueprint]:
    if isinstance(target, Blueprint):
        yield target
    else:
        for each in target.blueprints:
            yield from _blueprints(each)


def _answer_websocket(transport: Any) -> None:
    """Have *transport*, of an ASGI server, send the response to a WebSocket that is not accepted as ASGI wants it."""
    send, extensions = transport._send, transport.scope.get("extensions") or {}

    async def send_to_websocket(message: Any) -> None:
        if "websocket.http.response" in extensions:
            await send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": "rate limit exceeded"})

    transport._send = send_to_websocket
