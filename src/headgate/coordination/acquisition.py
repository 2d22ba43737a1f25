"""Acquisitions of a lock or a semaphore: how each is renewed, released or lost; which thread or task has a lock.

Every thread or task that uses a `Lock` object has its own acquisitions. A caller without one acts on the last of the
object, so that one thread of an executor may release what another has acquired. The exception is a caller whose last
acquire failed: its release must not free the lock of the thread or task that got it.

What an acquisition does in the store is written as plans (see `headgate._plan`).

`keep_renewed` is the heartbeat of what is held: a timer of the backend starts each renewal, in its own thread, or for a
lock of asyncio in the event loop of its holder. Its references are weak: if a holder drops its lock object without a
release, the lock is not renewed and expires. What is renewed learns from the reply whether it is lost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import weakref
from typing import Any, Protocol

from headgate.clock import MICROSECONDS
from headgate.coordination.backend import running_loop
from headgate.coordination.runner import Plan, Runner
from headgate.coordination.states.machine import Operation
from headgate.coordination.timers import Timer
from headgate.errors import StoreUnavailable


class Event(Protocol):
    """A `threading.Event` or an `asyncio.Event`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class HoldTerms:
    """What all acquisitions of a `Lock` or `Semaphore` object have in common. Times in seconds."""

    def __init__(self, runner: Runner, ttl: float, max_hold: float | None) -> None:
        self.runner = runner
        self.clock = runner.clock
        self.ttl = ttl
        self.ttl_ms = round(ttl * 1000)
        self.max_hold = max_hold
        # We take it for lost a little before Redis does: clocks run differently, and to act on the loss takes time.
        self.margin = 0 if runner.backend.in_process else round(ttl / 20 * MICROSECONDS)


class Acquisition:
    """One acquisition, from the first request until it is released or lost."""

    def __init__(self, terms: HoldTerms, lost: Event) -> None:
        self.terms = terms
        self.owner = secrets.token_hex(12)
        self.lost = lost
        self.unconfirmed = False  # an acquire or a release was sent, and its reply is not known
        self.fence = 0
        self.until = 0  # by our own clock, a little before it ends in the store
        self.renewable_until: int | None = None
        self.over = False
        self.released = False
        self.process = os.getpid()
        self.timer: Timer | None = None
        self.task: asyncio.Task[object] | None = None  # to be cancelled when this is lost

    def grant(self, fence: int, sent: int) -> None:
        """Begin it: a request that was sent at that time was granted."""
        self.fence = fence
        self._extend(sent)
        self.terms.runner.counts.hold(self)
        if self.terms.max_hold is not None:
            self.renewable_until = sent + round(self.terms.max_hold * MICROSECONDS)

    def is_held(self) -> bool:
        """Whether it is ours for all we know. Does not ask the store."""
        return not self.over and self.process == os.getpid() and self.terms.clock.now() < self.until

    def renew(self) -> Plan[None]:
        sent = self.terms.clock.now()
        if self.renewable_until is None or sent < self.renewable_until:
            try:
                ours, *_ = yield self._operation("renew")
            except StoreUnavailable:
                pass  # the next renewal tries again, if there is time
            else:
                if ours and not self.over:
                    self._extend(sent)
                elif not self.over:
                    self.lose()
        self._lose_if_expired()

    def confirm(self) -> Plan[bool]:
        """Renew it, or only ask if *max_hold* is over; whether it is still held."""
        if self.over or self.process != os.getpid():
            return False
        if self.renewable_until is None or self.terms.clock.now() < self.renewable_until:
            yield from self.renew()
            return not self.over
        try:
            ours, *_ = yield self._operation("peek")
        except StoreUnavailable:
            ours = True  # for all we know, until its TTL is over
        if not ours and not self.over:
            self.lose()
        self._lose_if_expired()
        return not self.over

    def release(self) -> Plan[bool]:
        ours = self.terms.clock.now() < self.until and not self.lost.is_set()
        self.end()
        self.unconfirmed = True
        try:
            released, *_ = yield self._operation("release")
        except StoreUnavailable:
            return ours
        self.unconfirmed = False
        return bool(released)

    def release_in_background(self) -> None:
        until = self.terms.clock.now() + self.terms.ttl_ms * 1000 - self.terms.margin
        self.terms.runner.retry_in_background(self._operation("release"), until, self.process)

    def seconds_to_renewal(self) -> float:
        """A third of the TTL, or less when a renewal has failed."""
        terms = self.terms
        left = (self.until - terms.clock.now() + terms.margin) / MICROSECONDS
        pause = terms.ttl / 3 if left > terms.ttl / 2 else terms.ttl / 10
        return max(min(pause, left - terms.margin / MICROSECONDS), 0.0)

    def lose(self) -> None:
        self.end()
        if not self.lost.is_set():
            self.terms.runner.counts.lose()
            self.lost.set()
            if self.task:
                self.task.cancel()

    def was_cancelled_by_loss(self, error: BaseException | None) -> bool:
        """Whether the running task was cancelled because this was lost, and for no other reason.

        *error* is what ended the body of the task's ``with``. The cancellation is taken back.
        """
        task = asyncio.current_task()
        if task is None or self.task is not task or not self.lost.is_set():
            return False
        return task.uncancel() == 0 and isinstance(error, asyncio.CancelledError | None)

    def end(self) -> None:
        self.over = True
        self.terms.runner.counts.end(self)
        if self.timer:
            self.timer.cancel()

    def _extend(self, sent: int) -> None:
        self.until = sent + self.terms.ttl_ms * 1000 - self.terms.margin

    def _lose_if_expired(self) -> None:
        if not self.over and self.terms.clock.now() >= self.until:
            self.lose()

    def _operation(self, name: str) -> Operation:
        return Operation(name, (self.owner, self.terms.ttl_ms))


