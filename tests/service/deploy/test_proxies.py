"""The examples for proxies, each with the real proxy: what a client sees, and what it cannot choose."""

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.service.deploy.processes import ask
from tests.service.deploy.proxies import PROXIES, SHORT_NGINX, Application, Proxy, in_front, program
from tests.support.servers import quiet_port
from tests.support.service import Service

pytestmark = [pytest.mark.xdist_group("proxies"), pytest.mark.server]

LIMIT = 3
CONFIG = f"""
trusted_proxies = ["127.0.0.1/32"]

[rules.api]
quotas = "{LIMIT}/hour"
key = ["address"]

[rules.by-request]
quotas = "1/hour"
key = ["address", "host", "method", "path"]

[rules.by-header]
quotas = "1/hour"
key = ["header:X-Api-Key"]
"""
FORGED = {
    "X-Forwarded-For": "6.6.6.{}",
    "X-Real-IP": "7.7.7.{}",
    "Forwarded": "for=8.8.8.{}",
    "X-Forwarded-Host": "h{}.example.com",
    "X-Forwarded-Method": "PUT",
    "X-Forwarded-Uri": "/forged/{}",
    "X-Original-URI": "/forged/{}",
    "X-Original-Method": "PUT",
}
ON_ALLOWED = ("nginx", "caddy", "haproxy")  # Traefik cannot add headers to the answer
# The status that a client gets while headgate is away, as docs/proxies.md says; then with the stricter form.
AWAY = {"nginx": 200, "traefik": 500, "caddy": 200, "haproxy": 200}
STRICT: dict[str, tuple[Proxy, Mapping[str, str], int]] = {
    "nginx": (SHORT_NGINX, {}, 500),
    "caddy": (PROXIES["caddy"], {"handle_errors 502 503 504": "handle_errors 418"}, 502),
    "haproxy": (PROXIES["haproxy"], {"# http-request return status 503": "http-request return status 503"}, 503),
}
# How each proxy is given a token of its own.
TOKEN = {
    "nginx": {'# proxy_set_header Authorization "Bearer ...";': 'proxy_set_header Authorization "Bearer secret";'},
    "traefik": {"address: http://": "address: http://traefik:secret@"},
    "caddy": {"header_up -Authorization": 'header_up Authorization "Bearer secret"'},
    "haproxy": {'-- ["authorization"] = { "Bearer ..." }': '["authorization"] = { "Bearer secret" }'},
}
# What lets a header of the client through, where the example does not.
WITH_HEADER = {
    "nginx": {"# proxy_set_header X-Api-Key": "proxy_set_header X-Api-Key"},
    "haproxy": {'-- ["x-api-key"]': '["x-api-key"]'},
}


@pytest.fixture(scope="module")
def headgate() -> Iterator[Service]:
    started = Service(config=CONFIG)
    yield started
    started.forget()


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    started = Application()
    yield started
    started.stop()


@pytest.fixture(scope="module", params=PROXIES)
def name(request: pytest.FixtureRequest) -> str:
    """Each proxy in turn; without the program its tests are skipped."""
    chosen = str(request.param)
    program(chosen)
    return chosen


