"""Litestar: ``Litestar([...], plugins=[limits])`` and ``@get("/", guards=[limits.limit("5/minute")])``.

Limits are guards, of the application, a router, a controller or a handler. Those that follow each other, and those of
one subject, are one decision. A limit with a function that may need what another guard has found waits for its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack

from headgate.web.asgi import TRY_AGAIN_LATER
from headgate.web.limit import Limit, LimitOptions, QuotaSource, SetupError, mark, without_quota
from headgate.web.problem import CONTENT_TYPE

try:
    from litestar import Controller, Response, Router
    from litestar.config.app import AppConfig
    from litestar.connection import ASGIConnection
    from litestar.exceptions import WebSocketException
    from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
    from litestar.openapi.datastructures import ResponseSpec
    from litestar.plugins.base import ReceiveRoutePlugin
except ImportError as error:
    raise ImportError("headgate.web.litestar needs Litestar: pip install 'headgate[litestar]'") from error

from headgate.web.litestar_answers import LimitExceededException, LitestarAnswers, LitestarExchange

__all__ = ["LimitExceededException", "RateLimits"]

Target = TypeVar("Target")
Connection = ASGIConnection[Any, Any, Any, Any]

EXEMPT = "rate_limit_exempt"  # the key of `opt`, and the mark of a function


class RateLimitProblem(TypedDict):
    """The body of a 429, for the OpenAPI document."""

    title: str
    status: int
    detail: str
    type: str
    retryAfterSeconds: NotRequired[int]


class LitestarLimit(Limit):
    """A limit as a guard."""

    limits: RateLimits

    def __init__(self, quota: QuotaSource, **options: Unpack[LimitOptions]) -> None:
        if isinstance(quota, BaseRouteHandler | Router):
            raise SetupError(without_quota(getattr(quota, "fn", quota)))
        super().__init__(quota, **options)

    async def __call__(self, connection: Connection, _: BaseRouteHandler) -> None:
        if not self.limits.enabled:
            return
        known = self.limits.known_route(connection.scope)
        if known is None:
            raise SetupError(f"{self} is a guard of an application without the plugin: Litestar(..., plugins=[limits])")
        exchange = self.limits.exchange_of(connection)
        if self not in exchange.decided:
            await self.limits.decide(exchange, known.batches.get(self, ()))


class LitestarRoute:
    """What is limited of a handler, and where it is."""

    def __init__(self, limits: RateLimits, handler: BaseRouteHandler) -> None:
        methods = getattr(handler, "http_methods", {"WEBSOCKET" if hasattr(handler, "websocket_class") else "ASGI"})
        self.methods = ",".join(sorted({str(method) for method in methods} - {"HEAD", "OPTIONS"} or methods))
        self.texts: dict[str, str] = {}
        self.batches: dict[Limit, tuple[Limit, ...]] = {}  # what is decided where a limit is met
        layers: list[Any] = handler.ownership_layers
        depth = _exempt_at(layers)
        self.exempt = depth is not None
        around = {id(guard) for layer in layers[: depth or 0] for guard in layer.guards or ()}
        around -= {id(guard) for layer in layers[depth or 0 :] for guard in layer.guards or ()}
        guards = handler.resolve_guards()
        kept: list[Any] = []
        moments: list[list[Limit]] = []
        for guard in guards:
            if getattr(guard, "func", None) == limits.limit:  # as Litestar keeps a plain function
                raise SetupError(without_quota(handler.fn))
            if not isinstance(guard, LitestarLimit) or guard.limits is not limits:
                kept.append(guard)
            elif id(guard) not in around:
                # with the limits that it follows, and with earlier ones of its subject if it need not wait
                joins = (each for each in moments if each[0] is kept[-1] or any(map(guard.needs_no_more_than, each)))
                moment = next(joins, None)
                if moment is None:
                    moments.append([guard])
                    kept.append(guard)
                else:
                    moment.append(guard)
        self.batches.update((limit, tuple(moment)) for moment in moments for limit in moment)
        if limits.default is not None and not self.batches and not self.exempt:
            kept.insert(0, limits.meet_default)
        guards[:] = kept  # Litestar keeps this list, and copies the handler for each guard: one decision, one guard

    def add(self, template: str) -> None:
        """The handler is at *template* too."""
        self.text = self.texts[template] = f"{self.methods} {template}"

    def text_of(self, scope: Any) -> str:
        """The default scope of limits, where the handler is reached by *scope*."""
        if len(self.texts) == 1:
            return self.text
        # Old versions name no template for a path without parameters, none does for a mount.
        return self.texts.get(scope["path_template"]) or self.texts.get(scope["path"]) or self.text


class RateLimits(LitestarAnswers[LitestarLimit], ReceiveRoutePlugin):
    """The limits of a Litestar application, and its plugin. The decision is ``request.state.rate_limit``."""

    limit_class = LitestarLimit
    installation = "Litestar([...], plugins=[limits])"

    def exempt(self, target: Target) -> Target:
        """Free a handler, controller or router from the default and from the limits of the layers around it.

        The same as ``opt={"rate_limit_exempt": True}``; a layer further in may say False.

        Args:
            target: a handler, controller or router
        """
        if isinstance(target, BaseRouteHandler | Router):
            target.opt[EXEMPT] = True
        elif isinstance(target, type) and issubclass(target, Controller):
            inherited = getattr(target, "opt", None)
            opt = {**(inherited if isinstance(inherited, Mapping) else {}), EXEMPT: True}
            setattr(target, "opt", opt)  # noqa: B010  # a slot to mypy, and set on the class as Litestar has it
        elif callable(target):
            mark(target, EXEMPT, True)
        else:
            raise SetupError(f"exempt takes a handler, a controller or a router, got {target!r:.60}")
        return target

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Called by Litestar for a plugin."""
        if self.before_send not in app_config.before_send:
            app_config.before_send.append(self.before_send)
        app_config.exception_handlers = {LimitExceededException: _response_of, **app_config.exception_handlers}
        return app_config

    def receive_route(self, route: Any) -> None:
        """Called by Litestar for each route."""
        for handler in getattr(route, "route_handlers", None) or [route.route_handler]:
            known = handler.opt.get(self.scope_key) or LitestarRoute(self, handler)
            handler.opt[self.scope_key] = known
            known.add(route.path_format)
            if isinstance(handler, HTTPRouteHandler) and (known.batches or (self.default and not known.exempt)):
                refused = ResponseSpec(RateLimitProblem, False, "Rate limit exceeded", CONTENT_TYPE)
                handler.responses = {429: refused, **(handler.responses or {})}

    def known_route(self, scope: Any) -> LitestarRoute | None:
        """What is limited of the handler that *scope* leads to; None if it leads to none, or there is no plugin."""
        handler = scope.get("route_handler")
        known: LitestarRoute | None = handler.opt.get(self.scope_key) if handler is not None else None
        return known

    def route_of(self, scope: Any) -> str:
        known = self.known_route(scope)
        return known.text_of(scope) if known else ""

    def is_exempt(self, scope: Any) -> bool:
        known = self.known_route(scope)
        return known is not None and known.exempt

    def exchange_of(self, connection: Connection) -> LitestarExchange:
        """The exchange of a request, as its last guard sees it: an application may be mounted in another."""
        state: Any = connection.scope["state"]
        exchange: LitestarExchange | None = state.get(self.scope_key)
        if exchange is None:
            exchange = state[self.scope_key] = LitestarExchange(self, connection.scope, connection)  # type: ignore[arg-type]
        elif exchange.connection is not connection:
            exchange.scope, exchange.connection = connection.scope, connection  # type: ignore[assignment]
        return exchange

    async def meet_default(self, connection: Connection, _: BaseRouteHandler) -> None:
        """The first guard of handlers without a limit of their own."""
        if self.enabled and self.default is not None:
            await self.decide(self.exchange_of(connection), (self.default,))

    async def decide(self, exchange: LitestarExchange, limits: Iterable[Limit]) -> None:
        """Take what *limits* ask; raise what Litestar turns into an answer if one of them refuses."""
        allowed = await self.admit(exchange, limits)
        exchange.scope["state"]["rate_limit"] = exchange.decision
        if not allowed:
            assert exchange.decision is not None
            if exchange.scope["type"] == "websocket":
                raise WebSocketException(detail="rate limit exceeded", code=TRY_AGAIN_LATER)
            raise LimitExceededException(exchange.decision, await self.denial(exchange))
        if self.needs_settling(exchange):
            self.settle_at_end(exchange)


def _response_of(_: Any, denied: LimitExceededException) -> Response[Any]:
    return denied.response


def _exempt_at(layers: list[Any]) -> int | None:
    """The place of the innermost layer that is exempt; None if none is, or if one further in says that it is not."""
    said = [(depth, layer.opt[EXEMPT]) for depth, layer in enumerate(layers) if EXEMPT in (layer.opt or {})]
    if len(said) > 1 and said[-1][1] == said[-2][1]:
        said.pop()  # Litestar gives a handler the options of the layers around it
    function = layers[-1].fn
    while hasattr(function, "func"):  # a plain handler that runs in a thread
        function = function.func
    if hasattr(function, EXEMPT):
        said.append((len(layers) - 1, True))
    return said[-1][0] if said and said[-1][1] else None
