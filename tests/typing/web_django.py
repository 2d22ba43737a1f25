"""Limits of a Django project as a user writes them, read by mypy and pyright and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

from django.http import HttpRequest, HttpResponse
from django.views import View

from headgate import Decision
from headgate.web.django import RateLimitMiddleware, ratelimit
from headgate.web.exchange import ResponseInfo


@ratelimit(key="ip", rate="5/m", method=["POST"], block=True, group="search")
def search(request: HttpRequest, page: int = 1) -> HttpResponse:
    return HttpResponse(b"%d" % page)


@ratelimit(key=["ip", "post:username"], rate=["10/second", "1000/hour"])
async def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"in")


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


def denied(request: HttpRequest, decision: Decision) -> HttpResponse:
    return HttpResponse(b"%d s" % decision.retry_after, status=429)


@ratelimit(rate=(5, 60), count_if=failed, on_denied=denied, cost=2, timeout=1.0, algorithm="gcra", shadow=True)
class Items(View):
    @ratelimit(key=lambda request: request.user.pk, rate=lambda request: "5/m", exempt_when=lambda request: False)
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"in")


@ratelimit.exempt
def health(request: HttpRequest) -> str:
    return "well"


def types(request: HttpRequest) -> None:
    """Decorated views keep their types."""
    assert_type(health(request), str)
    Items.as_view()
    search(request, page=2)
    search(request, pages=2)  # type: ignore[call-arg]
    RateLimitMiddleware(search)
    ratelimit(rate="5/m", algorithm="gcr")  # type: ignore[arg-type]
    ratelimit(rate="5/m", methods=["GET"])  # type: ignore[call-arg]
