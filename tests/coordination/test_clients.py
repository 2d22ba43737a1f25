"""httpx, requests and aiohttp with members of a pool, against a real HTTP server whose answers the test chooses."""

import asyncio
import http.server
import pickle
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import trustme

from headgate.clients import retries
from headgate.clients.aiohttp import PoolMiddleware
from headgate.clients.authorize import Origins, header
from headgate.clients.httpx import AsyncPoolTransport, PoolTransport
from headgate.clients.requests import PoolAdapter
from headgate.clients.retries import Retries
from headgate.coordination import AsyncPool, Pool, feedback
from headgate.coordination.feedback import Feedback, of_response, status_of
from headgate.errors import PoolExhausted
from tests.support.clusters import wait_until
from tests.support.servers import free_port

Answer = tuple[int, dict[str, str]]
BEARER = header("Authorization", "Bearer {}")


class Site:
    """A server that answers each request as *answer* says, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str, str, bytes]] = []  # when, method, token, body
        self.keys: list[str] = []
        self.answer: Callable[[str], Answer] = lambda token: (200, {})
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                site.seen.append((time.monotonic(), self.command, token, body))
                site.keys.append(self.headers.get("X-Api-Key", ""))
                status, headers = site.answer(token)
                self.send_response(status)
                for name, value in (headers | {"Content-Length": "2"}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"ok")

            do_GET = do_POST = do_PUT = handle_any  # noqa: N815  # the names of the standard library

            def log_message(self, *_: object) -> None: ...

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None: ...  # clients may close their connections

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def tokens(self) -> list[str]:
        return [token for _, _, token, _ in self.seen]

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.02)
    site = Site()
    yield site
    site.stop()


CLIENTS = ["httpx", "httpx async", "requests", "aiohttp"]
NO_CONNECTION = (httpx.ConnectError, requests.ConnectionError, aiohttp.ClientConnectorError)


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Sender = Callable[..., Callable[..., Any]]


@pytest.fixture
def sender(client: str) -> Iterator[Sender]:
    """Make functions that send requests with the members of a pool, through one connection each.

    Their *timeout* is for the answer; further options are those of the client's `request`.
    """
    closes: list[Callable[[], object]] = []
    limits = httpx.Limits(max_connections=1)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def read_timeout(timeout: float) -> httpx.Timeout:
        return httpx.Timeout(20.0, read=timeout)

    def wait_for(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def make_aiohttp(middleware: PoolMiddleware) -> Callable[..., Any]:
        connector = aiohttp.TCPConnector(limit=1, ssl=ssl.create_default_context())
        session = aiohttp.ClientSession(connector=connector, middlewares=[middleware])
        closes.append(lambda: wait_for(session.close()))

        async def request(method: str, url: str, timeout: float = 20.0, **more: Any) -> Any:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=20.0, sock_read=timeout)
            async with session.request(method, url, timeout=limit, **more) as response:
                return SimpleNamespace(
                    status_code=response.status,
                    headers=response.headers,
                    text=await response.text(),
                    request=response.request_info,
                )

        return lambda *args, **more: wait_for(request(*args, **more))

    def make(pool: str, authorize: Any = BEARER, **options: Any) -> Callable[..., Any]:
        if client == "requests":
            session = requests.Session()
            adapter = PoolAdapter(Pool(pool), authorize, pool_maxsize=1, pool_block=True, **options)
            session.mount("http://", adapter)
            session.mount("https://", adapter)
            closes.append(session.close)
            return lambda method, url, timeout=20.0, **more: session.request(
                method, url, timeout=(20.0, timeout), **more
            )
        if client == "httpx":
            transport = PoolTransport(Pool(pool), authorize, transport=httpx.HTTPTransport(limits=limits), **options)
            plain = httpx.Client(transport=transport, follow_redirects=True)
            closes.append(plain.close)
            return lambda method, url, timeout=20.0, **more: plain.request(
                method, url, timeout=read_timeout(timeout), **more
            )
        if client == "aiohttp":
            made: Callable[..., Any] = wait_for(make_aiohttp(PoolMiddleware(AsyncPool(pool), authorize, **options)))
            return made
        inner = httpx.AsyncHTTPTransport(limits=limits)
        async_transport = AsyncPoolTransport(AsyncPool(pool), authorize, transport=inner, **options)
        tasks = httpx.AsyncClient(transport=async_transport, follow_redirects=True)
        closes.append(lambda: wait_for(tasks.aclose()))
        return lambda method, url, timeout=20.0, **more: wait_for(
            tasks.request(method, url, timeout=read_timeout(timeout), **more)
        )

    yield make
    for close in closes:
        close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_members_take_turns(sender: Sender, site: Site, name: str) -> None:
    """Each request takes the member that was used least recently, and returns it."""
    Pool(name).add("a", "b")
    for _ in range(3):
        assert sender(name)("GET", site.url).text == "ok"
    assert site.tokens == ["a", "b", "a"]
    assert Pool(name).status().ready == 2


def test_429_goes_to_another_member(sender: Sender, site: Site, name: str) -> None:
    """The member that was refused cools down for as long as the server asked."""
    Pool(name).add("a", "b")
    site.answer = lambda token: (429, {"Retry-After": "300"}) if token == "a" else (200, {})
    for method in ("GET", "POST", "GET"):
        assert sender(name)(method, site.url).status_code == 200
    assert site.tokens == ["a", "b", "b", "b"]
    status = Pool(name).status()
    assert (status.cooling, status.ready) == (1, 1)
    assert 200 < (status.members["a"].ready_in or 0) <= 300


@pytest.mark.slow
def test_never_earlier_than_asked(sender: Sender, site: Site, name: str) -> None:
    """With one member, a request is repeated no sooner than Retry-After asks for, after 429 and 503."""
    Pool(name).add("a")
    answers = iter([(429, {"Retry-After": "1"}), (503, {"Retry-After": "1"}), (200, {})])
    site.answer = lambda token: next(answers)
    assert sender(name)("GET", site.url).status_code == 200
    times = [when for when, *_ in site.seen]
    assert times[1] - times[0] >= 1.0 and times[2] - times[1] >= 1.0


def test_retry_after_is_too_long(sender: Sender, site: Site, name: str) -> None:
    """The caller gets the answer, with its Retry-After, and no request is sent early."""
    Pool(name).add("a")
    site.answer = lambda token: (429, {"Retry-After": "300"})
    response = sender(name, retries=Retries(timeout=0.5))("GET", site.url)
    assert (response.status_code, response.headers["Retry-After"], response.text) == (429, "300", "ok")
    with pytest.raises(PoolExhausted) as caught:
        sender(name, retries=Retries(timeout=0.1))("GET", site.url)
    assert 200 < (caught.value.retry_after or 0) <= 300
    assert len(site.seen) == 1


def test_401_retires(sender: Sender, site: Site, name: str) -> None:
    """A member that got a 401 is retired, and the request goes to another."""
    Pool(name).add("stolen", "good")
    site.answer = lambda token: (401, {}) if token == "stolen" else (200, {})
    assert sender(name)("POST", site.url).status_code == 200
    assert site.tokens == ["stolen", "good"]
    assert Pool(name).status().members["stolen"].state == "retired"


@pytest.mark.parametrize(("method", "sent"), [("GET", 4), ("PUT", 4), ("POST", 1)])
def test_failures(sender: Sender, method: str, sent: int, site: Site, name: str) -> None:
    """Only methods that may be repeated are; the caller gets the last answer."""
    Pool(name).add("a", "b")
    site.answer = lambda token: (500, {})
    assert sender(name)(method, site.url).status_code == 500
    assert len(site.seen) == sent


def test_body_is_sent_again(sender: Sender, site: Site, name: str) -> None:
    """A retry has the same body."""
    Pool(name).add("a", "b")
    answers: Iterator[Answer] = iter([(429, {}), (200, {})])
    site.answer = lambda token: next(answers)
    assert sender(name)("POST", site.url, data={"x": "1"}).status_code == 200
    assert [body for *_, body in site.seen] == [b"x=1", b"x=1"]


def test_stream_is_sent_once(sender: Sender, client: str, site: Site, name: str) -> None:
    """A request whose body is a stream is not retried."""
    Pool(name).add("a", "b")
    site.answer = lambda token: (429, {})

    def chunks() -> Iterator[bytes]:
        yield b"x"

    async def achunks() -> Any:
        yield b"x"

    body: dict[str, Any] = {
        "httpx": {"content": chunks()},
        "httpx async": {"content": achunks()},
        "requests": {"data": chunks()},
        "aiohttp": {"data": achunks()},
    }[client]
    assert sender(name)("POST", site.url, headers={"Content-Length": "1"}, **body).status_code == 429
    assert len(site.seen) == 1


def test_connection_refused(sender: Sender, name: str) -> None:
    """The caller gets the error, and the pool its member."""
    pool = Pool(name, failures=2)
    pool.add("a")
    with pytest.raises(NO_CONNECTION):
        sender(name)("POST", f"http://127.0.0.1:{free_port()}/")
    assert pool.status().leased == 0


def test_breaker_of_a_member(site: Site, name: str) -> None:
    """Failures open the breaker of the member, after which the request is not retried."""
    pool = Pool(name, failures=2)
    pool.add("a")
    site.answer = lambda token: (500, {})
    with httpx.Client(transport=PoolTransport(pool, BEARER, retries=Retries(timeout=30.0))) as client:
        assert client.get(site.url).status_code == 500
    assert len(site.seen) == 2
    assert pool.status().open == 1


@pytest.mark.parametrize("given", [False, True])
def test_redirect_to_another_server(sender: Sender, given: bool, site: Site, name: str) -> None:
    """It gets no member in any header, and cannot retire one."""
    pool, elsewhere = Pool(name), Site()
    pool.add("a", "b")
    elsewhere.answer = lambda token: (401, {})
    there = elsewhere.url.replace("127.0.0.1", "localhost")
    site.answer = lambda token: (302, {"Location": there})
    key = header("X-Api-Key")
    origins = site.url if given else None

    def both(request: Any, member: str) -> None:
        BEARER(request, member)
        key(request, member)

    try:
        assert sender(name, both, origins=origins)("GET", site.url).status_code == 401
    finally:
        elsewhere.stop()
    assert site.tokens == ["a"] and elsewhere.tokens == [""] and elsewhere.keys == [""]
    assert pool.status().ready == 2


def test_origins() -> None:
    """An origin is scheme, host and port; without any, that of the first request counts."""
    assert "https://a.example/x" in Origins(["https://a.example"])
    assert "https://a.example:443/" in Origins("https://a.example/")
    assert "http://a.example/" not in Origins("https://a.example")
    assert "https://b.example/" in Origins("*")
    assert str(httpx.URL("https://b\u00fccher.example/")) in Origins("https://b\u00fccher.example")
    first = Origins(None)
    assert "https://a.example/1" in first and "https://b.example/" not in first and "https://a.example/2" in first
    with pytest.raises(ValueError, match="origin"):
        Origins("a.example")


@pytest.mark.parametrize("status", [401, 429])
def test_no_useless_wait(sender: Sender, status: int, site: Site, name: str) -> None:
    """A request does not wait for a member when all are retired, or cool down for longer than its time."""
    Pool(name).add("a")
    site.answer = lambda token: (status, {"Retry-After": "600"})
    begun = time.monotonic()
    assert sender(name, retries=Retries(timeout=120))("GET", site.url).status_code == status
    assert time.monotonic() - begun < 60


def test_caller_errors(name: str) -> None:
    """A bad URL and an error of authorize are no failures of the member."""
    pool = Pool(name, failures=1)
    pool.add("a")

    def refuse(request: Any, member: str) -> None:
        raise KeyError(member)

    with httpx.Client(transport=PoolTransport(pool, BEARER)) as client, pytest.raises(httpx.UnsupportedProtocol):
        client.get("ftp://127.0.0.1/")
    with httpx.Client(transport=PoolTransport(pool, refuse)) as client, pytest.raises(KeyError):
        client.get("http://127.0.0.1/")
    with requests.Session() as session:
        session.mount("http://", PoolAdapter(pool, refuse))
        with pytest.raises(KeyError):
            session.get("http://127.0.0.1/", timeout=20)
    assert pool.status().ready == 1


def async_client(library: str, pool: AsyncPool) -> Any:
    """A client of one connection that sends with the members of *pool*."""
    if library == "aiohttp":
        middleware, timeout = PoolMiddleware(pool, BEARER), aiohttp.ClientTimeout(20)
        connector = aiohttp.TCPConnector(limit=1)
        return aiohttp.ClientSession(middlewares=[middleware], connector=connector, timeout=timeout)
    inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=1))
    return httpx.AsyncClient(transport=AsyncPoolTransport(pool, BEARER, transport=inner), timeout=20)


ASYNC = pytest.mark.parametrize("library", ["httpx", "aiohttp"])


@ASYNC
async def test_cancelled_request(library: str, site: Site, name: str) -> None:
    """It gives its connection back."""
    pool = AsyncPool(name)
    await pool.add("a")
    site.answer = lambda token: (429, {"Retry-After": "30"}) if token == "a" else (200, {})
    async with async_client(library, pool) as client:
        task = asyncio.create_task(client.get(site.url))
        watch = Pool(name)
        await asyncio.to_thread(wait_until, lambda: watch.status().waiting == 1, "it waits, with an answer at hand")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.add("b")
        response = await client.get(site.url)
        assert status_of(response) == 200
        await (response.read() if library == "aiohttp" else response.aread())


def in_time(seconds: float, call: Callable[[], Any]) -> Any:
    """What *call* returns; an error if it hangs."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert done, f"not within {seconds} s"
    return done[0]


