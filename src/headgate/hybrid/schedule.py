"""When a lease is looked at again, and which leases are on their way back to Redis."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headgate.hybrid.lease import TICK, Lease

if TYPE_CHECKING:
    from headgate.hybrid.limiter_leases import LimiterLeases

logger = logging.getLogger("headgate")

MAX_RELEASES = 10_000  # keys on their way back; leases beyond that are left to run out


class DueSchedule:
    """Leases by the tick at which they are due. Adding one costs the same however many there are.

    A lease has one valid place at a time, its `tick`; `pop_due` skips the lists in which it was before.
    """

    def __init__(self) -> None:
        self._leases: dict[int, list[Lease]] = {}
        self._ticks: list[int] = []  # a heap of the keys of `_leases`

    def add(self, lease: Lease, tick: int = 0) -> None:
        """Look at *lease* when it is due, or at *tick*, or before if it has an earlier place already."""
        tick = tick or max(lease.due // TICK, 1)
        if lease.tick == 0 or tick < lease.tick:
            lease.tick = tick
            if tick not in self._leases:
                self._leases[tick] = []
                heapq.heappush(self._ticks, tick)
            self._leases[tick].append(lease)

    def pop_due(self, now: int) -> Iterator[Lease]:
        """The leases whose tick has come; the caller adds again, later than *now*, the ones it wants to see again."""
        while self._ticks and self._ticks[0] <= now // TICK:
            tick = heapq.heappop(self._ticks)
            for lease in reversed(self._leases.pop(tick)):
                if lease.tick == tick:
                    lease.tick = 0
                    yield lease

    def next_tick(self) -> int:
        """The first tick at which a lease may be due; 0 if there is none."""
        return self._ticks[0] if self._ticks else 0


class ReleaseQueue(dict["tuple[LimiterLeases, str]", Lease]):
    """Leases that are in no table any more and not given back yet, by limiter and key.

    They belong to keys that were evicted and to limiters that were closed. A key that is used again before its lease
    has gone back takes it out of here and goes on with it.
    """

    def add(self, lease: Lease) -> None:
        """Have the permits of *lease* given back."""
        has_news = (lease.lease_id and lease.has_news()) or lease.debt or lease.refund
        if lease.in_flight or (has_news and len(self) < MAX_RELEASES):
            self[lease.owner, lease.key] = lease
        else:
            lease.owner.discard(lease)

    def pick(self, now: int, picked: dict[Lease, str], most: int) -> None:
        """Add to *picked*, up to *most* in all, the leases that can be reported now; discard those that ran out."""
        expired = []
        for lease in self.values() if len(picked) < most else ():
            if len(picked) >= most:
                break
            if lease in picked or lease.in_flight or now < lease.blocked_until:
                continue
            if lease.debt or lease.refund or now < lease.known_until:
                picked[lease] = "release"
            else:
                expired.append(lease)
        for lease in expired:
            del self[lease.owner, lease.key]
            lease.owner.discard(lease)

    def confirm(self, lease: Lease) -> None:
        """Remove *lease*: Redis has taken it back, or never will."""
        if self.get((lease.owner, lease.key)) is lease:
            del self[lease.owner, lease.key]

    def all_blocked(self, now: int) -> bool:
        """Whether Redis cannot be asked about any of these leases."""
        return all(now < lease.blocked_until for lease in self.values())

    def discard_all(self) -> None:
        """Stop waiting for Redis: the leases run out by themselves, and their debts are never charged."""
        owed: Counter[str] = Counter()
        while self:
            lease = self.popitem()[1]
            owed[lease.owner.rule.name] += lease.debt
            lease.owner.discard(lease)
        for name, permits in owed.items():
            if permits:
                logger.warning(
                    "limiter %r was closed or collected in an outage: permits granted and never charged to it: %d",
                    name,
                    permits,
                )
