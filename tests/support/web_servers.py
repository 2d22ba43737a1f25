"""Web servers as real processes on a free loopback port: an application in a file, stopped by process id."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers import DIE_WITH_PARENT, check_allowed, free_port

START = 50.0  # seconds; a busy machine is slow to start Python
PORT_OPTIONS = {"uvicorn": "--port", "granian": "--port", "daphne": "--port", "aiohttp.web": "--port"}  # others: --bind


@contextmanager
def served(folder: Path, source: str, *command: str) -> Iterator[str]:
    """The address of a server for the `app` of *source*, such as http://127.0.0.1:8000.

    *command* is that of the server, without the address: ``"gunicorn", "--threads=8", "shop:app"``.
    """
    check_allowed()
    (folder / "shop.py").write_text(source)
    port = free_port()
    option = PORT_OPTIONS.get(command[0])
    address = [option, str(port)] if option else ["--bind", f"127.0.0.1:{port}"]
    words = [sys.executable, "-m", command[0], *address, *command[1:]]
    if sys.platform == "linux":
        words = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *words]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait(process, port, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(START)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the server does not start: {log.read_text()}")
