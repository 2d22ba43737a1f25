"""HEADGATE.ACQUIRE, HEADGATE.RENEW and HEADGATE.RELEASE: slots of rules with `concurrency`, as the HTTP API gives them.

ACQUIRE is answered with five integers and the lease: allowed (1 or 0), limit, remaining, seconds after which to try
again at the latest (0 if allowed), seconds that the lease lasts (0 if denied), and the lease, or nil. RENEW is answered
with the seconds that the lease lasts from now on, or 0 if it has ended; RELEASE with 1, or 0 if there is no such lease.
PEEK and RESET of such a rule are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from headgate.service.concurrency_rules import ConcurrencyRule
from headgate.service.resolve import resolve_slots, slots_to_reset
from headgate.service.resp.replies import LaterReply, key_text, now_or_later, parse_words
from headgate.service.resp.wire import OK, Command, encode, integers
from headgate.service.rsgi import HTTPError
from headgate.service.slots import (
    check_lease_id,
    free_slots,
    look,
    new_lease_id,
    release_lease,
    renew_lease,
    retry_seconds,
    take_slots,
)

if TYPE_CHECKING:
    from headgate.service.resp.connection import RespConnection

    LeaseCommand = Callable[[RespConnection, ConcurrencyRule, str, bool, str], Coroutine[Any, Any, bytes]]

GONE = 404


def acquire(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.ACQUIRE rule key [lease [permits]]: take slots."""
    began = perf_counter_ns()
    if not connection.may_check:
        return connection.refusal("check")
    try:
        name, given, permits = parse_words(words, "rule key [lease [permits]]", least=1, first=4)
        rule, key, exempt = resolve_slots(connection.app.state, connection.scope, name, given)
        lease = check_lease_id(words[3].decode(errors="replace")) if len(words) > 3 else new_lease_id()
    except HTTPError as reason:
        return connection.problem(reason.detail)
    reply = _acquire(connection, rule, key, exempt, lease, permits, began, len(words) == 3)
    return now_or_later(connection, rule.in_process, key, reply)


async def _acquire(
    connection: RespConnection,
    rule: ConcurrencyRule,
    key: str,
    exempt: bool,
    lease: str,
    permits: int,
    began: int,
    made_up: bool,
) -> bytes:
    version = connection.version  # HELLO may come while the store is asked
    reply, allowed = await take_slots(connection.app, rule, key, exempt, lease, permits, began, made_up)
    free = max(rule.limit - reply.used, 0)
    if not allowed:
        return encode([0, rule.limit, free, retry_seconds(reply), 0, None], version)
    return encode([1, rule.limit, free, 0, rule.lease // 1_000_000, lease], version)


def renew(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.RENEW rule key lease: start the time of the lease again."""
    return _with_lease(connection, words, _renew)


async def _renew(connection: RespConnection, rule: ConcurrencyRule, key: str, exempt: bool, lease: str) -> bytes:
    try:
        await renew_lease(connection.app, rule, key, exempt, lease)
    except HTTPError as reason:
        if reason.status != GONE:
            raise
        return b":0\r\n"
    return b":%d\r\n" % (rule.lease // 1_000_000)


def release(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.RELEASE rule key lease: end the lease."""
    return _with_lease(connection, words, _release)


async def _release(connection: RespConnection, rule: ConcurrencyRule, key: str, exempt: bool, lease: str) -> bytes:
    reply = await release_lease(connection.app, rule, key, exempt, lease)
    return b":%d\r\n" % reply.granted


def _with_lease(connection: RespConnection, words: Command, ask: LeaseCommand) -> bytes | LaterReply:
    """The reply of *ask*, for a command of a rule, a key and a lease."""
    if not connection.may_check:
        return connection.refusal("check")
    try:
        if len(words) != 4:
            raise HTTPError(400, f"usage: {words[0].decode(errors='replace').upper()} rule key lease")
        name = words[1].decode(errors="replace")
        rule, key, exempt = resolve_slots(connection.app.state, connection.scope, name, key_text(words[2]))
        lease = check_lease_id(words[3].decode(errors="replace"))
    except HTTPError as reason:
        return connection.problem(reason.detail)
    return now_or_later(connection, rule.in_process, key, ask(connection, rule, key, exempt, lease))


def peek(connection: RespConnection, name: str, key: str, permits: int) -> bytes | LaterReply:
    """HEADGATE.PEEK of a rule with concurrency."""
    rule, key, exempt = resolve_slots(connection.app.state, connection.scope, name, key)
    return now_or_later(connection, rule.in_process, key, _peek(connection, rule, key, exempt, permits))


async def _peek(connection: RespConnection, rule: ConcurrencyRule, key: str, exempt: bool, permits: int) -> bytes:
    reply = await look(connection.app, rule, key, exempt, permits)
    allowed = bool(reply.granted) or rule.shadow
    return integers((allowed, rule.limit, max(rule.limit - reply.used, 0), 0 if allowed else retry_seconds(reply), 0))


def reset(connection: RespConnection, name: str, key: str) -> bytes | LaterReply:
    """HEADGATE.RESET of a rule with concurrency."""
    found = slots_to_reset(connection.app.state, connection.scope, name, key)
    return now_or_later(connection, found[0][0].in_process, key, _reset(connection, found, connection.token))


async def _reset(
    connection: RespConnection, found: list[tuple[ConcurrencyRule, str]], token_digest: bytes | None
) -> bytes:
    await free_slots(connection.app, connection.scope, token_digest, found)
    return OK
