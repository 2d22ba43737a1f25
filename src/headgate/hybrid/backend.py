"""A hybrid limiter's backends: one for threads, and one for asyncio with leases for each event loop.

LeaseTable      decides from a lease, and denies, without a round trip; else it calls `ask_redis`
LimiterLeases   adds waiters, releases and the limiter's counters
HybridBackend, EventLoopLeases   add `ask_redis`: wait for the answer of Redis in a thread, or in a task
"""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
from collections.abc import Coroutine
from typing import Any

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision
from headgate.hybrid import background
from headgate.hybrid.background import LoopLeaseManager, ThreadLeaseManager
from headgate.hybrid.limiter_leases import LeaseWaiter, LimiterLeases
from headgate.hybrid.protocol import accuracy_profile, quota_params
from headgate.keys import check_key
from headgate.rule import Rule, check_permits
from headgate.stores.base import Health, LeaseStore, StoreHealth, is_in_process


class HybridStore:
    """A store behind leases. Opened once, by one limiter."""

    def __init__(self, store: LeaseStore, owned: bool, accuracy: str | float, cold: str, max_keys: int) -> None:
        profile = accuracy_profile(accuracy)
        if cold not in ("wait", "optimistic"):
            raise ValueError(f"cold must be wait or optimistic, got {cold!r:.40}")
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ValueError(f"max_local_keys must be a whole number of at least 1, got {max_keys!r:.40}")
        self.store = store
        self.owned = owned
        self.profile = profile
        self.lease_options: dict[str, Any] = {"max_keys": max_keys, "optimistic": cold == "optimistic"}
        self.backends: list[HybridBackend] = []
        self.loops: dict[asyncio.AbstractEventLoop, EventLoopLeases] = {}

    def __repr__(self) -> str:
        return repr(self.store)

    def open(self, rule: Rule, on_store_error: str = "local") -> HybridBackend:
        quota_params(rule)  # refuses a rule that leases cannot serve
        if not is_in_process(self.store):
            self.store.open(rule)  # refuses a client for asyncio
        manager = _thread_manager(self.store)
        name = manager.ledgers.key_function(rule)
        backend = HybridBackend(manager, rule, self.profile, on_store_error, ledger_name=name, **self.lease_options)
        self.backends.append(backend)
        return backend

    def open_async(self, rule: Rule, on_store_error: str = "local") -> AsyncHybridBackend:
        quota_params(rule)
        if not is_in_process(self.store):
            self.store.open_async(rule)  # refuses a client for threads
        return AsyncHybridBackend(self, rule, on_store_error)

    def leases_of(self, loop: asyncio.AbstractEventLoop, rule: Rule, on_store_error: str) -> EventLoopLeases:
        """The leases of the running event loop, made when they are first needed."""
        if loop not in self.loops:
            for closed in [other for other in list(self.loops) if other.is_closed()]:
                self.loops.pop(closed, None)
            manager = _loop_manager(self.store, loop)
            name = manager.ledgers.key_function(rule)
            self.loops[loop] = EventLoopLeases(
                manager, rule, self.profile, on_store_error, ledger_name=name, **self.lease_options
            )
        return self.loops[loop]

    def health(self) -> Health:
        return self.store.health()

    async def ahealth(self) -> Health:
        return await self.store.ahealth()

    def close(self) -> None:
        """Give the leases back, within a second, and close connections that are ours."""
        for backend in self.backends:
            backend.close()
        if self.owned:
            self.store.close()

    async def aclose(self) -> None:
        """The same for the running event loop."""
        leases = self.loops.get(asyncio.get_running_loop())
        if leases:
            await leases.aclose()
        if self.owned:
            await self.store.aclose()

    def release_later(self) -> None:
        """Have the leases given back of a limiter that was collected without a call of `close`.

        The garbage collector may have interrupted any step, so the background thread or task does it.
        """
        for leases in [*self.backends, *self.loops.values()]:
            leases.manager.deferred.append(leases.release_unawaited)


class HybridBackend(LimiterLeases):
    """One rule, for threads."""

    manager: ThreadLeaseManager

    @property
    def clock(self) -> Clock:
        return self.manager.clock

    def peek(self, key: str, permits: int = 1, timeout: float | None = None) -> Decision:
        key, permits = check_key(key), check_permits(permits, self.rule.capacity, 0)
        known = self.peek_locally(key, permits)
        return self.ask_redis("peek", key, permits, timeout) if known is None else known

    def reset(self, key: str, timeout: float | None = None) -> bool:
        return not self.ask_redis("reset", check_key(key), 0, timeout).degraded

    def with_timeout(self, seconds: float) -> TimedHybridBackend:
        return TimedHybridBackend(self, seconds)

    def ask_redis(self, op: str, key: str, permits: int, timeout: float | None) -> Decision:
        """Wait for the answer of Redis; the policy answers after *timeout* seconds."""
        done = threading.Lock()  # and no Event: a signal handler inside Event.wait would keep others from setting it
        done.acquire()
        waiter = LeaseWaiter(op, permits, done.release)
        manager = self.manager
        if manager.called_from_signal_handler():  # the background thread waits for the lock of the interrupted step
            return self.answer_in_signal_handler(key, waiter, self.read_clock())
        if self.optimistic and op == "take":
            granted = self.grant_unasked(key, permits, self.read_clock())
            if granted:
                return granted
        try:
            self.queue_waiter(key, waiter, self.read_clock())
            while manager.cannot_start or not done.acquire(timeout=1.0 if timeout is None else max(timeout, 0.0)):
                if timeout is not None or manager.cannot_start:
                    return self.answer_by_policy(key, waiter, self.read_clock(), manager.cannot_start)
                manager.wake_background()  # starts a new thread, should the old one have died
        except BaseException:
            self.cancel_waiter(key, waiter)
            raise
        return waiter.answer()

    def close(self) -> None:
        if self.manager.called_from_signal_handler():  # in a signal handler: the interrupted step has to go on first
            self.manager.deferred.append(self.release_all)
            self.manager.wake_background()
            return
        self.release_all()
        self.manager.wait_until_released(self, background.RELEASE_TIMEOUT)
        self.unregister()


