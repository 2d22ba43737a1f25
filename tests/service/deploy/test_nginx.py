"""The nginx example, with a real nginx before a real headgate: which requests pass, and which are told to wait."""

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.service.conftest import Start
from tests.service.deploy import tools
from tests.service.deploy.processes import Answer, ask, running
from tests.support.servers import free_port
from tests.support.service import Service

NGINX = tools.PROGRAMS["nginx"].find()


def reason_to_skip() -> str:
    if NGINX is None:
        return tools.missing_reason("nginx")
    built = subprocess.run(
        [NGINX, "-V"], capture_output=True, text=True, env=tools.environment(), timeout=20, check=False
    )
    return "" if "http_auth_request_module" in built.stderr else f"{NGINX} was built without auth_request"


pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())

EXAMPLE = tools.HOUSE / "deploy" / "nginx" / "headgate.conf"
LIMIT = 5
TIMEOUTS = {"connect": "100ms", "send": "500ms", "read": "500ms"}
CONFIG = f"""
trusted_proxies = ["127.0.0.1/32"]
[rules.default]
quotas = "{LIMIT}/hour"
[rules.tight]
quotas = "1/hour"
"""
MAIN = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
    fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    include {folder}/headgate.conf;
    server {{ listen 127.0.0.1:{ready}; return 200; }}
}}
"""


class Echo(BaseHTTPRequestHandler):
    """An application that says what it was sent, with the status that the path names."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = self.path.strip("/")
        body = b"app:" + sent
        self.send_response(int(status) if status.isdigit() else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_POST = do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


class Behind:
    """nginx, headgate and the application, as the example wires them."""

    def __init__(self, service: Service, url: str, folder: Path) -> None:
        self.service, self.url, self.folder = service, url, folder

    def get(
        self,
        path: str = "/",
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        return ask(self.url + path, method, body, headers)

    def remaining(self) -> int:
        return int(self.service.remaining("127.0.0.1", permits=0).json["remaining"])

    @property
    def log(self) -> str:
        return (self.folder / "error.log").read_text()


@pytest.fixture
def application() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment() -> dict[str, str]:
    """Of headgate; a test may give another."""
    return {}


@pytest.fixture
def behind(
    request: pytest.FixtureRequest, tmp_path: Path, application: int, start: Start, environment: dict[str, str]
) -> Iterator[Behind]:
    """The example as it is; a test may change its text with `indirect`."""
    ready, front, service = free_port(), free_port(), start(config=CONFIG, environment=environment)
    text = EXAMPLE.read_text()
    ours = {"127.0.0.1:8080": service.port, "127.0.0.1:3000": application, "127.0.0.1:8088": front}
    changes = {old: f"127.0.0.1:{port}" for old, port in ours.items()} | getattr(request, "param", {})
    # a machine that stands still for a moment is no service that is down
    changes |= {f"proxy_{what}_timeout {time}": f"proxy_{what}_timeout 20s" for what, time in TIMEOUTS.items()}
    for old, new in changes.items():
        assert text.count(old) == 1, f"the example has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    (tmp_path / "headgate.conf").write_text(text)
    (tmp_path / "nginx.conf").write_text(MAIN.format(folder=tmp_path, ready=ready))
    command = [str(NGINX), "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    with running(command, f"http://127.0.0.1:{ready}/", tmp_path):
        yield Behind(service, f"http://127.0.0.1:{front}", tmp_path)


def test_limit_through_nginx(behind: Behind) -> None:
    """Each request spends one permit; the sixth is a 429 with Retry-After."""
    ways = [("GET", None), ("POST", b"hello"), ("HEAD", None), ("GET", None), ("POST", b"again")]
    for left, (method, body) in zip(range(LIMIT - 1, -1, -1), ways, strict=True):
        answer = behind.get(method=method, body=body)
        assert answer.status == 200
        assert answer.body == (b"" if method == "HEAD" else b"app:" + (body or b""))
        assert (answer.headers["X-RateLimit-Limit"], answer.headers["X-RateLimit-Remaining"]) == (str(LIMIT), str(left))
    for method in ("GET", "POST"):
        answer = behind.get(method=method, body=b"x" if method == "POST" else None)
        assert answer.status == 429
        assert json.loads(answer.body)["status"] == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["X-RateLimit-Remaining"] == "0"
        assert answer.headers["Cache-Control"] == "no-store"
    assert behind.log == "", "a refusal is no error: under attack the log would fill the disk"


def test_a_client_cannot_choose_its_key(behind: Behind) -> None:
    for i in range(LIMIT):
        lies = {"X-Forwarded-For": f"6.6.6.{i}", "X-Real-IP": f"7.7.7.{i}", "Forwarded": f"for=8.8.8.{i}"}
        assert behind.get(f"/?key=mine{i}", headers=lies).status == 200
    assert behind.get("/?key=other", headers={"X-Forwarded-For": "6.6.6.99"}).status == 429


def test_status_passes(behind: Behind) -> None:
    """nginx passes the application's own status on."""
    for status in (401, 403, 404, 429, 500):
        answer = behind.get(f"/{status}")
        assert (answer.status, answer.body) == (status, b"app:")
    assert behind.remaining() == 0


def test_without_headgate_requests_go_on(behind: Behind) -> None:
    behind.service.stop()
    assert behind.get().body == b"app:"
    assert behind.get(method="POST", body=b"still here").body == b"app:still here"


@pytest.mark.parametrize("behind", [{'set $headgate_rule "";': "set $headgate_rule tight;"}], indirect=True)
def test_a_location_may_name_a_rule(behind: Behind) -> None:
    assert [behind.get().status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("behind", [{"auth_request /_headgate;": "auth_request /_headgate; deny all;"}], indirect=True)
def test_nginx_deny(behind: Behind) -> None:
    """A `deny` of nginx holds even if headgate allows the request."""
    assert behind.get().status == 403


@pytest.mark.parametrize(
    "behind",
    [{"and spend, twice.\n        proxy_pass http://application;": "and spend, twice.\n        root /;"}],
    indirect=True,
    ids=["no index"],
)
def test_nor_is_what_nginx_forbids_later(behind: Behind) -> None:
    assert behind.get().status == 403
    assert behind.remaining() == LIMIT - 1


@pytest.mark.parametrize("environment", [{"HEADGATE_CHECK_TOKEN": "secret"}])
def test_nginx_token(behind: Behind, environment: dict[str, str]) -> None:
    """The token of a client does not reach headgate: nginx has to send its own."""
    answer = behind.get(headers={"Authorization": "Bearer secret"})
    assert (answer.status, answer.headers["X-RateLimit-Limit"]) == (200, None), "not asked with it, and let through"
    assert "unexpected status: 500" in behind.log


@pytest.mark.parametrize(
    "behind", [{'set $headgate_rule "";': "set $headgate_rule unknown;"}], indirect=True, ids=["unknown rule"]
)
def test_nginx_mistake(behind: Behind) -> None:
    """A wrong set-up lets requests through, and nginx logs it."""
    assert behind.get().status == 200
    assert "unexpected status" in behind.log


def test_nginx_only(behind: Behind) -> None:
    """The location of the check cannot be reached from outside."""
    assert behind.get("/_headgate").status == 404
    assert behind.remaining() == LIMIT
