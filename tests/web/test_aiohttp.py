"""aiohttp: the middleware decides for every kind of handler, and every kind of answer carries the decision."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from headgate import Decision
from headgate.web.aiohttp import RateLimits
from headgate.web.exchange import ResponseInfo
from headgate.web.limit import SetupError
from headgate.web.login import LoginThrottle
from tests.support.servers import Server

CLIENT = "127.0.0.1"
Client: TypeAlias = "TestClient[web.Request, web.Application]"


async def hello(request: web.Request) -> web.Response:
    return web.Response(text="hello")


def handler() -> Any:
    """A handler that no other test decorates."""
    return functools.partial(hello)


def application(
    limits: RateLimits, *routes: web.AbstractRouteDef, before: Any = (), after: Any = ()
) -> web.Application:
    app = web.Application(middlewares=[*before, limits.middleware, *after])
    app.add_routes(routes)
    return app


@asynccontextmanager
async def serving(app: web.Application, **options: Any) -> AsyncIterator[Client]:
    async with TestClient(TestServer(app), **options) as client:
        yield client


async def statuses(client: Client, *paths: str, method: str = "GET", **arguments: Any) -> list[int]:
    return [(await client.request(method, path, **arguments)).status for path in paths]


def scopes(limits: RateLimits) -> set[str]:
    return {limiter.scope for limiter in limits.known_limiters()}


def left(limits: RateLimits, scope: str) -> int:
    [limiter] = [limiter for limiter in limits.known_limiters() if limiter.scope == scope]
    return limiter.blocking.peek(CLIENT, 0).remaining


async def test_refuses_and_tells() -> None:
    limits = RateLimits()

    @limits.limit("2/minute")
    async def index(request: web.Request) -> web.Response:
        made: Decision = request["rate_limit"]
        return web.Response(text=str(made.remaining))

    async with serving(application(limits, web.get("/", index))) as client:
        first, second, third = [await client.get("/") for _ in range(3)]
        assert [await first.text(), await second.text()] == ["1", "0"]
        assert [first.headers["x-ratelimit-remaining"], first.headers["x-ratelimit-limit"]] == ["1", "2"]
        assert third.status == 429 and third.headers["content-type"] == "application/problem+json"
        assert third.headers["retry-after"] == "30" and third.headers["cache-control"] == "no-store"
        assert (await third.json(content_type=None))["retryAfterSeconds"] == 30
        head = await client.head("/")  # counts with GET
        assert head.status == 429 and head.headers["x-ratelimit-remaining"] == "0" and not await head.read()


async def test_exact(redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20, by two applications."""
    made = [RateLimits(store=redis_server.url) for _ in range(2)]
    apps = [application(limits, web.get("/", limits.limit("20/hour")(handler()))) for limits in made]
    async with serving(apps[0]) as one, serving(apps[1]) as other:
        answers = await asyncio.gather(*[client.get("/") for client in [one, other] * 30])
    assert sorted(answer.status for answer in answers) == [200] * 20 + [429] * 40
    for limits in made:
        await limits.aclose()


async def test_one_decision(redis_server: Server) -> None:
    """Several limits of a handler are one round trip, all or nothing, whatever the order of decorators."""
    limits = RateLimits(store=redis_server.url)
    routes = web.RouteTableDef()

    @limits.limit("10/minute")
    @routes.get("/items/{number}")
    @limits.limit("2/day")
    async def item(request: web.Request) -> web.Response:
        return web.Response()

    async with serving(application(limits, *routes)) as client:
        assert await statuses(client, "/items/1") == [200]
        before = redis_server.calls("evalsha")
        assert await statuses(client, "/items/2", "/items/3") == [200, 429]
        assert redis_server.calls("evalsha") - before == 2
    assert scopes(limits) == {"GET /items/{number}"}
    remaining = {
        limiter.rule.quotas[0].limit: (await limiter.waiting.peek(CLIENT, 0)).remaining
        for limiter in limits.known_limiters()
    }
    assert remaining == {10: 8, 2: 0}  # the third request has taken nothing
    await limits.aclose()


async def test_forged_addresses() -> None:
    """Only the peer counts, or what a trusted peer says; not what another middleware takes from a header."""
    limits = RateLimits()

    @web.middleware
    async def believe(request: web.Request, handler: Any) -> web.StreamResponse:
        answer: web.StreamResponse = await handler(request.clone(remote=request.headers["X-Forwarded-For"]))
        return answer

    forged = [{"X-Forwarded-For": f"198.51.100.{number}"} for number in range(3)]
    route = web.get("/", limits.limit("2/hour")(handler()))
    async with serving(application(limits, route, before=[believe])) as client:
        answers = [await client.get("/", headers=headers) for headers in forged]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining"] for answer in answers] == ["1", "0", "0"]
    trusting = RateLimits(trusted_proxies=["127.0.0.1"])
    route = web.get("/", trusting.limit("2/hour")(handler()))
    async with serving(application(trusting, route)) as client:
        assert [(await client.get("/", headers=headers)).status for headers in forged] == [200] * 3
        last = {"X-Forwarded-For": "203.0.113.1, 198.51.100.9"}
        assert await statuses(client, "/", "/", "/", headers=last) == [200, 200, 429]


