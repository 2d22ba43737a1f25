"""Throttles for django-ninja: its names and settings; exact, and without state that requests would share."""

import tests.web.django_site  # noqa: F401 # isort: skip # it configures Django, which the next ones need

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import Client, RequestFactory, override_settings
from ninja.throttling import BaseThrottle

from headgate.web.django.ninja import AnonRateThrottle, AuthRateThrottle, UserRateThrottle
from headgate.web.django.settings import current
from tests.support.forged import FORGED
from tests.support.servers import Server
from tests.web.django_site.site import Site


def test_refuses_and_tells(site: Site) -> None:
    first, _, third = (site.request("/ninja/anon") for _ in range(3))
    assert [first["x-ratelimit-limit"], first["x-ratelimit-remaining"]] == ["2", "1"]
    assert third.status_code == 429 and third["retry-after"] == "1800"
    assert third.json() == {"detail": "Too many requests."}


@pytest.mark.parametrize("path", ["/ninja/contested", "/ninja/async_contested"])
def test_exact_without_middleware(site: Site, path: str, redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20, also of async operations."""
    site.configure(HEADGATE={"STORE": redis_server.url}, MIDDLEWARE=[])
    assert site.at_once(path, 60) == [200] * 20 + [429] * 40


def test_who_is_throttled(site: Site) -> None:
    for token in ("a", "b"):
        seen = [site.request("/ninja/auth", headers={"x-token": token}).status_code for _ in range(4)]
        assert seen == [200, 200, 200, 429]
    assert site.request("/ninja/auth").status_code == 401
    site.log_in(7)
    assert [site.request("/ninja/user", peer=f"192.0.2.{i}").status_code for i in range(1, 6)] == [200] * 4 + [429]


def test_all_or_nothing(site: Site) -> None:
    """A request that one throttle refuses is counted by none of them; the longest wait is told."""
    assert site.statuses(*["/ninja/two"] * 4) == [200, 200, 429, 429]
    left = {
        str(limiter.rule.quotas[0]): limiter.blocking.peek("throttle_anon_192.0.2.1", 0).remaining
        for limiter in current().known_limiters()
        if limiter.scope == "throttle anon"
    }
    assert left == {"3/5m": 1, "2/day": 0}
    assert site.request("/ninja/two")["retry-after"] == "43200"


def test_throttles_keep_no_state(wsgi_site: Site) -> None:
    """One throttle serves many threads; each hears its own wait."""
    throttle = AnonRateThrottle("1/hour")
    before = dict(vars(throttle))

    def ask(number: int) -> list[float | None]:
        waits = []
        for _ in range(20):
            allowed = throttle.allow_request(RequestFactory().get("/", REMOTE_ADDR=f"192.0.2.{number}"))
            waits.append(None if allowed else throttle.wait())
        return waits

    with ThreadPoolExecutor(8) as threads:
        for waits in threads.map(ask, range(1, 9)):
            assert waits[0] is None and all(wait is not None and 3590 < wait <= 3600 for wait in waits[1:])
    assert vars(throttle) == before


@pytest.mark.parametrize("path", ["/ninja/decorated", "/ninja/async_decorated"])
def test_decorator(site: Site, path: str) -> None:
    """`ratelimit` on an operation keeps its parameters; the answer has the headers."""
    first = site.request(path, data={"name": "ada"})
    assert first.json() == {"hello": "ada"} and first["x-ratelimit-remaining"] == "1"
    refused = [site.request(path) for _ in range(2)][1]
    assert refused.status_code == 429 and refused["content-type"] == "application/problem+json"


def test_default_limit(site: Site) -> None:
    """An operation with a throttle does not meet the default; its neighbours do."""
    site.configure(HEADGATE={"DEFAULT": "1/hour"})
    assert site.statuses("/ninja/anon", "/ninja/two", "/ninja/decorated") == [200] * 3
    assert site.statuses("/ninja/free", "/ninja/free", "/ninja/openapi.json") == [200, 429, 429]
    assert site.request("/ninja/anon", "POST").status_code == 429  # 405, which has no limit of its own


def test_forged_addresses(site: Site) -> None:
    assert site.statuses(*["/ninja/anon"] * 2) == [200, 200]
    for headers in FORGED:
        assert site.request("/ninja/anon", headers=headers).status_code == 429, headers


def test_settings(wsgi_site: Site) -> None:
    """Rates are read for each request, so that a test can change them; those in the code are checked at once."""
    with override_settings(NINJA_DEFAULT_THROTTLE_RATES={"anon": "1/hour", "auth": None}):
        assert wsgi_site.statuses("/ninja/anon", "/ninja/anon") == [200, 429]
        many = [Client().get("/ninja/auth", headers={"x-token": "a"}).status_code for _ in range(9)]
        assert many == [200] * 9
    with pytest.raises(ImproperlyConfigured, match="unknown period 'month'"):
        AuthRateThrottle("5/month")
    assert isinstance(UserRateThrottle(), BaseThrottle)
