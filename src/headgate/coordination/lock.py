"""A lock that many processes share.

    with Lock("reindex", store="redis://...", ttl=30.0) as lock:
        write(row, fence=lock.fence)

Who holds it renews it every third of its TTL; who dies loses it after that. No TTL can stop a holder that was paused
and wakes up late, so each acquisition has a number that only grows, the fence: let whatever you write to refuse a
smaller one than it has seen. `lost` and `ensure_held` say when the lock is gone, before somebody else can have it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Coroutine
from random import Random
from types import TracebackType
from typing import Any, Self, cast

from headgate._waiters import SignalSafeEvent
from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import deadline, held_for, seconds
from headgate.coordination.holds import Event, Hold, Holds
from headgate.coordination.loops import running_task
from headgate.coordination.memory import Memory
from headgate.coordination.renewal import keep
from headgate.coordination.site import RETRY, Plan, Site, Turn, shorter
from headgate.coordination.states.lock import LOCK
from headgate.coordination.states.machine import Operation
from headgate.errors import LockLost, LockTimeout, StoreUnavailable
from headgate.stores.base import Store

DICE = Random()


class Plans:
    """What both locks do."""

    def __init__(self, name: str, store: str | Store, ttl: float, max_hold: float | None, clock: Clock | None) -> None:
        self.ttl = held_for("ttl", ttl)
        self.max_hold = None if max_hold is None else seconds("max_hold", max_hold)
        self.site = Site(LOCK, name, store, clock)
        self.clock = self.site.clock
        self.ttl_ms = round(self.ttl * 1000)
        # what two clocks may differ by in a TTL, and what a busy machine needs to act on the loss
        self.margin = 0 if isinstance(self.site.place, Memory) else round(self.ttl / 20 * MICROSECONDS)
        self.holds = Holds()
        self._unsure = ""  # may hold the lock: nobody heard the answer

    def acquire(self, turn: Turn, timeout: float | None, lost: Event) -> Plan[Hold | None]:
        until = deadline(self.clock, timeout)
        owner, process = secrets.token_hex(12), os.getpid()
        asked = False
        with turn:
            while True:
                pause: float | None = None  # until it is first
                problem = None
                # whose time is over asks once, first or not: an event loop before it may be blocked
                if turn.first or not (asked or until is None or self.clock.now() < until):
                    asked = True
                    pause = self.site.place.poll * DICE.uniform(0.8, 1.0)  # not in step with other processes
                    sent = self.clock.now()
                    try:
                        granted, fence, wait = yield Operation("acquire", (owner, self.ttl_ms, self._unsure))
                    except StoreUnavailable as error:
                        problem, pause = error, RETRY
                    except BaseException:
                        self._abandon(owner, process)
                        raise
                    else:
                        if granted == 1:
                            self._unsure = ""
                            most = None if self.max_hold is None else sent + round(self.max_hold * MICROSECONDS)
                            return Hold(owner, fence, self._until(sent), most, lost)
                        if wait > 0:
                            pause = min(pause, wait / 1000)
                    turn.listen()
                left = None if until is None else (until - self.clock.now()) / MICROSECONDS
                if problem and (left is None or left <= 0):
                    self._abandon(owner, process)
                    raise problem
                if left is not None and left <= 0:
                    return None
                try:
                    yield shorter(pause, left)
                except BaseException:
                    if problem:
                        self._abandon(owner, process)
                    raise

    def refuse_twice(self, caller: object, timeout: float | None) -> None:
        """Who waits for itself would do so for ever."""
        if timeout is None and self.is_held(self.holds.of(caller)):
            raise RuntimeError(f"the lock {self.site.name!r} is not reentrant, and held by who asks for it again")

    def renew(self, hold: Hold) -> Plan[None]:
        sent = self.clock.now()
        if hold.most is None or sent < hold.most:
            try:
                [ours] = yield Operation("renew", (hold.owner, self.ttl_ms))
            except StoreUnavailable:
                pass  # there is time for another try, or there is not
            else:
                if ours and not hold.over:
                    hold.until = self._until(sent)
                elif not hold.over:
                    hold.lose()
        if not hold.over and self.clock.now() >= hold.until:
            hold.lose()

    def release(self, hold: Hold) -> Plan[bool]:
        ours = self.clock.now() < hold.until and not hold.lost.is_set()
        hold.end()
        try:
            [released] = yield Operation("release", (hold.owner, self.ttl_ms))
        except StoreUnavailable:
            self._abandon(hold.owner, hold.process)
            return ours
        except BaseException:
            self._abandon(hold.owner, hold.process)
            raise
        return bool(released)

    def ensure_held(self, hold: Hold | None) -> Plan[None]:
        if hold is not None and not hold.over and hold.process == os.getpid():
            if hold.most is not None and self.clock.now() >= hold.most:
                yield from self._check(hold)
            yield from self.renew(hold)
            if not hold.over:
                return
        raise self.lost_error()

    def locked(self) -> Plan[bool]:
        _, held = yield Operation("peek", ("", self.ttl_ms))
        return bool(held)

    def force_release(self) -> Plan[bool]:
        [released] = yield Operation("evict", (secrets.token_hex(12), self.ttl_ms))
        return bool(released)

    def _check(self, hold: Hold) -> Plan[None]:
        """Ask whether *hold* still has the lock, without renewing it."""
        try:
            ours, _ = yield Operation("peek", (hold.owner, self.ttl_ms))
        except StoreUnavailable:
            return  # it is ours until its time is over, for all we know
        if not ours and not hold.over:
            hold.lose()

    def next_renewal(self, hold: Hold) -> float:
        """Seconds until *hold* is to be renewed: a third of the TTL, sooner when that has failed."""
        left = (hold.until - self.clock.now() + self.margin) / MICROSECONDS
        pause = self.ttl / 3 if left > self.ttl / 2 else self.ttl / 10
        return max(min(pause, left - self.margin / MICROSECONDS), 0.0)

    def is_held(self, hold: Hold | None) -> bool:
        if hold is None or hold.over or hold.process != os.getpid():
            return False
        return self.clock.now() < hold.until

    def lost_error(self) -> LockLost:
        return LockLost(f"the lock {self.site.name!r} is not ours: it was lost or never acquired")

    def timeout_error(self, timeout: float | None) -> LockTimeout:
        return LockTimeout(f"the lock {self.site.name!r} did not come free within {timeout} s")

    def _until(self, sent: int) -> int:
        return sent + self.ttl_ms * 1000 - self.margin

    def _abandon(self, owner: str, process: int) -> None:
        """Give back what may be ours, not a parent's. The next acquisition through this lock need not wait for it."""
        if process == os.getpid():
            self._unsure = owner
            self.site.insist(Operation("release", (owner, self.ttl_ms)), self._until(self.clock.now()), process)


