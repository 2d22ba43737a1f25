"""Those of this process who stand in one queue: a step says for hundreds of them that they are there.

Its answer tells who was served or is out, so nobody has to ask for itself; messages only make that quicker. A thread of
the place does it (see `headgate.coordination.timers`): an event loop that has 10,000 tasks to attend to may be late.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from headgate._lifecycle import in_each_child
from headgate.clock import MICROSECONDS
from headgate.coordination.loops import running_loop
from headgate.coordination.place import Place, serves
from headgate.coordination.site import RETRY, Site, Turn
from headgate.coordination.states.machine import Operation, Reply
from headgate.coordination.timers import Timer
from headgate.errors import StoreUnavailable

ALIVE = 5.0  # seconds without a word after which whoever waits is taken for dead
BEAT = 2.0  # seconds between two words
SOON = 0.1  # seconds until the first
BATCH = 500  # who are spoken for in one step


class Standing:
    """One who stands in line, and what became of it: waiting, served or gone."""

    def __init__(self, id: str, waiter: str, turn: Turn) -> None:
        self.id = id
        self.waiter = waiter
        self.turn = turn
        self.state = "waiting"


class Crowd:
    """All of one queue. Thread-safe."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.RLock()  # a garbage collection may call us while we hold it
        self._all: dict[str, Standing] = {}
        self._next: deque[Standing] = deque()  # to be spoken for before everybody is again
        self._timer: Timer | None = None
        self._sleeps = False
        self._begun = site.clock.now()  # when everybody was to be spoken for last
        self._took = 0  # microseconds
        self._loop: asyncio.AbstractEventLoop | None = None

    def join(self, standing: Standing) -> None:
        with self._lock:
            self._all[standing.waiter] = standing
            self._next.append(standing)
            if self._timer is None or self._sleeps:
                self._later(SOON)
            self._loop = running_loop() or self._loop

    def leave(self, standing: Standing) -> bool:
        """Whether nobody is left."""
        with self._lock:
            del self._all[standing.waiter]
            if not self._all and self._timer:
                self._timer.cancel()
            return not self._all

    def _later(self, seconds: float, sleeps: bool = False) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer, self._sleeps = self._site.place.timers.later(seconds, self._speak), sleeps

    def _speak(self) -> None:
        """Say for those whose turn it is that they are there, and tell those who are not in line any more."""
        every = round(min(BEAT, self._site.place.poll * BEAT) * MICROSECONDS)  # sooner where there are no messages
        wait = RETRY
        with self._lock:
            self._sleeps = False
            now = self._site.clock.now()
            everybody = now >= self._begun + every
            if everybody:
                self._next, self._begun = deque(self._all.values()), now
        try:
            while some := self._some():
                for each, state in zip(some, self._ask(some), strict=True):
                    if state != "waiting":
                        each.state = state
                        each.turn.wake()
            took = self._site.clock.now() - now
            if everybody:  # where that takes long, the next word may be late
                self._took = min(took, round(ALIVE * MICROSECONDS))
            wait = max((self._begun + every - now - took) / MICROSECONDS, SOON)
        except StoreUnavailable:
            with self._lock:
                self._next.extendleft(some)
        finally:
            with self._lock:
                if self._all:
                    self._later(wait, sleeps=wait > RETRY)

    def _some(self) -> list[Standing]:
        with self._lock:
            some: list[Standing] = []
            while self._next and len(some) < BATCH:
                each = self._next.popleft()
                if each.waiter in self._all and each.turn.runs():
                    some.append(each)
            return some

    def _ask(self, some: list[Standing]) -> Reply:
        alive = round(ALIVE * MICROSECONDS) + self._took
        pairs = (part for each in some for part in (each.id, each.waiter))
        step = Operation("heartbeat", ("", "", alive, 0, alive, "", *pairs))
        return self._site.step(step) if serves(self._site.place, tasks=False) else self._ask_in_loop(step)

    def _ask_in_loop(self, step: Operation) -> Reply:
        loop = self._loop
        if loop is None or not loop.is_running() or loop is running_loop():
            raise StoreUnavailable("the event loop has ended, or would have to wait for itself")
        asked = asyncio.run_coroutine_threadsafe(self._site.astep(step), loop)
        try:
            return asked.result(ALIVE)
        except (TimeoutError, CancelledError) as error:
            asked.cancel()
            raise StoreUnavailable("the event loop stands still, or ends") from error


_CROWDS: dict[tuple[Place, str], Crowd] = {}
_LOCK = threading.RLock()


@contextmanager
def standing(site: Site, id: str, waiter: str, turn: Turn) -> Iterator[Standing]:
    """Be spoken for, with all others of this process who stand in that queue."""
    key, one = (site.place, site.channel), Standing(id, waiter, turn)
    with _LOCK:
        crowd = _CROWDS.get(key)
        if crowd is None:
            crowd = _CROWDS[key] = Crowd(site)
        crowd.join(one)
    try:
        yield one
    finally:
        with _LOCK:
            if crowd.leave(one) and _CROWDS.get(key) is crowd:
                del _CROWDS[key]


@in_each_child
def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    _CROWDS.clear()  # they are the parent's
