"""Sanic: the middleware decides for handlers, views and blueprints, and every kind of answer carries the decision."""

import asyncio
import gc
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from sanic import Blueprint, HTTPResponse, Request, Sanic, Websocket, text
from sanic.exceptions import Unauthorized
from sanic.response import file_stream
from sanic.views import HTTPMethodView

import headgate
from headgate import Decision
from headgate.web.exchange import ResponseInfo
from headgate.web.limit import SetupError
from headgate.web.login import LoginThrottle
from headgate.web.sanic import RateLimits
from tests.support.servers import Server

CLIENT = "127.0.0.1"
names = (f"test-{os.getpid()}-{number}" for number in itertools.count())  # Sanic knows applications by name


def application(limits: RateLimits | None = None) -> Sanic[Any, Any]:
    app: Sanic[Any, Any] = Sanic(next(names), configure_logging=False)
    app.config.TOUCHUP = False  # it rewrites methods of Sanic for the one application of a process
    if limits is not None:
        limits.init_app(app)
    return app


def handler() -> Any:
    async def hello(request: Request, **matched: str) -> HTTPResponse:
        return text("hello")

    return hello


@asynccontextmanager
async def serving(app: Sanic[Any, Any]) -> AsyncIterator[httpx.AsyncClient]:
    """Sanic's own server, in this event loop."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server: Any = await app.create_server(sock=listening, return_asyncio_server=True)
        await server.startup()
        base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            yield client
        for connection in server.connections:
            connection.close_if_idle()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def in_asgi(app: Sanic[Any, Any]) -> AsyncIterator[httpx.AsyncClient]:
    """The same application as an ASGI application."""
    received: asyncio.Queue[Any] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan"}, received.get, sent.put))
    await received.put({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as client:
        yield client
    await received.put({"type": "lifespan.shutdown"})
    await life


async def statuses(client: httpx.AsyncClient, *paths: str, method: str = "GET", **arguments: Any) -> list[int]:
    return [(await client.request(method, path, **arguments)).status_code for path in paths]


def scopes(limits: RateLimits) -> set[str]:
    return {limiter.scope for limiter in limits.known_limiters()}


@pytest.mark.parametrize("serve", [serving, in_asgi])
async def test_refuses_and_tells(serve: Any) -> None:
    limits = RateLimits()
    app = application(limits)

    @app.get("/")
    @limits.limit("2/minute")
    def index(request: Request) -> HTTPResponse:
        made: Decision = request.ctx.rate_limit
        return text(str(made.remaining))

    async with serve(app) as client:
        first, second, third = [await client.get("/") for _ in range(3)]
        assert [first.text, second.text] == ["1", "0"]
        assert [first.headers["x-ratelimit-remaining"], first.headers["x-ratelimit-limit"]] == ["1", "2"]
        assert third.status_code == 429 and third.headers["content-type"] == "application/problem+json"
        assert third.headers["retry-after"] == "30" and third.headers["cache-control"] == "no-store"
        assert third.json()["retryAfterSeconds"] == 30


async def test_exact(redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20, by two applications."""
    made = [RateLimits(store=redis_server.url) for _ in range(2)]
    apps = [application(limits) for limits in made]
    for app, limits in zip(apps, made, strict=True):
        app.add_route(limits.limit("20/hour")(handler()), "/")
    async with serving(apps[0]) as one, serving(apps[1]) as other:
        answers = await asyncio.gather(*[client.get("/") for client in [one, other] * 30])
    assert sorted(answer.status_code for answer in answers) == [200] * 20 + [429] * 40
    for limits in made:
        await limits.aclose()


async def test_one_decision(redis_server: Server) -> None:
    """Limits of group, blueprint and handler are one round trip, all or nothing, whatever the order of decorators."""
    limits = RateLimits(store=redis_server.url)
    app = application(limits)
    blueprint = Blueprint("items", url_prefix="/items", version=1)

    @limits.limit("10/minute")
    @blueprint.get("/<number:int>")
    @limits.limit("2/day")
    async def item(request: Request, number: int) -> HTTPResponse:
        return text(str(number))

    limits.limit("30/hour")(blueprint)
    group = limits.limit("40/hour")(Blueprint.group(blueprint, url_prefix="/shop"))
    app.blueprint(group)
    async with serving(app) as client:
        assert await statuses(client, "/v1/shop/items/1") == [200]
        before = redis_server.calls("evalsha")
        assert await statuses(client, "/v1/shop/items/2", "/v1/shop/items/3") == [200, 429]
        assert redis_server.calls("evalsha") - before == 2
    assert scopes(limits) == {"GET /v1/shop/items/<number:int>"}
    remaining = {
        limiter.rule.quotas[0].limit: (await limiter.waiting.peek(CLIENT, 0)).remaining
        for limiter in limits.known_limiters()
    }
    assert remaining == {40: 38, 30: 28, 10: 8, 2: 0}  # the third request has taken nothing
    await limits.aclose()


