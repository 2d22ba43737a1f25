"""FastAPI: limits as dependencies and decorators, one exact decision, and every kind of answer carries it."""

import asyncio
import gc
import inspect
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import fastapi
import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Body, Depends, FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from headgate import Decision
from headgate.web.exchange import ResponseInfo
from headgate.web.fastapi import RateLimits
from headgate.web.limit import SetupError
from tests.support.asgi import CLIENT, Messages, at_once, fetch, scope, served, statuses, websocket
from tests.support.forged import FORGED
from tests.support.servers import Server

VERSION = tuple(map(int, fastapi.__version__.split(".")[:2]))


async def hello() -> str:
    return "hello"


def application(limits: RateLimits, **options: Any) -> FastAPI:
    """An application with limits, and a route that has none of its own."""
    app = FastAPI(**options)
    limits.install(app)
    app.get("/plain")(hello)
    return app


def scopes(limits: RateLimits) -> set[str]:
    """The routes that have counted a request."""
    return {limiter.scope for limiter in limits.known_limiters()}


async def sign_in(request: Request) -> None:
    """Authentication, as far as a limit sees it."""
    if "bad" in request.headers:
        raise HTTPException(401)
    request.state.user = request.headers.get("user", "nobody")


def by_user(request: Request) -> str:
    return str(request.state.user)


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


# ------------------------------------------------------------------------------------------------- where limits stand


async def test_decorator() -> None:
    limits = RateLimits()
    app = application(limits)

    @app.get("/search")
    @limits.limit("2/minute")
    async def search(words: str = "") -> dict[str, str]:
        return {"words": words}

    first, second, third = [await fetch(app, f"/search?words={i}") for i in range(3)]
    assert (first.status_code, first.json()) == (200, {"words": "0"})
    assert [first.headers["X-RateLimit-Remaining"], second.headers["X-RateLimit-Remaining"]] == ["1", "0"]
    assert third.status_code == 429 and third.headers["Content-Type"] == "application/problem+json"
    assert third.headers["Retry-After"] == "30" and third.headers["Cache-Control"] == "no-store"
    assert (await fetch(app, "/search", address="192.0.2.9")).status_code == 200
    assert (await fetch(app, "/plain")).status_code == 200


@pytest.mark.parametrize("where", ["route", "router", "include", "app", "parameter"])
async def test_dependency(where: str) -> None:
    """The same limit on a route, a router, where it is included, on the application, or as a parameter."""
    limits = RateLimits()
    limit = Depends(limits.limit("2/minute"))
    on = {name: [limit] if name == where else [] for name in ("route", "router", "include", "app")}
    app = application(limits, dependencies=on["app"])
    router = APIRouter(dependencies=on["router"])

    if where == "parameter":

        @router.get("/items")
        async def items(decision: Annotated[Decision, limit]) -> int:
            return decision.remaining
    else:
        router.get("/items", dependencies=on["route"])(hello)
    app.include_router(router, prefix="/v1", dependencies=on["include"])
    assert await statuses(app, "/v1/items", "/v1/items", "/v1/items") == [200, 200, 429]
    assert "GET /v1/items" in scopes(limits)


async def test_prefixes_and_path_parameters() -> None:
    """The state belongs to the template with its whole prefix: one bucket for all ids, another for another prefix."""
    limits = RateLimits()
    app = application(limits)
    inner, outer = (
        APIRouter(prefix="/items"),
        APIRouter(prefix="/shop", dependencies=[Depends(limits.limit("2/minute"))]),
    )
    inner.get("/{item}")(hello)
    inner.add_api_route("/{item}", hello, methods=["PUT", "POST"])
    outer.include_router(inner)
    app.include_router(outer, prefix="/v1")
    app.include_router(outer, prefix="/v2")
    assert await statuses(app, "/v1/shop/items/1", "/v1/shop/items/2", "/v1/shop/items/3") == [200, 200, 429]
    assert await statuses(app, "/v2/shop/items/1") == [200]
    assert await statuses(app, "/v1/shop/items/1", method="PUT") == [200]
    assert scopes(limits) == {
        "GET /v1/shop/items/{item}",
        "GET /v2/shop/items/{item}",
        "POST,PUT /v1/shop/items/{item}",
    }


async def test_mounted_application() -> None:
    """Routes of a mounted application have limits too; their template has the template of the mount."""
    limits = RateLimits()
    app = application(limits)
    mounted = FastAPI()
    mounted.get("/items/{item}", dependencies=[Depends(limits.limit("2/minute"))])(hello)
    app.mount("/shops/{shop}", mounted)
    assert await statuses(app, "/shops/1/items/1", "/shops/2/items/1", "/shops/3/items/1") == [200, 200, 429]
    assert scopes(limits) == {"GET /shops/{shop}/items/{item}"}


async def test_mounted_in_two_places() -> None:
    limits = RateLimits()
    app = application(limits)
    mounted = FastAPI()
    mounted.get("/items")(limits.limit("1/minute")(hello_again()))
    app.mount("/a", mounted)
    app.mount("/b", mounted)
    assert await statuses(app, "/a/items", "/a/items", "/b/items", "/b/items") == [200, 429, 200, 429]


def hello_again() -> Any:
    """A function of its own, since a limit marks the function."""

    async def again() -> str:
        return "hello"

    return again


