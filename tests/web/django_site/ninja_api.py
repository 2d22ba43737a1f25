"""An application of django-ninja."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import NinjaAPI

from headgate.web.django import ratelimit
from headgate.web.django.ninja import AnonRateThrottle, AuthRateThrottle, UserRateThrottle

api = NinjaAPI(urls_namespace="tests")


def by_token(request: HttpRequest) -> Any:
    return request.headers.get("x-token")


@api.get("/free")
def free(request: HttpRequest) -> str:
    return "in"


@api.get("/anon", throttle=[AnonRateThrottle()])
def anon(request: HttpRequest) -> str:
    return "in"


@api.get("/auth", auth=by_token, throttle=[AuthRateThrottle()])
def auth(request: HttpRequest) -> str:
    return "in"


@api.get("/user", throttle=UserRateThrottle())
def user(request: HttpRequest) -> str:
    return "in"


@api.get("/two", throttle=[AnonRateThrottle("3/5m"), AnonRateThrottle("2/day")])
def two(request: HttpRequest) -> str:
    return "in"


@api.get("/contested", throttle=[AnonRateThrottle("20/hour")])
def contested(request: HttpRequest) -> str:
    return "in"


@api.get("/async_contested", throttle=[AnonRateThrottle("20/hour")])
async def async_contested(request: HttpRequest) -> str:
    return "in"


@api.get("/decorated")
@ratelimit(rate="2/hour")
def decorated(request: HttpRequest, name: str = "you") -> dict[str, Any]:
    return {"hello": name}


@api.get("/async_decorated")
@ratelimit(rate="2/hour")
async def async_decorated(request: HttpRequest, name: str = "you") -> dict[str, Any]:
    return {"hello": name}
