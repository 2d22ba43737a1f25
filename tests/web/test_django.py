"""Django: limits of views and the default limit, under WSGI and under ASGI."""

import asyncio
import logging
from typing import Any

import pytest
from django.test import RequestFactory

from headgate.testing import ManualClock
from headgate.web.django import is_ratelimited, ratelimit
from headgate.web.django.settings import current
from headgate.web.limit import SetupError
from tests.support.forged import FORGED
from tests.support.servers import Server
from tests.web.django_site import views
from tests.web.django_site.site import Site, body

NO_MIDDLEWARE: dict[str, Any] = {"MIDDLEWARE": []}


@pytest.mark.parametrize("middleware", [True, False], ids=["middleware", "decorator alone"])
@pytest.mark.parametrize("path", ["/plain/", "/async_plain/"])
def test_refuses_and_tells(site: Site, path: str, middleware: bool) -> None:
    """The view sees the decision, its answers carry it, and the one too many is a problem that says when."""
    site.configure(**({} if middleware else NO_MIDDLEWARE))
    first, second, third = (site.request(path) for _ in range(3))
    assert [body(first), body(second)] == ["1", "0"]
    assert [first["x-ratelimit-limit"], first["x-ratelimit-remaining"]] == ["2", "1"]
    assert third.status_code == 429 and third["content-type"] == "application/problem+json"
    assert third["retry-after"] == "1800" and third["cache-control"] == "no-store"
    assert third["x-ratelimit-remaining"] == "0" and third.json()["retryAfterSeconds"] == 1800
    assert "2/hour" in third.json()["detail"]
    assert site.request(path, peer="192.0.2.2").status_code == 200


