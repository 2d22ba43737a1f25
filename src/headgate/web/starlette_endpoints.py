"""Decorated endpoints of Starlette and FastAPI: plain and async functions, generators, and classes.

A decorator marks the function, so that the route finds its limits whatever the order of decorators, and wraps it: the
wrapper decides what the route has not decided yet, and refuses to run where no limits are installed.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.from_thread
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Router

from headgate.web.asgi_hot_path import current_scope
from headgate.web.core import without_loop
from headgate.web.limit import SetupError, mark, own_marks

if TYPE_CHECKING:
    from headgate.web.starlette import StarletteExchange, StarletteLimit, StarletteRateLimits

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Target = TypeVar("Target")

LIMITS = "__headgate_limits__"  # what a function is marked with
EXEMPT = "__headgate_exempt__"
GATE = "__headgate_gate__"


class Gate:
    """What a wrapper asks before it calls the endpoint: whether all limits of the endpoint have been decided."""

    def __init__(self) -> None:
        self.limits: tuple[StarletteLimit, ...] = ()
        self.wrapper: Any = None

    def undecided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[None] | None:
        """None if the endpoint may be called; else what must be awaited first, which may raise `RequestDenied`."""
        scope = current_scope.get()
        for limit in self.limits:
            request = None if scope is None else scope.get(limit.limits.scope_key)
            if request is None:
                limit.limits.check_disabled()
            elif limit is not request.limit and not request.exchange().has_met(limit):
                return self._decide(args, kwargs)
        return None

    async def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        connection = next((each for each in (*args, *kwargs.values()) if isinstance(each, HTTPConnection)), None)
        for owner in dict.fromkeys(limit.limits for limit in self.limits):
            exchange: StarletteExchange | None = owner.exchange_of_context()
            if exchange is not None:
                await owner.decide(exchange, [limit for limit in self.limits if limit.limits is owner], connection)

    def decide_in_thread(self, waiting: Awaitable[None]) -> None:
        """Await *waiting* in the event loop, from one of its worker threads."""

        async def wait() -> None:
            await waiting

        work = wait()
        try:
            anyio.from_thread.run(lambda: work)
        except RuntimeError:
            if inspect.getcoroutinestate(work) != inspect.CORO_CREATED:
                raise
            without_loop(work)  # the endpoint was called in the event loop itself


def limited(endpoint: Any, limit: StarletteLimit) -> Any:
    """*endpoint* behind *limit*. A function gives a wrapper, a class with `dispatch` the class itself."""
    if isinstance(endpoint, Starlette | Router | BaseRoute) or not callable(endpoint):
        raise SetupError(
            f"a limit goes on an endpoint, got {endpoint!r:.80}; limit a router with dependencies=[Depends(...)] in "
            "FastAPI, a mounted application with headgate.web.asgi.RateLimitMiddleware"
        )
    limit.limits.decorates = True
    mark(endpoint, LIMITS, limit)
    target = endpoint.dispatch if inspect.isclass(endpoint) and hasattr(endpoint, "dispatch") else endpoint
    if inspect.isclass(target):
        raise SetupError(f"a limit goes on a function or on a class of endpoints, got the class {target.__qualname__}")
    gate: Gate | None = getattr(target, GATE, None)
    inherited = target is not endpoint and "dispatch" not in vars(endpoint)  # then its gate is that of the base
    if gate is None or gate.wrapper is not target or inherited:
        gate = Gate()
        gate.wrapper = _wrapper(target, gate)
    gate.limits = (limit, *gate.limits)
    if target is not endpoint:
        endpoint.dispatch = gate.wrapper
        return endpoint
    return gate.wrapper


def _wrapper(function: Any, gate: Gate) -> Any:
    """A function that asks *gate* and calls *function*, of the same kind and with the same signature."""
    undecided, decide_in_thread = gate.undecided, gate.decide_in_thread
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    kind = plain if inspect.isroutine(plain) else type(plain).__call__

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        waiting = undecided(args, kwargs)
        if waiting is not None:
            await waiting
        return await function(*args, **kwargs)

    def call_plain(*args: Any, **kwargs: Any) -> Any:
        waiting = undecided(args, kwargs)
        if waiting is not None:
            decide_in_thread(waiting)
        return function(*args, **kwargs)

    call: Any = call_async if inspect.iscoroutinefunction(kind) else call_plain
    # The wrapper has the globals of the function: FastAPI resolves annotations in them that are text.
    named = getattr(inspect.unwrap(kind), "__globals__", call.__globals__)
    wrapper = types.FunctionType(call.__code__, named, call.__name__, None, call.__closure__)
    functools.update_wrapper(wrapper, function)
    setattr(wrapper, GATE, gate)
    return wrapper


def functions_of(endpoint: Any) -> Iterator[Any]:
    """*endpoint* and every function that it wraps."""
    while endpoint is not None:
        yield getattr(endpoint, "__func__", endpoint)
        endpoint = endpoint.func if isinstance(endpoint, functools.partial) else getattr(endpoint, "__wrapped__", None)


def marked_limits(functions: Iterable[Any], owner: StarletteRateLimits[Any]) -> dict[StarletteLimit, bool]:
    """The limits of *owner* that *functions* are marked with; whether a wrapper among them asks for each."""
    functions = list(functions)
    marks = [limit for function in functions for limit in getattr(function, LIMITS, ()) if limit.limits is owner]
    gates = [getattr(function, GATE, None) for function in functions]
    asked = {limit for gate in gates if gate is not None and gate.wrapper in functions for limit in gate.limits}
    # A generator is called when the answer has begun: its limits must be decided before.
    generator = any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in functions)
    return {limit: limit in asked and not generator for limit in marks}


def marked_exempt(targets: Iterable[Any], owner: StarletteRateLimits[Any]) -> bool:
    """Whether one of *targets*, endpoints or applications, is exempt from the default of *owner*."""
    return any(owner in own_marks(target, EXEMPT) for target in targets)


class Exempt:
    """`limits.exempt`: frees an endpoint, a route or a mounted application from the default limit."""

    def __init__(self, owner: StarletteRateLimits[Any]) -> None:
        self._owner = owner

    def __call__(self, target: Target) -> Target:
        mark(target, EXEMPT, self._owner)
        return target