async def test_forged_addresses() -> None:
    """Only the peer counts, or what a trusted peer says; whatever Sanic itself is told to believe."""
    forged = [{"X-Forwarded-For": f"198.51.100.{number}", "X-Real-IP": f"198.51.100.{number}"} for number in range(3)]
    limits = RateLimits()
    app = application(limits)
    app.config.REAL_IP_HEADER, app.config.PROXIES_COUNT = "X-Real-IP", 1
    app.add_route(limits.limit("2/hour")(handler()), "/")
    async with serving(app) as client:
        assert [(await client.get("/", headers=headers)).status_code for headers in forged] == [200, 200, 429]
    limits = RateLimits(trusted_proxies=["127.0.0.1"])
    app = application(limits)
    app.add_route(limits.limit("2/hour")(handler()), "/")
    async with serving(app) as client:
        assert [(await client.get("/", headers=headers)).status_code for headers in forged] == [200] * 3
        last = {"X-Forwarded-For": "203.0.113.1, 198.51.100.9"}
        assert await statuses(client, "/", "/", "/", headers=last) == [200, 200, 429]


async def test_default_is_for_the_rest() -> None:
    """Routes without a limit, 404, 405 and requests that cannot be read share the default; a limited route does not."""
    limits = RateLimits(default="4/hour")
    app = application(limits)
    app.add_route(handler(), "/plain", name="plain")
    app.add_route(limits.limit("1/hour")(handler()), "/own/<name>", name="own")
    app.add_route(limits.exempt(handler()), "/free", name="free")
    async with serving(app) as client:
        assert await statuses(client, "/plain", "/own/1", "/nothing") == [200, 200, 404]
        reader, writer = await asyncio.open_connection(CLIENT, client.base_url.port)
        writer.write(b"nonsense\r\n\r\n")
        assert b"400 Bad Request\r\n" in await reader.read()
        writer.close()
        answer = await client.post("/plain")
        assert answer.status_code == 405 and answer.headers["x-ratelimit-remaining"] == "0"
        assert await statuses(client, "/plain", "/own/2", "/nothing") == [429] * 3
        assert await statuses(client, "/plain", method="POST") == [429]
        assert await statuses(client, *["/free"] * 9) == [200] * 9
        assert "x-ratelimit-limit" not in (await client.get("/free")).headers
    assert scopes(limits) == {"default", "GET /own/<name:str>"}


async def test_views() -> None:
    """Each method of a view counts by itself, by its own limits and those of the class."""
    limits = RateLimits()
    app = application(limits)

    @limits.limit("3/hour")
    class Items(HTTPMethodView):
        @limits.limit("1/hour")
        async def get(self, request: Request) -> HTTPResponse:
            return text(str(request.ctx.rate_limit.limit))

        @staticmethod
        def post(request: Request) -> HTTPResponse:
            return text("made")

    class Decorated(HTTPMethodView):
        decorators = [limits.limit("2/hour")]  # noqa: RUF012  # as Sanic has it

        def get(self, request: Request) -> HTTPResponse:
            return text("hello")

    app.add_route(Items.as_view(), "/items")
    app.add_route(Decorated.as_view(), "/decorated")
    async with serving(app) as client:
        assert await statuses(client, "/items", "/items") == [200, 429]
        assert await statuses(client, *["/items"] * 4, method="POST") == [200, 200, 200, 429]
        assert await statuses(client, *["/decorated"] * 3) == [200, 200, 429]
    assert scopes(limits) == {"GET /items", "POST /items", "GET /decorated"}


async def test_exempt_blueprints() -> None:
    """What is exempt is free of the default and of the limits around it, and keeps its own."""
    limits = RateLimits(default="1/hour")
    app = application(limits)
    free, own, rest = (Blueprint(name, url_prefix=f"/{name}") for name in ("free", "own", "rest"))
    for blueprint in (free, own, rest):
        blueprint.add_route(handler(), "/", name="plain")
    rest.add_route(limits.exempt(handler()), "/exempt", name="exempt")
    limits.exempt(limits.limit("2/hour")(own))
    limits.exempt(free)
    app.blueprint(limits.limit("1/hour")(Blueprint.group(free, own, rest, url_prefix="/api")))
    async with serving(app) as client:
        assert await statuses(client, *["/api/free/"] * 4) == [200] * 4
        assert await statuses(client, *["/api/own/"] * 3) == [200, 200, 429]
        assert await statuses(client, *["/api/rest/"] * 2) == [200, 429]
        assert await statuses(client, *["/api/rest/exempt"] * 3) == [200] * 3