class TimedHybridBackend:
    """A `HybridBackend` whose calls wait for Redis no longer than *timeout* seconds; then the policy answers."""

    in_process = False

    def __init__(self, backend: HybridBackend, timeout: float) -> None:
        self.clock = backend.clock
        self._backend = backend
        self._timeout = timeout

    def try_acquire(self, key: str, permits: int = 1) -> Decision:
        decision: Decision = self._backend.try_acquire(key, permits, self._timeout)
        return decision

    def peek(self, key: str, permits: int = 1) -> Decision:
        return self._backend.peek(key, permits, self._timeout)

    def refund(self, key: str, permits: int = 1) -> bool:
        return self._backend.refund(key, permits)  # never waits

    def reset(self, key: str) -> bool:
        return self._backend.reset(key, self._timeout)

    def store_health(self) -> StoreHealth:
        return self._backend.store_health()

    def with_timeout(self, seconds: float) -> TimedHybridBackend:
        return TimedHybridBackend(self._backend, seconds)


class EventLoopLeases(LimiterLeases):
    """One rule, for one event loop."""

    manager: LoopLeaseManager

    async def ask_redis(self, op: str, key: str, permits: int, timeout: float | None) -> Decision:
        """Wait for the answer of Redis; the policy answers after *timeout* seconds."""
        if self.optimistic and op == "take" and not self.manager.called_from_signal_handler():
            granted = self.grant_unasked(key, permits, self.read_clock())
            if granted:
                return granted
        done: asyncio.Future[None] = self.manager.loop.create_future()
        waiter = LeaseWaiter(op, permits, functools.partial(_set, done))
        try:
            self.queue_waiter(key, waiter, self.read_clock())
            async with asyncio.timeout(timeout):
                await done
        except TimeoutError:
            return self.answer_by_policy(key, waiter, self.read_clock())
        except asyncio.CancelledError:
            self.cancel_waiter(key, waiter)
            raise
        return waiter.answer()

    async def aclose(self) -> None:
        self.release_all()
        await self.manager.wait_until_released(self, background.RELEASE_TIMEOUT)
        self.unregister()
        if not self.manager.active:
            await self.manager.stop()


class AsyncHybridBackend:
    """One rule, for asyncio: every event loop has leases of its own."""

    in_process = False

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str) -> None:
        self.clock: Clock = store.store.clock or SYSTEM_CLOCK
        self._store = store
        self._rule = rule
        self._policy = on_store_error
        self._latest: EventLoopLeases | None = None  # one attribute: threads with other event loops change it, too
        self._timeout: float | None = None

    def leases(self) -> EventLoopLeases:
        """The leases of the running event loop."""
        loop = asyncio.get_running_loop()
        latest = self._latest
        if latest is None or latest.manager.loop is not loop:
            self._latest = latest = self._store.leases_of(loop, self._rule, self._policy)
        return latest

    def try_acquire_now(self, key: str, permits: int = 1) -> Decision | Coroutine[Any, Any, Decision]:
        """The decision, if it needs no round trip, else the coroutine that makes it."""
        made: Decision | Coroutine[Any, Any, Decision] = self.leases().try_acquire(key, permits, self._timeout)
        return made

    async def try_acquire(self, key: str, permits: int = 1) -> Decision:
        made = self.leases().try_acquire(key, permits, self._timeout)
        return made if isinstance(made, Decision) else await made

    async def peek(self, key: str, permits: int = 1) -> Decision:
        key, permits = check_key(key), check_permits(permits, self._rule.capacity, 0)
        leases = self.leases()
        known = leases.peek_locally(key, permits)
        return await leases.ask_redis("peek", key, permits, self._timeout) if known is None else known

    async def refund(self, key: str, permits: int = 1) -> bool:
        return self.leases().refund(key, permits)

    async def reset(self, key: str) -> bool:
        return not (await self.leases().ask_redis("reset", check_key(key), 0, self._timeout)).degraded

    def with_timeout(self, seconds: float) -> AsyncHybridBackend:
        timed = copy.copy(self)
        timed._timeout = seconds
        return timed

    def store_health(self) -> StoreHealth:
        """Of the running event loop, or of the last one where the limiter was used."""
        try:
            leases = self._store.loops.get(asyncio.get_running_loop(), self._latest)
        except RuntimeError:
            leases = self._latest
        return leases.store_health() if leases else StoreHealth("closed")


def _thread_manager(store: LeaseStore) -> ThreadLeaseManager:
    """The manager of *store* for threads: one for all limiters that are given the same store."""
    found: ThreadLeaseManager | None = store.shared_objects.get("lease_manager")
    if found is None:
        found = store.shared_objects.setdefault("lease_manager", ThreadLeaseManager(store))
    return found


def _loop_manager(store: LeaseStore, loop: asyncio.AbstractEventLoop) -> LoopLeaseManager:
    """The same for the running event loop."""
    managers: dict[asyncio.AbstractEventLoop, LoopLeaseManager]
    managers = store.shared_objects.setdefault("loop_lease_managers", {})
    if loop not in managers:
        for closed in [other for other in list(managers) if other.is_closed()]:
            managers.pop(closed, None)
        managers[loop] = LoopLeaseManager(store)
    return managers[loop]


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
