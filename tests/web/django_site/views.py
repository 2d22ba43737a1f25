"""Views with every kind of limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.utils.decorators import method_decorator
from django.views import View

from headgate import Decision
from headgate.web.django import aget_usage, ais_ratelimited, get_usage, is_ratelimited, ratelimit
from headgate.web.exchange import ResponseInfo


def free(request: Any) -> HttpResponse:
    return HttpResponse("free")


async def async_free(request: Any) -> HttpResponse:
    return HttpResponse("free")


@ratelimit.exempt
def health(request: Any) -> HttpResponse:
    return HttpResponse("well")


@ratelimit(key="ip", rate="2/hour")
def plain(request: Any) -> HttpResponse:
    return HttpResponse("" if request.ratelimit is None else str(request.ratelimit.remaining))


@ratelimit(key="ip", rate="2/hour")
async def async_plain(request: Any) -> HttpResponse:
    return HttpResponse("" if request.ratelimit is None else str(request.ratelimit.remaining))


@ratelimit(rate="20/hour")
def contested(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate="20/hour")
async def async_contested(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate="2/hour")
def item(request: Any, number: int) -> HttpResponse:
    return HttpResponse(str(number))


@ratelimit(rate="3/day")
@ratelimit(rate=["5/minute", "10/hour"])
@ratelimit(rate="9/hour", scope="several")
def several(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(key="user", rate="2/hour")
def by_user(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(key="user", rate="2/hour")
async def async_by_user(request: Any) -> HttpResponse:
    return HttpResponse("in")


def tenant(group: str, request: Any) -> str:
    return f"{group} {request.GET['tenant']}"


def tier(request: Any) -> Any:
    return {"free": "1/h", "paid": (2, 3600), "staff": None}[request.GET["tier"]]


async def slow_tenant(request: Any) -> str:
    await asyncio.sleep(0)
    return str(request.GET["tenant"])


KEYS: dict[str, Any] = {
    "header": "header:X-API-Key",
    "get": "get:q",
    "post": "post:username",
    "dotted": "tests.web.django_site.views.tenant",
    "function": tenant,
    "both": ["ip", "post:username"],
}


def keyed(name: str) -> Any:
    @ratelimit(key=KEYS[name], rate="1/hour", scope=f"by {name}")
    def view(request: Any) -> HttpResponse:
        return HttpResponse("in")

    return view


@ratelimit(key=slow_tenant, rate="1/hour")
async def by_async_key(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate=tier, group="tiers")
def tiered(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate="1/hour", method=["POST", "PUT"])
def writes(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate="1/hour", block=False)
@ratelimit(rate="2/hour", block=False)
@ratelimit(rate="3/hour")
def noted(request: Any) -> HttpResponse:
    return HttpResponse(f"{request.limited} {request.ratelimit is not None and request.ratelimit.allowed}")


@ratelimit(rate="5/hour", cost=lambda request: int(request.GET["cost"]), exempt_when=lambda r: "free" in r.GET)
def costly(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate="1/hour", shadow=True)
def shadowed(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate="10/second burst 1", timeout=5.0)
def patient(request: Any) -> HttpResponse:
    return HttpResponse("in")


def polite(request: Any, decision: Decision) -> HttpResponse:
    return HttpResponse(f"please wait {decision.retry_after:.0f} s", status=503)


async def async_polite(request: Any, decision: Decision) -> HttpResponse:
    await asyncio.sleep(0)
    return polite(request, decision)


@ratelimit(rate="1/hour", on_denied=polite)
def politely(request: Any) -> HttpResponse:
    return HttpResponse("in")


@ratelimit(rate="1/hour", on_denied=async_polite)
def async_politely(request: Any) -> HttpResponse:
    return HttpResponse("in")


def by_hand(request: Any) -> HttpResponse:
    """Counts a request only if it asks for that."""
    asked: dict[str, Any] = {"group": "by hand", "key": "ip", "rate": "2/hour", "method": "POST"}
    limited = is_ratelimited(request, increment="count" in request.GET, **asked)
    return HttpResponse(f"{limited} {get_usage(request, **asked)}")


async def async_by_hand(request: Any) -> HttpResponse:
    asked: dict[str, Any] = {"fn": async_by_hand, "key": "user", "rate": "2/hour", "method": "POST"}
    limited = await ais_ratelimited(request, increment="count" in request.GET, **asked)
    return HttpResponse(f"{limited} {await aget_usage(request, **asked)}")


# --------------------------------------------------------------------------------------------- what a response decides


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


def answer(kind: str) -> Any:
    """What a view does: answer with a status, or raise."""
    if kind == "404":
        raise Http404("no such thing")
    if kind == "403":
        raise PermissionDenied("no")
    if kind == "500":
        raise RuntimeError("broken")
    return HttpResponse(kind, status=int(kind))


@ratelimit(rate="2/hour", count_if=failed)
def failures(request: Any, kind: str) -> Any:
    return answer(kind)


@ratelimit(rate="2/hour", count_if=failed)
async def async_failures(request: Any, kind: str) -> Any:
    return answer(kind)


started = asyncio.Event()


@ratelimit(rate="2/hour", count_if=lambda response: response.status_code != 499)
async def endless(request: Any) -> HttpResponse:
    started.set()
    await asyncio.Event().wait()
    return HttpResponse("never")


def lines() -> Iterator[bytes]:
    yield b"one\n"
    yield b"two\n"


async def async_lines() -> AsyncIterator[bytes]:
    yield b"one\n"
    yield b"two\n"


@ratelimit(rate="2/hour", count_if=lambda response: response.headers["content-type"] != "text/plain")
def stream(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(lines(), content_type=request.GET["type"])


@ratelimit(rate="2/hour", count_if=lambda response: response.headers["content-type"] != "text/plain")
async def async_stream(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(async_lines(), content_type=request.GET["type"])


# --------------------------------------------------------------------------------------------------------- class views


@method_decorator(ratelimit(rate="2/hour"), name="dispatch")
class Decorated(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("in")

    post = get


@ratelimit(rate="2/hour")
class Direct(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("in")


@ratelimit(rate="2/hour")
class AsyncDirect(View):
    async def get(self, request: Any) -> HttpResponse:
        return HttpResponse("in")


class Methods(View):
    """Each method has its limit; one of them has none."""

    @method_decorator([ratelimit(rate="2/hour"), ratelimit(rate="3/day")])
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("in")

    @ratelimit(rate="2/hour")
    def post(self, request: Any) -> HttpResponse:
        return HttpResponse("in")

    def put(self, request: Any) -> HttpResponse:
        return HttpResponse("in")


class AsyncMethods(View):
    @ratelimit(rate="2/hour")
    async def get(self, request: Any) -> HttpResponse:
        return HttpResponse("in")


@ratelimit.exempt
class Exempt(View):
    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("in")


class LikeExempt(Exempt):
    """An exemption is for that class alone."""


def nothing(request: Any) -> None:
    return None


@ratelimit(key=nothing, rate="2/hour")
def keyless(request: Any) -> HttpResponse:
    return HttpResponse("never")


def nameless(view: Any) -> Any:
    """A decorator that does not say what it wraps."""

    def wrapper(request: Any) -> Any:
        return view(request)

    return wrapper


@nameless
@ratelimit(rate="2/hour")
def hidden(request: Any) -> HttpResponse:
    return HttpResponse("in")


class Dispatcher:
    """A view of which nothing can be seen before it runs."""

    def __call__(self, request: Any) -> Any:
        return plain(request)


dispatcher = Dispatcher()


def states(request: Any) -> HttpResponse:
    return HttpResponse(f"{request.limited} {request.ratelimit}")
