"""Quart: what it shares with Flask, from asyncio; WebSockets; a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import quart
from quart import Blueprint, Quart, g, request
from quart.views import MethodView

from headgate.testing import ManualClock
from headgate.web.login import LoginRefused, LoginThrottle
from headgate.web.quart import RateLimitExceeded, RateLimits, SetupError
from tests.support.asgi import at_once, fetch, statuses, websocket
from tests.support.clocks import WatchedClock, until_async
from tests.support.forged import FORGED
from tests.support.servers import Server
from tests.support.web_servers import served


def make(**options: Any) -> tuple[Quart, RateLimits]:
    app = Quart("shop")
    return app, RateLimits(app, **{"clock": ManualClock(), **options})


def page() -> Callable[[], Any]:
    async def view() -> str:
        return "hello"

    return view


async def test_ten_lines() -> None:
    app, limits = make(default="3/minute")

    @app.route("/")
    async def index() -> str:
        return "hello"

    @app.route("/search")
    @limits.limit("1/minute")
    async def search() -> str:
        return "found"

    assert await statuses(app, *["/"] * 4) == [200, 200, 200, 429]
    first, refused = await fetch(app, "/search"), await fetch(app, "/search")
    assert first.headers["X-RateLimit-Remaining"] == "0"
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "60"
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert refused.json()["detail"].startswith("Rate limit exceeded (1/minute)")


async def test_what_a_request_meets() -> None:
    """Own limits and its blueprint's; else the default: 404, 405, OPTIONS; plain views, classes, exempt ones."""
    app, limits = make(default="9/minute")
    pages = limits.limit("2/minute")(Blueprint("pages", __name__, url_prefix="/pages"))
    pages.add_url_rule("/a", "a", page())
    pages.add_url_rule("/b", "b", limits.limit("1/minute")(lambda: "plain"))
    pages.add_url_rule("/c", "c", limits.exempt(page()))
    app.register_blueprint(pages)

    class Items(MethodView):
        @limits.limit("1/minute")
        async def post(self) -> str:
            return "made"

        async def get(self) -> str:
            return "items"

    app.add_url_rule("/items", view_func=Items.as_view("items"))
    assert await statuses(app, *["/pages/a"] * 3, *["/pages/b"] * 2) == [200, 200, 429, 200, 429]
    assert "X-RateLimit-Limit" not in (await fetch(app, "/pages/c")).headers
    assert await statuses(app, "/items", "/items", method="POST") == [200, 429]
    answers = [await fetch(app, path, method) for path, method in (("/items", "GET"), ("/x", "GET"), ("/items", "PUT"))]
    assert [answer.status_code for answer in answers] == [200, 404, 405]
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["8", "7", "6"]
    preflight = await fetch(app, "/pages/a", "OPTIONS", headers={"Access-Control-Request-Method": "GET"})
    assert preflight.status_code == 200 and "X-RateLimit-Limit" not in preflight.headers


async def test_order_and_functions() -> None:
    """Async keys; what was registered before runs before; answers in front of the limits meet the default."""
    app = Quart("shop")

    @app.before_request
    async def authenticate() -> Any:
        g.user = request.headers.get("X-User")
        return None if g.user else ("who are you?", 401)

    async def by_user(request: quart.Request) -> str:
        return f"{g.user}{request.path}"

    RateLimits(app, default="1/minute", key=by_user, clock=ManualClock())
    app.add_url_rule("/", "page", page())
    ann, bob = {"X-User": "ann"}, {"X-User": "bob"}
    found = [(await fetch(app, headers=headers)).status_code for headers in (ann, bob, ann, {}, {})]
    assert found == [200, 200, 429, 401, 429]


@pytest.mark.parametrize("handled", [True, False])
async def test_answers(handled: bool) -> None:
    """Error handlers see the refusal, `on_denied` goes first, headers are on errors too, `g` has the decision."""
    app, limits = make(default="9/minute")

    @app.errorhandler(RateLimitExceeded)
    async def sorry(error: RateLimitExceeded) -> Any:
        return f"{error.decision.limit} only", 429

    async def raising() -> str:
        assert g.rate_limit.remaining == 8
        raise LookupError

    async def busy(request: quart.Request, decision: Any) -> Any:
        return {"path": request.path}, 503

    on_denied: Any = {} if handled else {"on_denied": busy}
    app.add_url_rule("/", "page", limits.limit("1/minute", **on_denied)(page()))
    app.add_url_rule("/raising", "raising", raising)
    failed = await fetch(app, "/raising")
    assert (failed.status_code, failed.headers["X-RateLimit-Remaining"]) == (500, "8")
    await fetch(app)
    refused = await fetch(app)
    assert (refused.status_code, refused.text) == ((429, "1 only") if handled else (503, '{"path":"/"}\n'))
    assert refused.headers["Retry-After"] == "60" and refused.headers["X-RateLimit-Remaining"] == "0"


