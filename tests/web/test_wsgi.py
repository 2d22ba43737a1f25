"""A limit around any WSGI application: exact in threads, and honest about every kind of answer."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment
from wsgiref.validate import validator

import pytest
from werkzeug.test import Client, EnvironBuilder, TestResponse

from headgate.testing import ManualClock
from headgate.web.limit import SetupError
from headgate.web.wsgi import RateLimitMiddleware
from tests.support.clocks import WatchedClock, until
from tests.support.forged import FORGED
from tests.support.servers import Server


def answering(
    status: str = "200 OK", body: Iterable[bytes] = (b"hello",), headers: Sequence[tuple[str, str]] = ()
) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, [("content-type", "text/plain"), *headers])
        return body

    return app


def limited(app: WSGIApplication, quota: Any = "2/minute", **options: Any) -> RateLimitMiddleware:
    return RateLimitMiddleware(app, quota, **{"clock": ManualClock(), **options})


def get(app: WSGIApplication, path: str = "/", address: str = "192.0.2.1", **arguments: Any) -> TestResponse:
    return Client(app).get(path, environ_base={"REMOTE_ADDR": address}, **arguments)


def remaining(app: RateLimitMiddleware) -> int:
    """How many permits the client has left."""
    assert app.default is not None
    [limiter] = app.limiters_of(app.default, "")
    return limiter.blocking.peek("192.0.2.1", 0).remaining


def raw(app: WSGIApplication, method: str = "GET") -> tuple[Iterable[bytes], list[Any]]:
    """The body as the server gets it, and what `start_response` was called with."""
    calls: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        calls.append((status, headers, exc_info))
        return calls.append

    environ = EnvironBuilder(method=method, environ_base={"REMOTE_ADDR": "192.0.2.1"}).get_environ()
    return app(environ, start_response), calls


@pytest.mark.parametrize("style", ["x", "ietf", None])
def test_first_requests_and_later_ones(style: Any) -> None:
    """The first requests are looked at for mistakes of the set-up; later ones get the same answers by a shorter way."""
    app = limited(answering(), "103/minute", headers=style)
    answers = [get(app) for _ in range(104)]
    assert [answer.status_code for answer in answers] == [200] * 103 + [429]
    told = [answer.headers.get("X-RateLimit-Remaining") for answer in answers]
    assert told == ([*map(str, range(102, -1, -1)), "0"] if style == "x" else [None] * 104)
    assert ["RateLimit" in answer.headers for answer in answers] == [style == "ietf"] * 104
    assert answers[-1].headers["Retry-After"] == "1" and answers[-1].json is not None


def test_refuses_and_tells() -> None:
    app = limited(answering())
    first, second, third = get(app), get(app), get(app)
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert [first.headers["X-RateLimit-Remaining"], second.headers["X-RateLimit-Remaining"]] == ["1", "0"]
    assert third.headers["Content-Type"] == "application/problem+json"
    assert third.headers["Retry-After"] == "30" and third.headers["Cache-Control"] == "no-store"
    assert third.json is not None and third.json["retryAfterSeconds"] == 30
    assert get(app, address="192.0.2.2").status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_follows_the_rules_of_wsgi(method: str) -> None:
    """PEP 3333, as the validator of the standard library reads it, for answers and for refusals."""
    app = validator(limited(validator(answering(body=[] if method == "HEAD" else [b"hello"])), "1/minute"))
    for status in (200, 429):
        response = Client(app).open(method=method, environ_base={"REMOTE_ADDR": "192.0.2.1", "QUERY_STRING": ""})
        assert response.status_code == status
        assert bool(response.data) == (method != "HEAD")
        response.close()


@pytest.mark.server
def test_exact_in_threads(redis_server: Server) -> None:
    """60 requests at once against 20 an hour: exactly 20, in one process and as if in two."""
    apps = [RateLimitMiddleware(answering(), "20/hour", store=redis_server.url) for _ in range(2)]
    barrier = threading.Barrier(60)

    def request(number: int) -> int:
        barrier.wait()
        return get(apps[number % 2]).status_code

    with ThreadPoolExecutor(60) as pool:
        statuses = list(pool.map(request, range(60)))
    assert sorted(statuses) == [200] * 20 + [429] * 40
    for app in apps:
        app.close()


def test_forged_addresses() -> None:
    """Forwarded headers of a peer that is not trusted change nothing; of one that is, the last untrusted hop counts."""
    app = limited(answering(), trusted_proxies=["10.0.0.0/8"])
    get(app), get(app)
    assert {get(app, headers=headers).status_code for headers in FORGED} == {429}
    chain = [
        get(app, address="10.1.1.1", headers={"X-Forwarded-For": f"203.0.113.{n}, 198.51.100.9"}).status_code
        for n in range(3)
    ]
    assert chain == [200, 200, 429]
    assert get(app, address="10.1.1.1", headers={"X-Forwarded-For": "198.51.100.10"}).status_code == 200


def test_functions_get_the_environment() -> None:
    app = limited(answering(), key=lambda environ: environ["HTTP_X_USER"], cost=lambda environ: 2)
    assert get(app, headers={"X-User": "ann"}).headers["X-RateLimit-Remaining"] == "0"
    assert get(app, headers={"X-User": "ann"}).status_code == 429
    assert get(app, headers={"X-User": "bob"}).status_code == 200


def test_on_denied() -> None:
    """It gives a WSGI application; None is the 429. What the refusal must say is added to both."""
    app = limited(answering(), "1/minute", on_denied=lambda environ, decision: answering("503 Busy", [b"later"]))
    get(app)
    denied = get(app)
    assert (denied.status_code, denied.data, denied.headers["Retry-After"]) == (503, b"later", "60")
    assert denied.headers["X-RateLimit-Remaining"] == "0"
    app = limited(answering(), "1/minute", on_denied=lambda environ, decision: None)
    get(app)
    assert get(app).status_code == 429


def test_headers_are_added_once() -> None:
    """An application that sets one itself keeps its own; a start again has them once, too."""
    inside = get(limited(answering(headers=[("X-RateLimit-Limit", "77")])))
    assert inside.headers.getlist("X-RateLimit-Limit") == ["77"]

    def restarts(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("content-type", "text/plain")])
        try:
            raise LookupError
        except LookupError:
            start_response("404 Not Found", [], sys.exc_info())
        return [b"gone"]

    body, calls = raw(limited(restarts))
    assert list(body) == [b"gone"]
    assert [status for status, *_ in calls] == ["200 OK", "404 Not Found"]
    for _status, headers, _error in calls:
        assert [name for name, _ in headers].count("x-ratelimit-limit") == 1
    assert calls[1][2] is not None


def counting_errors(app: WSGIApplication) -> RateLimitMiddleware:
    return limited(app, "5/minute", count_if=lambda response: response.status_code >= 400)


@pytest.mark.parametrize("status, left", [("200 OK", 5), ("404 Not Found", 4)])
def test_count_if(status: str, left: int) -> None:
    app = counting_errors(answering(status))
    get(app)
    assert remaining(app) == left


def test_count_if_sees_headers() -> None:
    seen: list[Any] = []
    get(limited(answering(headers=[("X-Cache", "hit")]), count_if=seen.append))
    assert seen[0].headers["x-cache"] == "hit" and seen[0].status_code == 200


def test_count_if_of_an_application_that_raises() -> None:
    def raises(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        raise LookupError

    app = counting_errors(raises)
    with pytest.raises(LookupError):
        raw(app)
    assert remaining(app) == 4


class Stream:
    """A body that tells when it was closed, and may raise instead of its second chunk."""

    def __init__(self, raises_at: int = 99) -> None:
        self.raises_at = raises_at
        self.given = 0
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self.given == self.raises_at:
            raise LookupError
        if self.given == 3:
            raise StopIteration
        self.given += 1
        return b"chunk"

    def close(self) -> None:
        self.closed = True


def test_streams_are_settled_by_their_first_bytes() -> None:
    """Permits go back when the status is final, not when the stream ends."""
    stream = Stream()
    app = counting_errors(answering(body=stream))
    body, _ = raw(app)
    assert remaining(app) == 4
    chunks = iter(body)
    assert next(chunks) == b"chunk" and remaining(app) == 5
    assert list(chunks) == [b"chunk"] * 2
    body.close()  # type: ignore[attr-defined]  # an iterable of WSGI may have one
    assert stream.closed and remaining(app) == 5


def test_stream_that_raises() -> None:
    """Before its first bytes the server answers 500; after them the answer was what it was."""
    for raises_at, left in ((0, 4), (1, 5)):
        app = counting_errors(answering(body=Stream(raises_at)))
        body, _ = raw(app)
        with pytest.raises(LookupError):
            list(body)
        assert remaining(app) == left


def test_client_that_leaves() -> None:
    """A body that is closed early is settled by its status, or by 499 if the answer never started."""
    stream = Stream()
    app = counting_errors(answering(body=stream))
    raw(app)[0].close()  # type: ignore[attr-defined]
    assert stream.closed and remaining(app) == 5

    def generates(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"never asked for"

    app = counting_errors(generates)
    raw(app)[0].close()  # type: ignore[attr-defined]
    assert remaining(app) == 4
    list(raw(app)[0])
    assert remaining(app) == 4


def test_write() -> None:
    """The old way to send a body settles too, with its first bytes."""
    left: list[int] = []

    def writes(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"hello")
        left.append(remaining(app))
        return []

    app = counting_errors(writes)
    body, calls = raw(app)
    assert list(body) == [] and calls[1] == b"hello"
    assert left == [5]


def test_bodies_pass_as_they_are() -> None:
    """So a server can send a file itself, or take the length of a list; nothing is in the way of a plain limit."""
    stream = Stream()
    assert raw(limited(answering(body=stream)))[0] is stream
    whole = [b"hello"]
    assert raw(counting_errors(answering(body=whole)))[0] is whole


def test_set_up() -> None:
    with pytest.raises(SetupError, match="twice"):
        limited(limited(answering()))
    limited(limited(answering()), "9/hour")

    async def user(environ: WSGIEnvironment) -> str:
        return "ann"

    with pytest.raises(SetupError, match="plain function"):
        limited(answering(), key=user)
    with pytest.raises(ValueError, match="minut"):
        limited(answering(), "5 per minut")


def test_counts_once() -> None:
    """One object in two places of a stack counts a request once."""

    def outer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if "met before" in environ:
            return answering()(environ, start_response)
        environ["met before"] = True
        return app(environ, start_response)

    app = limited(outer)
    assert get(app).headers["X-RateLimit-Remaining"] == "1"


def test_switched_off() -> None:
    app = limited(answering(), "1/minute", enabled=False)
    assert [get(app).status_code for _ in range(3)] == [200] * 3
    app.enabled = True
    assert [get(app).status_code for _ in range(2)] == [200, 429]


def test_timeout_waits() -> None:
    """A request waits in line instead of being refused, as long as it says."""
    clock = WatchedClock()
    app = limited(answering(), "1/minute", timeout=90.0, clock=clock)
    get(app)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, app)
        until(lambda: clock.sleeping)
        clock.advance(60.0)
        assert waiting.result().status_code == 200


def test_several_processes(caplog: pytest.LogCaptureFixture) -> None:
    """A server that runs several says so with each request: memory does not count them together, and a log says so."""
    app = limited(answering())
    get(app)
    assert not caplog.records
    for _ in range(2):
        get(app, multiprocess=True)
    [record] = caplog.records
    assert "shared://" in record.getMessage()