@pytest.mark.parametrize("path", ["/contested/", "/async_contested/", "/ninja/contested", "/api/contested/"])
def test_exact(site: Site, path: str, redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20."""
    site.configure(HEADGATE={"STORE": redis_server.url})
    assert site.at_once(path, 60) == [200] * 20 + [429] * 40


@pytest.mark.parametrize("path", ["/free/", "/async_free/"])
def test_exact_default(site: Site, path: str, redis_server: Server) -> None:
    site.configure(HEADGATE={"STORE": redis_server.url, "DEFAULT": "20/hour"})
    assert site.at_once(path, 60) == [200] * 20 + [429] * 40


def test_connections(wsgi_site: Site, redis_server: Server) -> None:
    """An async view under WSGI has a new event loop for each request, and needs no new connection for that."""
    wsgi_site.configure(HEADGATE={"STORE": redis_server.url})
    wsgi_site.request("/async_contested/")
    with redis_server.client() as client:
        before = client.info("stats")["total_connections_received"]
        assert wsgi_site.statuses(*["/async_contested/"] * 9) == [200] * 9
        assert client.info("stats")["total_connections_received"] == before


def test_one_decision(site: Site, redis_server: Server) -> None:
    """All decorators of a view are one decision: one round trip, and nothing is taken by a refusal."""
    site.configure(HEADGATE={"STORE": redis_server.url})
    site.request("/several/")
    calls = redis_server.calls("evalsha")
    assert site.statuses("/several/", "/several/", "/several/") == [200, 200, 429]
    assert redis_server.calls("evalsha") - calls == 3
    left = {
        tuple(quota.limit for quota in limiter.rule.quotas): limiter.blocking.peek("192.0.2.1", 0).remaining
        for limiter in current().known_limiters()
        if limiter.scope in ("/several/", "several")
    }
    assert left == {(3,): 0, (5, 10): 2, (9,): 6}


def test_default(site: Site) -> None:
    """One allowance for all that has no limit of its own; limited and exempt views do not meet it."""
    site.configure(HEADGATE={"DEFAULT": "3/hour"})
    assert (
        site.statuses("/plain/", "/health/", "/class/exempt/", "/by/get/?q=1", "/api/anon/", "/ninja/anon") == [200] * 6
    )
    assert (
        site.statuses("/hidden/", "/dispatcher/", "/class/methods/", "/api/decorated/", "/ninja/decorated") == [200] * 5
    )
    assert site.statuses("/no/such/page/", "/class/decorated/x/") == [404, 404]
    assert site.request("/class/methods/", "PUT")["x-ratelimit-remaining"] == "0"
    assert site.statuses("/free/", "/no/such/page/", "/async_free/", "/api/free/", "/ninja/free") == [429] * 5
    assert site.request("/class/direct/", "POST").status_code == 405  # the limit of its own is for all its methods
    assert site.request("/class/async_methods/", "POST").status_code == 429
    assert site.statuses("/plain/", "/health/", "/hidden/") == [200, 200, 200]
    assert site.statuses("/class/exempt/", "/class/like_exempt/") == [200, 429]


def test_default_counts_once_what_hides_its_limits(site: Site) -> None:
    """A view whose limits cannot be seen before it runs gives back what the default took."""
    site.configure(HEADGATE={"DEFAULT": "2/hour"})
    assert site.statuses("/dispatcher/", "/dispatcher/", "/dispatcher/") == [200, 200, 429]
    assert site.request("/free/")["x-ratelimit-remaining"] == "1"


def test_order_of_middleware(site: Site) -> None:
    """A refusal by address costs no middleware that stands behind; an answer of another one is counted, too."""
    chain = ["headgate.web.django.RateLimitMiddleware", "tests.web.django_site.middleware.Closed"]
    site.configure(MIDDLEWARE=chain, HEADGATE={"DEFAULT": "1/hour"})
    assert site.statuses("/plain/", "/free/", "/plain/") == [503, 429, 429]
    first = site.request("/plain/", peer="192.0.2.9")
    assert first.status_code == 503 and first["x-ratelimit-remaining"] == "0"
    site.configure(MIDDLEWARE=chain[::-1], HEADGATE={"DEFAULT": "1/hour"})
    assert site.statuses("/free/", "/free/") == [503, 503]


def test_twice_in_middleware(site: Site) -> None:
    """A request is counted once, whatever MIDDLEWARE says."""
    site.configure(MIDDLEWARE=["headgate.web.django.RateLimitMiddleware"] * 2, HEADGATE={"DEFAULT": "2/hour"})
    assert site.statuses("/free/", "/free/", "/free/") == [200, 200, 429]


def test_scope_is_the_route(site: Site) -> None:
    """Paths of one route share a limit; the same view on another route has another."""
    assert site.statuses("/items/1/", "/items/2/", "/items/3/") == [200, 200, 429]
    assert site.statuses("/v1/items/1/", "/v1/items/2/", "/v1/items/3/") == [200, 200, 429]
    assert site.statuses("/old/1/", "/old/2/", "/old/3/") == [200, 200, 429]


def test_languages_share_a_limit(site: Site) -> None:
    """The language of i18n_patterns makes no second allowance; before LocaleMiddleware as after it."""
    locale, ours = "django.middleware.locale.LocaleMiddleware", "headgate.web.django.RateLimitMiddleware"
    for chain in ([locale, ours], [ours, locale]):
        site.configure(MIDDLEWARE=chain, HEADGATE={"DEFAULT": "1/hour"})
        assert site.statuses("/fr/translated/", "/nowhere/") == [404, 429]
        assert site.statuses("/en/translated/", "/de/translated/", "/en/translated/") == [200, 200, 429]


@pytest.mark.parametrize("name", ["decorated", "direct", "async_direct", "methods", "async_methods"])
def test_class_views(site: Site, name: str) -> None:
    path = f"/class/{name}/"
    first = site.request(path)
    assert first.status_code == 200 and first["x-ratelimit-remaining"] == "1"
    assert site.statuses(path, path) == [200, 429]


def test_methods_of_a_class_view(site: Site) -> None:
    """Each method of a class view has its own allowance, HEAD that of GET."""
    assert [site.request("/class/methods/", method).status_code for method in ("GET", "HEAD", "GET")] == [200, 200, 429]
    assert [site.request("/class/methods/", "POST").status_code for _ in range(3)] == [200, 200, 429]
    assert site.statuses("/class/decorated/", "/class/decorated/") == [200, 200]
    assert site.request("/class/decorated/", "POST").status_code == 429


def test_forged_addresses(site: Site) -> None:
    """Forwarded headers of a peer that is not trusted change nothing; of one that is, the last untrusted hop counts."""
    assert site.statuses("/plain/", "/plain/") == [200, 200]
    for headers in FORGED:
        assert site.request("/plain/", headers=headers).status_code == 429, headers
    site.configure(HEADGATE={"TRUSTED_PROXIES": ["10.0.0.0/8"]})
    through: dict[str, Any] = {"peer": "10.0.0.1", "headers": {"X-Forwarded-For": "1.2.3.4, 192.0.2.7, 10.0.0.2"}}
    assert [site.request("/plain/", **through).status_code for _ in range(3)] == [200, 200, 429]
    through["headers"] = {"X-Forwarded-For": "5.6.7.8, 192.0.2.7"}
    assert site.request("/plain/", **through).status_code == 429
    through["headers"] = {"X-Forwarded-For": "192.0.2.8"}
    assert site.request("/plain/", **through).status_code == 200


@pytest.mark.parametrize("path", ["/by_user/", "/async_by_user/"])
def test_by_user(site: Site, path: str) -> None:
    """A user has one allowance from everywhere; a client that is not logged in has that of its address."""
    for number in (1, 2):
        site.log_in(number)
        assert [site.request(path, peer=f"192.0.2.{peer}").status_code for peer in (1, 2, 3)] == [200, 200, 429]
    site.log_out()
    assert site.statuses(path, path, path) == [200, 200, 429]
    assert site.request(path, peer="192.0.2.2").status_code == 200


def test_user_before_authentication(site: Site) -> None:
    """The default cannot know the user before AuthenticationMiddleware has run: that is said, not guessed."""
    chain = ["headgate.web.django.RateLimitMiddleware", "django.contrib.sessions.middleware.SessionMiddleware"]
    site.configure(MIDDLEWARE=chain, HEADGATE={"KEY": "user"})
    site.client.raise_request_exception = True
    with pytest.raises(SetupError, match="after AuthenticationMiddleware"):
        site.request("/free/")


KEYED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/by/header/", {"headers": {"X-API-Key": "a"}}, {"headers": {"X-API-Key": "b"}}),
    ("/by/get/", {"data": {"q": "a"}}, {"data": {"q": "b"}}),
    ("/by/post/", {"method": "POST", "data": {"username": "a"}}, {"method": "POST", "data": {"username": "b"}}),
    ("/by/dotted/", {"data": {"tenant": "a"}}, {"data": {"tenant": "b"}}),
    ("/by/function/", {"data": {"tenant": "a"}}, {"data": {"tenant": "b"}}),
    ("/by_async_key/", {"data": {"tenant": "a"}}, {"data": {"tenant": "b"}}),
]


@pytest.mark.parametrize(("path", "one", "other"), KEYED, ids=[row[0] for row in KEYED])
def test_keys(site: Site, path: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert [site.request(path, peer=f"192.0.2.{peer}", **one).status_code for peer in (1, 2)] == [200, 429]
    assert site.request(path, **other).status_code == 200


def test_keys_of_clients_without_one(site: Site) -> None:
    """A client that does not send the header or the field is known by its address: no bucket for all of them."""
    for path in ("/by/header/", "/by/get/", "/by/post/"):
        assert [site.request(path, peer=f"192.0.2.{peer}").status_code for peer in (1, 1, 2)] == [200, 429, 200]


def test_several_subjects(site: Site) -> None:
    """Address and name are taken together or not at all."""
    ask = [("192.0.2.1", "a"), ("192.0.2.1", "b"), ("192.0.2.2", "a"), ("192.0.2.2", "b")]
    seen = [site.request("/by/both/", "POST", peer=peer, data={"username": name}).status_code for peer, name in ask]
    assert seen == [200, 429, 429, 200]


def test_key_that_gives_nothing(site: Site) -> None:
    """It is an error of the application, never a bucket for all clients."""
    site.client.raise_request_exception = True
    with pytest.raises(SetupError, match="nothing returned None"):
        site.request("/keyless/")


def test_key_functions_of_one_name(wsgi_site: Site) -> None:
    """They are numbered in the order of the decorators, which is the same in every process: not that of requests."""
    made = [ratelimit(key=lambda group, request: 1, rate="3/h"), ratelimit(key=lambda group, request: 2, rate="3/h")]
    second, first = (current().of(each).subjects[0].name for each in reversed(made))
    assert second == f"{first.partition('#')[0]}#{int(first.partition('#')[2] or 1) + 1}"


def test_tiers(site: Site) -> None:
    """A function gives the rate: text, a pair, or None for no limit."""
    for tier, admitted in (("free", 1), ("paid", 2), ("staff", 4)):
        seen = [site.request("/tiered/", data={"tier": tier}).status_code for _ in range(4)]
        assert seen == [200] * admitted + [429] * (4 - admitted), tier


def test_method(site: Site) -> None:
    assert [site.request("/writes/", method).status_code for method in ("GET", "POST", "PUT", "GET")] == [
        *(200, 200, 429, 200)
    ]


def test_request_without_a_limit(site: Site) -> None:
    """The attributes are there in any case."""
    site.configure(HEADGATE={"DEFAULT": None})
    assert body(site.request("/states/")) == "False None"


def test_preflight_is_free(site: Site) -> None:
    headers = {"Access-Control-Request-Method": "POST", "Origin": "https://example.com"}
    for _ in range(4):
        assert site.request("/plain/", "OPTIONS", headers=headers).status_code == 200
    assert site.request("/plain/")["x-ratelimit-remaining"] == "1"


def test_block_false(site: Site) -> None:
    """The view runs and sees what was decided; each limit that could count the request has counted it."""
    seen = [site.request("/noted/") for _ in range(4)]
    assert [body(one) for one in seen[:3]] == ["False True", "True False", "True False"]
    assert [one.status_code for one in seen] == [200, 200, 200, 429]
    assert [one["x-ratelimit-limit"] for one in seen] == ["1", "1", "1", "3"]
    left = {
        limiter.rule.capacity: limiter.blocking.peek("192.0.2.1", 0).remaining for limiter in current().known_limiters()
    }
    assert left == {100: 100, 1: 0, 2: 0, 3: 0}


@pytest.mark.parametrize("path", ["/by_hand/", "/async_by_hand/"])
def test_by_hand(site: Site, path: str) -> None:
    """A view asks a limit itself: it looks, or counts; the request goes on."""

    def usage(count: int, left: int = 0) -> str:
        return f"{bool(left)} " + str({"count": count, "limit": 2, "should_limit": count == 2, "time_left": left})

    def ask(*, count: bool = False, method: str = "POST") -> str:
        return body(site.request(path + ("?count" if count else ""), method)).replace("1799", "1800")

    assert [ask(), ask(count=True), ask()] == [usage(0), usage(1), usage(1)]
    assert ask(count=True).startswith("False {'count': 2") and ask() == ask(count=True) == usage(2, 1800)
    assert ask(count=True, method="GET") == "False None"
    with pytest.raises(SetupError, match="say which limit"):
        is_ratelimited(RequestFactory().get("/"), key="ip", rate="5/m")


def test_cost_and_exemption(site: Site) -> None:
    assert site.statuses("/costly/?cost=3", "/costly/?cost=3", "/costly/?cost=2", "/costly/?cost=9&free") == [
        200,
        429,
        200,
        200,
    ]
    assert site.statuses("/costly/?cost=6", "/costly/?cost=0") == [429, 200]


def test_shadow(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headgate.web"):
        assert site.statuses("/shadowed/", "/shadowed/") == [200, 200]
    assert "would refuse a request to /shadowed/" in caplog.text


def test_timeout_waits_in_line(site: Site) -> None:
    assert site.at_once("/patient/", 3) == [200, 200, 200]


# ---------------------------------------------------------------------------------------------- what a response decides


@pytest.mark.parametrize("middleware", [True, False], ids=["middleware", "decorator alone"])
@pytest.mark.parametrize("path", ["/failures/", "/async_failures/"])
@pytest.mark.parametrize("kind", ["200", "404", "403", "500", "401"])
def test_count_if(site: Site, path: str, kind: str, middleware: bool) -> None:
    """Failures alone are counted: answers and exceptions, each with the status that the client gets."""
    site.configure(**({} if middleware else NO_MIDDLEWARE))
    seen = [site.request(f"{path}{kind}/") for _ in range(3)]
    assert [one.status_code for one in seen] == ([200] * 3 if kind == "200" else [int(kind)] * 2 + [429])
    if middleware:
        assert all("x-ratelimit-remaining" in one for one in seen)  # also where the view raised


@pytest.mark.parametrize("path", ["/failures/200/", "/async_failures/200/"])
def test_count_if_sees_the_answer_of_the_client(site: Site, path: str) -> None:
    """What a middleware makes of the view's answer is what counts."""
    site.configure(MIDDLEWARE=["headgate.web.django.RateLimitMiddleware", "tests.web.django_site.middleware.broken"])
    assert site.statuses(path, path, path) == [500, 500, 500]
    [limiter] = [each for each in current().known_limiters() if "failures" in each.scope]
    assert limiter.blocking.peek("192.0.2.1", 0).remaining == 0


@pytest.mark.parametrize("path", ["/stream/", "/async_stream/"])
def test_streams(site: Site, path: str) -> None:
    """A stream is settled by its headers, when it starts."""
    for kind, admitted in (("text/plain", 3), ("text/csv", 2)):
        seen = [site.request(path, data={"type": kind}) for _ in range(3)]
        assert [one.status_code for one in seen] == [200] * admitted + [429] * (3 - admitted), kind
        assert seen[0].streaming and seen[0]["x-ratelimit-limit"] == "2"


def test_client_leaves(asgi_site: Site) -> None:
    """A client that leaves before there is an answer: `count_if` sees 499, and the permit goes back."""
    from django.core.handlers.asgi import ASGIHandler

    async def leave() -> None:
        views.started.clear()
        app, sent = ASGIHandler(), False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": b""}
            await views.started.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("the client is gone")

        await app(asgi_scope("/endless/"), receive, send)

    if not hasattr(ASGIHandler, "listen_for_disconnect"):
        pytest.skip("this Django does not notice that a client leaves")
    for _ in range(3):
        asgi_site.run(leave())
        [limiter] = [each for each in current().known_limiters() if each.scope == "/endless/"]
        assert limiter.blocking.peek("192.0.2.1", 0).remaining == 2


def asgi_scope(path: str) -> dict[str, Any]:
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": path}
    return scope | {"query_string": b"", "headers": [], "client": ("192.0.2.1", 50000), "server": ("test", 80)}


# -------------------------------------------------------------------------------------------------------- what is wrong


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"key": "ip"}, "needs a rate"),
    ({"rate": "5 per minut"}, "unknown period 'minut'"),
    ({"rate": "5/m", "key": "adress"}, "key must be 'ip'"),
    ({"rate": "5/m", "key": "cookie:x"}, "key must be 'ip'"),
    ({"rate": "5/m", "group": "a", "scope": "b"}, "two names of one thing"),
    ({"rate": "5/m", "cost": 6}, "at most 5"),
    ({"rate": "5/m", "algorithm": "tokens"}, "unknown algorithm"),
    ({"rate": "5/m", "on_denied": "text"}, "on_denied must be a function"),
    ({"rate": "5/m", "block": "no"}, "block must be True or False, got 'no'"),
    ({"rate": "5/m", "block": None}, "block must be True or False, got None"),
    ({"rate": "5/m", "method": 5}, "a list of them, such as 'POST', got 5"),
    ({"rate": "5/m", "method": b"GET"}, "a list of them, such as 'POST', got b'GET'"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES, ids=[row[1] for row in MISTAKES])
