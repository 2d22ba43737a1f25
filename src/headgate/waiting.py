"""Waiting for permits: in line, first come first served, and never asking more often than the answer says.

Only the first of a key's line asks the store; it sleeps for the `retry_after` of the refusal and asks again. The
others sleep until they are first. Whoever leaves, served or not, wakes the next.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator

from headgate.clock import MICROSECONDS, Clock
from headgate.decision import Decision, decision
from headgate.errors import RateLimited
from headgate.processes import renew_after_fork
from headgate.rule import Rule


class Ask(enum.Enum):
    """What a waiter asks of its limiter. A number of seconds, or None for ever, is a wish to sleep."""

    TAKE = "take"
    PEEK = "peek"


Wait = Generator[Ask | float | None, Decision, Decision]


class Place:
    """A place in a line. *wake* ends the sleep of whoever holds it; it is called from any thread.

    *runs* says if whoever holds it can act: one in an event loop that stands still must not stop the others.
    """

    def __init__(self, key: str, wake: Callable[[], object], runs: Callable[[], bool] | None = None) -> None:
        self.key = key
        self.wake = wake
        self.runs = runs


class Line:
    """Who waits for which key. One for each limiter."""

    def __init__(self) -> None:
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Nobody stands here: those who wait do so in the parent, and nobody in the child could get past them."""
        self._lock = threading.RLock()  # who waits no longer may leave in a garbage collection, while we hold it
        self._places: dict[str, OrderedDict[Place, None]] = {}

    def join(self, place: Place) -> None:
        with self._lock:
            self._places.setdefault(place.key, OrderedDict())[place] = None

    def is_first(self, place: Place) -> bool:
        with self._lock:
            return self._first(place.key) is place

    def leave(self, place: Place) -> None:
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

    def _first(self, key: str) -> Place | None:
        for place in self._places.get(key, ()):
            if place.runs is None or place.runs():
                return place
        return None


class Stay:
    """A stay in line. It ends with whoever stays, even where a signal came on the way in or out: all would wait on."""

    _joined = False

    def __init__(self, line: Line, place: Place) -> None:
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


def acquire(line: Line, place: Place, clock: Clock, timeout: float | None) -> Wait:
    """Wait until the permits are granted; raise `RateLimited` once *timeout* seconds have passed."""
    deadline = None if timeout is None else clock.now() + round(timeout * MICROSECONDS)
    refusal, asked_at, pause = None, 0, None
    with Stay(line, place):
        while True:
            if line.is_first(place):
                refusal = yield Ask.TAKE
                if refusal.allowed:
                    return refusal
                asked_at, pause = clock.now(), refusal.retry_us
            if deadline is not None:
                left = deadline - clock.now()
                if left <= 0:
                    if refusal is None:  # never got to the front
                        refusal, asked_at = (yield Ask.PEEK), clock.now()
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
    for ask in (Ask.TAKE,) if patience is None else (Ask.PEEK, Ask.TAKE):
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
