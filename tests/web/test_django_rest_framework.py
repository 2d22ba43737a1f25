"""Throttles for Django REST framework: its names, settings and methods; exact, and all or nothing."""

import tests.web.django_site  # noqa: F401 # isort: skip # it configures Django, which the next ones need

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from rest_framework.settings import api_settings
from rest_framework.throttling import SimpleRateThrottle as Original

from headgate.testing import ManualClock
from headgate.web.django.rest_framework import AnonRateThrottle, ScopedRateThrottle, UserRateThrottle
from headgate.web.django.settings import current
from tests.support.forged import FORGED
from tests.support.servers import Server
from tests.web.django_site import api
from tests.web.django_site.site import Site


def left(site: Site, ident: str = "192.0.2.1") -> dict[str, int]:
    """What each throttle has left, by its quotas."""
    return {
        ", ".join(map(str, limiter.rule.quotas)): limiter.blocking.peek(key, 0).remaining
        for limiter in current().known_limiters()
        for key in [f"throttle_{limiter.scope.removeprefix('throttle ')}_{ident}"]
        if limiter.scope.startswith("throttle ")
    }


def test_refuses_and_tells(site: Site) -> None:
    """The body is REST framework's, the headers are those of every limit."""
    first, _, third = (site.request("/api/anon/") for _ in range(3))
    assert [first["x-ratelimit-limit"], first["x-ratelimit-remaining"]] == ["2", "1"]
    assert third.status_code == 429 and third["retry-after"] == "1800" and third["x-ratelimit-remaining"] == "0"
    assert third.json() == {"detail": "Request was throttled. Expected available in 1800 seconds."}
    assert third["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/api/contested/", "/api/contested_atomic/"])
