"""What is special about the nginx example: which requests pass, which are told to wait, and what the log says."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.deploy.processes import Answer, ask
from tests.service.deploy.proxies import PROXIES, Application, in_front, program
from tests.support.service import Service

pytestmark = [pytest.mark.xdist_group("proxies"), pytest.mark.server]

LIMIT = 5
CONFIG = f"""
trusted_proxies = ["127.0.0.1/32"]
[rules.api]
quotas = "{LIMIT}/hour"
key = ["address"]
[rules.tight]
quotas = "1/hour"
key = ["address"]
"""
NAMED = "set $headgate_rule api;"


class Behind:
    """nginx, headgate and the application, as the example wires them; nothing is spent yet."""

    def __init__(self, service: Service, url: str, folder: Path) -> None:
        self.service, self.url, self.folder = service, url, folder
        service.reset("127.0.0.1", rule="api")
        service.reset("127.0.0.1", rule="tight")

    def get(self, path: str = "/", method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        return ask(self.url + path, method, b"x" if method == "POST" else None, headers)

    def remaining(self) -> int:
        return int(self.service.remaining("127.0.0.1", rule="api", permits=0).json["remaining"])

    @property
    def log(self) -> str:
        return (self.folder / "error.log").read_text()


@pytest.fixture(scope="module")
def headgate() -> Iterator[Service]:
    started = Service(config=CONFIG)
    yield started
    started.forget()


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    program("nginx")
    started = Application()
    yield started
    started.stop()


@contextmanager
def behind(
    headgate: Service, application: Application, folder: Path, ready: int = 200, **changes: str
) -> Iterator[Behind]:
    """The example; *changes* replaces the line that names the rule."""
    rule = {NAMED: changes["rule"]} if changes else {}
    headgate.reset("127.0.0.1", rule="api")  # the test before may have left nothing
    headgate.reset("127.0.0.1", rule="tight")
    with in_front(PROXIES["nginx"], folder, headgate.port, application.port, rule, ready) as url:
        yield Behind(headgate, url, folder)


def test_log(headgate: Service, application: Application, tmp_path: Path) -> None:
    """A refusal is no error: under attack the log would fill the disk."""
    with behind(headgate, application, tmp_path) as front:
        for method in ("GET", "POST", "HEAD", "GET", "POST"):
            assert front.get(method=method).status == 200
        for method in ("GET", "POST"):
            answer = front.get(method=method)
            assert (answer.status, json.loads(answer.body)["status"]) == (429, 429)
        assert front.log == ""


def test_internal(headgate: Service, application: Application, tmp_path: Path) -> None:
    """The location of the check cannot be reached from outside, and a client's token does not reach headgate."""
    with behind(headgate, application, tmp_path) as front:
        assert front.get("/_headgate").status == 404
        assert front.remaining() == LIMIT


def test_a_location_may_name_a_rule(headgate: Service, application: Application, tmp_path: Path) -> None:
    with behind(headgate, application, tmp_path, rule="set $headgate_rule tight;") as front:
        assert [front.get().status for _ in range(2)] == [200, 429]


def test_nginx_deny(headgate: Service, application: Application, tmp_path: Path) -> None:
    """A `deny` of nginx holds even if headgate allows the request."""
    with behind(headgate, application, tmp_path, ready=403, rule=f"{NAMED} deny all;") as front:
        assert front.get().status == 403


def test_nginx_forbids_later(headgate: Service, application: Application, tmp_path: Path) -> None:
    """A folder without an index is a 403 of nginx after headgate has allowed the request."""
    headgate.reset("127.0.0.1", rule="api")
    other = {"and spend, twice.\n        proxy_pass http://application;": "and spend, twice.\n        root /;"}
    with in_front(PROXIES["nginx"], tmp_path, headgate.port, application.port, other, ready=404) as url:
        front = Behind(headgate, url, tmp_path)
        assert front.get().status == 403
        assert front.remaining() == LIMIT - 1


def test_nginx_mistake(headgate: Service, application: Application, tmp_path: Path) -> None:
    """A wrong set-up lets requests through, and nginx logs it."""
    with behind(headgate, application, tmp_path, rule="set $headgate_rule unknown;") as front:
        assert front.get().status == 200
        assert "unexpected status: 404" in front.log


def test_nginx_token(application: Application, tmp_path: Path) -> None:
    """The token of a client does not reach headgate: nginx has to send its own."""
    service = Service(config=CONFIG, environment={"HEADGATE_CHECK_TOKEN": "secret"})
    try:
        with in_front(PROXIES["nginx"], tmp_path, service.port, application.port) as url:
            answer = ask(url, headers={"Authorization": "Bearer secret"})
            assert (answer.status, answer.headers["X-RateLimit-Limit"]) == (200, None), "let through, without a check"
            assert "unexpected status: 500" in (tmp_path / "error.log").read_text()
    finally:
        service.forget()
