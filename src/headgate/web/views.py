"""What Flask and Quart share: limits on views and on blueprints, and the 429 as an exception.

A limit marks what it is put on, and the marks are read when a route is met first: so the order of decorators does not
matter, and neither does it whether a view is added to a blueprint before or after the blueprint's limit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import weakref
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from werkzeug.exceptions import TooManyRequests
from werkzeug.wrappers import Response

from headgate.decision import Decision
from headgate.web.core import RateLimitsBase
from headgate.web.exchange import Exchange, served_view
from headgate.web.headers import retry_seconds
from headgate.web.hot_fields import PlainLimit
from headgate.web.limit import Limit, SetupError, mark, own_marks
from headgate.web.limiters import ScopedLimiter
from headgate.web.view_commands import commands

LIMITS, EXEMPT, GUARD = "__headgate_limits__", "__headgate_exempt__", "__headgate_guard__"
METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "WEBSOCKET"])

NOT_INSTALLED = "its RateLimits is not installed on this application: call limits.init_app(app), or RateLimits(app)"

Target = TypeVar("Target")


class RateLimitExceeded(TooManyRequests):
    """A refusal, for error handlers of the application: ``@app.errorhandler(429)``. Without one it is problem+json.

    decision     the refusal: its limit, when to come back
    description  the same in words
    retry_after  whole seconds; None: the request costs more than the limit ever has
    """

    def __init__(self, limits: RateLimitsBase[Any], exchange: Exchange) -> None:
        status, headers, body = limits.refusal(exchange)
        assert exchange.decision is not None
        answer = Response(body, status, headers)
        super().__init__(json.loads(body)["detail"], answer, retry_seconds(exchange.decision) or None)
        self.decision: Decision = exchange.decision


class ViewPlan(NamedTuple):
    """What a route asks of a request with one method."""

    limits: tuple[Limit, ...]
    route: str
    met: frozenset[Limit] = frozenset()  # `limits`, and those of single methods of a class, which have copies there
    settles: bool = False  # whether the response decides if permits go back
    quick: PlainLimit | None = None  # the only limit, if it is decided at once and counts this method
    guard: Any = None  # the route's view, if it is one of `_guard` whose limits are all in `met`
    rule: Any = None  # alive as long as the plan, which is kept by the rule's id


NO_PLAN = ViewPlan((), "")


class ViewLimit(Limit):
    """A limit for a view, a method of a class-based view, a class, or all views of a blueprint."""

    limits: ViewRateLimits[Any]

    def __call__(self, target: Target) -> Target:
        """Limit *target*, which may be decorated further, and registered before or after."""
        view: Any = target
        inherited = _marks(view, LIMITS) if hasattr(view, GUARD) else ()  # of limits further in, copied by a decorator
        _mark(view, LIMITS, self)
        self.limits.marks_changed()
        if inspect.isroutine(view) and not _is_guard(view):
            view = _guard(view, self.limits)
            setattr(view, LIMITS, (self, *inherited))
        limited: Target = view
        return limited

    def meet(self) -> None:
        """Ask this limit for the request that is being served, unless it was asked before."""
        raise NotImplementedError

    async def meet_async(self) -> None:
        """The same in an async view."""
        raise NotImplementedError


def _guard(view: Any, limits: ViewRateLimits[Any]) -> Any:
    """*view*, which meets its limits when it is called, if the request has not met them before.

    The limits of a route are met before its view is called. They are not if the application was never installed, if a
    decorator in between hides the marks, or if *view* is no view but a function that views call.
    """
    guarded: Any

    @functools.wraps(view)
    def guarded_plain(*args: Any, **kwargs: Any) -> Any:
        if served_view.met is not guarded:
            for limit in getattr(guarded, LIMITS):
                if limit.limits is limits:
                    limit.meet()
        return view(*args, **kwargs)

    @functools.wraps(view)
    async def guarded_async(*args: Any, **kwargs: Any) -> Any:
        for limit in getattr(guarded, LIMITS):
            if limit.limits is limits:
                await limit.meet_async()
        return await view(*args, **kwargs)

    guarded = guarded_async if inspect.iscoroutinefunction(view) else guarded_plain
    setattr(guarded, GUARD, guarded)  # decorators copy it, and then it is another function's
    return guarded


def _is_guard(view: Any) -> bool:
    return view is not None and getattr(view, GUARD, None) is view


AnyLimit = TypeVar("AnyLimit", bound=ViewLimit)


class ViewRateLimits(RateLimitsBase[AnyLimit], Generic[AnyLimit]):
    """The limits of applications whose routes are views and blueprints."""

    installation = "RateLimits(app) or limits.init_app(app)"

    def __init__(self, app: Any = None, **options: Any) -> None:
        if app is not None and not hasattr(app, "extensions"):
            raise TypeError(self.unnamed_text(app))
        super().__init__(**options)
        self._plans: dict[tuple[int, str], ViewPlan] = {}
        self._apps: weakref.WeakSet[Any] = weakref.WeakSet()
        self.unmatched = ViewPlan(() if self.default is None else (self.default,), "")
        self._elsewhere = self._default_elsewhere()
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Any) -> None:
        """Limit the requests of *app*. May be called for several applications."""
        raise NotImplementedError

    def exempt(self, target: Target) -> Target:
        """Free a view from the default and from the limits of its blueprints, or a blueprint from those around it.

        Args:
            target: a view or a blueprint
        """
        _mark(target, EXEMPT, self)
        self.marks_changed()
        return target

    def marks_changed(self) -> None:
        """Read the marks again when a route is met next."""
        self._plans.clear()

    def add_app(self, app: Any) -> bool:
        """Remember *app*; False: it is known already. Raises if another object counts its requests under this name."""
        installed: list[ViewRateLimits[Any]] = app.extensions.setdefault("headgate", [])
        if self in installed:
            return False
        if any(other.name == self.name for other in installed):
            raise SetupError(
                f"two RateLimits named {self.name!r} on one application would count its requests twice; use one "
                "object, or give the second a name= of its own"
            )
        installed.append(self)
        self._apps.add(app)
        if "headgate" not in app.cli.commands:
            app.cli.add_command(commands(app))
        return True

    def is_on(self, app: Any) -> bool:
        """Whether this object limits *app*."""
        return self in app.extensions.get("headgate", ())

    def complain(self, app: Any, rule: Any, method: str) -> None:
        """Raise if a request to *rule* has limits of this object, which *app* does not know."""
        if rule is None or self.is_on(app):
            return
        if any(limit is not self.default for limit in self.plan_of(app, rule, method).limits):
            raise SetupError(f"{rule.endpoint!r} has a limit, but {NOT_INSTALLED}")

    # --------------------------------------------------------------------------------------- what a route asks

    def plan_of(self, app: Any, rule: Any, method: str) -> ViewPlan:
        """The limits of a request to *rule*, which is None if nothing matched."""
        if rule is None:
            return self.unmatched
        known = self._plans.get((id(rule), method))
        if known is None:
            known = self._make_plan(app, rule, method)
            if method in METHODS:  # a client can invent others
                self._plans[id(rule), method] = known
        return known

    def _make_plan(self, app: Any, rule: Any, method: str) -> ViewPlan:
        route = route_of(rule)
        limits: dict[Limit, None] = {}
        met: list[Limit] = []
        exempt = False
        for target, of_method in _levels(app, rule.endpoint, method):
            for limit in _marks(target, LIMITS):
                if limit.limits is not self or (limit.methods and method not in limit.methods):
                    continue
                met.append(limit)
                if of_method and not limit.scope:
                    limit = _of_method(limit, route, method)
                limits[limit] = None
            exempt = self in own_marks(_unwrapped(target), EXEMPT)
            if exempt:
                break
        if method == "OPTIONS" and rule.provide_automatic_options:
            limits.clear()  # the view does not run
        if not limits and not exempt:
            quick = self._only_limit(self.unmatched.limits, route, method)
            return self.unmatched._replace(route=route, quick=quick, rule=rule)
        settles = any(limit.count_if is not None for limit in limits)
        view = app.view_functions.get(rule.endpoint)
        is_covered = _is_guard(view) and all(limit in met for limit in getattr(view, LIMITS) if limit.limits is self)
        found, guard = tuple(limits), view if is_covered else None
        quick = self._only_limit(found, route, method)
        return ViewPlan(found, route, frozenset((*met, *limits)), settles, quick, guard, rule)

    def _only_limit(self, limits: tuple[Limit, ...], route: str, method: str) -> PlainLimit | None:
        """A request's only limit, if it is decided at once."""
        return self.plain_limit(limits[0], route) if len(limits) == 1 and method != "OPTIONS" else None

    def _default_elsewhere(self) -> Limit | None:
        """The default for answers that come from elsewhere than the views, where key functions lack what they read."""
        default = self.default
        if default is None or not any(callable(subject.source) for subject in default.subjects):
            return default
        quota: Any = default.quota_function or (default.rule and default.rule.quotas)
        return self.limit(quota, key="address", scope=default.scope)

    # -------------------------------------------------------------------------------------- looking after keys

    def declare(self) -> list[ViewPlan]:
        """Make every limiter of the applications known, used or not. Returns what their routes ask."""
        plans = []
        for app in self._apps:
            for rule in app.url_map.iter_rules():
                made = [self._make_plan(app, rule, method) for method in methods_of(rule)]
                plans.append(
                    ViewPlan(tuple(dict.fromkeys(limit for plan in made for limit in plan.limits)), route_of(rule))
                )
        for plan in (self.unmatched, *plans):
            for limit in plan.limits:
                self.limiters_of(limit, plan.route)
        return plans

    def known_limiters(self) -> list[ScopedLimiter]:
        """All limiters of the applications; those of quota functions only once a request has used them."""
        self.declare()
        return super().known_limiters()


