"""The application for INSTALLED_APPS: system checks, and `manage.py headgate`."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register


class HeadgateConfig(AppConfig):
    name = "headgate.web.django"
    label = "headgate"
    verbose_name = "Rate limits"

    def ready(self) -> None:
        from headgate.web.django import checks

        register(checks.check_settings, "headgate")
        register(checks.check_middleware, "headgate")
        register(checks.check_proxies, "headgate")
        register(checks.check_declared, "headgate")
        register(checks.check_store, "headgate", deploy=True)
