"""Logins of a Django project: failures are held by address and by username, and a success forgets its own.

Needs `pip install 'headgate[django]'`. Here all is in one file; in a project `ThrottledLoginView` and its throttle
go into `views.py`. As a program it makes some requests to itself and prints the answers.
"""

from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.http import HttpResponse
from django.test import Client
from django.urls import path

from headgate.web.login import LoginRefused, LoginThrottle

FORM = ("django.template.loaders.locmem.Loader", {"registration/login.html": "{{ form }}"})

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY="for this example",
    ALLOWED_HOSTS=["testserver"],
    USE_TZ=True,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],  # quick, for this example alone
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": {"loaders": [FORM]}}],
)
django.setup()

from django.contrib.auth.models import User  # noqa: E402  # models need the settings
from django.contrib.auth.views import LoginView  # noqa: E402

# in production: store="redis://...", trusted_proxies=[...]
throttle = LoginThrottle(per_username="3/15 minutes", per_address="20/hour")


class ThrottledLoginView(LoginView):  # type: ignore[misc]  # Django ships no types
    """Django's own, with its form, its template and its redirect."""

    def post(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with throttle.attempt(request, request.POST.get("username", "")) as attempt:
                response = super().post(request, *args, **kwargs)
                if request.user.is_authenticated:
                    attempt.succeeded()
                return response
        except LoginRefused as error:
            status, headers, body = error.answer()
            return HttpResponse(body, status=status, headers=headers)


urlpatterns = [path("login", ThrottledLoginView.as_view(next_page="/"), name="login")]


def tries(address: str, username: str, *passwords: str) -> list[int]:
    """302 is a login, 200 the form again, 429 a refusal."""
    client: Any = Client(REMOTE_ADDR=address)
    found = []
    for password in passwords:
        client.logout()
        found.append(client.post("/login", {"username": username, "password": password}).status_code)
    return found


def main() -> None:
    call_command("migrate", verbosity=0)
    User.objects.create_user("ann", password="correct horse")
    home, elsewhere = "192.0.2.7", "198.51.100.66"
    print("typing errors are forgotten:", tries(home, "ann", "correct horse", "oops", "oops", "correct horse", "oops"))
    print("guesses are held:", tries(elsewhere, "Ann", "a", "b", "c", "d"))
    print("ann still gets in where she was before:", tries(home, "ann", "correct horse"))
    print("names that do not exist look the same:", tries(home, "eve", "a", "b", "c", "d"))


if __name__ == "__main__":
    main()
