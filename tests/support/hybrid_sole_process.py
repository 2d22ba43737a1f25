"""One process, the only one at its key, on a clock of its own: the real manager and ledger, trips that take time.

Callers do not wait for a trip that is not theirs: they come and go while it is under way.
"""

from __future__ import annotations

import random

from headgate.decision import Decision
from headgate.hybrid.lease import MILLISECOND, SECOND, TICK, Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.limiter_leases import LeaseWaiter, LimiterLeases
from headgate.hybrid.manager import LeaseManager, SyncItem
from headgate.hybrid.protocol import PROFILES, LeaseReply
from headgate.rule import Rule


class SoleProcess:
    """Its background task looks for work every 10 ms, and when a caller waits; trips take up to 4 ms.

    *stalls*: on a machine that is too busy, one of eight takes longer, there or back: up to half a second.
    """

    def __init__(
        self,
        quota: str,
        kind: str = "token_bucket",
        accuracy: str = "high",
        start: int = 1000,
        stalls: bool = False,
        seed: int = 2,
    ) -> None:
        self.now = start * SECOND
        self.rule = Rule(quota, kind)
        self.manager = LeaseManager(lambda: self.now, random.Random(1))
        self.limiter = LimiterLeases(self.manager, self.rule, PROFILES[accuracy], "deny", max_keys=1000)
        self.ledger = Ledger()
        self.trips = 0
        self._next = self.now  # when something happens next
        self._items: list[SyncItem] = []  # under way
        self._replies: list[LeaseReply | str] = []  # and on the way back
        self._stalls = stalls
        self._dice = random.Random(seed)

    @property
    def lease(self) -> Lease:
        return self.limiter.leases["k"]

    def take(self, permits: int = 1) -> Decision:
        """`try_acquire`, and the wait for Redis if there is one."""
        made: Decision | None = self.limiter.try_acquire("k", permits)
        if made is not None:
            return made
        waiter = self.wait(permits)
        while waiter.result is None:
            self._step()
        return waiter.answer()

    def wait(self, permits: int = 1) -> LeaseWaiter:
        """Begin to wait for Redis."""
        waiter = LeaseWaiter("take", permits, lambda: None)
        self.limiter.queue_waiter("k", waiter, self.now)
        if not self.manager.trip_under_way:
            self._next = self.now  # the background task is woken
        return waiter

    def sleep(self, seconds: float) -> None:
        until = self.now + round(seconds * SECOND)
        while self._next <= until:
            self._step()
        self.now = until

    def _step(self) -> None:
        """What happens next: the background task looks for work, its report arrives, or the reply is back."""
        self.now = max(self.now, self._next)
        if self._replies:
            self.manager.deliver(self.now, self._items, self._replies)
            self.manager.trip_under_way = False
            self._items, self._replies = [], []
        elif self._items:
            params, profile = self.limiter.params, self.limiter.profile
            self._replies = [self.ledger.sync(self.now // 1000, params, profile, item.request) for item in self._items]
        else:
            self._items = self.manager.gather(self.now)
            self.trips += bool(self._items)
        if self._items:
            self._next = self.now + self.way()
        else:
            self._next = self.now + self._pause()

    def _pause(self) -> int:
        """Until the background task looks for work and sees something."""
        seconds = self.manager.seconds_until_work(self.now)
        if seconds is None:
            return 1000 * SECOND
        looks = max(int(seconds * SECOND), MILLISECOND)
        if not self.manager.waiters and not self.manager.refill_queue and not self.manager.releases:
            due = self.manager.schedule.next_tick() * TICK - self.now
            looks += max(-((looks - due) // TICK), 0) * TICK
        return looks

    def way(self) -> int:
        """How long it takes to Redis, or back."""
        way = self._dice.randint(0, 2 * MILLISECOND)
        if self._stalls and self._dice.random() < 1 / 16:
            way += self._dice.randint(0, SECOND // 2)
        return way
