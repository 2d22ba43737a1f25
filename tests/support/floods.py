"""Floods of HTTP/2 frames that cost a server work or memory, as bytes, and clients that send them over real sockets."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, count, repeat

from headgate.service.grpc_calls import SHOULD_RATE_LIMIT
from headgate.service.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    settings,
)
from headgate.service.http2.hpack import encode, write_integer
from headgate.service.http2.huffman import codes
from tests.support.http2 import BLOCK, EMPTY_SETTINGS, POST, data, headers

ONE = (1).to_bytes(4, "big")

MANY_FIELDS = b"\x82" * 10_000  # a byte for each header; a head with a second :method is malformed
LARGE_ENTRY = b"\x40\x01a" + write_integer(4000, 0x7F, 0) + b"v" * 4000
TABLE_CHURN = b"".join(b"\x40\x01a" + write_integer(200, 0x7F, 0) + b"v" * 200 for _ in range(60))


def streams() -> Iterator[int]:
    return count(1, 2)


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "SETTINGS": lambda: repeat(EMPTY_SETTINGS),
    "SETTINGS of many values": lambda: repeat(frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0" * 2_000)),
    "PING": lambda: repeat(frame(PING, 0, 0, bytes(8))),
    "PING acknowledged": lambda: repeat(frame(PING, 1, 0, bytes(8))),
    "PRIORITY": lambda: repeat(frame(PRIORITY, 0, 99, bytes(5))),
    "WINDOW_UPDATE": lambda: repeat(frame(WINDOW_UPDATE, 0, 0, ONE)),
    "unknown frames": lambda: repeat(frame(0xEE, 0, 0, b"")),
    "empty DATA": lambda: _after(headers(1, END_HEADERS), data(1, b"", 0)),
    "padding only": lambda: _after(headers(1, END_HEADERS), frame(DATA, PADDED, 1, b"\xff" + bytes(255))),
    "DATA after a reset": lambda: _after(headers(1, END_HEADERS, encode([*POST, ("te", "x")])), data(1, b"x", 0)),
    "empty CONTINUATION": lambda: _after(headers(1, 0, b""), frame(CONTINUATION, 0, 1, b"")),
    "large CONTINUATION": lambda: _after(headers(1, 0, b""), frame(CONTINUATION, 0, 1, bytes(16_000))),
    "rapid reset": lambda: (headers(one) + frame(RST_STREAM, 0, one, bytes(4)) for one in streams()),
    "reset before the body": lambda: (
        headers(one, END_HEADERS) + frame(RST_STREAM, 0, one, bytes(4)) for one in streams()
    ),
    "made to reset": lambda: (headers(one) + frame(WINDOW_UPDATE, 0, one, bytes(4)) for one in streams()),
    "malformed heads": lambda: (headers(one, 5, encode([("a", "b")])) for one in streams()),
    "more streams than allowed": lambda: (headers(one, END_HEADERS) for one in streams()),
    "many headers": lambda: (headers(one, 5, b"\x83" + MANY_FIELDS[: 16_000 // 40]) for one in streams()),
    "HPACK bomb": lambda: _after(
        headers(1, 5, BLOCK + LARGE_ENTRY),
        headers(3, 5, b"\xbe" * 16_000),
    ),
    "HPACK table churn": lambda: (headers(one, 5, BLOCK + TABLE_CHURN) for one in streams()),
    "tiny DATA": lambda: (
        headers(one, END_HEADERS) + b"".join(data(one, b"x", 0) for _ in range(1_000)) for one in streams()
    ),
}


def _after(first: bytes, then: bytes) -> Iterator[bytes]:
    yield first
    yield from repeat(then)


CALL = encode(
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", SHOULD_RATE_LIMIT),
        (":authority", "headgate"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
)
MESSAGE = b"\x0a\x04demo\x12\x0e\x0a\x0c\x0a\x03now\x12\x05alice"  # a RateLimitRequest


def call(stream_id: int) -> bytes:
    """A whole call that asks for a decision."""
    body = b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE
    return headers(stream_id, END_HEADERS, CALL) + data(stream_id, body)


def packed(text: bytes) -> bytes:
    """A text of HPACK in the Huffman code."""
    bits = "".join(f"{code:0{length}b}" for code, length in map(codes().__getitem__, text))
    bits += "1" * (-len(bits) % 8)
    raw = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return write_integer(len(raw), 0x7F, 0x80) + raw


HUFFMAN = BLOCK + b"\x00\x01x" + packed(b"v" * 15_000)

# Those that need a service to answer: calls that are reset while they are decided, answers that have no window, and
# heads that take long to read.
CALLING: dict[str, Callable[[], Iterator[bytes]]] = {
    "Huffman code": lambda: (headers(one, 5, HUFFMAN) for one in streams()),
    "calls and resets": lambda: (call(one) + frame(RST_STREAM, 0, one, bytes(4)) for one in streams()),
    "zero windows": lambda: chain([settings((INITIAL_WINDOW_SIZE, 0))], map(call, streams())),
}
SLOW_PREFACE = "slow preface"
NEVER_CUT_OFF = ("Huffman code",)  # they are calls, if slow ones: their sender waits, and others do not
OVER_SOCKETS = [*FLOODS, *CALLING, SLOW_PREFACE]

CHUNK = 1 << 15  # bytes that are sent at once
PATIENCE = 10.0  # seconds for a server that does not read


class Flooder:
    """Connections that flood a port until `stop`; each is opened anew when the server has closed it."""

    def __init__(self, name: str, port: int, connections: int = 4) -> None:
        self.cut_off = 0  # connections that the server has closed
        self.sent = 0  # bytes
        self._port = port
        self._ended = threading.Event()
        if name == SLOW_PREFACE:
            self._threads = [threading.Thread(target=self._greet_slowly, args=(50 * connections,))]
        else:
            make = FLOODS.get(name) or CALLING[name]
            self._threads = [threading.Thread(target=self._flood, args=(make,)) for _ in range(connections)]
        for one in self._threads:
            one.start()

    def stop(self) -> None:
        self._ended.set()
        for one in self._threads:
            one.join()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), PATIENCE)

    def _flood(self, make: Callable[[], Iterator[bytes]]) -> None:
        while not self._ended.is_set():
            try:
                with self._connect() as client:
                    client.sendall(PREFACE + EMPTY_SETTINGS)
                    self._send(client, make())
            except OSError:  # also a server that has not read for a long time
                self.cut_off += 1

    def _send(self, client: socket.socket, pieces: Iterator[bytes]) -> None:
        while not self._ended.is_set():
            chunk = b""
            while len(chunk) < CHUNK:
                chunk += next(pieces)
            client.sendall(chunk)
            self.sent += len(chunk)
            while select.select([client], [], [], 0)[0]:
                if not client.recv(1 << 16):
                    raise ConnectionError("the server has closed the connection")

    def _greet_slowly(self, connections: int) -> None:
        """Send the preface a byte at a time, and never its end."""
        with ExitStack() as stack:
            clients = [stack.enter_context(self._connect()) for _ in range(connections)]
            at = 0
            while not self._ended.is_set():
                for i, client in enumerate(clients):
                    try:
                        client.sendall(PREFACE[at : at + 1] if at < len(PREFACE) - 1 else b"")
                        self.sent += 1
                        closed = bool(select.select([client], [], [], 0)[0]) and not client.recv(1 << 16)
                    except OSError:
                        closed = True
                    if closed:
                        self.cut_off += 1
                        client.close()
                        clients[i] = stack.enter_context(self._connect())
                        clients[i].sendall(PREFACE[: at + 1] if at < len(PREFACE) - 1 else PREFACE[:-1])
                at += 1
                time.sleep(0.05)
