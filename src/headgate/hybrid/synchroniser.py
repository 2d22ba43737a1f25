"""Drivers of a node: a thread for threads, a task for an event loop. All that is due travels in one call of the script.

A driver starts with the first caller who waits and ends when there is nothing left to look after, so a limiter that
is forgotten leaves nothing running behind. The servers of a Cluster are asked at the same time, and nobody waits for
one that does not answer but who has a key there: that takes an event loop, in the thread too.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from time import clock_gettime_ns, monotonic, monotonic_ns, sleep
from typing import Any

from redis.exceptions import RedisError

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.hybrid import script
from headgate.hybrid.errand import Errand
from headgate.hybrid.member import Member
from headgate.hybrid.node import Node
from headgate.hybrid.protocol import Reply
from headgate.redis.address import Target
from headgate.redis.lua import Eval
from headgate.stores.redis import RedisStore

FAILURES = (RedisError, OSError)
FAREWELL = 1.0  # seconds that closing may take to give leases back; then they run out by themselves
LINGER = 1.0  # seconds that a driver with nothing to do waits for somebody
NAP = 500_000_000  # nanoseconds of sleep that count
CLOCK_BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", 0)  # Linux; elsewhere nobody can tell

_ALL: weakref.WeakSet[Synchroniser] = weakref.WeakSet()


class Bell(threading.Event):
    """An Event that a signal handler may ring whatever it interrupts: it has no lock that an interrupt leaves behind.

    It rings while `_quiet` is free.
    """

    def __init__(self) -> None:
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def is_set(self) -> bool:
        return not self._quiet.locked()

    def set(self) -> None:
        with suppress(RuntimeError):  # it rings
            self._quiet.release()

    def clear(self) -> None:
        self._quiet.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        rung = self._quiet.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        if rung:
            self.set()  # until it is cleared
        return rung


class Synchroniser:
    """What all drivers share: the node, its clock, and how errands become calls."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store
        source = store._source
        self._sliced = isinstance(source, Target) and source.kind == "cluster"
        self.node = Node(apart=self._sliced)
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.read_clock = nanoseconds(store.clock)
        self._slept = asleep()
        _ALL.add(self)

    def renew(self) -> None:
        """In the child of a fork: nothing is held, and nobody drives."""
        self.node.renew()

    def nudge(self) -> None:
        """There is something to do now."""
        raise NotImplementedError

    def inside(self) -> bool:
        """Whether who asks is a signal handler that interrupted a step which nothing may come into."""
        return self.node.mine()

    def gather(self) -> list[Errand]:
        """What to ask now. A machine that was suspended has lost its leases: the monotonic clock stood still."""
        slept = asleep()
        if slept > self._slept + NAP:
            self._slept = slept
            self.node.expire()
        return self.node.gather(self.read_clock())

    def calls(self, errands: Sequence[Errand]) -> list[tuple[list[Errand], Eval]]:
        """One call, or one for each slot where keys lie at different servers."""
        groups = [list(errands)] if errands else []
        if self._sliced:
            slot = lambda errand: script.SYNC.slot(errand.member.redis_key(errand.lease.key))  # noqa: E731
            groups = [list(group) for _, group in groupby(sorted(errands, key=slot), slot)]
        now = self.store.clock.now() if self.store.clock else None
        found = []
        for group in groups:
            asks = [(e.member.redis_key(e.lease.key), e.member.law, e.member.style, e.ask) for e in group]
            found.append((group, script.call(asks, now)))
        return found

    def deliver(self, errands: Sequence[Errand], reply: Any) -> None:
        found: list[Reply | str] = script.replies(reply)
        self.node.deliver(self.read_clock(), errands, found)

    def fail(self, errands: Sequence[Errand], error: BaseException) -> None:
        told = error if isinstance(error, FAILURES) else RuntimeError(repr(error))
        self.node.fail(self.read_clock(), errands, told)

    async def steer(self, wake: asyncio.Event, clear: Callable[[], None], leave: Callable[[], bool]) -> None:
        """Drive the node in an event loop, until there is nothing to do and *leave* says so."""
        loop, trips = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        def over(errands: Sequence[Errand], trip: asyncio.Task[None]) -> None:
            trips.discard(trip)
            error = asyncio.CancelledError() if trip.cancelled() else trip.exception()
            if error:  # here, and not in the trip: one that is cancelled before it begins has no chance to tell
                self.fail(errands, error)
            self.node.busy = bool(trips)
            wake.set()

        try:
            while True:
                clear()
                errands = self.gather()
                for group, call in self.calls(errands):
                    trip = loop.create_task(self._travel(group, call))
                    trips.add(trip)
                    trip.add_done_callback(partial(over, group))
                if errands:
                    await (asyncio.sleep(0) if self._sliced else asyncio.wait(trips))
                    continue
                pause = self.node.pause(self.read_clock())
                await self.clock.wait_async(wake, LINGER if pause is None else pause)
                if pause is None and not trips and leave():
                    return
        finally:
            for trip in trips:
                trip.cancel()
            await asyncio.gather(*trips, return_exceptions=True)

    async def _travel(self, errands: Sequence[Errand], call: Eval) -> None:
        self.deliver(errands, await self.store.loop().ask(script.SYNC, call))


