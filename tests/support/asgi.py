"""ASGI applications under test: called in this process by an HTTP client, message by message, or by a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn

from tests.support.clocks import until

CLIENT = "192.0.2.1"


def client(app: Any, address: str = CLIENT, **options: Any) -> httpx.AsyncClient:
    """A client of *app* that connects from *address*. An exception of the application is a 500."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 50000))
    return httpx.AsyncClient(transport=transport, base_url="http://testserver", **options)


async def fetch(
    app: Any, path: str = "/", method: str = "GET", address: str = CLIENT, **options: Any
) -> httpx.Response:
    async with client(app, address) as http:
        return await http.request(method, path, **options)


async def statuses(app: Any, *paths: str, method: str = "GET", **options: Any) -> list[int]:
    """The statuses of one request to each of *paths*, in turn."""
    async with client(app) as http:
        return [(await http.request(method, path, **options)).status_code for path in paths]


async def at_once(app: Any, path: str, times: int) -> list[int]:
    """The statuses of so many requests at once."""
    async with client(app) as http:
        answers = await asyncio.gather(*[http.get(path) for _ in range(times)])
    return [answer.status_code for answer in answers]


def scope(kind: str = "http", path: str = "/", **more: Any) -> dict[str, Any]:
    """The scope of a request, as a server makes it."""
    made: dict[str, Any] = {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "http" if kind == "http" else "ws",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"testserver")],
        "client": (CLIENT, 50000),
        "server": ("testserver", 80),
        "state": {},
    }
    made["method" if kind == "http" else "subprotocols"] = "GET" if kind == "http" else []
    return made | more


class Messages:
    """The server's side of one request: what the application receives, and a list of what it sends."""

    def __init__(self, *received: MutableMapping[str, Any]) -> None:
        self._received = list(received)
        self.sent: list[MutableMapping[str, Any]] = []
        self.reads = 0

    async def receive(self) -> MutableMapping[str, Any]:
        self.reads += 1
        if self._received:
            return self._received.pop(0)
        await asyncio.Event().wait()  # until the task is cancelled
        raise AssertionError

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.sent]


@asynccontextmanager
async def websocket(app: Any, path: str, **more: Any) -> AsyncIterator[WebSocketClient]:
    """A client that connects to *path*; *more* is for the scope."""
    made = WebSocketClient()
    task = asyncio.create_task(app(scope("websocket", path, **more), made.sent.get, made.received.put))
    try:
        yield made
    finally:
        await made.sent.put({"type": "websocket.disconnect", "code": 1001})
        await task


class WebSocketClient:
    """The client's side of a WebSocket, as messages of ASGI."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent.put_nowait({"type": "websocket.connect"})

    async def say(self, text: str) -> dict[str, Any]:
        """Send *text* and wait for the answer."""
        await self.sent.put({"type": "websocket.receive", "text": text})
        return await self.received.get()


@contextmanager
def served(app: Any, **options: Any) -> Iterator[str]:
    """The address of a uvicorn that serves *app*, such as 127.0.0.1:8000."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
