"""What to answer while Redis cannot be asked, once a lease is used up: a policy, chosen once.

deny    nobody goes on
allow   everybody does
local   a share of the rate: that of one process among as many as were last seen. The share starts empty, so that an
        outage is not worth a burst; a key that this process has not seen before gets one permit at once. A process
        that has never heard from Redis knows of no others, and nothing of what was spent: it has a full bucket
raise   `StoreUnavailable`

What is granted is owed, and charged when Redis is back, before anything else is granted.
"""

from __future__ import annotations

from headgate.algorithms.algorithm import multiply
from headgate.decision import Decision, Units, answer
from headgate.errors import StoreUnavailable
from headgate.hybrid.lease import Lease
from headgate.quota import Quota

RETRY_US = 1_000_000


class Outage:
    """One limiter's policy. *down* is what Redis was last heard to say, None while it answers."""

    def __init__(self, policy: str, name: str, quota: Quota) -> None:
        self.policy = policy
        self.name = name
        self.units = Units(quota.capacity, 1, 1)
        self.capacity = quota.capacity
        self.permit = max(quota.period_us * 1000 // quota.limit, 1)  # nanoseconds that one takes to come in
        self.answers = 0
        self.asked = 0  # permits, by those who were answered at once
        self.down: Exception | None = None
        self.alone = True  # Redis has never answered

    def take(self, lease: Lease, permits: int, now: int) -> Decision:
        """Answer in place of Redis at *now* (nanoseconds)."""
        made = self.peek(lease, permits, now)
        if made.allowed:
            lease.debt += permits
            if self.policy == "local":
                lease.share = max(lease.share, now) + multiply(permits, self._price(lease))
        return made

    def peek(self, lease: Lease, permits: int, now: int) -> Decision:
        """The same, with nothing granted."""
        self.answers += 1
        if self.policy == "local":
            return self._share(lease, permits, now)
        if self.policy == "allow":
            return answer(True, self.units, self.capacity - permits, 0, 0, True)
        if self.policy == "deny":
            return answer(False, self.units, 0, RETRY_US, RETRY_US, True)
        raise StoreUnavailable(f"the store of limiter {self.name!r} did not answer: {self.down}") from self.down

    def _share(self, lease: Lease, permits: int, now: int) -> Decision:
        """A bucket of 1/nodes of the rate and of the capacity, but of one permit at least."""
        price = self._price(lease)
        room = max(multiply(self.permit, self.capacity), price)
        if lease.share == 0:
            first = 0 if lease.expires else room if self.alone else price
            lease.share = now + room - first
        full_in = max(lease.share - now, 0)
        after = full_in + multiply(permits, price)
        if after > room:
            return answer(
                False, self.units, (room - full_in) // price, full_in // 1000, (after - room) // 1000 + 1, True
            )
        return answer(True, self.units, (room - after) // price, after // 1000, 0, True)

    def _price(self, lease: Lease) -> int:
        """Nanoseconds of this share's rate that a permit takes."""
        return multiply(self.permit, max(lease.nodes, 1))
