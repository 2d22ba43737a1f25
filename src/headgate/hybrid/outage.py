"""What to answer while Redis cannot be asked, once a lease is used up: a policy, chosen once.

deny    nobody goes on
allow   everybody does
local   a share of the rate: that of one process among as many as were last seen. The share starts empty, so that an
        outage is not worth a burst; a key that this process has not seen before gets one permit at once
raise   `StoreUnavailable`

What is granted is owed, and charged when Redis is back, before anything else is granted.
"""

from __future__ import annotations

from headgate.decision import Decision, decision
from headgate.errors import StoreUnavailable
from headgate.hybrid.lease import Lease
from headgate.quota import Quota
from headgate.rule import Rule, check_policy

RETRY_US = 1_000_000


class Outage:
    """One limiter's policy."""

    def __init__(self, policy: str, rule: Rule) -> None:
        self.policy = check_policy(policy)
        self.name = rule.name
        self.quota: Quota = rule.quotas[0]
        self.answers = 0

    def take(self, lease: Lease, permits: int, now: int, error: Exception | None) -> Decision:
        """Answer in place of Redis at *now* (nanoseconds)."""
        self._note(error)
        limit = self.quota.capacity
        if self.policy == "deny":
            return decision(False, limit, 0, RETRY_US, RETRY_US, degraded=True)
        if self.policy == "allow":
            lease.debt += permits
            return decision(True, limit, limit - permits, degraded=True)
        made = self._share(lease, permits, now, spend=True)
        if made.allowed:
            lease.debt += permits
        return made

    def peek(self, lease: Lease, permits: int, now: int, error: Exception | None) -> Decision:
        self._note(error)
        limit = self.quota.capacity
        if self.policy == "deny":
            return decision(False, limit, 0, RETRY_US, RETRY_US, degraded=True)
        if self.policy == "allow":
            return decision(True, limit, limit - permits, degraded=True)
        return self._share(lease, permits, now, spend=False)

    def _share(self, lease: Lease, permits: int, now: int, spend: bool) -> Decision:
        """A bucket of 1/nodes of the rate and of the capacity, but of one permit at least."""
        quota, nodes = self.quota, max(lease.nodes, 1)
        permit = quota.period_us * nodes * 1000 // quota.limit  # nanoseconds of this share's rate
        room = max(permit * quota.capacity // nodes, permit)
        if lease.share == 0:
            lease.share = now + room - (0 if lease.expires else permit)
        full_in = max(lease.share - now, 0)
        after = full_in + permits * permit
        limit = quota.capacity
        if after > room:
            retry = (after - room) // 1000 + 1
            return decision(False, limit, (room - full_in) // permit, full_in // 1000, retry, degraded=True)
        if spend:
            lease.share = now + after
        return decision(True, limit, (room - after) // permit, after // 1000, degraded=True)

    def _note(self, error: Exception | None) -> None:
        self.answers += 1
        if self.policy == "raise":
            raise StoreUnavailable(f"the store of limiter {self.name!r} did not answer: {error}") from error
