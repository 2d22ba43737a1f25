"""What a tool does, run: plans that yield an `Operation`, or a `Pause` until the caller is woken or the time is over.

A `Site` runs plans (see `headgate._plan`), for threads and for asyncio. Whoever waits stands in a line, of which only
the first asks; so any number of callers who wait for the same thing cost a process one question at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from headgate._plan import arun, run
from headgate._waiters import SignalSafeEvent
from headgate._waiters import Waiter as Spot  # our own places are where states are
from headgate.clock import Clock
from headgate.coordination.errand import Errand
from headgate.coordination.place import place_of
from headgate.coordination.states.machine import Operation, Reply, StateMachine, entry_channel
from headgate.keys import check_key
from headgate.stores.base import Store

RETRY = 0.1  # seconds between tries while Redis does not answer

R = TypeVar("R")


class Pause(NamedTuple):
    """Sleep until woken, or for so many seconds; None: until woken."""

    seconds: float | None


Plan = Generator[Operation | Pause, Any, R]


def shorter(pause: float | None, left: float | None) -> Pause:
    """A pause for the shorter of two times; None is for ever."""
    times = [seconds for seconds in (pause, left) if seconds is not None]
    return Pause(min(times, default=None))


class Turn:
    """A caller's place in the line of its site. Only the first of a line asks; who leaves wakes the next."""

    _joined = _listens = False

    def __init__(
        self, site: Site, who: str, wake: Callable[[], object], runs: Callable[[], bool] | None = None
    ) -> None:
        self._site = site
        self._spot = Spot(entry_channel(site.channel, who), wake, runs)

    def __enter__(self) -> Turn:
        self._joined = True
        self._site.place.line.join(self._spot)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listens:
            self._listens = False
            self._site.place.leave(self._site.channel)
        self._site.place.line.leave(self._spot)
        self._joined = False

    def __del__(self) -> None:
        """Leave all the same where a signal came while it joined or left: nobody could get past it."""
        if self._joined:
            self.__exit__()

    def wake(self) -> None:
        """Let the caller look around."""
        self._spot.wake()

    def runs(self) -> bool:
        """Whether the caller can act: one in an event loop that stands still cannot."""
        return self._spot.runs is None or self._spot.runs()

    @property
    def first(self) -> bool:
        return self._site.place.line.is_first(self._spot)

    def listen(self) -> None:
        """Be woken by other processes, too."""
        if not self._listens:
            self._listens = True
            self._site.place.listen(self._site.channel)


class Site:
    """One name of one machine at one place: runs the plans of a tool."""

    def __init__(self, machine: StateMachine, name: str, store: str | Store, clock: Clock | None) -> None:
        self.machine = machine
        self.name = check_key(name, "name")
        self.place = place_of(store, clock)
        self.clock = self.place.clock
        self.channel = machine.keys(self.name)[0]
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"{self.name!r} at {self.place.shown}"

    def step(self, step: Operation) -> Reply:
        return self.place.step(self.machine, self.name, step)

    async def astep(self, step: Operation) -> Reply:
        return await self.place.astep(self.machine, self.name, step)

    def run(self, plan: Callable[[Turn], Plan[R]], who: str = "") -> R:
        """Run a plan in this thread; it is woken by what happens at this site, or only by what happens to *who*."""
        wake = SignalSafeEvent()

        def answer(request: Operation | Pause) -> Reply | None:
            if isinstance(request, Operation):
                wake.clear()  # what happens from here on is news
                return self.step(request)
            self.clock.wait(wake, request.seconds)
            wake.clear()  # whoever was woken looks around next, so nothing is missed
            return None

        return run(plan(Turn(self, who, wake.set)), answer)

    async def arun(self, plan: Callable[[Turn], Plan[R]], who: str = "") -> R:
        """Run a plan in this task."""
        wake = asyncio.Event()

        async def answer(request: Operation | Pause) -> Reply | None:
            if isinstance(request, Operation):
                wake.clear()
                return await self.astep(request)
            await self.clock.wait_async(wake, request.seconds)
            wake.clear()
            return None

        loop = asyncio.get_running_loop()
        return await arun(plan(Turn(self, who, partial(_set, loop, wake), loop.is_running)), answer)

    def insist(self, step: Operation, until: int, process: int) -> None:
        """Run *step* in the background until it was answered, or until that time: nobody waits for it.

        process  where there is something to undo: what its parent does does not end when a child forgets its copy
        """
        if process == os.getpid():
            Errand(self, step, until)

    def start(
        self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Task[None]:
        """Run *work* as a task of the running event loop that nobody waits for."""
        task = (loop or asyncio.get_running_loop()).create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