@pytest.fixture(scope="module")
def shared_front(
    name: str, headgate: Service, application: Application, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    headgate.reset("127.0.0.1", rule="api")  # the proxy before may have left nothing
    with in_front(PROXIES[name], tmp_path_factory.mktemp(name), headgate.port, application.port) as url:
        yield url


@pytest.fixture
def front(shared_front: str, headgate: Service, application: Application) -> str:
    """The URL of the example as it is, with nothing spent."""
    headgate.reset("127.0.0.1", rule="api")
    application.seen.clear()
    return shared_front


def test_denial(name: str, front: str, application: Application) -> None:
    """A client that is denied gets 429 with Retry-After and a problem; the application sees nothing of it."""
    for left in range(LIMIT - 1, -1, -1):
        answer = ask(front)
        assert (answer.status, answer.body) == (200, b"app:")
        if name in ON_ALLOWED:
            assert answer.headers["X-RateLimit-Limit"] == str(LIMIT)
            assert answer.headers["X-RateLimit-Remaining"] == str(left)
    for method, body in (("GET", None), ("POST", b"x")):
        answer = ask(front, method, body)
        assert answer.status == 429 and int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["X-RateLimit-Remaining"] == "0" and answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Content-Type"] == "application/problem+json" and json.loads(answer.body)["status"] == 429
    assert len(application.seen) == LIMIT


def test_bodies(front: str, headgate: Service) -> None:
    """The application gets the body, and each request spends one permit, whatever its method."""
    assert ask(front, "POST", b"hello").body == b"app:hello"
    assert ask(front, "HEAD").status == 200
    assert headgate.remaining("127.0.0.1", rule="api", permits=0).json["remaining"] == LIMIT - 2


def test_chosen_key(front: str) -> None:
    """A client cannot choose its key: neither by the query nor by a header that a proxy writes."""
    for i in range(LIMIT):
        assert ask(f"{front}/?key=mine{i}&rule=default", headers=forged(i)).status == 200
    for i in range(3):
        assert ask(f"{front}/?key=other{i}", headers=forged(100 + i)).status == 429


def test_own_status(front: str) -> None:
    """The application's own status passes."""
    assert [ask(f"{front}/{status}").status for status in (403, 429, 502)] == [403, 429, 502]


def test_request_as_key(name: str, headgate: Service, application: Application, tmp_path: Path) -> None:
    """Method and path are parts of a key; another spelling, a query or a forged header is no other request."""
    proxy = PROXIES[name]
    changes = {proxy.rule.format("api"): proxy.rule.format("by-request")}
    with in_front(proxy, tmp_path, headgate.port, application.port, changes) as url:
        path = f"/{name}/a"
        assert ask(url + path).status == 200
        for same in (path, f"{path}?b=1", f"/{name}/%61", f"//{name}/./a", f"{path}/"):
            assert ask(url + same, headers=forged(1)).status == 429, same
        assert ask(url + path, "POST", b"").status == 200
        assert ask(f"{url}/{name}/b").status == 200
        # a value that is too long for a key is still one key, and no error
        for status in (200, 429):
            assert ask(f"{url}/{name}/" + "x" * 2000).status == status


def test_header_as_key(name: str, headgate: Service, application: Application, tmp_path: Path) -> None:
    """A client that leaves out the header of the key is refused, not let through; a long one is a key as others."""
    proxy = PROXIES[name]
    changes = {proxy.rule.format("api"): proxy.rule.format("by-header"), **WITH_HEADER.get(name, {})}
    with in_front(proxy, tmp_path, headgate.port, application.port, changes, ready=400) as url:
        assert ask(url).status == 400
        for key in (name, f"{name}-" + "k" * 1000):
            assert [ask(url, headers={"X-Api-Key": key}).status for _ in range(2)] == [200, 429]


def test_away(name: str, application: Application, tmp_path: Path) -> None:
    """While headgate is away a client gets what the documentation says."""
    with in_front(PROXIES[name], tmp_path, quiet_port(), application.port, ready=AWAY[name]) as url:
        answer = ask(url, "POST", b"hello")
        assert answer.status == AWAY[name]
        assert (answer.body == b"app:hello") is (AWAY[name] == 200)


@pytest.mark.parametrize("name", ["nginx", "caddy", "haproxy"], indirect=True)  # the time-out of Traefik is 30 s
def test_hangs(name: str, application: Application, tmp_path: Path) -> None:
    """A headgate that accepts connections and does not answer is away, with the time-outs of the example."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        proxy = PROXIES[name]._replace(patience={})
        with in_front(proxy, tmp_path, silent.getsockname()[1], application.port, ready=AWAY[name]) as url:
            assert ask(url, "POST", b"hello").body == b"app:hello"


@pytest.mark.parametrize("strict", STRICT)
def test_strict(strict: str, application: Application, tmp_path: Path) -> None:
    """With the change that the documentation names, no request passes while headgate is away."""
    proxy, changes, status = STRICT[strict]
    application.seen.clear()
    with in_front(proxy, tmp_path, quiet_port(), application.port, changes, ready=status) as url:
        assert ask(url).status == status
        assert application.seen == []


@pytest.fixture(scope="module")
def guarded() -> Iterator[Service]:
    """A service that asks for a token."""
    started = Service(config=CONFIG, environment={"HEADGATE_CHECK_TOKEN": "secret", "HEADGATE_ADMIN_TOKEN": "admin"})
    yield started
    started.forget()


def test_token(name: str, guarded: Service, application: Application, tmp_path: Path) -> None:
    """The proxy sends its own token to headgate, and the client's credentials to the application."""
    admin = {"authorization": "Bearer admin"}
    guarded.reset("127.0.0.1", admin, rule="api")
    with in_front(PROXIES[name], tmp_path, guarded.port, application.port, TOKEN[name]) as url:
        guarded.reset("127.0.0.1", admin, rule="api")
        application.seen.clear()
        for status in (*[200] * LIMIT, 429):
            assert ask(url, headers={"Authorization": "Bearer mine"}).status == status
        assert [headers["Authorization"] for _, headers in application.seen] == ["Bearer mine"] * LIMIT


def test_short_nginx(headgate: Service, application: Application, tmp_path: Path) -> None:
    """The short example for nginx: a client that is denied gets 403."""
    headgate.reset("127.0.0.1", rule="api")
    with in_front(SHORT_NGINX, tmp_path, headgate.port, application.port) as url:
        headgate.reset("127.0.0.1", rule="api")
        assert [ask(f"{url}/?key={i}", headers=forged(i)).status for i in range(LIMIT + 1)] == [*[200] * LIMIT, 403]


def forged(i: int) -> dict[str, str]:
    return {header: value.format(i) for header, value in FORGED.items()}
