"""What a hostile client or a careless application tried, and what holds."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from aiohttp import web
from fastapi import Depends, FastAPI, Request, Response
from flask import Flask
from litestar import Litestar, get
from quart import Quart
from sanic import Sanic
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headgate import Limiter, Quota
from headgate.testing import ManualClock
from headgate.web.aiohttp import RateLimits as AiohttpRateLimits
from headgate.web.asgi import RateLimitMiddleware
from headgate.web.fastapi import RateLimits
from headgate.web.flask import RateLimits as FlaskRateLimits
from headgate.web.headers import limit_headers
from headgate.web.limit import SetupError
from headgate.web.litestar import RateLimits as LitestarRateLimits
from headgate.web.login import LoginRefused, LoginThrottle
from headgate.web.quart import RateLimits as QuartRateLimits
from headgate.web.sanic import RateLimits as SanicRateLimits
from headgate.web.starlette import RateLimits as StarletteRateLimits


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def test_method_in_small_letters() -> None:
    """Werkzeug takes `post` for POST, and so does a limit for POST."""
    app = Flask("small letters")
    limits = FlaskRateLimits(app)

    @app.route("/x", methods=["GET", "POST"])
    @limits.limit("2/hour", methods=["POST"])
    def x() -> str:
        return "ok"

    http = app.test_client()
    found = [http.open("/x", method="POST", environ_overrides={"REQUEST_METHOD": "post"}).status_code for _ in range(3)]
    assert found == [200, 200, 429]


async def test_default_for_other_methods() -> None:
    """A route whose limit is for POST meets the default with GET, and only then."""
    app, limits = FastAPI(), RateLimits(default="3/hour")

    @app.api_route("/x", methods=["GET", "POST"])
    @limits.limit("2/hour", methods=["POST"])
    def x() -> int:
        return 1

    limits.install(app)
    async with client(app) as http:
        assert [(await http.get("/x")).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert [(await http.post("/x")).status_code for _ in range(3)] == [200, 200, 429]


async def test_permits_cannot_be_saved_up() -> None:
    """A request that took its permit in an earlier period gives none back: time has done so."""
    clock = ManualClock()
    app, limits = FastAPI(), RateLimits(clock=clock)
    hold, all_in = asyncio.Event(), asyncio.Barrier(6)

    @app.get("/login")
    @limits.limit("5/hour", count_if=lambda response: response.status_code >= 400)
    async def login(wait: bool = False) -> Response:
        if wait:
            await all_in.wait()
            await hold.wait()
        return Response(status_code=200 if wait else 401)

    limits.install(app)
    async with client(app) as http:
        held = [asyncio.create_task(http.get("/login?wait=1")) for _ in range(5)]
        await all_in.wait()
        assert (await http.get("/login")).status_code == 429
        clock.advance(3600)
        assert [(await http.get("/login")).status_code for _ in range(5)] == [401] * 5
        hold.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 5
        assert (await http.get("/login")).status_code == 429


@pytest.mark.parametrize("own", [False, True], ids=["429", "on_denied"])
async def test_cost_above_the_capacity(own: bool) -> None:
    """The answer names no time to try again, whether it is the 429 or the application's own."""
    asgi, limits = FastAPI(), RateLimits()
    wsgi = Flask("cost")
    for door, on_denied in ((limits, PlainTextResponse("no", 503)), (FlaskRateLimits(wsgi), ("no", 503))):
        more: dict[str, Any] = {"on_denied": lambda request, decision, no=on_denied: no} if own else {}
        limit: Any = door.limit("5/hour", cost=lambda request: 9, **more)
        (asgi if door is limits else wsgi).get("/x")(limit(lambda: "ok"))
    limits.install(asgi)
    async with client(asgi) as http:
        answers: list[Any] = [await http.get("/x"), wsgi.test_client().get("/x")]
    for answer in answers:
        assert answer.status_code == (503 if own else 429) and "retry-after" not in answer.headers
        assert answer.headers["cache-control"] == "no-store" and answer.headers["x-ratelimit-remaining"] == "5"
        assert own or "can never be admitted" in answer.text


async def test_what_on_denied_gives() -> None:
    """A body without a status is that of a 429 where views may return one, and elsewhere a clear error."""
    options: dict[str, Any] = {"default": "1/hour", "on_denied": lambda request, decision: {"error": "slow down"}}
    flask, quart, asgi, limits = Flask("body"), Quart("body"), FastAPI(), RateLimits(**options)
    FlaskRateLimits(flask, **options)
    QuartRateLimits(quart, **options)
    limits.install(asgi)
    litestar = Litestar([], plugins=[LitestarRateLimits(**options)])
    async with client(quart) as http:
        for _ in range(2):
            answers: list[Any] = [flask.test_client().get("/"), await http.get("/")]
    assert [(answer.status_code, json.loads(answer.text)) for answer in answers] == [(429, {"error": "slow down"})] * 2
    for app in (asgi, litestar, RateLimitMiddleware(FastAPI(), "1/hour", on_denied=options["on_denied"])):
        async with client(app) as http:
            await http.get("/")
            with pytest.raises(SetupError, match=r"on_denied must give a response, .*dict \{'error"):
                await http.get("/")


