"""HEADGATE.CHECK, HEADGATE.PEEK and HEADGATE.RESET: the rules of the service, as its HTTP API applies them.

CHECK and PEEK are answered with five integers: allowed (1 or 0), limit, remaining, seconds after which a retry
succeeds (0 if allowed), seconds until the key is as good as new. RESET is answered with OK.
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, StoreUnavailable
from headgate.keys import check_key
from headgate.service.checks import reset_key
from headgate.service.event_log import log_reset
from headgate.service.problem import HTTPError
from headgate.service.resolve import keys_to_reset, resolve_request
from headgate.service.resp.wire import OK, Command, error, integers
from headgate.service.responses import bad_check, record, store_unavailable
from headgate.service.rules import CompiledRule

if TYPE_CHECKING:
    from headgate.service.app import App
    from headgate.service.resp.connection import RespConnection


MAX_PERMITS = 1_000_000_000


class LaterReply(NamedTuple):
    """A reply that the store is asked for; commands of one connection about one key are run one after the other."""

    key: str
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


def check(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.CHECK rule key [permits]: spend."""
    began = perf_counter_ns()
    if not connection.may_check:
        return connection.refusal("check")
    try:
        rule, key, exempt, permits = _resolved(connection, words, least=1)
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
        rule, key, exempt, permits = _resolved(connection, words, least=0)
    except HTTPError as reason:
        return connection.problem(reason.detail)
    if exempt:
        return _reply(decision(True, rule.capacity, rule.capacity), True)
    return _now_or_later(connection, rule, key, _peek_later(connection, rule, key, permits * rule.cost))


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


def _now_or_later(
    connection: RespConnection, rule: CompiledRule, key: str, reply: Coroutine[Any, Any, bytes]
) -> bytes | LaterReply:
    """The reply itself where the store needs no round trip: the coroutine then ends without waiting."""
    if rule.take_now is None:
        return LaterReply(key, reply)
    try:
        reply.send(None)
    except StopIteration as end:
        found: bytes = end.value
        return found
    except HTTPError as reason:
        return connection.problem(reason.detail)
    reply.close()
    raise RuntimeError("a store that decides in the process has waited")


def reset(connection: RespConnection, words: Command) -> bytes | LaterReply:
    """HEADGATE.RESET rule key: forget the key."""
    if not connection.may("admin"):
        return connection.refusal("admin")
    if len(words) != 3:
        return error("usage: HEADGATE.RESET rule key")
    state = connection.app.state
    try:
        key = key_text(words[2])
        found = keys_to_reset(state, connection.scope, words[1].decode(errors="replace"), None, key)
    except HTTPError as reason:
        return connection.problem(reason.detail)
    return _now_or_later(connection, found[0][0], key, _reset_later(connection, found, connection.token))


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


def _resolved(connection: RespConnection, words: Command, least: int) -> tuple[CompiledRule, str, bool, int]:
    """The rule, the key, whether it is exempt, and the permits of a command. Raises `HTTPError`."""
    if not 3 <= len(words) <= 4:
        raise HTTPError(400, f"usage: {words[0].decode(errors='replace').upper()} rule key [permits]")
    permits = 1
    if len(words) == 4:
        text = words[3].decode(errors="replace")
        if not words[3].isdigit() or len(words[3]) > 20 or not least <= (permits := int(text)) <= MAX_PERMITS:
            raise HTTPError(400, f"permits must be a whole number of at least {least}, got {text!r:.40}")
    name = words[1].decode(errors="replace")
    state = connection.app.state
    rule, key, exempt = resolve_request(state, connection.scope, name, None, key_text(words[2]))
    return rule, key, exempt, permits
