"""POST /api/v1/rate-limit/commands: the command HEADGATE.LIMIT over HTTP, for `headgate+http://`.

The body is a batch of commands of the Redis protocol, the response their replies in order. PING, TIME and INFO are
there for the client's probes. A body that is no such batch is refused, and nothing of it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from time import time_ns
from typing import TYPE_CHECKING, Any

import headgate
from headgate.remote.commands import COMMAND
from headgate.service.resp.limit import answer
from headgate.service.resp.wire import Command, encode, error, parse
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.shared_counters import PROBLEMS

if TYPE_CHECKING:
    from headgate.service.app import App

MAX_COMMANDS = 128  # of one request
_HEADERS = (("content-type", "application/octet-stream"), ("cache-control", "no-store"))
_LIMIT = COMMAND.encode()


async def post(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    app.state.tokens.demand("check", scope.headers)
    found = parse(await app.bodies.read(scope, protocol))
    if found.refused or found.rest or not found.commands:
        why = found.refused or ("the last command is not complete" if found.rest else "there is none")
        raise HTTPError(400, f"the body must be commands of the Redis protocol: {why}; nothing was spent")
    if len(found.commands) > MAX_COMMANDS:
        raise HTTPError(400, f"a request has at most {MAX_COMMANDS} commands, got {len(found.commands)}")
    async with app.batches:
        replies = [_answer(app, words) for words in found.commands]
        waiting = [reply for reply in replies if not isinstance(reply, bytes)]
        awaited = iter(await asyncio.gather(*waiting) if waiting else ())
    parts = [reply if isinstance(reply, bytes) else next(awaited) for reply in replies]
    return 200, list(_HEADERS), b"".join(parts)


def _answer(app: App, words: Command) -> bytes | Coroutine[Any, Any, bytes]:
    name = words[0].upper()
    if name == _LIMIT:
        try:
            return answer(app, words)
        except ValueError as reason:
            app.gauges[PROBLEMS] += 1
            return error(str(reason))
    if name == b"PING":
        return b"+PONG\r\n"
    if name == b"TIME":
        seconds, rest = divmod(time_ns() // 1000, 1_000_000)
        return encode([str(seconds), str(rest)], 2)
    if name == b"INFO":
        return encode(f"headgate_version:{headgate.__version__}\r\nrole:master\r\n", 2)
    return error(f"only {COMMAND}, PING, TIME and INFO are here; other commands need the port of the Redis protocol")
