"""The URLconf of most tests."""

from __future__ import annotations

from typing import Any

from django.conf.urls.i18n import i18n_patterns
from django.urls import include, path, re_path

from tests.web.django_site import api, ninja_api, views

names = [
    *("free", "async_free", "health", "plain", "async_plain", "contested", "async_contested", "several", "by_user"),
    *("async_by_user", "by_async_key", "tiered", "writes", "noted", "costly", "shadowed", "patient", "politely"),
    *("async_politely", "endless", "stream", "async_stream", "keyless", "hidden", "dispatcher", "states", "by_hand"),
    "async_by_hand",
]
classes: dict[str, Any] = {
    "decorated": views.Decorated,
    "direct": views.Direct,
    "async_direct": views.AsyncDirect,
    "methods": views.Methods,
    "async_methods": views.AsyncMethods,
    "exempt": views.Exempt,
    "like_exempt": views.LikeExempt,
}

urlpatterns = [
    *[path(f"{name}/", getattr(views, name)) for name in names],
    *[path(f"class/{name}/", view.as_view()) for name, view in classes.items()],
    *[path(f"by/{name}/", views.keyed(name)) for name in views.KEYS],
    path("failures/<kind>/", views.failures),
    path("async_failures/<kind>/", views.async_failures),
    path("items/<int:number>/", views.item),
    path("v1/", include([path("items/<int:number>/", views.item)])),
    re_path(r"^old/(?P<number>\d+)/$", views.item),
    path("api/", include(api.urlpatterns)),
    path("ninja/", ninja_api.api.urls),
    *i18n_patterns(path("translated/", views.plain)),
]
