"""The service as a real process on a free loopback port, asked over real sockets, stopped by process id."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlencode

from headgate.cli import main
from tests.support.servers import DIE_WITH_PARENT, check_allowed, free_port

START = 50.0  # seconds; a busy machine is slow to start Python
API = "/api/v1/rate-limit"


class Answer:
    """One answer, read to its end."""

    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status = found.status
        self.headers = found.headers
        self.body = found.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The detail of a problem; fails if the answer is not one."""
        assert self.headers["content-type"] == "application/problem+json", (self.status, self.body)
        assert self.json["status"] == self.status
        detail: str = self.json["detail"]
        return detail


class Service:
    """A running service. Of the variables that begin with HEADGATE_ it sees only those in *environment*.

    *files* are texts by name, written beside the settings.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        config: str = "",
        suffix: str = ".toml",
        files: Mapping[str, str] | None = None,
    ) -> None:
        check_allowed()
        self._folder = tempfile.TemporaryDirectory(prefix="headgate-test-")
        self.folder = Path(self._folder.name)
        self.config = self.folder / f"rules{suffix}"
        for name, text in (files or {}).items():
            (self.folder / name).write_text(text)
        if config:
            self.config.write_text(config)
            arguments = ("--config", str(self.config), *arguments)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        self._environment = inherited | dict(environment or {})
        self._log = (self.folder / "log").open("wb")
        for _ in range(3):  # another process may take the free port first
            self.port = free_port()
            self.process = self._spawn(["serve", "--port", str(self.port), *arguments])
            if self._listens():
                break
        else:
            raise RuntimeError(f"the service does not start: {self.log()}")

    def _spawn(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "headgate", *arguments]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def _listens(self) -> bool:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                # the banner comes after the port was found free: without it, another process answers on that port
                if "  serving  " in self.log() and self.get("/actuator/health/liveness").status == 200:
                    return True
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.02)
        return False

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(
        self, method: str, path: str, query: Any = None, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own; *query* is a mapping, pairs, or text that goes as it is."""
        connection = self.connect()
        try:
            return self.on(connection, method, path, query, body, headers)
        finally:
            connection.close()

    @staticmethod
    def on(
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        query: Any = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The same on a connection that stays open."""
        if query:
            path += "?" + (query if isinstance(query, str) else urlencode(query))
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        connection.request(method, path, body, sent)
        return Answer(connection.getresponse())

    def get(self, path: str, query: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        return self.ask("GET", path, query, headers=headers)

    def check(self, key: str | None = None, headers: Mapping[str, str] | None = None, **query: Any) -> Answer:
        return self.get(f"{API}/check", query if key is None else {"key": key, **query}, headers)

    def remaining(self, key: str | None = None, headers: Mapping[str, str] | None = None, **query: Any) -> Answer:
        return self.get(f"{API}/remaining", query if key is None else {"key": key, **query}, headers)

    def reset(self, key: str | None = None, headers: Mapping[str, str] | None = None, **query: Any) -> Answer:
        return self.ask("DELETE", f"{API}/reset", query if key is None else {"key": key, **query}, headers=headers)

    def metrics(self) -> dict[str, float]:
        """The samples of a scrape, by name with labels."""
        lines = self.get("/metrics").body.decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def take_turns(self) -> None:
        """Let the service finish requests that were sent before and get no answer: it serves requests in order."""
        for _ in range(20):
            assert self.get("/actuator/health/liveness").status == 200

    def workers(self) -> list[int]:
        """The process ids of its workers (Linux)."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """Ask it to stop; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._log.close()

    def forget(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        self._folder.cleanup()


def headgate(*arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Run the command to its end: in this process if it only reads and prints, as Python is slow to start."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    environment = inherited | dict(environment or {})
    if arguments[:1] == ("config",):
        return _in_this_process(list(arguments), folder, environment)
    return subprocess.run(
        [sys.executable, "-m", "headgate", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )


def _in_this_process(arguments: list[str], folder: Path, environment: Mapping[str, str]) -> Any:
    said, complained, code = io.StringIO(), io.StringIO(), 0
    here, ours = chdir(folder), patch.dict(os.environ, environment, clear=True)
    with here, ours, redirect_stdout(said), redirect_stderr(complained):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if code == 1:
                print(end.code, file=sys.stderr)
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(true: Any, what: str, seconds: float = 30.0) -> None:
    """Wait until *true* says so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
