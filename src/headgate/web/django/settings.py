"""The setting HEADGATE, and the limits of the project, which are made from it when they are first needed.

HEADGATE = {
    "STORE": "redis://localhost:6379/0",     # default: memory://, which counts in each process
    "DATABASE": "default",                   # instead of STORE: a PostgreSQL of DATABASES
    "DEFAULT": "100/minute",                 # for everything without a limit of its own, 404s included
    "KEY": "ip",                             # see `headgate.web.django.decorators.ratelimit`
    "TRUSTED_PROXIES": ["10.0.0.0/8"],       # whose forwarded headers are read
    "HEADERS": "x",                          # "ietf", "both" or None
    "ENABLED": True,                         # also as HEADGATE_ENABLED
    "ALGORITHM": "token_bucket", "ON_STORE_ERROR": "allow", "ON_DENIED": "shop.views.too_many",
    "NAME": "web", "FORWARDED": [...], "IPV6_PREFIX": 64, "CLOCK": None,
    "TIMEOUT": 0.08, "CONNECT_TIMEOUT": 1.0, "MAX_CONNECTIONS": 50, "PREFIX": "headgate", "HASH_KEYS": False,  # servers
    "MAX_KEYS": 100_000,                     # memory://
}

Of the database that DATABASE names, only its place and its user are taken from Django. A limit neither waits for the
transaction of a request (ATOMIC_REQUESTS) nor is rolled back with it, so it never uses the connection of a request.
"""

from __future__ import annotations

import difflib
import threading
from typing import Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.db.utils import ConnectionDoesNotExist
from django.utils.module_loading import import_string

from headgate.stores.base import StoreOptions
from headgate.web.django.limits import DjangoRateLimits
from headgate.web.django.sources import key_source, rate_source
from headgate.web.limit import SetupError, check_bool

SETTING, SWITCH = "HEADGATE", "HEADGATE_ENABLED"
OWN_NAMES = (
    *("store", "database", "default", "key", "trusted_proxies", "headers", "algorithm", "on_store_error", "on_denied"),
    *("enabled", "name", "forwarded", "ipv6_prefix", "clock"),
)
NAMES = {name.upper(): name for name in (*OWN_NAMES, *StoreOptions.__annotations__)}
DEFAULT_GROUP = "default"

_lock = threading.Lock()
_current: DjangoRateLimits | None = None


def current() -> DjangoRateLimits:
    """The limits of the project."""
    made = _current
    return _make() if made is None else made


def _make() -> DjangoRateLimits:
    global _current
    with _lock:  # two threads that made them would count each for itself in memory://
        if _current is None:
            _current = DjangoRateLimits(**arguments(given()))
        return _current


def given() -> dict[str, Any]:
    """What the setting says."""
    found = getattr(settings, SETTING, {})
    if not isinstance(found, dict):
        raise SetupError(f"{SETTING} is a dict, such as {{'DEFAULT': '100/minute'}}, got {found!r:.60}")
    return found


def arguments(found: dict[str, Any]) -> dict[str, Any]:
    """The setting as arguments of `DjangoRateLimits`. Raises for a name that there is not."""
    for name in found:
        if problem := unknown(name):
            raise SetupError(problem)
    options = {NAMES[name]: value for name, value in found.items()}
    if (alias := options.pop("database", None)) is not None:
        if "store" in options:
            raise SetupError(f"{SETTING} has both 'STORE' and 'DATABASE'; leave one out")
        options["store"] = database_url(alias)
    if "key" in options:
        options["key"] = key_source(options["key"], DEFAULT_GROUP)
    if options.get("default") is not None:
        options["default"] = rate_source(options["default"], DEFAULT_GROUP)
    if isinstance(options.get("on_denied"), str):
        options["on_denied"] = import_string(options["on_denied"])
    enabled = check_bool(f"{SETTING}['ENABLED']", options.get("enabled", True))
    options["enabled"] = check_bool(SWITCH, getattr(settings, SWITCH, True)) and enabled
    return options


def unknown(name: object) -> str:
    """What is wrong with a name in the setting, and the name that was meant; '' if it is a name."""
    if name in NAMES:
        return ""
    near = difflib.get_close_matches(str(name).upper(), NAMES, 1)
    meant = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(NAMES)}"
    return f"{SETTING} has no {name!r}; {meant}"


def reset(*, setting: str, **_: Any) -> None:
    """Read the settings again after a test has changed them."""
    global _current
    from headgate.web.django.views import forget

    if setting == SWITCH and _current is not None:
        _current.enabled = arguments(given())["enabled"]
    if setting == SETTING:
        made, _current = _current, None
        if made is not None:
            made.close()
    forget()


setting_changed.connect(reset, dispatch_uid="headgate.web.django")


# What headgate's URL says itself: a project's connect_timeout of seconds is not what a check should wait.
NOT_TAKEN = {"connect_timeout", "timeout", "prefix", "min_connections", "max_connections", "client_encoding"}


def database_url(alias: Any) -> str:
    """The URL of the store in the database *alias*. Raises a `SetupError` if there is none, or it is no PostgreSQL."""
    known = ", ".join(map(repr, connections.settings))
    if not isinstance(alias, str):
        raise SetupError(f"HEADGATE['DATABASE'] is the name of one of DATABASES ({known}), got {alias!r:.60}")
    try:
        database = connections[alias]
        if database.vendor != "postgresql":
            raise SetupError(
                f"HEADGATE['DATABASE'] is {alias!r}, a database of the engine {database.settings_dict['ENGINE']!r}; it "
                "needs a PostgreSQL: name another database, or use 'STORE': 'redis://...' or 'shared://NAME'"
            )
        from psycopg import pq  # the extra, which a project on another store does not need

        found = database.get_connection_params()
    except ConnectionDoesNotExist:
        raise SetupError(f"HEADGATE['DATABASE'] is {alias!r}, and DATABASES has {known}") from None
    except ImproperlyConfigured as error:
        raise SetupError(f"HEADGATE['DATABASE'] is {alias!r}, which Django cannot use: {error}") from error
    except ModuleNotFoundError as error:
        raise SetupError(f"HEADGATE['DATABASE'] needs more: pip install 'headgate[postgresql]' ({error})") from error
    libpq = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    taken = {name: str(found[name]) for name in found if name in libpq - NOT_TAKEN and found[name] not in (None, "")}
    return "postgresql:///?" + urlencode(taken, quote_via=quote, safe="")
