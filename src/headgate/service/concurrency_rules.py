"""Rules that limit concurrency: slots that clients hold on lease, in the store of the service.

The slots of one key under one rule are a semaphore (see `headgate.coordination.states.semaphore`), in memory or in
Redis. The limit goes with each call, so leases outlive a reload of the rules. When the store does not answer, the
rule's `on_store_error` does:

allow   an acquire and a renewal are granted, and nothing is held
deny    an acquire is denied; a renewal and a release are errors
local   a semaphore of this worker decides, and goes on to know the leases that it granted
raise   all are errors
"""

from __future__ import annotations

import asyncio
import copy
from time import monotonic
from typing import Any, NamedTuple

from headgate.coordination.backend import CoordinationBackend, MemoryStates, open_backend
from headgate.coordination.states.machine import Operation, Reply
from headgate.coordination.states.semaphore import SEMAPHORE
from headgate.errors import StoreUnavailable
from headgate.service.lease_settings import DEFAULT_LEASE
from headgate.service.resolve import KeyedRule
from headgate.service.settings import RuleSettings, Settings
from headgate.stores.base import StateStore, Store, StoreHealth, kind_of

ACQUIRE = "take a slot with POST /api/v1/rate-limit/acquire or the command HEADGATE.ACQUIRE"
GIVE_BACK_PAUSE, GIVE_BACK_LONGEST_PAUSE = 0.1, 5.0  # seconds between two attempts to give a slot back
DENIED_FOR = 1_000_000  # microseconds after which to ask again when the store does not answer


class SlotReply(NamedTuple):
    """What an operation on the slots of a key gave."""

    granted: int  # 1, 0, or -1: the lease was released before
    used: int  # slots in use
    wait: int = 0  # microseconds: how long the lease lasts, or until the first one ends; -1: there is none
    degraded: bool = False
    unsure: bool = False  # the store may have done what it was asked for, but did not say so


class MaybeDone(StoreUnavailable):
    """The store was asked, and did not answer."""


def open_slots(store: Store, settings: Settings) -> CoordinationBackend:
    """What keeps the slots in *store*, the same at each call. Raises ValueError for a store that keeps none."""
    if not isinstance(store, StateStore):
        why = f"concurrency needs a Redis, or one worker, and the service runs on a {kind_of(store)} store"
        raise ValueError(f"{why}; restart it with a Redis")
    backend = open_backend(store, None)
    for states in (backend.states, backend.local_states):
        if isinstance(states, MemoryStates):
            states.max_states = settings.max_keys
    return backend


class LastStoreError:
    """Stands where other rules have a limiter: `record` asks it, by `store_health`, why the store did not answer."""

    last_error = ""

    def store_health(self) -> StoreHealth:
        return StoreHealth("closed", last_error=self.last_error)


def refuse_slots_apart(settings: Settings) -> None:
    """Raise ValueError if a rule limits concurrency: each worker would count for itself."""
    for name, rule in settings.rules.items():
        if rule.concurrency is not None:
            why = "concurrency needs a Redis, or one worker, and this service runs several workers in memory"
            raise ValueError(f"rules.{name}.concurrency: {why}; restart it")


