"""Whom to look at when: leases by the tick at which they are due. To place one is a step, however many there are."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headgate.hybrid.lease import TICK, Lease


class Wheel:
    """A lease has one place at a time, its `slot`; where it was before it is passed over."""

    def __init__(self) -> None:
        self._places: dict[int, list[Lease]] = {}
        self._ticks: list[int] = []  # a heap of the same ticks

    def schedule(self, lease: Lease) -> None:
        """Look at *lease* when it is due, or before if it has an earlier place already."""
        self.place(lease, max(lease.due // TICK, 1))

    def place(self, lease: Lease, tick: int) -> None:
        if lease.slot == 0 or tick < lease.slot:
            lease.slot = tick
            if tick not in self._places:
                self._places[tick] = []
                heapq.heappush(self._ticks, tick)
            self._places[tick].append(lease)

    def turn(self, now: int) -> Iterator[Lease]:
        """Those whose tick has come; who is to be looked at again must be placed again, later than *now*."""
        while self._ticks and self._ticks[0] <= now // TICK:
            tick = heapq.heappop(self._ticks)
            for lease in reversed(self._places.pop(tick)):
                if lease.slot == tick:
                    lease.slot = 0
                    yield lease
