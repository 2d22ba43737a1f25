"""A limit around any ASGI application: exact, and honest about every kind of answer."""

import asyncio
from typing import Any

import anyio
import pytest

from headgate.testing import ManualClock
from headgate.web.asgi import ASGIApp, RateLimitMiddleware, Receive, Scope, Send
from headgate.web.limit import SetupError
from tests.support.asgi import CLIENT, Messages, at_once, fetch, scope, statuses
from tests.support.forged import FORGED
from tests.support.servers import Server


def answering(status: int = 200, body: tuple[bytes, ...] = (b"hello",), headers: Any = ()) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for part in body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def socket(scope: Scope, receive: Receive, send: Send) -> None:
    """Accepts a WebSocket and closes it."""
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": 1000})


def limited(app: ASGIApp, quota: Any = "2/minute", **options: Any) -> RateLimitMiddleware:
    return RateLimitMiddleware(app, quota, **{"clock": ManualClock(), **options})


def remaining(app: RateLimitMiddleware) -> int:
    """How many permits the client has left."""
    assert app.default is not None
    [limiter] = app.limiters_of(app.default, "")
    return limiter.blocking.peek(CLIENT, 0).remaining


async def messages(app: ASGIApp, scope: Scope) -> list[Any]:
    """What *app* sends."""
    server = Messages()
    await app(scope, server.receive, server.send)
    return server.sent


@pytest.mark.parametrize("style", ["x", "ietf", None])
async def test_first_requests_and_later_ones(style: Any) -> None:
    """The first requests are looked at for mistakes of the set-up; later ones get the same answers by a shorter way."""
    app = limited(answering(), "103/minute", headers=style)
    answers = [await fetch(app) for _ in range(104)]
    assert [answer.status_code for answer in answers] == [200] * 103 + [429]
    told = [answer.headers.get("X-RateLimit-Remaining") for answer in answers]
    assert told == ([*map(str, range(102, -1, -1)), "0"] if style == "x" else [None] * 104)
    assert ["RateLimit" in answer.headers for answer in answers] == [style == "ietf"] * 104
    assert answers[-1].headers["Retry-After"] == "1" and answers[-1].json()["status"] == 429


async def test_headers_that_can_be_read_once() -> None:
    """ASGI lets an application send its headers as any iterable: all of them reach the client, and ours."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pairs = [(b"x-first", b"1"), (b"x-second", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": (pair for pair in pairs)})
        await send({"type": "http.response.body", "body": b""})

    door = limited(limited(app, "9/minute"), "102/minute", name="outer")
    for left in (8, 7):
        headers = (await fetch(door)).headers
        assert (headers["X-First"], headers["X-Second"], headers["X-RateLimit-Remaining"]) == ("1", "2", str(left))
    door.watched = 0  # the shorter way of later requests
    assert (await fetch(door)).headers["X-Second"] == "2"


async def test_refuses_and_tells() -> None:
    app = limited(answering())
    first, second, third = [await fetch(app) for _ in range(3)]
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert [first.headers["X-RateLimit-Remaining"], second.headers["X-RateLimit-Remaining"]] == ["1", "0"]
    assert third.headers["Content-Type"] == "application/problem+json"
    assert third.headers["Retry-After"] == "30" and third.headers["Cache-Control"] == "no-store"
    assert third.json()["retryAfterSeconds"] == 30
    assert (await fetch(app, address="192.0.2.2")).status_code == 200


async def test_exact_on_redis(redis_server: Server) -> None:
    """Two processes' worth of middleware, 60 requests at once, 20 permits."""
    apps = [RateLimitMiddleware(answering(), "20/hour", store=redis_server.url) for _ in range(2)]
    answers = await asyncio.gather(*[at_once(app, "/", 30) for app in apps])
    assert sorted(answers[0] + answers[1]) == [200] * 20 + [429] * 40
    for app in apps:
        await app.aclose()


@pytest.mark.parametrize("headers", FORGED)
async def test_forged_address(headers: dict[str, str]) -> None:
    """What a client claims about its address changes nothing, unless its peer is trusted."""
    app = limited(answering(), "1/minute")
    assert await statuses(app, "/", "/", headers=headers) == [200, 429]
    assert await statuses(app, "/") == [429]


