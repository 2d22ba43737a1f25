"""System checks: what `manage.py check` and `runserver` say about the project's limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.utils.module_loading import import_string

from headgate.rule import Rule
from headgate.stores.base import is_per_process
from headgate.web.django.limits import DjangoRateLimits
from headgate.web.django.settings import arguments, given, unknown
from headgate.web.django.sources import dotted_paths
from headgate.web.django.views import AROUND, METHODS, declared_on, operation_of, routes
from headgate.web.startup import several_workers

MIDDLEWARE = (
    "headgate.web.django.RateLimitMiddleware",
    "headgate.web.django.middleware.RateLimitMiddleware",
)
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"
CORS = "corsheaders.middleware.CorsMiddleware"
SHARE = "share it with 'shared://NAME' on one machine, or 'redis://...' on several"


def check_settings(**_: Any) -> list[CheckMessage]:
    """E001: a name in HEADGATE that there is not. E002: a value that cannot be right, such as a quota."""
    try:
        found = given()
    except ValueError as error:
        return [Error(str(error), id="headgate.E002")]
    names = [Error(problem, id="headgate.E001") for name in found if (problem := unknown(name))]
    if names:
        return names
    try:
        limits = DjangoRateLimits(**arguments(found))
    except (ValueError, TypeError, ImportError) as error:
        return [Error(f"HEADGATE: {error}", id="headgate.E002")]
    limits.close()
    return [*_rates(), *_memory(limits)]


def _rates() -> Iterator[CheckMessage]:
    """E003: a rate of REST framework or django-ninja that headgate's throttles cannot read."""
    framework = (getattr(settings, "REST_FRAMEWORK", None) or {}).get("DEFAULT_THROTTLE_RATES", {})
    settings_of = {
        "rest_framework.throttling": ("REST_FRAMEWORK['DEFAULT_THROTTLE_RATES']", framework),
        "ninja.throttling": ("NINJA_DEFAULT_THROTTLE_RATES", getattr(settings, "NINJA_DEFAULT_THROTTLE_RATES", {})),
    }
    for module, (name, rates) in settings_of.items():
        if not isinstance(rates, dict):
            yield Error(f"{name} is a dict, such as {{'user': '100/minute'}}, got {rates!r:.60}", id="headgate.E003")
            continue
        for scope, rate in rates.items():
            try:
                _ = rate is None or Rule(rate)
            except ValueError as error:
                if not _is_read_otherwise(module, scope):
                    yield Error(f"the throttle rate {scope!r}: {error}", id="headgate.E003")


def _is_read_otherwise(module: str, scope: str) -> bool:
    """Whether a throttle of the project has the *scope*, or any that a view names, and reads rates in its own way."""
    if hasattr(settings, "ROOT_URLCONF"):
        list(routes())  # imports the views, and with them their throttles
    found = [getattr(sys.modules.get(module), "SimpleRateThrottle", None)]
    for each in found:
        found += [] if each is None else each.__subclasses__()
    return any(
        each.parse_rate.__module__.partition(".")[0] not in ("rest_framework", "ninja", "headgate")
        for each in found
        if each is not None and (each.scope == scope or hasattr(each, "scope_attr"))
    )


def _memory(limits: DjangoRateLimits) -> Iterator[CheckMessage]:
    """W001: several workers, and each would count for itself."""
    if is_per_process(limits.store) and (reason := several_workers()):
        yield Warning(
            f"HEADGATE['STORE'] is memory://, which counts in each process, and {reason}", SHARE, id="headgate.W001"
        )


def check_store(**_: Any) -> list[CheckMessage]:
    """W002, with --deploy: limits in memory, where a deployment has more than one process."""
    try:
        found = given()
        memory = "DATABASE" not in found and str(found.get("STORE", "memory://")).startswith("memory:")
    except ValueError:
        return []
    if not memory:
        return []
    return [Warning("HEADGATE['STORE'] is memory://, which counts in each process", SHARE, id="headgate.W002")]


