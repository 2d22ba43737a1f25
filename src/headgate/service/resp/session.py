"""What a client is and may do, and what it sends when it connects: HELLO, AUTH, CLIENT, COMMAND, INFO, PING, ...

Clients read the version to find out which commands there are. What headgate does not have is refused by name.
"""

from __future__ import annotations

import hashlib
import itertools
from time import time_ns
from typing import TYPE_CHECKING

import headgate
from headgate.service.resp.wire import NOT_AUTHENTICATED, OK, Command, Value, encode, error
from headgate.service.shared_counters import PROBLEMS

if TYPE_CHECKING:
    from headgate.service.app import App, State
    from headgate.service.resp.connection import RespConnection

REDIS_VERSION = "7.0.0"  # whose handshake this is
CONFIG = {"appendonly": "no", "databases": "1", "maxmemory": "0", "save": "", "timeout": "0"}
NAME_BYTES = 64
_CHECK_FLAGS: list[Value] = ["write", "fast"]

NO_PASSWORD = error(
    "AUTH <password> called without any password configured for the default user. Are you sure your configuration is "
    "correct?"
)
WRONG_PASSWORD = error("invalid username-password pair or user is disabled.", "WRONGPASS")
HELLO_FIRST = error(
    "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option "
    "can be used to authenticate the client and select the RESP protocol version at the same time",
    "NOAUTH",
)
SYNTAX = error("syntax error")
_numbers = itertools.count(1)


