"""Starlette: `limits.install(app)`, then `@limits.limit("5/minute")` on endpoints.

The layer that `install` puts around the application adds the headers and settles the permits. Decisions are made inside
of it, where the route is known, so that a 429 passes through the application's own middleware as every answer does.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Awaitable, Iterable
from typing import Any, Generic, TypeVar, Unpack

try:
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection, Request
    from starlette.routing import Host, Mount, Route, Router, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketState
except ImportError as error:
    raise ImportError("headgate.web.starlette needs Starlette: pip install 'headgate[starlette]'") from error

from headgate.decision import Decision
from headgate.web.asgi import (
    CLOSE,
    TRY_AGAIN_LATER,
    ASGIApp,
    ASGIExchange,
    ASGIRateLimits,
    Message,
    Receive,
    Scope,
    Send,
)
from headgate.web.asgi_hot_path import BoundApp, BoundRoute, LimitedApp, bound_to, current_scope
from headgate.web.hot_fields import RouterFields
from headgate.web.limit import Limit, LimitOptions, QuotaSource, SetupError, without_quota
from headgate.web.starlette_endpoints import Endpoint, Exempt, functions_of, limited, marked_exempt, marked_limits
from headgate.web.starlette_routes import BodyReplay, Placed, RoutePlan

INSTALLED = "__headgate_installed__"
HANDLERS = "starlette.exception_handlers"  # where a scope has the handlers that Starlette looks up


class RequestDenied(Exception):
    """A limit refused the request in a dependency or an endpoint. Starlette's handlers of exceptions answer it."""

    def __init__(self, limits: StarletteRateLimits[Any], exchange: StarletteExchange) -> None:
        super().__init__("rate limit exceeded")
        self.limits = limits
        self.exchange = exchange


async def handle_request_denied(connection: HTTPConnection, denied: RequestDenied) -> Any:
    """The handler of `RequestDenied`: gives the response, or answers a WebSocket itself."""
    answer = functools.partial(denied.limits.answer_denied, denied.exchange)
    if not isinstance(connection, WebSocket):
        return answer
    await answer(connection.scope, connection.receive, connection.send)
    return None


class StarletteExchange(ASGIExchange):
    """A request or a WebSocket of Starlette. The application's functions get a `Request` or a `WebSocket`."""

    plan: RoutePlan | None
    suffix = ""
    messages: tuple[StarletteLimit, ...] = ()  # limits for each message of a WebSocket
    connection: HTTPConnection | None
    receive: Receive | None = None
    send: Send | None = None
    body: BodyReplay | None = None

    @property
    def native(self) -> Any:
        if self.connection is not None:
            return self.connection
        if self.scope["type"] == "http":
            receive = self.body.for_function if self.body else self.receive
            self.connection = Request(self.scope, receive) if receive else Request(self.scope)
        elif self.receive is None or self.send is None:
            self.connection = HTTPConnection(self.scope)
        else:
            self.connection = socket = WebSocket(self.scope, self.receive, self.send)
            if self.accepted:
                socket.application_state = socket.client_state = WebSocketState.CONNECTED
        return self.connection

    @property
    def route(self) -> str:
        plan = self.plan
        if plan is None:
            return self.suffix
        text = plan.texts.get(self.prefix) or plan.text(self.prefix)
        return text + self.suffix if self.suffix else text

    def has_met(self, limit: StarletteLimit) -> bool:
        """Whether nothing is left to do for *limit* in this request."""
        if limit.per_message:
            if limit not in self.messages:
                self.messages += (limit,)
            return True
        return limit in self.decided or (self.plan is not None and limit in self.plan.freed)

    def let_go(self) -> None:
        """Forget what refers to the exchange in its turn: only the garbage collector could free them."""
        self.receive = self.send = self.connection = self.body = None

    def again(self, suffix: str) -> StarletteExchange:
        """Another exchange for the same connection: a limit counts an exchange once."""
        made = StarletteExchange(self.limits, self.scope)
        made.plan, made.prefix, made.suffix, made.connection = self.plan, self.prefix, suffix, self.connection
        made.receive, made.send, made.accepted = self.receive, self.send, self.accepted
        return made


