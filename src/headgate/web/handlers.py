"""Limits as decorators of handlers, met by a middleware before the handler runs: what aiohttp and Sanic share.

A decorator marks the handler, so that the middleware finds all limits of a route and decides once. It also wraps the
handler: without the middleware the wrapper raises, and a limit that the middleware could not see decides there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

from headgate.decision import Decision
from headgate.web.core import RateLimitsBase, tighter
from headgate.web.exchange import Exchange
from headgate.web.headers import denial_headers
from headgate.web.limit import Limit, SetupError, check_answer, mark, own_marks

Target = TypeVar("Target")

LIMITS, EXEMPT = "__headgate_limits__", "__headgate_exempt__"  # what decorators leave on functions and views
METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "trace", "connect")  # as views name them


class LimitedRoute:
    """What is limited of a route."""

    __slots__ = ("exempt", "limits", "text")

    def __init__(self, text: str, limits: Iterable[Limit], exempt: bool) -> None:
        self.text = text  # the default scope
        self.limits = tuple(dict.fromkeys(limits))
        self.exempt = exempt


class HandlerExchange(Exchange):
    """A request that a handler answers. The application's functions get the framework's request."""

    __slots__ = ("known", "request")

    def __init__(self, limits: HandlerRateLimits[Any], request: Any, known: LimitedRoute | None) -> None:
        super().__init__(limits)
        self.request = request
        self.known = known  # None: no route matched

    @property
    def native(self) -> Any:
        return self.request

    @property
    def method(self) -> str:
        return str(self.request.method).upper()

    @property
    def route(self) -> str:
        return self.known.text if self.known else ""

    def get_all(self, key: str) -> list[str]:
        values: list[str] = self.request.headers.getall(key, [])
        return values


class HandlerLimit(Limit):
    """A limit as a decorator of a handler, a class of handlers, or one of its methods."""

    limits: HandlerRateLimits[Any]
    missing_quota = SetupError  # these frameworks hide an AttributeError, and only look into handlers

    def __call__(self, target: Target) -> Target:
        handler: Any = target
        if isinstance(handler, type) and issubclass(handler, self.limits.view_class):
            for name in METHODS:
                method = inspect.getattr_static(handler, name, None)
                if method is not None:  # an inherited one stays as it is in the other classes
                    setattr(handler, name, self._wrap(method))
            return target
        self.limits.check_target(target)
        put_mark(handler, LIMITS, self)  # it may be in a table of routes already
        return cast("Target", self._wrap(handler))

    def _wrap(self, handler: Any) -> Any:
        if isinstance(handler, staticmethod):
            return staticmethod(self._wrap(handler.__func__))

        @functools.wraps(handler)
        async def limited(*arguments: Any, **named: Any) -> Any:
            exchange = self.limits.exchange_of(self.limits.request_in(arguments))
            if exchange is None:
                self.check_installed()
            elif self not in exchange.decided:  # a decorator without `functools.wraps` hides the mark
                denial = await self.limits.decide(exchange, (self,))
                if denial is not None:
                    return denial
            answer = handler(*arguments, **named)
            return await answer if inspect.isawaitable(answer) else answer

        setattr(limited, LIMITS, tuple(dict.fromkeys((self, *getattr(handler, LIMITS, ())))))
        return limited

    def check_installed(self) -> None:
        """Raise `SetupError` if a request came here and no middleware of these limits has seen it."""
        if self.limits.enabled:
            raise SetupError(f"{self} is on a route of an application without its limits: {self.limits.installation}")


AnyLimit = TypeVar("AnyLimit", bound=HandlerLimit)


class HandlerRateLimits(RateLimitsBase[AnyLimit], Generic[AnyLimit]):
    """The limits of an application whose handlers are decorated."""

    exchange_class: type[HandlerExchange]
    view_class: type  # the framework's class of handlers, one for each method
    request_class: type
    application_class: type
    installation: str  # how to install the middleware

    def exempt(self, target: Target) -> Target:
        """Free a handler or a view from the default limit.

        Args:
            target: a handler or a view
        """
        self.check_target(target)
        put_mark(target, EXEMPT, self)
        return target

    def check_target(self, target: object) -> None:
        """Raise `SetupError` if *target* is nothing that answers requests."""
        is_view = isinstance(target, type) and issubclass(target, self.view_class)
        is_handler = callable(target) and not isinstance(target, type | self.application_class)
        if not is_view and not is_handler:
            raise SetupError(f"limit and exempt take a handler or a view, got {target!r:.60}; default= is for the rest")

    def limits_on(self, functions: Iterable[Any]) -> list[Limit]:
        """Our limits that *functions* are decorated with."""
        return [limit for function in functions for limit in marks(function, LIMITS) if limit.limits is self]

    def are_exempt(self, functions: Iterable[Any]) -> bool:
        """Whether one of *functions* is exempt."""
        return any(self in marks(function, EXEMPT) for function in functions)

    @functools.cached_property
    def request_key(self) -> str:
        """Where a request carries its `Exchange`."""
        return f"headgate_{id(self)}"

    def exchange_of(self, request: Any) -> HandlerExchange | None:
        """The exchange that the middleware has made for *request*."""
        raise NotImplementedError

    def exchange_for(self, request: Any) -> HandlerExchange:
        return self.exchange_class(self, request, None)

    def decision_of(self, request: Any) -> Decision | None:
        """The decision that was published on *request*, whatever the application has put in its place."""
        raise NotImplementedError

    def publish(self, request: Any, made: Decision | None) -> None:
        """Put a decision where the application finds it."""
        raise NotImplementedError

    def keep_decision(self, exchange: HandlerExchange) -> None:
        """Publish the decision, unless that of other limits around the application is tighter."""
        if exchange.decision is not None and tighter(exchange.decision, self.decision_of(exchange.request)):
            self.publish(exchange.request, exchange.decision)

    def response(self, status: int, headers: list[tuple[str, str]], body: bytes) -> Any:
        """A response of the framework."""
        raise NotImplementedError

    def request_in(self, arguments: Iterable[Any]) -> Any:
        """The request among the arguments of a handler: a function's first, a method's second, or a view's own."""
        for argument in arguments:
            for found in (argument, getattr(argument, "request", None)):
                if isinstance(found, self.request_class):
                    return found
        raise SetupError(f"a limit is on a function without a {self.request_class.__name__}: it is for handlers")

    async def meet(self, exchange: HandlerExchange) -> Any:
        """Decide by the limits of the route, or by the default; the answer if one of them refuses."""
        known = exchange.known
        if known is not None and (known.limits or known.exempt):
            return await self.decide(exchange, known.limits) if known.limits else None
        return None if self.default is None else await self.decide(exchange, (self.default,))

    async def decide(self, exchange: HandlerExchange, limits: Iterable[Limit]) -> Any:
        """Take what *limits* ask; the answer if one of them refuses."""
        allowed = await self.admit(exchange, limits)
        self.keep_decision(exchange)
        if allowed:
            return None
        on_denied = self.on_denied_of(exchange)
        if on_denied is not None:
            answer = on_denied(exchange.request, exchange.decision)
            answer = check_answer(await answer if inspect.isawaitable(answer) else answer, "headers")
            if answer is not None:
                return answer
        return self.response(*self.refusal(exchange))

    def add_headers(self, exchange: HandlerExchange, headers: Any) -> None:
        """Complete the headers of an answer. Those of other limits around the application stay if they are tighter."""
        tightest = exchange.decision is self.decision_of(exchange.request)
        for name, value in self.headers(exchange):
            if tightest or name not in headers:
                headers[name] = value
        if exchange.denied_by is not None and exchange.decision is not None:
            for name, value in denial_headers(exchange.decision):
                headers.setdefault(name, value)


def put_mark(target: Any, attribute: str, value: Any) -> None:
    """Leave *value* on a handler. On a `functools.partial` it is on that alone: others of its function stay free."""
    if isinstance(target, functools.partial):
        setattr(target, attribute, (value, *getattr(target, attribute, ())))
    else:
        mark(target, attribute, value)


def marks(function: Any, attribute: str) -> Iterator[Any]:
    """What decorators have left on *function*, and on what it is a `functools.partial` of or for."""
    yield from own_marks(function, attribute)
    if isinstance(function, functools.partial):
        for inner in (function.func, *function.args):
            if callable(inner):
                yield from marks(inner, attribute)
