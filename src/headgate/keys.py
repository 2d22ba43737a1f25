"""Keys: which text a caller may give as a key, and how it becomes part of a Redis key.

Rules: text of 1 to 256 bytes as UTF-8, without control characters. Everything else is data. The braces of a
Redis key are a Cluster hash tag, so braces inside a client's key are percent-encoded, and ``%`` with them:
the encoding is one to one, and no client can choose the slot of another.
"""

from __future__ import annotations

import base64
import hashlib
import re

from headgate.errors import InvalidKey

MAX_BYTES = 256

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_TAG = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})
_LABEL = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D", ":": "%3A", "/": "%2F"})


def check_key(key: object, what: str = "key", *, secret: bool = False) -> str:
    """Return *key* if it is one, else raise `InvalidKey` saying what would be right; without it if it is a *secret*."""
    if type(key) is str and key.isascii() and key.isprintable() and 0 < len(key) <= MAX_BYTES:
        return key  # most keys; the lines below find out what is wrong with another
    if not isinstance(key, str):
        raise InvalidKey(f"{what} must be text (str), got {type(key).__name__}{_shown(key, secret)}")
    if not key:
        raise InvalidKey(f"{what} is empty; give 1 to {MAX_BYTES} bytes of text, for example 'user:123'")
    try:
        size = len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError as error:
        where = f"at position {error.start}"
        raise InvalidKey(f"{what} has a lone surrogate {where}, so it is no text{_shown(key, secret)}") from None
    if size > MAX_BYTES:
        raise InvalidKey(f"{what} is {size} bytes as UTF-8, at most {MAX_BYTES} are allowed; hash long ones first")
    if found := _CONTROL.search(key):
        where = f"{found[0]!r} at position {found.start()}"
        raise InvalidKey(f"{what} has the control character {where}; remove it{_shown(key, secret)}")
    return str.__str__(key)  # a subclass could hash and compare as it likes


def _shown(key: object, secret: bool) -> str:
    return "" if secret else f": {key!r:.80}"


def hash_tag(key: str) -> str:
    """The client's part of a Redis key, braces included: a Cluster hashes only what is between them."""
    if "{" in key or "}" in key or "%" in key:
        key = key.translate(_TAG)
    return "{" + key + "}"


def digest(key: str) -> str:
    """A short stand-in for *key* (22 characters, 128 bits of BLAKE2b) that does not show it."""
    return base64.urlsafe_b64encode(hashlib.blake2b(key.encode(), digest_size=16).digest())[:-2].decode()


def label(text: str) -> str:
    """Encode a limiter's name so that it stays one part of a Redis key."""
    return text.translate(_LABEL)
