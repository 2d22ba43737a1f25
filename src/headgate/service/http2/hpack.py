"""Compressed headers of HTTP/2 (RFC 7541): a whole decoder, and an encoder that needs no state.

What a peer can make the decoder do is bounded: the table has 4 KB, a list of headers stops being kept at
MAX_HEADER_LIST bytes and ends the connection at HARD_HEADER_LIST, as a block of a few bytes can unpack to megabytes.
"""

from __future__ import annotations

from typing import Final

from headgate.service.http2 import huffman
from headgate.service.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Http2Error

Field = tuple[str, str]

TABLE_SIZE: Final = 4096  # bytes of the dynamic table, the protocol's default
MAX_HEADER_LIST: Final = 16_384  # bytes of a list that is kept; the peer is told
HARD_HEADER_LIST: Final = 65_536  # bytes of a list that ends the connection
PACKED: Final = 0x80  # in the first byte of a text: it is in the Huffman code
OVERHEAD: Final = 32  # bytes that each field counts for beyond its own
_MAX_INTEGER: Final = 1 << 24

STATIC: Final[list[Field]] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    *[(":status", status) for status in ("200", "204", "206", "304", "400", "404", "500")],
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    *[(name, "") for name in ("accept-language", "accept-ranges", "accept", "access-control-allow-origin", "age")],
    *[(name, "") for name in ("allow", "authorization", "cache-control", "content-disposition", "content-encoding")],
    *[(name, "") for name in ("content-language", "content-length", "content-location", "content-range")],
    *[(name, "") for name in ("content-type", "cookie", "date", "etag", "expect", "expires", "from", "host")],
    *[(name, "") for name in ("if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since")],
    *[(name, "") for name in ("last-modified", "link", "location", "max-forwards", "proxy-authenticate")],
    *[(name, "") for name in ("proxy-authorization", "range", "referer", "refresh", "retry-after", "server")],
    *[(name, "") for name in ("set-cookie", "strict-transport-security", "transfer-encoding", "user-agent", "vary")],
    ("via", ""),
    ("www-authenticate", ""),
]
_STATIC_SIZE: Final = 61


class HeaderDecoder:
    """The decoder of one connection; its table changes from block to block."""

    __slots__ = ("_entries", "_limit", "_size", "changes", "fields_read", "oversized", "packed_read")

    def __init__(self) -> None:
        self._entries: list[Field] = []  # newest last
        self._size = 0
        self._limit = TABLE_SIZE
        self.changes = 0  # of the table: a block seen before means the same only as long as this stays
        self.fields_read = 0  # in the last block
        self.packed_read = 0  # bytes in the Huffman code, there
        self.oversized = False  # the list of the last block was longer than what is kept

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a block, as far as they are kept; `Http2Error` if it cannot be read."""
        fields: list[Field] = []
        at = 0
        end = len(block)
        total = 0
        self.fields_read = 0
        self.packed_read = 0
        self.oversized = False
        while at < end:
            byte = block[at]
            if byte & 0x80:
                index, at = read_integer(block, at, end, 0x7F)
                field = self._field(index)
            elif byte & 0xE0 == 0x20:
                size, at = read_integer(block, at, end, 0x1F)
                if self.fields_read:
                    raise Http2Error(COMPRESSION_ERROR, "a table size stands behind a header")
                self._resize(size)
                continue
            else:
                kept = byte & 0x40
                index, at = read_integer(block, at, end, 0x3F if kept else 0x0F)
                if index:
                    name = self._field(index)[0]
                else:
                    name, at = self._read_string(block, at, end)
                value, at = self._read_string(block, at, end)
                field = name, value
                if kept:
                    self._insert(field)
            self.fields_read += 1
            total += len(field[0]) + len(field[1]) + OVERHEAD
            if total <= MAX_HEADER_LIST:
                fields.append(field)
            else:
                self.oversized = True
                if total > HARD_HEADER_LIST:
                    raise Http2Error(ENHANCE_YOUR_CALM, f"headers of more than {HARD_HEADER_LIST} bytes")
        return fields

    def _read_string(self, block: bytes, at: int, end: int) -> tuple[str, int]:
        text, stop = read_string(block, at, end)
        if block[at] & PACKED:
            self.packed_read += stop - at
        return text, stop

    def table_size(self) -> int:
        """Bytes in the dynamic table."""
        return self._size

    def _field(self, index: int) -> Field:
        if 0 < index <= _STATIC_SIZE:
            return STATIC[index - 1]
        place = len(self._entries) - (index - _STATIC_SIZE)
        if index == 0 or place < 0:
            raise Http2Error(COMPRESSION_ERROR, f"there is no header with the index {index}")
        return self._entries[place]

    def _insert(self, field: Field) -> None:
        self.changes += 1
        size = len(field[0]) + len(field[1]) + OVERHEAD
        self._evict(self._limit - size)
        if size <= self._limit:
            self._entries.append(field)
            self._size += size

    def _resize(self, limit: int) -> None:
        if limit > TABLE_SIZE:
            raise Http2Error(COMPRESSION_ERROR, f"a table of {limit} bytes is more than {TABLE_SIZE}")
        if limit != self._limit:
            self.changes += 1
            self._limit = limit
            self._evict(limit)

    def _evict(self, limit: int) -> None:
        """Drop the oldest entries until the table has at most *limit* bytes."""
        while self._entries and self._size > limit:
            name, value = self._entries.pop(0)
            self._size -= len(name) + len(value) + OVERHEAD


def read_integer(block: bytes, at: int, end: int, mask: int) -> tuple[int, int]:
    """A number whose first bits share a byte with something else, and the place behind it."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        if at >= end:
            raise Http2Error(COMPRESSION_ERROR, "the block ends within a number")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if value > _MAX_INTEGER or shift > 21:
            raise Http2Error(COMPRESSION_ERROR, "a number is too large")
        if byte < 0x80:
            return value, at
        shift += 7


def read_string(block: bytes, at: int, end: int) -> tuple[str, int]:
    """A text, and the place behind it. Bytes beyond ASCII become the characters of Latin-1."""
    if at >= end:
        raise Http2Error(COMPRESSION_ERROR, "the block ends before a text")
    packed = block[at] & PACKED
    size, at = read_integer(block, at, end, 0x7F)
    stop = at + size
    if stop > end:
        raise Http2Error(COMPRESSION_ERROR, "the block ends within a text")
    raw = block[at:stop]
    if packed:
        unpacked = huffman.decode(raw)
        if unpacked is None:
            raise Http2Error(COMPRESSION_ERROR, "a text is not in the Huffman code")
        raw = unpacked
    return raw.decode("latin-1"), stop


def encode(fields: list[Field]) -> bytes:
    """A block that leaves the peer's table alone: whole fields of the static table, literals for the rest."""
    out = bytearray()
    for field in fields:
        if field in STATIC:
            out += write_integer(STATIC.index(field) + 1, 0x7F, 0x80)
            continue
        name, value = field
        index = next((place for place, known in enumerate(STATIC, 1) if known[0] == name), 0)
        out += write_integer(index, 0x0F, 0x00)
        for text in (value,) if index else (name, value):
            raw = text.encode("latin-1")
            out += write_integer(len(raw), 0x7F, 0x00)
            out += raw
    return bytes(out)


def write_integer(value: int, mask: int, first: int) -> bytes:
    """A number whose first bits share a byte with *first*."""
    if value < mask:
        return bytes((first | value,))
    out = bytearray((first | mask,))
    value -= mask
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
