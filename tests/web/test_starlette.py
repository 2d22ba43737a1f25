"""Starlette: decorated functions and classes, mounts of every kind, and the default for all the rest."""

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint, WebSocketEndpoint
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Host, Mount, Route, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket

from headgate.web.asgi import RateLimitMiddleware, Receive, Scope, Send
from headgate.web.limit import SetupError
from headgate.web.starlette import RateLimits
from tests.support.asgi import at_once, client, fetch, statuses, websocket
from tests.support.servers import Server


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


def plain_hello(request: Request) -> Response:
    return PlainTextResponse("hello")


def application(limits: RateLimits, *routes: BaseRoute, **options: Any) -> Starlette:
    app = Starlette(routes=[*routes, Route("/plain", hello)], **options)
    limits.install(app)
    return app


def scopes(limits: RateLimits) -> set[str]:
    """The routes that have counted a request."""
    return {limiter.scope for limiter in limits.known_limiters()}


def copy(function: Any) -> Any:
    """A function of its own, since a limit marks the function."""

    async def made(request: Request) -> Response:
        answer: Response = await function(request)
        return answer

    return made


def by_query(request: Request) -> str:
    return request.query_params["user"]


@pytest.mark.parametrize("key", ["address", by_query])
async def test_functions(key: Any) -> None:
    """Async and plain endpoints, by the address and by a function; each of them counts by its template."""
    limits = RateLimits()

    @limits.limit("2/minute", key=key)
    async def waiting(request: Request) -> Response:
        return PlainTextResponse(str(request.path_params["item"]))

    @limits.limit("2/minute", key=key)
    def plain(request: Request) -> Response:
        return PlainTextResponse(str(request.path_params["item"]))

    app = application(limits, Route("/async/{item}", waiting), Route("/plain/{item:int}", plain))
    for name in ("async", "plain"):
        paths = [f"/{name}/{number}?user=ann" for number in range(3)]
        assert await statuses(app, *paths) == [200, 200, 429]
    assert scopes(limits) == {"GET /async/{item}", "GET /plain/{item}"}


@pytest.mark.parametrize("kind", [hello, plain_hello])
async def test_exact_on_redis(kind: Any, redis_server: Server) -> None:
    """60 requests at once, 20 permits."""
    limits = RateLimits(store=redis_server.url)
    app = application(limits, Route("/", limits.limit("20/hour", key=lambda request: "all")(kind)))
    assert sorted(await at_once(app, "/", 60)) == [200] * 20 + [429] * 40
    await limits.aclose()


