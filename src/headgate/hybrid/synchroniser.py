"""Drivers of a node: a thread for threads, a task for an event loop. All that is due travels in one call of the script.

A driver starts with the first caller who waits and ends when there is nothing left to look after, so a limiter that
is forgotten leaves nothing running behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import groupby
from time import clock_gettime_ns, monotonic, monotonic_ns, sleep
from typing import Any

from redis.exceptions import RedisError

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.hybrid import script
from headgate.hybrid.member import Errand
from headgate.hybrid.node import Node
from headgate.hybrid.protocol import Reply
from headgate.redis.address import Target
from headgate.redis.lua import Eval
from headgate.stores.redis import RedisStore

FAILURES = (RedisError, OSError)
LINGER = 1.0  # seconds that a driver with nothing to do waits for somebody
NAP = 500_000_000  # nanoseconds of sleep that count
CLOCK_BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", 0)  # Linux; elsewhere nobody can tell

_ALL: weakref.WeakSet[Synchroniser] = weakref.WeakSet()


class Synchroniser:
    """What both drivers share: the node, its clock, and how errands become calls."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store
        self.node = Node()
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.read_clock = nanoseconds(store.clock)
        source = store._source
        self._sliced = isinstance(source, Target) and source.kind == "cluster"
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
        groups = [list(errands)]
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


class ThreadSynchroniser(Synchroniser):
    """A thread, started when somebody first waits."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store)
        self._start()

    def _start(self) -> None:
        self.wake = threading.Event()
        self._starting = threading.RLock()  # a signal handler may come in between
        self._thread: threading.Thread | None = None
        self._nudging: set[int] = set()  # threads: whom one of them wakes up cannot go on before it has

    def renew(self) -> None:
        super().renew()
        self._start()

    def nudge(self) -> None:
        own = threading.get_ident()
        if own in self._nudging:
            return  # a signal handler in the middle of this: its lock is no other's, and it is being done anyway
        try:
            self._nudging.add(own)
            self.wake.set()
            thread = self._thread
            if thread is None or not thread.is_alive():  # a signal may have interrupted its start
                with self._starting:
                    if self._thread is None or not self._thread.is_alive():
                        self._thread = threading.Thread(target=self._run, name="headgate-hybrid", daemon=True)
                        self._thread.start()
        finally:
            self._nudging.discard(own)

    def inside(self) -> bool:
        return threading.get_ident() in self._nudging or self.node.mine()

    def settle(self, timeout: float) -> None:
        """Wait until everything that is on its way out has left, *timeout* seconds at most."""
        until = monotonic() + timeout
        while self.node.unsettled() and monotonic() < until:
            self.nudge()
            sleep(0.001)

    def _run(self) -> None:
        try:
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
            if pause is None and not self.wake.is_set() and self._leave():
                return

    def _leave(self) -> bool:
        """End, unless somebody has come meanwhile: who comes sets `wake` first and looks for a thread then."""
        own = threading.current_thread()
        if self._thread is own:
            self._thread = None
        with self._starting:
            if not self.wake.is_set() or self._thread is not None:
                return True
            self._thread = own
            return False

    def _trip(self, errands: Sequence[Errand]) -> None:
        for group, call in self.calls(errands):
            try:
                self.deliver(group, self.store.threads().ask(script.SYNC, call))
            except FAILURES as error:
                self.node.fail(self.read_clock(), group, error)
            except BaseException as error:
                self.node.fail(self.read_clock(), group, RuntimeError(repr(error)))
                raise


class LoopSynchroniser(Synchroniser):
    """A task of one event loop."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store)
        self.loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def nudge(self) -> None:
        self.wake.set()
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run(), name="headgate-hybrid")

    async def settle(self, timeout: float) -> None:
        """Wait until everything that is on its way out has left, *timeout* seconds at most; then end."""
        try:
            async with asyncio.timeout(timeout):
                while self.node.unsettled():
                    self.nudge()
                    await asyncio.sleep(0.001)
        except TimeoutError:
            pass

    def leave(self, until: float) -> None:
        """Send what is on its way out without an event loop, one trip after the other; none begins after *until*."""
        while monotonic() < until and self.node.leaving:
            self.node.retry_at = self.node.last_trip = 0  # at once, whatever became of a trip that ended with the loop
            errands = self.gather()
            for group, call in self.calls(errands) if errands else ():
                self.deliver(group, self.store.threads().ask(script.SYNC, call))

    async def stop(self) -> None:
        """End the task; what is under way is given up."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self.wake.clear()
            errands = self.gather()
            if errands:
                calls = self.calls(errands)
                await asyncio.gather(*[self._trip(group, call) for group, call in calls])
                self.node.busy = False
                continue
            pause = self.node.pause(self.read_clock())
            await self.clock.wait_async(self.wake, LINGER if pause is None else pause)
            if pause is None and not self.wake.is_set():
                return

    async def _trip(self, errands: Sequence[Errand], call: Eval) -> None:
        try:
            self.deliver(errands, await self.store.loop().ask(script.SYNC, call))
        except FAILURES as error:
            self.node.fail(self.read_clock(), errands, error)
        except BaseException as error:
            self.node.fail(self.read_clock(), errands, RuntimeError(repr(error)))
            raise


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
