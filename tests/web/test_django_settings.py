"""The setting HEADGATE: read when it is needed, changed by tests, checked; and the commands of manage.py."""

import io
import re
import subprocess
import sys
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.test import override_settings

from headgate.stores.memory import MemoryStore
from headgate.testing import ManualClock
from headgate.web.django.settings import current
from headgate.web.limit import SetupError
from tests.support.servers import Server
from tests.web.django_site.site import Site

OURS = "headgate.web.django.RateLimitMiddleware"
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


def test_override_settings(site: Site) -> None:
    """A test's settings hold from the next request, and are forgotten with the test."""
    site.configure(HEADGATE={"DEFAULT": "1/hour"})
    assert site.statuses("/free/", "/free/") == [200, 429]
    with override_settings(HEADGATE={"DEFAULT": "2/hour", "HEADERS": "ietf"}):
        answer = site.request("/free/")
        assert answer["ratelimit-policy"] == '"default";q=2;w=3600' and "x-ratelimit-limit" not in answer
    with override_settings(HEADGATE={"STORE": MemoryStore()}):
        assert "x-ratelimit-limit" not in site.request("/free/")


@pytest.mark.parametrize("off", [{"HEADGATE_ENABLED": False}, {"HEADGATE": {"ENABLED": False, "DEFAULT": "1/hour"}}])
def test_off(site: Site, off: dict[str, Any]) -> None:
    """Nothing is limited, whatever the door; `request.ratelimit` is None."""
    site.configure(HEADGATE={"DEFAULT": "1/hour"})
    with override_settings(**off):
        for path in ("/plain/", "/async_plain/", "/free/", "/class/methods/", "/api/anon/", "/ninja/anon", "/noted/"):
            assert site.statuses(path, path, path, path) == [200] * 4, path
    assert site.statuses("/plain/", "/plain/", "/plain/") == [200, 200, 429]


def test_clock(site: Site) -> None:
    clock = ManualClock()
    site.configure(HEADGATE={"CLOCK": clock})
    assert site.statuses("/plain/", "/plain/", "/plain/") == [200, 200, 429]
    clock.advance(1800)
    assert site.statuses("/plain/", "/plain/") == [200, 429]


def test_settings_reach_decorators(site: Site) -> None:
    """What a decorator leaves out comes from the settings as they are now."""
    site.configure(HEADGATE={"KEY": "header:X-API-Key", "ALGORITHM": "fixed_window", "NAME": "shop"})
    for key in ("a", "b"):
        assert [site.request("/items/1/", headers={"X-API-Key": key}).status_code for _ in range(3)] == [200, 200, 429]
    [limiter] = [each for each in current().known_limiters() if each.scope == "/items/<int:number>/"]
    assert limiter.rule.kind == "fixed_window" and limiter.rule.name.startswith("shop ")


