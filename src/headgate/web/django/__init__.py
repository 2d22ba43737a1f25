"""headgate in Django: a middleware, the decorator `ratelimit`, and throttles for REST framework and django-ninja.

INSTALLED_APPS += ["headgate.web.django"]
MIDDLEWARE += ["headgate.web.django.RateLimitMiddleware"]
HEADGATE = {"STORE": "redis://localhost:6379/0", "DEFAULT": "100/minute"}

middleware.py      the default limit, headers on every limited answer, and what a response decides
decorators.py      ratelimit
usage.py           is_ratelimited and get_usage, for a limit that is asked by hand
rest_framework.py  throttles for REST framework
ninja.py           throttles for django-ninja
throttles.py       what the throttles of both share
settings.py        the setting HEADGATE
limits.py          the limits of a project, and one request
sources.py         what may be written as a key or as a rate
answers.py         what a client gets that was refused, and the signal rate_limited
views.py           which limits a view has
apps.py            the application for INSTALLED_APPS
checks.py          system checks
management/        manage.py headgate
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("django") is None:
    raise ImportError("headgate.web.django needs Django: pip install 'headgate[django]'")

if TYPE_CHECKING:
    from headgate.web.django.answers import Ratelimited, raise_ratelimited, rate_limited
    from headgate.web.django.decorators import ratelimit
    from headgate.web.django.middleware import RateLimitMiddleware
    from headgate.web.django.usage import aget_usage, ais_ratelimited, get_usage, is_ratelimited

__all__ = [
    "RateLimitMiddleware",
    "Ratelimited",
    "aget_usage",
    "ais_ratelimited",
    "get_usage",
    "is_ratelimited",
    "raise_ratelimited",
    "rate_limited",
    "ratelimit",
]

_MODULES = {
    "RateLimitMiddleware": "middleware",
    "Ratelimited": "answers",
    "raise_ratelimited": "answers",
    "rate_limited": "answers",
    "ratelimit": "decorators",
    "get_usage": "usage",
    "is_ratelimited": "usage",
    "aget_usage": "usage",
    "ais_ratelimited": "usage",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: Django imports this package before its settings can be read."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
