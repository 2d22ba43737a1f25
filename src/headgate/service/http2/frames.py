"""The frames of HTTP/2 (RFC 9113): numbers, limits of this server, and how a frame is written."""

from __future__ import annotations

from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x01  # of DATA and HEADERS
ACK: Final = 0x01  # of SETTINGS and PING
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
WITH_PRIORITY: Final = 0x20

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

MAX_FRAME: Final = 16_384  # bytes of a frame that we send or take: the least that the protocol allows
LARGEST_FRAME: Final = 16_777_215  # that a peer may say it takes
MAX_WINDOW: Final = 0x7FFFFFFF
MAX_STREAM_ID: Final = 0x7FFFFFFF
DEFAULT_WINDOW: Final = 65_535

HeaderFrame = tuple[bytes, bytes]  # a frame without the number of its stream: what stands before and behind it


class Http2Error(Exception):
    """The peer broke the protocol; *code* is what the connection, or the stream, is closed with."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One frame in its bytes."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def header_frame(block: bytes, flags: int) -> HeaderFrame:
    """A HEADERS frame that is written many times, for one stream after the other."""
    return len(block).to_bytes(3, "big") + bytes((HEADERS, flags | END_HEADERS)), block


def settings(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame of names and values."""
    payload = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in pairs)
    return frame(SETTINGS, 0, 0, payload)


def uint32(data: bytes, at: int) -> int:
    """The four bytes at a place, as a number."""
    return data[at] << 24 | data[at + 1] << 16 | data[at + 2] << 8 | data[at + 3]