STYLES: dict[Any, set[str]] = {
    "x": {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"},
    "ietf": {"ratelimit", "ratelimit-policy"},
    None: set(),
}


@pytest.mark.parametrize("style", STYLES)
async def test_first_requests_and_later_ones(style: Any) -> None:
    """The first requests are looked at for mistakes of the set-up; later ones get the same answers by a shorter way."""
    limits = RateLimits(headers=style)
    app = application(limits, Route("/", limits.limit("150/30d")(copy(hello))))
    async with client(app) as http:
        answers = [await http.get("/") for _ in range(151)]
    assert [answer.status_code for answer in answers] == [200] * 150 + [429]
    for answer in answers:
        assert {name for name in answer.headers if "ratelimit" in name} == STYLES[style]
    if style == "x":
        assert [int(answer.headers["x-ratelimit-remaining"]) for answer in answers] == [*range(149, -1, -1), 0]


async def test_stacked_decorators() -> None:
    """Two limits on one function are one decision: the one that refuses gives nothing to the other."""
    limits = RateLimits()
    hourly = limits.limit("9/hour")
    app = application(limits, Route("/", hourly(limits.limit("2/minute")(copy(hello)))))
    assert await statuses(app, *["/"] * 5) == [200, 200, 429, 429, 429]
    [limiter] = limits.limiters_of(hourly, "GET /")
    assert limiter.blocking.peek("192.0.2.1", 0).remaining == 7


async def test_class_of_endpoints() -> None:
    """A limit on a method is that method's; HEAD is GET's; what the class has no method for is the default's."""
    limits = RateLimits(default="9/minute")

    class Items(HTTPEndpoint):
        @limits.limit("3/minute")
        async def get(self, request: Request) -> Response:
            return PlainTextResponse("hello")

        @limits.limit("2/minute")
        def post(self, request: Request) -> Response:
            return PlainTextResponse("hello")

        async def put(self, request: Request) -> Response:
            return PlainTextResponse("hello")

    app = application(limits, Route("/items", Items))
    assert await statuses(app, *["/items"] * 3) == [200, 200, 200]
    assert await statuses(app, "/items", method="HEAD") == [429]
    assert await statuses(app, *["/items"] * 3, method="POST") == [200, 200, 429]
    for method, status, left in (("PUT", 200, "8"), ("DELETE", 405, "7")):
        answer = await fetch(app, "/items", method)
        assert (answer.status_code, answer.headers["X-RateLimit-Remaining"]) == (status, left)
    assert scopes(limits) == {"GET /items", "POST /items", "default"}


async def test_limited_class() -> None:
    """A limit on a class is for each of its methods; a subclass has it too."""
    limits = RateLimits()

    @limits.limit("1/minute")
    @limits.limit("9/hour", key=by_query)
    class Items(HTTPEndpoint):
        async def get(self, request: Request) -> Response:
            return PlainTextResponse("hello")

        post = get

    class More(Items):
        pass

    app = application(limits, Route("/items", Items), Route("/more", More))
    for path in ("/items?user=ann", "/more?user=ann"):
        assert await statuses(app, path, path) == [200, 429]
        assert await statuses(app, path, path, method="POST") == [200, 429]
    assert issubclass(More, Items) and isinstance(Items, type)


async def test_mounts(tmp_path: Path) -> None:
    """Mounts with routes, with parameters, with middleware, in one another, and hosts: templates have it all."""
    limits = RateLimits()
    limited = limits.limit("1/minute")(copy(hello))
    inner = Mount("/inner", routes=[Route("/", limited)], middleware=[Middleware(GZipMiddleware)])
    app = application(
        limits,
        Mount("/{tenant}/api", routes=[inner, Route("/own", limited)]),
        Mount("/app", app=Starlette(routes=[Route("/", limited)])),
        Host("{name}.example.com", app=Router([Route("/host", limited)])),
    )
    assert await statuses(app, "/a/api/inner/", "/b/api/inner/", "/a/api/own", "/app/", "/app/") == [
        *(200, 429, 200, 200, 429)
    ]
    assert await statuses(app, "/host", "/host", headers={"Host": "a.example.com"}) == [200, 429]
    routes = {"GET /{tenant}/api/inner/", "GET /{tenant}/api/own", "GET /app/", "GET {name}.example.com/host"}
    assert scopes(limits) == routes


async def test_default(tmp_path: Path) -> None:
    """Everything that has no limit of its own: routes, 404, 405, redirects, and mounts of every kind."""
    (tmp_path / "a.txt").write_text("hello")
    ran = []

    async def opaque(scope: Scope, receive: Receive, send: Send) -> None:
        ran.append(scope["path"])
        await PlainTextResponse("hello")(scope, receive, send)

    limits = RateLimits(default="8/minute")
    app = application(
        limits,
        Mount("/files", StaticFiles(directory=tmp_path)),
        Mount("/opaque", opaque),
        Mount("/routes", routes=[Route("/", hello)]),
        Route("/asgi", opaque_endpoint(opaque)),
    )
    expected = {"/plain": 200, "/no": 404, "/files/a.txt": 200, "/files/no": 404, "/opaque/": 200, "/routes/": 200}
    expected |= {"/routes/no": 404, "/asgi": 200}
    for left, (path, status) in zip(range(7, -1, -1), expected.items(), strict=True):
        answer = await fetch(app, path)
        assert (answer.status_code, answer.headers["X-RateLimit-Remaining"]) == (status, str(left)), path
    assert await statuses(app, *expected, "/plain/") == [429] * 9
    assert ran == ["/opaque/", "/asgi"]


def opaque_endpoint(app: Any) -> Any:
    """An endpoint that is an ASGI application."""

    class Endpoint:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, receive, send)

    return Endpoint()


async def test_exempt(tmp_path: Path) -> None:
    """Endpoints, routes, mounts and mounted applications."""
    (tmp_path / "a.txt").write_text("hello")
    limits = RateLimits(default="1/minute")
    app = application(
        limits,
        Route("/function", limits.exempt(copy(hello))),
        limits.exempt(Route("/route", copy(hello))),
        limits.exempt(Mount("/mount", routes=[Route("/", copy(hello))])),
        Mount("/files", limits.exempt(StaticFiles(directory=tmp_path))),
    )
    for path in ("/function", "/route", "/mount/", "/mount/no", "/files/a.txt"):
        assert 429 not in await statuses(app, path, path), path
    assert await statuses(app, "/plain", "/plain") == [200, 429]