class Ownership:
    """The last acquisition of each thread or task that uses one `Lock` object, and the last of all."""

    def __init__(self) -> None:
        self._by_caller: weakref.WeakKeyDictionary[object, Acquisition] = weakref.WeakKeyDictionary()
        self._failed: weakref.WeakSet[object] = weakref.WeakSet()
        self._last: Acquisition | None = None

    def add(self, acquisition: Acquisition, caller: object) -> None:
        self._by_caller[caller] = self._last = acquisition
        self._failed.discard(caller)

    def note_failed_acquire(self, caller: object) -> None:
        """*caller* did not get the lock: its next `release` must not release what another caller got."""
        self._failed.add(caller)

    def forget_failed_acquire(self, caller: object) -> None:
        """*caller* got an exception from ``with``, so there will be no `release` for that acquire."""
        self._failed.discard(caller)

    def last_of(self, caller: object) -> Acquisition | None:
        """The last acquisition of *caller* itself."""
        return None if caller is None else self._by_caller.get(caller)

    def already_released(self, caller: object) -> bool:
        """Whether the last acquisition of *caller* itself is released."""
        mine = self.last_of(caller)
        return mine is not None and mine.released

    def current(self, caller: object) -> Acquisition | None:
        """The acquisition that `held`, `fence` and `release` are about, if *caller* uses them.

        Its own, if that is not released, or if its last acquire failed. Else the last of all callers, if that is not
        released, or if it has none of its own. Else its own.
        """
        mine = self.last_of(caller)
        if (mine and not mine.released) or (caller is not None and caller in self._failed):
            return mine
        return self._last if mine is None or (self._last and not self._last.released) else mine

    def take_for_release(self, caller: object) -> Acquisition | None:
        """Mark the current acquisition as released and return it.

        None if it was released before, or if this is a forked child and the acquisition is its parent's.
        """
        acquisition = self.current(caller)
        if caller is not None:
            self._failed.discard(caller)
        if acquisition is None or acquisition.released or acquisition.process != os.getpid():
            return None
        acquisition.released = True
        return acquisition


class Renewable(Protocol):
    """An acquisition of a lock or a semaphore, or a lease of a member, once it is granted."""

    over: bool  # released or lost
    timer: Timer | None

    def renew(self) -> Plan[Any]: ...
    def seconds_to_renewal(self) -> float: ...


def keep_renewed(runner: Runner, held: Renewable, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Renew *held* again and again until it is over; in *loop*, or in a thread of the timers."""
    if held.over:
        return
    reference = weakref.ref(held)

    def due() -> None:
        held = reference()
        if held is None or held.over:
            return
        in_our_loop = runner.backend.in_process and running_loop() is loop  # a ManualClock was advanced there
        if loop is None or in_our_loop:
            runner.run(held.renew())
            keep_renewed(runner, held, loop)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(lambda: runner.start(_renew_in_loop(runner, held, loop)))

    held.timer = runner.backend.timers.later(held.seconds_to_renewal(), due)


async def _renew_in_loop(runner: Runner, held: Renewable, loop: asyncio.AbstractEventLoop) -> None:
    await runner.arun(held.renew())
    keep_renewed(runner, held, loop)