async def test_count_if() -> None:
    """Of the final status: of a view that raises, and of a stream when it starts."""
    app, limits = make()
    limit = limits.limit("5/minute", scope="x", count_if=lambda response: response.status_code >= 400)

    async def stream() -> Any:
        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x"

        return chunks()

    async def raising() -> str:
        raise LookupError

    app.add_url_rule("/stream", "stream", limit(stream))
    app.add_url_rule("/raising", "raising", limit(raising))
    [limiter] = limits.known_limiters()
    assert (await fetch(app, "/stream")).text == "xxx"
    assert limiter.blocking.peek("192.0.2.1", 0).remaining == 5
    assert (await fetch(app, "/raising")).status_code == 500
    assert limiter.blocking.peek("192.0.2.1", 0).remaining == 4


async def test_asked_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    """In a view, as a block, and by async functions that are no views; a plain one is told to be async."""
    app, limits = make()
    graphql, exports = limits.limit("10/minute", scope="graphql"), limits.limit("1/minute", scope="exports")

    @limits.limit("2/minute", scope="search")
    async def search() -> str:
        return "found"

    @limits.limit("2/minute", scope="plain")
    def plain() -> str:
        return "found"

    @app.route("/<int:cost>")
    async def view(cost: int) -> Any:
        return str((await graphql.check(cost=cost)).remaining)

    @app.route("/export")
    async def export() -> Any:
        async with exports as decision:
            return str(decision.remaining)

    @app.route("/search")
    async def searches() -> str:
        return await search() + await search()

    @app.route("/plain")
    async def plainly() -> str:
        return plain()

    assert [(await fetch(app, path)).text for path in ("/4", "/export")] == ["6", "0"]
    assert await statuses(app, "/7", "/11", "/6", "/export") == [429, 429, 200, 429]
    assert await statuses(app, *["/search"] * 3) == [200, 200, 429]
    assert (await fetch(app, "/plain")).status_code == 500 and "make it async" in caplog.text
    with pytest.raises(SetupError, match="outside of a request"):
        await search()


async def test_websockets() -> None:
    """Counted when it connects, or for each message; answered with a 429 where the server can, or closed with 1013."""
    app, limits = make(default="9/minute")

    async def echo() -> None:
        while True:
            await quart.websocket.send(await quart.websocket.receive())

    app.add_websocket("/echo", "echo", limits.limit("1/minute")(echo))
    async with websocket(app, "/echo") as first:
        assert (await first.say("hello"))["type"] == "websocket.accept"
        assert (await first.received.get())["text"] == "hello"
    async with websocket(app, "/echo") as second:
        assert (await second.received.get())["code"] == 1013
    async with websocket(app, "/echo", extensions={"websocket.http.response": {}}) as third:
        refused = await third.received.get()
        assert refused["status"] == 429 and b"retry-after" in dict(refused["headers"])
    messages = limits.limit("1/minute", scope="messages")

    async def chat() -> None:
        while True:
            await quart.websocket.send(await quart.websocket.receive())
            await messages.check()

    app.add_websocket("/chat", "chat", chat)
    async with websocket(app, "/chat") as other:
        assert (await other.say("hello"))["type"] == "websocket.accept"
        assert (await other.received.get())["text"] == "hello"
        assert (await other.say("hello again"))["text"] == "hello again"
        assert (await other.received.get())["code"] == 1013
    assert "WEBSOCKET /echo" in [limiter.scope for limiter in limits.known_limiters()]


async def test_set_up(caplog: pytest.LogCaptureFixture) -> None:
    """Never installed, in either order; installed twice; one object for two applications; switched off."""
    for above in (True, False):
        app, limits = Quart("shop"), RateLimits(default="1/minute", clock=ManualClock())
        view = page()
        app.add_url_rule("/", "view", view if above else limits.limit("5/minute")(view))
        limits.limit("5/minute")(view)
        caplog.clear()
        assert (await fetch(app)).status_code == 500 and "init_app" in caplog.text
    other = Quart("other")
    for each in (app, other):
        limits.init_app(each)
        limits.init_app(each)
    with pytest.raises(SetupError, match="name="):
        RateLimits(app)
    assert [(await fetch(each, "/missing")).status_code for each in (app, other)] == [404, 429]
    limits.enabled = False
    assert await statuses(app, *["/"] * 7) == [200] * 7