WRONG: list[tuple[Any, str]] = [
    ({"TRUSTED_PROXYS": []}, "did you mean 'TRUSTED_PROXIES'"),
    ({"default": "5/m"}, "did you mean 'DEFAULT'"),
    ({"XYZZY": 1}, "it knows STORE, DATABASE, DEFAULT"),
    ({"DEFAULT": "5 per minut"}, "unknown period 'minut'"),
    ({"KEY": "adress"}, "key must be 'ip'"),
    ({"STORE": "mongo://x"}, "mongo"),
    ({"HEADERS": "xx"}, "headers must be"),
    ({"TRUSTED_PROXIES": "10.0.0.0/8"}, "trusted_proxies is a list"),
    ({"ON_DENIED": "no.such.function"}, "No module named 'no'"),
    ("redis://localhost", "HEADGATE is a dict"),
    ({"ENABLED": "False"}, r"'ENABLED'] must be True or False, got 'False'"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=[row[1] for row in WRONG])
def test_mistakes(given: Any, says: str, wsgi_site: Site) -> None:
    """The check names them, and the middleware does not start with them."""
    with override_settings(HEADGATE=given):
        found = [
            message for message in run_checks(tags=["headgate"]) if message.id in ("headgate.E001", "headgate.E002")
        ]
        assert len(found) == 1 and says in found[0].msg
        with pytest.raises((ValueError, ImportError), match=re.escape(says)):
            current()


def test_switch_that_is_text(wsgi_site: Site) -> None:
    """The text "False", as the environment has it, is true: an error, before it keeps limits on."""
    with pytest.raises(SetupError, match="HEADGATE_ENABLED must be True or False, got 'False'"):
        wsgi_site.configure(HEADGATE_ENABLED="False")


CHECKS: list[tuple[dict[str, Any], str]] = [
    ({"HEADGATE": {"KEY": "user", "DEFAULT": "5/m"}, "MIDDLEWARE": [OURS, AUTHENTICATION]}, "E005"),
    ({"HEADGATE": {"KEY": ["ip", "user"], "DEFAULT": "5/m"}, "MIDDLEWARE": [OURS]}, "E005"),
    ({"MIDDLEWARE": [OURS, OURS]}, "E004"),
    ({"MIDDLEWARE": []}, "W003"),
    ({"MIDDLEWARE": [OURS, "corsheaders.middleware.CorsMiddleware"]}, "W004"),
    ({"USE_X_FORWARDED_HOST": True}, "W005"),
    ({"SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https")}, "W005"),
    ({"REST_FRAMEWORK": {"NUM_PROXIES": 1}}, "W005"),
    ({"REST_FRAMEWORK": {"DEFAULT_THROTTLE_RATES": {"user": "5/fortnight"}}}, "E003"),
    ({"NINJA_DEFAULT_THROTTLE_RATES": {"auth": "many"}}, "E003"),
    ({"REST_FRAMEWORK": {"DEFAULT_THROTTLE_RATES": ["5/m"]}}, "E003"),
    ({"ROOT_URLCONF": "tests.web.django_site.broken_urls"}, "E006"),
    ({"ROOT_URLCONF": "tests.web.django_site.unseen_urls"}, "W006"),
]


@pytest.mark.parametrize(("changed", "name"), CHECKS, ids=[f"{row[1]} {i}" for i, row in enumerate(CHECKS)])
def test_checks(changed: dict[str, Any], name: str, wsgi_site: Site) -> None:
    with override_settings(**changed):
        assert [message.id for message in run_checks(tags=["headgate"])] == [f"headgate.{name}"]


RIGHT: list[dict[str, Any]] = [
    {},
    {"HEADGATE": {}},
    {"HEADGATE": {}, "MIDDLEWARE": []},
    {"HEADGATE": {"KEY": "user", "DEFAULT": "5/m"}, "MIDDLEWARE": [AUTHENTICATION, OURS]},
    {"HEADGATE": {"TRUSTED_PROXIES": ["10.0.0.0/8"]}, "USE_X_FORWARDED_HOST": True},
    {"MIDDLEWARE": ["corsheaders.middleware.CorsMiddleware", OURS]},
    {"REST_FRAMEWORK": {"DEFAULT_THROTTLE_RATES": {"own": "twice in 20 s"}}},  # `OwnSpelling` reads it
]


@pytest.mark.parametrize("changed", RIGHT, ids=str)
def test_checks_are_silent(changed: dict[str, Any], wsgi_site: Site) -> None:
    with override_settings(**changed):
        assert run_checks(tags=["headgate"]) == []


