"""The drivers of a node: a thread for threads, a task for an event loop. And how they end: by a fork, or at exit."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from headgate._lifecycle import before_exit, renew_after_fork
from headgate._plan import arun, run
from headgate._waiters import SignalSafeEvent
from headgate.hybrid import script
from headgate.hybrid.errand import Errand
from headgate.hybrid.member import Member
from headgate.hybrid.synchroniser import FAILURES, LINGER, Synchroniser
from headgate.redis.async_client import AsyncExecutor
from headgate.redis.lua import Eval
from headgate.redis.url import RedisURL
from headgate.stores.redis import RedisStore

FAREWELL = 1.0  # seconds that closing may take to give leases back; then they run out by themselves


_THREADS: weakref.WeakSet[ThreadSynchroniser] = weakref.WeakSet()
_LOOPS: weakref.WeakSet[LoopSynchroniser] = weakref.WeakSet()


class ThreadSynchroniser(Synchroniser):
    """A thread, started when somebody first waits."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store)
        self._prepare()
        _THREADS.add(self)
        renew_after_fork(self)

    def _prepare(self) -> None:
        """Have no thread yet."""
        self.wake = SignalSafeEvent()
        self._starting = threading.RLock()  # a signal handler may come in between
        self._thread: threading.Thread | None = None
        self.unable: RuntimeError | None = None  # why there is no thread, though somebody wants one
        self._nudging: set[int] = set()  # threads that start the thread: a handler there cannot wait for it
        self._wake_loop: Callable[[], object] | None = None

    def after_fork(self) -> None:
        super().after_fork()
        self._prepare()

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
                    try:
                        self._thread.start()
                        self.unable = None
                    except RuntimeError as error:  # no more threads, or the process ends; the next call tries again
                        self._thread, self.unable = None, error
        finally:
            self._nudging.discard(own)

    def inside(self) -> bool:
        return threading.get_ident() in self._nudging or self.node.mine()

    def settle(self, member: Member, timeout: float) -> None:
        """Wait until everything of *member* that is on its way out has left, *timeout* seconds at most."""
        until = monotonic() + timeout
        while member.unsettled() and monotonic() < until:
            self.node.hasten(self.read_clock())
            self.nudge()
            if self.unable:
                return
            time.sleep(0.001)  # looked up now: gevent may have put its own there

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
            self._thread, self.unable = own, None
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
        self._end = _until_the_end(weakref.ref(self))
        with suppress(StopIteration):
            self._end.asend(None).send(None)  # to its yield; an event loop that ends closes generators that have begun
        _LOOPS.add(self)
        renew_after_fork(self)

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
                    self.node.hasten(self.read_clock())
                    self.nudge()
                    await asyncio.sleep(0.001)

    def leave(self, until: float) -> None:
        """Give everything back without the event loop, which is closed; *until* then."""
        ask = self.store.threads().ask
        run(self._farewells(until), lambda call: ask(script.SYNC, call, max(until - monotonic(), 0.001)))

    async def aleave(self, until: float) -> None:
        """Give everything back in the last moments of the event loop, which has ended its tasks and connections."""
        source = self.store._source
        if not isinstance(source, RedisURL):
            return  # somebody's own client, who may have closed it: a connection made now would be nobody's to close
        link = AsyncExecutor(source, self.store._shown(), FAREWELL)  # no trip of its own outlives that
        try:
            with suppress(*FAILURES):
                await arun(self._farewells(until), partial(link.ask, script.SYNC))
        finally:
            await link.aclose()

    def _farewells(self, until: float) -> Generator[Eval, Any, None]:
        for member in list(self.node.everybody):
            member.dismiss()
        for lease in self.node.leaving.values():
            if lease.flight:  # its trip ended with the loop, and what it told may have been heard
                lease.flight = lease.refund = 0
            lease.ill = 0
        while monotonic() < until and self.node.leaving:
            # at once, whatever became of a trip that ended with the loop
            self.node.backend.retry_at = self.node.last_trip = 0
            errands = self.gather()
            if not errands:
                return
            for group, call in self.calls(errands):
                self.deliver(group, (yield call))

    async def stop(self) -> None:
        """End the task; what is under way is given up. Who comes meanwhile starts another."""
        task, self._task = self._task, None
        if task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_the_end(driver: weakref.ref[LoopSynchroniser]) -> AsyncGenerator[None, None]:
    """Give back what is held when the event loop ends, for those who do not call `aclose`."""
    try:
        yield
    finally:
        alive = driver()
        if alive is not None:
            await alive.aleave(monotonic() + FAREWELL)


def _farewell() -> None:
    """Give back what is held when the process ends, a second at most in all."""
    leaving = [(driver, member) for driver in list(_THREADS) for member in list(driver.node.everybody)]
    for _, member in leaving:
        member.dismiss()
    until = monotonic() + FAREWELL
    for driver, member in leaving:
        driver.settle(member, until - monotonic())
    for loop_driver in list(_LOOPS):
        if loop_driver.loop.is_closed():  # without `aclose()`
            with suppress(Exception):
                loop_driver.leave(until)
    for node in [driver.node for driver in [*_THREADS, *_LOOPS]]:
        with node.lock:
            if node.backend.down is not None:
                node.leaving.drop_all()  # which says what is lost


_promise_farewell = before_exit(_farewell)
