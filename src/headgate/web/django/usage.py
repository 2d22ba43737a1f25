"""`is_ratelimited` and `get_usage` ask a limit inside a view, with the arguments of django-ratelimit.

if is_ratelimited(request, group="login", key="post:username", rate="5/m", increment=True): ...

`ais_ratelimited` and `aget_usage` are the same for async views.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict

from headgate.decision import Decision
from headgate.web.core import without_loop
from headgate.web.django.decorators import ALL, method_names
from headgate.web.django.limits import DjangoExchange, DjangoLimit, DjangoRateLimits
from headgate.web.django.settings import current
from headgate.web.django.sources import key_source, rate_source
from headgate.web.limit import LimitOptions, SetupError, check_bool


class Usage(TypedDict):
    """How a client stands.

    count         permits that are spent
    limit         the most that can be spent at once
    should_limit  whether the limit refuses this request
    time_left     whole seconds until it would not; 0 if it does not refuse
    """

    count: int
    limit: int
    should_limit: bool
    time_left: int


class Question:
    """One limit that is asked by hand. The request goes on, whatever the answer."""

    def __init__(
        self,
        request: Any,
        threaded: bool,
        group: str | None = None,
        fn: Callable[..., Any] | None = None,
        key: Any = None,
        rate: Any = None,
        method: Any = ALL,
        increment: bool = False,
    ) -> None:
        if not hasattr(request, "META"):
            raise SetupError(f"a limit is asked for a request, got {type(request).__name__} {request!r:.40}")
        if fn is not None and not inspect.isroutine(fn):
            raise SetupError(f"fn is the function that asks, and names the group, got {fn!r:.40}")
        named = group or (f"{fn.__module__}.{fn.__qualname__}" if fn is not None else "")
        if not named or rate is None:
            raise SetupError("say which limit is asked: is_ratelimited(request, group='login', key='ip', rate='5/m')")
        self.limits: DjangoRateLimits = current()
        self.exchange: DjangoExchange = self.limits.exchange(request, threaded=threaded)
        self.take = check_bool("increment", increment)
        options: LimitOptions = {"scope": named, "methods": method_names(method)}
        if key is not None:
            options["key"] = key_source(key, named)
        self.limit: DjangoLimit = self.limits.limit(rate_source(rate, named), **options)

    async def answer(self) -> Usage | None:
        made: Decision | None = await self.limits.use(self.exchange, self.limit, take=self.take)
        if made is None:
            return None
        this_one = made.allowed and not self.take  # a look answers as if the request were counted
        return Usage(
            count=made.limit - made.remaining - this_one,
            limit=made.limit,
            should_limit=not made,
            time_left=-(-made.retry_us // 1_000_000),
        )


def get_usage(request: Any, *args: Any, **kwargs: Any) -> Usage | None:
    """How the client stands; None if the limit does not apply. Takes group, fn, key, rate, method and increment."""
    return without_loop(Question(request, True, *args, **kwargs).answer())


def is_ratelimited(request: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the limit refuses the request. With ``increment=True`` the request is counted, else it only looks."""
    usage = get_usage(request, *args, **kwargs)
    return usage is not None and usage["should_limit"]


async def aget_usage(request: Any, *args: Any, **kwargs: Any) -> Usage | None:
    """`get_usage` for async views."""
    return await Question(request, False, *args, **kwargs).answer()


async def ais_ratelimited(request: Any, *args: Any, **kwargs: Any) -> bool:
    """`is_ratelimited` for async views."""
    usage = await aget_usage(request, *args, **kwargs)
    return usage is not None and usage["should_limit"]
