"""What a client gets that was refused: the project's own answer, its page for 429, or a problem as JSON."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import PermissionDenied
from django.dispatch import Signal
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.template import TemplateDoesNotExist, loader
from django.urls import get_resolver
from django.urls.utils import get_callable

from headgate.decision import Decision
from headgate.web.headers import denial_headers, retry_seconds
from headgate.web.limit import SetupError, check_answer

if TYPE_CHECKING:
    from headgate.web.django.limits import DjangoExchange, DjangoRateLimits

TEMPLATE = "429.html"
RESPONSE = "set_signed_cookie"  # what a response of Django has, and nothing else
rate_limited = Signal()  # sent with a `request` and a `decision` when a limit refuses, also one with `block=False`


class Ratelimited(PermissionDenied):
    """A request was refused. `handler429` gets it, and `raise_ratelimited` raises it."""

    def __init__(self, decision: Decision | None = None) -> None:
        super().__init__("rate limit exceeded")
        self.decision = decision


def raise_ratelimited(request: Any, decision: Decision) -> Any:
    """Raise `Ratelimited`, a PermissionDenied. As ON_DENIED it is for projects that answer in `handler403`."""
    raise Ratelimited(decision)


async def refuse(limits: DjangoRateLimits, exchange: DjangoExchange) -> Any:
    """The answer to a request that was refused, with the headers of the limit that refused it."""
    on_denied, answer = limits.on_denied_of(exchange), None
    if on_denied is not None:
        answer = on_denied(exchange.request, exchange.decision)
        if inspect.isawaitable(answer):
            answer = async_to_sync(_result)(answer) if exchange.threaded else await answer
        check_answer(answer, RESPONSE)
    if answer is None:
        answer = await _page(limits, exchange)
    give_headers(limits, exchange, answer)
    return answer


def give_headers(limits: DjangoRateLimits, exchange: DjangoExchange, response: Any) -> None:
    """Put the headers of the decision on a response that does not have them yet."""
    if exchange.decision is None or not isinstance(response, HttpResponseBase):
        return
    for name, value in limits.headers(exchange):
        response.setdefault(name, value)
    if exchange.denied_by is not None:
        for name, value in denial_headers(exchange.decision):
            response.setdefault(name, value)


async def tell(exchange: DjangoExchange) -> None:
    """Send the signal. An error of a receiver does not reach the client; Django logs it."""
    if not rate_limited.has_listeners():
        return
    named = {"sender": type(exchange.limits), "request": exchange.request, "decision": exchange.decision}
    if exchange.threaded:
        rate_limited.send_robust(**named)
    elif hasattr(rate_limited, "asend_robust"):
        await rate_limited.asend_robust(**named)
    else:  # Django 4.2
        await sync_to_async(rate_limited.send_robust)(**named)


async def _result(answer: Any) -> Any:
    return await answer


async def _page(limits: DjangoRateLimits, exchange: DjangoExchange) -> Any:
    """`handler429` of the URLconf, the template, or a problem as JSON: the first that there is."""
    render = _handler(exchange) or _template(limits, exchange)
    if render is None:
        status, headers, body = limits.refusal(exchange)
        return HttpResponse(body, status=status, headers=dict(headers))
    if not inspect.iscoroutinefunction(render):
        return render() if exchange.threaded else await sync_to_async(render)()
    return async_to_sync(render)() if exchange.threaded else await render()


def _handler(exchange: DjangoExchange) -> Callable[[], Any] | None:
    resolver = get_resolver(getattr(exchange.request, "urlconf", None))
    handler = getattr(resolver.urlconf_module, "handler429", None)
    if handler is None:
        return None
    view = get_callable(handler)
    request, error = exchange.request, Ratelimited(exchange.decision)
    if not inspect.iscoroutinefunction(view):
        return lambda: _answer_of(view(request, exception=error))

    async def render() -> Any:
        return _answer_of(await view(request, exception=error))

    return render


def _answer_of(answer: Any) -> Any:
    """Return what `handler429` gave, if it is a response: the middleware would take None for leave to go on."""
    if isinstance(answer, HttpResponseBase):
        return answer
    raise SetupError(f"handler429 must give a response, got {type(answer).__name__} {answer!r:.60}")


def _template(limits: DjangoRateLimits, exchange: DjangoExchange) -> Callable[[], Any] | None:
    request = exchange.request
    if not request.accepts("text/html"):
        return None
    try:
        template = loader.get_template(TEMPLATE)
    except TemplateDoesNotExist:
        return None
    assert exchange.decision is not None
    context = {"decision": exchange.decision, "retry_after": retry_seconds(exchange.decision)}
    return lambda: HttpResponse(template.render(context, request), status=429)
