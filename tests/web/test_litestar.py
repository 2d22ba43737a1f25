"""Litestar: guards of every layer are one exact decision, and every kind of answer carries it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from litestar import Controller, Litestar, MediaType, Request, Response, Router, WebSocket, asgi, get, websocket
from litestar.config.cors import CORSConfig
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException, NotAuthorizedException, WebSocketDisconnect
from litestar.handlers import BaseRouteHandler
from litestar.response import Stream
from litestar.testing import TestClient
from litestar.types import Receive, Scope, Send

from headgate import Decision
from headgate.web.asgi import RateLimitMiddleware
from headgate.web.exchange import ResponseInfo
from headgate.web.limit import SetupError
from headgate.web.litestar import RateLimits
from tests.support.servers import Server

CLIENT = "192.0.2.1"


@get("/plain", media_type=MediaType.TEXT)
async def plain() -> str:
    return "hello"


def handler(path: str, *guards: Any, **options: Any) -> Any:
    @get(path, guards=guards, media_type=MediaType.TEXT, **options)
    async def answer() -> str:
        return "hello"

    return answer


def application(limits: RateLimits, *handlers: Any, **options: Any) -> Litestar:
    return Litestar(list(handlers), plugins=[limits], logging_config=None, **options)


def client(app: Any, address: str = CLIENT) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 50000))
    return httpx.AsyncClient(transport=transport, base_url="http://testserver")


async def statuses(app: Any, *paths: str, method: str = "GET", **arguments: Any) -> list[int]:
    async with client(app) as http:
        return [(await http.request(method, path, **arguments)).status_code for path in paths]


async def fetch(app: Any, path: str, method: str = "GET", **arguments: Any) -> httpx.Response:
    async with client(app) as http:
        return await http.request(method, path, **arguments)


async def messages(app: Any, **scope: Any) -> list[Any]:
    """What an ASGI server is sent."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"} if scope["type"] == "websocket" else {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"headers": [], "client": (CLIENT, 1), "query_string": b"", **scope}, receive, send)
    return sent


def scopes(limits: RateLimits) -> set[str]:
    return {limiter.scope for limiter in limits.known_limiters()}


async def test_refuses_and_tells() -> None:
    limits = RateLimits()

    @get("/", guards=[limits.limit("2/minute")])
    async def index(request: Request[Any, Any, Any]) -> int:
        made: Decision = request.state.rate_limit
        return made.remaining

    app = application(limits, index)
    first, second, third = [await fetch(app, "/") for _ in range(3)]
    assert [first.json(), second.json()] == [1, 0]
    assert [first.headers["x-ratelimit-remaining"], first.headers["x-ratelimit-limit"]] == ["1", "2"]
    assert third.status_code == 429 and third.headers["content-type"] == "application/problem+json"
    assert third.headers["retry-after"] == "30" and third.headers["cache-control"] == "no-store"
    assert third.json()["retryAfterSeconds"] == 30 and third.headers["x-ratelimit-remaining"] == "0"
    async with client(app, "192.0.2.2") as other:
        assert (await other.get("/")).status_code == 200


