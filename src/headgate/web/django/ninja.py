"""Throttles for django-ninja: the same names and settings as its own, exact under concurrency.

api = NinjaAPI(throttle=[AnonRateThrottle("10/s"), AuthRateThrottle("100/s burst 500")])

Their `allow_request` is a plain function, also for async operations: there a call to Redis stops the event loop for as
long as it takes. `ratelimit` on an async operation does not.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from django.conf import settings

try:
    from ninja import throttling
    from ninja.conf import settings as ninja_settings
except ImportError as error:
    raise ImportError("headgate.web.django.ninja needs django-ninja: pip install 'headgate[ninja]'") from error

from headgate.web.django.throttles import Throttle, address_of, decide

# The seconds to wait of this thread's or task's last refusal: a throttle serves all requests, so it keeps no state.
_wait: ContextVar[float | None] = ContextVar("headgate_ninja_wait", default=None)


class NinjaThrottle(Throttle, throttling.SimpleRateThrottle):
    """A throttle that needs only `get_cache_key`; None skips it. One serves all requests."""

    def __init__(self, rate: Any = None) -> None:
        self.rate = rate
        self.num_requests, self.duration = self.parse_rate(rate)

    @property
    def THROTTLE_RATES(self) -> dict[str, Any]:  # noqa: N802 # the name of django-ninja
        """The rates as the settings are now, so that override_settings reaches them."""
        rates: dict[str, Any] = getattr(settings, "NINJA_DEFAULT_THROTTLE_RATES", ninja_settings.DEFAULT_THROTTLE_RATES)
        return rates

    def get_ident(self, request: Any) -> str:
        """The client's address. Forwarded headers are read from HEADGATE["TRUSTED_PROXIES"] only."""
        return address_of(request, getattr(settings, "NINJA_NUM_PROXIES", None))

    def allow_request(self, request: Any) -> bool:
        """Take the request's permits, and give back those of earlier throttles if this one refuses."""
        rate = self.rate or self.get_rate()
        asked = self.ask(rate, self.get_cache_key(request)) if rate is not None else None
        allowed, decision = decide(request, [asked])
        _wait.set(None if decision is None else decision.retry_after or None)
        return bool(self.throttle_success() if allowed else self.throttle_failure())

    def throttle_success(self) -> bool:
        """Called when the request may go on."""
        return True

    def wait(self) -> float | None:
        """The seconds until the request that was refused last in this thread or task would be allowed; None: never."""
        return _wait.get()


class AnonNinjaThrottle(NinjaThrottle, throttling.AnonRateThrottle):
    """By address, for clients without authentication; its rate is "anon"."""


class AuthNinjaThrottle(NinjaThrottle, throttling.AuthRateThrottle):
    """By what authenticated the request, or by address; its rate is "auth"."""


class UserNinjaThrottle(NinjaThrottle, throttling.UserRateThrottle):
    """By user, or by address for clients that are not logged in; its rate is "user"."""


# The names of django-ninja: an application changes its import and nothing else.
SimpleRateThrottle = NinjaThrottle
AnonRateThrottle = AnonNinjaThrottle
AuthRateThrottle = AuthNinjaThrottle
UserRateThrottle = UserNinjaThrottle
