"""Throttles for Django REST framework: the same names and settings as its own, exact under concurrency.

REST_FRAMEWORK = {
    "DEFAULT_THROTTLE_CLASSES": ["headgate.web.django.rest_framework.UserRateThrottle"],
    "DEFAULT_THROTTLE_RATES": {"user": "1000/day", "burst": "10/second burst 50", "export": "3/5m"},
}
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured

try:
    from rest_framework import throttling
    from rest_framework.settings import api_settings
except ImportError as error:
    raise ImportError(
        "headgate.web.django.rest_framework needs Django REST framework: pip install 'headgate[rest-framework]'"
    ) from error

from headgate.decision import Decision
from headgate.web.core import without_loop
from headgate.web.django.limits import DjangoLimit
from headgate.web.django.settings import current
from headgate.web.django.throttles import Throttle, address_of, decide


class SimpleRateThrottle(Throttle, throttling.SimpleRateThrottle):
    """A throttle that needs only `get_cache_key`; None skips it. One is made for each request."""

    per_request = True
    decision: Decision | None = None  # the request's, once it was made

    @property
    def THROTTLE_RATES(self) -> dict[str, Any]:  # noqa: N802 # the name of REST framework
        """The rates as the settings are now, so that override_settings reaches them."""
        rates: dict[str, Any] = api_settings.DEFAULT_THROTTLE_RATES
        return rates

    def get_rate(self) -> Any:
        """The rate of the scope; None: no limit."""
        try:
            return super().get_rate()
        except ImproperlyConfigured as error:
            known = ", ".join(self.THROTTLE_RATES) or "none"
            raise ImproperlyConfigured(f"{error}; DEFAULT_THROTTLE_RATES has {known}") from error

    def get_ident(self, request: Any) -> str:
        """The client's address. Forwarded headers are read from HEADGATE["TRUSTED_PROXIES"] only."""
        return address_of(request, api_settings.NUM_PROXIES)

    def asks(self, request: Any, view: Any) -> tuple[DjangoLimit, str, int] | None:
        """What this throttle asks of the request: a limit, a key and permits; None: nothing."""
        return self.ask(self.rate, self.get_cache_key(request, view)) if self.rate is not None else None

    def allow_request(self, request: Any, view: Any) -> bool:
        """Take the request's permits, and give back those of earlier throttles if this one refuses."""
        return self.conclude(*decide(request, [self.asks(request, view)]))

    def conclude(self, allowed: bool, decision: Decision | None) -> bool:
        """Keep the decision for `wait`, and tell a subclass that looks on."""
        self.decision = decision
        return bool(self.throttle_success() if allowed else self.throttle_failure())

    def throttle_success(self) -> bool:
        """Called when the request may go on."""
        return True

    def wait(self) -> float | None:
        """The seconds until the request would be allowed; None: never."""
        return None if self.decision is None else self.decision.retry_after or None


class AnonRateThrottle(SimpleRateThrottle, throttling.AnonRateThrottle):
    """By address, for clients that are not logged in; its rate is "anon"."""


class UserRateThrottle(SimpleRateThrottle, throttling.UserRateThrottle):
    """By user, or by address for clients that are not logged in; its rate is "user"."""


class ScopedRateThrottle(SimpleRateThrottle, throttling.ScopedRateThrottle):
    """By user or address, with the rate that the view names as its `throttle_scope`."""

    def __init__(self) -> None:
        self.rate = None  # the view knows

    def asks(self, request: Any, view: Any) -> tuple[DjangoLimit, str, int] | None:
        self.scope = getattr(view, self.scope_attr, None)
        if not self.scope:
            return None
        self.rate = self.get_rate()
        return super().asks(request, view)


class AtomicThrottles:
    """A base for views, before `APIView`: takes all throttles of a view in one step, and puts headers on its answers.

    Throttles of other kinds, and those with an `allow_request` of their own, are asked one by one afterwards; what was
    taken goes back if one of them refuses.
    """

    def check_throttles(self, request: Any) -> None:
        throttles = self.get_throttles()  # type: ignore[attr-defined]
        together = [each for each in throttles if _plain(each)]
        allowed, decision = decide(request, [each.asks(request, self) for each in together])
        for each in together:
            each.conclude(allowed, decision)
        waits = [] if allowed or decision is None else [decision.retry_after or None]
        for each in throttles:
            if each not in together and not each.allow_request(request, self):
                waits.append(each.wait())
        if waits or not allowed:
            limits = current()
            without_loop(limits.withdraw(limits.exchange(request, threaded=True)))
            self.throttled(request, max((wait for wait in waits if wait is not None), default=None))  # type: ignore[attr-defined]

    def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        response = super().finalize_response(request, response, *args, **kwargs)  # type: ignore[misc]
        limits = current()
        exchange = limits.exchange(request, threaded=True)
        if not exchange.managed:
            without_loop(limits.finish(exchange, response))
        return response


def _plain(throttle: Any) -> bool:
    """Whether the throttle decides as this module does: a subclass may allow a request without asking."""
    return isinstance(throttle, SimpleRateThrottle) and type(throttle).allow_request is SimpleRateThrottle.allow_request
