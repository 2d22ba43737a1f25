"""A TCP proxy in front of a server that counts round trips, and the keys in each."""

import asyncio
import re
from types import TracebackType
from typing import Self

from tests.support.servers import LOGIN, Addressed

CALL = re.compile(rb"\$7\r\nEVALSHA\r\n\$40\r\n[0-9a-f]{40}\r\n\$\d+\r\n(\d+)\r\n")  # the group is its number of keys
REPLY = re.compile(rb"\*\d+\r\n")  # of the script


class Stream:
    """The bytes of one direction: finds each match of *pattern* once, in whatever pieces they arrive."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self.pattern = pattern
        self.rest = b""

    def found(self, data: bytes) -> list[re.Match[bytes]]:
        text = self.rest + data
        matches = list(self.pattern.finditer(text))
        self.rest = text[matches[-1].end() if matches else 0 :][-120:]
        return matches


class Connection:
    """One client's connection: calls under way on it, the most keys they ever had, and its round trips."""

    def __init__(self) -> None:
        self.under_way = 0
        self.keys = 0
        self.most = 0
        self.trips = 0


class Proxy(Addressed):
    """`async with Proxy(port) as proxy`: connect to `proxy.url`. *hold* keeps replies back until it is cleared."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections: list[Connection] = []
        self.open = asyncio.Event()
        self.open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()  # of all connections so far

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

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listening in self._server.sockets:  # a server that closes loses connections that it is accepting
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(5):  # turns of the event loop: those get as far as `_serve`
            await asyncio.sleep(0)
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self._ends:  # of tasks that had not begun, or whose client does not read
            end.transport.abort()
        await asyncio.sleep(0)  # a transport closes its socket in the next turn

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.port)
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
        stream = Stream(CALL)
        while data := await reader.read(65536):
            calls = stream.found(data)
            if calls and not seen.under_way:
                seen.trips += 1
                seen.keys = 0
            seen.under_way += len(calls)
            seen.keys += sum(int(call[1]) for call in calls)
            seen.most = max(seen.most, seen.keys)
            writer.write(data)
            await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Connection) -> None:
        stream = Stream(REPLY)
        while data := await reader.read(65536):
            await self.open.wait()
            if seen.under_way:
                seen.under_way -= len(stream.found(data))
            writer.write(data)
            await writer.drain()
