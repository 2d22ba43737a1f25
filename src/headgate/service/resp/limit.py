"""HEADGATE.LIMIT: calls of limiters whose rules clients bring along, over the Redis protocol and over HTTP.

`headgate.remote.commands` has its forms.

The numbers of a reply are exact, in microseconds: the client's limiter hands them on as if it had decided itself. Each
error says what a client must know for its `on_store_error`: MASTERDOWN, the store of the service does not answer and
nothing was spent; UNSURE, the store may have spent; ERR, the call cannot be made as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any

import headgate
from headgate.algorithms.booking import Booked, Booking
from headgate.booking import LONGEST, check_booking
from headgate.clock import MICROSECONDS as MILLION
from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.joint import JointCheck, try_acquire_all_async
from headgate.keys import check_key
from headgate.redis.script import REPLY_SIZE
from headgate.remote.commands import COMMAND, MAX_CHECKS, OPERATIONS, UNFIT, UNSURE
from headgate.service.client_limits import ClientLimit
from headgate.service.resp.replies import MAX_PERMITS, LaterReply, at_once
from headgate.service.resp.wire import OK, Command, encode, error, parse
from headgate.service.responses import record, store_unavailable
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.shared_counters import PROBLEMS
from headgate.stores.base import takes_bookings, takes_floors
from headgate.stores.remote import RuleOnServer

if TYPE_CHECKING:
    from headgate.service.app import App
    from headgate.service.resp.connection import RespConnection

NEW_LIMIT_CALLS = 32  # calls that take as long as to open a limit
MAX_CHARGES = 8  # times that a debt is charged anew because others spent first
MAX_COMMANDS = 128  # of one HTTP request
LONGEST_US = int(LONGEST) * MILLION
ONE = b"*%d\r\n" % REPLY_SIZE  # how the reply about one check begins
USAGE = (
    f"usage: {COMMAND} {'|'.join(OPERATIONS)} rule key permits, {COMMAND} take rule key permits share, "
    f"{COMMAND} book|cancel rule key permits id within grace, {COMMAND} all rule key permits ..., {COMMAND} ready"
)
_NAME = COMMAND.encode()
_HEADERS = (("content-type", "application/octet-stream"), ("cache-control", "no-store"))

Check = tuple[ClientLimit, str, int]  # key and permits


def limit(connection: RespConnection, words: Command) -> bytes | LaterReply:
    if not connection.may_check:
        return connection.refusal("check")
    app = connection.app
    known = len(app.client_limits)
    try:
        reply = answer(app, words)
    except ValueError as reason:
        return connection.problem(str(reason))
    if (opened := len(app.client_limits) - known) > 0:
        connection.turn.spend(opened * NEW_LIMIT_CALLS)
    return reply if isinstance(reply, bytes) else LaterReply(None, reply)


async def post_commands(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """POST /api/v1/rate-limit/commands, for `headgate+http://`: a batch of commands, and their replies in order.

    PING, TIME and INFO are there for the client's probes. A body that is no such batch is refused, and nothing of it is
    done.
    """
    app.state.tokens.demand("check", scope.headers)
    found = parse(await app.bodies.read(scope, protocol))
    if found.refused or found.rest or not found.commands:
        why = found.refused or ("the last command is not complete" if found.rest else "there is none")
        raise HTTPError(400, f"the body must be commands of the Redis protocol: {why}; nothing was spent")
    if len(found.commands) > MAX_COMMANDS:
        raise HTTPError(400, f"a request has at most {MAX_COMMANDS} commands, got {len(found.commands)}")
    async with app.batches:
        replies = [_answer_over_http(app, words) for words in found.commands]
        waiting = [reply for reply in replies if not isinstance(reply, bytes)]
        awaited = iter(await asyncio.gather(*waiting) if waiting else ())
    parts = [reply if isinstance(reply, bytes) else next(awaited) for reply in replies]
    return 200, list(_HEADERS), b"".join(parts)


def _answer_over_http(app: App, words: Command) -> bytes | Coroutine[Any, Any, bytes]:
    name = words[0].upper()
    if name == _NAME:
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


def answer(app: App, words: Command) -> bytes | Coroutine[Any, Any, bytes]:
    """The reply to a command, or what has to be awaited for it. Raises ValueError for one that cannot be answered."""
    began = perf_counter_ns()
    op = words[1].decode(errors="replace") if len(words) > 1 else ""
    if op in OPERATIONS and len(words) == 5:
        check = _check(app, words, 2, 0 if op == "peek" else 1)
        found, key, permits = check
        if op != "take":
            return _ready(found, _ask(app, op, check))
        if found.take_now is None:
            return _take(app, check, found.limiter.try_acquire(key, permits), began)
        try:
            made = found.take_now(key, permits)
        except StoreUnavailable as reason:
            return _failed(app, found, key, reason)
        if not isinstance(made, Decision):
            return _take(app, check, made, began)
        record(app, found, key, made, perf_counter_ns() - began)
        return ONE + _numbers(made)
    if op == "take" and len(words) == 6:
        found, key, permits = _check(app, words, 2, 1)
        return _ready(found, _take_above(app, (found, key, permits), _number("share", words[5], MILLION - 1), began))
    if op in ("book", "cancel") and len(words) == 8:
        found, key, permits = _check(app, words, 2, 1)
        times = [_number(name, word, LONGEST_US) for name, word in (("within", words[6]), ("grace", words[7]))]
        asked = Booking(op, key, check_key(words[5].decode(), "id"), permits, *times)
        return _ready(found, _book(app, found, asked))
    if op == "all" and len(words) % 3 == 2 and 5 <= len(words) <= 2 + 3 * MAX_CHECKS:
        return _ask_all(app, [_check(app, words, at, 1) for at in range(2, len(words), 3)], began)
    if op == "ready" and len(words) == 2:
        return _ask(app, "ready", (app.client_limits.probe(), "ready", 0))
    raise ValueError(USAGE)


def _ready(found: ClientLimit, reply: Coroutine[Any, Any, bytes]) -> bytes | Coroutine[Any, Any, bytes]:
    return at_once(reply) if found.in_process else reply


def _number(name: str, word: bytes, most: int) -> int:
    if not word.isdigit() or len(word) > 20 or (number := int(word)) > most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}, got {word[:40].decode(errors='replace')!r}")
    return number


def _check(app: App, words: Command, at: int, least: int) -> Check:
    """The rule, the key and the permits that begin at word *at*."""
    found = app.client_limits.get(words[at])
    word = words[at + 2]
    if not word.isdigit() or len(word) > 20 or not least <= (permits := int(word)) <= MAX_PERMITS:
        shown = word[:40].decode(errors="replace")
        raise ValueError(f"permits must be a whole number from {least} to {MAX_PERMITS}, got {shown!r}")
    return found, check_key(words[at + 1].decode()), permits


async def _ask(app: App, op: str, check: Check) -> bytes:
    found, key, permits = check
    limiter = found.limiter
    try:
        if op in ("peek", "ready"):
            made = await limiter.peek(key, permits)
            return ONE + _numbers(made) if op == "peek" else OK
        if op == "refund":
            await limiter.refund(key, permits)
        elif op == "reset":
            await limiter.reset(key)
        else:
            await _charge(found, key, permits)
    except StoreUnavailable as reason:
        return _failed(app, found, key, reason)
    except ValueError as reason:  # more permits than the capacity, say
        return error(str(reason))
    return OK


async def _take(app: App, check: Check, asked: Awaitable[Decision], began: int) -> bytes:
    found, key, _ = check
    try:
        made = await asked
    except StoreUnavailable as reason:
        return _failed(app, found, key, reason)
    except ValueError as reason:  # more permits than the capacity
        return error(str(reason))
    record(app, found, key, made, perf_counter_ns() - began)
    return ONE + _numbers(made)


async def _take_above(app: App, check: Check, share: int, began: int) -> bytes:
    """Take and leave *share*, in millionths of the capacity."""
    found, key, permits = check
    if not takes_floors(found.limiter._backend):
        return error(f"floor= is not for limits that this service decides {_decides(found)}", UNFIT)
    return await _take(app, check, found.limiter.try_acquire(key, permits, floor=share / MILLION), began)


async def _book(app: App, found: ClientLimit, asked: Booking) -> bytes:
    """Book or cancel a slot."""
    limiter, key = found.limiter, asked.key
    try:
        if not takes_bookings(limiter._backend):
            why = f"book() needs a service that keeps slots, not on shared://; this decides {_decides(found)}"
            return error(why, UNFIT)
        if asked.op == "cancel":
            return b"*1\r\n:%d\r\n" % await limiter.cancel_slot(key, asked.id)
        seconds = asked.within / MILLION, asked.grace / MILLION
        checked = check_booking(limiter.rule, limiter._backend, key, asked.id, asked.permits, *seconds)
        booked: Booked = await limiter._backend.book(checked)  # type: ignore[attr-defined]  # it takes bookings
    except StoreUnavailable as reason:
        return _failed(app, found, key, reason)
    except ValueError as reason:
        return error(str(reason))
    numbers = b":%d\r\n" * 4 % (booked.outcome, booked.at, booked.now, booked.permits)
    return b"*9\r\n" + numbers + _numbers(booked.decision)


def _decides(found: ClientLimit) -> str:
    return "from leases" if found.leased else "in its store"


async def _ask_all(app: App, checks: Sequence[Check], began: int) -> bytes:
    try:
        made = await try_acquire_all_async([JointCheck(found.limiter, key, permits) for found, key, permits in checks])
    except StoreUnavailable as reason:
        return _failed(app, checks[0][0], checks[0][1], reason)
    except ValueError as reason:
        return error(str(reason))
    spent = all(made)
    for (found, key, _), decision in zip(checks, made, strict=True):
        if spent or not decision:  # nothing was spent of those that would have allowed
            record(app, found, key, decision, perf_counter_ns() - began)
    return b"*%d\r\n" % (REPLY_SIZE * len(made)) + b"".join(map(_numbers, made))


async def _charge(found: ClientLimit, key: str, permits: int) -> None:
    """Spend what was granted while the client could not ask, as far as there is room for it."""
    for _ in range(MAX_CHARGES):
        room = min(permits, (await found.limiter.peek(key, 0)).remaining)
        if not room or await found.limiter.try_acquire(key, room):
            return


def _numbers(made: Decision) -> bytes:
    numbers = (made.allowed, made.limit, made.remaining, made.reset_us, made.retry_us)
    return b":%d\r\n:%d\r\n:%d\r\n:%d\r\n:%d\r\n" % numbers


def _failed(app: App, found: ClientLimit, key: str, reason: StoreUnavailable) -> bytes:
    """The error of a call that the store did not answer, or refused."""
    store_unavailable(app, found, key, reason)  # counts it, and writes it to the log
    if found.leased:  # a call that was not answered from a lease has spent nothing
        return error("the store of the service does not answer, and no lease is left", "MASTERDOWN")
    backend, cause = found.limiter._backend, reason.__cause__
    if not isinstance(backend, RuleOnServer) or not isinstance(cause, Exception) or backend.may_have_run(cause):
        return error("the store of the service did not answer; it may have spent the permits", UNSURE)
    if backend.refused(cause):
        return error("the store of the service refuses; its log has more")
    return error("the store of the service does not answer", "MASTERDOWN")