def refused(answer: Any) -> Any:
    """What `on_denied` gave, for the framework to make a response of: a body without a status is that of a 429."""
    return (answer, 429) if isinstance(answer, str | bytes | dict | list) else answer


def route_of(rule: Any) -> str:
    """The methods and the template of a route, such as `GET,POST /v1/items/<int:item>`."""
    return f"{','.join(methods_of(rule))} {rule.host or rule.subdomain or ''}{rule.rule}"


def methods_of(rule: Any) -> list[str]:
    """The methods that a route is known by: without those that come with every route."""
    if getattr(rule, "websocket", False):
        return ["WEBSOCKET"]
    return sorted((rule.methods or METHODS) - {"HEAD", "OPTIONS"}) or sorted(rule.methods)


def _levels(app: Any, endpoint: str, method: str) -> Iterator[tuple[Any, bool]]:
    """What a limit of a route may be on, from the inside: a method of a class (True), the view, its blueprints."""
    view = app.view_functions.get(endpoint)
    made_of = getattr(view, "view_class", None)
    if made_of is not None:
        fallback = getattr(made_of, "get", None) if method == "HEAD" else None
        yield getattr(made_of, method.lower(), fallback), True
        yield made_of.dispatch_request, False
        yield made_of, False
    yield view, False
    name = endpoint.rpartition(".")[0]
    while name:
        yield app.blueprints.get(name), False
        name = name.rpartition(".")[0]


def _of_method(limit: Limit, route: str, method: str) -> Limit:
    """*limit* for one method of a class: each of them has a state of its own."""
    made = copy.copy(limit)
    made.limiters = {}
    made.scope = f"{'GET' if method == 'HEAD' else method} {route.partition(' ')[2]}"
    return made


def _mark(target: Any, attribute: str, value: object) -> None:
    if hasattr(target, "wsgi_app") or hasattr(target, "asgi_app"):
        raise SetupError(
            "a limit goes on a view or on a blueprint; that of a whole application is RateLimits(app, default=...)"
        )
    is_view = hasattr(target, "dispatch_request") if inspect.isclass(target) else callable(target)
    if not is_view and not hasattr(target, "register_blueprint"):
        raise SetupError(f"a limit goes on a view or on a blueprint, got {type(target).__name__} {target!r:.60}")
    mark(target, attribute, value)
    if _is_guard(target):
        mark(target.__wrapped__, attribute, value)  # which may be what was registered


def _marks(target: Any, attribute: str) -> tuple[Any, ...]:
    found: tuple[Any, ...] = getattr(_unwrapped(target), attribute, ())
    return found


def _unwrapped(target: Any) -> Any:
    while isinstance(target, functools.partial):
        target = target.func
    return target