@pytest.mark.parametrize("turned", [False, True])
async def test_two_limits_around_an_application(turned: bool) -> None:
    """Whichever comes first: answers and the handler are told the tighter decision, a refusal is told as such."""
    wide, narrow = RateLimits(name="wide"), RateLimits(name="narrow")

    @wide.limit("9/hour")
    @narrow.limit("2/hour")
    async def index(request: web.Request) -> web.Response:
        return web.Response(text=str(request["rate_limit"].limit))

    first, second = (narrow, wide) if turned else (wide, narrow)
    async with serving(application(first, web.get("/", index), after=[second.middleware])) as client:
        answers = [await client.get("/") for _ in range(3)]
        assert [await answer.text() for answer in answers[:2]] == ["2", "2"]
    names = ("x-ratelimit-limit", "x-ratelimit-remaining", "retry-after")
    told = [[answer.headers.get(name) for name in names] for answer in answers]
    assert told == [["2", "1", None], ["2", "0", None], ["2", "0", "1800"]]


async def test_default_is_for_the_rest() -> None:
    """Routes without a limit, 404, 405 and sub-applications share the default; a limited or exempt route does not."""
    limits = RateLimits(default="5/hour")
    inner = web.Application()
    inner.add_routes([web.get("/plain", hello), web.get("/own/{name}", limits.limit("1/hour")(handler()))])
    free = limits.exempt(handler())
    app = application(limits, web.get("/plain", hello), web.get("/free", free))
    app.add_subapp("/inner", inner)
    async with serving(app) as client:
        assert await statuses(client, "/plain", "/inner/plain", "/inner/own/1", "/nothing") == [200, 200, 200, 404]
        assert await statuses(client, "/inner/nothing") == [404]
        answer = await client.post("/plain")
        assert answer.status == 405 and answer.headers["x-ratelimit-remaining"] == "0"
        assert answer.headers["allow"] == "GET,HEAD"
        paths = ["/plain", "/inner/plain", "/inner/own/2", "/nothing", "/inner/nothing"]
        assert await statuses(client, *paths) == [429] * 5
        assert await statuses(client, "/plain", method="POST") == [429]
        assert await statuses(client, *["/free"] * 9) == [200] * 9
        assert "x-ratelimit-limit" not in (await client.get("/free")).headers
    assert scopes(limits) == {"default", "GET /inner/own/{name}"}


async def test_views() -> None:
    """Each method of a view counts by itself, by its own limits and those of the class."""
    limits = RateLimits(default="1/hour")

    @limits.limit("3/hour")
    class Items(web.View):
        @limits.limit("1/hour")
        async def get(self) -> web.Response:
            return web.Response(text=str(self.request["rate_limit"].limit))

        async def post(self) -> web.Response:
            return web.Response()

    class Mixed(web.View):
        @limits.exempt
        async def get(self) -> web.Response:
            return web.Response()

        async def post(self) -> web.Response:
            return web.Response()

    async with serving(application(limits, web.view("/items/{id}", Items), web.view("/mixed", Mixed))) as client:
        assert await statuses(client, "/items/1", "/items/2") == [200, 429]
        assert await statuses(client, *["/items/1"] * 4, method="POST") == [200, 200, 200, 429]
        assert await statuses(client, *["/mixed"] * 2) == [200, 200]
        assert await statuses(client, *["/mixed"] * 2, method="POST") == [200, 429]
        assert await statuses(client, "/mixed", method="REPORT") == [429]
    assert scopes(limits) == {"default", "GET /items/{id}", "POST /items/{id}"}


async def test_class_of_handlers() -> None:
    limits = RateLimits()

    class Handlers:
        @limits.limit("1/hour")
        async def index(self, request: web.Request) -> web.Response:
            return web.Response()

    async with serving(application(limits, web.get("/", Handlers().index))) as client:
        assert await statuses(client, "/", "/") == [200, 429]


