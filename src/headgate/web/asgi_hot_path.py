"""What every request on ASGI passes through: the layer at its route, a decision in one call, and its answer's way out.

Compiled where that works, so types are few here: what is called is Python of an application or of a framework.

Starlette calls `handle` of the route that matched, a mount's `handle` for what is mounted, and `default` of the router
where nothing matched. `BoundRoute` and `BoundApp` stand in for those three, in the routes of one application only.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from headgate.decision import Decision
from headgate.web.core import Done
from headgate.web.exchange import Charge
from headgate.web.headers import IETF_NAMES, MAX_DIGITS, X_NAMES, raw_headers

# The messages that start an answer, and the status of those that carry none.
STARTS: dict[str, int] = {
    "http.response.start": 200,
    "websocket.http.response.start": 200,
    "websocket.accept": 101,
    "websocket.close": 403,
}
DONE: Any = Done(None)
NO_SCOPE: Any = MappingProxyType({})  # what an exchange has when its answer is sent
current_scope: Any = ContextVar("headgate.web.asgi", default=None)  # of the request that is served
REMAINING: bytes = b"x-ratelimit-remaining"
LIMIT_HEADERS: frozenset[bytes] = frozenset(name.encode() for name in (*X_NAMES, *IETF_NAMES))  # ASGI: in lower case


class ASGIRequest:
    """A request on its way through the application. A scope carries it, and its method `send` is what the application
    gets: it puts the limits' headers on the answer.

    Most requests meet one limit, and `admit` decides it at once. Where there is more to do, `exchange` makes the
    `Exchange` that all frameworks know.
    """

    def __init__(self, limits: Any, scope: Any, receive: Any, inner: Any, outermost: bool) -> None:
        self.limits: Any = limits
        self.scope: Any = scope
        self.receive: Any = receive
        self.inner: Any = inner  # the server's `send`
        self.outermost: bool = outermost
        self.started: bool = False
        self.has_trailers: bool = False  # whether the last message is not the end of the body
        self.prefix: str = ""  # templates of the mounts that lead to the route
        self.exempt: bool = False  # whether the default does not count it
        self.limit: Any = None  # what `admit` has decided
        self.limiter: Any = None
        self.key: str = ""
        self.decision: Decision | None = None
        self.plan: Any = None  # of the route at which it was decided
        self.unlimited: bool = False  # whether there is nothing to decide
        self.made: Any = None  # the exchange

    def exchange(self) -> Any:
        """The exchange, with what was decided before it was needed."""
        exchange = self.made
        if exchange is None:
            self.made = exchange = self.limits.exchange_class(self.limits, self.scope)
            exchange.plan, exchange.prefix, exchange.exempt = self.plan, self.prefix, self.exempt
            made = self.decision
            if made is not None:
                exchange.decided = frozenset((self.limit,))
                exchange.decision, exchange.limiter, exchange.limit = made, self.limiter, self.limit
                if made.allowed:
                    exchange.taken = (Charge(self.limit, self.limiter, self.key, 1, made.degraded),)
                else:
                    exchange.denied_by = self.limit
        return exchange

    def admit(self, limit: Any, limiter: Any) -> Decision | None:
        """Decide one limit that `is_at_once` without an exchange. None: `RateLimitsBase.admit` must do it."""
        scope, limits = self.scope, self.limits
        client = scope.get("client")
        if self.made is not None or not client or scope.get("method") == "OPTIONS" or limits._first_requests.left:
            return None
        key: str = limits.key_of_peer(client[0]) if client[0] else ""
        if not key:
            return None
        made: Decision = limiter.blocking.try_acquire(key)
        self.limit, self.limiter, self.key, self.decision = limit, limiter, key, made
        return made

    def send(self, message: Any) -> Any:
        """Send *message*: its result is to be awaited."""
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
        limits, made = self.limits, self.decision
        if self.made is None:
            if self.unlimited:
                return self.inner(message)
            if made is not None and made.allowed:
                style = limits.header_style
                if style == "x":
                    return self.inner(with_limit_headers(message, raw_headers(made, self.limiter.rule.quotas)))
                if style is None:
                    return self.inner(message)
        exchange = self.exchange()
        if exchange.decided and kind != "websocket.accept" and not limits.settles:
            return self.inner(limits.with_headers(exchange, message))
        return limits.start(exchange, self.receive, self.inner, message, self.outermost)

    def let_go(self) -> None:
        """Forget the scope and what a server made for it: the scope has this object, and only the garbage collector
        could free them all."""
        self.scope = NO_SCOPE
        self.receive = None
        self.inner = send_late
        if self.made is not None:
            self.made.scope, self.made.connection = NO_SCOPE, None


async def send_late(message: Any) -> None:
    """What `ASGIRequest.send` calls when the answer is complete."""
    raise RuntimeError(f"the application sends {message['type']!r} after the end of its answer")


def serve(limits: Any, app: Any, scope: Any, receive: Any, send: Any, outermost: bool) -> Any:
    """What `ASGIRateLimits.serve` does."""
    kind = scope["type"]
    if (kind != "http" and kind != "websocket") or not limits.enabled:
        return app(scope, receive, send)
    return serve_limited(limits, limits.scope_key, app, scope, receive, send, outermost)


def serve_limited(limits: Any, scope_key: str, app: Any, scope: Any, receive: Any, send: Any, outermost: bool) -> Any:
    """The same, of a request or a WebSocket, when the limits are not switched off."""
    if scope_key in scope:
        return app(scope, receive, send)  # these limits are around this request already: it is counted once
    request = ASGIRequest(limits, scope, receive, send, outermost)
    scope[scope_key] = request
    if limits.decorates:
        current_scope.set(scope)  # not reset: servers make a context for each request
    if limits.settles or scope["type"] == "websocket":
        return limits.serve_to_end(app, scope, receive, request)
    return app(scope, receive, request.send)


class LimitedApp:
    """Stands around an application in which limits are installed."""

    def __init__(self, limits: Any, installation: Any, inner: Any) -> None:
        self.limits: Any = limits
        self.scope_key: str = limits.scope_key
        self.installation: Any = installation
        self.router: Any = installation.router
        self.inner: Any = inner

    def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        limits = self.limits
        if scope["type"] != "http" or len(self.router.routes) != self.installation.bound or not limits.enabled:
            return self.installation.serve_rarely(self.inner, scope, receive, send)
        return serve_limited(limits, self.scope_key, self.inner, scope, receive, send, True)


def with_limit_headers(message: Any, ours: Any, *, replace: bool = False) -> Any:
    """The start of an answer with the headers *ours*. Those of a limiter further in stay if it is tighter."""
    headers = message.get("headers") or ()
    for name, _ in headers:
        if name in LIMIT_HEADERS:
            if not replace and _remaining(headers) <= _remaining(ours):
                return message
            headers = [pair for pair in headers if pair[0] not in LIMIT_HEADERS]
            break
    return {**message, "headers": [*headers, *ours]}


def _remaining(headers: Any) -> int:
    """What X-RateLimit-Remaining says; -1 if it is not there."""
    for name, value in headers:
        if name == REMAINING and value.isdigit() and len(value) < MAX_DIGITS:
            return int(value)
    return -1


class BoundRoute:
    """Stands in for the `handle` of a route: decides the limits that come first, then calls the route."""

    def __init__(self, limits: Any, route: Any, inner: Any) -> None:
        self.limits: Any = limits
        self.scope_key: str = limits.scope_key
        self.route: Any = route
        self.inner: Any = inner
        self.methods: Any = getattr(route, "methods", None)
        self.plan: Any = None  # where it is the same for every request
        self.included: bool = False  # FastAPI: whether it may be called for several included routers

    def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        limits = self.limits
        plan = self.plan
        if self.methods and scope["method"] not in self.methods:
            plan = limits.no_route  # 405
        elif plan is None or (plan.provider is not None and plan.provider.dependency_overrides):
            plan = limits.plan_of(self.route, scope)
        request: ASGIRequest | None = scope.get(self.scope_key)
        if request is None:
            if plan.limits:
                limits.check_disabled()
            return self.inner(scope, receive, send)
        if plan.unlimited and request.made is None:
            request.unlimited = True
            scope.setdefault("state", {}).setdefault("rate_limit", None)
            return self.inner(scope, receive, send)
        limit = plan.at_once
        if limit is not None and request.decision is None and not request.exempt:
            limiter = plan.limiters.get(request.prefix) or plan.limiter_of(limits, request.prefix)
            made = request.admit(limit, limiter)
            if made is not None:
                request.plan = plan
                scope.setdefault("state", {})["rate_limit"] = made
                if made.allowed:
                    return self.inner(scope, receive, send)
                return limits.answer_denied(request.exchange(), scope, receive, send)
        return limits.enter(request.exchange(), plan, self.inner, scope, receive, send)


class BoundApp:
    """Stands in for the `handle` of a mount, or the `default` of a router: what they call has no limit of its own.

    *opaque*: what is called has no routes, so the default is decided here. *template* is the path of a mount.
    """

    def __init__(self, limits: Any, route: Any, inner: Any, template: str, *, opaque: bool, exempt: bool) -> None:
        self.limits: Any = limits
        self.route: Any = route
        self.inner: Any = inner
        self.template: str = template
        self.opaque: bool = opaque
        self.exempt: bool = exempt

    def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        request: ASGIRequest | None = scope.get(self.limits.scope_key)
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
