"""Scripts other than the limiter's: any Lua, any keys of one slot, any arguments, called by digest.

    RELEASE = Lua("if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0")
    reply = store.threads().ask(RELEASE, RELEASE.with_keys(["lock:{a}"], owner))

The same link asks them: one breaker, one set of connections, one way to follow a failover or a slot that moves.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from headgate.redis.topology import pack_arguments


class Eval(NamedTuple):
    """A call of a script: its first key, which chooses the slot, and everything behind the script's name, packed."""

    key: str
    packed: bytes
    size: int  # how many arguments that is
    op: str = "eval"


class Lua:
    """One script.

    *repeatable*: to run it twice is the same as to run it once, so a call whose reply was lost is sent again as long as
    there is time.
    """

    weight = 1
    joins = False  # two calls are two commands

    def __init__(self, text: str, repeatable: bool = False) -> None:
        self.text = text
        self.repeatable = repeatable
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self._by_digest = pack_arguments("EVALSHA", self.sha)
        self._whole = pack_arguments("EVAL", text)

    def with_keys(self, keys: Sequence[str], *arguments: str | int) -> Eval:
        """A call with these keys, all with one hash tag, and these arguments."""
        return Eval(keys[0], pack_arguments(len(keys), *keys, *arguments), 1 + len(keys) + len(arguments))

    def slot(self, key: str) -> int:
        """The Cluster slot of a Redis key: what is between its first braces decides."""
        return slot_of(key)

    def call(self, calls: Sequence[Eval], whole: bool = False) -> bytes:
        """The command; *whole* sends the script itself, which the server then knows."""
        [call] = calls
        return b"*%d\r\n" % (2 + call.size) + (self._whole if whole else self._by_digest) + call.packed


def slot_of(key: str) -> int:
    """The Cluster slot of a Redis key."""
    start = key.find("{")
    end = key.find("}", start + 1)
    tag = key[start + 1 : end] if start >= 0 and end > start + 1 else key
    return binascii.crc_hqx(tag.encode(), 0) % 16384
