"""A TCP proxy that injects faults: late, lost, cut, truncated and doubled replies, lost requests, resets.

It runs in a thread of its own, so that threads and event loops can be tested through it alike.
"""

import asyncio
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Self

from tests.support.proxy import Connection, Proxy


class FaultyProxy(Proxy):
    """`with FaultyProxy(port) as proxy`: connect to `proxy.url`, then set one of the faults.

    delay            seconds by which replies come later; delayed replies come at once when it is set back to 0
    swallow_requests no request reaches the server; the connections stay open
    swallow_replies  the server runs each request, and its replies are dropped
    swallowed        how many requests were swallowed
    truncate         let so many bytes of the next script's reply through, then reset the connection; then None again
    hold_back        seconds by which the next script's reply alone comes later; then 0 again
    double           the next script's reply comes twice; then False again
    truncated, held_back, doubled   how many replies were
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
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
        self._writers: set[asyncio.StreamWriter] = set()

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

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self:
            started.set()
            await self._stop.wait()

    def cut(self) -> None:
        """Reset all connections that there are; new ones work."""
        done = threading.Event()

        def reset_all() -> None:
            for writer in list(self._writers):
                _reset(writer)
            self._loop.call_soon(done.set)  # after the sockets are closed

        self._loop.call_soon_threadsafe(reset_all)
        assert done.wait(30), "the proxy does not answer"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await super()._serve(reader, writer)
        except OSError:  # the server is gone
            _reset(writer)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Connection) -> None:
        while data := await reader.read(65536):
            if self.swallow_requests:
                self.swallowed += 1
                continue
            seen.under_way += data.count(b"EVALSHA")
            writer.write(data)
            await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Connection) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                came = time.monotonic()
                while (left := came + self.delay - time.monotonic()) > 0:  # noqa: ASYNC110  # set by another thread
                    await asyncio.sleep(min(left, 0.01))
                if self.swallow_replies:
                    continue
                if self.truncate is not None and seen.under_way:
                    data, self.truncate = data[: self.truncate], None
                    self.truncated += 1
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(0.01)  # the bytes must arrive before the reset
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
    """Close with RST instead of FIN, as after a crash of the server, or by a firewall."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
