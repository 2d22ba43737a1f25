"""The head of a request over HTTP/2: which of its headers matter to a gRPC server, and whether it is well formed.

A client sends the same block of headers with call after call. As long as the table of the connection's decoder does
not change, the same bytes mean the same head, so heads are remembered by their bytes.
"""

from __future__ import annotations

import re
from typing import Final

from headgate.service.http2.hpack import Field, HeaderDecoder

MAX_HEADS: Final = 256  # remembered by each connection
MAX_BLOCK: Final = 512  # bytes of a block that is remembered
PACKED_PER_WORK: Final = 8  # bytes in the Huffman code that take as long as a field
WORK_PER_FRAME: Final = 8  # fields that take as long as a frame

_NAME: Final = re.compile(r"[!-9;-@\[-~]+")  # printable, without capitals and colons
_BAD_VALUE: Final = re.compile(r"[\x00\r\n]|^[ \t]|[ \t]$")
# A connection has one of each of these in HTTP/1; in HTTP/2 a proxy that forwards them could be led astray.
_CONNECTION_FIELDS: Final = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})
_PSEUDO: Final = {":method": 1, ":scheme": 2, ":path": 4, ":authority": 8}
_REQUIRED: Final = 7
_DIGITS: Final = re.compile("[0-9]{1,9}")
_TIMEOUT: Final = re.compile("([0-9]{1,8})([HMSmun])")
_SECONDS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

NO_TIMEOUT: Final = -1.0
BAD_TIMEOUT: Final = -2.0


class RequestHead:
    """What a head says. *granted* is free for the server to note whose token it has checked."""

    __slots__ = (
        "authorization",
        "content_length",
        "content_type",
        "encoding",
        "granted",
        "malformed",
        "method",
        "oversized",
        "path",
        "timeout",
    )

    def __init__(self) -> None:
        self.method = ""
        self.path = ""
        self.content_type = ""
        self.encoding = ""
        self.authorization = ""
        self.content_length = -1
        self.timeout = NO_TIMEOUT  # seconds
        self.malformed = ""  # what is wrong with it
        self.oversized = False
        self.granted: object = None


class RequestHeads:
    """Reads the blocks of one connection."""

    __slots__ = ("_decoder", "_known", "frames", "work")

    def __init__(self) -> None:
        self._decoder = HeaderDecoder()
        self._known: dict[bytes, RequestHead] = {}
        self.work = 0  # that the last block made: its fields, and what it changed in the table; 0 if it was remembered
        self.frames = 0  # ordinary ones that take as long as the last block took

    def read(self, block: bytes) -> RequestHead:
        """The head in *block*; `Http2Error` if the block cannot be decoded."""
        known = self._known.get(block)
        if known is not None:
            self.work = self.frames = 0
            return known
        before = self._decoder.changes
        head = make_head(self._decode(block))
        head.oversized = self._decoder.oversized
        if self._decoder.changes == before and len(block) <= MAX_BLOCK:
            if len(self._known) >= MAX_HEADS:
                self._known.clear()
            self._known[block] = head
        return head

    def read_trailers(self, block: bytes) -> str:
        """What is wrong with the trailers in *block*, if anything."""
        for name, value in self._decode(block):
            wrong = wrong_field(name, value)
            if wrong:
                return wrong
        return ""

    def _decode(self, block: bytes) -> list[Field]:
        decoder = self._decoder
        before = decoder.changes
        fields = decoder.decode(block)
        changes = decoder.changes - before
        self.work = decoder.fields_read + 2 * changes
        self.frames = (self.work + decoder.packed_read // PACKED_PER_WORK) // WORK_PER_FRAME
        if changes:
            self._known.clear()
        return fields

    def remembered(self) -> int:
        """How many heads are remembered."""
        return len(self._known)


def wrong_field(name: str, value: str) -> str:
    """What is wrong with an ordinary header, if anything."""
    if not _NAME.fullmatch(name):
        return "a header's name has a capital, a colon or a character that is not printable"
    if name in _CONNECTION_FIELDS or (name == "te" and value != "trailers"):
        return f"the header {name} does not exist in HTTP/2"
    # Almost every value is printable ASCII, and that is quick to tell.
    if not (value.isascii() and value.isprintable() and value == value.strip()) and _BAD_VALUE.search(value):
        return f"the header {name} has a line break, or space around its value"
    return ""


def make_head(fields: list[Field]) -> RequestHead:
    """The head that *fields* make."""
    head = RequestHead()
    seen = 0
    ordinary = False
    length = ""
    timeout = ""
    for name, value in fields:
        if name[:1] == ":":
            bit = _PSEUDO.get(name, 0)
            if not bit or ordinary or seen & bit:
                head.malformed = "a pseudo-header is unknown, comes twice, or stands behind an ordinary header"
            seen |= bit
            if bit == 4:
                head.path = value
            elif bit == 1:
                head.method = value
            continue
        ordinary = True
        wrong = wrong_field(name, value)
        if wrong:
            head.malformed = wrong
        elif name == "content-type":
            head.content_type = _joined(head.content_type, value)
        elif name == "grpc-timeout":
            timeout = _joined(timeout, value)
        elif name == "grpc-encoding":
            head.encoding = _joined(head.encoding, value)
        elif name == "authorization":
            head.authorization = _joined(head.authorization, value)
        elif name == "content-length":
            length = _joined(length, value)
    if seen & _REQUIRED != _REQUIRED or not head.path:
        head.malformed = head.malformed or "a request needs :method, :scheme and :path"
    if length:
        if _DIGITS.fullmatch(length):
            head.content_length = int(length)
        else:
            head.malformed = "content-length is not one number"
    if timeout:
        head.timeout = parse_timeout(timeout)
    return head


def _joined(before: str, value: str) -> str:
    """A header that comes twice is one with a comma: two tokens, two lengths or two time-outs are none."""
    return f"{before},{value}" if before else value


def parse_timeout(text: str) -> float:
    """Seconds of a grpc-timeout such as `20m`, or BAD_TIMEOUT."""
    found = _TIMEOUT.fullmatch(text)
    return int(found[1]) * _SECONDS[found[2]] if found else BAD_TIMEOUT