async def test_exempt_view_and_what_inherits() -> None:
    limits = RateLimits(default="1/hour")
    app = application(limits)
    free: Any = limits.exempt(type("Free", (HTTPMethodView,), {"get": lambda self, request: text("hello")}))
    more: Any = type("More", (free,), {})
    app.add_route(free.as_view(), "/free", name="free")
    app.add_route(more.as_view(), "/more", name="more")
    async with serving(app) as client:
        assert await statuses(client, "/free", "/free", "/more", "/more") == [200, 200, 200, 429]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("serve", [serving, in_asgi])
async def test_two_limits_around_an_application(serve: Any, turned: bool) -> None:
    """Whichever comes first: answers and the handler are told the tighter decision, a refusal is told as such."""
    app = application()
    wide, narrow = RateLimits(name="wide"), RateLimits(name="narrow")
    for limits in (narrow, wide) if turned else (wide, narrow):
        limits.init_app(app)

    @app.get("/")
    @wide.limit("9/hour")
    @narrow.limit("2/hour")
    async def index(request: Request) -> HTTPResponse:
        return text(str(request.ctx.rate_limit.limit))

    async with serve(app) as client:
        answers = [await client.get("/") for _ in range(3)]
    assert [answer.text for answer in answers[:2]] == ["2", "2"]
    names = ("x-ratelimit-limit", "x-ratelimit-remaining", "retry-after")
    told = [[answer.headers.get(name) for name in names] for answer in answers]
    assert told == [["2", "1", None], ["2", "0", None], ["2", "0", "1800"]]


def test_installed_on_the_wrong_thing() -> None:
    limits: Any = RateLimits()
    for target in (None, "shop", Sanic, Blueprint("shop")):
        with pytest.raises(TypeError, match="init_app takes a Sanic application, got"):
            limits.init_app(target)
    assert not limits.applications


async def every_kind(request: Request, kind: str) -> HTTPResponse | None:
    if kind == "refuse":
        raise Unauthorized("no")
    if kind == "bug":
        raise ValueError("a bug")
    if kind == "file":
        return await file_stream(__file__)  # type: ignore[return-value]
    response = await request.respond(headers={"X-Kind": "stream"})
    await response.send("one ")
    await response.send("two")
    await response.eof()
    return None


@pytest.mark.parametrize("serve", [serving, in_asgi])
@pytest.mark.parametrize("kind, status", [("stream", 200), ("file", 200), ("refuse", 401), ("bug", 500)])
async def test_every_answer_carries_headers(kind: str, status: int, serve: Any) -> None:
    """Streams, raised responses and errors; also if a middleware of the application returns the response."""
    limits = RateLimits()
    app = application(limits)
    app.on_response(lambda request, response: response)  # type: ignore[no-untyped-call]  # ends the other middlewares
    app.add_route(limits.limit("5/hour")(lambda *given, **named: every_kind(*given, **named)), "/<kind>", name="kind")
    async with serve(app) as client:
        answer = await client.get(f"/{kind}")
        assert answer.status_code == status and answer.headers.get_list("x-ratelimit-remaining") == ["4"]
        assert kind != "stream" or answer.text == "one two"


@pytest.mark.parametrize(
    "kind, answers", [("stream", [200] * 3), ("refuse", [401, 401, 429]), ("bug", [500, 500, 429])]
)
async def test_count_if(kind: str, answers: list[int], redis_server: Server) -> None:
    """Permits go back exactly, whatever the handler does: here failures count."""
    limits = RateLimits(store=redis_server.url)
    seen: list[ResponseInfo] = []

    def failed(response: ResponseInfo) -> bool:
        seen.append(response)
        return response.status_code >= 400

    app = application(limits)
    limited = limits.limit("2/hour", count_if=failed)(lambda *given, **named: every_kind(*given, **named))
    app.add_route(limited, "/<kind>", name="kind")
    async with serving(app) as client:
        assert await statuses(client, *[f"/{kind}"] * 3) == answers
    assert len(seen) == 3 - answers.count(429) and seen[0].status_code == answers[0]
    assert ("x-kind" in seen[0].headers) == (kind == "stream")
    await limits.aclose()


