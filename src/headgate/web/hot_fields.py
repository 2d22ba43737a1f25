"""What the hot paths read at every request. Compiled, a field costs no look-up by name, so what is read stands here, in
classes that `RateLimitsBase`, a route's plan and an installation are subclasses of; and `PlainLimit`, made once for a
route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate._mypyc import mypyc_attr
from headgate.web.headers import HeaderStyle, XHeaders


@mypyc_attr(allow_interpreted_subclasses=True)
class LimitsFields:
    """Of the limits of an application, `RateLimitsBase`."""

    __deletable__ = ["enabled"]  # noqa: RUF012  # unittest.mock deletes what it has replaced, then sets it again

    enabled: bool
    header_style: HeaderStyle | None
    settles: bool = False  # whether a limit has a `count_if`: most applications have none, and skip the question
    decorates: bool = False  # ASGI: whether a decorated function finds its exchange by `current_scope`
    watched: int = 0  # how many more requests `FirstRequests` looks at
    key_of_peer: Callable[[str], str]  # gives '' where headers of the request may say more


@mypyc_attr(allow_interpreted_subclasses=True)
class RouteFields:
    """Of the plan of a route, `RoutePlan`."""

    __slots__ = ("at_once", "provider", "quick", "unlimited")

    at_once: Any  # the only limit, if `ASGIRequest.admit` can decide it
    quick: dict[str, PlainLimit]  # the same with what counts it, by prefix
    provider: Any  # FastAPI: the application, if it may override a limit among the dependencies
    unlimited: bool  # whether there is no limit to decide at any time


@mypyc_attr(allow_interpreted_subclasses=True)
class RouterFields:
    """Of an installation."""

    router: Any
    bound: int  # how many routes the router had when they were bound; -1: to be bound again


class PlainLimit:
    """One limit by address and what counts it: decided in one call, without an exchange. On ASGI it is in memory."""

    def __init__(self, limit: Any, limiter: Any, headers: XHeaders) -> None:
        self.limit: Any = limit
        self.limiter: Any = limiter  # a `ScopedLimiter`
        self.take: Any = limiter.blocking.try_acquire  # `Limiter.try_acquire`, bound: called with the key
        self.headers: XHeaders = headers
