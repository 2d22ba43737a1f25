"""A semaphore that many processes share: so many callers at once, and no more.

    erp = Semaphore("erp", limit=50, store="redis://...", lease=30.0)
    with erp.acquire(timeout=10.0):
        call()

What a caller acquires is a lease of some weight; the leases of a semaphore weigh *limit* together at most. The holder
renews its lease every third of its time; the room of a holder that dies is free when the lease is over. Callers that
find no room queue, in their process and in the store, and get it in the order in which they came: a heavy one is not
overtaken by light ones for which there would be room. As with a lock, each acquisition has a fence that only grows.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headgate._waiters import SignalSafeEvent
from headgate.clock import Clock
from headgate.coordination.acquisition import Event, keep_renewed
from headgate.coordination.adaptive import Adaptive
from headgate.coordination.arguments import check_count, check_seconds, check_ttl, deadline_after
from headgate.coordination.runner import Acquiring, AsyncTool, Plan, ThreadTool, Ticket, Tool, wait_in_queue
from headgate.coordination.semaphore_leases import (
    AsyncSemaphoreLease,
    SemaphoreAcquisition,
    SemaphoreLease,
    SemaphoreTerms,
)
from headgate.coordination.states.semaphore import SEMAPHORE
from headgate.errors import LockTimeout
from headgate.stores.base import Store
from headgate.telemetry.watching import Sample


@dataclass(frozen=True, slots=True)
class SemaphoreStatus:
    """What `Semaphore.status` reports.

    Attributes:
        limit: the one that holds now
        in_use: the weight of all leases
        holders: how many leases there are
        waiting: callers that are queued in the store
    """

    limit: int  # the one that holds now
    in_use: int  # the weight of all leases; more than the limit where that was lowered
    holders: int  # leases
    waiting: int  # callers that are queued in the store: the first of each process

    @property
    def available(self) -> int:
        """How much weight is free."""
        return max(self.limit - self.in_use, 0)


class _AnySemaphore(Tool):
    """What `Semaphore` and `AsyncSemaphore` share: the constructor, and plans (see `headgate._plan`)."""

    _kind = "semaphore"

    def __init__(
        self,
        name: str,
        *,
        limit: int,
        adaptive: Adaptive | None = None,
        lease: float = 30.0,
        max_hold: float | None = None,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        limit, lease = check_count("limit", limit), check_ttl("lease", lease)
        if adaptive is not None and not isinstance(adaptive, Adaptive):
            raise TypeError(f"adaptive must be such as Adaptive(min=5, max=200), got {adaptive!r:.80}")
        max_hold = None if max_hold is None else check_seconds("max_hold", max_hold)
        if adaptive is not None:
            adaptive.settings(limit)  # raises if the limit is not within its bounds
        self._set_up(SEMAPHORE, name, store, clock)
        self._terms = SemaphoreTerms(self._runner, lease, max_hold, limit, adaptive)

    def _gauges(self) -> Iterator[Sample]:
        yield from super()._gauges()
        yield Sample("headgate.semaphore.in_use", (), sum(one.weight for one in self._runner.counts.held()))
        yield Sample("headgate.semaphore.limit", (), self._terms.process_limit.limit or self._terms.limit)

    def _acquire_plan(
        self, new_ticket: Callable[[], Ticket], timeout: float | None, weight: int, lost: Event
    ) -> Plan[SemaphoreAcquisition]:
        # With an adaptive limit, a caller that weighs more than the least limit could wait at the head of the queue for
        # growth that needs the successes of others.
        least = self._terms.adaptive.min if self._terms.adaptive else self._terms.limit
        self._terms.check_weight(check_count("weight", weight), least)
        until = deadline_after(self._runner.clock, timeout)
        self._terms.begin_use()
        acquisition = SemaphoreAcquisition(self._terms, lost, weight, until)
        try:
            if (yield from wait_in_queue(self._runner, new_ticket, acquisition.attempt, until)):
                return acquisition
            raise LockTimeout(f"the semaphore {self.name!r} had no room for weight {weight} within {timeout} s")
        except BaseException:
            acquisition.withdraw()
            raise

    def _status_plan(self) -> Plan[SemaphoreStatus]:
        in_use, holders, waiting, limit = yield self._terms.operation("status")
        return SemaphoreStatus(limit, in_use, holders, waiting)

    def _force_release_plan(self) -> Plan[bool]:
        released, _ = yield self._terms.operation("evict", secrets.token_hex(12))
        return bool(released)


class Semaphore(_AnySemaphore, ThreadTool):
    """A limit on how many callers do something at once, shared by threads and processes.

    Args:
        name: of the semaphore
        limit: the most that all leases may weigh together; the one that a process set last holds for all
        store: a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
        lease: seconds after which the room of a holder that died is free again; a live one renews it every third of
            that
        max_hold: seconds after which a lease is not renewed any more, even if its holder is alive
        adaptive: an `Adaptive`, by which the limit follows what the server bears; *limit* is where it starts
        clock: a `headgate.testing.ManualClock`, in tests
    """

    def acquire(self, timeout: float | None = None, weight: int = 1) -> SemaphoreLease:
        """Wait for room, and return a lease.

        Args:
            timeout: seconds to wait; 0: not at all, None: for ever
            weight: how much of the limit this caller takes

        Raises:
            LockTimeout: no room within *timeout* seconds
            StoreUnavailable: the store does not answer: at once without a time-out, else when it is over
        """
        # The event for `lost`: the thread that renews the lease sets it, and a signal must not leave it unusable.
        plan = self._acquire_plan(self._runner.ticket, timeout, weight, SignalSafeEvent())
        lease = SemaphoreLease(acquisition := self._runner.run(plan))
        keep_renewed(self._runner, acquisition)
        return lease

    def status(self) -> SemaphoreStatus:
        """How much is in use, and how many callers hold a lease and wait for one. One round trip."""
        return self._runner.run(self._status_plan())

    def force_release(self) -> bool:
        """End all leases, for an operator; False if there is none.

        Each holder notices at its next renewal or `ensure_held`; until then it goes on.
        """
        return self._runner.run(self._force_release_plan())


class AsyncSemaphore(_AnySemaphore, AsyncTool):
    """`Semaphore` for asyncio: the same arguments, the same methods, awaited.

        async with erp.acquire(timeout=10.0, weight=2) as lease:
            await call()

    Args:
        cancel_when_lost: cancel the body of an ``async with`` when its lease is lost; the block raises `LockLost`
    """

    def __init__(
        self,
        name: str,
        *,
        limit: int,
        adaptive: Adaptive | None = None,
        cancel_when_lost: bool = False,
        lease: float = 30.0,
        max_hold: float | None = None,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(name, limit=limit, lease=lease, max_hold=max_hold, adaptive=adaptive, store=store, clock=clock)
        self._terms.cancel_when_lost = cancel_when_lost

    def acquire(self, timeout: float | None = None, weight: int = 1) -> Acquiring[AsyncSemaphoreLease]:
        """Wait for room, and return a lease; raise `LockTimeout` after *timeout* seconds (0: at once; None: never)."""
        return Acquiring(self._acquire(timeout, weight))

    async def _acquire(self, timeout: float | None, weight: int) -> AsyncSemaphoreLease:
        plan = self._acquire_plan(self._runner.async_ticket, timeout, weight, asyncio.Event())
        lease = AsyncSemaphoreLease(acquisition := await self._runner.arun(plan))
        keep_renewed(self._runner, acquisition, asyncio.get_running_loop())
        return lease

    async def status(self) -> SemaphoreStatus:
        """How much is in use, and how many callers hold a lease and wait for one. One round trip."""
        return await self._runner.arun(self._status_plan())

    async def force_release(self) -> bool:
        """End all leases, for an operator; False if there is none. See `Semaphore.force_release`."""
        return await self._runner.arun(self._force_release_plan())
