"""Flask: `RateLimits(app, default="100/minute")`, or `RateLimits(...)` and `limits.init_app(app)`.

The limits of a request are asked in a `before_request` function: after those that were registered before `init_app`,
and before all others. A layer around `app.wsgi_app` puts the headers on every answer and settles `count_if`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar, Unpack, cast

try:
    import flask
except ImportError as error:
    raise ImportError("headgate.web.flask needs Flask: pip install 'headgate[flask]'") from error
from werkzeug.exceptions import HTTPException

from headgate.decision import Decision
from headgate.web.core import RateLimitsOptions, without_loop
from headgate.web.exchange import served_view
from headgate.web.limit import Limit, OnDenied, SetupError
from headgate.web.views import (
    NO_PLAN,
    NOT_INSTALLED,
    RateLimitExceeded,
    ViewLimit,
    ViewPlan,
    ViewRateLimits,
    refused,
)
from headgate.web.wsgi import WSGIExchange, WSGIRateLimits, async_functions
from headgate.web.wsgi_hot_path import LimitedWSGI, WSGIRequest

Result = TypeVar("Result")

# What stands behind Flask's proxies: each attribute that is read or set through one costs several calls.
_request, _g = cast(Any, flask.request), cast(Any, flask.g)
current_request: Callable[[], flask.Request] = _request._get_current_object
current_g: Callable[[], Any] = _g._get_current_object

__all__ = ["FlaskLimit", "RateLimitExceeded", "RateLimits", "SetupError"]


class FlaskExchange(WSGIExchange):
    """A request to a Flask application. The application's functions get Flask's request."""

    request: flask.Request | None = None
    plan: ViewPlan = NO_PLAN

    @property
    def native(self) -> Any:
        if self.request is None:  # an answer that does not come from the application's views
            self.request = flask.Request(self.environ)
        return self.request

    def keep_plan(self, plan: ViewPlan, native: flask.Request) -> None:
        self.request, self.plan, self.route = native, plan, plan.route

    def keep_response(self, response: flask.Response) -> flask.Response:
        """An `after_request` function: keep what `count_if` may ask for."""
        self.response = response
        return response


class FlaskLimit(ViewLimit):
    """A limit for a view or a blueprint, for a block of code (``with``), or to be asked by hand: `check`."""

    limits: RateLimits

    @functools.cached_property
    def has_async(self) -> bool:
        """Whether one of its functions is async, and needs an event loop."""
        return bool(async_functions(self))

    def check(self, cost: int | None = None) -> Decision:
        """Take *cost* permits for the request that is being served; a refusal raises `RateLimitExceeded`, a 429."""
        return self.limits.check_now(self, cost)

    def __enter__(self) -> Decision:
        return self.check()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def meet(self) -> None:
        exchange = self.limits.exchange_now()
        if exchange is not None and self not in exchange.decided:
            self.check()

    async def meet_async(self) -> None:
        self.meet()


class RateLimits(ViewRateLimits[FlaskLimit], WSGIRateLimits[FlaskLimit]):
    """The limits of Flask applications: `RateLimitsBase` says what it takes, `LimitOptions` what `limit` takes.

    Args:
        app: the application; None: `init_app` gets it
        **options: what `RateLimitsBase` takes
    """

    limit_class = FlaskLimit
    exchange_class = FlaskExchange

    def __init__(self, app: flask.Flask | None = None, **options: Unpack[RateLimitsOptions]) -> None:
        super().__init__(app, **options)

    def init_app(self, app: flask.Flask) -> None:
        """Limit the requests of *app*. May be called for several applications.

        Args:
            app: the application
        """
        if not self.add_app(app):
            return
        flask.request_started.disconnect(self._complain)
        app.before_request(self._before)
        app.wsgi_app = LimitedWSGI(self, app.wsgi_app)  # type: ignore[method-assign]  # Flask's own advice

    def marks_changed(self) -> None:
        super().marks_changed()
        if not self._apps:  # until there is one, a limited view must not run
            flask.request_started.connect(self._complain)

    def exchange_now(self) -> FlaskExchange | None:
        """The exchange of the request that is being served; None: the limits are switched off."""
        if not self.enabled:
            return None
        try:
            request = current_request()
        except RuntimeError:
            raise SetupError("a limit was asked outside of a request, so there is no client to count") from None
        if self.environ_key not in request.environ:
            if not self.is_on(flask.current_app):
                raise SetupError(f"a limit was asked, but {NOT_INSTALLED}")
            request.environ[self.environ_key] = WSGIRequest(self, request.environ, None)
        exchange: FlaskExchange = self.exchange_in(request.environ)
        if exchange.request is None:
            self._find_plan(exchange, request)
        return exchange

    def check_now(self, limit: FlaskLimit, cost: int | None) -> Decision:
        """What `FlaskLimit.check` does."""
        exchange = self.exchange_now()
        if exchange is None:
            return limit.untouched()
        made = self.run(self.check(exchange, limit, cost), (limit,))
        exchange.settles = exchange.settles or limit.count_if is not None
        flask.g.rate_limit = exchange.decision
        if made:
            return made
        answer = self._answer(exchange, limit.on_denied or self.on_denied)
        if answer is None:
            raise RateLimitExceeded(self, exchange)
        raise HTTPException(response=flask.current_app.make_response(answer))

    def run(self, work: Coroutine[Any, Any, Result], limits: Iterable[Limit]) -> Result:
        """Run *work*, in an event loop if one of *limits* has an async function."""
        if not any([isinstance(limit, FlaskLimit) and limit.has_async for limit in limits]):
            return without_loop(work)

        async def wait() -> Result:
            return await work

        result: Result = flask.current_app.ensure_sync(wait)()
        return result

    def admit_late(self, exchange: WSGIExchange) -> bool:
        assert isinstance(exchange, FlaskExchange)
        if self._elsewhere is None:
            return True
        if flask.has_request_context() and not self._find_plan(exchange, current_request()).limits:
            return True  # exempt
        exchange.route = ""
        return self.admit_in_thread(exchange, (self._elsewhere,))

    def _before(self) -> Any:
        """The `before_request` function: meet the limits of the route, all in one decision."""
        request = current_request()
        served: WSGIRequest | None = request.environ.get(self.environ_key)
        plan = self._plans.get((id(request.url_rule), request.method))
        if served is None or plan is None or not self.enabled or not served.meet(plan, request):
            return self._before_by_exchange()
        current_g().rate_limit = served.decision
        if served.decision is not None and not served.decision.allowed:
            return self._refused(served.exchange())
        served_view.met = plan.guard
        return None

    def _before_by_exchange(self) -> Any:
        """The same, for limits that ask for more than the address, and for the first requests."""
        exchange = self.exchange_now()
        if exchange is None or exchange.met:
            flask.g.setdefault("rate_limit", None)
            return None
        plan, exchange.met = exchange.plan, True
        admitted = not plan.limits or self.admit_in_thread(exchange, plan.limits)
        exchange.decided |= plan.met
        flask.g.rate_limit = exchange.decision
        if not admitted:
            return self._refused(exchange)
        if plan.settles:
            exchange.settles = True
            flask.after_this_request(exchange.keep_response)
        return None

    def _refused(self, exchange: FlaskExchange) -> Any:
        """What the application answers to a refusal itself; else raise the 429."""
        answer = self._answer(exchange, self.on_denied_of(exchange))
        if answer is None:
            raise RateLimitExceeded(self, exchange)
        return answer

    def _find_plan(self, exchange: FlaskExchange, request: flask.Request) -> ViewPlan:
        plan = self.plan_of(flask.current_app, request.url_rule, request.method)
        exchange.keep_plan(plan, request)
        return plan

    def _answer(self, exchange: FlaskExchange, on_denied: OnDenied | None) -> Any:
        """What the application answers to a refusal itself; None: the 429."""
        if on_denied is None:
            return None
        return refused(flask.current_app.ensure_sync(on_denied)(exchange.native, exchange.decision))

    def _complain(self, app: flask.Flask, **_: Any) -> None:
        """Called by a signal for each request to any application, until this object limits one."""
        self.complain(app, flask.request.url_rule, flask.request.method)