def test_unused_response_is_closed(sender: Sender, site: Site, name: str) -> None:
    """A response is closed if the request is retried, or if *learn* fails. Else the only connection stays busy."""
    Pool(name).add("a", "b", "c")
    said: Iterator[Answer] = iter([(429, {}), (200, {}), (200, {}), (200, {})])
    site.answer = lambda token: next(said)
    fails = [False]

    def learn(response: Any) -> Any:
        return "no feedback" if fails[0] else of_response(response)

    send = sender(name, learn=learn)
    assert in_time(30, lambda: send("GET", site.url).status_code) == 200
    fails[0] = True
    with pytest.raises(TypeError, match="learn must return a Feedback"):
        send("GET", site.url)
    fails[0] = False
    assert in_time(30, lambda: send("GET", site.url).status_code) == 200
    assert Pool(name).status().leased == 0


def test_members_for_all_servers(sender: Sender, site: Site, name: str) -> None:
    """With origins="*", no server can retire a member or keep it from other servers for long."""
    pool = Pool(name)
    pool.add("agent-1", "agent-2")
    said: Iterator[Answer] = iter([(401, {}), (200, {"Retry-After": "99999999"}), (429, {"Retry-After": "99999999"})])
    site.answer = lambda token: next(said)
    send = sender(name, header("User-Agent"), origins="*")
    assert send("GET", site.url).status_code == 401, "a 401 is about the page"
    assert (pool.status().ready, pool.status().retired) == (2, 0)
    assert send("GET", site.url).status_code == 200
    assert pool.status().ready == 2
    assert send("GET", site.url).status_code == 429, "another member is no other client there"
    assert 0 < max(member.ready_in or 0.0 for member in pool.status().members.values()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "options"),
    [(429, {"origins": "*"}), (503, {"learn": lambda response: Feedback("failure")})],
    ids=["429 of strangers", "503 and learn"],
)
def test_learn_never_earlier(
    sender: Sender, status: int, options: Any, site: Site, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Retry-After of the answer is waited for, even if *learn* says less."""
    monkeypatch.setattr(feedback, "STRANGERS", 0.1)
    Pool(name).add("a", "b")
    said: Iterator[Answer] = iter([(status, {"Retry-After": "1"}), (200, {}), (status, {"Retry-After": "300"})])
    site.answer = lambda token: next(said)
    send = sender(name, **options)
    assert send("GET", site.url).status_code == 200
    first, second = (when for when, *_ in site.seen)
    assert second - first >= 1.0
    assert send("GET", site.url).status_code == status, "300 s are more than it may take"


def test_learn(sender: Sender, site: Site, name: str) -> None:
    """*learn* decides what an answer says about the member, with origins="*", too."""
    pool = Pool(name)
    pool.add("a", "b")
    site.answer = lambda token: (418, {})
    send = sender(name, learn=lambda response: Feedback("", 0.0, status_of(response) == 418))
    assert send("GET", site.url).status_code == 418
    assert pool.status().retired == 2, "a request whose member is retired goes to the next"
    pool.add("a", "b")
    site.answer = lambda token: (401, {})
    assert sender(name, origins="*", learn=of_response)("GET", site.url).status_code == 401
    assert pool.status().retired == 2, "of_response was asked for"


def test_timed_out_request(sender: Sender, site: Site, name: str) -> None:
    """The server may still count it, so the pool counts it until its lease would end; not if it was never sent."""
    pool = Pool(name, quota="1/second", failures=2)
    pool.add("a")
    hangs = threading.Event()
    site.answer = lambda token: (200, {"X": str(hangs.wait(20))})
    send = sender(name, retries=Retries(attempts=1))
    with pytest.raises((httpx.ReadTimeout, requests.ReadTimeout, aiohttp.SocketTimeoutError)):
        send("GET", site.url, 0.3)
    hangs.set()
    member = pool.status().members["a"]
    assert (member.failures, member.state) == (1, "limited")
    assert 15 < (member.ready_in or 0) < 31, "the rest of its lease, and the window"
    other = Pool(f"{name}'", quota="1/second")
    other.add("a")
    with pytest.raises(NO_CONNECTION):
        sender(f"{name}'", retries=Retries(attempts=1))("GET", f"http://127.0.0.1:{free_port()}/")
    assert (other.status().members["a"].ready_in or 0) < 2


def speak_no_tls(connection: socket.socket, context: ssl.SSLContext) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def close_in_handshake(connection: socket.socket, context: ssl.SSLContext) -> None:
    connection.recv(1)


def fail_after_the_request(connection: socket.socket, context: ssl.SSLContext) -> None:
    with context.wrap_socket(connection.dup(), server_side=True) as encrypted:
        encrypted.recv(65536)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("serve", "waits"), [(speak_no_tls, (0, 2)), (close_in_handshake, (0, 2)), (fail_after_the_request, (15, 31))]
)
def test_tls_failure(
    sender: Sender, serve: Any, waits: tuple[int, int], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a failure of the server or the network. In the handshake nothing was sent that the server could count."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(variable, str(tmp_path / "ca.pem"))
    pool = Pool(name, quota="1/second", failures=2)
    pool.add("a")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection, context)

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises((httpx.TransportError, requests.ConnectionError, aiohttp.ClientError, ssl.SSLError)):
            sender(name, retries=Retries(attempts=1))("GET", f"https://127.0.0.1:{listener.getsockname()[1]}/")
        thread.join()
    member = pool.status().members["a"]
    assert member.failures == 1
    assert waits[0] < (member.ready_in or 0.1) < waits[1]


@ASYNC
async def test_cancelled_request_counts(library: str, site: Site, name: str) -> None:
    """The server may still count it, as one that timed out."""
    pool, hangs = AsyncPool(name, quota="1/second"), threading.Event()
    await pool.add("a")
    site.answer = lambda token: (200, {"X": str(hangs.wait(20))})
    async with async_client(library, pool) as client:
        task = asyncio.create_task(client.get(site.url))
        await asyncio.to_thread(wait_until, lambda: site.seen, "the request has arrived")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    hangs.set()
    assert 15 < ((await pool.status()).members["a"].ready_in or 0) < 31


def test_secrets_do_not_leak(sender: Sender, site: Site, name: str) -> None:
    """No response and no error has the secret, in any of its causes."""
    Pool(name).add("alice")
    site.answer = lambda token: (200, {}) if token == "s3cret" else (500, {})
    authorize = header("Authorization", "Bearer {}", {"alice": "s3cret"})
    send = sender(name, authorize, origins="*", retries=Retries(attempts=1))
    response = send("GET", site.url)
    assert response.status_code == 200
    assert "s3cret" not in str(response.request.headers)
    hangs = threading.Event()
    site.answer = lambda token: (200, {"X": str(hangs.wait(20))})
    for url, timeout in [(f"http://127.0.0.1:{free_port()}/", 5.0), (site.url, 0.2)]:
        with pytest.raises((httpx.TransportError, requests.RequestException, aiohttp.ClientError)) as caught:
            send("GET", url, timeout)
        error: BaseException | None = caught.value
        while error is not None:
            assert "s3cret" not in repr(error) + str(getattr(getattr(error, "_request", None), "headers", ""))
            for request in (getattr(error, "request", None), getattr(error, "request_info", None)):
                assert "s3cret" not in str(getattr(request, "headers", ""))
            error = error.__cause__ or error.__context__
    hangs.set()


SECRETS = ["s3cret\n", "s3cret ", "s3\r\nX: cret", "s3cret\0", "s3cret\u2603", "", 5]


@pytest.mark.parametrize("secret", SECRETS, ids=range(len(SECRETS)))
def test_invalid_secret(sender: Sender, secret: Any, name: str) -> None:
    """A secret that no header can carry, as with the line feed of its file, is in no error either."""
    pool = Pool(name, failures=1)
    pool.add("alice")
    send = sender(name, header("Authorization", "Bearer {}", {"alice": secret}))
    with pytest.raises(ValueError, match="'alice'") as caught:
        send("GET", "http://127.0.0.1/")
    assert "s3" not in repr(caught.value)
    pool.add("s3cret ")
    pool.retire("alice")
    with pytest.raises(ValueError, match="a member") as caught:
        sender(name)("GET", "http://127.0.0.1/")
    assert "s3" not in repr(caught.value)
    assert (pool.status().open, pool.status().leased) == (0, 0)


def test_own_connection_limit(site: Site, name: str) -> None:
    """No connection of ours came free in time: this is no failure of the member."""
    pool = Pool(name, slots=2, failures=1)
    pool.add("a")
    inner = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1))
    with httpx.Client(transport=PoolTransport(pool, BEARER, transport=inner), timeout=20) as client:
        with client.stream("GET", site.url), pytest.raises(httpx.PoolTimeout):
            client.get(site.url, timeout=httpx.Timeout(20, pool=0.05))
        assert (pool.status().open, len(site.seen)) == (0, 1)


async def test_own_connection_limit_of_aiohttp(site: Site, name: str) -> None:
    """As `test_own_connection_limit`."""
    pool, hangs = AsyncPool(name, slots=2, failures=1), threading.Event()
    await pool.add("a")
    site.answer = lambda token: (200, {"X": str(hangs.wait(20))})
    async with async_client("aiohttp", pool) as session:
        first = asyncio.create_task(session.get(site.url))
        await asyncio.to_thread(wait_until, lambda: site.seen, "the first request has the connection")
        with pytest.raises(aiohttp.ConnectionTimeoutError):
            await session.get(site.url, timeout=aiohttp.ClientTimeout(20, connect=0.05))
        hangs.set()
        (await first).close()
        assert ((await pool.status()).open, len(site.seen)) == (0, 1)


@pytest.mark.parametrize("attempts", [1, 3])
async def test_aiohttp_repeats_nothing_itself(attempts: int, site: Site, name: str) -> None:
    """A connection that breaks costs one attempt, although aiohttp would send an idempotent request once more."""
    pool = AsyncPool(name)
    await pool.add("a")
    arrived: list[int] = []

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.append(1)
        writer.close()

    middleware = PoolMiddleware(pool, BEARER, retries=Retries(attempts=attempts), origins="*")
    async with (
        await asyncio.start_server(drop, "127.0.0.1", 0) as server,
        aiohttp.ClientSession(middlewares=[middleware]) as session,
    ):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for calls in (1, 2):
            with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
                await session.get(url)
            assert len(arrived) == calls * attempts
        async with session.get(site.url) as response:
            assert response.status == 200, "the failed call says nothing about the next"


def test_backoff(sender: Sender, site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses double after each failure, up to 30 seconds."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(retries, "JITTER", SimpleNamespace(uniform=lambda low, high: high))
    Pool(name).add("a", "b")
    site.answer = lambda token: (500, {})
    assert sender(name, retries=Retries(attempts=3))("GET", site.url).status_code == 500
    first, second, third = (when for when, *_ in site.seen)
    assert second - first >= 0.2 and third - second >= 0.4
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.5)
    pauses = [Retries(attempts=20).pause("GET", 500, Feedback("failure"), number, 99.0) for number in range(1, 10)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


async def later(request: Any, member: str) -> None:
    """An async function where a plain one belongs: it would never be awaited."""


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: header("Authorization", "Bearer {token}"), ValueError, "Bearer {}"),
    (lambda: header("Authorization", "Bearer"), ValueError, "Bearer {}"),
    (lambda: header("Authorization", "{} {}"), ValueError, "Bearer {}"),
    (lambda: header("Authorization", "{"), ValueError, "Bearer {}"),
    (lambda: header("Authorization", None), ValueError, "Bearer {}"),  # type: ignore[arg-type]  # the error is the test
    (lambda: header(""), ValueError, "Authorization"),
    (lambda: header("X", secrets="s3cret"), TypeError, "secrets"),  # type: ignore[arg-type]  # as above
    (lambda: header("X", secrets={})(httpx.Request("GET", "http://x"), "bob"), LookupError, "'bob'.*no secret"),
    (lambda: PoolTransport(AsyncPool("x"), BEARER), TypeError, "AsyncPool"),  # type: ignore[arg-type]  # as above
    (lambda: AsyncPoolTransport(Pool("x"), BEARER), TypeError, "AsyncPool"),  # type: ignore[arg-type]  # as above
    (lambda: PoolMiddleware(Pool("x"), BEARER), TypeError, "AsyncPool"),  # type: ignore[arg-type]  # as above
    (lambda: PoolMiddleware(AsyncPool("x"), later), TypeError, "async"),
    (lambda: PoolAdapter(AsyncPool("x"), BEARER), TypeError, "AsyncPool"),  # type: ignore[arg-type]  # as above
    (lambda: PoolTransport(Pool("x"), "Authorization"), TypeError, "header"),  # type: ignore[arg-type]  # as above
    (lambda: AsyncPoolTransport(AsyncPool("x"), None), TypeError, "header"),  # type: ignore[arg-type]  # as above
    (lambda: PoolAdapter(Pool("x"), 5), TypeError, "header"),  # type: ignore[arg-type]  # as above
    (lambda: PoolAdapter(Pool("x"), BEARER, learn=401), TypeError, "learn"),  # type: ignore[arg-type]  # as above
    (lambda: AsyncPoolTransport(AsyncPool("x"), later), TypeError, "async"),
    (lambda: PoolTransport(Pool("x"), BEARER, retries=0), TypeError, "attempts=1"),  # type: ignore[arg-type]  # as above
    (lambda: PoolAdapter(Pool("x"), BEARER, retries=3), TypeError, "Retries"),  # type: ignore[arg-type]  # as above
    (lambda: PoolTransport(Pool("x"), BEARER, origins=[]), ValueError, "origins"),
    (lambda: pickle.dumps(PoolAdapter(Pool("x"), BEARER)), TypeError, "each process"),
]


@pytest.mark.parametrize(("make", "error", "words"), BAD, ids=range(len(BAD)))
def test_bad_arguments(make: Callable[[], object], error: type[Exception], words: str) -> None:
    """A bad argument is an error of the constructor, where it can be known so early."""
    with pytest.raises(error, match=words) as caught:
        make()
    assert "s3cret" not in str(caught.value)


def test_secrets_stay_local(site: Site, name: str) -> None:
    """The pool has names; the request has the secret of the name."""
    pool = Pool(name)
    pool.add("alice")
    authorize = header("Authorization", "Bearer {}", {"alice": "s3cret"})
    with httpx.Client(transport=PoolTransport(pool, authorize)) as client:
        client.get(site.url)
    assert site.tokens == ["s3cret"]


# method  status  feedback  attempts so far  seconds left  pause
PAUSES = [
    ("GET", 200, Feedback(), 1, 60.0, None),
    ("GET", 404, Feedback(), 1, 60.0, None),
    ("POST", 429, Feedback("", 30.0), 1, 60.0, 0.0),
    ("POST", 429, Feedback("", 30.0), 4, 60.0, None),
    ("POST", 401, Feedback("", 0.0, True), 1, 60.0, 0.0),
    ("GET", 503, Feedback("failure", 30.0), 1, 60.0, 30.0),
    ("GET", 503, Feedback("failure", 61.0), 1, 60.0, None),
    ("POST", 503, Feedback("failure", 30.0), 1, 60.0, None),
    ("POST", None, Feedback("failure"), 1, 60.0, None),
    ("get", None, Feedback("failure", 1.0), 1, 60.0, 1.0),
]


@pytest.mark.parametrize(("method", "status", "verdict", "number", "left", "pause"), PAUSES, ids=repr)
def test_pauses(
    method: str, status: int | None, verdict: Feedback, number: int, left: float, pause: float | None
) -> None:
    """Each row of PAUSES."""
    assert Retries().pause(method, status, verdict, number, left) == pause


@pytest.mark.parametrize("options", [{"attempts": 0}, {"attempts": 1.5}, {"timeout": 0}, {"timeout": "60"}], ids=repr)
def test_bad_retries(options: Any) -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Retries(**options)


@pytest.mark.parametrize("library", ["httpx", "requests", "aiohttp"])
def test_missing_library(library: str) -> None:
    """The error names the extra to install."""
    code = f"import sys; sys.modules['{library}'] = None\nimport headgate.clients.{library}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert f"headgate[{library}]" in done.stderr