@pytest.mark.parametrize("kind", ["async", "plain", "object"])
async def test_kinds_of_endpoints(kind: str) -> None:
    """Plain, async and callable objects: none needs a parameter for the request, and all keep their parameters."""
    limits = RateLimits()
    app = application(limits)

    def plain(number: int) -> int:
        return number

    async def waiting(number: int) -> int:
        return number

    class Endpoint:
        async def __call__(self, number: int) -> int:
            return number

    endpoint: Any = {"async": waiting, "plain": plain, "object": Endpoint()}[kind]
    app.get("/", name="numbers")(limits.limit("2/minute")(endpoint))
    assert (await fetch(app, "/?number=7")).json() == 7
    assert await statuses(app, "/?number=x") == [422]
    assert await statuses(app, "/?number=7") == [429]


@pytest.mark.parametrize("key", ["address", by_user])
async def test_plain_endpoint_stays_plain(key: Any) -> None:
    """The wrapper of a plain function is plain: it can be called without a request when limits are switched off."""
    limits = RateLimits(enabled=False)

    @limits.limit("2/minute", key=key)
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8
    assert inspect.signature(double) == inspect.signature(inspect.unwrap(double))


POSTPONED = """
from __future__ import annotations
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

class Item(BaseModel):
    name: str

app = FastAPI()
limits.install(app)

@app.post("/async")
@limits.limit("1/minute")
async def waiting(item: Item, request: Request) -> Item:
    return item

@app.post("/plain")
@limits.limit("1/minute")
def plain(item: Item, response: Response) -> Item:
    return item
"""


