"""One rule of a limiter on one Redis: each call checks its arguments, asks Redis, or lets the fallback answer.

The calls are plans (see `headgate._plan`); `RedisBackend` runs them for threads, `AsyncRedisBackend` for asyncio.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from redis.exceptions import RedisError, ResponseError

from headgate._plan import arun, run
from headgate.clock import SYSTEM_CLOCK
from headgate.decision import Decision
from headgate.fallback import Fallback
from headgate.keys import check_key
from headgate.redis.execute import Executor, Request
from headgate.redis.script import LimiterCall, LimiterScript
from headgate.redis.topology import Unreached
from headgate.rule import Rule, check_permits
from headgate.stores.base import StoreHealth

if TYPE_CHECKING:
    from headgate.stores.redis import RedisStore

STORE_ERRORS = (RedisError, OSError)  # of a call, all of which `on_store_error` answers


class RuleOnRedis:
    """What both backends share: the rule's script, its fallback, and the plans of its calls."""

    in_process = False

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.script = LimiterScript(rule, store.prefix, store.hash_keys, store.clock)
        self.fallback = Fallback(on_store_error, rule, store.clock)
        self._store = store
        self.time_limit: float | None = None  # seconds for a call; None: the store's time-out

    def with_timeout(self, seconds: float) -> Self:
        """The same backend with *seconds* for a call, if that is less than the store's time-out."""
        other = copy.copy(self)
        other.time_limit = seconds
        return other

    def _take(self, executor: Executor, key: str, permits: int) -> Generator[Request, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity)
        fallback, time_limit = self.fallback, self.time_limit
        try:
            if fallback.debts and (debt := fallback.take_debt(key)):
                time_limit = yield from self.charge(executor, key, debt, time_limit)
            reply = yield from executor.plan(self.script, LimiterCall("take", key, permits), time_limit)
        except STORE_ERRORS as error:
            return fallback.take(key, permits, error, refused=refused(error), unsure=may_have_run(error))
        if fallback.refused_at:
            fallback.record_success()
        decision = self.script.decision(reply)
        if fallback.local:
            fallback.follow_store(key, decision)
        return decision

    def charge(
        self, executor: Executor, key: str, debt: int, time_limit: float | None
    ) -> Generator[Request, Any, float]:
        """Charge what was granted in an outage, once at most; returns the seconds that are left for the check."""
        begun = monotonic()
        try:
            yield from executor.plan(self.script, LimiterCall("charge", key, debt), time_limit)
        except Unreached:
            self.fallback.record_debt(key, debt)  # it was not sent
            raise
        return max((time_limit or executor.timeout) - (monotonic() - begun), 0.001)

    def _peek(self, executor: Executor, key: str, permits: int) -> Generator[Request, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity, 0)
        try:
            reply = yield from executor.plan(self.script, LimiterCall("peek", key, permits), self.time_limit)
        except STORE_ERRORS as error:
            return self.fallback.peek(key, permits, error, refused=refused(error))
        if self.fallback.refused_at:
            self.fallback.record_success()
        return self.script.decision(reply)

    def _refund(self, executor: Executor, key: str, permits: int) -> Generator[Request, Any, bool]:
        key, permits = check_key(key), check_permits(permits)
        left = self.fallback.refund(key, permits)
        try:
            if left:
                yield from executor.plan(self.script, LimiterCall("refund", key, left), self.time_limit)
        except STORE_ERRORS as error:
            self.fallback.record_failure(error, refused=refused(error))
            return False
        return True

    def _reset(self, executor: Executor, key: str) -> Generator[Request, Any, bool]:
        key = check_key(key)
        self.fallback.reset(key)
        try:
            yield from executor.plan(self.script, LimiterCall("reset", key, 1), self.time_limit)
        except STORE_ERRORS as error:
            self.fallback.record_failure(error, refused=refused(error))
            return False
        return True

    def _health(self, executor: Executor | None) -> StoreHealth:
        """How the store has served the calls so far; sends nothing."""
        breakers = executor.breakers() if executor else []
        return StoreHealth(
            state="open" if any(breaker.open for breaker in breakers) else "closed",
            failures=max((breaker.failures for breaker in breakers), default=0),
            opened=sum(breaker.opened for breaker in breakers),
            degraded=self.fallback.answers,
            last_error=next((breaker.last_error for breaker in breakers if breaker.last_error), ""),
        )


def refused(error: Exception) -> bool:
    """Whether the server answered, with an error."""
    return isinstance(error, ResponseError)


def may_have_run(error: Exception) -> bool:
    """Whether the server may have run the script although no reply came."""
    return not isinstance(error, ResponseError | Unreached)


class RedisBackend(RuleOnRedis):
    """One rule on one Redis, for threads."""

    def try_acquire(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.sync_executor()
        return run(self._take(executor, key, permits), executor.answer)

    def peek(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.sync_executor()
        return run(self._peek(executor, key, permits), executor.answer)

    def refund(self, key: str, permits: int = 1) -> bool:
        executor = self._store.sync_executor()
        return run(self._refund(executor, key, permits), executor.answer)

    def reset(self, key: str) -> bool:
        executor = self._store.sync_executor()
        return run(self._reset(executor, key), executor.answer)

    def store_health(self) -> StoreHealth:
        return self._health(self._store.sync_executor())


class AsyncRedisBackend(RuleOnRedis):
    """One rule on one Redis, for asyncio."""

    async def try_acquire(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.async_executor()
        return await arun(self._take(executor, key, permits), executor.answer)

    async def peek(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.async_executor()
        return await arun(self._peek(executor, key, permits), executor.answer)

    async def refund(self, key: str, permits: int = 1) -> bool:
        executor = self._store.async_executor()
        return await arun(self._refund(executor, key, permits), executor.answer)

    async def reset(self, key: str) -> bool:
        executor = self._store.async_executor()
        return await arun(self._reset(executor, key), executor.answer)

    def store_health(self) -> StoreHealth:
        return self._health(self._store.latest_executor())
