"""The gRPC listener asked by grpc-js, which shares no code with the client in C that grpcio is made of."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.service.envoy_settings import GrpcSettings
from tests.service.conftest import Start
from tests.service.deploy.tools import GRPC_JS, NODE_MODULES, node, node_reason
from tests.support.grpc_worker import LIMITS, PATIENCE, SERVED, Certificates, Worker, start_worker
from tests.support.servers import free_port
from tests.support.service import eventually

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(node(GRPC_JS) is None, reason=node_reason(GRPC_JS)),
]

__all__ = ["start_worker"]  # a fixture

PROGRAM = Path(__file__).parents[1] / "support" / "grpc_client.js"


def command(target: str, **options: Any) -> list[str]:
    """The program and its options, see there."""
    given = {"modules": str(NODE_MODULES), "target": target, **options}
    return [str(node(GRPC_JS)), str(PROGRAM), json.dumps(given)]


def ask(target: str, *calls: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The results of calls that are made at once on one channel."""
    done = subprocess.run(
        command(target, calls=calls, **options), capture_output=True, text=True, timeout=3 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def now(value: int = 7, **more: Any) -> dict[str, Any]:
    return {"what": "now", "value": value, **more}


class Callers:
    """A client whose callers call all the time on one channel."""

    def __init__(self, target: str, callers: int, asked: Sequence[str], ready: bool = False) -> None:
        self._client = subprocess.Popen(
            command(target, callers=callers, asked=asked, ready=ready),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._seen: dict[str, Any] = {"answered": 0, "failed": []}

    def go_on(self, more: int) -> None:
        """Wait until so many more calls were answered."""
        wanted = self._seen["answered"] + more
        deadline = time.monotonic() + PATIENCE
        assert self._client.stdout is not None
        while self._seen["answered"] < wanted:
            line = self._client.stdout.readline()
            assert line and time.monotonic() < deadline, "the client does not go on"
            self._seen = json.loads(line)

    def end(self) -> list[dict[str, Any]]:
        """Stop calling; the calls that failed."""
        out, _ = self._client.communicate(timeout=3 * PATIENCE)
        assert self._client.returncode == 0
        failed: list[dict[str, Any]] = json.loads(out.splitlines()[-1])["failed"]
        return failed

    def kill(self) -> None:
        self._client.kill()
        self._client.communicate()


Call = Callable[..., Callers]


@pytest.fixture
def call() -> Iterator[Call]:
    """Start clients that end with the test."""
    started: list[Callers] = []

    def begin(*arguments: Any, **options: Any) -> Callers:
        started.append(Callers(*arguments, **options))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def test_answers(start_worker: Worker) -> None:
    """Calls get the answer of the rules, decided at once or later, and the status of each failure."""
    target = start_worker().target
    found = ask(target, *({"what": what, "value": 42} for what in ("now", "later", "over", "outage", "bug later")))
    assert found[:3] == [
        {"status": "OK", "code": "OK", "remaining": 42},
        {"status": "OK", "code": "OK", "remaining": 42},
        {"status": "OK", "code": "OVER_LIMIT", "remaining": 0},
    ]
    assert [one["status"] for one in found[3:]] == ["UNAVAILABLE", "INTERNAL"]
    assert found[3]["why"] == "the store does not answer: nothing at redis:6379"


def test_hundred_at_once(start_worker: Worker) -> None:
    """A hundred calls at once on one connection get their own answers."""
    worker = start_worker()
    callers = [{"what": ("now", "later")[i % 2], "value": i} for i in range(100)]
    assert [one["remaining"] for one in ask(worker.target, *callers)] == list(range(100))


def test_hundred_wait_on_one_connection(start_worker: Worker) -> None:
    """All of a hundred calls are under way at the same time, on one connection."""
    worker = start_worker()
    calls = [{"what": "wait", "value": i} for i in range(100)]
    client = subprocess.Popen(command(worker.target, calls=calls), stdout=subprocess.PIPE, text=True)
    try:
        eventually(lambda: worker.rules.waiting == 100, "all calls wait")
        assert len(worker.listener.connections) == 1
        worker.let_go()
        out, _ = client.communicate(timeout=PATIENCE)
    finally:
        client.kill()
        client.communicate()
    assert [one["remaining"] for one in json.loads(out)] == list(range(100))


def test_deadline(start_worker: Worker) -> None:
    """The client's deadline comes with the call, ends it, and cancels what the service does for it."""
    worker = start_worker()
    [late] = ask(worker.target, {"what": "never", "value": 1, "deadline": 0.4})
    assert late["status"] == "DEADLINE_EXCEEDED"
    [timeout] = worker.rules.timeouts
    assert timeout is not None and 0 < timeout < 0.4
    eventually(lambda: worker.rules.waiting == 0, "the decision is cancelled")


def test_tokens(start_worker: Worker) -> None:
    """A token is sent as metadata; without one, or with another, the call fails with its own status."""
    worker = start_worker(tokens=[("right", "check"), ("reader", "read")])
    texts = ("Bearer right", "Bearer wrong", "Bearer reader")
    found = ask(worker.target, now(), *(now(metadata={"authorization": text}) for text in texts))
    assert [one["status"] for one in found] == ["UNAUTHENTICATED", "OK", "UNAUTHENTICATED", "PERMISSION_DENIED"]


def test_tls(start_worker: Worker, tmp_path: Path) -> None:
    """TLS with the service's authority, and mutual TLS with a certificate of the client's own."""
    made = Certificates(tmp_path)
    for name, content in (("client.key", made.client_key), ("client.pem", made.client_chain)):
        (tmp_path / name).write_bytes(content)
    ca = {"ca": str(tmp_path / "ca.pem")}
    own = {**ca, "key": str(tmp_path / "client.key"), "cert": str(tmp_path / "client.pem")}
    plain, mutual = (f"localhost:{start_worker(tls=tls).port}" for tls in (made.plain, made.mutual))
    assert ask(plain, now(5), tls=ca)[0]["remaining"] == 5
    assert ask(mutual, now(6), tls=own)[0]["remaining"] == 6
    assert ask(mutual, now(deadline=5), tls=ca)[0]["status"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def test_worker_is_replaced(start_worker: Worker, call: Call) -> None:
    """A worker that stops under load fails no call: the client goes on with the worker that shares its port."""
    worker = start_worker()
    callers = call(worker.target, 16, ("now", "later"))
    for _ in range(3):
        callers.go_on(500)
        following = start_worker(port=worker.port)
        worker.close_listener()
        assert not worker.listener.connections
        worker = following
    callers.go_on(500)
    assert callers.end() == []


def test_connection_age(start_worker: Worker, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are too old are replaced under load, and no call fails because of it."""
    monkeypatch.setattr("headgate.service.grpc.TICK", 0.02)
    worker = start_worker(grpc=GrpcSettings(max_connection_age=0.3))
    callers = call(worker.target, 16, ("now", "later"))
    seen: set[object] = set()

    def replaced() -> bool:
        seen.update(tuple(worker.listener.connections))
        return len(seen) >= 5

    eventually(replaced, "connections are replaced")
    callers.go_on(500)
    assert callers.end() == []


def test_restart(start: Start, call: Call) -> None:
    """A service that is stopped and started again under load fails no call of a client that waits for a connection."""
    port = free_port()
    options: dict[str, Any] = {"config": SERVED, "files": {"limits.yaml": LIMITS}}
    service = start("--grpc-port", str(port), **options)
    callers = call(f"127.0.0.1:{port}", 16, ("now",), ready=True)
    for _ in range(2):
        callers.go_on(500)
        assert service.stop() == 0
        assert "cut off" not in service.log()
        service = start("--grpc-port", str(port), **options)
    callers.go_on(500)
    assert callers.end() == []
