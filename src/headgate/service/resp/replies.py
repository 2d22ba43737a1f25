"""What the commands about rules share: their words, the peer as a request, and replies that wait for the store."""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate._plan import without_waiting
from headgate.errors import InvalidKey
from headgate.keys import check_key
from headgate.service.resp.wire import Command
from headgate.service.rsgi import HTTPError

if TYPE_CHECKING:
    from headgate.service.resp.connection import RespConnection

MAX_PERMITS = 1_000_000_000

# Runs the coroutine of a store that decides in the process.
at_once = without_waiting(RuntimeError, "a store that decides in the process has waited")


class LaterReply(NamedTuple):
    """A reply that the store is asked for; commands of one connection about one key are run one after the other.

    Those without a key are run at the same time as all others, and may share a round trip to the store.
    """

    key: str | None
    reply: Coroutine[Any, Any, bytes]


class NoHeaders:
    """The headers of a command: it has none."""

    def get(self, key: str, default: Any = None) -> Any:
        return default

    def get_all(self, key: str) -> list[str]:
        return []

    def __contains__(self, key: str) -> bool:
        return False


class CommandScope:
    """What the resolver of rules reads of a request: the peer of the connection, and nothing else."""

    http_version = method = path = query_string = ""
    headers = NoHeaders()

    def __init__(self, client: str) -> None:
        self.client = client  # address and port


def key_text(word: bytes) -> str:
    """The key as text; a digest of what is no key: empty, longer than 256 bytes, not UTF-8, or with control characters.

    The digest is a key that a client could send itself, with the same effect.
    """
    try:
        return check_key(word.decode())
    except (UnicodeDecodeError, InvalidKey):
        return "blake2b:" + hashlib.blake2b(word, digest_size=16).hexdigest()


def parse_words(words: Command, form: str, least: int, first: int = 3) -> tuple[str, str, int]:
    """The rule, the key and the permits of a command; *first* is the position of the permits. Raises `HTTPError`."""
    if not 3 <= len(words) <= first + 1:
        raise HTTPError(400, f"usage: {words[0].decode(errors='replace').upper()} {form}")
    permits = 1
    if len(words) > first:
        word = words[first]
        text = word.decode(errors="replace")
        if not word.isdigit() or len(word) > 20 or not least <= (permits := int(text)) <= MAX_PERMITS:
            raise HTTPError(400, f"permits must be a whole number of at least {least}, got {text!r:.40}")
    return words[1].decode(errors="replace"), key_text(words[2]), permits


def now_or_later(
    connection: RespConnection, in_process: bool, key: str, reply: Coroutine[Any, Any, bytes]
) -> bytes | LaterReply:
    """The reply itself where the store is *in_process* and needs no round trip: the coroutine then ends at once."""
    if not in_process:
        return LaterReply(key, reply)
    try:
        return at_once(reply)
    except HTTPError as reason:
        return connection.problem(reason.detail)
