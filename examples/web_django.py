"""Django in one file: a limit for every view, a tighter one for a search, and one for failed logins only.

Needs `pip install 'headgate[django]'`. Serve it with `gunicorn web_django:application`; as a program it makes some
requests to itself and prints the answers.
"""

from typing import Any

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import path

from headgate.web.django import ratelimit

settings.configure(
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["*"],
    USE_TZ=True,
    LOGGING_CONFIG=None,
    INSTALLED_APPS=["headgate.web.django"],
    MIDDLEWARE=["headgate.web.django.RateLimitMiddleware"],
    HEADGATE={"DEFAULT": "100/minute"},  # "STORE": "redis://..." for more than one process
)


@ratelimit(rate=["2/second", "5/minute"])
def search(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"found": []})


@ratelimit(key=["ip", "post:username"], rate="3/m", count_if=lambda response: response.status_code == 401)
def login(request: HttpRequest) -> JsonResponse:
    if request.POST.get("password") != "secret":
        return JsonResponse({"error": "wrong password"}, status=401)
    return JsonResponse({"welcome": request.POST["username"]})


urlpatterns = [path("search/", search), path("login/", login)]
application = get_wsgi_application()


def main() -> None:
    client: Any = Client()
    for _ in range(3):
        answer = client.get("/search/")
        print("search:", answer.status_code, answer.headers["x-ratelimit-remaining"], "left")
    for password in ["secret", "a", "secret", "b", "c", "secret"]:
        answer = client.post("/login/", {"username": "ada", "password": password})
        print("login:", answer.status_code)
    answer = client.get("/nothing/")
    print("nothing:", answer.status_code, answer.headers["x-ratelimit-remaining"], "of the default left")


if __name__ == "__main__":
    main()
