"""The table of commands. A command is a function of the connection and the words of the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headgate.service.resp import checks, session, slots
from headgate.service.resp.limit import limit
from headgate.service.resp.replies import LaterReply
from headgate.service.resp.session import unknown
from headgate.service.resp.throttle import throttle
from headgate.service.resp.wire import NOT_AUTHENTICATED, Command

if TYPE_CHECKING:
    from headgate.service.resp.connection import RespConnection

CommandFunction = Callable[["RespConnection", Command], bytes | LaterReply]

# Commands that limit ask for a scope themselves; those in OPEN are for every client; the rest need a client that may
# check or has authenticated.
LIMITING: dict[bytes, CommandFunction] = {
    b"CL.THROTTLE": throttle,
    b"HEADGATE.CHECK": checks.check,
    b"HEADGATE.PEEK": checks.peek,
    b"HEADGATE.RESET": checks.reset,
    b"HEADGATE.BOOK": checks.book,
    b"HEADGATE.LIMIT": limit,
    b"HEADGATE.ACQUIRE": slots.acquire,
    b"HEADGATE.RENEW": slots.renew,
    b"HEADGATE.RELEASE": slots.release,
}
OPEN: dict[bytes, CommandFunction] = {
    b"AUTH": session.auth,
    b"HELLO": session.hello,
    b"QUIT": session.quit_connection,
    b"RESET": session.reset_connection,
}
OTHERS: dict[bytes, CommandFunction] = {
    b"CLIENT": session.client,
    b"COMMAND": session.command,
    b"CONFIG": session.config,
    b"DISCARD": session.multi,
    b"ECHO": session.echo,
    b"EXEC": session.multi,
    b"INFO": session.info,
    b"MULTI": session.multi,
    b"PING": session.ping,
    b"SELECT": session.select,
    b"TIME": session.time,
}
AT_ONCE = LIMITING | {name.lower(): function for name, function in LIMITING.items()}  # as clients spell them


def find(connection: RespConnection, name: bytes) -> CommandFunction:
    """The function of a command that is not in `AT_ONCE`."""
    name = name.upper()
    found = LIMITING.get(name) or OPEN.get(name)
    if found is not None:
        return found
    if connection.is_unknown:
        return _refuse
    return OTHERS.get(name, unknown)


def _refuse(connection: RespConnection, words: Command) -> bytes:
    return NOT_AUTHENTICATED
