"""FastAPI: `limits.install(app)`, then `Depends(limits.limit("5/minute"))` or `@limits.limit("5/minute")`.

A limit among the dependencies is decided where it stands, so that it sees what the dependencies before it have found.
One that needs none of them is decided before the body of the request is read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Iterator
from typing import Annotated, Any, Unpack, overload

try:
    from fastapi import APIRouter, Depends, FastAPI
except ImportError as error:
    raise ImportError("headgate.web.fastapi needs FastAPI: pip install 'headgate[fastapi]'") from error

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from headgate.decision import Decision
from headgate.web.asgi import Scope
from headgate.web.core import Done
from headgate.web.limit import LimitOptions, QuotaSource, SetupError
from headgate.web.problem import CONTENT_TYPE
from headgate.web.starlette import StarletteExchange, StarletteLimit, StarletteRateLimits, method_of
from headgate.web.starlette_endpoints import GATE, Endpoint, Exempt, Gate, Target, limited
from headgate.web.starlette_routes import Placed, RoutePlan

CONNECTION = inspect.Parameter("connection", inspect.Parameter.KEYWORD_ONLY, annotation=HTTPConnection)

NUMBER = {"schema": {"type": "integer"}}
TEXT = {"schema": {"type": "string"}}
TOO_MANY_REQUESTS: dict[str, Any] = {
    "description": "Too Many Requests",
    "content": {
        CONTENT_TYPE: {
            "schema": {
                "title": "RateLimitExceeded",
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                    "type": {"type": "string"},
                    "retryAfterSeconds": {"type": "integer", "minimum": 1},
                },
                "required": ["title", "status", "detail", "type"],
            }
        }
    },
}


class FastAPILimit(StarletteLimit):
    """A limit of a route: in `Depends(...)` of a route, a router or the application, or as a decorator.

    As a dependency it gives the decision.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # What FastAPI asks of a dependency: its parameters, and whether it is a coroutine function.
        self.__signature__ = inspect.Signature([CONNECTION])
        self.__dict__["__call__"] = self._as_dependency

    @overload
    def __call__(self, endpoint: Endpoint) -> Endpoint: ...
    @overload
    def __call__(self, *, connection: HTTPConnection) -> Awaitable[Decision]: ...
    def __call__(self, endpoint: Any = None, *, connection: HTTPConnection | None = None) -> Any:
        return limited(endpoint, self) if connection is None else self._as_dependency(connection)

    async def _as_dependency(self, connection: HTTPConnection) -> Decision:
        owner: RateLimits = self.limits
        exchange: StarletteExchange | None = owner.exchange_in(connection.scope)
        if exchange is None:
            owner.check_disabled()
            return self.untouched()
        if not exchange.has_met(self):
            await owner.decide(exchange, (self,), connection)
        return self.untouched() if exchange.decision is None else exchange.decision


class NotCalled(Done[None]):
    """What `limits.exempt()` gives: FastAPI awaits it, as a dependency."""

    def __call__(self, *_: object) -> Any:
        raise SetupError("write @limits.exempt without parentheses")


class FastAPIExempt(Exempt):
    """`limits.exempt`: a decorator, or `Depends(limits.exempt)` for all routes of a router.

    It frees from the default, and from the limits that are given around it: by the application or by outer routers.
    """

    def __init__(self, owner: RateLimits) -> None:
        super().__init__(owner)
        self.__signature__ = inspect.Signature()
        self.__dict__["__call__"] = self._as_dependency

    @overload
    def __call__(self) -> Awaitable[None]: ...
    @overload
    def __call__(self, target: Target) -> Target: ...
    def __call__(self, target: Any = None) -> Any:
        if isinstance(target, APIRouter):
            raise SetupError("a router is exempt by APIRouter(dependencies=[Depends(limits.exempt)])")
        return NotCalled(None) if target is None else super().__call__(target)

    async def _as_dependency(self) -> None:
        """Do nothing: the route was found to be exempt before."""


class Unwritten:
    """Stands for the quota in `Depends(limits.limit)`: FastAPI asks for its signature, and so the error is clear."""

    @property
    def __signature__(self) -> inspect.Signature:
        raise SetupError("Depends(limits.limit) has no quota; write Depends(limits.limit('5/minute'))")

    def __call__(self) -> None: ...


