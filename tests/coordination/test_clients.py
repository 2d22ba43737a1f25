"""httpx and requests with members of a pool, against a real server that answers as it is told."""

import asyncio
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests

from headgate.clients import retries
from headgate.clients.httpx import AsyncPoolTransport, PoolTransport
from headgate.clients.requests import PoolAdapter
from headgate.clients.retries import Origins, Retries, header
from headgate.coordination import AsyncPool, Pool
from headgate.coordination.feedback import Feedback
from headgate.errors import PoolExhausted
from tests.faults.clusters import wait_until
from tests.servers import free_port

Answer = tuple[int, dict[str, str]]
BEARER = header("Authorization", "Bearer {}")


class Site:
    """A server that asks *answer* what to say to each request, and keeps what it has seen."""

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
            def handle_error(self, *_: object) -> None: ...  # a client that goes away is no news

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


Ask = Callable[..., Any]
CLIENTS = ["httpx", "httpx async", "requests"]


def ask(client: str, name: str, url: str, method: str = "GET", *, most: Retries | None = None, **options: Any) -> Any:
    """One request through *client* with the pool of that name."""
    if client == "requests":
        with requests.Session() as session:
            session.mount("http://", PoolAdapter(Pool(name), BEARER, retries=most))
            return session.request(method, url, timeout=20, **options)
    if client == "httpx":
        with httpx.Client(transport=PoolTransport(Pool(name), BEARER, retries=most), timeout=20) as plain:
            return plain.request(method, url, **options)

    async def run() -> httpx.Response:
        transport = AsyncPoolTransport(AsyncPool(name), BEARER, retries=most)
        async with httpx.AsyncClient(transport=transport, timeout=20) as tasks:
            return await tasks.request(method, url, **options)

    return asyncio.run(run())


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_members_take_turns(client: str, site: Site, name: str) -> None:
    Pool(name).add("a", "b")
    for _ in range(3):
        assert ask(client, name, site.url).text == "ok"
    assert site.tokens == ["a", "b", "a"]
    assert Pool(name).status().ready == 2


def test_429_goes_to_another_member(client: str, site: Site, name: str) -> None:
    """And the one that was refused is left alone for as long as the server asked."""
    Pool(name).add("a", "b")
    site.answer = lambda token: (429, {"Retry-After": "30"}) if token == "a" else (200, {})
    for method in ("GET", "POST", "GET"):
        assert ask(client, name, site.url, method).status_code == 200
    assert site.tokens == ["a", "b", "b", "b"]
    status = Pool(name).status()
    assert (status.cooling, status.ready) == (1, 1)
    assert 25 < (status.members["a"].ready_in or 0) <= 30


def test_never_earlier_than_asked(client: str, site: Site, name: str) -> None:
    Pool(name).add("a")
    answers = iter([(429, {"Retry-After": "1"}), (503, {"Retry-After": "1"}), (200, {})])
    site.answer = lambda token: next(answers)
    assert ask(client, name, site.url).status_code == 200
    times = [when for when, *_ in site.seen]
    assert times[1] - times[0] >= 1.0 and times[2] - times[1] >= 1.0


def test_longer_than_we_may_wait(client: str, site: Site, name: str) -> None:
    """The caller gets the answer, which says when; nothing is sent early."""
    Pool(name).add("a")
    site.answer = lambda token: (429, {"Retry-After": "300"})
    response = ask(client, name, site.url, most=Retries(timeout=0.5))
    assert (response.status_code, response.headers["Retry-After"], response.text) == (429, "300", "ok")
    with pytest.raises(PoolExhausted) as caught:
        ask(client, name, site.url, most=Retries(timeout=0.1))
    assert 290 < (caught.value.retry_after or 0) <= 300
    assert len(site.seen) == 1


def test_401_retires(client: str, site: Site, name: str) -> None:
    Pool(name).add("stolen", "good")
    site.answer = lambda token: (401, {}) if token == "stolen" else (200, {})
    assert ask(client, name, site.url, "POST").status_code == 200
    assert site.tokens == ["stolen", "good"]
    assert Pool(name).status().members["stolen"].state == "retired"


@pytest.mark.parametrize(("method", "sent"), [("GET", 4), ("PUT", 4), ("POST", 1)])
def test_failures(client: str, method: str, sent: int, site: Site, name: str) -> None:
    """Only what may be repeated is; the last answer is the caller's."""
    Pool(name).add("a", "b")
    site.answer = lambda token: (500, {})
    assert ask(client, name, site.url, method).status_code == 500
    assert len(site.seen) == sent


def test_bodies_are_sent_again(client: str, site: Site, name: str) -> None:
    Pool(name).add("a", "b")
    answers: Iterator[Answer] = iter([(429, {}), (200, {})])
    site.answer = lambda token: next(answers)
    assert ask(client, name, site.url, "POST", data={"x": "1"}).status_code == 200
    assert [body for *_, body in site.seen] == [b"x=1", b"x=1"]


