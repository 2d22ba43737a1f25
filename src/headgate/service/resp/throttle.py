"""CL.THROTTLE key max_burst count period [quantity], answered as redis-cell does.

The limit is `count` in `period` seconds with a burst of max_burst + 1, under `gcra`. Each such limit is a rule of its
own, made when it is first asked for; they are counted together, as the rule `cl.throttle`. `on_store_error` is that of
the default rule.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.quota import Quota
from headgate.service.resp.replies import LaterReply, key_text
from headgate.service.resp.wire import Command, error
from headgate.service.responses import record, store_unavailable
from headgate.service.rules import CompiledRule
from headgate.service.settings import THROTTLE_RULE, Policy, RuleSettings
from headgate.stores.base import is_in_process, is_per_process
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.service.app import App
    from headgate.service.resp.connection import RespConnection

MAX_LIMITS = 1000  # kept at least, those used last; up to twice as many
MAX_SHARED_LIMITS = 64  # on a shared store, where each is a file
MOST = {"max_burst": 999_999_999, "count": 1_000_000_000, "period": 316_224_000, "quantity": 1_000_000_000}
NEW_LIMIT_CALLS = 32  # calls that take as long as to make a limit
USAGE = error("usage: CL.THROTTLE key max_burst count period [quantity]")

Limit = tuple[bytes, bytes, bytes]  # max_burst, count and period as they were sent


class ThrottleLimits:
    """The rules that CL.THROTTLE uses, in two generations: `recent`, and those used before that."""

    def __init__(self, app: App) -> None:
        self.recent: dict[Limit, CompiledRule] = {}
        self._before: dict[Limit, CompiledRule] = {}
        self._app = app
        self._slot = app.counters.slot(f"{THROTTLE_RULE} GCRA")
        self._policy: Policy = "allow"
        self.follow_settings()

    def follow_settings(self) -> None:
        """Use the default rule's policy from now on. In memory it is never needed, so the rules stay."""
        policy = self._app.state.rule_set.rules["default"].on_store_error
        if policy != self._policy and not is_in_process(self._app.store):
            self.recent, self._before = {}, {}
        self._policy = policy

    def find(self, connection: RespConnection, limit: Limit) -> CompiledRule:
        """The rule of a limit that is not among the recent ones. Raises ValueError for numbers that cannot be used."""
        burst, count, period = (_number(name, word) for name, word in zip(MOST, limit, strict=False))
        canonical = (b"%d" % burst, b"%d" % count, b"%d" % period)
        rule = self.recent.get(canonical)
        if rule is not None:
            return rule  # it was sent with zeros in front
        rule = self._before.pop(canonical, None)
        if rule is None:
            rule = self._make(burst, count, period)
            connection.turn.spend(NEW_LIMIT_CALLS)
        if len(self.recent) >= MAX_LIMITS:
            self._rotate()
        self.recent[canonical] = rule
        return rule

    def _make(self, burst: int, count: int, period: int) -> CompiledRule:
        if count == 0 or period == 0:
            raise ValueError("count and period must be at least 1: zero rates are not supported")
        store = self._app.store
        if is_in_process(store) and not is_per_process(store) and len(self.recent) >= MAX_SHARED_LIMITS:
            known = f"{MAX_SHARED_LIMITS} different limits (max_burst, count, period) are in use"
            raise ValueError(f"{known}, as many as a shared store takes; use fewer, or a Redis server as the store")
        quota = str(Quota(count, float(period), burst + 1))
        settings = RuleSettings(on_store_error=self._policy)
        return CompiledRule(THROTTLE_RULE, "gcra", settings, quota, store, self._slot)

    def _rotate(self) -> None:
        """Forget the limits that were not used for as long as it took to use `MAX_LIMITS` others."""
        if isinstance(self._app.store, MemoryStore):
            for rule in self._before.values():
                self._app.store.drop(rule.limiter.rule)
        self._before, self.recent = self.recent, {}


def throttle(connection: RespConnection, words: Command) -> bytes | LaterReply:
    began = perf_counter_ns()
    if not connection.may_check:
        return connection.refusal("check")
    try:
        quantity = 1 if len(words) == 5 else _number("quantity", words[5])
        if len(words) > 6:
            return USAGE
        limit = (words[2], words[3], words[4])
        rule = connection.limits.recent.get(limit) or connection.limits.find(connection, limit)
    except IndexError:
        return USAGE
    except ValueError as reason:
        return connection.problem(str(reason))
    key = key_text(words[1])
    if rule.take_now is None or rule.peek_now is None:
        return LaterReply(key, _throttle_later(connection, rule, key, quantity, began))
    try:
        if 0 < quantity <= rule.capacity:
            made = rule.take_now(key, quantity)
        else:
            made = rule.peek_now(key, 0)
    except StoreUnavailable as reason:
        return connection.problem(store_unavailable(connection.app, rule, key, reason).detail)
    return _reply(connection.app, rule, key, quantity, made, began)


async def _throttle_later(connection: RespConnection, rule: CompiledRule, key: str, quantity: int, began: int) -> bytes:
    limiter, app = rule.limiter, connection.app
    try:
        if 0 < quantity <= rule.capacity:
            made = await limiter.try_acquire(key, quantity)
        else:
            made = await limiter.peek(key, 0)
    except StoreUnavailable as reason:
        raise store_unavailable(app, rule, key, reason) from None
    return _reply(app, rule, key, quantity, made, began)


def _reply(app: App, rule: CompiledRule, key: str, quantity: int, made: Decision, began: int) -> bytes:
    """The five integers; a quantity of 0 looks, and one above the limit is denied for ever."""
    limit, left, reset = rule.capacity, made.remaining, -(-made.reset_us // 1_000_000)
    if 0 < quantity <= limit:
        if record(app, rule, key, made, perf_counter_ns() - began):
            return b"*5\r\n:0\r\n:%d\r\n:%d\r\n:-1\r\n:%d\r\n" % (limit, left, reset)
        retry = -(-made.retry_us // 1_000_000) or 1
        return b"*5\r\n:1\r\n:%d\r\n:%d\r\n:%d\r\n:%d\r\n" % (limit, left, retry, reset)
    return b"*5\r\n:%d\r\n:%d\r\n:%d\r\n:-1\r\n:%d\r\n" % (quantity > 0, limit, left, reset)


def _number(name: str, word: bytes) -> int:
    most = MOST[name]
    if not word.isdigit() or len(word) > 20 or (value := int(word)) > most:
        shown = word[:40].decode(errors="replace")
        raise ValueError(f"{name} must be a whole number from 0 to {most}, got {shown!r}")
    return value