def test_mistakes_are_found_where_they_are_written(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ratelimit(**options)


def test_without_parentheses() -> None:
    with pytest.raises(SetupError, match="needs a rate"):
        ratelimit(views.free)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [None, "view", 5, Site])
def test_on_the_wrong_thing(target: Any) -> None:
    with pytest.raises(SetupError, match="goes on a view or a View class"):
        ratelimit(rate="5/m")(target)
    if not callable(target):
        with pytest.raises(SetupError, match="goes on a view or a View class"):
            ratelimit.exempt(target)


def test_async_key_of_a_plain_view(wsgi_site: Site) -> None:
    view = ratelimit(rate="1/h", key=views.slow_tenant)(views.free)
    with pytest.raises(SetupError, match="in a plain view it must be plain"):
        view(RequestFactory().get("/", {"tenant": "a"}))


def test_view_called_by_hand(wsgi_site: Site) -> None:
    """A test may call a view with a request of its own, plain or async, without a handler or a URLconf."""
    assert [views.plain(RequestFactory().get("/")).status_code for _ in range(3)] == [200, 200, 429]

    async def call() -> list[int]:
        return [(await views.async_plain(RequestFactory().get("/"))).status_code for _ in range(3)]

    current().reset("127.0.0.1")
    assert asyncio.run(call()) == [200, 200, 429]