@pytest.mark.parametrize("app", [FastAPI(), None], ids=["fastapi", "asgi"])
async def test_on_denied_gives_a_class(app: FastAPI | None) -> None:
    """A class of responses has all that a response has, and is none."""
    options: dict[str, Any] = {"on_denied": lambda request, decision: PlainTextResponse}
    if app:
        RateLimits(default="1/hour", **options).install(app)
    async with client(app or RateLimitMiddleware(FastAPI(), "1/hour", **options)) as http:
        await http.get("/")
        with pytest.raises(SetupError, match=r"on_denied must give a response, .*type <class 'starlette"):
            await http.get("/")


async def test_headers_of_another_limiter() -> None:
    """A number that no limiter writes is no error."""

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"x-ratelimit-remaining", b"9" * 5000)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    async with client(RateLimitMiddleware(proxied, "5/hour")) as http:
        assert len((await http.get("/")).headers.get_list("x-ratelimit-remaining")) == 1


async def test_invented_methods() -> None:
    """Methods that a class does not have are remembered once."""
    limits = StarletteRateLimits()

    class Endpoint(HTTPEndpoint):
        @limits.limit("5/hour")
        async def get(self, request: Request) -> PlainTextResponse:
            return PlainTextResponse("ok")

    route = Route("/x", Endpoint)
    app = Starlette(routes=[route])
    limits.install(app)
    async with client(app) as http:
        for method in ("GET", "M0"):
            await http.request(method, "/x")
        before = len(vars(route))
        for number in range(20):
            assert (await http.request(f"M{number}", "/x")).status_code == 405
        assert len(vars(route)) == before


async def test_decision_is_none_where_none_was_made() -> None:
    """An exempt route and limits that are switched off give None, and not an error."""
    app, limits = FastAPI(), RateLimits(default="3/hour")

    @app.get("/free")
    @limits.exempt
    def free(request: Request) -> bool:
        return request.state.rate_limit is None

    @app.get("/x")
    def x(request: Request) -> bool:
        return request.state.rate_limit is None

    limits.install(app)
    async with client(app) as http:
        assert [(await http.get(path)).json() for path in ("/free", "/x")] == [True, False]
        limits.enabled = False
        assert (await http.get("/x")).json() is True


def test_login_attempt_used_twice() -> None:
    """A success is that of one attempt, not of the next one with the same object."""
    throttle = LoginThrottle(per_username="2/hour")
    attempt = throttle.attempt("192.0.2.1", "bob")
    with attempt:
        attempt.succeeded()
    for _ in range(2):
        with attempt:
            pass
    with pytest.raises(LoginRefused), attempt:
        pass


@pytest.mark.parametrize("text, name", [("5/second", "x.1"), ("5/hour", "x.2")])
def test_quota_that_binds(text: str, name: str) -> None:
    """Of two quotas of one size, the header names the one that denies."""
    quotas = [Quota.parse("5/second"), Quota.parse("5/hour")]
    with Limiter(text, algorithm="fixed_window") as limiter:
        denied = [limiter.try_acquire("k") for _ in range(6)][-1]
    headers = dict(limit_headers("ietf", denied, "x", quotas))
    assert headers["ratelimit"].startswith(f'"{name}"')


def view() -> None: ...


def view_of_one(request: Any) -> None: ...


async def test_limit_without_parentheses() -> None:
    """`@limits.limit` and nothing more is an error where it is written, in every framework."""
    flask, quart, sanic = Flask("parentheses"), Quart("parentheses"), Sanic("parentheses")
    doors: list[tuple[Any, Callable[[Any], Any]]] = [
        (FlaskRateLimits(), flask.get("/x")),
        (QuartRateLimits(), quart.get("/x")),
        (SanicRateLimits(), sanic.get("/x")),
        (AiohttpRateLimits(), lambda limited: web.Application().router.add_get("/x", limited)),
    ]
    for limits, register in doors:
        for function in (view, view_of_one, HTTPEndpoint):
            with pytest.raises(
                SetupError, match=rf"{function.__name__} has no quota; write limits.limit\('5/minute'\)"
            ):
                register(limits.limit(function))
    apps: list[tuple[Any, Any, str]] = [
        (RateLimits(), FastAPI(), "add_api_route"),
        (StarletteRateLimits(), Starlette(), "add_route"),
    ]
    for limits, app, add in apps:
        limits.install(app)
        getattr(app, add)("/x", limits.limit(view_of_one))
        with pytest.raises(SetupError, match="view_of_one has no quota"):
            await client(app).get("/x")
    litestar = LitestarRateLimits()
    guarded = get("/x", guards=[litestar.limit], sync_to_thread=False)(view)  # type: ignore[list-item]  # that is the mistake
    for mistake in (view, guarded):
        with pytest.raises(SetupError, match="has no quota"):
            litestar.limit(mistake)  # type: ignore[arg-type]  # and this one
    with pytest.raises(SetupError, match="has no quota"):
        Litestar([guarded], plugins=[litestar])
    with pytest.raises(SetupError, match=r"write Depends\(limits.limit\('5/minute'\)\)"):
        FastAPI().get("/y", dependencies=[Depends(RateLimits().limit)])(view)