async def test_exact(redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20, by two applications."""
    made = []
    for _ in range(2):
        limits = RateLimits(store=redis_server.url)
        made.append((limits, application(limits, handler("/", limits.limit("20/hour")))))
    async with client(made[0][1]) as one, client(made[1][1]) as other:
        answers = await asyncio.gather(*[http.get("/") for http in [one, other] * 30])
    assert sorted(answer.status_code for answer in answers) == [200] * 20 + [429] * 40
    for limits, _ in made:
        await limits.aclose()


async def test_one_decision(redis_server: Server) -> None:
    """Limits of application, router, controller and handler are one round trip, all or nothing."""
    limits = RateLimits(store=redis_server.url)

    class Items(Controller):
        path = "/items"
        guards = [limits.limit("30/hour")]  # noqa: RUF012  # as Litestar has it

        @get("/{number:int}", guards=[limits.limit("10/minute"), limits.limit("2/day")])
        async def item(self) -> None: ...

    router = Router("/v1", route_handlers=[Items], guards=[limits.limit("40/hour")])
    app = application(limits, router, guards=[limits.limit("50/hour")])
    assert await statuses(app, "/v1/items/1") == [200]
    before = redis_server.calls("evalsha")
    assert await statuses(app, "/v1/items/2", "/v1/items/3") == [200, 429]
    assert redis_server.calls("evalsha") - before == 2
    assert scopes(limits) == {"GET /v1/items/{number}"}
    left = {
        limiter.rule.quotas[0].limit: (await limiter.waiting.peek(CLIENT, 0)).remaining
        for limiter in limits.known_limiters()
    }
    assert left == {50: 48, 40: 38, 30: 28, 10: 8, 2: 0}  # the third request has taken nothing
    await limits.aclose()


async def test_forged_addresses() -> None:
    """Forwarded headers of a peer that is not trusted change nothing; of one that is, the last untrusted hop counts."""
    limits = RateLimits(trusted_proxies=["10.0.0.0/8"])
    app = application(limits, handler("/", limits.limit("2/hour")))
    forged = [(await fetch(app, "/", headers={"X-Forwarded-For": f"198.51.100.{n}"})).status_code for n in range(3)]
    assert forged == [200, 200, 429]
    async with client(app, "10.1.1.1") as proxy:
        chain = [await proxy.get("/", headers={"X-Forwarded-For": f"203.0.113.{n}, 198.51.100.9"}) for n in range(3)]
        assert [answer.status_code for answer in chain] == [200, 200, 429]
        assert (await proxy.get("/", headers={"X-Forwarded-For": "198.51.100.10"})).status_code == 200


async def test_counters_are_apart() -> None:
    """Two handlers with different quotas, two with the same one, and one handler at two places: four counters."""
    limits = RateLimits()
    two, five = limits.limit("2/hour"), limits.limit("5/hour")
    shared = handler("/shared/{name:str}", two)
    app = application(
        limits, handler("/two", two), handler("/five", five), shared, Router("/v1", route_handlers=[shared])
    )
    assert await statuses(app, *["/two"] * 3) == [200, 200, 429]
    assert await statuses(app, *["/five"] * 5) == [200] * 5
    assert await statuses(app, "/shared/a", "/shared/b", "/shared/c") == [200, 200, 429]
    assert await statuses(app, *["/v1/shared/a"] * 3) == [200, 200, 429]
    assert scopes(limits) == {"GET /two", "GET /five", "GET /shared/{name}", "GET /v1/shared/{name}"}


async def test_one_handler_at_several_paths() -> None:
    limits = RateLimits()

    @get(["/a", "/b/{name:str}"], guards=[limits.limit("1/hour")])
    async def either() -> None: ...

    assert await statuses(application(limits, either), "/a", "/b/1", "/a", "/b/2") == [200, 200, 429, 429]
    assert scopes(limits) == {"GET /a", "GET /b/{name}"}


async def test_default_is_for_the_rest() -> None:
    """Routes without a limit, 404, 405 and mounted applications share the default; a limited route has its own."""
    limits = RateLimits(default="4/hour")
    calls = []

    @asgi("/mount", is_mount=True, copy_scope=True)
    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(scope["path"])
        await Response("mounted").to_asgi_response(app=None, request=Request(scope))(scope, receive, send)

    app = application(limits, plain, mounted, handler("/own", limits.limit("1/hour")))
    assert await statuses(app, "/plain", "/mount/x", "/own", "/nothing") == [200, 200, 200, 404]
    answer = await fetch(app, "/plain", "POST")
    assert answer.status_code == 405 and answer.headers["x-ratelimit-remaining"] == "0"
    assert await statuses(app, "/plain", "/mount/x", "/own", "/nothing") == [429, 429, 429, 429]
    assert calls == ["/x/"] or calls == ["/"]  # a denied request does not reach what it asks for
    for method in ("GET", "HEAD"):
        start, body = await messages(app, type="http", method=method, path="/nothing")
        assert start["status"] == 429 and (b"content-type", b"application/problem+json") in start["headers"]
        assert bool(body["body"]) == (method == "GET")
    assert (await fetch(app, "/nothing")).json()["status"] == 429


async def test_exempt() -> None:
    """A handler, from either side of its decorator, a controller, a router, and by opt; nearer ones may differ."""
    limits = RateLimits(default="1/hour")

    @limits.exempt
    @get("/above")
    async def above() -> None: ...

    @get("/below", sync_to_thread=True)
    @limits.exempt
    def below() -> None: ...

    @limits.exempt
    class Inside(Controller):
        path = "/controller"

        @get()
        async def method(self) -> None: ...

    router = limits.exempt(Router("/router", route_handlers=[plain, handler("/not", opt={"rate_limit_exempt": False})]))
    app = application(limits, above, below, Inside, router, handler("/opt", rate_limit_exempt=True), plain)
    paths = ["/above", "/below", "/controller", "/router/plain", "/opt"]
    assert await statuses(app, *paths * 2) == [200] * 10
    assert await statuses(app, "/router/not", "/plain") == [200, 429]
    assert "x-ratelimit-limit" not in (await fetch(app, "/opt")).headers


async def test_exempt_from_the_limits_around() -> None:
    """What is exempt is free of the limits of the layers around it, and keeps its own."""
    limits = RateLimits(default="1/hour")
    inner = [handler("/free", rate_limit_exempt=True), handler("/own", limits.limit("2/hour"), rate_limit_exempt=True)]
    router = Router("/r", route_handlers=[plain], guards=[limits.limit("3/hour")], opt={"rate_limit_exempt": True})
    app = application(limits, *inner, router, plain, guards=[limits.limit("1/hour")])
    assert await statuses(app, *["/free"] * 9) == [200] * 9
    assert await statuses(app, *["/own"] * 3) == [200, 200, 429]
    assert await statuses(app, *["/r/plain"] * 4) == [200, 200, 200, 429]
    assert await statuses(app, *["/plain"] * 2) == [200, 429]


async def test_exceptions_carry_headers() -> None:
    limits = RateLimits()

    @get("/{kind:str}", guards=[limits.limit("9/hour")])
    async def fail(request: Request[Any, Any, Any]) -> None:
        raise HTTPException(status_code=418) if request.path_params["kind"] == "teapot" else ValueError("a bug")

    app = application(limits, fail)
    for path, status, left in [("/teapot", 418, "8"), ("/bug", 500, "7")]:
        answer = await fetch(app, path)
        assert (answer.status_code, answer.headers["x-ratelimit-remaining"]) == (status, left)
        assert len(answer.headers.get_list("x-ratelimit-remaining")) == 1


async def test_stream() -> None:
    """Headers are sent once, with the start; count_if decides by the status, not by how long the stream is."""
    limits = RateLimits()

    async def chunks() -> AsyncIterator[str]:
        yield "one "
        yield "two"

    @get("/", guards=[limits.limit("3/hour", count_if=lambda response: response.status_code != 200)])
    async def stream() -> Stream:
        return Stream(chunks())

    app = application(limits, stream)
    for _ in range(4):
        answer = await fetch(app, "/")
        assert (answer.text, answer.headers["x-ratelimit-remaining"]) == ("one two", "2")


@pytest.mark.parametrize("path, answers", [("/204", [204] * 3), ("/401", [401, 401, 429]), ("/raise", [500, 500, 429])])
async def test_count_if(path: str, answers: list[int], redis_server: Server) -> None:
    """Permits go back exactly, whatever the handler does: here failures count."""
    limits = RateLimits(store=redis_server.url)
    seen: list[ResponseInfo] = []

    def failed(response: ResponseInfo) -> bool:
        seen.append(response)
        return response.status_code >= 400

    @get("/{kind:str}", guards=[limits.limit("2/hour", count_if=failed)])
    async def answer(request: Request[Any, Any, Any]) -> Response[None]:
        return Response(None, status_code=int(request.path_params["kind"]), headers={"X-Kind": "mine"})

    assert await statuses(application(limits, answer), path, path, path) == answers
    assert len(seen) == 3 - answers.count(429) and seen[0].status_code == answers[0]
    assert ("x-kind" in seen[0].headers) == (path != "/raise")
    await limits.aclose()


async def test_a_client_that_leaves() -> None:
    """A handler that is cancelled has no answer: status 499."""
    limits = RateLimits()
    started, seen = asyncio.Event(), asyncio.Event()

    def left(response: ResponseInfo) -> bool:
        seen.set()
        return response.status_code != 499

    @get("/", guards=[limits.limit("1/hour", count_if=left)])
    async def slow() -> None:
        started.set()
        await asyncio.Event().wait()

    app = application(limits, slow)
    request = asyncio.create_task(fetch(app, "/"))
    await started.wait()
    request.cancel()
    await seen.wait()
    [limiter] = limits.known_limiters()
    assert limiter.blocking.peek(CLIENT, 0).remaining == 1


async def test_on_denied() -> None:
    """A Litestar response, plain or async, with the headers that it does not set itself; also in place of a 404."""
    limits = RateLimits(default="1/hour")

    async def teapot(request: Request[Any, Any, Any], decision: Decision) -> Response[dict[str, int]]:
        assert request.url.path and not decision
        return Response({"left": decision.remaining}, status_code=418, headers={"Retry-After": "7"})

    limits.on_denied = teapot
    own = handler("/own", limits.limit("1/hour", on_denied=lambda request, decision: Response("no", status_code=503)))
    usual = handler("/usual", limits.limit("1/hour", on_denied=lambda request, decision: None))
    app = application(limits, own, usual)
    assert await statuses(app, "/own", "/own", "/nothing") == [200, 503, 404]
    assert await statuses(app, "/usual", "/usual") == [200, 429]
    answer = await fetch(app, "/nothing")
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (418, {"left": 0}, "7")
    assert answer.headers["x-ratelimit-limit"] == "1"
    assert (await fetch(app, "/own")).headers["cache-control"] == "no-store"


async def test_exception_handler_of_the_application() -> None:
    """One for all exceptions does not see refusals; one for 429 answers them, and the headers stay."""
    limits = RateLimits()

    def answer(status: int) -> Any:
        return lambda request, exception: Response("mine", status_code=status)

    app = application(limits, handler("/", limits.limit("1/hour")), exception_handlers={HTTPException: answer(400)})
    assert await statuses(app, "/", "/") == [200, 429]
    app = application(limits, handler("/429", limits.limit("1/hour")), exception_handlers={429: answer(429)})
    assert await statuses(app, "/429") == [200]
    refused = await fetch(app, "/429")
    assert refused.text == "mine" and refused.headers["retry-after"] == "3600"


async def test_a_guard_between() -> None:
    """A limit after a guard that finds the user may use it; what was taken before goes back if it refuses."""
    limits = RateLimits()

    def authenticate(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if "user" not in connection.headers:
            raise NotAuthorizedException
        connection.state.user = connection.headers["user"]

    by_user = limits.limit("1/hour", key=lambda request: request.state.user, scope="user")
    outer = limits.limit("5/hour", scope="all")
    app = application(limits, handler("/", authenticate, by_user), guards=[outer])
    assert await statuses(app, "/", headers={"user": "a"}) == [200]
    assert await statuses(app, "/", "/", headers={"user": "a"}) == [429, 429]
    assert await statuses(app, "/", headers={"user": "b"}) == [200]
    assert await statuses(app, "/") == [401]
    [limiter] = [limiter for limiter in limits.known_limiters() if limiter.scope == "all"]
    assert limiter.blocking.peek(CLIENT, 0).remaining == 2


async def test_several_subjects(redis_server: Server) -> None:
    """Limits that follow each other are one round trip, also if they have different subjects."""
    limits = RateLimits(store=redis_server.url)
    app = application(limits, handler("/", limits.limit("9/hour"), limits.limit("1/hour", key="header:X-API-Key")))
    assert await statuses(app, "/", headers={"X-API-Key": "a"}) == [200]
    before = redis_server.calls("evalsha")
    assert await statuses(app, "/", headers={"X-API-Key": "a"}) == [429]
    assert await statuses(app, "/", headers={"X-API-Key": "b"}) == [200]
    assert redis_server.calls("evalsha") - before == 2
    await limits.aclose()


async def test_one_subject_around_a_guard(redis_server: Server) -> None:
    """Limits of one subject are one round trip, whatever guards stand between them."""
    limits = RateLimits(store=redis_server.url)
    met: list[str] = []

    def see(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        met.append("guard")

    inner = handler("/", see, limits.limit("1/hour"), see)
    app = application(limits, inner, guards=[limits.limit("9/hour")])
    assert await statuses(app, "/") == [200]
    before = redis_server.calls("evalsha")
    assert await statuses(app, "/") == [429] and met == ["guard"] * 2
    assert redis_server.calls("evalsha") - before == 1
    await limits.aclose()


def test_websocket() -> None:
    """A WebSocket over its limit is closed before it is accepted, by its own limit or by the default."""
    limits = RateLimits(default="1/hour")

    async def talk(socket: WebSocket[Any, Any, Any]) -> None:
        await socket.accept()
        await socket.send_text(str(socket.state.rate_limit.remaining))
        await socket.close()

    handlers = [websocket("/own/{name:str}", guards=[limits.limit("2/hour")])(talk), websocket("/default")(talk)]
    with TestClient(application(limits, *handlers)) as http:
        for path in ["/own/a", "/own/b", "/default"]:
            with http.websocket_connect(path) as socket:
                assert socket.receive_text() == ("1" if path == "/own/a" else "0")
        for path in ["/own/c", "/default", "/nothing"]:
            with pytest.raises(WebSocketDisconnect) as closed, http.websocket_connect(path):
                pass
            assert closed.value.code == 1013
    assert "WEBSOCKET /own/{name}" in scopes(limits)


async def test_websocket_refusal_is_an_answer() -> None:
    """On a server that can send one, the client gets the 429 with its headers."""
    limits = RateLimits()

    @websocket("/", guards=[limits.limit("1/hour")])
    async def talk(socket: WebSocket[Any, Any, Any]) -> None:
        await socket.accept()

    app = application(limits, talk)
    scope: dict[str, Any] = {"type": "websocket", "path": "/", "extensions": {"websocket.http.response": {}}}
    [accepted] = await messages(app, **scope)
    start, body = await messages(app, **scope)
    assert accepted["type"] == "websocket.accept" and (b"x-ratelimit-remaining", b"0") in accepted["headers"]
    assert start["type"] == "websocket.http.response.start" and body["type"] == "websocket.http.response.body"
    assert start["status"] == 429 and (b"retry-after", b"3600") in start["headers"]
    assert {b"x-ratelimit-limit": b"1"}.items() <= dict(start["headers"]).items()


async def test_websocket_that_the_handler_refuses() -> None:
    """It is closed with the code of the handler, and is a 403 to count_if."""
    limits = RateLimits()
    seen: list[int] = []

    @websocket("/", guards=[limits.limit("1/hour", count_if=lambda response: seen.append(response.status_code))])
    async def refuse(socket: WebSocket[Any, Any, Any]) -> None:
        await socket.close(code=4001)

    app = application(limits, refuse)
    for _ in range(3):
        [closed] = await messages(app, type="websocket", path="/")
        assert (closed["type"], closed["code"]) == ("websocket.close", 4001)
    assert seen == [403] * 3


async def test_openapi() -> None:
    """Handlers that may be refused document it, and the others do not."""
    limits = RateLimits()
    app = application(limits, handler("/own", limits.limit("1/hour")), plain)
    paths: Any = app.openapi_schema.to_schema()["paths"]
    assert "application/problem+json" in paths["/own"]["get"]["responses"]["429"]["content"]
    assert "429" not in paths["/plain"]["get"]["responses"]
    limits = RateLimits(default="1/hour")
    everywhere: Any = application(limits, plain, handler("/free", rate_limit_exempt=True)).openapi_schema.to_schema()
    assert "429" in everywhere["paths"]["/plain"]["get"]["responses"]
    assert "429" not in everywhere["paths"]["/free"]["get"]["responses"]


async def test_a_stream_that_is_replaced() -> None:
    """An answer in several messages, such as that of the application's handler for 404, becomes one refusal."""
    limits = RateLimits(default="1/hour")

    async def chunks() -> AsyncIterator[str]:
        yield "there is "
        yield "nothing"

    app = application(limits, exception_handlers={404: lambda request, error: Stream(chunks(), status_code=404)})
    assert (await fetch(app, "/nothing")).text == "there is nothing"
    refused = await fetch(app, "/nothing")
    assert refused.status_code == 429 and refused.json()["status"] == 429


async def test_a_limiter_of_what_is_mounted() -> None:
    """Its refusal is left as it is."""
    limits = RateLimits(default="9/hour")

    async def empty(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    mounted: Any = asgi("/", is_mount=True, copy_scope=True)(RateLimitMiddleware(empty, "1/hour"))
    app = application(limits, mounted)
    answers = [await fetch(app, "/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, 429]
    assert answers[1].headers.get_list("x-ratelimit-limit") == ["1"]


async def test_cors() -> None:
    """A preflight is not counted, and a browser may read a refusal."""
    limits = RateLimits(default="1/hour")
    app = application(limits, plain, cors_config=CORSConfig(allow_origins=["https://a.example"]))
    origin = {"Origin": "https://a.example"}
    preflight = {**origin, "Access-Control-Request-Method": "GET"}
    assert await statuses(app, *["/plain"] * 3, method="OPTIONS", headers=preflight) == [204] * 3
    assert await statuses(app, "/plain", headers=origin) == [200]
    for path in ("/plain", "/nothing"):
        refused = await fetch(app, path, headers=origin)
        assert refused.status_code == 429 and refused.headers["access-control-allow-origin"] == "https://a.example"


async def test_cached_responses() -> None:
    """A response from Litestar's cache is counted, and carries the headers of its own decision."""
    limits = RateLimits()
    app = application(limits, handler("/", limits.limit("3/hour"), cache=60))
    answers = [await fetch(app, "/") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers.get_list("x-ratelimit-remaining") for answer in answers[:3]] == [["2"], ["1"], ["0"]]


async def test_not_installed() -> None:
    """A limited handler of an application without the plugin does not run."""
    limits = RateLimits()
    raised: list[Any] = []

    async def see(error: Exception, scope: Any) -> None:
        raised.append(error)

    app = Litestar([handler("/", limits.limit("1/hour"))], logging_config=None, after_exception=[see])
    assert await statuses(app, "/") == [500]
    assert isinstance(raised[0], SetupError) and "plugins=[limits]" in str(raised[0])


async def test_installed_twice() -> None:
    """A request counts once, and has its headers once: two installations, and an application within another."""
    limits = RateLimits(default="9/hour")
    inner = application(limits, handler("/", limits.limit("5/hour")))
    outer = Litestar([asgi("/in", is_mount=True, copy_scope=True)(inner), plain], plugins=[limits, limits])
    answer = await fetch(outer, "/plain")
    assert answer.headers.get_list("x-ratelimit-remaining") == ["8"]
    answer = await fetch(outer, "/in/")
    assert answer.headers.get_list("x-ratelimit-remaining") == ["4"]
    assert scopes(limits) == {"default", "GET /"}


async def test_disabled() -> None:
    limits = RateLimits(default="1/hour", enabled=False)
    app = application(limits, handler("/", limits.limit("1/hour")), plain)
    assert await statuses(app, "/", "/", "/plain", "/plain", "/nothing", "/nothing") == [200] * 4 + [404] * 2
