"""Waiting for permits: in line, first come first served, and never asking more often than the answer says.

Only the first of a key's line asks the store; it sleeps for the `retry_after` of the refusal and asks again. The
others sleep until they are first. Whoever leaves, served or not, wakes the next.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator

from headgate._lifecycle import renew_after_fork
from headgate.clock import MICROSECONDS, Clock
from headgate.decision import Decision, decision
from headgate.errors import RateLimited
from headgate.rule import Rule


class SignalSafeEvent(threading.Event):
    """A `threading.Event` that stays usable when a signal handler interrupts it or raises inside it.

    The standard event holds a Python-level lock inside `set` and `wait`; a signal handler that interrupts one of them
    can leave that lock held for ever. This one is a single lock, acquired in one step: `_unset` is held until `set`.
    """

    def __init__(self) -> None:
        self._flag = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def __repr__(self) -> str:
        return f"<SignalSafeEvent: {'set' if self._flag else 'unset'}>"

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        try:
            self._unset.release()
        except RuntimeError:
            pass  # it was set already

    def clear(self) -> None:
        self._flag = False
        self._unset.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        was_set = self._flag
        if not was_set:
            try:
                was_set = self._unset.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            finally:
                # Leave the lock free for the other waiters until `clear`, even if a signal arrived just now.
                if self._flag:
                    try:
                        self._unset.release()
                    except RuntimeError:
                        pass
        return was_set


class WaiterRequest(enum.Enum):
    """What a waiter asks of its limiter. A number of seconds, or None for ever, is a wish to sleep."""

    TAKE = "take"
    PEEK = "peek"


Wait = Generator[WaiterRequest | float | None, Decision, Decision]


class Waiter:
    """A place in a line. *wake* ends the sleep of whoever holds it; it is called from any thread.

    *runs* says if whoever holds it can act: one in an event loop that stands still must not stop the others.
    """

    def __init__(self, key: str, wake: Callable[[], object], runs: Callable[[], bool] | None = None) -> None:
        self.key = key
        self.wake = wake
        self.runs = runs


class WaiterQueue:
    """Who waits for which key. One for each limiter."""

    def __init__(self) -> None:
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Nobody stands here: those who wait do so in the parent, and nobody in the child could get past them."""
        self._lock = threading.RLock()  # who waits no longer may leave in a garbage collection, while we hold it
        self._places: dict[str, OrderedDict[Waiter, None]] = {}

    def join(self, place: Waiter, at_front: bool = False) -> None:
        """Join the end of the line, or its front: for a caller that came when there was none."""
        with self._lock:
            places = self._places.setdefault(place.key, OrderedDict())
            places[place] = None
            if at_front:
                places.move_to_end(place, last=False)

    def is_empty(self, key: str) -> bool:
        """Whether *key* has no line."""
        return key not in self._places

    def is_first(self, place: Waiter) -> bool:
        with self._lock:
            return self._first(place.key) is place

    def leave(self, place: Waiter) -> None:
        """Leave, or go on leaving: a signal may have come in between."""
        with self._lock:
            places = self._places.get(place.key, OrderedDict())
            places.pop(place, None)
            if not places:
                self._places.pop(place.key, None)
        self.wake(place.key)

    def wake(self, key: str) -> None:
        """Let the first of *key*'s line ask again: something may have changed."""
        with self._lock:
            first = self._first(key)
        if first:
            first.wake()

    def wake_all(self) -> None:
        """Let the first of every line ask again."""
        with self._lock:
            keys = list(self._places)
        for key in keys:
            self.wake(key)

    def _first(self, key: str) -> Waiter | None:
        for place in self._places.get(key, ()):
            if place.runs is None or place.runs():
                return place
        return None


class Queued:
    """A stay in line. It ends with whoever stays, even where a signal came on the way in or out: all would wait on."""

    _joined = False

    def __init__(self, line: WaiterQueue, place: Waiter) -> None:
        self._line = line
        self._place = place

    def __enter__(self) -> None:
        self._joined = True
        self._line.join(self._place)

    def __exit__(self, *_: object) -> None:
        self._line.leave(self._place)
        self._joined = False

    def __del__(self) -> None:
        if self._joined:
            self._line.leave(self._place)


def acquire(line: WaiterQueue, place: Waiter, clock: Clock, timeout: float | None) -> Wait:
    """Wait until the permits are granted; raise `RateLimited` once *timeout* seconds have passed."""
    deadline = None if timeout is None else clock.now() + round(timeout * MICROSECONDS)
    refusal, asked_at, pause = None, 0, None
    with Queued(line, place):
        while True:
            if line.is_first(place):
                refusal = yield WaiterRequest.TAKE
                if refusal.allowed:
                    return refusal
                asked_at, pause = clock.now(), refusal.retry_us
            if deadline is not None:
                left = deadline - clock.now()
                if left <= 0:
                    if refusal is None:  # never got to the front
                        refusal, asked_at = (yield WaiterRequest.PEEK), clock.now()
                    raise RateLimited(place.key, _aged(refusal, clock.now() - asked_at))
                pause = left if pause is None else min(pause, left)
            yield None if pause is None else pause / MICROSECONDS


def pace(rule: Rule, key: str, permits: int, timeout: float | None) -> Wait:
    """Pour into the bucket now, sleep until what was in it before has run out.

    The place of one who is cancelled stays empty: to give it back would start somebody new together with the next.
    """
    patience = None if timeout is None else round(timeout * MICROSECONDS)
    quota = rule.quotas[0]
    own = -(-permits * quota.period_us // quota.limit)  # the time that this call's own water takes to run out
    for ask in (WaiterRequest.TAKE,) if patience is None else (WaiterRequest.PEEK, WaiterRequest.TAKE):
        answer = yield ask
        if not answer.allowed:
            raise RateLimited(key, answer)
        delay = max(answer.reset_us - own, 0)
        if patience is not None and delay > patience:
            late = decision(False, answer.limit, answer.remaining, answer.reset_us, delay - patience)
            raise RateLimited(key, late)
    if delay:
        yield delay / MICROSECONDS
    return answer


def _aged(refusal: Decision, by: int) -> Decision:
    """The refusal as it would read *by* microseconds later. At least one is left to wait: it was not allowed."""
    retry, reset = max(refusal.retry_us - by, 1), max(refusal.reset_us - by, 1)
    return decision(False, refusal.limit, refusal.remaining, reset, retry, refusal.degraded)
