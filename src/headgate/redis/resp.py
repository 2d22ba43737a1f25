"""The bytes of the Redis protocol: commands packed, replies as text, the slot of a key. No I/O, and no redis-py."""

from __future__ import annotations

import binascii
from typing import Any


def pack(*arguments: str | int) -> bytes:
    """A whole command as the Redis protocol writes it."""
    return b"*%d\r\n" % len(arguments) + pack_arguments(*arguments)


def pack_arguments(*arguments: str | int) -> bytes:
    """The arguments of a command, without the count that comes before them."""
    packed = b""
    for argument in arguments:
        encoded = str(argument).encode()
        packed += b"$%d\r\n%b\r\n" % (len(encoded), encoded)
    return packed


def text(reply: Any) -> str:
    """A reply as text, whether the connection decodes or not; a reply that is an error is raised."""
    if isinstance(reply, Exception):
        raise reply
    return reply.decode() if isinstance(reply, bytes) else str(reply or "")


def slot_of(key: str) -> int:
    """The Cluster slot of a Redis key: the text between its first braces decides, or else the whole key."""
    start = key.find("{")
    end = key.find("}", start + 1)
    tag = key[start + 1 : end] if start >= 0 and end > start + 1 else key
    return binascii.crc_hqx(tag.encode(), 0) % 16384
