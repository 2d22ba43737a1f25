"""Views of REST framework."""

from __future__ import annotations

from typing import Any

from django.urls import path
from rest_framework import throttling
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view, authentication_classes, throttle_classes
from rest_framework.permissions import AllowAny
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from headgate.web.django import ratelimit
from headgate.web.django.rest_framework import (
    AnonRateThrottle,
    AtomicThrottles,
    ScopedRateThrottle,
    SimpleRateThrottle,
    UserRateThrottle,
)
from tests.web.django_site.users import Numbered


class Contested(UserRateThrottle):
    rate = "20/hour"


class Burst(UserRateThrottle):
    scope = "burst"


class Daily(UserRateThrottle):
    rate = ("1000/day", "100/hour")


class Twice(UserRateThrottle):
    rate = "2/day"


class Thrice(UserRateThrottle):
    rate = "3/day"


class Costly(UserRateThrottle):
    rate = "5/hour"
    cost = 2


class OwnSpelling(UserRateThrottle):
    """A rate that a project reads itself, as recipes for periods of 20 seconds do."""

    scope = "own"
    rate = "twice in 20 s"

    def parse_rate(self, rate: Any) -> tuple[int, float]:
        return (2, 20.0)


class Fails(UserRateThrottle):
    """Counts failures; a method that is no method, as a lambda in a class body is."""

    rate = "1/hour"
    count_if = lambda response: response.status_code >= 400  # noqa: E731


class FailsByMethod(UserRateThrottle):
    rate = "1/hour"

    def count_if(self, response: Any) -> bool:
        return bool(response.status_code >= 400)


class StaffIsFree(UserRateThrottle):
    rate = "1/hour"

    def allow_request(self, request: Any, view: Any) -> bool:
        return "staff" in request.GET or super().allow_request(request, view)


class ByName(SimpleRateThrottle):
    """By a name, and not at all without one."""

    rate = "1/hour"

    def get_cache_key(self, request: Any, view: Any) -> str | None:
        name: str | None = request.GET.get("name")
        return name


class Closed(throttling.BaseThrottle):
    """A throttle of another kind, which refuses what says so."""

    def allow_request(self, request: Any, view: Any) -> bool:
        return "closed" not in request.GET

    def wait(self) -> float:
        return 7.0


def view_of(*classes: Any, atomic: bool = False, **attributes: Any) -> Any:
    bases = (AtomicThrottles, APIView) if atomic else (APIView,)

    def get(self: Any, request: Any) -> Response:
        return Response("in")

    named = {"get": get, "throttle_classes": classes, "permission_classes": [AllowAny], **attributes}
    made: Any = type("MadeView", bases, named)
    return made.as_view()


@api_view(["GET"])
@throttle_classes([Twice])
def function(request: Any) -> Response:
    return Response("in")


class ByNumber(BaseAuthentication):
    """The user whose number a header names."""

    def authenticate(self, request: Any) -> Any:
        number = request.headers.get("x-user")
        return (Numbered().get_user(number), None) if number else None


@api_view(["GET"])
@authentication_classes([ByNumber])
@ratelimit(rate="2/hour", key="user")
def decorated(request: Any) -> Response:
    return Response("in")


@api_view(["GET"])
@ratelimit(rate="1/hour", key=lambda request: request.query_params["name"])
def by_query(request: Any) -> Response:
    return Response("in")


class Chooses(ViewSet):
    """Chooses its throttles for each action."""

    def get_throttles(self) -> list[Any]:
        return [Twice()] if self.action == "list" else []

    def list(self, request: Any) -> Response:
        return Response("in")

    @ratelimit(rate="1/hour")
    def create(self, request: Any) -> Response:
        return Response("in", status=201)

    def retrieve(self, request: Any, pk: str) -> Response:
        return Response(pk)


router = SimpleRouter()
router.register("chooses", Chooses, basename="chooses")

urlpatterns = [
    path("free/", view_of()),
    path("contested/", view_of(Contested)),
    path("contested_atomic/", view_of(Contested, Daily, atomic=True)),
    path("anon/", view_of(AnonRateThrottle)),
    path("user/", view_of(UserRateThrottle)),
    path("uploads/", view_of(ScopedRateThrottle, throttle_scope="uploads")),
    path("unscoped/", view_of(ScopedRateThrottle)),
    path("burst/", view_of(Burst)),
    path("two/", view_of(Thrice, Twice)),
    path("two_turned/", view_of(Twice, Thrice)),
    path("two_atomic/", view_of(Thrice, Twice, atomic=True)),
    path("closed/", view_of(Twice, Closed)),
    path("closed_atomic/", view_of(Closed, Twice, StaffIsFree, atomic=True)),
    path("costly/", view_of(Costly)),
    path("own_spelling/", view_of(OwnSpelling)),
    path("fails/", view_of(Fails)),
    path("fails_by_method/", view_of(FailsByMethod)),
    path("by_name/", view_of(ByName)),
    path("function/", function),
    path("decorated/", decorated),
    path("by_query/", by_query),
    *router.urls,
]
