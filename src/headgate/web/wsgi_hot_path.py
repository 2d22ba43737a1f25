"""What every request on WSGI passes through: the layer around the application, a decision in one call, and its answer's
way out.

Compiled where that works, so types are few here: what is called is Python of an application or of a framework.
"""

from __future__ import annotations

from typing import Any, cast

from headgate.decision import Decision
from headgate.web.exchange import served_view
from headgate.web.headers import with_x_headers
from headgate.web.hot_fields import LimitsFields, PlainLimit


class WSGIRequest:
    """A request on its way through the application. Its environment carries it, and its method `start` is what the
    application gets as `start_response`: it puts the limits' headers on the answer.

    Most requests meet one limit, and `meet` decides it at once. Where there is more to do, `exchange` makes the
    `Exchange` that all frameworks know.
    """

    def __init__(self, limits: LimitsFields, environ: Any, inner: Any) -> None:
        self.limits: LimitsFields = limits
        self.environ: Any = environ
        self.inner: Any = inner  # the server's `start_response`
        self.plan: Any = None  # of the route whose limits it has met
        self.native: Any = None  # the framework's request
        self.quick: PlainLimit | None = None
        self.decision: Decision | None = None
        self.started: bool = False  # whether the answer went out without an exchange
        self.made: Any = None  # the exchange

    def exchange(self) -> Any:
        """The exchange, with what was decided before it was needed."""
        exchange = self.made
        if exchange is None:
            limits: Any = self.limits
            self.made = exchange = limits.exchange_class(limits, self.environ, self.inner)
            if self.plan is not None:
                exchange.keep_plan(self.plan, self.native)
                exchange.met = True
                exchange.decided = self.plan.met
                made, quick = self.decision, self.quick
                if made is not None and quick is not None:
                    exchange.decision, exchange.limiter, exchange.limit = made, quick.limiter, quick.limit
                    exchange.denied_by = None if made.allowed else quick.limit
        return exchange

    def meet(self, plan: Any, native: Any) -> bool:
        """Decide what *plan* asks, if that is nothing, or one limit by address; False: `RateLimitsBase.admit` must."""
        limits = self.limits
        if self.made is not None or self.plan is not None:
            return False
        quick: PlainLimit | None = plan.quick
        if quick is not None:
            peer = self.environ.get("REMOTE_ADDR")
            key = limits.key_of_peer(peer) if peer and not limits.watched else ""
            if not key:
                return False
            made: Decision = quick.take(key)
            self.quick, self.decision = quick, made
        elif plan.limits:
            return False
        self.plan, self.native = plan, native
        return True

    def start(self, status: Any, headers: Any, exc_info: Any = None) -> Any:
        """What the application calls as `start_response`."""
        if self.made is None and self.plan is not None:
            made, quick, whole = self.decision, self.quick, headers
            if made is not None and quick is not None:
                style = self.limits.header_style
                if made.allowed and style == "x":
                    whole = with_x_headers(headers, quick.headers.of(made))
                elif style is not None or not made.allowed:
                    whole = None
            if whole is not None:
                self.started = True
                if exc_info is None:
                    return self.inner(status, whole)
                return self.inner(status, whole, exc_info)
        return self.exchange().start(status, headers, exc_info)


class LimitedWSGI:
    """Stands around a WSGI application: puts the limits' headers on its answers, and settles what an answer decides."""

    def __init__(self, limits: Any, app: Any) -> None:
        self.limits: LimitsFields = limits
        self.environ_key: str = limits.environ_key
        self.app: Any = app

    def __call__(self, environ: Any, start_response: Any) -> Any:
        limits, key = self.limits, self.environ_key
        if not limits.enabled or key in environ:
            return self.app(environ, start_response)  # a second installation counts nothing
        request = WSGIRequest(limits, environ, start_response)
        environ[key] = request
        try:
            body = self.app(environ, request.start)
        except BaseException:
            if request.made is not None:
                request.made.fail()
            raise
        finally:
            served_view.met = None
            environ.pop(key, None)  # they hold each other, and would stay until a garbage collection
        if request.started and request.made is None:
            return body  # as it is, so that a server can send a file itself
        return cast(Any, limits).finish(request.exchange(), body)
