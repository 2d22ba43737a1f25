"""Acquisitions of a lock, and which thread or task each of them belongs to.

Every thread or task that uses a `Lock` object has acquisitions of its own. One that has none speaks for another that
has: what one thread of an executor acquired, another may release. The exception is a caller that was just refused: it
would release what it did not get. What an acquisition does in the store is written as plans (see `headgate._plan`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import weakref
from typing import Protocol

from headgate.clock import MICROSECONDS
from headgate.coordination.runner import Plan, Runner
from headgate.coordination.states.machine import Operation
from headgate.coordination.timers import Timer
from headgate.errors import StoreUnavailable


class Event(Protocol):
    """A `threading.Event` or an `asyncio.Event`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


class LockTerms:
    """What all acquisitions of a `Lock` object have in common. Times in seconds."""

    def __init__(self, runner: Runner, ttl: float, max_hold: float | None) -> None:
        self.runner = runner
        self.clock = runner.clock
        self.ttl = ttl
        self.ttl_ms = round(ttl * 1000)
        self.max_hold = max_hold
        # What two clocks may differ by in a TTL, and what a busy machine needs to act on the loss.
        self.margin = 0 if runner.backend.in_process else round(ttl / 20 * MICROSECONDS)


class Acquisition:
    """One acquisition, from the first request until it is released or lost."""

    def __init__(self, terms: LockTerms, lost: Event) -> None:
        self.terms = terms
        self.owner = secrets.token_hex(12)
        self.lost = lost
        self.unanswered = False  # a request was sent, and it is not known whether it was granted
        self.fence = 0
        self.until = 0  # by our own clock, a little before it ends in the store
        self.renewable_until: int | None = None
        self.over = False
        self.released = False
        self.process = os.getpid()
        self.timer: Timer | None = None
        self.task: asyncio.Task[object] | None = None  # to be cancelled when the lock is lost

    def grant(self, fence: int, sent: int) -> None:
        """It was granted to a request that was sent at that time."""
        self.fence = fence
        self._extend(sent)
        if self.terms.max_hold is not None:
            self.renewable_until = sent + round(self.terms.max_hold * MICROSECONDS)

    def is_held(self) -> bool:
        """Whether it is ours for all we know."""
        return not self.over and self.process == os.getpid() and self.terms.clock.now() < self.until

    def renew(self) -> Plan[None]:
        sent = self.terms.clock.now()
        if self.renewable_until is None or sent < self.renewable_until:
            try:
                [ours] = yield self._operation("renew")
            except StoreUnavailable:
                pass  # there is time for another try, or there is not
            else:
                if ours and not self.over:
                    self._extend(sent)
                elif not self.over:
                    self.lose()
        self._lose_if_expired()

    def confirm(self) -> Plan[bool]:
        """Renew it, or only ask once *max_hold* is over; whether it is still held."""
        if self.over or self.process != os.getpid():
            return False
        if self.renewable_until is None or self.terms.clock.now() < self.renewable_until:
            yield from self.renew()
            return not self.over
        try:
            ours, _ = yield self._operation("peek")
        except StoreUnavailable:
            ours = True  # until its time is over, for all we know
        if not ours and not self.over:
            self.lose()
        self._lose_if_expired()
        return not self.over

    def release(self) -> Plan[bool]:
        ours = self.terms.clock.now() < self.until and not self.lost.is_set()
        self.end()
        self.unanswered = True
        try:
            [released] = yield self._operation("release")
        except StoreUnavailable:
            return ours
        self.unanswered = False
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
            self.lost.set()
            if self.task:
                self.task.cancel()

    def end(self) -> None:
        self.over = True
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
        self._refused: weakref.WeakSet[object] = weakref.WeakSet()
        self._last: Acquisition | None = None

    def add(self, acquisition: Acquisition, caller: object) -> None:
        self._by_caller[caller] = self._last = acquisition
        self._refused.discard(caller)

    def refuse(self, caller: object) -> None:
        """*caller* was refused: until its next `release` it speaks for itself only."""
        self._refused.add(caller)

    def forget_refusal(self, caller: object) -> None:
        """*caller* got an exception, so it will not call `release`."""
        self._refused.discard(caller)

    def of(self, caller: object) -> Acquisition | None:
        """What *caller* itself acquired last."""
        return None if caller is None else self._by_caller.get(caller)

    def has_released(self, caller: object) -> bool:
        """Whether *caller* has released what it acquired last."""
        mine = self.of(caller)
        return mine is not None and mine.released

    def current(self, caller: object) -> Acquisition | None:
        """What *caller* has to release, lost or not; else what another caller has; else the last there was."""
        mine = self.of(caller)
        if (mine and not mine.released) or (caller is not None and caller in self._refused):
            return mine
        return self._last if mine is None or (self._last and not self._last.released) else mine

    def take(self, caller: object) -> Acquisition | None:
        """The same, to be released, once; None if there is nothing. What a parent holds is not its child's."""
        acquisition = self.current(caller)
        if caller is not None:
            self._refused.discard(caller)
        if acquisition is None or acquisition.released or acquisition.process != os.getpid():
            return None
        acquisition.released = True
        return acquisition
