"""The thread, or the task of an event loop, that makes the round trips of a `LeaseManager`; and what happens at exit.

One call of the script has all that is due. The thread or task starts with the first caller that waits and ends when no
leases are left, so that a limiter that is collected leaves nothing running. The servers of a Cluster are asked at the
same time, so that a server that does not answer delays only the keys that it has; this takes an event loop, which the
thread then runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from time import clock_gettime_ns, monotonic, monotonic_ns

from headgate._lifecycle import at_loop_end, before_exit, renew_after_fork
from headgate._plan import arun, run
from headgate._waiters import SignalSafeEvent
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.errors import StoreUnavailable
from headgate.hybrid.limiter_leases import LimiterLeases
from headgate.hybrid.manager import LeaseManager, SyncItem
from headgate.hybrid.protocol import LeaseReply
from headgate.stores.base import LeaseCall, LeaseStore

RELEASE_TIMEOUT = 1.0  # seconds that closing may take to give leases back; then they run out by themselves
MOST_UNSENT = 100  # event loops that ended in an outage and whose releases are kept until the process ends
LINGER = 1.0  # seconds that a thread or task without work waits for a caller before it ends
SUSPENDED = 500_000_000  # nanoseconds: a machine that was suspended for longer has lost its leases
CLOCK_BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", 0)  # Linux; other systems cannot tell


class StoreLeaseManager(LeaseManager):
    """A `LeaseManager` that talks to a store; the subclasses have the thread or the task that runs it."""

    def __init__(self, store: LeaseStore) -> None:
        clock = store.clock
        self.ledgers = store.leases()
        read_clock = monotonic_ns if clock is None else lambda: clock.now() * 1000
        super().__init__(read_clock, partitioned=self.ledgers.partitioned)
        self.clock: Clock = clock or SYSTEM_CLOCK
        self._suspended = suspended_time()
        renew_after_fork(self)

    def gather_now(self) -> list[SyncItem]:
        """The requests to send now. Leases are lost after a suspend, during which the monotonic clock stood still."""
        suspended = suspended_time()
        if suspended > self._suspended + SUSPENDED:
            self._suspended = suspended
            self.expire_leases()
        return self.gather(self.read_clock())

    def calls(self, items: Sequence[SyncItem]) -> list[tuple[Sequence[SyncItem], list[LeaseCall]]]:
        """One call to the store for all *items*, or one for each partition of its keys."""
        calls = []
        for lease, request, _ in items:
            owner: LimiterLeases = lease.owner
            calls.append(LeaseCall(owner.ledger_name(lease.key), owner.params, owner.profile, request))
        if not self.health.partitioned:
            return [(items, calls)]
        groups: dict[int, tuple[list[SyncItem], list[LeaseCall]]] = {}
        for item, call in zip(items, calls, strict=True):
            group = groups.setdefault(self.ledgers.partition(call.key), ([], []))
            group[0].append(item)
            group[1].append(call)
        return list(groups.values())

    def fail_now(self, items: Sequence[SyncItem], error: BaseException) -> None:
        reason = error.__cause__ if isinstance(error, StoreUnavailable) and error.__cause__ else error
        if reason is not error:  # it is kept; the frames in an event loop lead to the caller, and so to the limiter
            _forget_frames(reason)
        self.fail(self.read_clock(), items, reason if isinstance(reason, Exception) else RuntimeError(repr(reason)))

    def may_end(self) -> bool:
        """Whether a thread or task without work can end: no caller has woken it meanwhile."""
        raise NotImplementedError

    def clear_wake(self) -> None:
        raise NotImplementedError

    async def run_in_loop(self, wake: asyncio.Event) -> None:
        """Make the round trips in the running event loop until there is nothing to do."""
        loop, trips = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        def end_trip(items: Sequence[SyncItem], trip: asyncio.Task[None]) -> None:
            trips.discard(trip)
            error = asyncio.CancelledError() if trip.cancelled() else trip.exception()
            if error:  # here, and not in the trip: a task that is cancelled before it begins runs no code of its own
                self.fail_now(items, error)
            self.trip_under_way = bool(trips)
            wake.set()

        try:
            while True:
                self.clear_wake()
                items = self.gather_now()
                for group, calls in self.calls(items) if items else ():
                    trip = loop.create_task(self._round_trip(group, calls))
                    trips.add(trip)
                    trip.add_done_callback(partial(end_trip, group))
                if items:
                    await (asyncio.sleep(0) if self.health.partitioned else asyncio.wait(trips))
                    continue
                seconds = self.seconds_until_work(self.read_clock())
                if seconds is None:
                    await SYSTEM_CLOCK.wait_async(wake, LINGER)  # also where the clock is one that stands still
                else:
                    await self.clock.wait_async(wake, seconds)
                if seconds is None and not trips and self.may_end():
                    return
        finally:
            for trip in trips:
                trip.cancel()
            await asyncio.gather(*trips, return_exceptions=True)

    async def _round_trip(self, items: Sequence[SyncItem], calls: Sequence[LeaseCall]) -> None:
        replies = await self.ledgers.exchange_async(calls)
        self.deliver(self.read_clock(), items, replies)


class ThreadLeaseManager(StoreLeaseManager):
    """Run by a thread, which starts when the first caller waits."""

    def __init__(self, store: LeaseStore) -> None:
        super().__init__(store)
        self._reset_thread()
        _THREADS.add(self)

    def _reset_thread(self) -> None:
        self.wake = SignalSafeEvent()
        self._starting = threading.RLock()  # reentrant, for a signal handler that comes in between
        self._thread: threading.Thread | None = None
        self.cannot_start: RuntimeError | None = None  # why no thread could be started
        self._starters: set[int] = set()  # threads that are starting `_thread`: a signal handler there cannot wait
        self._wake_loop: Callable[[], object] | None = None

    def after_fork(self) -> None:
        super().after_fork()
        self._reset_thread()

    def wake_background(self) -> None:
        self.wake.set()
        wake_loop = self._wake_loop
        if wake_loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                wake_loop()
        thread, own = self._thread, threading.get_ident()
        if (thread is not None and thread.is_alive()) or own in self._starters:
            return
        try:
            self._starters.add(own)
            with self._starting:
                if self._thread is None or not self._thread.is_alive():  # a signal may have interrupted its start
                    self._thread = threading.Thread(target=self._run, name="headgate-hybrid", daemon=True)
                    try:
                        self._thread.start()
                        self.cannot_start = None
                    except RuntimeError as error:  # no more threads, or the process ends; the next call tries again
                        self._thread, self.cannot_start = None, error
        finally:
            self._starters.discard(own)

    def called_from_signal_handler(self) -> bool:
        return threading.get_ident() in self._starters or super().called_from_signal_handler()

    def wait_until_released(self, limiter: LimiterLeases, timeout: float) -> None:
        """Wait until Redis has taken back all leases that *limiter* released, *timeout* seconds at most."""
        until = monotonic() + timeout
        while limiter.is_releasing() and monotonic() < until:
            self.send_at_once(self.read_clock())
            self.wake_background()
            if self.cannot_start:
                return
            time.sleep(0.001)  # looked up now: gevent may have replaced it

    def _run(self) -> None:
        _release_at_exit()
        try:
            if self.health.partitioned:
                asyncio.run(self._run_in_own_loop())
            else:
                self._run_in_thread()
        except BaseException as error:  # a bug, or the interpreter ends: no caller may be left waiting
            self._thread = None
            self.trip_under_way = False
            self.fail(self.read_clock(), (), RuntimeError(f"the background thread ended: {error!r}"))
            raise

    def _run_in_thread(self) -> None:
        while self._thread is threading.current_thread():  # else another thread has taken over
            self.wake.clear()
            items = self.gather_now()
            if items:
                [(_, calls)] = self.calls(items)
                try:
                    replies = self.ledgers.exchange(calls)
                    self.deliver(self.read_clock(), items, replies)
                except BaseException as error:
                    self.fail_now(items, error)
                    if not isinstance(error, StoreUnavailable):
                        raise
                self.trip_under_way = False
                continue
            seconds = self.seconds_until_work(self.read_clock())
            if seconds is None:
                self.wake.wait(LINGER)  # also where the clock is one that stands still
            else:
                self.clock.wait(self.wake, seconds)
            if seconds is None and self.may_end():
                return

    async def _run_in_own_loop(self) -> None:
        loop, self._loop_wake = asyncio.get_running_loop(), asyncio.Event()
        self._wake_loop = partial(loop.call_soon_threadsafe, self._loop_wake.set)
        try:
            await self.run_in_loop(self._loop_wake)
        finally:
            await self.ledgers.close_loop()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:  # a probe that was ended closes its own connections; a second cancel would keep it from that
                await asyncio.wait(others, timeout=5)

    def clear_wake(self) -> None:
        self.wake.clear()
        self._loop_wake.clear()

    def may_end(self) -> bool:
        own = threading.current_thread()
        if self._thread is own:
            if self.wake.is_set():
                return False
            self._thread = None
        with self._starting:  # a caller sets `wake` first, and looks for a thread then
            if not self.wake.is_set() or self._thread is not None:
                return True
            self._thread, self.cannot_start = own, None
            return False


class LoopLeaseManager(StoreLeaseManager):
    """Run by a task of one event loop."""

    def __init__(self, store: LeaseStore) -> None:
        super().__init__(store)
        self.loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        self._called = False  # `wake` alone does not tell: it is also set at the end of a trip
        self._task: asyncio.Task[None] | None = None
        self._end = at_loop_end(partial(_release_in_ending_loop, weakref.ref(self)))
        _LOOPS.add(self)

    def wake_background(self) -> None:
        self._called = True
        _UNSENT.discard(self)
        self.wake.set()
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self.run_in_loop(self.wake), name="headgate-hybrid")

    def clear_wake(self) -> None:
        self._called = False
        self.wake.clear()

    def may_end(self) -> bool:
        return not self._called

    async def wait_until_released(self, limiter: LimiterLeases, timeout: float) -> None:
        """Wait until Redis has taken back all leases that *limiter* released, *timeout* seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while limiter.is_releasing():
                    self.send_at_once(self.read_clock())
                    self.wake_background()
                    await asyncio.sleep(0.001)

    def release_without_loop(self, until: float) -> None:
        """Give everything back, until the monotonic time *until*, although the event loop is closed."""
        run(self._releases(until), lambda calls: self.ledgers.exchange(calls, max(until - monotonic(), 0.001)))

    async def release_in_ending_loop(self, until: float) -> None:
        """Give everything back in the last moments of the event loop, which has ended its tasks and connections."""
        async with self.ledgers.closing_exchange(RELEASE_TIMEOUT) as exchange:
            if exchange is not None:
                with suppress(StoreUnavailable):
                    await arun(self._releases(until), exchange)
        self._keep_unsent()

    def _releases(self, until: float) -> Generator[list[LeaseCall], list[LeaseReply | str], None]:
        for limiter in list(self.limiters):
            limiter.release_all()
        for lease in self.releases.values():
            if lease.in_flight:  # its trip ended with the loop, and Redis may have taken its refund
                lease.in_flight = lease.refund = 0
            lease.blocked_until = 0
        while monotonic() < until and self.releases:
            self.health.retry_at = self.last_trip_at = 0  # at once, whatever became of the last trip
            items = self.gather_now()
            if not items:
                return
            for group, calls in self.calls(items):
                replies = yield calls
                self.deliver(self.read_clock(), group, replies)

    async def stop(self) -> None:
        """End the task and give up its trip. A caller that comes meanwhile starts another task."""
        task, self._task = self._task, None
        if task:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._task is None:
            self._keep_unsent()

    def _keep_unsent(self) -> None:
        """Stay alive with what could not be given back, for the end of the process, which tries once more and logs."""
        if self.releases and len(_UNSENT) < MOST_UNSENT:
            _UNSENT.add(self)
        elif self.releases:
            with self.lock:
                self.releases.discard_all()


