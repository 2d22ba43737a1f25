"""A lock that many processes share.

    with Lock("reindex", store="redis://...", ttl=30.0) as lock:
        write(row, fence=lock.fence)

The holder renews the lock every third of its TTL; a holder that dies loses it when the TTL is over. (`Acquisition` in
acquisition.py says when, sends the renewal and learns of a loss.) No TTL can stop a holder
that was paused and wakes up late, so each acquisition has a fence, a number that only grows: a database that refuses
writes with a smaller fence than it has seen is safe from such a holder. `lost` and `ensure_held` tell that the lock is
lost, before another holder can have it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from headgate._waiters import SignalSafeEvent
from headgate.clock import Clock
from headgate.coordination.acquisition import Acquisition, Event, HoldTerms, Ownership, keep_renewed
from headgate.coordination.arguments import check_seconds, check_timeout, check_ttl, deadline_after
from headgate.coordination.backend import running_task
from headgate.coordination.runner import AsyncTool, Plan, ThreadTool, Ticket, Tool, wait_in_queue
from headgate.coordination.states.lock import LOCK
from headgate.coordination.states.machine import Operation
from headgate.errors import LockLost, LockTimeout
from headgate.stores.base import Store
from headgate.telemetry.watching import Sample


class _AnyLock(Tool):
    """What `Lock` and `AsyncLock` share: the constructor, the properties, and plans (see `headgate._plan`)."""

    def __init__(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        timeout: float | None = None,
        max_hold: float | None = None,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        ttl = check_ttl("ttl", ttl)
        max_hold = None if max_hold is None else check_seconds("max_hold", max_hold)
        self._set_up(LOCK, name, store, clock)
        self._timeout = check_timeout(timeout)
        self._terms = HoldTerms(self._runner, ttl, max_hold)
        self._ownership = Ownership()
        self._unconfirmed_owner = ""  # of a request without an answer; it may hold the lock
        self._never_lost: Event = asyncio.Event() if self._for_tasks else SignalSafeEvent()

    @property
    def held(self) -> bool:
        """Whether the lock is ours for all we know. Does not ask the store."""
        acquisition = self._current()
        return acquisition is not None and acquisition.is_held()

    @property
    def fence(self) -> int:
        """The number of our acquisition, also after its end; each is larger than the last. 0 before the first."""
        acquisition = self._current()
        return acquisition.fence if acquisition else 0

    def _gauges(self) -> Iterator[Sample]:
        yield from super()._gauges()
        yield Sample("headgate.lock.held", (), len(self._runner.counts.held()))

    def _current(self) -> Acquisition | None:
        return self._ownership.current(self._caller())

    def _lost_event(self) -> Event:
        acquisition = self._current()
        return acquisition.lost if acquisition else self._never_lost

    def _caller(self) -> object:
        """The running thread or task."""
        raise NotImplementedError

    def _acquire_plan(
        self, new_ticket: Callable[[], Ticket], timeout: float | None, lost: Event
    ) -> Plan[Acquisition | None]:
        acquisition = Acquisition(self._terms, lost)
        try:
            until = deadline_after(self._runner.clock, timeout)
            attempt = partial(self._attempt, acquisition)
            granted = yield from wait_in_queue(self._runner, new_ticket, attempt, until)
        except BaseException:
            if acquisition.unconfirmed:
                self._release_unconfirmed(acquisition)
            raise
        return acquisition if granted else None

    def _attempt(self, acquisition: Acquisition) -> Plan[tuple[bool | None, float]]:
        sent = self._runner.clock.now()
        acquisition.unconfirmed = True
        request = Operation("acquire", (acquisition.owner, self._terms.ttl_ms, self._unconfirmed_owner))
        granted, fence, wait_ms = yield request
        acquisition.unconfirmed = False
        if granted == 1:
            self._unconfirmed_owner = ""
            acquisition.grant(fence, sent)
            return True, 0.0
        return None, self._runner.next_poll(wait_ms / 1000)

    def _check_no_reentry(self, caller: object, timeout: float | None) -> None:
        """Raise if *caller* holds the lock and would wait for itself for ever."""
        acquisition = self._ownership.last_of(caller)
        if timeout is None and acquisition and acquisition.is_held():
            raise RuntimeError(f"the lock {self.name!r} is not reentrant, and its holder asks for it again")

    def _release_plan(self) -> Plan[bool]:
        acquisition = self._ownership.take_for_release(self._caller())
        if acquisition is None:
            return False
        try:
            return (yield from acquisition.release())
        finally:
            if acquisition.unconfirmed:
                self._release_unconfirmed(acquisition)

    def _ensure_held_plan(self) -> Plan[None]:
        acquisition = self._current()
        if acquisition is None or not (yield from acquisition.confirm()):
            raise self._lost_error()

    def _locked_plan(self) -> Plan[bool]:
        _, held = yield Operation("peek", ("", self._terms.ttl_ms))
        return bool(held)

    def _force_release_plan(self) -> Plan[bool]:
        [released] = yield Operation("evict", (secrets.token_hex(12), self._terms.ttl_ms))
        return bool(released)

    def _release_unconfirmed(self, acquisition: Acquisition) -> None:
        """Release in the background what may be ours, unless this is a forked child.

        The next acquire of this object names this owner id, so it can take over at once.
        """
        if acquisition.process == os.getpid():
            self._unconfirmed_owner = acquisition.owner
            acquisition.release_in_background()

    def _lost_error(self) -> LockLost:
        return LockLost(f"the lock {self.name!r} is not ours: it was lost or never acquired")

    def _timeout_error(self) -> LockTimeout:
        return LockTimeout(f"the lock {self.name!r} did not come free within {self._timeout} s")


class Lock(_AnyLock, ThreadTool):
    """A lock that threads and processes share.

    Args:
        name: what is locked
        store: a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
        ttl: seconds after which a holder that died loses it; a live one renews it every third of that
        timeout: seconds that ``with`` waits for it; then `LockTimeout`. None: for ever
        max_hold: seconds after which it is not renewed any more, even if the holder is alive
        clock: a `headgate.testing.ManualClock`, in tests
    """

    @property
    def lost(self) -> threading.Event:
        """An event that is set when our acquisition is lost, before another holder can have the lock."""
        return cast(threading.Event, self._lost_event())

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait for the lock.

        Args:
            timeout: seconds to wait; 0: not at all, None: for ever

        Returns:
            Whether it is ours now.

        Raises:
            StoreUnavailable: the store does not answer: at once without a time-out, else when it is over
        """
        caller = self._caller()
        self._check_no_reentry(caller, timeout)
        # The event for `lost`: the thread that renews the lock sets it, and a signal must not leave it unusable.
        acquisition = self._runner.run(self._acquire_plan(self._runner.ticket, timeout, SignalSafeEvent()))
        if acquisition is None:
            self._ownership.note_failed_acquire(caller)
            return False
        self._ownership.add(acquisition, caller)
        keep_renewed(self._runner, acquisition)
        return True

    def release(self) -> bool:
        """Release it; False if it was not ours any more. Retried in the background if the store does not answer."""
        return self._runner.run(self._release_plan())

    def ensure_held(self) -> None:
        """Renew it now (after *max_hold*: only ask); raise `LockLost` if it is not ours any more. One round trip."""
        self._runner.run(self._ensure_held_plan())

    def locked(self) -> bool:
        """Whether the lock is held, by this object or any other. One round trip."""
        return self._runner.run(self._locked_plan())

    def force_release(self) -> bool:
        """Take the lock from its holder, for an operator; False if it is not held.

        The holder notices at its next renewal or `ensure_held`; until then only a fence keeps it from writing.
        """
        return self._runner.run(self._force_release_plan())

    def __enter__(self) -> Self:
        if not self.acquire(self._timeout):
            self._ownership.forget_failed_acquire(self._caller())
            raise self._timeout_error()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        released = not self._ownership.already_released(self._caller()) and self.release()
        if not released and error is None:
            raise self._lost_error()

    def _caller(self) -> threading.Thread:
        return threading.current_thread()