class ConcurrencyRule(KeyedRule):
    """One rule: its limit, its lease, and the calls to the store."""

    LABEL = "CONCURRENCY"
    __slots__ = ("backend", "lease", "limit", "limiter", "overrides")

    def __init__(self, name: str, settings: RuleSettings, backend: CoordinationBackend, slot: int) -> None:
        super().__init__(name, "concurrency", settings, slot)
        self.backend = backend
        self.limit = settings.concurrency or 1
        self.lease = (settings.lease or DEFAULT_LEASE) * 1_000_000  # microseconds
        self.limiter = LastStoreError()
        limits = {key: limit for key, limit in settings.overrides.items() if isinstance(limit, int)}
        self.overrides = {key: self._with_limit(limit) for key, limit in limits.items()} or None

    def _with_limit(self, limit: int) -> ConcurrencyRule:
        other = copy.copy(self)
        other.limit, other.overrides = limit, None
        return other

    @property
    def in_process(self) -> bool:
        """Whether no call waits for a round trip."""
        return self.backend.in_process

    def info(self) -> dict[str, Any]:
        """How /actuator/info shows it."""
        return {"algorithm": self.LABEL, "concurrency": self.limit, "leaseSeconds": self.lease // 1_000_000}

    async def ask(self, operation: str, key: str, lease_id: str, permits: int = 1) -> SlotReply:
        """Run an operation of the semaphore on the slots of *key*. Raises `StoreUnavailable`."""
        name, wanted = self._state_of(key), self._operation(operation, lease_id, permits)
        try:
            reply = await self._run(name, wanted)
        except StoreUnavailable as error:
            self.limiter.last_error = str(error)
            return self._by_policy(name, wanted, error)._replace(unsure=isinstance(error, MaybeDone))
        if self.on_store_error == "local" and operation in ("renew", "release") and not reply[0]:
            local = self.backend.local_states.run(SEMAPHORE, name, wanted)
            if local[0] == 1:  # it was granted while the store did not answer
                return SlotReply(*local)._replace(degraded=True)
        return SlotReply(*reply)

    async def give_back(self, key: str, lease_id: str) -> None:
        """Release a lease that no client knows of: again and again, until the store answers or the lease has ended."""
        name, wanted = self._state_of(key), self._operation("release", lease_id, 1)
        until, pause = monotonic() + self.lease / 1_000_000, GIVE_BACK_PAUSE
        while monotonic() < until:
            try:
                await self._run(name, wanted)
                return
            except StoreUnavailable:
                await asyncio.sleep(pause)
                pause = min(2 * pause, GIVE_BACK_LONGEST_PAUSE)

    async def free_all(self, key: str, call_id: str) -> SlotReply:
        """End all leases of *key*. Raises `StoreUnavailable`, whatever `on_store_error` says."""
        name, wanted = self._state_of(key), self._operation("evict", call_id, 1)
        self.backend.local_states.run(SEMAPHORE, name, wanted)
        return SlotReply(*await self._run(name, wanted))

    async def _run(self, name: str, wanted: Operation) -> Reply:
        try:
            return await self.backend.states.run_async(SEMAPHORE, name, wanted)
        except StoreUnavailable as error:  # its text has the key, which must not be in a log
            kind = MaybeDone if _may_be_done(error.__cause__) else StoreUnavailable
            raise kind(str(error.__cause__ or error)) from None

    def _state_of(self, key: str) -> str:
        """The name of the semaphore of *key*; no name of a rule has a colon."""
        return f"{self.name}:{key}"

    def _operation(self, operation: str, lease_id: str, permits: int) -> Operation:
        return Operation(operation, (lease_id, self.lease, self.limit, permits))

    def _by_policy(self, name: str, wanted: Operation, error: StoreUnavailable) -> SlotReply:
        policy = self.on_store_error
        if policy == "local":
            return SlotReply(*self.backend.local_states.run(SEMAPHORE, name, wanted))._replace(degraded=True)
        if policy == "allow":
            granted = 0 if wanted.name == "release" else 1
            return SlotReply(granted, 0, self.lease if granted else 0, degraded=True)
        if policy == "deny" and wanted.name in ("acquire", "peek"):
            return SlotReply(0, self.limit, DENIED_FOR, degraded=True)
        raise error


def _may_be_done(cause: BaseException | None) -> bool:
    """Whether a call that failed because of *cause* was sent, and may have been run."""
    if cause is None:  # the store is in memory
        return False
    from headgate.redis.execute import NO_REPLY_ERRORS
    from headgate.redis.topology import Unreached

    return isinstance(cause, NO_REPLY_ERRORS) and not isinstance(cause, Unreached)
