"""Quart: `RateLimits(app, default="100/minute")`, or `RateLimits(...)` and `limits.init_app(app)`.

As for Flask: the limits of a request are asked in a `before_request` or `before_websocket` function, and a layer around
`app.asgi_app` puts the headers on every answer and settles `count_if`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Unpack

try:
    import quart
except ImportError as error:
    raise ImportError("headgate.web.quart needs Quart: pip install 'headgate[quart]'") from error
from werkzeug.exceptions import HTTPException

from headgate.decision import Decision
from headgate.web.asgi import CLOSE, TRY_AGAIN_LATER, ASGIExchange, ASGIRateLimits, Message, Receive, Scope, Send
from headgate.web.asgi_hot_path import ASGIRequest
from headgate.web.core import RateLimitsOptions
from headgate.web.limit import SetupError
from headgate.web.views import NOT_INSTALLED, RateLimitExceeded, ViewLimit, ViewPlan, ViewRateLimits, refused

__all__ = ["QuartLimit", "RateLimitExceeded", "RateLimits", "SetupError"]


class QuartExchange(ASGIExchange):
    """A request or a WebSocket of a Quart application. The application's functions get Quart's request or WebSocket."""

    plan: ViewPlan | None

    @property
    def native(self) -> Any:
        return self.scope if self.connection is None else self.connection

    @property
    def route(self) -> str:
        return self.plan.route if self.plan else ""


class QuartLimit(ViewLimit):
    """A limit for a view or a blueprint, for a block of code (``async with``), or to be asked by hand: `check`."""

    limits: RateLimits

    async def check(self, cost: int | None = None) -> Decision:
        """Take *cost* permits for the request that is being served; a refusal raises `RateLimitExceeded`, a 429."""
        return await self.limits.check_now(self, cost)

    async def __aenter__(self) -> Decision:
        return await self.check()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        pass

    def meet(self) -> None:
        exchange = self.limits.exchange_now()
        if exchange is None or self in exchange.decided or exchange.is_preflight():
            return
        if not self.methods or exchange.method in self.methods:
            raise SetupError(f"{self!r} is on a plain function that is no view, and cannot be awaited; make it async")

    async def meet_async(self) -> None:
        exchange = self.limits.exchange_now()
        if exchange is not None and self not in exchange.decided:
            await self.check()


class RateLimits(ViewRateLimits[QuartLimit], ASGIRateLimits[QuartLimit]):
    """The limits of Quart applications: `RateLimitsBase` says what it takes, `LimitOptions` what `limit` takes.

    Args:
        app: the application; None: `init_app` gets it
        **options: what `RateLimitsBase` takes
    """

    limit_class = QuartLimit
    exchange_class = QuartExchange

    def __init__(self, app: quart.Quart | None = None, **options: Unpack[RateLimitsOptions]) -> None:
        super().__init__(app, **options)

    def init_app(self, app: quart.Quart) -> None:
        """Limit the requests of *app*. May be called for several applications.

        Args:
            app: the application
        """
        if not isinstance(app, quart.Quart):
            raise TypeError(f"init_app takes a Quart application, got {app!r:.60}")
        if not self.add_app(app):
            return
        quart.request_started.disconnect(self._complain)
        quart.websocket_started.disconnect(self._complain)
        app.before_request(self._before)
        app.before_websocket(self._before)
        inner: Any = app.asgi_app

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            await self.serve(inner, scope, receive, send, True)

        app.asgi_app = limited  # type: ignore[method-assign, assignment]  # as Quart's documentation has it

    def marks_changed(self) -> None:
        super().marks_changed()
        if not self._apps:  # until there is one, a limited view must not run
            quart.request_started.connect(self._complain)
            quart.websocket_started.connect(self._complain)

    def exchange_now(self) -> QuartExchange | None:
        """The exchange of the request that is being served; None: the limits are switched off."""
        if not self.enabled:
            return None
        connection = _connection()
        exchange: QuartExchange | None = self.exchange_in(connection.scope)
        if exchange is None:
            if not self.is_on(quart.current_app):
                raise SetupError(f"a limit was asked, but {NOT_INSTALLED}")
            request = ASGIRequest(self, connection.scope, None, None, True)  # a test of Quart made the scope itself
            connection.scope[self.scope_key] = request
            exchange = request.exchange()
        exchange.connection, exchange.scope = connection, connection.scope
        return exchange

    async def check_now(self, limit: QuartLimit, cost: int | None) -> Decision:
        """What `QuartLimit.check` does."""
        exchange = self.exchange_now()
        if exchange is None:
            return limit.untouched()
        made = await self.check(exchange, limit, cost)
        quart.g.rate_limit = exchange.decision
        if made:
            return made
        exchange.denied_by = limit
        if exchange.accepted:
            await exchange.connection.close(TRY_AGAIN_LATER, "rate limit exceeded")
        answer = await self._answer(exchange)
        if answer is None:
            raise RateLimitExceeded(self, exchange)
        raise HTTPException(response=await quart.current_app.make_response(answer))

    async def admit_undecided(self, exchange: ASGIExchange) -> bool:
        return exchange.exempt or self._elsewhere is None or await self.admit(exchange, (self._elsewhere,))

    def with_headers(self, exchange: ASGIExchange, message: Message) -> Message:
        if message["type"] == "websocket.close" and exchange.denied_by is not None:
            return CLOSE
        return super().with_headers(exchange, message)

    async def _before(self) -> Any:
        """The `before_request` function: meet the limits of the route, all in one decision."""
        exchange = self.exchange_now()
        if exchange is None or exchange.plan is not None:
            quart.g.setdefault("rate_limit", None)
            return None
        plan = exchange.plan = self.plan_of(quart.current_app, exchange.connection.url_rule, exchange.method)
        exchange.exempt = not plan.limits
        admitted = not plan.limits or await self.admit(exchange, plan.limits)
        exchange.decided |= plan.met
        quart.g.rate_limit = exchange.decision
        if admitted:
            return None
        answer = await self._answer(exchange)
        if answer is None:
            raise RateLimitExceeded(self, exchange)
        return answer

    async def _answer(self, exchange: QuartExchange) -> Any:
        """What the application answers to a refusal itself; None: the 429."""
        on_denied = self.on_denied_of(exchange)
        if on_denied is None:
            return None
        return refused(await quart.current_app.ensure_async(on_denied)(exchange.native, exchange.decision))

    async def _complain(self, app: quart.Quart, **_: Any) -> None:
        connection = _connection()
        self.complain(app, connection.url_rule, connection.scope.get("method", "WEBSOCKET"))


def _connection() -> Any:
    """The request or the WebSocket that is being served."""
    connection: Any = quart.request if quart.has_request_context() else quart.websocket
    if not connection:
        raise SetupError("a limit was asked outside of a request, so there is no client to count")
    return connection._get_current_object()