_THREADS: weakref.WeakSet[ThreadLeaseManager] = weakref.WeakSet()
_LOOPS: weakref.WeakSet[LoopLeaseManager] = weakref.WeakSet()
_UNSENT: set[LoopLeaseManager] = set()  # whose event loop has no more work for them


def _forget_frames(error: BaseException | None) -> None:
    """Take the tracebacks off *error* and what caused it: they keep alive all that the callers know."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def suspended_time() -> int:
    """Nanoseconds that the machine has been suspended, as far as the system can tell."""
    return clock_gettime_ns(CLOCK_BOOTTIME) - monotonic_ns() if CLOCK_BOOTTIME else 0


async def _release_in_ending_loop(manager: weakref.ref[LoopLeaseManager]) -> None:
    """Give back what is held when the event loop ends without a call of `aclose`."""
    alive = manager()
    if alive is not None:
        await alive.release_in_ending_loop(monotonic() + RELEASE_TIMEOUT)


def _release_everything() -> None:
    """Give back what is held when the process ends, within RELEASE_TIMEOUT in all."""
    releasing = [(manager, limiter) for manager in list(_THREADS) for limiter in list(manager.limiters)]
    for _, limiter in releasing:
        limiter.release_all()
    until = monotonic() + RELEASE_TIMEOUT
    for manager, limiter in releasing:
        manager.wait_until_released(limiter, until - monotonic())
    for loop_manager in list(_LOOPS):
        if loop_manager.loop.is_closed():  # without `aclose()`
            with suppress(Exception):
                loop_manager.release_without_loop(until)
    for each in [*_THREADS, *_LOOPS]:
        with each.lock:
            if each.health.outage_error is not None:
                each.releases.discard_all()  # which logs what is lost


_release_at_exit = before_exit(_release_everything)