def test_memory_with_several_workers(wsgi_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning where several workers can be seen, and in any case before a deployment."""
    assert "headgate.W002" in [each.id for each in run_checks(tags=["headgate"], include_deployment_checks=True)]
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    found = run_checks(tags=["headgate"])
    assert [each.id for each in found] == ["headgate.W001"] and "redis://" in (found[0].hint or "")
    wsgi_site.configure(HEADGATE={"STORE": "redis://localhost:1"})
    assert run_checks(tags=["headgate"], include_deployment_checks=True) == []


# --------------------------------------------------------------------------------------------------- manage.py headgate


def manage(*arguments: str) -> str:
    out = io.StringIO()
    call_command("headgate", *arguments, stdout=out)
    return out.getvalue()


def line(text: str, begins: str) -> str:
    [found] = [each for each in text.splitlines() if each.startswith(begins + " ")]
    return found


def test_rules(wsgi_site: Site) -> None:
    """All limits: the default's, the decorators' of functions, classes and methods, and the throttles'."""
    shown = manage("rules")
    assert "100/hour by address" in line(shown, "everything else")
    assert "2/hour by address" in line(shown, "/items/<int:number>/")
    assert "2/hour by address" in line(shown, "/class/direct/")
    assert "2/hour by address" in line(shown, "POST /class/methods/")
    assert "tier by address" in line(shown, "/tiered/")
    assert "1/hour by address, post:username" in line(shown, "/by/both/")
    assert "300s" in line(shown, "/api/uploads/") or "3/5m" in line(shown, "/api/uploads/")
    assert "3/hour" in line(shown, "/ninja/auth")
    assert "1/hour by address" in line(shown, "create /api/chooses/$")
    assert shown.count("\n/several/ ") == 3


def test_show_and_reset(site: Site, redis_server: Server) -> None:
    """What a client has left of each limit, as a process sees it that has served nobody; and a fresh start for it."""
    site.configure(HEADGATE={"STORE": redis_server.url})
    site.log_in(7)
    site.statuses("/plain/", "/plain/", "/free/", "/class/methods/", "/api/user/", "/ninja/user", "/by_user/")
    site.request("/by/post/", "POST", data={"username": "ada"})
    shown = {}
    for key in ("192.0.2.1", "user:7", "ada"):
        site.configure(HEADGATE={"STORE": redis_server.url})  # as in a new process
        shown[key] = manage("show", key)
    assert "0 of 2/hour by address, all in 3" in line(shown["192.0.2.1"], "/plain/")
    assert "99 of 100/hour" in line(shown["192.0.2.1"], "default")
    assert "GET /class/methods/                      1 of 2/hour by address" in shown["192.0.2.1"]
    assert "1 of 2/hour by user" in line(shown["user:7"], "/by_user/")
    assert "2 of 4/hour" in shown["user:7"] and "2 of 2/hour by address\n" in shown["user:7"]
    assert "0 of 1/hour by post:username" in line(shown["ada"], "by post")
    assert site.statuses("/plain/", "/by_user/") == [429, 200]
    for key in shown:
        assert manage("reset", key) == f"{key} is as if never seen\n"
    assert site.statuses("/plain/", "/by_user/", "/by_user/") == [200, 200, 200]
    assert site.request("/by/post/", "POST", data={"username": "ada"}).status_code == 200


@pytest.mark.parametrize("key", ["", " \t", "\0", "\ud800", "user:", "{}", "x" * 5000, "[::1", "1.2.3.4:80, ::1"])
def test_odd_keys(key: str, wsgi_site: Site, redis_server: Server) -> None:
    """A key that is none is an error in words; others are those of a client that nobody has seen."""
    wsgi_site.configure(HEADGATE={"STORE": redis_server.url})
    if not key.strip():
        for action in ("show", "reset"):
            with pytest.raises(CommandError, match=f"{action} takes the key of a client"):
                manage(action, key)
    else:
        assert " of " in manage("show", key) and "as if never seen" in manage("reset", key)


def test_commands_and_memory(wsgi_site: Site) -> None:
    """Another process cannot see a server's memory: that is said."""
    for arguments in (["show", "192.0.2.1"], ["reset", "192.0.2.1"]):
        with pytest.raises(CommandError, match="memory://"):
            manage(*arguments)


IMPORTS = """
import sys
sys.modules[{missing!r}] = None
{before}
try:
    import {module}
except ImportError as error:
    print(error)
"""
SETTINGS = "from django.conf import settings; settings.configure()"


@pytest.mark.parametrize(
    ("missing", "module", "extra"),
    [
        ("django", "headgate.web.django", "headgate[django]"),
        ("rest_framework", "headgate.web.django.rest_framework", "headgate[rest-framework]"),
        ("ninja", "headgate.web.django.ninja", "headgate[ninja]"),
    ],
)
def test_missing_framework(missing: str, module: str, extra: str) -> None:
    """The error names the extra to install."""
    before = "" if missing == "django" else SETTINGS
    code = IMPORTS.format(missing=missing, module=module, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert extra in done.stdout, done.stderr


def test_import_needs_no_settings() -> None:
    """The package and its public names can be imported before Django is configured."""
    code = "from headgate.web.django import RateLimitMiddleware, ratelimit, rate_limited; ratelimit(rate='5/m')(print)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=50, check=True)


def test_setup_error_is_a_value_error() -> None:
    assert issubclass(SetupError, ValueError)
