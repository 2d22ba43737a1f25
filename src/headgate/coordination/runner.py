"""Run what a tool does: plans that yield an `Operation` on a state, or a `Pause` until the caller is woken.

A `Runner` drives plans (see `headgate._plan`) for threads and for asyncio. Callers of a process that wait for the same
thing stand in one line, and only the first of it asks the store. So any number of waiters cost one question at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from headgate._plan import arun, run
from headgate._waiters import SignalSafeEvent, Waiter
from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.backend import open_backend
from headgate.coordination.background import BackgroundRetry
from headgate.coordination.states.machine import Operation, Reply, StateMachine, entry_channel, wake_waiters
from headgate.errors import StoreUnavailable
from headgate.keys import check_key
from headgate.stores.base import Store

RETRY = 0.1  # seconds between tries while the store does not answer

R = TypeVar("R")


class Pause(NamedTuple):
    """Sleep until *event* is set, or for so many seconds; None: until it is set."""

    event: Any  # of `threading` or of `asyncio`
    seconds: float | None


Plan = Generator[Operation | Pause, Any, R]


class Ticket:
    """A caller's place in the line of a tool. Only the first of a line asks; a caller that leaves wakes the next.

    The line refers to its *waiter* and not to the ticket itself, so that a dropped ticket can leave the line.
    """

    at_front = _joined = _listens = False

    def __init__(self, runner: Runner, waiter: Waiter, event: Any) -> None:
        self.runner = runner
        self.waiter = waiter
        self._event = event  # which the waiter's *wake* sets

    def __enter__(self) -> None:
        self._joined = True
        self.runner.backend.waiters.join(self.waiter, self.at_front)

    def __exit__(self, *_: object) -> None:
        if self._listens:
            self._listens = False
            self.runner.backend.states.leave(self.runner.channel)
        self.runner.backend.waiters.leave(self.waiter)
        self._joined = False

    def __del__(self) -> None:
        """Leave even if a signal handler raised while the caller joined or left: it would block the line for ever."""
        if self._joined:
            self.__exit__()

    def pause(self, *limits: float | None) -> Pause:
        """Sleep until woken, or for the shortest of these times; None is for ever."""
        return Pause(self._event, min((seconds for seconds in limits if seconds is not None), default=None))

    def listen(self) -> None:
        """Be woken by changes in other processes, too."""
        if not self._listens:
            self._listens = True
            self.runner.backend.states.listen(self.runner.channel)


def wait_in_line(
    runner: Runner,
    new_ticket: Callable[[], Ticket],
    attempt: Callable[[], Plan[tuple[R | None, float]]],
    until: int | None,
) -> Plan[R | None]:
    """Make attempts until one has a result; None when *until* has come.

    attempt  gives a result, or None and the seconds after which the next attempt is due at the latest
    until    in the clock's microseconds; None: for ever

    A caller that finds no line, or has no time to wait, asks at once: most callers need no ticket. Only one caller at a
    time does so, and only the first of a line asks; so any number of callers ask two questions at a time at most.

    An attempt that raises `StoreUnavailable` is repeated while there is time; without *until* it is raised at once.
    """
    clock, waiters, asking = runner.clock, runner.backend.waiters, runner.backend.asking
    problem: StoreUnavailable | None = None  # of the last attempt
    has_time = until is None or clock.now() < until
    no_line = waiters.is_empty(runner.channel) and runner.channel not in asking
    if no_line or not has_time:
        try:
            asking.add(runner.channel)
            result, _ = yield from attempt()
            if result is not None or not has_time:
                return result
        except StoreUnavailable as error:
            if until is None or clock.now() >= until:
                raise
            problem = error
        finally:
            asking.discard(runner.channel)
    ticket, asked = new_ticket(), False
    ticket.at_front = no_line  # callers that came while this one asked are behind it
    with ticket:
        while True:
            pause: float | None = None  # until this caller is first
            # A caller whose time is over asks once, first or not: the first may be in an event loop that is blocked.
            if waiters.is_first(ticket.waiter) or not (asked or until is None or clock.now() < until):
                asked = True
                try:
                    result, pause = yield from attempt()
                except StoreUnavailable as error:
                    problem, pause = error, RETRY
                else:
                    if result is not None:
                        return result
                    problem = None
                ticket.listen()
            left = None if until is None else (until - clock.now()) / MICROSECONDS
            if problem and (left is None or left <= 0):
                raise problem
            if left is not None and left <= 0:
                return None
            yield ticket.pause(pause, left)


class Runner:
    """Runs the plans of one tool: one name of one state machine in one store, for threads or for *tasks*."""

    def __init__(
        self, machine: StateMachine, name: str, store: str | Store, clock: Clock | None, *, tasks: bool
    ) -> None:
        self.machine = machine
        self.name = check_key(name, "name")
        self.backend = open_backend(store, clock)
        self.backend.states.check(tasks=tasks)
        self.clock = self.backend.clock
        self.channel = machine.keys(self.name)[0]
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"{self.name!r} at {self.backend.states.display_name}"

    def execute(self, operation: Operation) -> Reply:
        """Run one operation, and wake the waiters of this process that it concerns: they need no message."""
        reply = self.backend.states.run(self.machine, self.name, operation)
        wake_waiters(self.backend.waiters, self.channel, operation, reply)
        return reply

    async def execute_async(self, operation: Operation) -> Reply:
        reply = await self.backend.states.run_async(self.machine, self.name, operation)
        wake_waiters(self.backend.waiters, self.channel, operation, reply)
        return reply

    def run(self, plan: Plan[R]) -> R:
        """Run a plan in this thread."""
        return run(plan, self._answer)

    async def arun(self, plan: Plan[R]) -> R:
        """Run a plan in this task."""
        return await arun(plan, self._answer_async)

    def ticket(self, entry: str = "") -> Ticket:
        """A ticket for this thread, woken by changes of the state, or only by those of one *entry* of a queue."""
        event = SignalSafeEvent()
        return Ticket(self, Waiter(entry_channel(self.channel, entry), event.set), event)

    def async_ticket(self, entry: str = "") -> Ticket:
        """A ticket for this task."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        wake = partial(_set, loop, event)
        return Ticket(self, Waiter(entry_channel(self.channel, entry), wake, loop.is_running), event)

    def _answer(self, request: Operation | Pause) -> Reply | None:
        if isinstance(request, Operation):
            return self.execute(request)
        self.clock.wait(request.event, request.seconds)
        request.event.clear()  # the caller asks or looks next, so it misses nothing
        return None

    async def _answer_async(self, request: Operation | Pause) -> Reply | None:
        if isinstance(request, Operation):
            return await self.execute_async(request)
        await self.clock.wait_async(request.event, request.seconds)
        request.event.clear()
        return None

    def retry_in_background(self, operation: Operation, until: int, process: int) -> None:
        """Run *operation* in the background until it is answered, or until that time.

        process  whose operation it is: a forked child that drops its copy of a call undoes nothing of its parent's
        """
        if process == os.getpid():
            BackgroundRetry(self, operation, until)

    def start(
        self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Task[None]:
        """Run *work* as a task of *loop*, or of the running event loop, that no caller awaits."""
        task = (loop or asyncio.get_running_loop()).create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Tool:
    """What all tools have: a name, and a runner for their plans. Constructors call `_set_up`."""

    _for_tasks = False  # True: its methods are awaited

    def _set_up(self, machine: StateMachine, name: str, store: str | Store, clock: Clock | None) -> None:
        self.name = name
        self._runner = Runner(machine, name, store, clock, tasks=self._for_tasks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._runner!r}>"


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
