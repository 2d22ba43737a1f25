"""The settings that every test starts with; `override_settings` changes them for one test."""

from __future__ import annotations

import os

SECRET_KEY = "of tests only"
ALLOWED_HOSTS = ["*"]
DEBUG = False
USE_TZ = True
USE_I18N = True
LANGUAGES = [("en", "English"), ("de", "German")]
ROOT_URLCONF = "tests.web.django_site.urls"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "rest_framework",
    "headgate.web.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "headgate.web.django.RateLimitMiddleware",
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
AUTHENTICATION_BACKENDS = ["tests.web.django_site.users.Numbered"]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "OPTIONS": {"loaders": [("django.template.loaders.locmem.Loader", {})]},
    }
]
HEADGATE = {"DEFAULT": "100/hour", "STORE": os.environ.get("HEADGATE_TEST_STORE", "memory://")}
REST_FRAMEWORK = {
    "DEFAULT_THROTTLE_RATES": {"anon": "2/hour", "user": "4/hour", "uploads": "3/5m", "burst": "1/hour burst 5"},
    "UNAUTHENTICATED_USER": "django.contrib.auth.models.AnonymousUser",
}
NINJA_DEFAULT_THROTTLE_RATES = {"anon": "2/hour", "auth": "3/hour", "user": "4/hour"}
