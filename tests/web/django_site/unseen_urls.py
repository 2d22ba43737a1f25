"""A URLconf with a limit above the decorator of an operation, which django-ninja cannot see, and one that it can."""

from __future__ import annotations

from django.http import HttpRequest
from django.urls import path
from ninja import NinjaAPI

from headgate.web.django import ratelimit

api = NinjaAPI(urls_namespace="unseen")


@ratelimit(rate="5/m")
@api.get("/unseen")
def unseen(request: HttpRequest) -> str:
    return "in"


@api.get("/seen")
@ratelimit(rate="5/m")
@ratelimit(rate="9/h")
def seen(request: HttpRequest) -> str:
    return "in"


urlpatterns = [path("", api.urls)]