class StarletteLimit(Limit):
    """A limit of an endpoint: `@limits.limit("5/minute")` on a function, or on a class of endpoints."""

    per_message = False  # of a WebSocket, instead of per connection

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        made: Endpoint = limited(endpoint, self)
        return made

    async def check(self, connection: HTTPConnection, cost: int | None = None) -> Decision:
        """Count in a handler: a message of a WebSocket, or a part of a request; *cost* permits, or what the limit says.

        The caller answers if it denies.
        """
        owner: StarletteRateLimits[Any] = self.limits
        exchange: StarletteExchange = owner.exchange_in(connection.scope) or StarletteExchange(owner, connection.scope)
        exchange.connection, exchange.scope = connection, connection.scope
        if isinstance(connection, WebSocket):
            exchange = exchange.again(" messages")
        return await owner.check(exchange, self, cost)


AnyStarletteLimit = TypeVar("AnyStarletteLimit", bound=StarletteLimit)


class StarletteRateLimits(ASGIRateLimits[AnyStarletteLimit], Generic[AnyStarletteLimit]):
    """The limits of an application of Starlette, or of a framework made of it."""

    exchange_class = StarletteExchange

    @functools.cached_property
    def exempt(self) -> Exempt:
        """Frees an endpoint, a route or a mounted application from the default: a decorator."""
        return Exempt(self)

    @functools.cached_property
    def installations(self) -> list[Installation]:
        """The layers around the applications in which the limits are installed."""
        return []

    @functools.cached_property
    def no_route(self) -> RoutePlan:
        """The plan for 404, 405 and mounted applications."""
        plan = RoutePlan("", (), self.default)
        plan.shorten(self)
        return plan

    def messages(self, quota: QuotaSource, **options: Unpack[LimitOptions]) -> AnyStarletteLimit:
        """A limit for each message that a WebSocket receives.

        The connection of a client over its limit is closed with code 1013. With `on_denied`, a function of the
        WebSocket and the decision, that is called instead and the message is dropped; with `timeout` the message waits.

        Args:
            quota: text, a `Quota`, a list: all must allow; or a function of the request that gives one
            **options: see `LimitOptions`
        """
        made = self.limit(quota, **options)
        made.per_message = True
        return made

    def install(self, app: Starlette) -> None:
        """Limit *app*: routes with limits of their own, and by the default everything else. Once for an application.

        Args:
            app: the application
        """
        if not isinstance(app, Starlette):
            raise SetupError(f"install() takes the application itself, before it is wrapped; got {app!r:.80}")
        if INSTALLED in app.__dict__:
            raise SetupError("limits are installed in this application already: each request would count twice")
        app.__dict__[INSTALLED] = installation = Installation(self, app.router)
        self.installations.append(installation)
        build = app.build_middleware_stack
        app.__dict__["build_middleware_stack"] = lambda: installation.around(build())
        if app.middleware_stack is not None:
            app.middleware_stack = installation.around(app.middleware_stack)

    # ---------------------------------------------------------------------------------------- one request

    def exchange_of_context(self) -> StarletteExchange | None:
        """The exchange of the request that runs; None if the limits are switched off. Raises if not installed."""
        scope = current_scope.get()
        exchange: StarletteExchange | None = None if scope is None else self.exchange_in(scope)
        if exchange is None:
            self.check_disabled()
        return exchange

    def check_disabled(self) -> None:
        """Raise unless the limits are switched off: then a request may meet a limit without an exchange."""
        if self.enabled:
            raise SetupError("this route has a limit, but the limits are not installed: call limits.install(app)")

    async def enter(
        self, exchange: StarletteExchange, plan: RoutePlan, inner: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Decide the limits of a route that come first, and go on to *inner* or answer with a refusal."""
        exchange.plan = plan
        exchange.scope, exchange.receive, exchange.send = scope, receive, send
        exchange.messages = plan.messages
        exchange.exempt = exchange.exempt or plan.exempt
        if plan.calls_functions and scope["type"] == "http":
            exchange.body = BodyReplay(receive)
            receive = exchange.body.for_app
        allowed = True
        scope.setdefault("state", {}).setdefault("rate_limit", None)  # where no limit decides
        if plan.early and (plan.limits or not exchange.exempt):
            allowed = await self.admit(exchange, plan.early)
            self._decided(exchange)
        try:
            await (inner(scope, receive, send) if allowed else self.answer_denied(exchange, scope, receive, send))
        finally:
            exchange.let_go()

    async def answer_denied(self, exchange: ASGIExchange, scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(exchange, StarletteExchange)
        exchange.receive, exchange.send = exchange.receive or receive, exchange.send or send
        try:
            await super().answer_denied(exchange, scope, receive, send)
        finally:
            exchange.let_go()

    async def admit_undecided(self, exchange: ASGIExchange) -> bool:
        assert isinstance(exchange, StarletteExchange)
        if self.find_plan(exchange):
            return await super().admit_undecided(exchange)
        # the route was added where it was not seen: what its limits would have decided first is decided last
        plan = exchange.plan or self.no_route
        return plan.exempt or not plan.early or await self.admit(exchange, plan.early)

    def find_plan(self, exchange: StarletteExchange) -> bool:
        """Give *exchange* the plan of its route if it has not come through the `BoundRoute`; True: it had one."""
        if exchange.plan is not None:
            return True
        for installation in self.installations:
            installation.bound = -1
        route = exchange.scope.get("route")
        exchange.plan = None if route is None else self.plan_of(route, exchange.scope)
        return False

    async def decide(
        self, exchange: StarletteExchange, limits: Iterable[StarletteLimit], connection: HTTPConnection | None
    ) -> None:
        """Decide *limits* and those that belong to the same moment, in a dependency or an endpoint."""
        scope = current_scope.get() if connection is None else connection.scope
        if scope is not None:
            exchange.connection, exchange.scope = connection, scope
        self.find_plan(exchange)
        known = exchange.plan.limits if exchange.plan is not None else {}
        together = [each for limit in limits if not exchange.has_met(limit) for each in known.get(limit, (limit,))]
        allowed = await self.admit(exchange, dict.fromkeys(together))
        self._decided(exchange)
        if not allowed:
            exchange.scope[HANDLERS][0].setdefault(RequestDenied, handle_request_denied)
            raise RequestDenied(self, exchange)

    def _decided(self, exchange: StarletteExchange) -> None:
        if exchange.decision is not None:
            exchange.scope.setdefault("state", {})["rate_limit"] = exchange.decision
        if (
            exchange.body is not None
            and exchange.plan is not None
            and exchange.decided.issuperset(exchange.plan.limits)
        ):
            exchange.body.recording = False

    async def admit_message(self, exchange: StarletteExchange) -> StarletteExchange | None:
        """Count a message of a WebSocket; returns the exchange of a refusal."""
        message = exchange.again(" messages")
        return None if await self.admit(message, exchange.messages) else message

    # ---------------------------------------------------------------------------------------- routes

    def bind(self, router: Router, seen: set[int]) -> None:
        """Put a `BoundRoute` or a `BoundApp` before each route of *router*, and of the applications mounted in it."""
        if id(router) in seen:
            return
        seen.add(id(router))
        if bound_to(router.default, self, router) is None:
            router.default = BoundApp(self, router, router.default, "", opaque=True, exempt=False)
        for route in router.routes:
            self.bind_route(route, seen)

    def bind_route(self, route: Any, seen: set[int]) -> None:
        """Do so for one route, a mount or a host."""
        if isinstance(route, Mount | Host):
            app = getattr(route, "_base_app", route.app)  # without the middleware of the mount
            router = app if isinstance(app, Router) else getattr(app, "router", None)
            if bound_to(route.handle, self, route) is None:
                template = route.host_format if isinstance(route, Host) else route.path_format.removesuffix("/{path}")
                exempt = marked_exempt((route, app), self)
                handle = types.MethodType(type(route).handle, route)
                route.__dict__["handle"] = BoundApp(
                    self, route, handle, template, opaque=not isinstance(router, Router), exempt=exempt
                )
            if isinstance(router, Router):
                self.bind(router, seen)
        else:
            bound, plan = self.bind_leaf(route), self.plan_route(route, route)
            bound.plan = None if bound.included else plan

    def bind_leaf(self, route: Any) -> BoundRoute:
        """Put a `BoundRoute` before a route that has an endpoint, unless one is there."""
        bound = bound_to(route.handle, self, route)
        if bound is None:
            bound = route.__dict__["handle"] = BoundRoute(self, route, route.handle)
        assert isinstance(bound, BoundRoute)
        return bound

    def plan_route(self, route: Any, source: Any) -> RoutePlan | None:
        """Find the limits of a route, so that mistakes show at start; None if they depend on the request's method."""
        if not _by_method(route):
            return self.plan(route, source, "")
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            self.plan(route, source, method)
        return None

    def plan_of(self, route: Any, scope: Scope) -> RoutePlan:
        """The plan for a request that *route* serves."""
        return self.plan(route, route, method_of(route, scope))

    def plan(self, route: Any, source: Any, method: str) -> RoutePlan:
        """The plan of *route*, kept with *source*, which says where the route is included; by *method* in a class."""
        plan: RoutePlan | None = source.__dict__.get(self.scope_key + method)
        if plan is None:
            plan = source.__dict__[self.scope_key + method] = self.make_plan(route, source, method)
        return plan

    def make_plan(self, route: Any, source: Any, method: str) -> RoutePlan:
        """Find the limits of a route."""
        endpoint = getattr(route, "endpoint", None)
        if isinstance(endpoint, Limit):
            raise SetupError(without_quota(endpoint.quota_function or endpoint))
        functions = [*functions_of(endpoint)]
        methods = getattr(route, "methods", None) or (["WEBSOCKET"] if isinstance(route, WebSocketRoute) else [])
        if inspect.isclass(endpoint):
            functions += functions_of(getattr(endpoint, "dispatch", None))
        if method:
            handler = getattr(endpoint, method.lower(), None)
            if handler is None and method == "HEAD":
                handler, method = getattr(endpoint, "get", None), "GET"
            if handler is None:
                return self.no_route  # 405
            functions += functions_of(handler)
            methods = [method]
        template = getattr(source, "path_format", "") or getattr(source, "path", "") or "/{path}"
        plan = RoutePlan(template, methods, self.default)
        placed, places = self.around(source, plan)
        if marked_exempt((route, *functions), self):
            plan.exempt = True
            plan.freed |= {each.limit for each in placed}
            placed = []
        marks = marked_limits(functions, self)
        placed += [Placed(limit, places, False, asked) for limit, asked in marks.items()]
        plan.place(placed, websocket=isinstance(route, WebSocketRoute))
        plan.shorten(self)
        return plan

    def around(self, source: Any, plan: RoutePlan) -> tuple[list[Placed], int]:
        """The limits around an endpoint, and how many dependencies come before the endpoint: none in Starlette."""
        return [], 0


def _by_method(route: Any) -> bool:
    """Whether a class has the endpoints of *route*, one for each method."""
    return isinstance(route, Route) and route.methods is None and hasattr(route.endpoint, "dispatch")


def method_of(route: Any, scope: Scope) -> str:
    """The method of a request, if the plan of *route* depends on it; else ''."""
    if not _by_method(route):
        return ""
    method = str(scope["method"]).upper()
    # a client can invent any number of methods: those that the class does not have are one
    return method if method == "HEAD" or hasattr(route.endpoint, method.lower()) else "no method"


class Installation(RouterFields):
    """The layer around an application in which limits are installed."""

    def __init__(self, limits: StarletteRateLimits[Any], router: Router) -> None:
        self.router = router
        self.bound = -1
        self._limits = limits

    def bind(self) -> None:
        """Bind the routes that the application has now."""
        self._limits.bind(self.router, set())
        self.bound = len(self.router.routes)

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, limited."""
        limited: ASGIApp = LimitedApp(self._limits, self, app)
        return limited

    def serve_rarely(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve what `LimitedApp` does not: a lifespan, a WebSocket, and a request when something has changed."""
        if scope["type"] == "lifespan":
            return self._live(app, scope, receive, send)
        if len(self.router.routes) != self.bound:
            self.bind()
        if not self._limits.enabled:
            scope.setdefault("state", {}).setdefault("rate_limit", None)  # as where no limit has decided
            return app(scope, receive, send)
        if scope["type"] == "websocket":
            receive = self._limited_receive(scope, receive, send)
        return self._limits.serve(app, scope, receive, send, True)

    async def _live(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application's lifespan: mistakes prevent its start, and the store is closed after its end."""

        async def send_closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                await self._limits.aclose()
            await send(message)

        try:
            self.bind()
        except SetupError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await app(scope, receive, send_closing)

    def _limited_receive(self, scope: Scope, receive: Receive, send: Send) -> Receive:
        """*receive* of a WebSocket whose messages may be limited."""
        limits = self._limits

        async def receive_limited() -> Message:
            while True:
                message = await receive()
                exchange: StarletteExchange | None = limits.exchange_in(scope)
                if message["type"] != "websocket.receive" or exchange is None or not exchange.messages:
                    return message
                refused = await limits.admit_message(exchange)
                if refused is None:
                    return message
                on_denied = refused.denied_by.on_denied if refused.denied_by else None
                if on_denied is None:
                    await send(CLOSE)
                    return {"type": "websocket.disconnect", "code": TRY_AGAIN_LATER}
                said = on_denied(refused.native, refused.decision)
                if inspect.isawaitable(said):
                    await said

        return receive_limited


class RateLimits(StarletteRateLimits[StarletteLimit]):
    """The limits of a Starlette application: `RateLimitsBase` says what it takes."""

    limit_class = StarletteLimit
