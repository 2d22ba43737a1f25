"""The servers of the suite: ours alone, and gone when we are."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clocks import until
from tests.support.servers import KINDS, Server, find_binaries

START = """
import sys
from tests.support.servers import Server
server = Server(sys.argv[1])
print(server.port, flush=True)
sys.stdin.read()
"""


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a killed test run may leave servers behind")
@pytest.mark.parametrize("kind", KINDS)
def test_killed_test_run(kind: str) -> None:
    """A server dies with a test run that is killed."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", START, kind]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        port = int(run.stdout.readline())
        assert _answers(port)
        run.kill()
    until(lambda: not _answers(port))


def test_server_of_another(redis_server: Server) -> None:
    """It answers on the port we want; we neither take it for ours nor touch what it keeps."""
    redis_server.client().set("theirs", "kept")
    with pytest.raises(RuntimeError, match="cannot start"):
        Server(KINDS[0], port=lambda: redis_server.port)
    assert redis_server.client().get("theirs") == "kept"


def test_a_server_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADGATE_TEST_REDIS leaves one server; a path that leads nowhere is refused, and says what would be right."""
    monkeypatch.setenv("HEADGATE_TEST_REDIS", sys.executable)
    assert find_binaries() == {"redis-given": Path(sys.executable)}
    monkeypatch.setenv("HEADGATE_TEST_REDIS", "/no/such/redis-server")
    with pytest.raises(RuntimeError, match="give the path of a redis-server"):
        find_binaries()