def check_middleware(**_: Any) -> list[CheckMessage]:
    """E004, E005: an order of MIDDLEWARE that cannot work. W003, W004: one that is probably not meant."""
    found, chain = _given(), list(settings.MIDDLEWARE)
    places = [place for place, name in enumerate(chain) if name in MIDDLEWARE]
    by_user = any(key in ("user", "user_or_ip") for key in _list(found.get("KEY", "ip")))
    messages: list[CheckMessage] = []
    if not places:
        if found.get("DEFAULT") is not None:
            hint = f"MIDDLEWARE += [{MIDDLEWARE[0]!r}]"
            messages.append(
                Warning("HEADGATE['DEFAULT'] limits nothing without the middleware", hint, id="headgate.W003")
            )
        return messages
    if len(places) > 1:
        messages.append(Error("RateLimitMiddleware is in MIDDLEWARE twice", "remove one", id="headgate.E004"))
    if by_user and found.get("DEFAULT") is not None:
        after = AUTHENTICATION in chain and chain.index(AUTHENTICATION) < places[0]
        if not after:
            hint = f"put it after {AUTHENTICATION!r}, or limit by 'ip'"
            messages.append(
                Error(
                    "HEADGATE['KEY'] is the user, which RateLimitMiddleware cannot know yet", hint, id="headgate.E005"
                )
            )
    if CORS in chain and chain.index(CORS) > places[0]:
        messages.append(
            Warning(
                "RateLimitMiddleware stands before CorsMiddleware: a browser cannot read its answers",
                "put CorsMiddleware first",
                id="headgate.W004",
            )
        )
    return messages


def check_proxies(**_: Any) -> list[CheckMessage]:
    """W005: the project is behind a proxy, and all its clients would share the proxy's limit."""
    if _given().get("TRUSTED_PROXIES"):
        return []
    rest_framework = getattr(settings, "REST_FRAMEWORK", {})
    signs = {
        "SECURE_PROXY_SSL_HEADER": settings.SECURE_PROXY_SSL_HEADER,
        "USE_X_FORWARDED_HOST": settings.USE_X_FORWARDED_HOST,
        "REST_FRAMEWORK['NUM_PROXIES']": rest_framework.get("NUM_PROXIES"),
        "NINJA_NUM_PROXIES": getattr(settings, "NINJA_NUM_PROXIES", None),
    }
    sign = next((name for name, value in signs.items() if value), None)
    if sign is None:
        return []
    return [
        Warning(
            f"{sign} says that there is a proxy, but HEADGATE['TRUSTED_PROXIES'] is empty: all clients behind it have "
            "its address, and share one limit",
            "name its network, such as ['10.0.0.0/8'], or ['unix'] for a Unix socket",
            id="headgate.W005",
        )
    ]


def check_declared(**_: Any) -> list[CheckMessage]:
    """E006: a dotted path in a `ratelimit` that cannot be imported. W006: a `ratelimit` that django-ninja misses."""
    if not hasattr(settings, "ROOT_URLCONF"):
        return []
    declared = {id(each): each for route in routes() for method in METHODS for each in declared_on(route.view, method)}
    messages: list[CheckMessage] = []
    for each in declared.values():
        for path in dotted_paths(each.key, each.given_rate):
            try:
                import_string(path)
            except ImportError as error:
                messages.append(Error(f"@ratelimit: {error}", id="headgate.E006"))
    return [*messages, *_unseen()]


def _unseen() -> Iterator[CheckMessage]:
    for route in routes():
        for method in METHODS:
            operation: Any = getattr(operation_of(route.view, method), "view_func", None)
            around = getattr(operation, AROUND, None)
            if around is not None and around not in declared_on(route.view, method):
                yield Warning(
                    f"@ratelimit limits nothing at {method} /{route.path}: django-ninja has registered "
                    f"{operation.__qualname__} without it",
                    "put @ratelimit below the decorator of the operation, next to the function",
                    id="headgate.W006",
                )


def _given() -> dict[str, Any]:
    """The setting, or nothing if it is not one: `check_settings` says so."""
    try:
        return given()
    except ValueError:
        return {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
