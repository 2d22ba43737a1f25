"""How the service ends, and how it does not."""

import os
import signal
import socket
import sys
import time
from contextlib import suppress

import pytest

from headgate.service.app import LAST_ANSWERS
from tests.service.conftest import Start
from tests.support.servers import Server
from tests.support.service import API, eventually, runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_group(start: Start, number: signal.Signals, workers: str) -> None:
    """A signal to the whole process group stops the service as one to the main process does."""
    service = start("--workers", workers)
    eventually(lambda: len(service.workers()) == int(workers), "all have been started")
    children = service.workers()
    os.killpg(service.process.pid, number)
    assert service.process.wait(60) == 0
    assert "Unexpected" not in service.log() and "Traceback" not in service.log()
    assert not any(runs(child) for child in children)


def test_worker_stopped_too(start: Start) -> None:
    """A worker that gets SIGTERM as well, as from systemd, has not failed."""
    service = start()
    [child] = service.workers()
    service.signal(signal.SIGTERM)
    try:
        os.kill(child, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it was quick
    assert service.process.wait(60) == 0


def test_worker_stopped_first(start: Start) -> None:
    """A worker that stops before the main process has run again has not failed."""
    service = start()
    [child] = service.workers()
    service.signal(signal.SIGSTOP)
    os.kill(child, signal.SIGTERM)
    eventually(lambda: not runs(child), "the worker stops")
    service.signal(signal.SIGTERM)
    service.signal(signal.SIGCONT)
    assert service.process.wait(60) == 0


def test_worker_dies_repeatedly(start: Start) -> None:
    """A worker that dies repeatedly is replaced, and the other one stays."""
    service = start("--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both at work")
    healthy, victim = service.workers()
    for _ in range(3):
        os.kill(victim, signal.SIGKILL)
        dead = victim
        eventually(lambda dead=dead: len(found := service.workers()) == 2 and dead not in found, "another worker")
        [victim] = set(service.workers()) - {healthy}
    assert runs(healthy) and service.process.poll() is None
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both at work")


def test_longer_wait_after_reload(start: Start) -> None:
    """A reload may raise max_wait, and a stop is then as patient as the longest wait that is allowed now."""
    rules = "max_wait = {}\n[rules.slow]\nquotas = '1/13s'\nalgorithm = 'token_bucket'\n"
    service = start(config=rules.format(0))
    service.config.write_text(rules.format(60))
    service.signal(signal.SIGHUP)
    eventually(lambda: service.metrics()['rate_limiter_config_reloads_total{result="success"}'] >= 1, "the reload")
    assert service.check("k", rule="slow").status == 200
    waiting = service.connect()
    waiting.request("GET", f"{API}/check?key=k&rule=slow&wait=40")
    service.take_turns()
    service.signal(signal.SIGTERM)
    assert waiting.getresponse().status == 200
    waiting.close()
    assert service.process.wait(60) == 0


def test_client_does_not_read(start: Start) -> None:
    """A client that does not read its answers is cut off, and no worker has to be killed."""
    service = start()
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.settimeout(1)
        with suppress(TimeoutError):  # the buffers of both sides are full
            while True:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        service.signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
    assert "Killing" not in service.log(), service.log()


def test_store_is_slow(start: Start, mortal_server: Server) -> None:
    """A check that waits for the store has its answer, though it takes longer than clients have to read theirs."""
    service = start("--store", f"{mortal_server.bare_url}?timeout=40&connect_timeout=40")
    assert service.check("k").status == 200
    os.kill(mortal_server.process.pid, signal.SIGSTOP)
    try:
        waiting = service.connect()
        waiting.request("GET", f"{API}/check?key=k")
        service.take_turns()
        service.signal(signal.SIGTERM)
        time.sleep(LAST_ANSWERS + 2)  # nothing tells that a worker stays
    finally:
        os.kill(mortal_server.process.pid, signal.SIGCONT)
    assert waiting.getresponse().status == 200
    waiting.close()
    assert service.process.wait(60) == 0


def test_many_signals(start: Start) -> None:
    """SIGTERM may be sent many times; the exit code is 0."""
    for _ in range(3):
        service = start()
        deadline = time.monotonic() + 60
        while service.process.poll() is None and time.monotonic() < deadline:
            service.signal(signal.SIGTERM)
            time.sleep(0.001)
        assert service.process.returncode == 0, service.log()
