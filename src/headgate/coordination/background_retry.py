"""Retry in the background what a caller does not wait for: a release, an undo, a report to a breaker.

The caller was cancelled, or the store did not answer it. The retry runs in the event loop of the caller; without one,
or when that loop ends first, in a thread of the timers. A process waits a moment for its last retries before it exits.
"""

from __future__ import annotations

import asyncio
import time
from time import monotonic
from typing import TYPE_CHECKING

from headgate._lifecycle import before_exit, in_each_child
from headgate.coordination.backend import running_loop
from headgate.coordination.states.machine import Operation
from headgate.errors import StoreUnavailable

if TYPE_CHECKING:
    from headgate.coordination.runner import Runner

EVERY = 0.25  # seconds between two attempts
AT_EXIT = 2.0  # seconds that a process waits before it exits; what is not given back by then expires

_PENDING: set[BackgroundRetry] = set()


class BackgroundRetry:
    """Runs *operation* until the store answers, or until that time."""

    def __init__(self, runner: Runner, operation: Operation, until: int) -> None:
        self.runner = runner
        self._operation = operation
        self._until = until
        self._later = runner.backend.timers.later
        _PENDING.add(self)
        _retry_before_exit()
        loop = running_loop()
        if loop and runner.backend.serves(tasks=True):
            self._loop = loop
            self._task = runner.start(self._retry_in_loop(), loop)
            self._watch = self._later(EVERY, self._watch_loop)
            self._task.add_done_callback(self._task_done)
        else:
            self._later(0, self._retry_in_thread)

    def _retry_in_thread(self) -> None:
        done = True
        try:
            done = self._execute()
        finally:
            if done:
                _PENDING.discard(self)
            else:
                self._later(EVERY, self._retry_in_thread)

    def _execute(self) -> bool:
        """Run the operation once from a thread; whether no other attempt is needed."""
        if not self.runner.backend.serves(tasks=False):
            return True  # only an event loop can use the store, and the caller's has ended
        try:
            self.runner.execute(self._operation)
        except StoreUnavailable:
            return self.runner.clock.now() >= self._until
        return True

    async def _retry_in_loop(self) -> None:
        while True:
            try:
                await self.runner.execute_async(self._operation)
                return
            except StoreUnavailable:
                if self.runner.clock.now() >= self._until:
                    return
            await asyncio.sleep(EVERY)

    def _watch_loop(self) -> None:
        """Take over from a loop that was stopped or has ended; one that has ended may drop the task silently."""
        if not self._loop.is_running():
            self._retry_in_thread()  # if the loop goes on after all, the operation runs twice, which changes nothing
        elif not self._task.done():
            self._watch = self._later(EVERY, self._watch_loop)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._watch.cancel()
        if self not in _PENDING:
            return  # a thread ran the operation
        if task.cancelled():  # `asyncio.run` cancels tasks when it ends, even ones that have not begun
            self._later(0, self._retry_in_thread)
        else:
            _PENDING.discard(self)


def _at_exit() -> None:
    until = monotonic() + AT_EXIT
    while _PENDING and monotonic() < until:
        time.sleep(0.005)  # meanwhile the threads of the timers retry


_retry_before_exit = before_exit(_at_exit)
in_each_child(_PENDING.clear)  # they are the parent's
