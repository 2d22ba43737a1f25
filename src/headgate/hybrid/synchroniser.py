"""What drives a node: gather what is due, ask Redis, deliver. All that is due travels in one call of the script.

A driver starts with the first caller who waits and ends when there is nothing left to look after, so a limiter that
is forgotten leaves nothing running behind. The servers of a Cluster are asked at the same time, and nobody waits for
one that does not answer but who has a key there: that takes an event loop, in the thread too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from time import clock_gettime_ns, monotonic_ns
from typing import Any

from redis.exceptions import RedisError

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.hybrid import script
from headgate.hybrid.errand import Errand
from headgate.hybrid.node import Node
from headgate.hybrid.protocol import Reply
from headgate.redis.lua import Eval
from headgate.redis.url import RedisURL
from headgate.stores.redis import RedisStore

FAILURES = (RedisError, OSError)
LINGER = 1.0  # seconds that a driver with nothing to do waits for somebody
NAP = 500_000_000  # nanoseconds of sleep that count
CLOCK_BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", 0)  # Linux; elsewhere nobody can tell


class Synchroniser:
    """What all drivers share: the node, its clock, and how errands become calls."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store
        source = store._source
        self._sliced = isinstance(source, RedisURL) and source.kind == "cluster"
        self.node = Node(apart=self._sliced)
        self.clock: Clock = store.clock or SYSTEM_CLOCK
        self.read_clock = nanoseconds(store.clock)
        self._slept = asleep()

    def after_fork(self) -> None:
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
            groups = [list(group) for _, group in groupby(sorted(errands, key=_slot), _slot)]
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


def _slot(errand: Errand) -> int:
    """Where its key lies in a Cluster."""
    return script.SYNC.slot(errand.member.redis_key(errand.lease.key))


def asleep() -> int:
    """Nanoseconds that the machine has been suspended, as far as it can tell."""
    return clock_gettime_ns(CLOCK_BOOTTIME) - monotonic_ns() if CLOCK_BOOTTIME else 0


def nanoseconds(clock: Clock | None) -> Callable[[], int]:
    """What callers read the time with: the monotonic clock itself, or *clock* in tests."""
    return monotonic_ns if clock is None else lambda: clock.now() * 1000