class ThreadSynchroniser(Synchroniser):
    """A thread, started when somebody first waits."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store)
        self._start()

    def _start(self) -> None:
        self.wake = Bell()
        self._starting = threading.RLock()  # a signal handler may come in between
        self._thread: threading.Thread | None = None
        self._nudging: set[int] = set()  # threads that start the thread: a handler there cannot wait for it
        self._wake_loop: Callable[[], object] | None = None

    def renew(self) -> None:
        super().renew()
        self._start()

    def nudge(self) -> None:
        self.wake.set()
        wake_loop = self._wake_loop
        if wake_loop is not None:
            with suppress(RuntimeError):  # it is closed
                wake_loop()
        thread, own = self._thread, threading.get_ident()
        if (thread is not None and thread.is_alive()) or own in self._nudging:
            return
        try:
            self._nudging.add(own)
            with self._starting:
                if self._thread is None or not self._thread.is_alive():  # a signal may have interrupted its start
                    self._thread = threading.Thread(target=self._run, name="headgate-hybrid", daemon=True)
                    self._thread.start()
        finally:
            self._nudging.discard(own)

    def inside(self) -> bool:
        return threading.get_ident() in self._nudging or self.node.mine()

    def settle(self, member: Member, timeout: float) -> None:
        """Wait until everything of *member* that is on its way out has left, *timeout* seconds at most."""
        until = monotonic() + timeout
        while member.unsettled() and monotonic() < until:
            self.nudge()
            sleep(0.001)

    def _run(self) -> None:
        _promise_farewell()
        try:
            if self._sliced:
                asyncio.run(self._drive_loop())
            else:
                self._drive()
        except BaseException as error:  # a bug, or the interpreter ends: nobody may be left waiting
            self._thread = None
            self.node.busy = False
            self.node.fail(self.read_clock(), (), RuntimeError(f"the synchroniser ended: {error!r}"))
            raise

    def _drive(self) -> None:
        while self._thread is threading.current_thread():  # else another has taken over
            self.wake.clear()
            errands = self.gather()
            if errands:
                self._trip(errands)
                self.node.busy = False
                continue
            pause = self.node.pause(self.read_clock())
            self.clock.wait(self.wake, LINGER if pause is None else pause)
            if pause is None and self._leave():
                return

    async def _drive_loop(self) -> None:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def clear() -> None:
            self.wake.clear()
            wake.clear()

        self._wake_loop = lambda: loop.call_soon_threadsafe(wake.set)
        try:
            await self.steer(wake, clear, self._leave)
        finally:
            link = self.store._loops.pop(loop, None)
            if link:
                await link.aclose()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:  # a probe that was ended closes its own connections, and a second blow would keep it from that
                await asyncio.wait(others, timeout=5)

    def _leave(self) -> bool:
        """End, unless somebody has come meanwhile: who comes sets `wake` first and looks for a thread then."""
        own = threading.current_thread()
        if self._thread is own:
            if self.wake.is_set():
                return False
            self._thread = None
        with self._starting:
            if not self.wake.is_set() or self._thread is not None:
                return True
            self._thread = own
            return False

    def _trip(self, errands: Sequence[Errand]) -> None:
        [(_, call)] = self.calls(errands)
        try:
            self.deliver(errands, self.store.threads().ask(script.SYNC, call))
        except BaseException as error:
            self.fail(errands, error)
            if not isinstance(error, FAILURES):
                raise


class LoopSynchroniser(Synchroniser):
    """A task of one event loop."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store)
        self.loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        self._nudged = False  # `wake` is set when a pause is over, too
        self._task: asyncio.Task[None] | None = None

    def nudge(self) -> None:
        self._nudged = True
        self.wake.set()
        if self._task is None or self._task.done():
            drive = self.steer(self.wake, self._clear, lambda: not self._nudged)
            self._task = self.loop.create_task(drive, name="headgate-hybrid")

    def _clear(self) -> None:
        self._nudged = False
        self.wake.clear()

    async def settle(self, member: Member, timeout: float) -> None:
        """Wait until everything of *member* that is on its way out has left, *timeout* seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while member.unsettled():
                    self.nudge()
                    await asyncio.sleep(0.001)

    def leave(self, until: float) -> None:
        """Give everything back without the event loop, which is closed; no trip begins after *until*."""
        for member in list(self.node.everybody):
            member.dismiss()
        for lease in self.node.leaving.values():
            if lease.flight:  # its trip ended with the loop, and what it told may have been heard
                lease.flight = lease.refund = 0
            lease.ill = 0
        while monotonic() < until and self.node.leaving:
            self.node.backend.retry_at = self.node.last_trip = (
                0  # at once, whatever became of a trip that ended with the loop
            )
            errands = self.gather()
            if not errands:
                return
            for group, call in self.calls(errands):
                self.deliver(group, self.store.threads().ask(script.SYNC, call))

    async def stop(self) -> None:
        """End the task; what is under way is given up. Who comes meanwhile starts another."""
        task, self._task = self._task, None
        if task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def asleep() -> int:
    """Nanoseconds that the machine has been suspended, as far as it can tell."""
    return clock_gettime_ns(CLOCK_BOOTTIME) - monotonic_ns() if CLOCK_BOOTTIME else 0


def nanoseconds(clock: Clock | None) -> Callable[[], int]:
    """What callers read the time with: the monotonic clock itself, or *clock* in tests."""
    return monotonic_ns if clock is None else lambda: clock.now() * 1000


def _after_fork() -> None:
    for synchroniser in _ALL:
        synchroniser.renew()


os.register_at_fork(after_in_child=_after_fork)


def _farewell() -> None:
    """Give back what is held when the process ends, a second at most in all."""
    drivers = [driver for driver in list(_ALL) if isinstance(driver, ThreadSynchroniser)]
    leaving = [(driver, member) for driver in drivers for member in list(driver.node.everybody)]
    for _, member in leaving:
        member.dismiss()
    until = monotonic() + FAREWELL
    with suppress(RuntimeError):  # too late to start a thread
        for synchroniser, member in leaving:
            synchroniser.settle(member, until - monotonic())
    for loop_driver in [driver for driver in list(_ALL) if isinstance(driver, LoopSynchroniser)]:
        if loop_driver.loop.is_closed():  # without `aclose()`
            with suppress(Exception):
                loop_driver.leave(until)


atexit.register(_farewell)
_promised: set[int] = set()  # processes


def _promise_farewell() -> None:
    """A child of `multiprocessing` ends without what was registered for the end of a process; it has its own way."""
    util = sys.modules.get("multiprocessing.util")
    if util and os.getpid() not in _promised:
        _promised.add(os.getpid())
        util.Finalize(None, _farewell, exitpriority=0)
