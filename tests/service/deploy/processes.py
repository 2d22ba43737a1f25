"""Run real programs for a test: wait until they answer, stop them by process id, show their log when they fail."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from tests.service.deploy import tools

START = 30.0  # seconds; the machine may be busy
STOP = 15.0

# SIGTERM and not SIGKILL when the test process dies: these have processes of their own to take along.
END_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):  # else the parent died before we asked
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Answer(NamedTuple):
    status: int
    headers: Message
    body: bytes


def ask(url: str, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Answer:
    """Send one request; any status is an answer."""
    request = urllib.request.Request(url, data=body, method=method, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())


@contextmanager
def running(command: list[str], ready: str, folder: Path, status: int = 200) -> Iterator[None]:
    """Run *command* in *folder* until the block ends; enter the block when *ready*, a URL, answers with *status*."""
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *command],
            cwd=folder,
            env=tools.environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for pytest, which then stops it in order
        )
    try:
        if not _answers(ready, status, process):
            raise RuntimeError(
                f"{command} did not answer {status} at {ready}:\n{log.read_text(errors='replace')[-3000:]}"
            )
        yield
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(url: str, status: int, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if ask(url).status == status:
                return True
        except (OSError, HTTPException):
            pass
        time.sleep(0.03)
    return False
