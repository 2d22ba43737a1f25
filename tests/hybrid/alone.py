"""One process alone at one key, on a clock of its own: the real node and ledger, a trip that takes its time."""

from __future__ import annotations

import random

from headgate.decision import Decision
from headgate.hybrid.errand import Waiter
from headgate.hybrid.lease import MILLISECOND, SECOND, TICK, Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.member import Member
from headgate.hybrid.node import Node
from headgate.hybrid.protocol import STYLES
from headgate.rule import Rule


class Alone:
    """Every 10 ms, and when somebody waits, its driver looks around; trips take up to 4 ms, now more and now less.

    *stalls*: on a machine that is too busy, one of eight takes longer, there or back: up to half a second.
    """

    def __init__(
        self, quota: str, kind: str = "token_bucket", accuracy: str = "high", start: int = 1000, stalls: bool = False
    ) -> None:
        self.now = start * SECOND
        self.rule = Rule(quota, kind)
        self.node = Node(random.Random(1))
        self.member = Member(
            self.node, self.rule, STYLES[accuracy], "deny", str, lambda: self.now, lambda *_: None, 1000
        )
        self.ledger = Ledger()
        self.trips = 0
        self._stalls = stalls
        self._dice = random.Random(2)

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
            self._trip()
        return waiter.answer()

    def wait(self, permits: int = 1) -> Waiter:
        """Begin to wait for Redis."""
        waiter = Waiter("take", permits, lambda: None)
        self.member.wait("k", waiter, self.now)
        return waiter

    def sleep(self, seconds: float) -> None:
        until = self.now + round(seconds * SECOND)
        while True:
            pause = self.node.pause(self.now)
            step = self.now + (TICK if pause is None else max(int(pause * SECOND), MILLISECOND))
            if step > until:
                break
            self.now = step
            self._trip()
        self.now = max(self.now, until)

    def _trip(self) -> None:
        errands = self.node.gather(self.now)
        if not errands:
            self.now += MILLISECOND if self.node.waiting else 0
            return
        self.trips += 1
        self._pass()
        law, style = self.member.law, self.member.style
        replies = [self.ledger.sync(self.now // 1000, law, style, errand.ask) for errand in errands]
        self._pass()
        self.node.deliver(self.now, errands, replies)
        self.node.busy = False

    def _pass(self) -> None:
        self.now += self._dice.randint(0, 2 * MILLISECOND)
        if self._stalls and self._dice.random() < 1 / 16:
            self.now += self._dice.randint(0, SECOND // 2)