async def test_a_client_that_leaves() -> None:
    """Sanic cancels the handler of a client that has left: status 499. What came before on its connection stays."""
    limits = RateLimits()
    started, seen = asyncio.Event(), []
    gone = asyncio.Event()

    def stayed(response: ResponseInfo) -> bool:
        seen.append(response.status_code)
        if response.status_code == 499:
            gone.set()
        return response.status_code != 499

    app = application(limits)

    @limits.limit("2/hour", count_if=stayed)
    async def slow(request: Request) -> HTTPResponse:
        if request.args.get("wait"):
            started.set()
            await asyncio.Event().wait()
        return text("done")

    app.add_route(slow, "/")
    async with serving(app) as client:
        _, writer = await asyncio.open_connection(CLIENT, client.base_url.port)
        for query in ("", "?wait=1"):
            writer.write(f"GET /{query} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await started.wait()
        writer.close()
        await gone.wait()
    assert seen == [200, 499]
    [limiter] = limits.known_limiters()
    assert limiter.blocking.peek(CLIENT, 0).remaining == 1


async def test_requests_of_a_connection_are_forgotten() -> None:
    """A request whose answer is sent is not kept, however many follow on its connection."""
    limits = RateLimits()
    app = application(limits)
    served: list[weakref.ref[Request]] = []

    @limits.limit("9/hour", count_if=lambda response: True)
    async def index(request: Request) -> HTTPResponse:
        served.append(weakref.ref(request))
        return text("hello")

    app.add_route(index, "/")
    async with serving(app) as client:
        assert await statuses(client, "/", "/", "/") == [200] * 3
        gc.collect()
        assert [request() for request in served[:-1]] == [None, None]


def talking(limits: RateLimits, count_if: Any = bool) -> Sanic[Any, Any]:
    app = application(limits)

    @limits.limit("1/hour", count_if=count_if)
    async def talk(request: Request, socket: Websocket) -> None:
        await socket.send(str(request.ctx.rate_limit.remaining))

    app.add_websocket_route(talk, "/")
    return app


async def test_websocket() -> None:
    """A WebSocket over its limit gets the 429 before it is accepted. To count_if one that may connect is a 101."""
    async with (
        serving(talking(RateLimits(), lambda response: response.status_code == 101)) as client,
        aiohttp.ClientSession(str(client.base_url)) as session,
    ):
        async with session.ws_connect("/") as connection:
            assert await connection.receive_str() == "0"
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/")
        assert refused.value.status == 429


@pytest.mark.parametrize("extensions", [{}, {"websocket.http.response": {}}])
async def test_websocket_in_asgi(extensions: dict[str, Any]) -> None:
    """On a server that can send one the client gets the 429, else the code that says to try again later."""
    app = talking(RateLimits())
    scope: dict[str, Any] = {
        "type": "websocket",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "client": (CLIENT, 1),
    }
    scope |= {"headers": [(b"host", b"a")], "scheme": "ws", "extensions": extensions, "subprotocols": []}
    async with in_asgi(app):
        for expected in ("websocket.accept", "websocket.http.response.start" if extensions else "websocket.close"):
            sent: list[Any] = []

            async def receive() -> Any:
                return {"type": "websocket.connect"}

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            await app(dict(scope), receive, send)
            assert sent[0]["type"] == expected
    assert sent[0].get("status", sent[0].get("code")) == (429 if extensions else 1013)


async def test_on_denied() -> None:
    """A response, plain or async, with the headers that it does not set itself."""
    limits = RateLimits(default="1/hour")

    async def teapot(request: Request, decision: Decision) -> HTTPResponse:
        return text(f"{request.path} {decision.remaining}", status=418, headers={"Retry-After": "7"})

    limits.on_denied = teapot
    app = application(limits)
    own = limits.limit("1/hour", on_denied=lambda request, decision: text("no", status=503))(handler())
    app.add_route(own, "/own")
    async with serving(app) as client:
        assert await statuses(client, "/own", "/own", "/nothing") == [200, 503, 404]
        answer = await client.get("/nothing")
        assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (418, "/nothing 0", "7")
        assert answer.headers["x-ratelimit-limit"] == "1" and answer.headers["cache-control"] == "no-store"


async def test_not_installed() -> None:
    """A limited handler, view or blueprint of an application without the limits does not run."""
    limits = RateLimits()
    app = application()
    ran: list[Any] = []

    @limits.limit("1/hour")
    class Items(HTTPMethodView):
        def get(self, request: Request) -> HTTPResponse:
            ran.append(request)
            return text("items")

    async def index(request: Request) -> HTTPResponse:
        ran.append(request)
        return text("index")

    blueprint = limits.limit("1/hour")(Blueprint("limited", url_prefix="/blueprint"))
    blueprint.add_route(index, "/")
    app.add_route(limits.limit("1/hour")(index), "/", name="index")
    app.add_route(Items.as_view(), "/items")
    app.blueprint(blueprint)
    raised: list[Exception] = []

    @app.exception(SetupError)
    async def see(request: Request, error: Exception) -> HTTPResponse:
        raised.append(error)
        return text("wrong", status=500)

    async with serving(app) as client:
        assert await statuses(client, "/", "/items", "/blueprint/") == [500] * 3
        assert not ran and all("limits.init_app(app)" in str(error) for error in raised)
        limits.enabled = False
        assert await statuses(client, "/", "/items", "/blueprint/") == [200] * 3


async def test_blueprint_of_an_application() -> None:
    """A blueprint can be limited after it was registered, if the application has the limits."""
    limits = RateLimits()
    app, blueprint = application(), Blueprint("late", url_prefix="/late")
    blueprint.add_route(handler(), "/")
    app.blueprint(blueprint, url_prefix="/elsewhere")
    with pytest.raises(SetupError, match=r"limits\.init_app\(app\) first"):
        limits.limit("1/hour")(blueprint)
    limits = RateLimits(app)
    limits.limit("1/hour")(blueprint)
    async with serving(app) as client:
        assert await statuses(client, "/elsewhere/", "/elsewhere/", "/late/") == [200, 429, 404]


async def test_installed_twice() -> None:
    """A request counts once, and has its headers once."""
    limits = RateLimits(default="5/hour")
    app = application(limits)
    limits.init_app(app)
    app.on_request(limits._on_request)
    app.add_route(handler(), "/")
    async with serving(app) as client:
        assert (await client.get("/")).headers.get_list("x-ratelimit-remaining") == ["4"]


async def test_preflight_and_disabled() -> None:
    app = application()
    limits = RateLimits(app, default="1/hour")
    app.add_route(handler(), "/")
    async with serving(app) as client:
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        assert await statuses(client, *["/"] * 3, method="OPTIONS", headers=preflight) == [405] * 3
        assert await statuses(client, "/", "/") == [200, 429]
        limits.enabled = False
        assert await statuses(client, "/", "/") == [200, 200]


PROGRAM = """
from sanic import Sanic, text
from headgate.web.sanic import RateLimits

app = Sanic("program")
limits = RateLimits(app, store={store!r})

@app.get("/")
@limits.limit("20/hour")
async def index(request):
    return text("hello")

if __name__ == "__main__":
    app.run(port={port}, workers=2, motd=False, access_log=False)
"""


@pytest.mark.server
async def test_with_workers(redis_server: Server, tmp_path: Path) -> None:
    """Exact over the workers of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM.format(store=redis_server.url, port=port))
    with running(program, log) as server, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        while not listening(client):
            assert server.poll() is None, log.read_text()
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as crowd:
            answers = await asyncio.gather(*[crowd.get("/") for _ in range(60)])
    assert sorted(answer.status_code for answer in answers) == [200] * 20 + [429] * 40


@contextmanager
def running(program: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"PYTHONPATH": str(Path(headgate.__file__).parent.parent)}
    with log.open("wb") as out:
        command = [sys.executable, str(program)]
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield server
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # a Sanic that is told to stop while it starts may wait for ever
        server.wait()


def listening(client: httpx.Client) -> bool:
    try:
        return client.get("/nothing").status_code == 404
    except httpx.TransportError:
        time.sleep(0.02)
        return False


async def test_warns_of_workers(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of Sanic is a child of another process, also if it is the only one: their number counts."""
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setenv("SANIC_WORKER_NAME", "Sanic-Server-0-0")
    limits = RateLimits(default="5/hour")
    app = application(limits)
    app.add_route(handler(), "/")
    async with serving(app) as client:
        assert await statuses(client, "/") == [200] and "every worker admits" not in caplog.text
        app.state.workers = 2
        assert await statuses(client, "/") == [200] and "every worker admits" in caplog.text


async def test_login_throttle() -> None:
    """It knows the address of a request, or the one that a trusted proxy names."""
    throttle = LoginThrottle(trusted_proxies=["127.0.0.1"])

    async def login(request: Request) -> HTTPResponse:
        async with throttle.attempt(request, "ann"):
            return text(throttle.address(request))

    app = application(RateLimits())
    app.add_route(login, "/")
    async with serving(app) as client:
        answer = await client.get("/", headers={"X-Forwarded-For": "203.0.113.9"})
        assert (answer.status_code, answer.text) == (200, "203.0.113.9")
