"""One process alone at one key, on a clock of its own: the real node and ledger, a trip that takes its time.

Callers do not wait for a trip that is not theirs: they come and go while it is under way.
"""

from __future__ import annotations

import random

from headgate.decision import Decision
from headgate.hybrid.errand import Errand, Waiter
from headgate.hybrid.lease import MILLISECOND, SECOND, TICK, Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.member import Member
from headgate.hybrid.node import Node
from headgate.hybrid.protocol import STYLES, Reply
from headgate.rule import Rule


class Alone:
    """Every 10 ms, and when somebody waits, its driver looks around; trips take up to 4 ms, now more and now less.

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
        self.node = Node(random.Random(1))
        self.member = Member(
            self.node, self.rule, STYLES[accuracy], "deny", str, lambda: self.now, lambda *_: None, 1000
        )
        self.ledger = Ledger()
        self.trips = 0
        self._next = self.now  # when something happens next
        self._errands: list[Errand] = []  # under way
        self._replies: list[Reply | str] = []  # and on the way back
        self._stalls = stalls
        self._dice = random.Random(seed)

    @property
    def lease(self) -> Lease:
        return self.member.table.leases["k"]

    def take(self, permits: int = 1) -> Decision:
        """`try_acquire`, and the wait for Redis if there is one."""
        made: Decision | None = self.member.table.try_acquire("k", permits)
        if made is not None:
            return made
        waiter = self.wait(permits)
        while waiter.result is None:
            self._step()
        return waiter.answer()

    def wait(self, permits: int = 1) -> Waiter:
        """Begin to wait for Redis."""
        waiter = Waiter("take", permits, lambda: None)
        self.member.wait("k", waiter, self.now)
        if not self.node.busy:
            self._next = self.now  # the driver is woken
        return waiter

    def sleep(self, seconds: float) -> None:
        until = self.now + round(seconds * SECOND)
        while self._next <= until:
            self._step()
        self.now = until

    def _step(self) -> None:
        """What happens next: the driver looks around, its report arrives, or the reply is back."""
        self.now = max(self.now, self._next)
        if self._replies:
            self.node.deliver(self.now, self._errands, self._replies)
            self.node.busy = False
            self._errands, self._replies = [], []
        elif self._errands:
            law, style = self.member.law, self.member.style
            self._replies = [self.ledger.sync(self.now // 1000, law, style, errand.ask) for errand in self._errands]
        else:
            self._errands = self.node.gather(self.now)
            self.trips += bool(self._errands)
        if self._errands:
            self._next = self.now + self.way()
        else:
            self._next = self.now + self._pause()

    def _pause(self) -> int:
        """Until the driver looks around and sees something."""
        pause = self.node.pause(self.now)
        if pause is None:
            return 1000 * SECOND
        looks = max(int(pause * SECOND), MILLISECOND)
        if not self.node.waiting and not self.node.thirsty and not self.node.leaving:
            due = min(self.node.wheel._ticks, default=0) * TICK - self.now
            looks += max(-((looks - due) // TICK), 0) * TICK
        return looks

    def way(self) -> int:
        """How long it takes to Redis, or back."""
        way = self._dice.randint(0, 2 * MILLISECOND)
        if self._stalls and self._dice.random() < 1 / 16:
            way += self._dice.randint(0, SECOND // 2)
        return way
