"""What the throttles of REST framework and of django-ninja share: a rate, the key of a request, one decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from headgate.decision import Decision
from headgate.errors import InvalidQuota
from headgate.quota import Quota
from headgate.rule import Rule
from headgate.web.core import without_loop
from headgate.web.django.limits import DjangoLimit
from headgate.web.django.settings import current

OPTIONS = ("algorithm", "on_store_error", "shadow", "timeout", "count_if")


class Throttle:
    """A throttle on headgate. The class of each framework adds its rates and its way to a key.

    rate and scope as in the framework; a rate may have a multiple and a burst (``3/5m``, ``10/second burst 100``), and
    several rates are a list. algorithm, on_store_error, shadow, timeout and count_if as for `ratelimit`; cost is the
    permits of a request.
    """

    scope: str | None
    algorithm: str | None = None
    on_store_error: str | None = None
    shadow: bool | None = None
    timeout: float | None = None
    count_if: Any = None
    cost: int = 1

    def parse_rate(self, rate: Any) -> tuple[int | None, float | None]:
        """The count and the seconds of *rate*, as the framework's throttles have them."""
        if rate is None:
            return (None, None)
        first = self._rule(rate).quotas[0]
        return (first.limit, first.period)

    def ask(self, rate: Any, key: str | None) -> tuple[DjangoLimit, str, int] | None:
        """The limit, the key and the permits of a request; None: it is not throttled."""
        if rate is None or key is None:
            return None
        owner = type(self)
        if owner.parse_rate is not Throttle.parse_rate:  # a project's own spelling of rates
            count, seconds = self.parse_rate(rate)
            if count is None or seconds is None:
                return None
            quotas: Any = Quota(count, seconds)
        else:
            quotas = rate
        options = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}
        scope = self.scope or owner.__qualname__
        label = (owner, scope, tuple(quotas) if isinstance(quotas, list) else quotas, *options.items())
        try:
            limit = current().of_throttle(label, quotas, scope, **options)
        except InvalidQuota as error:
            raise self._bad_rate(error) from error
        return limit, key, self.cost

    def _rule(self, rate: Any) -> Rule:
        try:
            return Rule(rate)
        except InvalidQuota as error:
            raise self._bad_rate(error) from error

    def _bad_rate(self, error: Exception) -> ImproperlyConfigured:
        return ImproperlyConfigured(f"the rate of {type(self).__name__} (scope {self.scope!r}): {error}")


def decide(request: Any, asked: Sequence[tuple[DjangoLimit, str, int] | None]) -> tuple[bool, Decision | None]:
    """Take what throttles ask, all or nothing: whether the request may go on, and the decision."""
    limits = current()
    exchange = limits.exchange(request, threaded=True)
    allowed = without_loop(limits.meet_keys(exchange, [each for each in asked if each is not None]))
    return allowed, exchange.decision


def address_of(request: Any, proxies: int | None) -> str:
    """The key of the client's address; *proxies* is the framework's NUM_PROXIES, see `DjangoRateLimits.behind`."""
    limits = current()
    return limits.behind(limits.exchange(request, threaded=True), proxies)