async def test_classes_that_inherit() -> None:
    """What is said of a class is not said of its base; and an exemption is for that class alone."""
    limits = RateLimits(default="1/minute")

    class Base(HTTPEndpoint):
        async def get(self, request: Request) -> Response:
            return PlainTextResponse("hello")

    limited, exempt = limits.limit("2/minute")(type("Limited", (Base,), {})), limits.exempt(type("Exempt", (Base,), {}))
    both, plain = limits.limit("3/minute")(type("Both", (limited,), {})), type("Plain", (exempt,), {})
    classes = {"/base": Base, "/limited": limited, "/both": both, "/exempt": exempt, "/plain": plain}
    app = application(limits, *(Route(path, each) for path, each in classes.items()))
    assert await statuses(app, *["/both"] * 3, *["/limited"] * 3) == [200, 200, 429, 200, 200, 429]
    assert await statuses(app, "/exempt", "/exempt", "/base", "/base", "/plain") == [200, 200, 200, 429, 429]
    assert (await fetch(app, "/base")).headers["X-RateLimit-Limit"] == "1"


async def test_limited_mount() -> None:
    """An application that is mounted with a limit of its own meets the default too: the tighter one is told."""
    limits = RateLimits(default="9/minute")
    mounted = RateLimitMiddleware(Starlette(routes=[Route("/", hello)]), "1/minute", name="mounted")
    app = application(limits, Mount("/a", mounted))
    answers = [await fetch(app, "/a/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert [answer.headers.get_list("X-RateLimit-Limit") for answer in answers] == [["1"], ["1"]]


async def test_websocket_endpoint() -> None:
    """A class for WebSockets: connections and messages."""
    limits = RateLimits()

    @limits.limit("2/minute", key=by_query)
    @limits.messages("1/minute")
    class Echo(WebSocketEndpoint):
        encoding = "text"

        async def on_receive(self, websocket: WebSocket, data: str) -> None:
            await websocket.send_text(data)

    app = application(limits, WebSocketRoute("/{room}", Echo))
    async with websocket(app, "/a", query_string=b"user=ann") as socket:
        assert (await socket.received.get())["type"] == "websocket.accept"
        assert (await socket.say("a"))["text"] == "a"
        assert (await socket.say("b"))["code"] == 1013
    async with websocket(app, "/b", query_string=b"user=ann") as socket:
        assert (await socket.received.get())["type"] == "websocket.accept"
    async with websocket(app, "/c", query_string=b"user=ann") as socket:
        assert (await socket.received.get())["type"] == "websocket.close"
    assert scopes(limits) == {"WEBSOCKET /{room}", "WEBSOCKET /{room} messages"}


async def test_websocket_without_a_route() -> None:
    """It is closed as before, and counts for the default."""
    limits = RateLimits(default="1/minute")
    app = application(limits)
    codes = []
    for _ in range(2):
        async with websocket(app, "/nowhere") as socket:
            codes.append((await socket.received.get())["code"])
    assert codes == [1000, 1013]


async def test_routers_of_their_own() -> None:
    """Routes that are added to a mounted application while it runs are limited from their first request."""
    limits = RateLimits(default="2/minute")
    mounted = Starlette()
    app = application(limits, Mount("/mounted", mounted))
    assert await statuses(app, "/mounted/") == [404]
    mounted.router.routes.append(Route("/", copy(hello)))
    assert await statuses(app, "/mounted/", "/mounted/") == [200, 429]


async def test_not_installed() -> None:
    limits = RateLimits()

    @limits.limit("1/minute")
    class Items(HTTPEndpoint):
        async def get(self, request: Request) -> Response:
            raise AssertionError("it ran")

    app = Starlette(routes=[Route("/class", Items), Route("/", limits.limit("1/minute")(copy(hello)))])
    for path in ("/class", "/"):
        answer = await fetch(app, path)
        assert answer.status_code == 500
    limits.install(app)
    with pytest.raises(SetupError, match="already"):
        limits.install(app)
    assert await statuses(app, "/", "/") == [200, 429]
