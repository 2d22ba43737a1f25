"""One rule on one Redis: what its calls do there, as plans, and the two gates, for threads and asyncio, to run them."""

from __future__ import annotations

import copy
from collections.abc import Coroutine, Generator
from time import monotonic
from typing import Any, Protocol

from redis.exceptions import RedisError, ResponseError

from headgate._plan import arun, run
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision
from headgate.fallback import Fallback
from headgate.keys import check_key
from headgate.redis.async_client import AsyncExecutor
from headgate.redis.script import Call, Script, still_owed
from headgate.redis.sync_client import SyncExecutor
from headgate.redis.topology import Unreached
from headgate.rule import Rule, check_permits
from headgate.stores.base import StoreHealth


class Links(Protocol):
    """What a gate needs of its store."""

    prefix: str
    hash_keys: bool
    clock: Clock | None

    def threads(self) -> SyncExecutor: ...
    def loop(self) -> AsyncExecutor: ...
    def latest(self) -> AsyncExecutor | None: ...


_FAILURES = (RedisError, OSError)


def _refused(error: Exception) -> bool:
    """Whether the server answered, with an error."""
    return isinstance(error, ResponseError)


def _unsure(error: Exception) -> bool:
    """Whether the server may have done what it was asked for, and nobody knows."""
    return not isinstance(error, ResponseError | Unreached)


class Plans:
    """What a gate does, as plans: check the arguments, ask Redis, or let the fallback answer."""

    def __init__(self, store: Links, rule: Rule, on_store_error: str) -> None:
        self.script = Script(rule, store.prefix, store.hash_keys, store.clock)
        self.fallback = Fallback(on_store_error, rule, store.clock)

    def take(self, key: str, permits: int) -> Generator[Call, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity)
        fallback = self.fallback
        spent = 0.0
        try:
            if fallback.owed and (debt := fallback.claim(key)):
                spent = yield from self._settle(key, debt)
            reply = yield Call("take", key, permits, spent)
        except _FAILURES as error:
            return fallback.take(key, permits, error, refused=_refused(error), unsure=_unsure(error))
        decision = self._decision(reply)
        if fallback.local:
            fallback.follow(key, decision)
        return decision

    def _settle(self, key: str, debt: int) -> Generator[Call, Any, float]:
        """Charge what was granted in the outage; returns the seconds that it took. It is charged once at most."""
        begun = monotonic()
        try:
            yield Call("charge", key, debt)
        except Unreached:
            self.fallback.owe(key, debt)  # nobody has heard of it
            raise
        return monotonic() - begun

    def peek(self, key: str, permits: int) -> Generator[Call, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity, 0)
        try:
            reply = yield Call("peek", key, permits)
        except _FAILURES as error:
            return self.fallback.peek(key, permits, error, refused=_refused(error))
        return self._decision(reply)

    def refund(self, key: str, permits: int) -> Generator[Call, Any, bool]:
        key, permits = check_key(key), check_permits(permits)
        left = self.fallback.forgive(key, permits)
        try:
            while left:
                left = still_owed((yield Call("refund", key, left)))
        except _FAILURES as error:
            self.fallback.note(error, refused=_refused(error))
            return False
        return True

    def reset(self, key: str) -> Generator[Call, Any, bool]:
        key = check_key(key)
        self.fallback.forget(key)
        try:
            yield Call("reset", key, 1)
        except _FAILURES as error:
            self.fallback.note(error, refused=_refused(error))
            return False
        return True

    def health(self, link: SyncExecutor | AsyncExecutor | None) -> StoreHealth:
        """What the caller's own calls have seen; asks nobody."""
        breakers = link.breakers() if link else []
        return StoreHealth(
            state="open" if any(breaker.open for breaker in breakers) else "closed",
            failures=max((breaker.failures for breaker in breakers), default=0),
            opened=sum(breaker.opened for breaker in breakers),
            degraded=self.fallback.answers,
            last_error=next((breaker.last_error for breaker in breakers if breaker.last_error), ""),
        )

    def _decision(self, reply: Any) -> Decision:
        if self.fallback.refused_at:
            self.fallback.accepted()
        return self.script.decision(reply)


def _left(within: float | None, timeout: float, call: Call) -> float | None:
    """What is left of a call's time; None: all of the store's."""
    return within if not call.spent else max((within or timeout) - call.spent, 0.001)


class RedisBackend:
    """One rule on one Redis, for threads."""

    in_process = False

    def __init__(self, store: Links, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.plans = Plans(store, rule, on_store_error)
        self._store = store
        self._within: float | None = None  # seconds; None: the store's time-out

    def try_acquire(self, key: str, permits: int = 1) -> Decision:
        return run(self.plans.take(key, permits), self._ask)

    def peek(self, key: str, permits: int = 1) -> Decision:
        return run(self.plans.peek(key, permits), self._ask)

    def refund(self, key: str, permits: int = 1) -> bool:
        return run(self.plans.refund(key, permits), self._ask)

    def reset(self, key: str) -> bool:
        return run(self.plans.reset(key), self._ask)

    def store_health(self) -> StoreHealth:
        return self.plans.health(self._store.threads())

    def within(self, seconds: float) -> RedisBackend:
        gate = copy.copy(self)
        gate._within = seconds
        return gate

    def _ask(self, call: Call) -> Any:
        link = self._store.threads()
        return link.ask(self.plans.script, call, _left(self._within, link.timeout, call))


class AsyncRedisBackend:
    """One rule on one Redis, for asyncio."""

    in_process = False

    def __init__(self, store: Links, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.plans = Plans(store, rule, on_store_error)
        self._store = store
        self._within: float | None = None  # seconds; None: the store's time-out

    def try_acquire(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]:
        return arun(self.plans.take(key, permits), self._ask)

    def peek(self, key: str, permits: int = 1) -> Coroutine[Any, Any, Decision]:
        return arun(self.plans.peek(key, permits), self._ask)

    def refund(self, key: str, permits: int = 1) -> Coroutine[Any, Any, bool]:
        return arun(self.plans.refund(key, permits), self._ask)

    def reset(self, key: str) -> Coroutine[Any, Any, bool]:
        return arun(self.plans.reset(key), self._ask)

    def store_health(self) -> StoreHealth:
        return self.plans.health(self._store.latest())

    def within(self, seconds: float) -> AsyncRedisBackend:
        gate = copy.copy(self)
        gate._within = seconds
        return gate

    def _ask(self, call: Call) -> Coroutine[Any, Any, Any]:
        link = self._store.loop()
        return link.ask(self.plans.script, call, _left(self._within, link.timeout, call))