async def test_trusted_proxy() -> None:
    app = limited(answering(), "1/minute", trusted_proxies=["192.0.2.0/24"])
    for address in ("198.51.100.1", "198.51.100.2"):
        assert await statuses(app, "/", "/", headers={"X-Forwarded-For": address}) == [200, 429]


async def test_streaming() -> None:
    """The headers are on the start of a response, once."""
    sent = await messages(limited(answering(body=(b"a", b"b"))), scope())
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 3
    assert [b"".join(message.get("body", b"") for message in sent[1:])] == [b"ab"]
    assert [name for name, _ in sent[0]["headers"]].count(b"x-ratelimit-limit") == 1


async def test_head() -> None:
    """A refused HEAD has no body, and the length that a GET would have."""
    app = limited(answering(), "1/minute")
    await fetch(app)
    start, body = await messages(app, scope(method="HEAD"))
    assert start["status"] == 429 and body["body"] == b""
    assert int(dict(start["headers"])[b"content-length"]) > 100


async def test_preflight_is_free() -> None:
    app = limited(answering(), "1/minute")
    preflight = {"Origin": "https://example.com", "Access-Control-Request-Method": "PUT"}
    assert await statuses(app, "/", "/", method="OPTIONS", headers=preflight) == [200, 200]
    assert await statuses(app, "/", "/", method="OPTIONS") == [200, 429]


async def test_refund_by_status() -> None:
    """Only failures count, if `count_if` says so."""

    def failed(response: Any) -> bool:
        return bool(response.status_code >= 400)

    app = limited(answering(200), count_if=failed)
    assert await statuses(app, "/", "/", "/") == [200] * 3 and remaining(app) == 2
    app = limited(answering(401), count_if=failed)
    assert await statuses(app, "/", "/", "/") == [401, 401, 429]


async def test_refund_after_exception() -> None:
    """An application that raises is a status of 500, to `count_if`."""
    seen = []

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    app = limited(broken, count_if=lambda response: seen.append(response.status_code))
    assert await statuses(app, "/") == [500]
    assert seen == [500] and remaining(app) == 2


async def test_refund_after_client_left() -> None:
    """A request that is cancelled is a status of 499, to `count_if`."""
    seen = []
    entered = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await receive()

    app = limited(slow, count_if=lambda response: seen.append(response.status_code))
    server = Messages()
    task = asyncio.create_task(app(scope(), server.receive, server.send))
    await entered.wait()
    assert remaining(app) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [499] and remaining(app) == 2


async def test_on_denied() -> None:
    """An ASGI application answers instead of the 429; None leaves it to the 429. The limit's headers are on both."""

    async def busy(scope: Scope, decision: Any) -> ASGIApp | None:
        return answering(503, (b"later",)) if scope["path"] == "/" else None

    app = limited(answering(), "1/minute", on_denied=busy)
    await fetch(app)
    answer = await fetch(app)
    assert (answer.status_code, answer.text) == (503, "later")
    assert answer.headers["X-RateLimit-Remaining"] == "0" and answer.headers["Retry-After"] == "60"
    assert answer.headers.get_list("Cache-Control") == ["no-store"]
    assert await statuses(app, "/other") == [429]


async def test_websocket() -> None:
    """Over the limit it is closed before it is accepted, or answered with a 429 if the server can."""
    app = limited(socket, "1/minute")
    accept, _ = await messages(app, scope("websocket"))
    assert (b"x-ratelimit-remaining", b"0") in accept["headers"]
    [close] = await messages(app, scope("websocket"))
    assert close["type"] == "websocket.close" and close["code"] == 1013
    start, body = await messages(app, scope("websocket", extensions={"websocket.http.response": {}}))
    assert start["type"] == "websocket.http.response.start" and start["status"] == 429
    assert b"Rate limit exceeded" in body["body"]


async def test_counts_once() -> None:
    """A request that meets the same middleware twice counts once."""

    async def again(scope: Scope, receive: Receive, send: Send) -> None:
        await (answering() if "met" in scope else app)({**scope, "met": True}, receive, send)

    app = limited(again)
    assert await statuses(app, "/", "/", "/") == [200, 200, 429]


def test_same_limit_twice() -> None:
    """Two limits of one store, scope and quota around an application would count each request twice."""
    with pytest.raises(SetupError, match="twice"):
        limited(limited(answering()))
    limited(limited(answering()), scope="other")


