"""A TCP proxy in front of a Redis server that counts round trips and injects faults.

It runs in a thread of its own, so that threads and event loops can be tested through it alike.
"""

import asyncio
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.support.servers import LOGIN, Addressed

CALL = re.compile(rb"\$7\r\nEVALSHA\r\n\$40\r\n[0-9a-f]{40}\r\n\$\d+\r\n(\d+)\r\n")  # and how many keys it has


class Connection:
    """One client's connection: script calls under way on it, their keys, the most keys ever, and its round trips."""

    def __init__(self) -> None:
        self.under_way = 0
        self.keys = 0
        self.most = 0
        self.trips = 0
        self._rest = b""

    def sent(self, data: bytes) -> None:
        """Count the calls in *data*, however they are cut into pieces."""
        text = self._rest + data
        calls = list(CALL.finditer(text))
        self._rest = text[calls[-1].end() if calls else 0 :][-120:]
        if calls and not self.under_way:
            self.trips += 1
            self.keys = 0
        self.under_way += len(calls)
        self.keys += sum(int(call[1]) for call in calls)
        self.most = max(self.most, self.keys)


class FaultyProxy(Addressed):
    """`with FaultyProxy(port) as proxy`: connect to `proxy.url`, then break what is to be broken.

    hold             keep replies back while it is True
    delay            seconds by which replies come later; those that wait come at once when it is set back
    swallow_requests nothing reaches the server any more; the connections stay open
    swallow_replies  the server does what it is asked, and the caller does not hear of it
    swallowed        how many requests were
    truncate         let so many bytes of the next decision through, then reset the connection; then None again
    hold_back        seconds by which the next decision alone comes later; then 0 again
    double           the next decision comes twice; then False again
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections: list[Connection] = []  # all that there ever were
        self.hold = False
        self.delay = 0.0
        self.swallow_requests = False
        self.swallow_replies = False
        self.swallowed = 0
        self.truncate: int | None = None
        self.truncated = 0
        self.hold_back = 0.0
        self.held_back = 0
        self.double = False
        self.doubled = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()  # of all connections that there were
        self._writers: set[asyncio.StreamWriter] = set()  # to clients

    @property
    def bare_url(self) -> str:
        return f"redis://{LOGIN}127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    @property
    def trips(self) -> int:
        return sum(connection.trips for connection in self.connections)

    @property
    def most(self) -> int:
        """The most keys that were under way on one connection at a time: the largest batch."""
        return max(connection.most for connection in self.connections)

    @property
    def under_way(self) -> int:
        return sum(connection.under_way for connection in self.connections)

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(started),), name="proxy")
        self._thread.start()
        assert started.wait(30), "the proxy does not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def cut(self) -> None:
        """Reset all connections that there are; new ones work."""
        done = threading.Event()

        def reset_all() -> None:
            for writer in list(self._writers):
                _reset(writer)
            self._loop.call_soon(done.set)  # after the sockets are closed

        self._loop.call_soon_threadsafe(reset_all)
        assert done.wait(30), "the proxy does not answer"

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        started.set()
        await self._stop.wait()
        for listening in self._server.sockets:  # a server that is closed loses the clients that it is about to accept
            self._loop.remove_reader(listening.fileno())
        for _ in range(5):  # turns of the event loop: they get as far as `_serve`
            await asyncio.sleep(0)
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._ends:  # of tasks that had not begun, or whose bytes the other side does not read
            end.transport.abort()
        await asyncio.sleep(0)  # a transport closes its socket in the next turn

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:  # the server is gone
            _reset(writer)
            return
        self._ends.add(upstream_writer)
        connection = Connection()
        self.connections.append(connection)
        both = [
            asyncio.create_task(self._requests(reader, upstream_writer, connection)),
            asyncio.create_task(self._replies(upstream_reader, writer, connection)),
        ]
        self._tasks.update(both)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (writer, upstream_writer):
                end.close()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            self._tasks.difference_update(both)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Connection) -> None:
        while data := await reader.read(65536):
            if self.swallow_requests:
                self.swallowed += 1
                continue
            seen.sent(data)
            writer.write(data)
            await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Connection) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                came = time.monotonic()
                while self.hold or came + self.delay > time.monotonic():  # noqa: ASYNC110  # set by another thread
                    await asyncio.sleep(min(max(came + self.delay - time.monotonic(), 0.001), 0.01))
                if self.swallow_replies:
                    continue
                if self.truncate is not None and seen.under_way:
                    data, self.truncate = data[: self.truncate], None
                    self.truncated += 1
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0.01)  # what was let through is to arrive before the reset
                    _reset(writer)
                    return
                if self.hold_back and seen.under_way:
                    late, self.hold_back = self.hold_back, 0.0
                    self.held_back += 1
                    await asyncio.sleep(late)
                if self.double and seen.under_way:
                    data, self.double = data * 2, False
                    self.doubled += 1
                seen.under_way = 0
                writer.write(data)
                await writer.drain()
        finally:
            self._writers.discard(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN: as a crash of the other side, or a firewall, would."""
    with suppress(OSError):  # it is closed already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
