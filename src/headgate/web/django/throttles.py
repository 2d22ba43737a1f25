"""What the throttles of REST framework and of django-ninja share: a rate, the key of a request, one decision."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from headgate.decision import Decision
from headgate.errors import InvalidPermits, InvalidQuota
from headgate.quota import Quota
from headgate.rule import Rule
from headgate.web.core import without_loop
from headgate.web.django.limits import DjangoLimit
from headgate.web.django.settings import current
from headgate.web.limit import check_cost
from headgate.web.subject import key_text

OPTIONS = ("algorithm", "on_store_error", "shadow", "timeout", "count_if")


class Throttle:
    """A throttle on headgate. The class of each framework adds its rates and its way to a key.

    rate and scope as in the framework; a rate may have a multiple and a burst (``3/5m``, ``10/second burst 100``), and
    several rates are a list. algorithm, on_store_error, shadow, timeout and count_if as for `ratelimit`; cost is the
    permits of a request. count_if is a function of the response, or a method that takes it: of what the throttle keeps,
    it sees that of one request.
    """

    scope: str | None
    algorithm: str | None = None
    on_store_error: str | None = None
    shadow: bool | None = None
    timeout: float | None = None
    count_if: Any = None
    cost: int = 1
    per_request = False  # whether one is made for each request

    def parse_rate(self, rate: Any) -> tuple[int | None, float | None]:
        """The count and the seconds of *rate*, as the framework's throttles have them."""
        if rate is None:
            return (None, None)
        first = self._rule(rate).quotas[0]
        return (first.limit, first.period)

    def ask(self, rate: Any, key: object) -> tuple[DjangoLimit, str, int] | None:
        """The limit, the key and the permits of a request; None: it is not throttled."""
        if rate is None or key is None:
            return None
        owner = type(self)
        options = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}
        if "count_if" in options:
            options["count_if"] = _of_response(options["count_if"], self)
        scope = self.scope or owner.__qualname__
        named = options
        if self.per_request:  # their methods are all the same limit
            named = {name: getattr(value, "__func__", value) for name, value in options.items()}
        try:
            if owner.parse_rate is not Throttle.parse_rate:  # a project's own spelling of rates
                count, seconds = self.parse_rate(rate)
                if count is None or seconds is None:
                    return None
                rate = Quota(count, seconds)
            label = (owner, scope, tuple(rate) if isinstance(rate, list) else rate, *named.items())
            limit = current().of_throttle(label, rate, scope, **options)
        except InvalidQuota as error:
            raise self._bad_rate(error) from error
        try:
            cost = check_cost(self.cost)
        except InvalidPermits as error:
            raise ImproperlyConfigured(f"{owner.__name__}.{error}") from error
        return limit, self._text(key), cost

    def _text(self, key: object) -> str:
        """The key of a client, as text."""
        text = key if type(key) is str else key_text(key)
        if not text.strip():
            raise ImproperlyConfigured(
                f"get_cache_key of {type(self).__name__} gave {type(key).__name__} {key!r:.60}; it must give the text "
                "that names the client, or None for requests that are not throttled"
            )
        return text

    def _rule(self, rate: Any) -> Rule:
        try:
            return Rule(rate)
        except InvalidQuota as error:
            raise self._bad_rate(error) from error

    def _bad_rate(self, error: Exception) -> ImproperlyConfigured:
        return ImproperlyConfigured(f"the rate of {type(self).__name__} (scope {self.scope!r}): {error}")


def _of_response(count_if: Any, throttle: Throttle) -> Any:
    """`count_if` as it is called. A plain function in a class became a method, and takes the response alone."""
    if getattr(count_if, "__self__", None) is not throttle:
        return count_if
    try:
        inspect.signature(count_if).bind(None)
    except TypeError:
        return count_if.__func__
    return count_if


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
