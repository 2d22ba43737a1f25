"""Leases in no table any more that are not given back yet: of keys that were evicted, of limiters that were closed."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from headgate.hybrid.lease import Lease

if TYPE_CHECKING:
    from headgate.hybrid.member import Member

logger = logging.getLogger("headgate")

QUEUE = 10_000  # keys on their way out; beyond that leases are left to run out


class Farewells(dict["tuple[Member, str]", Lease]):
    """By limiter and key. Whoever is met again before it has left is taken out, and goes on as it was."""

    def add(self, lease: Lease) -> None:
        """See to it that what *lease* holds goes back."""
        told = (lease.lid and lease.worth()) or lease.debt or lease.refund
        if lease.flight or (told and len(self) < QUEUE):
            self[lease.home, lease.key] = lease
        else:
            lease.home.drop(lease)

    def pick(self, now: int, picked: dict[Lease, str], most: int) -> None:
        """Pick those that can travel now, up to *most* with those picked before; drop what has run out."""
        gone = []
        for lease in self.values() if len(picked) < most else ():
            if len(picked) >= most:
                break
            if lease in picked or lease.flight or now < lease.ill:
                continue
            if lease.debt or lease.refund or now < lease.known:
                picked[lease] = "release"
            else:
                gone.append(lease)
        for lease in gone:
            del self[lease.home, lease.key]
            lease.home.drop(lease)

    def heard(self, lease: Lease) -> None:
        """Redis knows that *lease* is no more."""
        if self.get((lease.home, lease.key)) is lease:
            del self[lease.home, lease.key]

    def ill(self, now: int) -> bool:
        """Whether Redis cannot be asked about any of them."""
        return all(now < lease.ill for lease in self.values())

    def drop_all(self) -> None:
        """Wait for Redis no longer: leases run out by themselves, and what is owed is never charged."""
        owed: Counter[str] = Counter()
        while self:
            lease = self.popitem()[1]
            owed[lease.home.rule.name] += lease.debt
            lease.home.drop(lease)
        for name, permits in owed.items():
            if permits:
                logger.warning(
                    "limiter %r is closed or gone while Redis is away: permits granted and never charged to it: %d",
                    name,
                    permits,
                )
