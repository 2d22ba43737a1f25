"""The wire format of protocol buffers, as far as a few small messages need it: no descriptors, no dependency.

A reader here takes the whole message, a place in it and the end of the part that it may read, and returns what it
found together with the next place. Unknown fields, and known ones of another wire type, are skipped as protobuf does.
"""

from __future__ import annotations

from typing import Final

MAX_DEPTH: Final = 32  # groups inside of groups, in unknown fields

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
GROUP: Final = 3
GROUP_END: Final = 4
FIXED32: Final = 5

_SMALL: Final = [bytes([value]) for value in range(128)]


class MalformedMessage(ValueError):
    """Bytes that are not the message that they should be."""


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """An integer of at most 64 bits; bits beyond are dropped, as protobuf does."""
    if at >= end:
        raise MalformedMessage("the message ends within a number")
    byte = data[at]
    at += 1
    if byte < 128:
        return byte, at
    value = byte & 127
    shift = 7
    while True:
        if at >= end:
            raise MalformedMessage("the message ends within a number")
        byte = data[at]
        at += 1
        if shift == 63:
            if byte > 127:
                raise MalformedMessage("a number has more than 64 bits")
            return value | (byte & 1) << 63, at
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def read_tag(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number and wire type of a field, as `number << 3 | wire type`."""
    tag, after = read_varint(data, at, end)
    if tag < 8 or tag > 0xFFFFFFFF or after - at > 5:
        raise MalformedMessage(f"there is no field with the tag {tag}")
    return tag, after


def read_size(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Where a field of bytes begins and ends: first the end, then the beginning."""
    size, at = read_varint(data, at, end)
    stop = at + size
    if stop > end:
        raise MalformedMessage("a field is longer than its message")
    return stop, at


def read_text(data: bytes, at: int, end: int) -> tuple[str, int]:
    """A field of text, and the place after it."""
    stop, at = read_size(data, at, end)
    try:
        return data[at:stop].decode(), stop
    except UnicodeDecodeError:
        raise MalformedMessage("a text is not UTF-8") from None


def skip(data: bytes, at: int, end: int, tag: int, depth: int = 0) -> int:
    """The place after the value of a field that is of no interest."""
    kind = tag & 7
    if kind == VARINT:
        return read_varint(data, at, end)[1]
    if kind == BYTES:
        return read_size(data, at, end)[0]
    if kind in (FIXED32, FIXED64):
        at += 4 if kind == FIXED32 else 8
        if at > end:
            raise MalformedMessage("the message ends within a number")
        return at
    if kind != GROUP or depth >= MAX_DEPTH:
        raise MalformedMessage("a group that was not begun, too deep, or a wire type that does not exist")
    while True:
        inner, at = read_tag(data, at, end)
        if inner & 7 == GROUP_END:
            if inner >> 3 != tag >> 3:
                raise MalformedMessage("a group ends that was not begun")
            return at
        at = skip(data, at, end, inner, depth + 1)


def read_texts(data: bytes, at: int, end: int) -> tuple[str, str]:
    """The texts in the fields 1 and 2 of a message. Bytes that are not UTF-8 become the text of their escapes."""
    first = ""
    second = ""
    while at < end:
        tag, at = read_tag(data, at, end)
        if tag != 1 << 3 | BYTES and tag != 2 << 3 | BYTES:
            at = skip(data, at, end, tag)
            continue
        stop, at = read_size(data, at, end)
        text = data[at:stop].decode(errors="backslashreplace")
        at = stop
        if tag == 1 << 3 | BYTES:
            first = text
        else:
            second = text
    return first, second


def varint(value: int) -> bytes:
    """An integer in its bytes; a negative one is written as the 64 bits of its two's complement."""
    if 0 <= value < 128:
        return _SMALL[value]
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(tag: int, value: str) -> bytes:
    """A field of text with a tag below 128; nothing if it is empty."""
    if not value:
        return b""
    raw = value.encode()
    return _SMALL[tag] + varint(len(raw)) + raw


def number(tag: int, value: int) -> bytes:
    """A field of a number with a tag below 128; nothing if it is 0."""
    return _SMALL[tag] + varint(value) if value else b""


def message(tag: int, body: bytes) -> bytes:
    """A field that is a message, with a tag below 128; it is there even if it is empty."""
    return _SMALL[tag] + varint(len(body)) + body
