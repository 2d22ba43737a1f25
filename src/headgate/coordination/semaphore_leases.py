"""Leases of a semaphore: room of some weight for one caller, renewed while it is held, released in the end.

What a lease does in the store is written as plans (see `headgate._plan`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from types import TracebackType
from typing import Self, cast
from weakref import WeakValueDictionary

from headgate.clock import MICROSECONDS
from headgate.coordination.acquisition import Acquisition, Event, HoldTerms
from headgate.coordination.adaptive import OVERLOADED, Adaptive
from headgate.coordination.backend import CoordinationBackend
from headgate.coordination.runner import Plan, Runner
from headgate.coordination.states.machine import Operation
from headgate.errors import LockLost, PermitsExceedLimit

WAITER_TTL = 5.0  # seconds without a request after which a waiter is taken for dead


class ProcessLimit:
    """The limit of a semaphore that this process has set last; the next claim of any object sends it."""

    def __init__(self) -> None:
        self.limit = 0
        self.adaptive: tuple[str, ...] = ()  # the settings of an adaptive limit, or nothing
        self.unsent = False  # True: the store may have another one, which is older


_LIMITS: WeakValueDictionary[tuple[CoordinationBackend, str], ProcessLimit] = WeakValueDictionary()


class SemaphoreTerms(HoldTerms):
    """What all acquisitions of a `Semaphore` object have in common."""

    def __init__(
        self, runner: Runner, lease: float, max_hold: float | None, limit: int, adaptive: Adaptive | None
    ) -> None:
        super().__init__(runner, lease, max_hold)
        self.limit = limit
        self.adaptive = adaptive
        self.settings = () if adaptive is None else (adaptive.settings(limit),)
        self.process_limit = _LIMITS.setdefault((runner.backend, runner.channel), ProcessLimit())
        self.used = False
        self.cancel_when_lost = False

    def begin_use(self) -> None:
        """Set the limit for all, if this object is used for the first time and its limit is new in this process."""
        if self.used:
            return
        self.used, known = True, self.process_limit
        if (known.limit, known.adaptive) != (self.limit, self.settings):
            known.limit, known.adaptive, known.unsent = self.limit, self.settings, True
            self.runner.backend.waiters.wake(self.runner.channel)  # the first waiter sends it: only that one asks

    def operation(self, name: str, id: str = "", weight: int = 1, *more: int | str) -> Operation:
        return Operation(name, (id, self.ttl_ms * 1000, self.process_limit.limit or self.limit, weight, *more))

    def check_weight(self, weight: int, limit: int) -> None:
        if weight > limit:
            why = f"more than the limit of {limit} of the semaphore {self.runner.name!r}"
            raise PermitsExceedLimit(f"weight {weight} is {why}: no wait would be long enough")


class SemaphoreAcquisition(Acquisition):
    """One acquisition, from the first request until it is released or lost."""

    def __init__(self, terms: SemaphoreTerms, lost: Event, weight: int, deadline: int | None) -> None:
        super().__init__(terms, lost)
        self.semaphore = terms
        self.weight = weight
        self._deadline = deadline  # in the clock's microseconds; None: never
        self._queued = False  # in the store, for all we know
        self._granted_at = 0  # in the clock's microseconds
        self.outcome: int | None = None  # how it ended, for an adaptive limit; None: not known yet

    def attempt(self) -> Plan[tuple[bool | None, float]]:
        """Ask for room once, as `wait_in_queue` wants it."""
        terms = self.semaphore
        sent = terms.clock.now()
        waits = self._deadline is None or sent < self._deadline
        self._queued = self._queued or waits
        self.unconfirmed = True
        known = terms.process_limit
        setting, waiter_ttl = (known.limit, known.adaptive), round(WAITER_TTL * MICROSECONDS) if waits else 0
        rest: tuple[int | str, ...] = (waiter_ttl, int(known.unsent), *known.adaptive)
        granted, _, wait, fence = yield terms.operation("claim", self.owner, self.weight, *rest)
        self.unconfirmed = False
        known.unsent = known.unsent and (known.limit, known.adaptive) != setting
        if granted == 1:
            self.grant(fence, sent)
            self._granted_at = terms.clock.now()
            return True, 0.0
        self._queued = waits and granted == 0
        if granted == -2:
            terms.check_weight(self.weight, wait)
        return None, terms.runner.next_poll(wait / MICROSECONDS)

    def withdraw(self) -> None:
        """Give up the request: leave the queue, and give back what may have been granted."""
        if self._queued or self.unconfirmed:
            self.release_in_background()

    def judge(self, error: BaseException | None) -> None:
        """Note how it ended, if that is not known yet, for an adaptive limit."""
        adaptive = self.semaphore.adaptive
        if self.outcome is None and adaptive is not None:
            seconds = (self.terms.clock.now() - self._granted_at) / MICROSECONDS
            self.outcome = adaptive.outcome(error, seconds)

    def release_once(self) -> Plan[bool]:
        """Release it; False if it was over before, or is that of a parent process."""
        if self.released or self.process != os.getpid():
            return False
        self.judge(None)
        self.released = True
        try:
            return (yield from self.release())
        finally:
            if self.unconfirmed:
                self.release_in_background()

    def ensure_held(self) -> Plan[None]:
        if not (yield from self.confirm()):
            raise self.lost_error()

    def lost_error(self) -> LockLost:
        return LockLost(f"the lease of the semaphore {self.terms.runner.name!r} is not ours: it was lost or released")

    def _operation(self, name: str) -> Operation:
        outcome = (self.outcome,) if name == "release" and self.outcome else ()
        return self.semaphore.operation(name, self.owner, self.weight, *outcome)


class _AnySemaphoreLease:
    """What `SemaphoreLease` and `AsyncSemaphoreLease` share: all that does not ask the store."""

    def __init__(self, acquisition: SemaphoreAcquisition) -> None:
        self._acquisition = acquisition
        self._runner = acquisition.terms.runner
        self.weight = acquisition.weight
        self.fence = acquisition.fence  # a number that grows with every acquisition

    @property
    def held(self) -> bool:
        """Whether it is ours for all we know. Does not ask the store."""
        return self._acquisition.is_held()

    def overloaded(self) -> None:
        """Say that the server had too much to do; an adaptive limit shrinks when the lease is released."""
        self._acquisition.outcome = OVERLOADED

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._runner!r}, weight {self.weight}>"


class SemaphoreLease(_AnySemaphoreLease):
    """What `Semaphore.acquire` gives, for as long as it is held. ``with`` releases it at the end."""

    @property
    def lost(self) -> threading.Event:
        """An event that is set when it is lost, before another caller can have its room."""
        return cast(threading.Event, self._acquisition.lost)

    def release(self) -> bool:
        """Release it; False if it was not ours any more. Retried in the background if the store does not answer."""
        return self._runner.run(self._acquisition.release_once())

    def ensure_held(self) -> None:
        """Renew it now (after *max_hold*: only ask); raise `LockLost` if it is not ours any more. One round trip."""
        self._runner.run(self._acquisition.ensure_held())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._acquisition.judge(error)
        if not (self._acquisition.released or self.release()) and error is None:
            raise self._acquisition.lost_error()


class AsyncSemaphoreLease(_AnySemaphoreLease):
    """`SemaphoreLease` for asyncio."""

    @property
    def lost(self) -> asyncio.Event:
        """An event that is set when it is lost, before another caller can have its room."""
        return cast(asyncio.Event, self._acquisition.lost)

    async def release(self) -> bool:
        """Release it; False if it was not ours any more. Retried in the background if the store does not answer."""
        return await self._runner.arun(self._acquisition.release_once())

    async def ensure_held(self) -> None:
        """Renew it now (after *max_hold*: only ask); raise `LockLost` if it is not ours any more. One round trip."""
        await self._runner.arun(self._acquisition.ensure_held())

    async def __aenter__(self) -> Self:
        if self._acquisition.semaphore.cancel_when_lost:
            self._acquisition.task = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._acquisition.judge(error)
        released = self._acquisition.released or await self.release()
        if self._acquisition.was_cancelled_by_loss(error):
            raise self._acquisition.lost_error() from error
        if not released and error is None:
            raise self._acquisition.lost_error()