class Lock:
    """A lock that threads and processes share.

    name      what is locked
    store     a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
    ttl       seconds after which a holder that died loses it; renewed every third of that
    timeout   seconds that ``with`` waits for it; then `LockTimeout`. None: for ever
    max_hold  seconds after which it is not renewed any more, whatever the holder does
    clock     a `headgate.testing.ManualClock`, in tests
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        ttl: float = 30.0,
        timeout: float | None = None,
        max_hold: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, ttl, max_hold, clock)
        self._plans.site.place.check(tasks=False)
        deadline(self._plans.clock, timeout)  # raises now, and not in a `with`, if it is none
        self._timeout = timeout
        self.name = name
        self._never = SignalSafeEvent()

    def __repr__(self) -> str:
        return f"<Lock {self._plans.site!r}>"

    @property
    def held(self) -> bool:
        """Whether it is ours for all we know; asks nobody."""
        return self._plans.is_held(self._own())

    @property
    def fence(self) -> int:
        """The number of our acquisition, also after it was lost or released; it grows with each. 0 before the first."""
        hold = self._own()
        return hold.fence if hold else 0

    @property
    def lost(self) -> threading.Event:
        """An event that is set when our acquisition is lost, before somebody else can have the lock."""
        hold = self._own()
        return cast(threading.Event, hold.lost) if hold else self._never

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait for the lock, up to *timeout* seconds (0: do not wait); whether it is ours now.

        Raises `StoreUnavailable` when Redis does not answer: at once without a time-out, else when it is over.
        """
        lost = SignalSafeEvent()  # who renews it rings, whatever a signal has interrupted here
        self._plans.refuse_twice(threading.current_thread(), timeout)
        hold = self._plans.site.run(lambda turn: self._plans.acquire(turn, timeout, lost))
        if hold is None:
            self._plans.holds.refuse(threading.current_thread())
            return False
        self._plans.holds.remember(hold, threading.current_thread())
        keep(self._plans, hold)
        return True

    def release(self) -> bool:
        """Let go; False if it was not ours any more. One that Redis cannot hear now is repeated until it does."""
        hold = self._plans.holds.take(threading.current_thread())
        return hold is not None and self._plans.site.run(lambda _: self._plans.release(hold))

    def ensure_held(self) -> None:
        """Renew it now, or after *max_hold* only ask; raises `LockLost` if it is not ours any more. One round trip."""
        hold = self._own()
        self._plans.site.run(lambda _: self._plans.ensure_held(hold))

    def locked(self) -> bool:
        """Whether the lock is held, by this object or any other. One round trip."""
        return self._plans.site.run(lambda _: self._plans.locked())

    def force_release(self) -> bool:
        """Take the lock from its holder, for an operator; False if it is not held.

        The holder loses it at its next renewal or `ensure_held`, and may write until then: only fences refuse that.
        """
        return self._plans.site.run(lambda _: self._plans.force_release())

    def close(self) -> None:
        """Let go of the connections, which all tools on this store share; the next call makes new ones."""
        self._plans.site.place.close()

    def __enter__(self) -> Self:
        if not self.acquire(self._timeout):
            self._plans.holds.excuse(threading.current_thread())
            raise self._plans.timeout_error(self._timeout)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        released = not self._plans.holds.left(threading.current_thread()) and self.release()
        if not released and error is None:
            raise self._plans.lost_error()

    def _own(self) -> Hold | None:
        return self._plans.holds.own(threading.current_thread())