def test_exact_without_middleware(site: Site, path: str, redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20."""
    site.configure(HEADGATE={"STORE": redis_server.url}, MIDDLEWARE=[])
    assert site.at_once(path, 60) == [200] * 20 + [429] * 40


def test_who_is_throttled(site: Site) -> None:
    """The anonymous throttle leaves users alone; the user's throttle knows them from everywhere."""
    site.log_in(7)
    assert site.statuses(*["/api/anon/"] * 3) == [200] * 3
    assert [site.request("/api/user/", peer=f"192.0.2.{i}").status_code for i in range(1, 6)] == [200] * 4 + [429]
    site.log_out()
    assert site.statuses(*["/api/anon/"] * 3) == [200, 200, 429]
    assert site.statuses(*["/api/user/"] * 5) == [200] * 4 + [429]


def test_rates(site: Site) -> None:
    """Multiples, bursts, lists, costs, a project's own spelling, and a view without a scope."""
    clock = ManualClock()
    site.configure(HEADGATE={"CLOCK": clock})
    assert site.statuses(*["/api/uploads/"] * 4) == [200, 200, 200, 429]
    clock.advance(100)  # a third of five minutes
    assert site.statuses(*["/api/uploads/"] * 2) == [200, 429]
    assert site.statuses(*["/api/burst/"] * 6) == [200] * 5 + [429]
    assert site.statuses(*["/api/costly/"] * 3) == [200, 200, 429]
    assert site.statuses(*["/api/own_spelling/"] * 3) == [200, 200, 429]
    clock.advance(20)
    assert site.statuses("/api/own_spelling/") == [200]
    assert site.statuses(*["/api/unscoped/"] * 9) == [200] * 9
    assert site.statuses(*["/api/function/"] * 3) == [200, 200, 429]


def test_key_none_skips(site: Site) -> None:
    assert site.statuses(*["/api/by_name/"] * 3) == [200] * 3
    assert site.statuses("/api/by_name/?name=a", "/api/by_name/?name=a", "/api/by_name/?name=b") == [200, 429, 200]


@pytest.mark.parametrize("path", ["/api/two/", "/api/two_turned/", "/api/two_atomic/"])
def test_all_or_nothing(site: Site, path: str) -> None:
    """A request that one throttle refuses is counted by none of them; the longest wait is told."""
    assert site.statuses(*[path] * 5) == [200, 200, 429, 429, 429]
    assert left(site) == {"3/day": 1, "2/day": 0}
    assert site.request(path)["retry-after"] == "43200"


@pytest.mark.parametrize("path", ["/api/two/", "/api/two_atomic/"])
def test_cost_above_the_capacity(site: Site, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and no wait is named that would be long enough."""
    for throttle in (api.Twice, api.Thrice):
        monkeypatch.setattr(throttle, "cost", 9)
    answer = site.request(path)
    assert answer.status_code == 429 and "retry-after" not in answer.headers
    assert answer.json() == {"detail": "Request was throttled."}


@pytest.mark.parametrize("path", ["/api/fails/", "/api/fails_by_method/"])
def test_count_if(site: Site, path: str) -> None:
    """A function or a method of the class: only failures count, and every request is one of the same limit."""
    assert site.statuses(*[path] * 3) == [200] * 3
    assert len(current()._throttles) == 1  # and not one for each request
    assert [site.request(path, "POST").status_code for _ in range(2)] == [405, 429]


COSTS: list[Any] = [-1, 1.5, True, "2", None, lambda self: 1]


@pytest.mark.parametrize("cost", COSTS)
def test_costs_that_are_none(cost: Any, wsgi_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost that is no count of permits is an error, and not a request without a limit."""
    monkeypatch.setattr(api.Costly, "cost", cost)
    with pytest.raises(ImproperlyConfigured, match=r"Costly\.cost must be a whole number of at least 0, got"):
        api.Costly().ask("5/hour", "a")


@pytest.mark.parametrize("key", ["", " ", b"", [], object(), False])
def test_keys_that_name_nobody(key: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"get_cache_key of ByName gave .*or None for requests"):
        api.ByName().ask("5/hour", key)


@pytest.mark.parametrize("found", [(0, 60), ("2", "60"), (2, 0)])
def test_own_spelling_of_what_is_no_rate(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the throttle."""
    monkeypatch.setattr(api.OwnSpelling, "parse_rate", lambda self, rate: found)
    with pytest.raises(ImproperlyConfigured, match=r"the rate of OwnSpelling \(scope 'own'\)"):
        api.OwnSpelling().ask("x", "a")


@pytest.mark.parametrize("path", ["/api/closed/", "/api/closed_atomic/"])
def test_other_throttles(site: Site, path: str) -> None:
    """What a throttle of another kind refuses is not counted either, where the view takes all in one step."""
    assert site.request(path, data={"closed": "1"}).status_code == 429
    taken = 0 if "atomic" in path else 1  # REST framework asks each by itself, and this one comes first
    assert left(site)["2/day"] == 2 - taken
    if "atomic" in path:
        assert site.request(path, data={"closed": "1"})["retry-after"] == "7"
        assert site.statuses(path + "?staff=1", path + "?staff=1", path + "?staff=1") == [200, 200, 429]
        assert left(site)["2/day"] == 0


def test_overridden_allow_request(site: Site) -> None:
    """A subclass that decides for itself is asked, not passed over; what was taken before goes back."""
    path = "/api/closed_atomic/"
    assert site.statuses(path, path) == [200, 429]
    assert left(site) == {"2/day": 1, "1/hour": 0}


def test_one_step(site: Site, redis_server: Server) -> None:
    """All throttles of a view are one round trip where it asks for that."""
    site.configure(HEADGATE={"STORE": redis_server.url})
    site.request("/api/two_atomic/")
    calls = redis_server.calls("evalsha")
    assert site.statuses("/api/two_atomic/", "/api/two_atomic/") == [200, 429]
    assert redis_server.calls("evalsha") - calls == 2


@pytest.mark.parametrize("path", ["/api/anon/", "/api/two_atomic/"])
def test_headers_without_middleware(site: Site, path: str) -> None:
    """Only a view that takes all in one step puts the headers on its answers itself."""
    site.configure(MIDDLEWARE=[])
    seen = [site.request(path) for _ in range(3)]
    assert [one.status_code for one in seen] == [200, 200, 429] and "retry-after" in seen[2]
    assert all(("x-ratelimit-remaining" in one) is ("atomic" in path) for one in seen)


def test_default_limit(site: Site) -> None:
    """A view with a throttle does not meet the default, also where it chooses the throttle itself."""
    site.configure(HEADGATE={"DEFAULT": "3/hour"})
    assert site.statuses("/api/anon/", "/api/unscoped/", "/api/user/", "/api/chooses/") == [200] * 4
    assert site.request("/api/chooses/", "POST").status_code == 201
    assert site.request("/api/chooses/5/")["x-ratelimit-remaining"] == "2"  # this action has no throttle
    assert site.request("/api/free/")["x-ratelimit-remaining"] == "1"
    assert site.request("/api/chooses/", "POST").status_code == 429
    assert site.statuses("/api/free/", "/api/free/", "/api/chooses/5/") == [200, 429, 429]
    assert site.statuses("/api/chooses/", "/api/chooses/") == [200, 429]


def test_ratelimit_knows_the_api_user(site: Site) -> None:
    """The decorator inside of REST framework sees the user that its authentication found."""
    for number in ("1", "2"):
        assert site.statuses(*["/api/decorated/"] * 3, headers={"X-User": number}) == [200, 200, 429]


def test_key_function_gets_the_api_request(site: Site) -> None:
    assert site.statuses(*[f"/api/by_query/?name={name}" for name in "aab"]) == [200, 429, 200]


def test_forged_addresses(site: Site) -> None:
    assert site.statuses(*["/api/anon/"] * 2) == [200, 200]
    for headers in FORGED:
        assert site.request("/api/anon/", headers=headers).status_code == 429, headers


PROXIES: list[tuple[int | None, str, str, str]] = [
    (None, "192.0.2.1", "1.1.1.1", "192.0.2.1"),  # not a proxy of ours
    (1, "192.0.2.1", "1.1.1.1", "192.0.2.1"),
    (2, "192.0.2.1", "1.1.1.1, 2.2.2.2", "192.0.2.1"),
    (None, "10.0.0.1", "1.1.1.1, 2.2.2.2", "2.2.2.2"),
    (None, "10.0.0.1", "1.1.1.1, 10.0.0.2", "1.1.1.1"),
    (0, "10.0.0.1", "1.1.1.1", "10.0.0.1"),
    (1, "10.0.0.1", "1.1.1.1, 10.0.0.2", "10.0.0.2"),  # at most one proxy is believed
    (2, "10.0.0.1", "1.1.1.1, 10.0.0.2", "1.1.1.1"),
    (5, "10.0.0.1", "1.1.1.1, 2.2.2.2", "2.2.2.2"),  # and never one that is not trusted
    (1, "10.0.0.1", "nonsense", "10.0.0.1"),
    (1, "10.0.0.1", "2001:db8::1", "2001:db8::/64"),
]


@pytest.mark.parametrize(("number", "peer", "forwarded", "ident"), PROXIES)
def test_proxies(number: int | None, peer: str, forwarded: str, ident: str, wsgi_site: Site) -> None:
    """NUM_PROXIES says how many proxies there are at most; which ones are believed, TRUSTED_PROXIES says."""
    rates = {"anon": "5/hour"}
    wsgi_site.configure(
        HEADGATE={"TRUSTED_PROXIES": ["10.0.0.0/8"]},
        REST_FRAMEWORK={"NUM_PROXIES": number, "DEFAULT_THROTTLE_RATES": rates},
    )
    wsgi_site.request("/api/anon/", peer=peer, headers={"X-Forwarded-For": forwarded})
    assert left(wsgi_site, ident) == {"5/hour": 4}


def test_override_settings(site: Site) -> None:
    """Rates are read for each request."""
    site.configure(REST_FRAMEWORK={"DEFAULT_THROTTLE_RATES": {"anon": "1/hour", "user": None}})
    assert site.statuses("/api/anon/", "/api/anon/") == [200, 429]
    assert site.statuses(*["/api/user/"] * 9) == [200] * 9


def test_mistakes(wsgi_site: Site) -> None:
    """A scope without a rate and a rate that cannot be read: the error says what there is, and whose it is."""
    wsgi_site.configure(REST_FRAMEWORK={"DEFAULT_THROTTLE_RATES": {"anon": "5/month", "user": "5/h"}})
    with pytest.raises(ImproperlyConfigured, match=r"AnonRateThrottle \(scope 'anon'\): unknown period 'month'"):
        AnonRateThrottle()
    with pytest.raises(ImproperlyConfigured, match="'burst' scope; DEFAULT_THROTTLE_RATES has anon, user"):
        api.Burst()


def test_interface() -> None:
    """They are throttles of REST framework, with its attributes."""
    throttle: Any = UserRateThrottle()
    assert isinstance(throttle, Original) and throttle.scope == "user" and throttle.rate == "4/hour"
    assert (throttle.num_requests, throttle.duration) == (4, 3600)
    assert throttle.wait() is None
    assert ScopedRateThrottle().scope_attr == "throttle_scope"
    assert api_settings.DEFAULT_THROTTLE_RATES["uploads"] == "3/5m"