def test_a_stream_is_sent_once(client: str, site: Site, name: str) -> None:
    Pool(name).add("a", "b")
    site.answer = lambda token: (429, {})

    def chunks() -> Iterator[bytes]:
        yield b"x"

    async def achunks() -> Any:
        yield b"x"

    body = (
        {"content": achunks()} if client == "httpx async" else {"data" if client == "requests" else "content": chunks()}
    )
    assert ask(client, name, site.url, "POST", headers={"Content-Length": "1"}, **body).status_code == 429
    assert len(site.seen) == 1


def test_nobody_answers(client: str, name: str) -> None:
    pool = Pool(name, failures=2)
    pool.add("a")
    with pytest.raises((httpx.ConnectError, requests.ConnectionError)):
        ask(client, name, f"http://127.0.0.1:{free_port()}/", "POST")
    assert pool.status().leased == 0


def test_failures_count_for_the_members_breaker(site: Site, name: str) -> None:
    pool = Pool(name, failures=2)
    pool.add("a")
    site.answer = lambda token: (500, {})
    with httpx.Client(transport=PoolTransport(pool, BEARER, retries=Retries(timeout=1.0))) as client:
        assert client.get(site.url).status_code == 500
    assert len(site.seen) == 2
    assert pool.status().open == 1


@pytest.mark.parametrize("given", [False, True])
def test_members_go_nowhere_else(client: str, given: bool, site: Site, name: str) -> None:
    """Not even where a redirect leads; and whoever is there cannot retire them."""
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
        if client == "requests":
            with requests.Session() as session:
                session.mount("http://", PoolAdapter(pool, both, origins=origins))
                assert session.get(site.url, timeout=20).status_code == 401
        elif client == "httpx":
            with httpx.Client(transport=PoolTransport(pool, both, origins=origins), follow_redirects=True) as plain:
                assert plain.get(site.url).status_code == 401
        else:

            async def run() -> int:
                transport = AsyncPoolTransport(AsyncPool(name), both, origins=origins)
                async with httpx.AsyncClient(transport=transport, follow_redirects=True) as tasks:
                    return (await tasks.get(site.url)).status_code

            assert asyncio.run(run()) == 401
    finally:
        elsewhere.stop()
    assert site.tokens == ["a"] and elsewhere.tokens == [""] and elsewhere.keys == [""]
    assert pool.status().ready == 2


def test_origins() -> None:
    assert "https://a.example/x" in Origins(["https://a.example"])
    assert "https://a.example:443/" in Origins("https://a.example/")
    assert "http://a.example/" not in Origins("https://a.example")
    assert "https://b.example/" in Origins("*")
    first = Origins(None)
    assert "https://a.example/1" in first and "https://b.example/" not in first and "https://a.example/2" in first
    with pytest.raises(ValueError, match="origin"):
        Origins("a.example")


@pytest.mark.parametrize("status", [401, 429])
def test_nobody_waits_for_nothing(client: str, status: int, site: Site, name: str) -> None:
    """Whoever could answer is retired, or not to be had in the time that is left."""
    Pool(name).add("a")
    site.answer = lambda token: (status, {"Retry-After": "600"})
    begun = time.monotonic()
    assert ask(client, name, site.url, most=Retries(timeout=120)).status_code == status
    assert time.monotonic() - begun < 60


def test_errors_of_the_caller_are_not_the_members(name: str) -> None:
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


async def test_a_client_that_is_cancelled_keeps_no_connection(site: Site, name: str) -> None:
    pool = AsyncPool(name)
    await pool.add("a")
    site.answer = lambda token: (429, {"Retry-After": "30"}) if token == "a" else (200, {})
    inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=1))
    transport = AsyncPoolTransport(pool, BEARER, transport=inner)
    async with httpx.AsyncClient(transport=transport, timeout=20) as client:
        task = asyncio.create_task(client.get(site.url))
        watch = Pool(name)
        await asyncio.to_thread(wait_until, lambda: watch.status().waiting == 1, "it waits, with an answer at hand")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.add("b")
        assert (await client.get(site.url)).status_code == 200


def test_secrets_stay_here(site: Site, name: str) -> None:
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


@pytest.mark.parametrize(("method", "status", "feedback", "number", "left", "pause"), PAUSES, ids=repr)
def test_pauses(
    method: str, status: int | None, feedback: Feedback, number: int, left: float, pause: float | None
) -> None:
    assert Retries().pause(method, status, feedback, number, left) == pause


@pytest.mark.parametrize("options", [{"attempts": 0}, {"attempts": 1.5}, {"timeout": 0}, {"timeout": "60"}], ids=repr)
def test_bad_retries(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Retries(**options)


@pytest.mark.parametrize("library", ["httpx", "requests"])
def test_without_the_library_the_error_names_the_extra(library: str) -> None:
    code = f"import sys; sys.modules['{library}'] = None\nimport headgate.clients.{library}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert f"headgate[{library}]" in done.stderr
