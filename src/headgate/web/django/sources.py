"""What may be written as a key and as a rate: the words of django-ratelimit, functions, and dotted paths to them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.utils.module_loading import import_string

from headgate.keys import digest
from headgate.quota import Quota
from headgate.web.django.limits import EXCHANGE, plain_request
from headgate.web.limit import KeySource, SetupError

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
HEADER, FIELDS = "header:", ("get:", "post:")


def key_source(key: Any, group: str) -> KeySource | list[KeySource]:
    """*key* as the core reads it: "address", "header:NAME", a function of the request, or a list of these."""
    if isinstance(key, list | tuple):
        return [_one_key(each, group) for each in key]
    return _one_key(key, group)


def _one_key(key: Any, group: str) -> KeySource:
    if callable(key):
        return SourceFunction(key, group) if takes_group(key) else key
    text = key if isinstance(key, str) else ""
    if text in ("ip", "address"):
        return "address"
    if text in ("user", "user_or_ip"):
        return user
    if text.lower().startswith(HEADER):
        return text
    if text.lower().startswith(FIELDS) and text.partition(":")[2]:
        return field(text)
    if DOTTED.fullmatch(text):
        return SourceFunction(text, group)
    raise SetupError(
        "key must be 'ip', 'user', 'user_or_ip', 'header:NAME', 'get:FIELD', 'post:FIELD', a function of the request "
        f"or the dotted path of one, or a list of them, got {key!r:.60}"
    )


def rate_source(rate: Any, group: str) -> Any:
    """*rate* as the core reads it: quotas, or a function of the request that gives some, or None for no limit."""
    if callable(rate) or (isinstance(rate, str) and DOTTED.fullmatch(rate)):
        return _quotas_of(SourceFunction(rate, group))
    return quotas(rate)


def quotas(rate: Any) -> Any:
    """A rate, which may be a pair (count, seconds)."""
    pair = isinstance(rate, tuple) and len(rate) == 2
    if pair and not isinstance(rate[0], str | Quota):
        return Quota(*rate)
    return rate


# ------------------------------------------------------------------------------------------------------ functions


def user(request: Any) -> Any:
    """The user's primary key; the address of a client that is not logged in, which is still one client."""
    exchange = getattr(plain_request(request), EXCHANGE)
    if not hasattr(request, "user"):
        raise SetupError(
            "the key 'user' needs request.user: put RateLimitMiddleware after AuthenticationMiddleware in MIDDLEWARE, "
            "or limit by 'ip'"
        )
    if exchange.threaded:
        return _user_key(request.user, exchange.address())
    return _user_on_loop(request, exchange.address())


async def _user_on_loop(request: Any, address: str) -> str:
    if hasattr(request, "auser"):
        return _user_key(await request.auser(), address)
    return await sync_to_async(lambda: _user_key(request.user, address))()  # Django 4.2


def _user_key(found: Any, address: str) -> str:
    return f"user:{found.pk}" if found is not None and found.is_authenticated else address


@functools.cache
def field(text: str) -> Callable[[Any], str]:
    """The key of a field, such as ``post:username``; the address of a client that does not send it."""
    place, _, name = text.partition(":")
    part = place.upper()

    def key(request: Any) -> str:
        value = getattr(request, part).get(name)
        if not value:
            return str(getattr(plain_request(request), EXCHANGE).address())
        return digest(value)  # it may be personal, and of any length

    key.__qualname__ = f"{place.lower()}:{name}"
    return key


class SourceFunction:
    """A function that is called with its group, or else the route, as those of django-ratelimit are; or a dotted path.

    A dotted path is imported at the first call: before, the module may be in the middle of its own import.
    """

    def __init__(self, source: Callable[..., Any] | str, group: str) -> None:
        self.source, self.group = source, group
        self.__qualname__ = (
            source if isinstance(source, str) else getattr(source, "__qualname__", type(source).__name__)
        )

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return import_string(self.source) if isinstance(self.source, str) else self.source

    @functools.cached_property
    def takes_group(self) -> bool:
        return takes_group(self.function)

    def __call__(self, request: Any) -> Any:
        if not self.takes_group:
            return self.function(request)
        return self.function(self.group or getattr(plain_request(request), EXCHANGE).route, request)


def takes_group(function: Callable[..., Any]) -> bool:
    """Whether *function* takes a group and a request."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return sum(each.default is each.empty for each in positional) == 2


def _quotas_of(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function, updated=())
    def rate(request: Any) -> Any:
        found = function(request)
        return _awaited(found) if inspect.isawaitable(found) else quotas(found)

    return rate


async def _awaited(found: Any) -> Any:
    return quotas(await found)


def dotted_paths(key: Any, rate: Any) -> list[str]:
    """The dotted paths among a key and a rate, for a check that they can be imported."""
    each = [*(key if isinstance(key, list | tuple) else [key]), rate]
    return [text for text in each if isinstance(text, str) and DOTTED.fullmatch(text)]