def test_view_called_without_a_request(wsgi_site: Site) -> None:
    """By keyword it is called as without the limit; without a request the error says so."""
    assert views.plain(request=RequestFactory().get("/")).status_code == 200
    for arguments in ((), (None,), (5, None)):
        with pytest.raises(SetupError, match=r"the limited view plain was called with .* without a request"):
            views.plain(*arguments)


ASKED: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "asked for a request, got NoneType None"),
    (RequestFactory().get("/"), {"increment": "no"}, "increment must be True or False, got 'no'"),
    (RequestFactory().get("/"), {"fn": "search"}, "fn is the function that asks, and names the group, got 'search'"),
]


@pytest.mark.parametrize(("request_", "options", "says"), ASKED, ids=[row[2] for row in ASKED])
def test_asked_wrongly(request_: Any, options: dict[str, Any], says: str, wsgi_site: Site) -> None:
    with pytest.raises(SetupError, match=says):
        is_ratelimited(request_, **{"group": "g", "rate": "5/m", **options})


def test_decorators_do_not_pile_up(wsgi_site: Site) -> None:
    """`method_decorator` decorates anew for each request; nothing is left behind by that."""
    site = wsgi_site
    site.configure(HEADGATE={"CLOCK": ManualClock()})
    site.request("/class/decorated/")
    before = set(vars(views.Decorated.dispatch))
    site.statuses(*["/class/decorated/"] * 5)
    assert set(vars(views.Decorated.dispatch)) == before