class AsyncLock:
    """`Lock` for asyncio: the same arguments, the same methods, awaited.

    cancel_when_lost  cancel the body of an ``async with`` when the lock is lost; it ends with `LockLost`
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        ttl: float = 30.0,
        timeout: float | None = None,
        max_hold: float | None = None,
        cancel_when_lost: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, ttl, max_hold, clock)
        self._plans.site.place.check(tasks=True)
        deadline(self._plans.clock, timeout)  # raises now, and not in a `with`, if it is none
        self._timeout = timeout
        self._cancel_when_lost = cancel_when_lost
        self.name = name
        self._never = asyncio.Event()

    def __repr__(self) -> str:
        return f"<AsyncLock {self._plans.site!r}>"

    @property
    def held(self) -> bool:
        """Whether it is ours for all we know; asks nobody."""
        return self._plans.is_held(self._own())

    @property
    def fence(self) -> int:
        """The number of our acquisition, also after it was lost or released; it grows with each. 0 before the first."""
        hold = self._own()
        return hold.fence if hold else 0

    @property
    def lost(self) -> asyncio.Event:
        """An event that is set when our acquisition is lost, before somebody else can have the lock."""
        hold = self._own()
        return cast(asyncio.Event, hold.lost) if hold else self._never

    def acquire(self, timeout: float | None = None) -> Coroutine[Any, Any, bool]:
        """Wait for the lock, up to *timeout* seconds (0: do not wait); whether it is ours now.

        It belongs to the task that calls this, whichever awaits it: ``asyncio.wait_for`` may do so in one of its own.
        """
        return self._acquire(running_task(), timeout)

    async def _acquire(self, caller: asyncio.Task[Any] | None, timeout: float | None) -> bool:
        caller = caller or asyncio.current_task()  # made before there was an event loop
        self._plans.refuse_twice(caller, timeout)
        lost = asyncio.Event()
        hold = await self._plans.site.arun(lambda turn: self._plans.acquire(turn, timeout, lost))
        if hold is None:
            self._plans.holds.refuse(caller)
            return False
        self._plans.holds.remember(hold, caller)
        keep(self._plans, hold, asyncio.get_running_loop())
        return True

    async def release(self) -> bool:
        """Let go; False if it was not ours any more. One that Redis cannot hear now is repeated until it does."""
        hold = self._plans.holds.take(asyncio.current_task())
        return hold is not None and await self._plans.site.arun(lambda _: self._plans.release(hold))

    async def ensure_held(self) -> None:
        """Renew it now, or after *max_hold* only ask; raises `LockLost` if it is not ours any more. One round trip."""
        hold = self._own()
        await self._plans.site.arun(lambda _: self._plans.ensure_held(hold))

    async def locked(self) -> bool:
        """Whether the lock is held, by this object or any other. One round trip."""
        return await self._plans.site.arun(lambda _: self._plans.locked())

    async def force_release(self) -> bool:
        """Take the lock from its holder, for an operator; False if it is not held.

        The holder loses it at its next renewal or `ensure_held`, and may write until then: only fences refuse that.
        """
        return await self._plans.site.arun(lambda _: self._plans.force_release())

    async def aclose(self) -> None:
        """Let go of this event loop's connections; it does so itself when it ends."""
        await self._plans.site.place.aclose()

    async def __aenter__(self) -> Self:
        if not await self.acquire(self._timeout):
            self._plans.holds.excuse(asyncio.current_task())
            raise self._plans.timeout_error(self._timeout)
        if self._cancel_when_lost and (hold := self._own()):
            hold.task = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        task = asyncio.current_task()
        hold = self._own()
        cancelled = hold is not None and hold.task is task and hold.lost.is_set()
        released = not self._plans.holds.left(task) and await self.release()
        if cancelled and task and task.uncancel() == 0 and isinstance(error, asyncio.CancelledError | None):
            raise self._plans.lost_error() from error
        if not released and error is None:
            raise self._plans.lost_error()

    def _own(self) -> Hold | None:
        return self._plans.holds.own(running_task())
