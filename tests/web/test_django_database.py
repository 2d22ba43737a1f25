"""HEADGATE["DATABASE"]: limits in the PostgreSQL of the project, by connections of their own."""

import subprocess
import sys
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connections
from django.test import override_settings

from headgate.postgresql.url import parse_url
from headgate.web.django.settings import current, database_url
from tests.support.postgres import PASSWORD, USER, PostgresServer
from tests.web.django_site.site import Site

PROJECT = """
import sys, django
from django.conf import settings
host, port, user, password = sys.argv[1:]
settings.configure(
    ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of tests",
    INSTALLED_APPS=["headgate.web.django"], MIDDLEWARE=["headgate.web.django.RateLimitMiddleware"],
    DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": "limits", "HOST": host, "PORT": port, "USER": user,
        "PASSWORD": password, "ATOMIC_REQUESTS": True, "OPTIONS": {"sslmode": "prefer", "connect_timeout": 9},
    }},
    HEADGATE={"DATABASE": "default", "DEFAULT": "2/day", "TIMEOUT": 20.0, "ON_STORE_ERROR": "raise"},
)
django.setup()
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.urls import path

def view(request):
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE left_behind (id integer)")
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'headgate' AND state = 'idle'")
        request.META["own"].extend(cursor.fetchone())
    raise ValueError("the transaction of the request is rolled back")

urlpatterns = [path("", view)]
own = []
client = Client(raise_request_exception=False)
from django.core.management import call_command
call_command("headgate", "migrate")
print([client.get("/", own=own).status_code for _ in range(3)], own)
with connection.cursor() as cursor:
    cursor.execute("SELECT to_regclass('left_behind'), count(*) FROM headgate_state")
    print(cursor.fetchone())
"""


def test_limits_in_the_project_database(postgres_server: PostgresServer) -> None:
    """Requests that are rolled back count nevertheless: the store has a connection beside that of the request."""
    command = [sys.executable, "-c", PROJECT, "127.0.0.1", str(postgres_server.port), USER, PASSWORD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    migrated, *rest = done.stdout.splitlines()
    assert rest == ["[500, 500, 429] [1, 1]", "(None, 1)"], done.stderr
    assert migrated.endswith("are there") and PASSWORD not in migrated


@pytest.fixture
def databases(wsgi_site: Site, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that adds a database to the project's."""

    def add(alias: str, **settings: Any) -> None:
        made = connections.configure_settings({"default": {}, alias: settings})[alias]
        monkeypatch.setitem(connections.settings, alias, made)

    return add


def test_where_the_database_is(databases: Any) -> None:
    """Host, port, user, password and what libpq knows of OPTIONS are taken; what Django alone knows is not."""
    options = {"sslmode": "verify-full", "connect_timeout": 9, "isolation_level": 2, "options": "-c search_path=app"}
    name = {"NAME": "shop", "USER": "me & you", "PASSWORD": "p/?#@%:&="}
    databases("shop", ENGINE="django.db.backends.postgresql", HOST="db1,db2", PORT="5432,5433", OPTIONS=options, **name)
    made = parse_url(database_url("shop"))
    assert made.parameters == {
        "dbname": "shop",
        "user": "me & you",
        "password": "p/?#@%:&=",
        "host": "db1,db2",
        "port": "5432,5433",
        "sslmode": "verify-full",
        "options": "-c search_path=app",
        "application_name": "headgate",
    }
    assert made.timeout == made.connect_timeout == 0.08, "the project's connect_timeout is not that of a check"
    assert "p/?#" not in made.safe_url and "%2F" not in made.safe_url
    databases("socket", ENGINE="django.db.backends.postgresql", NAME="shop", HOST="/run/postgresql")
    assert parse_url(database_url("socket")).parameters["host"] == "/run/postgresql"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"DATABASE": "default"}, "the engine 'django.db.backends.sqlite3'; it needs a PostgreSQL"),
    ({"DATABASE": "nowhere"}, "is 'nowhere', and DATABASES has 'default'"),
    ({"DATABASE": True}, "the name of one of DATABASES"),
    ({"DATABASE": "empty"}, "is 'empty', which Django cannot use: .*NAME"),
    ({"DATABASE": "shop", "STORE": "memory://"}, "has both 'STORE' and 'DATABASE'"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=[row[1] for row in WRONG])
def test_mistakes(given: dict[str, Any], says: str, databases: Any) -> None:
    """The check names them, and the middleware does not start with them."""
    databases("empty", ENGINE="django.db.backends.postgresql")
    with override_settings(HEADGATE=given):
        [found] = [message for message in run_checks(tags=["headgate"]) if message.id == "headgate.E002"]
        with pytest.raises(ValueError, match=says) as raised:
            current()
        assert found.msg == f"HEADGATE: {raised.value}"


def test_it_is_no_memory(databases: Any) -> None:
    """The check of a deployment has nothing to say of a database."""
    databases("shop", ENGINE="django.db.backends.postgresql", NAME="shop")
    with override_settings(HEADGATE={"DATABASE": "shop"}):
        assert run_checks(tags=["headgate"], include_deployment_checks=True) == []