async def test_hidden_by_a_decorator() -> None:
    """A limit that the middleware cannot see, behind a decorator that hides it, decides before the handler runs."""
    limits = RateLimits()

    def hiding(handler: Callable[[web.Request], Awaitable[web.Response]]) -> Callable[..., Awaitable[web.Response]]:
        async def hidden(request: web.Request) -> web.Response:
            return await handler(request)

        return hidden

    route = web.get("/", hiding(limits.limit("1/hour")(handler())))
    async with serving(application(limits, route)) as client:
        first = await client.get("/")
        assert (first.status, first.headers["x-ratelimit-remaining"]) == (200, "0")
        assert await statuses(client, "/") == [429]


async def raising(request: web.Request) -> web.StreamResponse:
    if request.match_info["kind"] == "stream":
        stream = web.StreamResponse(headers={"X-Kind": "stream"})
        await stream.prepare(request)
        await stream.write(b"one ")
        await stream.write(b"two")
        return stream
    if request.match_info["kind"] == "bug":
        raise ValueError("a bug")
    raise web.HTTPUnauthorized


@pytest.mark.parametrize("kind, status", [("stream", 200), ("bug", 500), ("refuse", 401)])
@pytest.mark.parametrize("cloned", [False, True])
async def test_every_answer_carries_headers(kind: str, status: int, cloned: bool) -> None:
    """Streams, raised responses and errors, also where a middleware before ours hands on a copy of the request."""
    limits = RateLimits()

    @web.middleware
    async def clone(request: web.Request, handler: Any) -> web.StreamResponse:
        answer: web.StreamResponse = await handler(request.clone())
        return answer

    route = web.get("/{kind}", limits.limit("5/hour")(functools.partial(raising)))
    async with serving(application(limits, route, before=[clone] if cloned else [])) as client:
        answer = await client.get(f"/{kind}")
        assert answer.status == status and answer.headers.getall("x-ratelimit-remaining") == ["4"]
        assert kind != "stream" or await answer.text() == "one two"


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

    route = web.get("/{kind}", limits.limit("2/hour", count_if=failed)(functools.partial(raising)))
    async with serving(application(limits, route)) as client:
        assert await statuses(client, *[f"/{kind}"] * 3) == answers
    assert len(seen) == 3 - answers.count(429) and seen[0].status_code == answers[0]
    assert isinstance(seen[0].native, web.StreamResponse) and ("x-kind" in seen[0].headers) == (kind == "stream")
    await limits.aclose()


async def test_count_if_raises(caplog: pytest.LogCaptureFixture) -> None:
    """The answer goes out all the same, and the permits stay spent."""
    limits = RateLimits()
    route = web.get("/", limits.limit("2/hour", count_if=lambda response: response.no_such_name)(handler()))
    async with serving(application(limits, route)) as client:
        assert await statuses(client, "/", "/", "/") == [200, 200, 429]
    assert sum("count_if" in record.getMessage() for record in caplog.records) == 2


async def test_a_client_that_leaves() -> None:
    """A handler that is cancelled because its client has left has no answer: status 499."""
    limits = RateLimits()
    started, seen = asyncio.Event(), asyncio.Event()

    def stayed(response: ResponseInfo) -> bool:
        seen.set()
        return response.status_code != 499

    @limits.limit("1/hour", count_if=stayed)
    async def slow(request: web.Request) -> web.Response:
        started.set()
        await asyncio.Event().wait()
        return web.Response()

    async with serving(application(limits, web.get("/", slow))) as client:  # test servers cancel, as can others
        request = asyncio.create_task(client.get("/"))
        await started.wait()
        request.cancel()
        await seen.wait()
    assert left(limits, "GET /") == 1


async def test_websocket() -> None:
    """An upgrade is limited, and its answer carries the headers."""
    limits = RateLimits()

    @limits.limit("1/hour")
    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str("hello")
        await socket.close()
        return socket

    async with serving(application(limits, web.get("/", talk))) as client:
        async with client.ws_connect("/") as socket:
            assert await socket.receive_str() == "hello"
            assert socket._response.headers["x-ratelimit-remaining"] == "0"
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await client.ws_connect("/")
        assert refused.value.status == 429


async def test_on_denied() -> None:
    """A response, plain or async, with the headers that it does not set itself."""
    limits = RateLimits(default="1/hour")

    async def teapot(request: web.Request, decision: Decision) -> web.Response:
        return web.Response(text=f"{request.path} {decision.remaining}", status=418, headers={"Retry-After": "7"})

    limits.on_denied = teapot
    own = limits.limit("1/hour", on_denied=lambda request, decision: web.Response(status=503))(handler())
    usual = limits.limit("1/hour", on_denied=lambda request, decision: None)(handler())
    async with serving(application(limits, web.get("/own", own), web.get("/usual", usual))) as client:
        assert await statuses(client, "/own", "/own", "/nothing") == [200, 503, 404]
        assert await statuses(client, "/usual", "/usual") == [200, 429]
        answer = await client.get("/nothing")
        assert (answer.status, await answer.text(), answer.headers["retry-after"]) == (418, "/nothing 0", "7")
        assert answer.headers["x-ratelimit-limit"] == "1" and answer.headers["cache-control"] == "no-store"