def test_installed_on_the_wrong_thing() -> None:
    limits: Any = RateLimits()
    for target in (None, "shop", Quart):
        with pytest.raises(TypeError, match="init_app takes a Quart application, got"):
            limits.init_app(target)


async def test_timeout_waits() -> None:
    clock = WatchedClock()
    app, limits = make(clock=clock)
    app.add_url_rule("/", "page", limits.limit("1/minute", timeout=90.0)(page()))
    await fetch(app)
    waiting = asyncio.create_task(fetch(app))
    await until_async(lambda: clock.sleeping)
    clock.advance(60.0)
    assert (await waiting).status_code == 200


async def test_forged_addresses() -> None:
    app, _ = make(default="1/minute", trusted_proxies=["10.0.0.0/8"])
    app.add_url_rule("/", "page", page())
    await fetch(app)
    assert {(await fetch(app, headers=headers)).status_code for headers in FORGED} == {429}
    proxied = [{"X-Forwarded-For": f"1.2.3.4, 198.51.100.{n}"} for n in (1, 1, 2)]
    found = [(await fetch(app, headers=headers, address="10.0.0.1")).status_code for headers in proxied]
    assert found == [200, 429, 200]


async def test_login() -> None:
    """A throttle for logins takes Quart's request."""
    app, throttle = Quart("shop"), LoginThrottle(per_username="1/hour")

    @app.route("/<username>")
    async def login(username: str) -> Any:
        try:
            async with throttle.attempt(request, username):
                return "wrong", 401
        except LoginRefused as refused:
            status, headers, body = refused.answer()
            return body, status, headers

    assert await statuses(app, "/ann", "/ann", "/bob") == [401, 429, 401]


def test_commands(redis_server: Server) -> None:
    """`quart headgate` as for Flask."""
    app = Quart("shop")
    limits = RateLimits(app, store=redis_server.url)
    app.add_url_rule("/", "page", limits.limit("3/minute")(page()))
    asyncio.run(fetch(app))
    run = app.test_cli_runner().invoke
    assert "GET /" in run(args=["headgate", "rules"]).output
    assert "2 of 3" in run(args=["headgate", "show", "192.0.2.1"]).output
    assert "forgotten" in run(args=["headgate", "reset", "192.0.2.1"]).output
    assert "3 of 3" in run(args=["headgate", "show", "192.0.2.1"]).output


def test_commands_and_memory() -> None:
    """A command cannot see the memory of a server, and says so."""
    app, _ = make(default="3/minute")
    for command in ("show", "reset"):
        result = app.test_cli_runner().invoke(args=["headgate", command, "192.0.2.1"])
        assert result.exit_code == 1 and "memory://: each server process has its own" in result.output


async def test_client_of_quart() -> None:
    """Quart's own test client has no address; its requests are those of one client, which can be forgotten."""
    app, limits = make(default="1/minute")
    app.add_url_rule("/", "page", page())
    client = app.test_client()
    assert [(await client.get("/")).status_code for _ in range(2)] == [200, 429]
    await limits.reset("testclient")
    assert (await client.get("/")).status_code == 200


@pytest.mark.parametrize("plain", [True, False])
async def test_exact(plain: bool, redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20, in one round trip each at most."""
    app = Quart("shop")
    limits = RateLimits(app, store=redis_server.url)
    view = (lambda: "hello") if plain else page()
    app.add_url_rule("/", "page", limits.limit("40/hour")(limits.limit("20/hour")(view)))
    before = redis_server.calls("evalsha")
    found = await at_once(app, "/", 60)
    assert sorted(found) == [200] * 20 + [429] * 40
    assert redis_server.calls("evalsha") - before <= 60
    await limits.aclose()


SHOP = """
from quart import Quart
from headgate.web.quart import RateLimits

app = Quart("shop")
limits = RateLimits(app, store={url!r})

@app.route("/")
@limits.limit("20/hour")
async def index():
    return "hello"
"""


async def test_exact_under_hypercorn(redis_server: Server, tmp_path: Path) -> None:
    source = SHOP.format(url=redis_server.url)
    with served(tmp_path, source, "hypercorn", "--workers=2", "shop:app") as url:
        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=60), timeout=60) as client:
            answers = await asyncio.gather(*[client.get("/") for _ in range(60)])
    assert sorted(answer.status_code for answer in answers) == [200] * 20 + [429] * 40