async def test_two_limiters_share_the_headers() -> None:
    """Of two limiters around one application a client hears of the tighter one, once."""
    inner = limited(answering(), "2/minute", name="inner")
    answer = await fetch(limited(inner, "9/minute"))
    assert answer.headers.get_list("X-RateLimit-Limit") == ["2"]
    answer = await fetch(limited(limited(answering(), "9/minute"), "2/minute"))
    assert answer.headers.get_list("X-RateLimit-Limit") == ["2"]


async def test_switched_off() -> None:
    app = limited(answering(), "1/minute", enabled=False)
    assert await statuses(app, "/", "/") == [200, 200]
    app.enabled = True
    assert await statuses(app, "/", "/") == [200, 429]


async def test_lifespan_is_left_alone() -> None:
    """Scopes other than HTTP and WebSocket pass."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await messages(limited(app), {"type": "lifespan"})
    assert seen == ["lifespan"]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="minut"):
        limited(answering(), "5 per minut")
    with pytest.raises(SetupError, match="key must be"):
        limited(answering(), "5/minute", key="ip")
    with pytest.raises(TypeError, match="nonsense"):
        limited(answering(), "5/minute", nonsense=1)


async def test_key_function_without_a_key() -> None:
    """A key function that gives nothing is an error, never a bucket that all share."""
    app = limited(answering(), key=lambda scope: None)
    with pytest.raises(SetupError, match="must give the text"):
        await messages(app, scope())


async def test_answer_without_headers() -> None:
    """The start of an answer may have none, as ASGI allows."""

    async def bare(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    assert (await fetch(limited(bare))).headers["X-RateLimit-Remaining"] == "1"


async def test_unix_socket() -> None:
    """A server on a Unix socket gives no address, so the application must say which proxy is before it."""
    with pytest.raises(SetupError, match=r"trusted_proxies=\['unix'\]"):
        await messages(limited(answering()), scope(client=None))
    app = limited(answering(), "1/minute", trusted_proxies=["unix"])
    for address in ("198.51.100.1", "198.51.100.2"):
        headers = [(b"x-forwarded-for", address.encode())]
        answers = [await messages(app, scope(client=None, headers=headers)) for _ in range(2)]
        assert [sent[0]["status"] for sent in answers] == [200, 429]


async def test_refund_when_a_stream_starts(redis_server: Server) -> None:
    """The status is known then; the permits of an endless stream are not kept until its end."""
    streams = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Kind", b"stream")]})
        streams.set()
        await asyncio.Event().wait()

    def counts(response: Any) -> bool:
        return bool(response.headers["x-kind"] != "stream")

    app = RateLimitMiddleware(endless, "1/hour", store=redis_server.url, count_if=counts)
    tasks = []
    for _ in range(3):
        streams.clear()
        tasks.append(asyncio.create_task(messages(app, scope())))
        await streams.wait()
        tasks[-1].cancel()
    await asyncio.wait(tasks)
    await app.aclose()


async def test_websocket_refund() -> None:
    """A connection that is accepted is a status of 101, to `count_if`; one that is closed before it is a 403."""
    seen = []

    async def closed(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.close", "code": 1000})

    for app in (socket, closed):
        await messages(limited(app, count_if=lambda response: seen.append(response.status_code)), scope("websocket"))
    assert seen == [101, 403]


async def test_cancelled_by_a_scope(redis_server: Server) -> None:
    """Frameworks cancel by scopes, in which every further await is cancelled, too: the permits go back all the same."""
    entered = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        if scope["path"] == "/":
            await asyncio.Event().wait()
        await answering()(scope, receive, send)

    def counts(response: Any) -> bool:
        return bool(response.status_code == 200)

    app = RateLimitMiddleware(slow, "3/hour", store=redis_server.url, count_if=counts)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            entered.clear()
            group.start_soon(messages, app, scope())
            await entered.wait()
        assert await statuses(app, "/other") == [429]
        group.cancel_scope.cancel()
    admitted = 0
    async with asyncio.timeout(20):
        while admitted < 3:  # they go back one after the other
            admitted += await statuses(app, "/other") == [200]
    assert await statuses(app, "/other") == [429]
    await app.aclose()