async def test_not_installed() -> None:
    """A limited handler, or a method of a view, of an application without the middleware does not run."""
    limits = RateLimits()
    ran: list[Any] = []

    @limits.limit("1/hour")
    class Items(web.View):
        async def get(self) -> web.Response:
            ran.append(self)
            return web.Response()

    @limits.limit("1/hour")
    async def index(request: web.Request) -> web.Response:
        ran.append(request)
        return web.Response()

    raised: list[Exception] = []

    @web.middleware
    async def see(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except SetupError as error:
            raised.append(error)
            raise

    app = web.Application(middlewares=[see])
    app.add_routes([web.get("/", index), web.view("/items", Items)])
    async with serving(app) as client:
        assert await statuses(client, "/", "/items") == [500, 500]
        assert not ran and all("middlewares=[limits.middleware]" in str(error) for error in raised)
        limits.enabled = False
        assert await statuses(client, "/", "/items") == [200, 200]


async def test_installed_twice() -> None:
    """A request counts once, and has its headers once: in the application and again in a sub-application."""
    limits = RateLimits()
    inner = application(limits, web.get("/", limits.limit("5/hour")(handler())))
    app = application(limits, before=[limits.middleware])
    app.add_subapp("/in", inner)
    async with serving(app) as client:
        for remaining in ("4", "3"):
            assert (await client.get("/in/")).headers.getall("x-ratelimit-remaining") == [remaining]
        assert len(app.on_response_prepare) == 1 and not inner.on_response_prepare


async def test_two_objects() -> None:
    """Limits of two objects on one handler: each counts its own, and touches no answer that it has not limited."""
    one, other = RateLimits(default="9/hour"), RateLimits(default="9/hour", headers="ietf")
    both = other.limit("5/hour")(one.limit("3/hour")(handler()))
    app = application(one, web.get("/", hello))
    app.add_subapp("/in", application(other, web.get("/", both)))
    async with serving(app) as client:
        answer = await client.get("/in/")
        assert answer.headers["x-ratelimit-remaining"] == "2" and ";r=4;" in answer.headers["ratelimit"]
        assert "ratelimit" not in (await client.get("/")).headers
    assert (left(one, "GET /in/"), left(other, "GET /in/")) == (2, 4)


async def test_only_in_a_sub_application() -> None:
    limits = RateLimits(default="1/hour")
    app = web.Application()
    app.add_routes([web.get("/", hello)])
    app.add_subapp("/in", application(limits, web.get("/", hello)))
    async with serving(app) as client:
        assert await statuses(client, "/in/", "/in/nothing", "/", "/nothing") == [200, 429, 200, 404]


async def test_preflight_and_disabled() -> None:
    limits = RateLimits(default="1/hour")
    async with serving(application(limits, web.get("/", hello))) as client:
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        assert await statuses(client, *["/"] * 3, method="OPTIONS", headers=preflight) == [405] * 3
        assert await statuses(client, "/", "/") == [200, 429]
        limits.enabled = False
        assert await statuses(client, "/", "/") == [200, 200]


@pytest.mark.parametrize("target", [object(), object, "a", web.Application()])
def test_wrong_targets(target: Any) -> None:
    limits = RateLimits()
    for take in (limits.limit("1/hour"), limits.exempt):
        with pytest.raises(SetupError, match="a handler or a view"):
            take(target)


async def test_inherited_methods() -> None:
    """The limit of a class is not that of the class that it inherits a method from."""
    limits = RateLimits()

    class Common(web.View):
        async def get(self) -> web.Response:
            return web.Response()

    @limits.limit("1/hour")
    class Limited(Common):
        pass

    async with serving(application(limits, web.view("/common", Common), web.view("/limited", Limited))) as client:
        assert await statuses(client, "/common", "/common", "/limited", "/limited") == [200, 200, 200, 429]


async def test_login_throttle() -> None:
    """It knows the address of a request, or the one that a trusted proxy names."""
    throttle = LoginThrottle(trusted_proxies=["127.0.0.1"])

    async def login(request: web.Request) -> web.Response:
        async with throttle.attempt(request, "ann"):
            return web.Response(text=throttle.address(request))

    async with serving(application(RateLimits(), web.get("/", login))) as client:
        answer = await client.get("/", headers={"X-Forwarded-For": "203.0.113.9"})
        assert (answer.status, await answer.text()) == (200, "203.0.113.9")
