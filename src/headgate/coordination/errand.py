"""Steps that are to be done though nobody waits for them: to give back what a caller who is gone may have taken.

An errand runs in the event loop of its caller, or in a thread of the timers if there is none; and in a thread when
the loop ends before it is done. A process that ends waits a moment for what is left.
"""

from __future__ import annotations

import asyncio
import time
from time import monotonic
from typing import TYPE_CHECKING

from headgate._lifecycle import before_exit, in_each_child
from headgate.coordination.loops import running_loop
from headgate.coordination.place import serves
from headgate.coordination.states.machine import Operation
from headgate.errors import StoreUnavailable

if TYPE_CHECKING:
    from headgate.coordination.site import Site

EVERY = 0.25  # seconds between two tries
AT_EXIT = 2.0  # seconds that a process waits before it ends; after that, the TTL has to do

_UNDER_WAY: set[Errand] = set()


class Errand:
    """Run *step* until it was answered, or until that time."""

    def __init__(self, site: Site, step: Operation, until: int) -> None:
        self._site = site
        self._step = step
        self._until = until
        self._later = site.place.timers.later
        _UNDER_WAY.add(self)
        _promise()
        loop = running_loop()
        if loop and serves(site.place, tasks=True):
            self._loop = loop
            self._task = site.start(self._try_in_loop(), loop)
            self._watch = self._later(EVERY, self._look)
            self._task.add_done_callback(self._left)
        else:
            self._later(0, self._try)

    def _try(self) -> None:
        over = True
        try:
            over = self._ask()
        finally:
            if over:
                _UNDER_WAY.discard(self)
            else:
                self._later(EVERY, self._try)

    def _ask(self) -> bool:
        """Ask from a thread; whether there is no more to do."""
        site = self._site
        if not serves(site.place, tasks=False):
            return True  # only an event loop can use it, and that has ended
        try:
            site.step(self._step)
        except StoreUnavailable:
            return site.clock.now() >= self._until
        return True

    async def _try_in_loop(self) -> None:
        site = self._site
        while True:
            try:
                await site.astep(self._step)
                return
            except StoreUnavailable:
                if site.clock.now() >= self._until:
                    return
            await asyncio.sleep(EVERY)

    def _look(self) -> None:
        """A loop that ends may just forget what was begun while it ended; one that stands still may never go on."""
        if not self._loop.is_running():
            self._try()  # if it does go on, that is done twice, which is the same as once
        elif not self._task.done():
            self._watch = self._later(EVERY, self._look)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._watch.cancel()
        if self not in _UNDER_WAY:
            return  # a thread has done it
        if task.cancelled():  # as `asyncio.run` does when it ends, even before the task has begun
            self._later(0, self._try)
        else:
            _UNDER_WAY.discard(self)


def _at_exit() -> None:
    until = monotonic() + AT_EXIT
    while _UNDER_WAY and monotonic() < until:
        time.sleep(0.005)  # the threads that do it run on until we return


_promise = before_exit(_at_exit)
in_each_child(_UNDER_WAY.clear)  # the parent sees to its own