async def test_postponed_annotations() -> None:
    """`from __future__ import annotations` in the file of the application."""
    namespace: dict[str, Any] = {"limits": RateLimits(), "__name__": "postponed"}
    exec(POSTPONED, namespace)
    for path in ("/async", "/plain"):
        answers = [await fetch(namespace["app"], path, "POST", json={"name": "a"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert answers[0].json() == {"name": "a"}


@pytest.mark.parametrize("order", ["under", "above"])
@pytest.mark.parametrize("key", ["address", lambda request: request.client.host])
async def test_order_of_decorators(order: str, key: Any) -> None:
    """Above the decorator of the route a limit works as it does under it."""
    limits = RateLimits()
    app = application(limits)
    limit, route = limits.limit("1/minute", key=key), app.get("/")
    route(limit(hello_again())) if order == "under" else limit(route(hello_again()))
    assert await statuses(app, "/", "/") == [200, 429]


@pytest.mark.skipif(VERSION < (0, 135), reason="this FastAPI has no such endpoints")
async def test_generator_endpoint() -> None:
    """An endpoint that yields its answer is refused before the answer begins, whatever the key."""
    limits = RateLimits()
    app = application(limits)

    @app.get("/")
    @limits.limit("1/minute", key=lambda request: request.client.host)
    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    assert (await fetch(app)).text.split() == ["1", "2"]
    assert await statuses(app, "/") == [429]


async def test_class_based_views() -> None:
    """Methods of a class, as libraries for class-based views register them."""
    limits = RateLimits()
    app = application(limits)

    class Views:
        @limits.limit("1/minute")
        async def get(self) -> str:
            return "hello"

    app.get("/")(Views().get)
    assert await statuses(app, "/", "/") == [200, 429]


# ---------------------------------------------------------------------------------------------------- when it decides


async def test_after_authentication() -> None:
    """A limit that stands after a dependency sees what the dependency found; so does a decorator."""
    limits = RateLimits(default="3/minute")
    app = application(limits)
    app.get("/a", dependencies=[Depends(sign_in), Depends(limits.limit("1/minute", key=by_user))])(hello)
    app.get("/b", dependencies=[Depends(sign_in)])(limits.limit("1/minute", key=by_user)(hello_again()))
    for path in ("/a", "/b"):
        assert await statuses(app, path, path, headers={"user": "ann"}) == [200, 429]
        assert await statuses(app, path, headers={"user": "bob"}) == [200]
    # what fails before a limit of its own is met is counted by the default
    assert await statuses(app, "/a", "/b", "/a", "/a", headers={"bad": "1"}) == [401, 401, 401, 429]


async def test_plain_endpoint_after_authentication() -> None:
    limits = RateLimits()
    app = application(limits)

    @app.get("/", dependencies=[Depends(sign_in)])
    @limits.limit("1/minute", key=by_user)
    def plain() -> str:
        return "hello"

    assert await statuses(app, "/", "/", headers={"user": "ann"}) == [200, 429]
    assert await statuses(app, "/", headers={"user": "bob"}) == [200]


async def test_order_among_dependencies() -> None:
    """A limit after a dependency is not asked if that one fails, though its key would be known."""
    limits = RateLimits()
    app = application(limits)
    app.get("/", dependencies=[Depends(sign_in), Depends(limits.limit("1/minute"))])(hello)
    assert await statuses(app, "/", "/", headers={"bad": "1"}) == [401, 401]
    assert await statuses(app, "/", "/") == [200, 429]


async def test_body_is_not_read() -> None:
    """A client over its limit, or over the default, is refused before its body is read."""
    limits = RateLimits(default="1/minute")
    app = application(limits)
    app.post("/a", dependencies=[Depends(limits.limit("1/minute"))])(upload)
    app.post("/b")(limits.limit("1/minute")(upload))
    app.post("/c")(upload_again)
    for path in ("/a", "/b", "/c"):
        await fetch(app, path, "POST", content=b"{}")
        server = Messages()
        await app(scope(path=path, method="POST"), server.receive, server.send)
        assert server.sent[0]["status"] == 429 and server.reads == 0, path


async def upload(body: Annotated[dict[str, Any], Body()]) -> None: ...


async def upload_again(body: Annotated[dict[str, Any], Body()]) -> None: ...


class Watched(RateLimits):
    """Notes how many limits are decided at a time."""

    async def admit(self, exchange: Any, limits: Any) -> bool:
        self.__dict__.setdefault("decisions", []).append(len(list(limits)))
        return await super().admit(exchange, limits)


async def test_one_decision() -> None:
    """Limits of one subject are one decision, wherever they stand; those of a later one are another."""
    limits = Watched()
    app = application(limits, dependencies=[Depends(limits.limit("100/second", scope="all"))])
    router = APIRouter(dependencies=[Depends(limits.limit("50/second"))])

    @router.get("/", dependencies=[Depends(sign_in), Depends(limits.limit("40/second"))])
    @limits.limit("30/second")
    @limits.limit("20/hour")
    async def root() -> str:
        return "hello"

    @router.get("/user", dependencies=[Depends(sign_in), Depends(limits.limit("40/second", key=by_user))])
    @limits.limit("30/second", key=by_user)
    async def user() -> str:
        return "hello"

    app.include_router(router, prefix="/v1")
    assert await statuses(app, "/v1/", "/v1/user") == [200, 200]
    assert limits.__dict__["decisions"] == [5, 2, 2]


async def test_one_round_trip(redis_server: Server) -> None:
    """Whatever the number of limits with one subject, a request makes one round trip."""
    limits = RateLimits(store=redis_server.url)
    app = application(limits)
    several = [Depends(limits.limit(f"{number}/second")) for number in (50, 40, 30)]

    @app.get("/", dependencies=[*several, Depends(sign_in), Depends(limits.limit("1000/hour"))])
    @limits.limit("20/second")
    def root() -> str:
        return "hello"

    await fetch(app)  # connects, and loads the script
    store: Any = limits.store
    trips, calls = store.async_executor().round_trips, redis_server.calls("evalsha")
    assert await statuses(app, *["/"] * 5) == [200] * 5
    assert store.async_executor().round_trips - trips == 5
    assert redis_server.calls("evalsha") - calls == 5
    await limits.aclose()


async def test_all_or_nothing() -> None:
    """What a limit took before authentication goes back when the user's limit refuses."""
    limits = RateLimits()
    app = application(limits)
    address, user = limits.limit("9/minute"), limits.limit("1/minute", key=by_user)
    app.get("/", dependencies=[Depends(address), Depends(sign_in), Depends(user)])(hello)
    assert await statuses(app, *["/"] * 5) == [200] + [429] * 4
    [limiter] = limits.limiters_of(address, "GET /")
    assert limiter.blocking.peek(CLIENT, 0).remaining == 8


async def test_several_subjects() -> None:
    """One limit by address and by user takes both or none."""
    limits = RateLimits()
    app = application(limits)
    limit = limits.limit("2/minute", key=["address", by_user])
    app.get("/", dependencies=[Depends(sign_in), Depends(limit)])(hello)
    assert await statuses(app, "/", headers={"user": "ann"}) == [200]
    assert await statuses(app, "/", headers={"user": "bob"}) == [200]
    assert await statuses(app, "/", headers={"user": "eve"}) == [429]
    assert (await fetch(app, address="192.0.2.9", headers={"user": "ann"})).status_code == 200
    assert (await fetch(app, address="192.0.2.9", headers={"user": "ann"})).status_code == 429


@pytest.mark.parametrize("kind", ["async", "plain", "dependency"])
async def test_exact_on_redis(kind: str, redis_server: Server) -> None:
    """60 requests at once, 20 permits."""
    limits = RateLimits(store=redis_server.url)
    app = application(limits)
    limit = limits.limit("20/hour")

    @app.get("/plain-endpoint")
    @limit
    def plain() -> str:
        return "hello"

    @app.get("/async")
    @limit
    async def waiting() -> str:
        return "hello"

    app.get("/dependency", dependencies=[Depends(sign_in), Depends(limit)])(hello)
    path = "/plain-endpoint" if kind == "plain" else f"/{kind}"
    assert sorted(await at_once(app, path, 60)) == [200] * 20 + [429] * 40
    await limits.aclose()


@pytest.mark.parametrize("headers", FORGED)
async def test_forged_address(headers: dict[str, str]) -> None:
    """What a client claims about its address changes nothing, unless its peer is trusted."""
    limits = RateLimits(default="1/minute")
    app = application(limits)
    app.get("/")(limits.limit("1/minute")(hello_again()))
    for path in ("/", "/plain"):
        assert await statuses(app, path, path, headers=headers) == [200, 429]
        assert await statuses(app, path) == [429]


async def test_trusted_proxy() -> None:
    limits = RateLimits(default="1/minute", trusted_proxies=["192.0.2.0/24"])
    app = application(limits)
    for address in ("198.51.100.1", "198.51.100.2"):
        assert await statuses(app, "/plain", "/plain", headers={"X-Forwarded-For": address}) == [200, 429]


async def read_name(request: Request) -> str:
    return str((await request.json())["name"])


@pytest.mark.parametrize("where", ["decorator", "plain", "dependency", "default", "above"])
async def test_key_in_the_body(where: str) -> None:
    """A key function may read the body: the endpoint gets it nevertheless."""
    limits = RateLimits(default="1/minute" if where == "default" else None, key=read_name)
    app = FastAPI()
    limits.install(app)
    limit = limits.limit("1/minute")

    async def login(name: Annotated[str, Body(embed=True)]) -> str:
        return name

    def plain_login(name: Annotated[str, Body(embed=True)]) -> str:
        return name

    if where == "default":
        app.post("/")(login)
    elif where == "dependency":
        app.post("/", dependencies=[Depends(limit)])(login)
    elif where == "above":
        limit(app.post("/")(login))
    else:
        app.post("/")(limit(login if where == "decorator" else plain_login))
    ann, again, bob = [await fetch(app, "/", "POST", json={"name": name}) for name in ("ann", "ann", "bob")]
    assert [ann.status_code, again.status_code, bob.status_code] == [200, 429, 200]
    assert (ann.json(), bob.json()) == ("ann", "bob")


async def test_large_body_read_before() -> None:
    """What the application has read is kept for key functions up to a size; an error says what to do then."""
    limits = RateLimits()
    app = application(limits)

    @app.post("/")
    @limits.limit("1/minute", key=read_name)
    async def upload(body: Annotated[dict[str, Any], Body()]) -> int:
        return len(body)

    @app.post("/request")
    @limits.limit("1/minute", key=read_name)
    async def upload_with_request(body: Annotated[dict[str, Any], Body()], request: Request) -> int:
        return len(body)

    large = {"name": "a" * (1 << 20), "more": 1}
    with pytest.raises(RuntimeError, match="take the request as a parameter"):
        await httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a").post("/", json=large)
    assert (await fetch(app, "/request", "POST", json=large)).json() == 2


# ------------------------------------------------------------------------------------------------------- the default


async def test_default() -> None:
    """One allowance for everything without a limit of its own: routes, 404, 405, HEAD, OPTIONS, redirects."""
    limits = RateLimits(default="9/minute")
    app = application(limits)
    app.get("/own")(limits.limit("5/minute")(hello_again()))
    requests = [
        ("GET", "/plain", 200),
        ("GET", "/nowhere", 404),
        ("POST", "/plain", 405),
        ("POST", "/own", 405),
        ("HEAD", "/plain", 405),
        ("OPTIONS", "/plain", 405),
        ("GET", "/plain/", 307),
        ("GET", "/openapi.json", 200),
        ("GET", "/docs", 200),
    ]
    for left, (method, path, status) in zip(range(8, -1, -1), requests, strict=True):
        answer = await fetch(app, path, method)
        assert (answer.status_code, answer.headers["X-RateLimit-Remaining"]) == (status, str(left)), path
    assert {
        await_status for method, path, _ in requests for await_status in await statuses(app, path, method=method)
    } == {429}
    assert (await fetch(app, "/own")).headers["X-RateLimit-Limit"] == "5"
    assert scopes(limits) == {"default", "GET /own"}


async def test_default_of_what_is_mounted(tmp_path: Path) -> None:
    """Applications of every kind that are mounted, and their 404s; each is refused before it runs."""
    (tmp_path / "a.txt").write_text("hello")
    limits = RateLimits(default="4/minute")
    app = application(limits)
    ran = []

    async def opaque(scope: Any, receive: Any, send: Any) -> None:
        ran.append("opaque")
        await PlainTextResponse("hello")(scope, receive, send)

    inner = FastAPI()

    @inner.get("/")
    async def root() -> str:
        ran.append("inner")
        return "hello"

    app.mount("/static", StaticFiles(directory=tmp_path))
    app.mount("/opaque", opaque)
    app.mount("/inner", inner)
    paths = ["/static/a.txt", "/opaque/", "/inner/", "/inner/nowhere"]
    assert await statuses(app, *paths) == [200, 200, 200, 404]
    assert await statuses(app, *paths, "/static/none.txt") == [429] * 5
    assert ran == ["opaque", "inner"]


async def test_head_and_options_of_a_limited_route() -> None:
    """HEAD and OPTIONS of a route count as the route does; a preflight of CORS is free."""
    limits = RateLimits()
    app = application(limits)
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    app.api_route("/", methods=["GET", "HEAD", "OPTIONS"])(limits.limit("3/minute")(hello_again()))
    preflight = {"Origin": "https://example.com", "Access-Control-Request-Method": "GET"}
    assert await statuses(app, *["/"] * 5, method="OPTIONS", headers=preflight) == [200] * 5
    assert [await statuses(app, "/", method=method) for method in ("GET", "HEAD", "OPTIONS", "HEAD")] == [
        [200],
        [200],
        [200],
        [429],
    ]
    assert scopes(limits) == {"GET /"}


async def test_exempt() -> None:
    """Freed from the default, and from limits of the application and of routers around it; not from its own."""
    limits = RateLimits(default="1/minute")
    app = application(limits, dependencies=[Depends(limits.limit("1/minute", scope="all"))])
    app.get("/a")(limits.exempt(hello_again()))
    router = APIRouter(prefix="/router", dependencies=[Depends(limits.exempt)])
    router.get("/free")(hello)
    router.get("/own")(limits.limit("2/minute")(hello_again()))
    app.include_router(router)
    mounted = FastAPI()
    mounted.get("/")(hello)
    app.mount("/mounted", limits.exempt(mounted))
    assert await statuses(app, "/plain", "/plain") == [200, 429]
    for path in ("/a", "/router/free", "/mounted/"):
        assert await statuses(app, path, path, path) == [200] * 3, path
        assert "X-RateLimit-Limit" not in (await fetch(app, path)).headers
    assert await statuses(app, "/router/own", "/router/own", "/router/own") == [200, 200, 429]


def test_exempt_router() -> None:
    with pytest.raises(SetupError, match="Depends"):
        RateLimits().exempt(APIRouter())


async def test_routes_of_every_age() -> None:
    """Routes from before the installation, from after it, and from after the first request are limited."""
    limits = RateLimits(default="2/minute")
    app = FastAPI()
    app.get("/before")(limits.limit("1/minute")(hello_again()))
    router = APIRouter()
    app.include_router(router, prefix="/router")
    assert await statuses(app, "/nowhere") == [404]  # builds the middleware
    limits.install(app)
    app.get("/after")(limits.limit("1/minute")(hello_again()))
    assert await statuses(app, "/before", "/before", "/after", "/after") == [200, 429, 200, 429]
    app.get("/late")(limits.limit("1/minute")(hello_again()))
    app.get("/late/default")(hello)
    assert await statuses(app, "/late", "/late", "/late/default") == [200, 429, 200]
    router.get("/later", dependencies=[Depends(limits.limit("1/minute"))])(hello)
    if VERSION >= (0, 137):  # before, an included router is a copy
        assert await statuses(app, "/router/later", "/router/later") == [200, 429]
    assert await statuses(app, "/late/default", "/late/default") == [200, 429]


# ------------------------------------------------------------------------------------------------------- the answers


async def test_passes_through_middleware() -> None:
    """A 429 has the headers of CORS and of other middleware, wherever it was decided."""
    limits = RateLimits(default="1/minute")
    app = application(limits)

    class Stamp(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            response: Response = await call_next(request)
            response.headers["X-Stamp"] = "1"
            return response

    app.add_middleware(Stamp)
    app.add_middleware(CORSMiddleware, allow_origins=["https://example.com"], expose_headers=limits.header_names)
    app.get("/decorator")(limits.limit("1/minute")(hello_again()))
    app.get("/late")(limits.limit("1/minute", key=lambda request: request.client.host)(hello_again()))
    app.get("/dependency", dependencies=[Depends(sign_in), Depends(limits.limit("1/minute"))])(hello)
    for path in ("/decorator", "/late", "/dependency", "/plain", "/nowhere"):
        await fetch(app, path)
        answer = await fetch(app, path, headers={"Origin": "https://example.com"})
        assert answer.status_code == 429, path
        assert answer.headers["Access-Control-Allow-Origin"] == "https://example.com"
        assert "x-ratelimit-remaining" in answer.headers["Access-Control-Expose-Headers"]
        assert answer.headers["X-Stamp"] == "1"
        assert answer.headers.get_list("X-RateLimit-Limit") == ["1"]
        assert answer.headers.get_list("Retry-After") == ["60"]


async def test_middleware_that_answers_itself() -> None:
    """What a middleware answers without the application is counted by the default, and keeps its headers for CORS."""
    limits = RateLimits(default="1/minute")
    app = application(limits)

    class Closed(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: Any) -> Response:
            return Response(status_code=503)

    app.add_middleware(Closed)
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    answers = [await fetch(app, "/plain", headers={"Origin": "https://example.com"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 429]
    assert [answer.headers["Access-Control-Allow-Origin"] for answer in answers] == ["*", "*"]


async def test_exception_in_the_handler() -> None:
    """A 500 carries the headers, and `count_if` sees it; so does the answer of a handler of exceptions."""
    limits = RateLimits()
    app = application(limits)
    limit = limits.limit("2/minute", count_if=lambda response: response.status_code < 500)

    @app.get("/broken", dependencies=[Depends(limit)])
    async def broken() -> None:
        raise RuntimeError("broken")

    @app.get("/teapot")
    @limits.limit("2/minute", count_if=failed)
    async def teapot() -> None:
        raise KeyError("teapot")

    @app.exception_handler(KeyError)
    async def handle(request: Request, error: KeyError) -> Response:
        return Response(status_code=418)

    for _ in range(3):  # given back each time
        answer = await fetch(app, "/broken")
        assert (answer.status_code, answer.headers["X-RateLimit-Remaining"]) == (500, "1")
    assert await statuses(app, *["/teapot"] * 3) == [418, 418, 429]


async def test_streaming() -> None:
    """The headers are on the start, once, and each part comes as it is made."""
    limits = RateLimits()
    app = application(limits)

    async def parts() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    @app.get("/")
    @limits.limit("1/minute", count_if=lambda response: response.status_code == 200)
    async def stream() -> StreamingResponse:
        return StreamingResponse(parts())

    server = Messages()
    await app(scope(), server.receive, server.send)
    assert server.kinds == ["http.response.start"] + ["http.response.body"] * 3
    assert [name for name, _ in server.sent[0]["headers"]].count(b"x-ratelimit-limit") == 1
    assert await statuses(app, "/") == [429]


async def test_background_tasks() -> None:
    """They run after the answer, and one that fails changes nothing for the limit."""
    limits = RateLimits()
    app = application(limits)
    ran = []

    def work() -> None:
        ran.append(1)
        raise RuntimeError("broken")

    @app.get("/")
    @limits.limit("2/minute", count_if=lambda response: response.status_code == 200)
    def start(tasks: BackgroundTasks) -> str:
        tasks.add_task(work)
        return "hello"

    first, second = [await fetch(app) for _ in range(2)]
    assert [first.status_code, second.status_code] == [200, 200] and ran == [1, 1]
    assert second.headers["X-RateLimit-Remaining"] == "0"
    assert await statuses(app, "/") == [429] and ran == [1, 1]


async def test_cancelled_request() -> None:
    """A request that is cancelled before the answer is a status of 499, to `count_if`."""
    limits = RateLimits()
    app = application(limits)
    entered = asyncio.Event()
    limit = limits.limit("2/minute", count_if=lambda response: response.status_code != 499)

    @app.get("/")
    @limit
    async def slow() -> None:
        entered.set()
        await asyncio.Event().wait()

    server = Messages()
    task = asyncio.create_task(app(scope(), server.receive, server.send))
    await entered.wait()
    [limiter] = limits.limiters_of(limit, "GET /")
    assert limiter.blocking.peek(CLIENT, 0).remaining == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert limiter.blocking.peek(CLIENT, 0).remaining == 2


async def test_decision_in_the_state() -> None:
    """The decision is `request.state.rate_limit`, in the endpoint and in middleware."""
    limits = RateLimits(default="5/minute")
    app = application(limits)
    seen: list[Decision] = []

    @app.middleware("http")
    async def look(request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        seen.append(request.state.rate_limit)
        return response

    @app.get("/", dependencies=[Depends(limits.limit("3/minute"))])
    async def root(request: Request) -> int:
        decision: Decision = request.state.rate_limit
        return decision.remaining

    assert (await fetch(app)).json() == 2
    await fetch(app, "/plain")
    assert [decision.limit for decision in seen] == [3, 5]


@pytest.mark.parametrize("path", ["/decorator", "/late", "/dependency", "/plain"])
async def test_on_denied(path: str) -> None:
    """A response of the application instead of the 429, with the limit's headers; None leaves it to the 429."""

    async def busy(request: Request, decision: Decision) -> Response | None:
        assert not decision.allowed
        own = {"cache-control": "private"} if "private" in request.headers else {}
        return None if "bare" in request.headers else PlainTextResponse(f"not now, {request.url.path}", 503, own)

    limits = RateLimits(default="1/minute", on_denied=busy)
    app = application(limits)
    app.get("/decorator")(limits.limit("1/minute")(hello_again()))
    app.get("/late")(limits.limit("1/minute", key=lambda request: request.client.host)(hello_again()))
    app.get("/dependency", dependencies=[Depends(sign_in), Depends(limits.limit("1/minute"))])(hello)
    await fetch(app, path)
    answer = await fetch(app, path)
    assert (answer.status_code, answer.text) == (503, f"not now, {path}")
    assert answer.headers["X-RateLimit-Remaining"] == "0" and answer.headers["Retry-After"] == "60"
    assert answer.headers.get_list("Cache-Control") == ["no-store"]
    private = await fetch(app, path, headers={"private": "1"})
    assert private.headers.get_list("Cache-Control") == ["private"]
    assert await statuses(app, path, headers={"bare": "1"}) == [429]


async def test_openapi() -> None:
    """The document has the 429 of limited routes, and of all but the exempt if there is a default."""
    limits = RateLimits(headers="both")
    app = application(limits)
    app.get("/own")(limits.limit("1/minute")(hello_again()))
    router = APIRouter()
    router.get("/{item}")(hello)
    app.include_router(router, prefix="/items", dependencies=[Depends(limits.limit("1/minute"))])
    paths = app.openapi()["paths"]
    limited = {path for path, operations in paths.items() if "429" in operations["get"]["responses"]}
    assert limited == {"/own", "/items/{item}"}
    described = paths["/own"]["get"]["responses"]["429"]
    schema = described["content"]["application/problem+json"]["schema"]
    await fetch(app, "/own")
    refused = await fetch(app, "/own")
    assert set(schema["properties"]) == set(refused.json())
    told = {name.lower() for name in described["headers"]}
    assert told == {name for name in refused.headers if "ratelimit" in name or name == "retry-after"}

    limits = RateLimits(default="1/minute")
    app = application(limits)
    app.get("/free")(limits.exempt(hello_again()))
    app.get("/own", responses={429: {"description": "my own"}})(hello)
    paths = (await fetch(app, "/openapi.json")).json()["paths"]
    assert {path for path, operations in paths.items() if "429" in operations["get"]["responses"]} == {"/plain", "/own"}
    assert paths["/own"]["get"]["responses"]["429"]["description"] == "my own"


@pytest.mark.parametrize("path", ["/decorator", "/dependency", "/plain"])
async def test_key_function_that_raises(path: str) -> None:
    """A 500, and a traceback that names the limit and the route."""

    def broken(request: Request) -> str:
        raise ZeroDivisionError

    limits = RateLimits(default="1/minute", key=broken)
    app = application(limits)
    app.get("/decorator")(limits.limit("1/minute")(hello_again()))
    app.get("/dependency", dependencies=[Depends(limits.limit("1/minute"))])(hello)
    assert await statuses(app, path) == [500]
    with pytest.raises(ZeroDivisionError) as caught:
        await httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a").get(path)
    [note] = caught.value.__notes__
    assert "broken" in note and "1/minute" in note


async def test_key_function_that_refuses() -> None:
    """An HTTPException of a key function is the answer."""

    def by_token(request: Request) -> str:
        raise HTTPException(401)

    limits = RateLimits()
    app = application(limits)
    app.get("/decorator")(limits.limit("1/minute", key=by_token)(hello_again()))
    app.get("/dependency", dependencies=[Depends(limits.limit("1/minute", key=by_token))])(hello)
    assert await statuses(app, "/decorator", "/dependency") == [401, 401]


# ------------------------------------------------------------------------------------------------------------ set-up


async def test_not_installed() -> None:
    """A limited route never runs without its limit."""
    limits = RateLimits()
    app = FastAPI()
    ran: list[int] = []

    @app.get("/async")
    @limits.limit("1/minute")
    async def waiting() -> None:
        ran.append(1)

    @app.get("/plain")
    @limits.limit("1/minute")
    def plain() -> None:
        ran.append(1)

    @app.get("/dependency", dependencies=[Depends(limits.limit("1/minute"))])
    async def dependent() -> None:
        ran.append(1)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
        for path in ("/async", "/plain", "/dependency"):
            with pytest.raises(SetupError, match=r"limits\.install\(app\)"):
                await http.get(path)
    limits.enabled = False
    assert await statuses(app, "/async", "/plain", "/dependency") == [200] * 3 and ran == [1] * 3


def test_installed_twice() -> None:
    limits = RateLimits()
    app = application(limits)
    for again in (limits, RateLimits()):
        with pytest.raises(SetupError, match="already"):
            again.install(app)
    with pytest.raises(SetupError, match="before it is wrapped"):
        limits.install(CORSMiddleware(app))  # type: ignore[arg-type]  # that is the mistake


async def test_served_alone() -> None:
    """An application that is mounted where the limits are installed has them there, and does not run elsewhere."""
    limits = RateLimits()
    app, mounted = application(limits), FastAPI()
    mounted.get("/decorated")(limits.limit("1/minute")(hello))
    mounted.get("/dependent", dependencies=[Depends(limits.limit("1/minute"))])(hello)
    app.mount("/mounted", mounted)
    for path in ("/decorated", "/dependent"):
        assert await statuses(app, *[f"/mounted{path}"] * 2) == [200, 429]
        with pytest.raises(SetupError, match=r"limits\.install\(app\)"):
            await httpx.ASGITransport(mounted).handle_async_request(httpx.Request("GET", f"http://a{path}"))


async def test_no_garbage() -> None:
    """What a server made for a request goes when the request is over, without the garbage collector."""
    limits = RateLimits()
    app = application(limits)
    app.get("/decorated")(limits.limit("1000/minute")(hello))
    app.get("/dependent", dependencies=[Depends(limits.limit("1000/minute"))])(hello)
    gc.disable()
    try:
        for path in ("/decorated", "/dependent", "/plain"):
            for _ in range(120):  # the first ones are looked at
                server: Any = Messages()
                server.scope = scope(path=path, method="GET")  # servers have both in one object
                alive = weakref.ref(server)
                await app(server.scope, server.receive, server.send)
                del server
                assert alive() is None, path
    finally:
        gc.enable()


async def test_installed_in_what_is_mounted() -> None:
    """The same limits in an application and in one that it mounts count a request once."""
    limits = RateLimits(default="2/minute")
    app = application(limits)
    app.mount("/mounted", application(limits))
    assert await statuses(app, *["/mounted/plain"] * 3) == [200, 200, 429]


def test_wrong_targets() -> None:
    limits = RateLimits()
    limit = limits.limit("1/minute")
    for target in (FastAPI(), APIRouter(), Route("/", hello), 5):
        with pytest.raises(SetupError, match="a limit goes on an endpoint"):
            limit(target)  # type: ignore[type-var]  # that is the mistake
    with pytest.raises(SetupError, match="the class Decision"):
        limit(Decision)
    with pytest.raises(ValueError, match="minut"):
        limits.limit("5 per minut")
    with pytest.raises(SetupError, match="without parentheses"):
        limits.exempt()(hello)  # type: ignore[operator]  # that is the mistake


async def test_messages_are_of_websockets() -> None:
    """A limit for messages on another route stops the application at its start."""
    limits = RateLimits()
    app = application(limits)
    app.get("/")(limits.messages("1/minute")(hello_again()))
    server = Messages({"type": "lifespan.startup"})
    await app({"type": "lifespan", "state": {}}, server.receive, server.send)
    assert server.kinds == ["lifespan.startup.failed"] and "GET /" in server.sent[0]["message"]


async def test_decision_of_a_request_that_is_not_limited() -> None:
    """A dependency gives a whole decision where none was made: limits are off, the request is exempt or free."""
    limits = RateLimits()
    app = application(limits)
    exempt, free = limits.limit("3/minute", exempt_when=lambda request: True), limits.limit("3/minute", cost=0)
    for path, limit in (("/exempt", exempt), ("/free", free), ("/off", limits.limit("3/minute"))):

        @app.get(path)
        async def left(decision: Annotated[Decision, Depends(limit)]) -> tuple[bool, int, int]:
            return decision.allowed, decision.limit, decision.remaining

    found = [(await fetch(app, path)).json() for path in ("/exempt", "/free", "/off")]
    assert found == [[True, 3, 3], [True, 3, 3], [True, 3, 2]]
    limits.enabled = False
    assert (await fetch(app, "/off")).json() == [True, 3, 3]


async def test_switched_off() -> None:
    limits = RateLimits(default="1/minute", enabled=False)
    app = application(limits)
    app.get("/own")(limits.limit("1/minute")(hello_again()))
    app.get("/dependency", dependencies=[Depends(limits.limit("1/minute"))])(hello)
    paths = ["/own", "/dependency", "/plain"] * 2
    assert await statuses(app, *paths) == [200] * 6
    limits.enabled = True
    assert await statuses(app, *paths) == [200] * 3 + [429] * 3
    limits.enabled = False
    assert await statuses(app, *paths) == [200] * 6


async def test_dependency_overrides() -> None:
    """Those of the application's dependencies work, and one that replaces a limit does so."""
    limits = RateLimits(default="3/minute")
    app = application(limits)
    first, second = limits.limit("9/minute"), limits.limit("1/minute")
    app.get("/", dependencies=[Depends(sign_in), Depends(first), Depends(second)])(hello)

    async def signed_in(request: Request) -> None:
        request.state.user = "ann"

    assert await statuses(app, "/", "/", headers={"bad": "1"}) == [401, 401]
    app.dependency_overrides[sign_in] = signed_in
    assert await statuses(app, "/", "/", headers={"bad": "1"}) == [200, 429]
    app.dependency_overrides[second] = lambda: None
    assert await statuses(app, "/", "/") == [200, 200]
    app.dependency_overrides[first] = lambda: None
    assert "X-RateLimit-Limit" not in (await fetch(app)).headers
    app.dependency_overrides.clear()
    assert await statuses(app, "/") == [429]


async def test_lifespan(redis_server: Server) -> None:
    """The application's own lifespan runs, its state arrives, and the store is closed after it: not if it is shared."""
    events: list[str] = []
    limits = RateLimits(store=redis_server.url, default="5/minute")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        events.append("start")
        yield {"greeting": "hello"}
        events.append(f"end {await limits.reset('127.0.0.1')}")

    app = FastAPI(lifespan=lifespan)
    limits.install(app)

    @app.get("/")
    async def root(request: Request) -> str:
        return str(request.state.greeting)

    executors: Any = limits.store
    for _ in range(2):  # it can start again, as it does for each test of an application
        with served(app) as address:
            async with httpx.AsyncClient() as http:
                answer = await http.get(f"http://{address}/")
            assert answer.json() == "hello" and answer.headers["X-RateLimit-Remaining"] == "4"
            assert executors._async_executors
        assert not executors._async_executors
    assert events == ["start", "end True"] * 2


# --------------------------------------------------------------------------------------------------------- WebSockets


def chat(limits: RateLimits, **options: Any) -> FastAPI:
    """Echoes what it hears."""
    app = application(limits)

    @app.websocket("/chat/{room}", **options)
    async def echo(websocket: WebSocket, room: str) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text)

    return app


@pytest.mark.parametrize("where", ["dependency", "late", "decorator", "default"])
async def test_websocket_connections(where: str) -> None:
    """A client over its limit is not accepted: a 429 if the server can send it, else a close."""
    limits = RateLimits(default="1/minute" if where == "default" else None)
    limit = limits.limit("1/minute")
    if where == "decorator":
        app = application(limits)

        @app.websocket("/chat/{room}")
        @limit
        async def accept(websocket: WebSocket) -> None:
            await websocket.accept()
    else:
        found = {"dependency": [Depends(limit)], "late": [Depends(sign_in_anyone), Depends(limit)]}
        app = chat(limits, dependencies=found.get(where, []))
    async with websocket(app, "/chat/1") as socket:
        accepted = await socket.received.get()
        assert accepted["type"] == "websocket.accept"
        assert (b"x-ratelimit-remaining", b"0") in accepted["headers"]
    async with websocket(app, "/chat/2") as socket:
        assert await socket.received.get() == {
            "type": "websocket.close",
            "code": 1013,
            "reason": "rate limit exceeded",
        }
    async with websocket(app, "/chat/3", extensions={"websocket.http.response": {}}) as socket:
        assert (await socket.received.get())["status"] == 429
    assert scopes(limits) == {"default" if where == "default" else "WEBSOCKET /chat/{room}"}


async def sign_in_anyone() -> None: ...


async def test_websocket_messages() -> None:
    """A limit for messages closes the connection of a client that sends too many, and counts no connections."""
    limits = RateLimits()
    app = application(limits)

    @app.websocket("/")
    @limits.messages("2/minute")
    @limits.limit("2/minute")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        async for text in websocket.iter_text():
            await websocket.send_text(text)

    async with websocket(app, "/") as socket:
        await socket.received.get()
        assert [(await socket.say(text))["type"] for text in "abc"] == ["websocket.send"] * 2 + ["websocket.close"]
    async with websocket(app, "/") as socket:
        assert (await socket.received.get())["type"] == "websocket.accept"
        assert (await socket.say("a"))["code"] == 1013
    assert scopes(limits) == {"WEBSOCKET /", "WEBSOCKET / messages"}


async def test_websocket_messages_answered() -> None:
    """With `on_denied` the application answers a message over the limit, and the connection stays."""
    limits = RateLimits()

    async def slow_down(websocket: WebSocket, decision: Decision) -> None:
        await websocket.send_text(f"slow down for {decision.retry_after:.0f} s")

    app = chat(limits, dependencies=[Depends(limits.messages("1/minute", on_denied=slow_down))])
    async with websocket(app, "/chat/1") as socket:
        await socket.received.get()
        assert [(await socket.say(text))["text"] for text in "abc"] == ["a"] + ["slow down for 60 s"] * 2


async def test_websocket_check() -> None:
    """An endpoint may count messages itself, and decide what they cost."""
    limits = RateLimits()
    app = application(limits)
    messages = limits.limit("2/minute", key=lambda websocket: websocket.query_params["user"])

    @app.websocket("/")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        async for _ in websocket.iter_text():
            decision = await messages.check(websocket)
            await websocket.send_text(str(decision.remaining) if decision else "no")

    for user in (b"user=ann", b"user=bob"):
        async with websocket(app, "/", query_string=user) as socket:
            await socket.received.get()
            assert [(await socket.say("a"))["text"] for _ in range(3)] == ["1", "0", "no"]
    limits.enabled = False
    async with websocket(app, "/", query_string=b"user=ann") as socket:
        await socket.received.get()
        assert (await socket.say("a"))["text"] == "2"


@pytest.mark.server
async def test_websocket_of_a_server() -> None:
    """A real server and a real client: 429 to the handshake over the limit, 1013 for too many messages."""
    limits = RateLimits()
    app = chat(limits, dependencies=[Depends(limits.limit("1/minute")), Depends(limits.messages("1/minute"))])
    with served(app) as address:
        async with connect(f"ws://{address}/chat/1") as socket:
            await socket.send("a")
            assert await socket.recv() == "a"
            await socket.send("b")
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://{address}/chat/1")
        assert refused.value.response.status_code == 429
        assert refused.value.response.headers["Retry-After"] == "60"