class AsyncLock(_AnyLock, AsyncTool):
    """`Lock` for asyncio: the same arguments, the same methods, awaited.

    Args:
        cancel_when_lost: cancel the body of an ``async with`` when the lock is lost; the block raises `LockLost`
    """

    def __init__(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        cancel_when_lost: bool = False,
        timeout: float | None = None,
        max_hold: float | None = None,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(name, ttl=ttl, timeout=timeout, max_hold=max_hold, store=store, clock=clock)
        self._cancel_when_lost = cancel_when_lost

    @property
    def lost(self) -> asyncio.Event:
        """An event that is set when our acquisition is lost, before another holder can have the lock."""
        return cast(asyncio.Event, self._lost_event())

    def acquire(self, timeout: float | None = None) -> Coroutine[Any, Any, bool]:
        """Wait for the lock, up to *timeout* seconds (0: do not wait); whether it is ours now.

        It belongs to the task that called `acquire()`, even if another task (as in ``asyncio.wait_for``) awaits it.
        """
        return self._acquire_for(running_task(), timeout)

    async def _acquire_for(self, caller: asyncio.Task[Any] | None, timeout: float | None) -> bool:
        caller = caller or asyncio.current_task()  # the coroutine was made before there was an event loop
        self._check_no_reentry(caller, timeout)
        plan = self._acquire_plan(self._runner.async_ticket, timeout, asyncio.Event())
        acquisition = await self._runner.arun(plan)
        if acquisition is None:
            self._ownership.note_failed_acquire(caller)
            return False
        self._ownership.add(acquisition, caller)
        keep_renewed(self._runner, acquisition, asyncio.get_running_loop())
        return True

    async def release(self) -> bool:
        """Release it; False if it was not ours any more. Retried in the background if the store does not answer."""
        return await self._runner.arun(self._release_plan())

    async def ensure_held(self) -> None:
        """Renew it now (after *max_hold*: only ask); raise `LockLost` if it is not ours any more. One round trip."""
        await self._runner.arun(self._ensure_held_plan())

    async def locked(self) -> bool:
        """Whether the lock is held, by this object or any other. One round trip."""
        return await self._runner.arun(self._locked_plan())

    async def force_release(self) -> bool:
        """Take the lock from its holder, for an operator; False if it is not held. See `Lock.force_release`."""
        return await self._runner.arun(self._force_release_plan())

    async def __aenter__(self) -> Self:
        if not await self.acquire(self._timeout):
            self._ownership.forget_failed_acquire(asyncio.current_task())
            raise self._timeout_error()
        if self._cancel_when_lost and (acquisition := self._current()):
            acquisition.task = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        task, acquisition = asyncio.current_task(), self._current()
        released = not self._ownership.already_released(task) and await self.release()
        if acquisition and acquisition.was_cancelled_by_loss(error):
            raise self._lost_error() from error
        if not released and error is None:
            raise self._lost_error()

    def _caller(self) -> asyncio.Task[Any] | None:
        return running_task()
