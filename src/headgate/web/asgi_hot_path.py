"""What every request on ASGI passes through: the layer at its route, a decision in one call, and its answer's way out.

Compiled where that works, so types are few here: what is called is Python of an application or of a framework.

Starlette calls `handle` of the route that matched, a mount's `handle` for what is mounted, and `default` of the router
where nothing matched. `BoundRoute` and `BoundApp` stand in for those three, in the routes of one application only.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, cast

from headgate.decision import Decision
from headgate.web.core import Done
from headgate.web.exchange import Charge
from headgate.web.headers import with_limit_headers
from headgate.web.hot_fields import LimitsFields, PlainLimit, RouteFields, RouterFields

# The messages that start an answer, and the status of those that carry none.
STARTS: Final[dict[str, int]] = {
    "http.response.start": 200,
    "websocket.http.response.start": 200,
    "websocket.accept": 101,
    "websocket.close": 403,
}
DONE: Final[Any] = Done(None)
current_scope: Final[Any] = ContextVar("headgate.web.asgi", default=None)  # of the request that is served
set_current_scope: Final[Any] = current_scope.set


class ASGIRequest:
    """A request on its way through the application. A scope carries it, and its method `send` is what the application
    gets: it puts the limits' headers on the answer.

    Most requests meet one limit, and `admit` decides it at once. Where there is more to do, `exchange` makes the
    `Exchange` that all frameworks know.
    """

    def __init__(self, limits: LimitsFields, scope: dict[str, Any], receive: Any, inner: Any, outermost: bool) -> None:
        self.limits: LimitsFields = limits
        self.scope: dict[str, Any] = scope
        self.receive: Any = receive
        self.inner: Any = inner  # the server's `send`
        self.outermost: bool = outermost
        self.started: bool = False
        self.has_trailers: bool = False  # whether the last message is not the end of the body
        self.prefix: str = ""  # templates of the mounts that lead to the route
        self.exempt: bool = False  # whether the default does not count it
        self.limit: Any = None  # what `admit` has decided
        self.quick: PlainLimit | None = None
        self.key: str = ""
        self.decision: Decision | None = None
        self.plan: Any = None  # of the route at which it was decided
        self.unlimited: bool = False  # whether there is nothing to decide
        self.made: Any = None  # the exchange

    def exchange(self) -> Any:
        """The exchange, with what was decided before it was needed."""
        exchange = self.made
        if exchange is None:
            limits: Any = self.limits
            self.made = exchange = limits.exchange_class(limits, self.scope)
            exchange.plan, exchange.prefix, exchange.exempt = self.plan, self.prefix, self.exempt
            made, quick = self.decision, self.quick
            if made is not None and quick is not None:
                exchange.decided = frozenset((self.limit,))
                exchange.decision, exchange.limiter, exchange.limit = made, quick.limiter, self.limit
                if made.allowed:
                    exchange.taken = (Charge(self.limit, quick.limiter, self.key, 1, made.degraded),)
                else:
                    exchange.denied_by = self.limit
        return exchange

    def admit(self, quick: PlainLimit) -> Decision | None:
        """Decide one limit that `is_at_once` without an exchange. None: `RateLimitsBase.admit` must do it."""
        scope, limits = self.scope, self.limits
        if self.made is not None or limits.watched or scope.get("method") == "OPTIONS":
            return None
        client = scope.get("client")
        host = client[0] if client else None
        key = limits.key_of_peer(host) if host else ""
        if not key:
            return None
        made: Decision = quick.take(key)
        self.limit, self.quick, self.key, self.decision = quick.limit, quick, key, made
        return made

    def send(self, given: Any) -> Any:
        """Send the message *given*: the result is to be awaited."""
        message: dict[str, Any] = given if isinstance(given, dict) else dict(given)
        kind = message["type"]
        if self.started:
            if self.made is not None and self.made.replaced:
                return DONE
            inner = self.inner
            if kind == "http.response.body" and not message.get("more_body") and not self.has_trailers:
                self.let_go()
            return inner(message)
        if kind not in STARTS:
            return self.inner(message)
        self.started = True
        self.has_trailers = bool(message.get("trailers"))
        made, quick = self.decision, self.quick
        if self.made is None:
            if self.unlimited:
                return self.inner(message)
            if made is not None and quick is not None and made.allowed:
                style = self.limits.header_style
                if style is None:
                    return self.inner(message)
                if style == "x":
                    return self.inner(with_limit_headers(message, quick.headers.of(made)))
        exchange, limits = self.exchange(), cast(Any, self.limits)
        if exchange.decided and kind != "websocket.accept" and not self.limits.settles:
            return self.inner(limits.with_headers(exchange, message))
        return limits.start(exchange, self.receive, self.inner, message, self.outermost)

    def let_go(self) -> None:
        """Forget the scope and what a server made for it: the scope has this object, and only the garbage collector
        could free them all."""
        self.scope = {}
        self.receive = None
        self.inner = send_late
        if self.made is not None:
            self.made.scope, self.made.connection = {}, None


async def send_late(message: Any) -> None:
    """What `ASGIRequest.send` calls when the answer is complete."""
    raise RuntimeError(f"the application sends {message['type']!r} after the end of its answer")


def serve(limits: LimitsFields, app: Any, given: Any, receive: Any, send: Any, outermost: bool) -> Any:
    """What `ASGIRateLimits.serve` does for the scope *given*."""
    scope: dict[str, Any] = given if isinstance(given, dict) else dict(given)
    kind = scope["type"]
    if (kind != "http" and kind != "websocket") or not limits.enabled:
        return app(scope, receive, send)
    key: str = cast(Any, limits).scope_key
    return serve_limited(limits, key, app, scope, receive, send, outermost, kind == "websocket")


def serve_limited(
    limits: LimitsFields,
    key: str,
    app: Any,
    scope: dict[str, Any],
    receive: Any,
    send: Any,
    outermost: bool,
    websocket: bool,
) -> Any:
    """The same, of a request or a WebSocket, when the limits are not switched off. *key* is their `scope_key`."""
    if key in scope:
        return app(scope, receive, send)  # these limits are around this request already: it is counted once
    request = ASGIRequest(limits, scope, receive, send, outermost)
    scope[key] = request
    if limits.decorates:
        set_current_scope(scope)  # not reset: servers make a context for each request
    if limits.settles or websocket:
        return cast(Any, limits).serve_to_end(app, scope, receive, request)
    return app(scope, receive, request.send)


class LimitedApp:
    """Stands around an application in which limits are installed."""

    def __init__(self, limits: Any, installation: Any, inner: Any) -> None:
        self.limits: LimitsFields = limits
        self.scope_key: str = limits.scope_key
        self.installation: RouterFields = installation
        self.inner: Any = inner

    def __call__(self, given: Any, receive: Any, send: Any) -> Any:
        scope: dict[str, Any] = given if isinstance(given, dict) else dict(given)
        limits, installation = self.limits, self.installation
        if scope["type"] != "http" or len(installation.router.routes) != installation.bound or not limits.enabled:
            return cast(Any, installation).serve_rarely(self.inner, scope, receive, send)
        return serve_limited(limits, self.scope_key, self.inner, scope, receive, send, True, False)


class BoundRoute:
    """Stands in for the `handle` of a route: decides the limits that come first, then calls the route."""

    def __init__(self, limits: Any, route: Any, inner: Any) -> None:
        self.limits: LimitsFields = limits
        self.scope_key: str = limits.scope_key
        self.route: Any = route
        self.inner: Any = inner
        self.methods: Any = getattr(route, "methods", None)
        self.plan: RouteFields | None = None  # where it is the same for every request
        self.included: bool = False  # FastAPI: whether it may be called for several included routers

    def __call__(self, given: Any, receive: Any, send: Any) -> Any:
        scope: dict[str, Any] = given if isinstance(given, dict) else dict(given)
        plan = self.plan
        if self.methods and scope["method"] not in self.methods:
            plan = cast(Any, self.limits).no_route  # 405
        elif plan is None or (plan.provider is not None and plan.provider.dependency_overrides):
            plan = cast(Any, self.limits).plan_of(self.route, scope)
        request: ASGIRequest | None = scope.get(self.scope_key)
        if request is None:
            if cast(Any, plan).limits:
                cast(Any, self.limits).check_disabled()
            return self.inner(scope, receive, send)
        if plan.unlimited and request.made is None:
            request.unlimited = True
            scope.setdefault("state", {}).setdefault("rate_limit", None)
            return self.inner(scope, receive, send)
        if plan.at_once is not None and request.decision is None and not request.exempt:
            quick = plan.quick.get(request.prefix)
            if quick is None:
                quick = cast(Any, plan).quick_limit(self.limits, request.prefix)
            made = request.admit(quick)
            if made is not None:
                request.plan = plan
                state = scope.get("state")
                if state is None:
                    state = scope["state"] = {}
                state["rate_limit"] = made
                if made.allowed:
                    return self.inner(scope, receive, send)
                return cast(Any, self.limits).answer_denied(request.exchange(), scope, receive, send)
        return cast(Any, self.limits).enter(request.exchange(), plan, self.inner, scope, receive, send)


class BoundApp:
    """Stands in for the `handle` of a mount, or the `default` of a router: what they call has no limit of its own.

    *opaque*: what is called has no routes, so the default is decided here. *template* is the path of a mount.
    """

    def __init__(self, limits: Any, route: Any, inner: Any, template: str, *, opaque: bool, exempt: bool) -> None:
        self.limits: Any = limits
        self.scope_key: str = limits.scope_key
        self.route: Any = route
        self.inner: Any = inner
        self.template: str = template
        self.opaque: bool = opaque
        self.exempt: bool = exempt

    def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        request: ASGIRequest | None = scope.get(self.scope_key)
        if request is None:
            return self.inner(scope, receive, send)
        request.prefix += self.template
        request.exempt = request.exempt or self.exempt
        if self.opaque or request.made is not None:
            exchange = request.exchange()
            exchange.prefix, exchange.exempt = request.prefix, exchange.exempt or request.exempt
            if self.opaque:
                return self.limits.enter(exchange, self.limits.no_route, self.inner, scope, receive, send)
        return self.inner(scope, receive, send)


def bound_to(handle: Any, limits: Any, route: Any) -> Any:
    """What of *handle* is ours already; None if nothing. A copy of a route carries the `handle` of the original."""
    while isinstance(handle, (BoundRoute, BoundApp)):
        if handle.limits is limits and handle.route is route:
            return handle
        handle = handle.inner
    return None
