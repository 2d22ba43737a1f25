"""Run the plans of the tools: a plan yields an `Operation` on a state, or a `Sleep` until its caller is woken.

A tool is a lock, a semaphore, a circuit breaker, a pool or a queue. Its `Runner` drives its plans (see
`headgate._plan`) for threads and for asyncio. Callers of a process that wait for the same tool queue in the process,
and only the first asks the store: thousands of waiters cost no more questions than a few. See `wait_in_queue` for the
exceptions.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from headgate._plan import arun, run
from headgate._waiters import Queued, SignalSafeEvent, Waiter
from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.backend import open_backend
from headgate.coordination.background_retry import BackgroundRetry
from headgate.coordination.states.machine import Operation, Reply, StateMachine, entry_channel, wake_waiters
from headgate.errors import StoreUnavailable
from headgate.keys import check_key
from headgate.stores.base import Store
from headgate.telemetry.tally import ToolCounts
from headgate.telemetry.watching import Sample, watch

RETRY = 0.1  # seconds between attempts while the store does not answer
JITTER = Random()  # not the common generator, which a program may seed alike in all its processes

R = TypeVar("R")
Entered = TypeVar("Entered", bound=AbstractAsyncContextManager[Any])


class Sleep(NamedTuple):
    """A request of a plan: sleep until *event* is set, or for so many seconds; None: until it is set."""

    event: Any  # of `threading` or of `asyncio`
    seconds: float | None


Plan = Generator[Operation | Sleep, Any, R]


class Ticket(Queued):
    """A caller's place in the queue of a tool in this process, and its way to sleep until it is woken.

    The queue refers to the *waiter* and not to the ticket, so a ticket that its caller drops is collected, and leaves.
    """

    _listens = False

    def __init__(self, runner: Runner, waiter: Waiter, event: Any) -> None:
        super().__init__(runner.backend.waiters, waiter)
        self._states, self._channel = runner.backend.states, runner.channel
        self._event = event  # the waiter's `wake` sets it

    def __exit__(self, *_: object) -> None:
        if self._listens:
            self._listens = False
            self._states.leave(self._channel)
        super().__exit__()

    def sleep(self, *limits: float | None) -> Sleep:
        """Sleep until woken, or for the shortest of these times; None is for ever."""
        return Sleep(self._event, min((seconds for seconds in limits if seconds is not None), default=None))

    def listen(self) -> None:
        """Be woken by changes in other processes, too."""
        if not self._listens:
            self._listens = True
            self._states.listen(self._channel)


def wait_in_queue(
    runner: Runner,
    new_ticket: Callable[[], Ticket],
    attempt: Callable[[], Plan[tuple[R | None, float]]],
    until: int | None,
) -> Plan[R | None]:
    """Make attempts until one has a result; None when *until* has come.

    attempt  asks the store; gives a result, or None and the seconds after which to ask again at the latest
    until    in the clock's microseconds; None: for ever

    A caller with ``timeout=0`` always asks. Of the others at most two ask at once: one that found no queue, and the
    first in the queue. (Threads that come in the same instant may all find none.) A caller whose time is over before it
    was first asks once, beside these two.

    An attempt that raises `StoreUnavailable` is repeated while there is time; without *until* it is raised at once.
    """
    with runner.counts.acquiring() as request:
        result = yield from _wait_in_queue(runner, new_ticket, attempt, until)
        request.granted = result is not None
        return result


def _wait_in_queue(
    runner: Runner,
    new_ticket: Callable[[], Ticket],
    attempt: Callable[[], Plan[tuple[R | None, float]]],
    until: int | None,
) -> Plan[R | None]:
    clock, waiters, asking = runner.clock, runner.backend.waiters, runner.backend.asking
    problem: StoreUnavailable | None = None  # of the last attempt
    has_time = until is None or clock.now() < until
    no_queue = waiters.is_empty(runner.channel) and runner.channel not in asking
    if no_queue or not has_time:  # most callers get their result here, and need no ticket
        try:
            if no_queue:
                asking.add(runner.channel)
            result, _ = yield from attempt()
            if result is not None or not has_time:
                return result
        except StoreUnavailable as error:
            if until is None or clock.now() >= until:
                raise
            problem = error
        finally:
            if no_queue:  # else the channel is there for another caller
                asking.discard(runner.channel)
    return (yield from wait_with_ticket(runner, new_ticket, attempt, until, no_queue, problem))


def wait_with_ticket(
    runner: Runner,
    new_ticket: Callable[[], Ticket],
    attempt: Callable[[], Plan[tuple[R | None, float]]],
    until: int | None,
    at_front: bool,
    problem: StoreUnavailable | None,
) -> Plan[R | None]:
    """The part of `wait_in_queue` behind the first attempt: queue in this process, and ask when it is this one's turn.

    at_front  callers that came while this one asked are behind it
    problem   of the last attempt
    """
    clock, waiters = runner.clock, runner.backend.waiters
    ticket, asked = new_ticket(), False
    ticket.at_front = at_front
    with ticket:
        while True:
            ask_in: float | None = None  # seconds until the next attempt; None: when this caller is first
            # A caller whose time is over asks once, first or not: the first may be in an event loop that is blocked.
            if waiters.is_first(ticket.waiter) or not (asked or until is None or clock.now() < until):
                asked = True
                try:
                    result, ask_in = yield from attempt()
                except StoreUnavailable as error:
                    problem, ask_in = error, RETRY
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
            yield ticket.sleep(ask_in, left)


class Runner:
    """Runs the plans of one tool object, which has a name, a kind of state and a store; for threads or for *tasks*."""

    def __init__(
        self,
        machine: StateMachine,
        name: str,
        store: str | Store,
        clock: Clock | None,
        *,
        tasks: bool,
        kind: str = "lock",
    ) -> None:
        self.machine = machine
        self.name = check_key(name, "name")
        self.backend = open_backend(store, clock)
        self.backend.states.check(tasks=tasks)
        self.clock = self.backend.clock
        self.channel = machine.keys(self.name)[0]
        self.counts = ToolCounts(kind)
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"{self.name!r} at {self.backend.states.display_name}"

    def for_state(self, name: str, entry: str = "") -> Runner:
        """A runner on the same store for another state of this kind; its callers queue by state and *entry*."""
        other = copy.copy(self)
        other.name = name
        other.channel = entry_channel(self.machine.keys(name)[0], entry)
        return other

    def execute(self, operation: Operation) -> Reply:
        """Run one operation, and wake the waiters of this process that it concerns, without a message of the store."""
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
        """A ticket for this thread, woken when the state changes, or only when that *entry* of a `WaitQueue` does."""
        event = SignalSafeEvent()
        return Ticket(self, Waiter(entry_channel(self.channel, entry), event.set), event)

    def async_ticket(self, entry: str = "") -> Ticket:
        """A ticket for this task."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        wake = partial(_set_event, loop, event)
        return Ticket(self, Waiter(entry_channel(self.channel, entry), wake, loop.is_running), event)

    def _answer(self, request: Operation | Sleep) -> Reply | None:
        if isinstance(request, Operation):
            return self.execute(request)
        self.clock.wait(request.event, request.seconds)
        request.event.clear()  # before the next attempt, so that no wake-up is lost
        return None

    async def _answer_async(self, request: Operation | Sleep) -> Reply | None:
        if isinstance(request, Operation):
            return await self.execute_async(request)
        await self.clock.wait_async(request.event, request.seconds)
        request.event.clear()  # before the next attempt, so that no wake-up is lost
        return None

    def next_poll(self, seconds: float) -> float:
        """Seconds after which a waiter asks again, woken or not: so many, if that is known (more than 0) and soon."""
        ask_in = self.backend.states.poll * JITTER.uniform(0.8, 1.0)  # not in step with other processes
        return min(ask_in, seconds) if seconds > 0 else ask_in

    def retry_in_background(self, operation: Operation, until: int, process: int) -> None:
        """Run *operation* in the background until the store answers, or until that time.

        process  in which the call began: a forked child must not undo its parent's operation
        """
        if process == os.getpid():
            BackgroundRetry(self, operation, until)

    def start(
        self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None = None
    ) -> asyncio.Task[None]:
        """Run *work* as a task of *loop*, or of the running event loop; no caller awaits it."""
        task = (loop or asyncio.get_running_loop()).create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Tool:
    """What all tools have in common: a name and a `Runner`. Constructors call `_set_up`."""

    _for_tasks = False  # True: its methods are awaited
    _kind = "lock"  # what it is called in telemetry

    def _set_up(self, machine: StateMachine, name: str, store: str | Store, clock: Clock | None) -> None:
        self.name = name
        self._runner = Runner(machine, name, store, clock, tasks=self._for_tasks, kind=self._kind)
        self._watched = watch(self._kind, name, self._labels(), self._runner.counts, self, type(self)._gauges)

    def _labels(self) -> tuple[tuple[str, str], ...]:
        return (("store", self._runner.backend.kind),)

    def _gauges(self) -> Iterator[Sample]:
        """What telemetry shows of it as of now; asks no server."""
        yield Sample(f"headgate.{self._kind}.waiting", (), self._runner.counts.waiting)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._runner!r}>"


class ThreadTool(Tool):
    """A tool that threads call."""

    def close(self) -> None:
        """Close the connections, which all tools on this store share; the next call makes new ones."""
        self._runner.backend.close()


class AsyncTool(Tool):
    """A tool whose methods are awaited."""

    _for_tasks = True

    async def aclose(self) -> None:
        """Close this event loop's connections; without this they are closed when the loop ends."""
        await self._runner.backend.aclose()


class Acquiring(Coroutine[Any, Any, Entered]):
    """A call of asyncio that acquires something: await it, make a task of it, or use it with ``async with``."""

    def __init__(self, acquire: Coroutine[Any, Any, Entered]) -> None:
        self._acquire = acquire
        self._acquired: Entered | None = None

    def __await__(self) -> Generator[Any, Any, Entered]:
        return self._acquire.__await__()

    def send(self, value: Any) -> Any:
        return self._acquire.send(value)

    def throw(self, *error: Any) -> Any:
        return self._acquire.throw(*error)

    def close(self) -> None:
        self._acquire.close()

    async def __aenter__(self) -> Entered:
        self._acquired = await self
        await self._acquired.__aenter__()
        return self._acquired

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._acquired is not None
        await self._acquired.__aexit__(kind, error, at)


def _set_event(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
