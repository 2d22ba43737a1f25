"""A TCP proxy on the loopback that holds every reply back for a while: a server that is farther away.

`python -m benchmarks.delay_proxy PORT MILLISECONDS` prints the port that it listens on, and serves until its standard
input ends. Replies stay in order, and a reply does not wait for the one before it: as on a long wire, many can be
under way. It is a process of its own, so that it does not take turns with the client that is measured.
"""

from __future__ import annotations

import asyncio
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.team import ROOT


class Upstream(asyncio.Protocol):
    """The connection to the server: what comes from there reaches the client later."""

    def __init__(self, client: asyncio.Transport, delay: float) -> None:
        self._client, self._delay = client, delay
        self._later = asyncio.get_running_loop().call_later

    def data_received(self, data: bytes) -> None:
        if self._delay:
            self._later(self._delay, self._client.write, data)
        else:
            self._client.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._client.close()


class Downstream(asyncio.Protocol):
    """A client's connection: what comes from there reaches the server at once."""

    def __init__(self, port: int, delay: float) -> None:
        self._port, self._delay = port, delay
        self._server: asyncio.Transport | None = None
        self._early: list[bytes] = []  # what came before the server was reached

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._task = asyncio.create_task(self._connect(transport))

    async def _connect(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        self._server, _ = await loop.create_connection(lambda: Upstream(client, self._delay), "127.0.0.1", self._port)
        self._server.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        else:
            self._server.write(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._server is not None:
            self._server.close()


async def serve(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Downstream(port, delay), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main(port: str, milliseconds: str) -> None:
    # epoll rounds its time-out up to a whole millisecond, which would be a second one on top of a delay of one.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(serve(int(port), float(milliseconds) / 1000))


@contextmanager
def delayed(port: int, milliseconds: float) -> Iterator[int]:
    """Run a proxy in front of *port*; gives its own port."""
    command = [sys.executable, "-m", "benchmarks.delay_proxy", str(port), str(milliseconds)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
