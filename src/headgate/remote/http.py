"""The commands of a service over HTTP, where its port of the Redis protocol is closed.

A batch of commands is the body of one POST, and the replies to all of them are the body of its response: the same bytes
as on the other port. So these are connections of redis-py which put a head before what they send, and take one off
what they receive; executors, batches and the circuit breaker are those of Redis.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ConnectionError, MasterDownError, RedisError, ResponseError

PATH = "/api/v1/rate-limit/commands"
MAX_HEAD = 65_536  # bytes of a response before its body
READ_BYTES = 65_536


def request_head(host: str, port: int, token: str) -> bytes:
    """The head of every request, up to the length of its body."""
    where = f"[{host}]" if ":" in host else host
    lines = [f"POST {PATH} HTTP/1.1", f"Host: {where}:{port}", "Content-Type: application/octet-stream"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "Content-Length: "]).encode()


class ResponseParser:
    """Collects the bytes of one response."""

    def __init__(self) -> None:
        self._data = b""
        self._size = -1  # of the body; -1 while the head is not complete
        self._status = 0

    def feed(self, data: bytes) -> list[Any] | ResponseError | None:
        """Add *data*; once the response is complete, its replies, or the error that is the reply to every command.

        Some of the replies may be errors. Raises `ConnectionError` for what is no response to be read.
        """
        if not data:
            raise ConnectionError("the service closed the connection")
        self._data += data
        if self._size < 0:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                if len(head) > MAX_HEAD:
                    raise ConnectionError("this is no HTTP response")
                return None
            self._status, self._size = _read_head(head)
            self._data = rest
        if len(self._data) < self._size:
            return None
        if self._status == 200:
            return parse_replies(self._data)
        why = f"{self._status}: {_detail(self._data)}"
        if self._status >= 500:  # of a proxy, which may have handed the request on
            raise ConnectionError(why)
        return ResponseError(why)


def _read_head(head: bytes) -> tuple[int, int]:
    """The status of a response and the size of its body."""
    first, *lines = head.split(b"\r\n")
    words = first.split()
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    size = fields.get(b"content-length", b"")
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or not size.isdigit():
        raise ConnectionError(f"expected an HTTP response with a Content-Length, got {first[:60]!r}")
    return int(words[1]), int(size)


def _detail(body: bytes) -> str:
    """What a problem says of itself."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, LookupError, TypeError):
        return repr(body[:80])


def parse_replies(data: bytes) -> list[Any]:
    """All replies in *data*; an error is an exception in its place."""
    lines = iter(data.split(b"\r\n")[:-1])
    try:
        return [_reply(line, lines) for line in lines]
    except (StopIteration, RuntimeError, ValueError):
        raise ConnectionError("the service sent replies that cannot be read") from None


def _reply(line: bytes, lines: Any) -> Any:
    kind, text = line[:1], line[1:]
    if kind == b":":
        return int(text)
    if kind == b"*":
        return [_reply(next(lines), lines) for _ in range(int(text))]
    if kind == b"+":
        return text
    if kind == b"$":
        found: bytes = next(lines)
        while len(found) < int(text):
            found += b"\r\n" + next(lines)
        return found
    if kind == b"-":
        code, _, why = text.decode(errors="replace").partition(" ")
        if code == "MASTERDOWN":
            return MasterDownError(why)
        return ResponseError(why if code == "ERR" else f"{code} {why}")
    raise ValueError(line[:40])


class OverHTTP:
    """What all four connections have: the head of their requests, and the replies that were not read yet."""

    _parser: Any

    def __init__(self, *, token: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._head = request_head(options["host"], options["port"], token)
        self._replies: deque[Any] = deque()
        self._failure: ResponseError | None = None  # the reply to all commands of the request
        self._awaited = False  # whether the response is still to come

    def _request(self, commands: Any) -> list[bytes]:
        self._replies.clear()
        self._failure, self._awaited = None, True
        body = b"".join(commands)
        return [self._head + b"%d\r\n\r\n" % len(body) + body]

    def _keep(self, found: list[Any] | ResponseError) -> None:
        self._awaited = False
        if isinstance(found, ResponseError):
            self._failure = found
        else:
            self._replies.extend(found)

    def _next(self) -> Any:
        if self._failure is not None:
            raise self._failure
        if not self._replies:
            raise ConnectionError("the service sent fewer replies than it got commands")
        reply = self._replies.popleft()
        if isinstance(reply, RedisError):
            raise reply
        return reply


class HTTPForThreads(OverHTTP):
    """A connection for threads."""

    _sock: Any

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """There is nothing to say first: each request has the token."""
        self._parser.on_connect(self)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        super().send_packed_command(self._request(command), check_health=False)  # type: ignore[misc]  # of redis-py

    def read_response(self, *_arguments: Any, **_options: Any) -> Any:
        if self._awaited:
            parser, found = ResponseParser(), None
            while found is None:
                found = parser.feed(self._sock.recv(READ_BYTES))
            self._keep(found)
        return self._next()


class HTTPForTasks(OverHTTP):
    """A connection for asyncio."""

    _reader: Any

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """There is nothing to say first: each request has the token."""
        self._parser.on_connect(self)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        await super().send_packed_command(self._request(command), check_health=False)  # type: ignore[misc]  # of redis-py

    async def read_response(self, *_arguments: Any, **_options: Any) -> Any:
        if self._awaited:
            parser, found = ResponseParser(), None
            while found is None:
                found = parser.feed(await self._reader.read(READ_BYTES))
            self._keep(found)
        return self._next()


class AsyncHTTPConnection(HTTPForTasks, redis.asyncio.Connection):
    """To http:// from an event loop."""


class AsyncHTTPSConnection(HTTPForTasks, redis.asyncio.SSLConnection):
    """To https:// from an event loop."""


class HTTPConnection(HTTPForThreads, redis.Connection):
    """To http:// from threads."""

    asyncio_class = AsyncHTTPConnection


class HTTPSConnection(HTTPForThreads, redis.SSLConnection):
    """To https:// from threads."""

    asyncio_class = AsyncHTTPSConnection