class RespClient:
    """The client of a connection: its name, its version of the protocol, its token and the scopes of that."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.number = next(_numbers)
        self._state: State = app.state
        self.start_session()

    def start_session(self) -> None:
        """Begin as RESET leaves a connection: RESP2, no name, not authenticated."""
        self.version = 2
        self.name = b""
        self.token: bytes | None = None  # its digest
        self._scopes: frozenset[str] = frozenset()
        self.may_check = self.may("check")

    def authenticate(self, token_digest: bytes) -> bool:
        """Take over the scopes of a token. False: there is no such token, and nothing changes."""
        scopes = self.app.state.tokens.scopes(token_digest)
        if scopes is None:
            return False
        self.token = token_digest
        self._scopes = scopes
        self.may_check = self.may("check")
        return True

    def follow_settings(self) -> None:
        """After a reload: the token may have gone, or have other scopes."""
        self._state = self.app.state
        self._scopes = (self.token and self.app.state.tokens.scopes(self.token)) or frozenset()
        self.may_check = self.may("check")

    def may(self, scope: str) -> bool:
        return scope in self._scopes or scope not in self.app.state.tokens.guarded

    @property
    def is_unknown(self) -> bool:
        """Whether the client must authenticate before anything else."""
        return not self.may_check and not self._scopes

    def refusal(self, scope: str) -> bytes:
        """The error for a command that needs *scope*."""
        if not self._scopes:
            return NOT_AUTHENTICATED
        return error(f"this token does not have the scope '{scope}'", "NOPERM")

    def problem(self, text: str) -> bytes:
        """The error for a command that cannot be answered; it is counted."""
        self.app.gauges[PROBLEMS] += 1
        return error(text)


def hello(connection: RespConnection, words: Command) -> bytes:
    """HELLO [version [AUTH user token] [SETNAME name]]."""
    version, at = connection.version, 2
    if len(words) > 1:
        if words[1] not in (b"2", b"3"):
            return error("unsupported protocol version; use 2 or 3", "NOPROTO")
        version = int(words[1])
    name: bytes | None = None
    token: bytes | None = None
    while at < len(words):
        option = words[at].upper()
        if option == b"AUTH" and at + 2 < len(words):
            token = words[at + 2]
            at += 3
        elif option == b"SETNAME" and at + 1 < len(words):
            name = words[at + 1]
            if not _is_name(name):
                return _bad_name()
            at += 2
        else:
            return error(f"Syntax error in HELLO option {_shown(words[at])}")
    if token is not None and (refused := _authenticate(connection, token)):
        return refused
    if connection.is_unknown:
        return HELLO_FIRST
    connection.version = version
    if name is not None:
        connection.name = name
    shown: dict[str, Value] = {
        "server": "redis",
        "version": REDIS_VERSION,
        "proto": version,
        "id": connection.number,
        "mode": "standalone",
        "role": "master",
        "modules": [],
    }
    return encode(shown, version)


def auth(connection: RespConnection, words: Command) -> bytes:
    """AUTH token, or AUTH user token; the user may be any."""
    if len(words) not in (2, 3):
        return wrong_count(words)
    return _authenticate(connection, words[-1]) or OK


def _authenticate(connection: RespConnection, token: bytes) -> bytes:
    """Keep what *token* may do; returns the error, if it is one."""
    if not len(connection.app.state.tokens):
        return NO_PASSWORD
    return b"" if connection.authenticate(hashlib.sha256(token).digest()) else WRONG_PASSWORD


def client(connection: RespConnection, words: Command) -> bytes:
    """CLIENT SETNAME, GETNAME, SETINFO, ID, INFO, NO-EVICT, NO-TOUCH."""
    if len(words) < 2:
        return wrong_count(words)
    what = words[1].upper()
    if what == b"SETNAME" and len(words) == 3:
        if not _is_name(words[2]):
            return _bad_name()
        connection.name = words[2]
        return OK
    if (what == b"SETINFO" and len(words) == 4) or (what in (b"NO-EVICT", b"NO-TOUCH") and len(words) == 3):
        return OK
    if what == b"GETNAME" and len(words) == 2:
        return encode(connection.name or None, connection.version)
    if what == b"ID" and len(words) == 2:
        return b":%d\r\n" % connection.number
    if what == b"INFO" and len(words) == 2:
        name = connection.name.decode(errors="replace")
        text = f"id={connection.number} addr={connection.scope.client} name={name} db=0 resp={connection.version}\n"
        return encode(text, connection.version)
    return error(f"unknown subcommand or wrong number of arguments for {_shown(words[1])}")


def command(connection: RespConnection, words: Command) -> bytes:
    """COMMAND, COMMAND COUNT, DOCS, INFO, LIST."""
    what = words[1].upper() if len(words) > 1 else b""
    if what == b"COUNT":
        return b":%d\r\n" % len(OWN)
    if what == b"DOCS":
        asked = [word.decode(errors="replace").lower() for word in words[2:]] or list(OWN)
        docs: dict[str, Value] = {}
        for name in asked:
            if name in OWN:
                docs[name] = {"summary": OWN[name].summary, "group": "module"}
        return encode(docs, connection.version)
    if what == b"LIST":
        return encode(list(OWN), connection.version)
    if what not in (b"", b"INFO"):
        return error(f"unknown subcommand {_shown(words[1])}")
    names = [word.decode(errors="replace").lower() for word in words[2:]] or list(OWN)
    return encode([OWN[name].row(name) if name in OWN else None for name in names], connection.version)


class OwnCommand:
    """What COMMAND says of a command that limits: fewest words, and the position of its key."""

    def __init__(self, fewest: int, key: int, summary: str) -> None:
        self.fewest = fewest
        self.key = key
        self.summary = summary

    def row(self, name: str) -> Value:
        return [name, -self.fewest, _CHECK_FLAGS, self.key, self.key, 1]


OWN = {
    "cl.throttle": OwnCommand(5, 1, "Spends from a key: max_burst, count per period, period in seconds, quantity"),
    "headgate.check": OwnCommand(3, 2, "Spends permits of a rule from a key"),
    "headgate.peek": OwnCommand(3, 2, "What is left of a key under a rule; spends nothing"),
    "headgate.reset": OwnCommand(3, 2, "Forgets a key under a rule"),
    "headgate.book": OwnCommand(4, 2, "Books a slot of a rule: when work may start"),
    "headgate.limit": OwnCommand(2, 3, "Calls a limiter whose rule the client brings along"),
    "headgate.acquire": OwnCommand(3, 2, "Takes slots of a rule with concurrency, on lease"),
    "headgate.renew": OwnCommand(4, 2, "Starts the time of a lease again"),
    "headgate.release": OwnCommand(4, 2, "Ends a lease"),
}


def info(connection: RespConnection, words: Command) -> bytes:
    """INFO, with what clients look for: the version, that nothing is being loaded, that this is no replica."""
    lines = [
        "# Server",
        f"redis_version:{REDIS_VERSION}",
        "redis_mode:standalone",
        f"headgate_version:{headgate.__version__}",
        "# Clients",
        f"connected_clients:{len(connection.listener.connections)}",
        "# Persistence",
        "loading:0",
        "# Replication",
        "role:master",
        "",
    ]
    return encode("\r\n".join(lines), connection.version)


def config(connection: RespConnection, words: Command) -> bytes:
    """CONFIG GET of what redis-benchmark asks for; nothing can be set."""
    if len(words) < 3 or words[1].upper() != b"GET":
        return error("only CONFIG GET is there; the settings of headgate are in its file")
    names = [word.decode(errors="replace").lower() for word in words[2:]]
    shown: dict[str, Value] = {name: value for name, value in CONFIG.items() if name in names or "*" in names}
    return encode(shown, connection.version)


def ping(connection: RespConnection, words: Command) -> bytes:
    if len(words) > 2:
        return wrong_count(words)
    return encode(words[1], connection.version) if len(words) == 2 else b"+PONG\r\n"


def echo(connection: RespConnection, words: Command) -> bytes:
    return encode(words[1], connection.version) if len(words) == 2 else wrong_count(words)


def select(connection: RespConnection, words: Command) -> bytes:
    if len(words) != 2:
        return wrong_count(words)
    return OK if words[1] == b"0" else error("DB index is out of range; there is 0 alone")


def time(connection: RespConnection, words: Command) -> bytes:
    """TIME: the seconds since 1970 and the microseconds of the next one, by the clock of this machine."""
    seconds, rest = divmod(time_ns() // 1000, 1_000_000)
    return encode([str(seconds), str(rest)], connection.version)


def reset_connection(connection: RespConnection, words: Command) -> bytes:
    """RESET: as if the client had just connected."""
    connection.start_session()
    return b"+RESET\r\n"


def quit_connection(connection: RespConnection, words: Command) -> bytes:
    """QUIT: close behind this reply."""
    connection.drain()
    return OK


def multi(connection: RespConnection, words: Command) -> bytes:
    return error(f"{_text(words[0]).upper()} is not supported: send the commands as a pipeline without a transaction")


def unknown(connection: RespConnection, words: Command) -> bytes:
    known = ", ".join(name.upper() for name in OWN)
    return error(f"unknown command {_shown(words[0])}; headgate has {known}")


def wrong_count(words: Command) -> bytes:
    return error(f"wrong number of arguments for {_shown(words[0].lower())} command")


def _bad_name() -> bytes:
    return error(f"Client names are 1 to {NAME_BYTES} printable characters without spaces")


def _is_name(name: bytes) -> bool:
    return len(name) <= NAME_BYTES and all(33 <= byte <= 126 for byte in name)


def _text(word: bytes) -> str:
    return word[:40].decode(errors="replace")


def _shown(word: bytes) -> str:
    return f"'{_text(word)}'"
