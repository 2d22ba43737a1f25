"""The client's side of HTTP/2 for tests: frames by hand, and a server core to talk to without sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headgate.service.http2.connection import Http2Connection
from headgate.service.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    header_frame,
)
from headgate.service.http2.hpack import HeaderDecoder, encode
from headgate.service.http2.request_head import RequestHead

EMPTY_SETTINGS = frame(SETTINGS, 0, 0, b"")
POST = [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "localhost")]
BLOCK = encode(POST)
OK_HEAD = header_frame(encode([(":status", "200")]), 0)
OK_TRAILER = header_frame(encode([("grpc-status", "0")]), END_STREAM)
ALL = 1 << 30  # frames at once


class Frame(NamedTuple):
    """One frame that was sent by the server."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


def frames(data: bytes) -> Iterator[Frame]:
    """The frames in *data*, which must end with one."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        assert at + 9 + size <= len(data), "the output ends within a frame"
        yield Frame(
            data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big"), data[at + 9 : at + 9 + size]
        )
        at += 9 + size


def headers(stream_id: int, flags: int = END_STREAM | END_HEADERS, block: bytes = BLOCK) -> bytes:
    """A request's head; as it is, it is the whole request."""
    return frame(HEADERS, flags, stream_id, block)


def data(stream_id: int, body: bytes, flags: int = END_STREAM) -> bytes:
    return frame(DATA, flags, stream_id, body)


class Talk:
    """A connection to a server core that answers each request with its body, or leaves that to the test."""

    def __init__(self, *, at_once: bool = True, max_body: int = 100_000, greet: bool = True) -> None:
        self.at_once = at_once
        self.bodies: dict[int, bytes] = {}
        self.heads: dict[int, RequestHead] = {}
        self.cancelled: list[int] = []
        self.server = Http2Connection(self._handle, self.cancelled.append, max_body)
        if greet:
            self.say(PREFACE + EMPTY_SETTINGS)

    def _handle(self, server: Http2Connection, stream_id: int, head: RequestHead, body: bytes) -> None:
        self.bodies[stream_id] = body
        self.heads[stream_id] = head
        if self.at_once:
            self.answer(stream_id)

    def answer(self, stream_id: int) -> None:
        self.server.respond(stream_id, OK_HEAD, self.bodies[stream_id], OK_TRAILER)

    def say(self, sent: bytes, limit: int = ALL) -> list[Frame]:
        """Send bytes; the frames that come back."""
        self.server.receive(sent, limit)
        return self.heard()

    def heard(self) -> list[Frame]:
        return list(frames(self.server.take_output()))

    def tick(self, times: int = 1) -> list[Frame]:
        for _ in range(times):
            self.server.tick()
        return self.heard()


def resets(heard: list[Frame]) -> list[tuple[int, int]]:
    """Stream and code of each RST_STREAM."""
    return [(one.stream_id, int.from_bytes(one.payload, "big")) for one in heard if one.kind == RST_STREAM]


def goaways(heard: list[Frame]) -> list[tuple[int, int]]:
    """Last stream and code of each GOAWAY."""
    found = [one.payload for one in heard if one.kind == GOAWAY]
    return [(int.from_bytes(one[:4], "big"), int.from_bytes(one[4:8], "big")) for one in found]


def responses(heard: list[Frame]) -> dict[int, bytes]:
    """The bodies of streams that ended well, by their numbers."""
    bodies: dict[int, bytes] = {}
    ended = []
    for one in heard:
        if one.kind == HEADERS:
            assert HeaderDecoder().decode(one.payload)
            bodies.setdefault(one.stream_id, b"")
        elif one.kind == DATA:
            bodies[one.stream_id] += one.payload
        if one.kind in (HEADERS, DATA) and one.flags & END_STREAM:
            ended.append(one.stream_id)
    return {stream_id: bodies[stream_id] for stream_id in ended}