class RateLimits(StarletteRateLimits[FastAPILimit]):
    """The limits of a FastAPI application: `RateLimitsBase` says what it takes."""

    limit_class = FastAPILimit

    def limit(
        self, quota: Annotated[QuotaSource, Depends(Unwritten())], **options: Unpack[LimitOptions]
    ) -> FastAPILimit:
        """A limit for a route; wrong arguments raise here.

        Args:
            quota: text, a `Quota`, a list: all must allow; or a function of the request that gives one
            **options: see `LimitOptions`
        """
        return super().limit(quota, **options)

    @functools.cached_property
    def exempt(self) -> FastAPIExempt:
        """Frees a route from the default: a decorator, or a dependency of a router."""
        return FastAPIExempt(self)

    def install(self, app: Starlette) -> None:
        """Limit *app*: routes with limits of their own, and by the default everything else. Once for an application.

        Args:
            app: the application
        """
        super().install(app)
        if isinstance(app, FastAPI):
            describe = app.openapi

            def openapi() -> dict[str, Any]:
                self.bind(app.router, set())
                return describe()

            app.__dict__["openapi"] = openapi
            app.openapi_schema = None

    # ---------------------------------------------------------------------------------------- routes

    def bind(self, router: Any, seen: set[int]) -> None:
        if id(router) not in seen:
            for route in getattr(router, "_low_priority_routes", ()):  # of router.frontend()
                self.bind_route(route, seen)
        super().bind(router, seen)

    def bind_route(self, route: Any, seen: set[int]) -> None:
        contexts = getattr(route, "effective_route_contexts", None)
        if contexts is None:
            super().bind_route(route, seen)
            return
        frontends = getattr(route, "effective_low_priority_routes", list)
        for context in (*contexts(), *frontends()):  # FastAPI >= 0.137: routes of an included router are no copies
            if context.starlette_route is None:
                bound = self.bind_leaf(context.original_route)
                bound.included, bound.plan = True, None
                self.plan_route(context.original_route, context)
            else:
                super().bind_route(context.starlette_route, seen)

    def plan_route(self, route: Any, source: Any) -> RoutePlan | None:
        plan = super().plan_route(route, source)
        if plan is not None and hasattr(source, "dependant"):
            _unwrap(source.dependant, plan)
        if plan is None or not plan.by_dependency:
            return plan
        plan.provider = getattr(source, "dependency_overrides_provider", None)
        return plan if isinstance(plan.provider, FastAPI) else None

    def plan_of(self, route: Any, scope: Scope) -> RoutePlan:
        source, included = route, scope.get("fastapi")
        if included is not None:
            context = included.get("effective_route_context")
            source = context if context is not None and context.original_route is route else route
        plan: RoutePlan = source.__dict__.get(self.scope_key) or self.plan(route, source, method_of(route, scope))
        if plan.by_dependency:
            app = getattr(source, "dependency_overrides_provider", None) or scope.get("app")
            overrides = getattr(app, "dependency_overrides", None)
            if overrides and not plan.by_dependency.isdisjoint(overrides):
                _override(source, plan)
        return plan

    def make_plan(self, route: Any, source: Any, method: str) -> RoutePlan:
        plan = super().make_plan(route, source, method)
        if hasattr(source, "dependency_overrides_provider"):  # a route of FastAPI, over HTTP
            _take_out(source.dependant, plan, self.exempt)
            if (plan.limits or (plan.early and not plan.exempt)) and not {429, "429"} & source.responses.keys():
                source.responses = {**source.responses, 429: self._too_many_requests()}
        return plan

    def around(self, source: Any, plan: RoutePlan) -> tuple[list[Placed], int]:
        placed: dict[FastAPILimit, Placed] = {}
        places = 0
        for call in _calls(getattr(source, "dependant", None)):
            if isinstance(call, FastAPILimit) and call.limits is self:
                placed.setdefault(call, Placed(call, places, True))
            elif call is self.exempt:
                plan.exempt = True
                plan.freed |= placed.keys()
                placed = {}
            else:
                places += 1
        plan.by_dependency = frozenset(placed)
        return list(placed.values()), places

    def _too_many_requests(self) -> dict[str, Any]:
        """The 429 in the OpenAPI document."""
        numbers = {name.title().replace("Ratelimit", "RateLimit"): NUMBER for name in self.header_names}
        texts = {name: TEXT for name in numbers if name in ("RateLimit", "RateLimit-Policy")}
        return {**TOO_MANY_REQUESTS, "headers": {**numbers, **texts}}


def _calls(dependant: Any) -> Iterator[Any]:
    """The dependencies of a route, in the order in which FastAPI calls them."""
    for each in dependant.dependencies if dependant is not None else ():
        yield from _calls(each)
        yield each.call


def _take_out(dependant: Any, plan: RoutePlan, exempt: FastAPIExempt) -> None:
    """Take out the dependencies of a route that are decided before it is called: each costs time to solve."""
    needless = {exempt, *plan.freed, *(plan.by_dependency & set(plan.early))}
    kept = [each for each in dependant.dependencies if each.call not in needless or each.name or each.dependencies]
    if len(kept) < len(dependant.dependencies):
        plan.dependencies = dependant.dependencies
        dependant.dependencies = kept  # a new list: a request may be on its way through the old one


def _unwrap(dependant: Any, plan: RoutePlan) -> None:
    """Take out the wrapper of a decorated endpoint whose limits are all decided before it is called."""
    gate: Gate | None = getattr(dependant.call, GATE, None)
    if gate is not None and gate.wrapper is dependant.call and set(plan.early).issuperset(gate.limits):
        dependant.call = dependant.call.__wrapped__


def _override(source: Any, plan: RoutePlan) -> None:
    """Let FastAPI solve the limits of a route, because `app.dependency_overrides` replaces one of them."""
    if plan.dependencies:
        source.dependant.dependencies = plan.dependencies
        plan.dependencies = []
    plan.limits = {limit: (limit,) for limit in plan.limits}
    plan.early = tuple(limit for limit in plan.early if limit not in plan.by_dependency)
    plan.exempt = True
    plan.at_once = None
