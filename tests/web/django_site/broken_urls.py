"""A URLconf with a limit whose key cannot be imported."""

from __future__ import annotations

from django.urls import path

from headgate.web.django import ratelimit
from tests.web.django_site import views

urlpatterns = [path("", ratelimit(key="no.such.function", rate="5/m")(views.free))]
