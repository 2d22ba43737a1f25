"""`RateLimitMiddleware`: the default limit, headers on every limited answer, and what a response decides.

Its place in MIDDLEWARE is where the default limit is met: before sessions a refusal costs least, and after
AuthenticationMiddleware its key can be the user. The view's own limits are met when the view is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.conf import settings
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.urls import Resolver404, get_resolver

from headgate.web.core import without_loop
from headgate.web.django.limits import DjangoExchange, DjangoRateLimits
from headgate.web.django.settings import current
from headgate.web.django.views import limits_of
from headgate.web.exchange import CLIENT_LEFT, HANDLER_RAISED, ResponseInfo


class RateLimitMiddleware:
    """Limits what has no limit of its own, and finishes what views have begun. Runs in threads and on event loops.

    Args:
        get_response: the next layer, which Django gives
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        self._on_loop = iscoroutinefunction(get_response)
        if self._on_loop:
            markcoroutinefunction(self)
        current()  # a mistake in the settings is found when the server starts

    def __call__(self, request: Any) -> Any:
        limits = current()
        exchange = limits.exchange(request, threaded=not self._on_loop)
        if exchange.managed or not limits.enabled:  # the same request is counted once, whatever MIDDLEWARE says
            return self.get_response(request)
        exchange.managed = True
        return self._serve_on_loop(limits, exchange) if self._on_loop else self._serve(limits, exchange)

    def _serve(self, limits: DjangoRateLimits, exchange: DjangoExchange) -> Any:
        request = exchange.request
        if (answer := without_loop(_begin(limits, exchange))) is not None:
            return answer
        response = self.get_response(request)
        exchange = limits.exchange(request, threaded=True)  # the view may have run on a loop
        return without_loop(_end(limits, exchange, response))

    async def _serve_on_loop(self, limits: DjangoRateLimits, exchange: DjangoExchange) -> Any:
        request = exchange.request
        if (answer := await _begin(limits, exchange)) is not None:
            return answer
        status = CLIENT_LEFT
        try:
            response = await self.get_response(request)
            status = 0
        except Exception:
            status = HANDLER_RAISED
            raise
        finally:
            exchange = limits.exchange(request, threaded=False)  # the view may have run in a thread
            if status:
                await limits.finish(exchange, ResponseInfo(status))
        return await _end(limits, exchange, response)


async def _begin(limits: DjangoRateLimits, exchange: DjangoExchange) -> Any:
    """Meet the default limit, if the view has none of its own; the answer if it refuses."""
    if limits.default is None:
        return None
    request = exchange.request
    urlconf = getattr(request, "urlconf", None) or settings.ROOT_URLCONF
    try:
        view = get_resolver(urlconf).resolve(request.path_info).func
    except Resolver404:
        if isinstance(urlconf, str) and is_language_prefix_patterns_used(urlconf)[0]:
            return None  # LocaleMiddleware may come after this one; the response will tell
    else:
        own = limits_of(view, exchange.method)
        if own.limited or own.exempt:
            return None
    return None if await limits.meet_default(exchange) else await _refuse(limits, exchange)


async def _end(limits: DjangoRateLimits, exchange: DjangoExchange, response: Any) -> Any:
    """Meet the default limit if the request has met no limit, as where another middleware answered; then finish."""
    unlimited = not exchange.met and not exchange.default_met and not _exempt(exchange)
    if unlimited and not await limits.meet_default(exchange):
        answer = await _refuse(limits, exchange)
        answer._resource_closers.extend(response._resource_closers)
        return answer
    await limits.finish(exchange, response)
    return response


async def _refuse(limits: DjangoRateLimits, exchange: DjangoExchange) -> Any:
    """The answer to a refused request. Django renders a `TemplateResponse` of a view only."""
    answer = await limits.refuse(exchange)
    if getattr(answer, "is_rendered", True):
        return answer
    return answer.render() if exchange.threaded else await sync_to_async(answer.render)()


def _exempt(exchange: DjangoExchange) -> bool:
    match = exchange.request.resolver_match
    return match is not None and limits_of(match.func, exchange.method).exempt
