"""HEADGATE.CHECK, .PEEK, .RESET and .BOOK: the rules of the service, as its HTTP API applies them.

CHECK and PEEK are answered with five integers: allowed (1 or 0), limit, remaining, seconds after which a retry
succeeds (0 if allowed), seconds until the key is as good as new. RESET is answered with OK. BOOK is answered with the
first four of CHECK, and the milliseconds after which the work may start.
"""

from __future__ import annotations

import math
from time import perf_counter_ns
from typing import TYPE_CHECKING

from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, StoreUnavailable
from headgate.service.bookings import book_slot, delay_of
from headgate.service.checks import reset_key
from headgate.service.event_log import log_reset
from headgate.service.resolve import keys_to_reset, resolve_request
from headgate.service.resp import slots
from headgate.service.resp.replies import LaterReply, key_text, now_or_later, parse_words
from headgate.service.resp.wire import OK, Command, error, integers
from headgate.service.responses import bad_check, record, store_unavailable
from headgate.service.rsgi import HTTPError
from headgate.service.rules import CompiledRule

if TYPE_CHECKING:
    from headgate.service.app import App
    from headgate.service.resp.connection import RespConnection

FORM = "rule key [permits]"
BOOK_FORM = "rule key id [permits]"


def check(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.CHECK rule key [permits]: spend."""
    began = perf_counter_ns()
    if not connection.may_check:
        return connection.refusal("check")
    try:
        name, given_key, permits = parse_words(words, FORM, least=1)
        rule, key, exempt = resolve_request(connection.app.state, connection.scope, name, None, given_key)
        cost = permits * rule.cost
        if exempt:
            return _counted(connection.app, rule, key, decision(True, rule.capacity, rule.capacity), began)
        if rule.take_now is None:
            return LaterReply(key, _check_later(connection, rule, key, cost, began))
        try:
            made = rule.take_now(key, cost)
        except (InvalidKey, InvalidPermits) as reason:
            raise bad_check(rule, cost, reason) from None
        except StoreUnavailable as reason:
            raise store_unavailable(connection.app, rule, key, reason) from None
    except HTTPError as reason:
        return connection.problem(reason.detail)
    return _counted(connection.app, rule, key, made, began)


async def _check_later(connection: RespConnection, rule: CompiledRule, key: str, cost: int, began: int) -> bytes:
    try:
        made = await rule.limiter.try_acquire(key, cost)
    except (InvalidKey, InvalidPermits) as reason:
        raise bad_check(rule, cost, reason) from None
    except StoreUnavailable as reason:
        raise store_unavailable(connection.app, rule, key, reason) from None
    return _counted(connection.app, rule, key, made, began)


def book(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.BOOK rule key id [permits]: a slot for the id."""
    if not connection.may_check:
        return connection.refusal("check")
    try:
        name, given_key, permits = parse_words(words, BOOK_FORM, least=1, first=4)
        if len(words) < 4:
            raise HTTPError(400, f"usage: HEADGATE.BOOK {BOOK_FORM}")
        rule, key, exempt = resolve_request(connection.app.state, connection.scope, name, None, given_key)
    except HTTPError as reason:
        return connection.problem(reason.detail)
    reply = _book(connection, rule, key, exempt, key_text(words[3]), permits)
    return now_or_later(connection, rule.take_now is not None, key, reply)


async def _book(connection: RespConnection, rule: CompiledRule, key: str, exempt: bool, id: str, permits: int) -> bytes:
    began = perf_counter_ns()
    slot, made = await book_slot(connection.app, rule, key, exempt, id, permits)
    allowed = record(connection.app, rule, key, made, perf_counter_ns() - began)
    retry = 0 if allowed else -(-made.retry_us // 1_000_000) or 1
    delay = math.ceil(delay_of(rule, slot) * 1000)
    return integers((allowed, made.limit, made.remaining, retry, delay))


def _counted(app: App, rule: CompiledRule, key: str, made: Decision, began: int) -> bytes:
    return _reply(made, record(app, rule, key, made, perf_counter_ns() - began))


def _reply(made: Decision, allowed: bool) -> bytes:
    retry = 0 if allowed else -(-made.retry_us // 1_000_000) or 1
    return integers((allowed, made.limit, made.remaining, retry, -(-made.reset_us // 1_000_000)))


def peek(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.PEEK rule key [permits]: what is left, and whether the permits would be granted; spends nothing."""
    if not connection.may("read"):
        return connection.refusal("read")
    try:
        name, given_key, permits = parse_words(words, FORM, least=0)
        if name in connection.app.state.rule_set.concurrency_rules:
            return slots.peek(connection, name, given_key, permits)
        rule, key, exempt = resolve_request(connection.app.state, connection.scope, name, None, given_key)
    except HTTPError as reason:
        return connection.problem(reason.detail)
    if exempt:
        return _reply(decision(True, rule.capacity, rule.capacity), True)
    return now_or_later(
        connection, rule.take_now is not None, key, _peek_later(connection, rule, key, permits * rule.cost)
    )


async def _peek_later(connection: RespConnection, rule: CompiledRule, key: str, cost: int) -> bytes:
    try:
        now = await rule.limiter.peek(key, 0)
        would = await rule.limiter.peek(key, cost) if cost else now
    except (InvalidKey, InvalidPermits) as reason:
        raise bad_check(rule, cost, reason) from None
    except StoreUnavailable as reason:
        raise store_unavailable(connection.app, rule, key, reason) from None
    made = decision(would.allowed, now.limit, now.remaining, now.reset_us, would.retry_us, would.degraded)
    return _reply(made, made.allowed or rule.shadow)


def reset(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.RESET rule key: forget the key."""
    if not connection.may("admin"):
        return connection.refusal("admin")
    if len(words) != 3:
        return error("usage: HEADGATE.RESET rule key")
    state = connection.app.state
    try:
        name, key = words[1].decode(errors="replace"), key_text(words[2])
        if name in state.rule_set.concurrency_rules:
            return slots.reset(connection, name, key)
        found = keys_to_reset(state, connection.scope, name, None, key)
    except HTTPError as reason:
        return connection.problem(reason.detail)
    in_process = found[0][0].take_now is not None
    return now_or_later(connection, in_process, key, _reset_later(connection, found, connection.token))


async def _reset_later(
    connection: RespConnection, found: list[tuple[CompiledRule, str]], token_digest: bytes | None
) -> bytes:
    """*token_digest* is that of the command: the client may have sent AUTH or RESET since."""
    rule, key = found[0]
    try:
        for each_rule, each_key in reversed(found):
            await reset_key(each_rule, each_key)
    except StoreUnavailable as reason:
        raise store_unavailable(connection.app, rule, key, reason) from None
    log_reset(connection.app.state, connection.scope, token_digest, rule, key)
    return OK
