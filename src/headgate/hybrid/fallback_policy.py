"""Whether Redis answers, and what callers get while it does not and their lease is used up: a policy, chosen once.

deny    every call is denied
allow   every call is allowed
local   this process decides with its share of the rate: one part of as many as there were processes at the key. The
        share starts empty, so that an outage is not worth a burst; a key that this process has not seen before gets
        one permit at once. A process that has never heard from Redis knows of no others, and nothing of what was
        spent: it starts with a full bucket
raise   `StoreUnavailable`

Permits that a policy grants are a debt, which Redis charges when it is back, before it grants anything else.
"""

from __future__ import annotations

import random
from typing import Final

from headgate.algorithms.algorithm import multiply
from headgate.decision import Decision, Units, decision_in
from headgate.errors import StoreUnavailable
from headgate.hybrid.lease import MILLISECOND, SECOND, Lease
from headgate.quota import Quota

FIRST_RETRY: Final = 50 * MILLISECOND  # after the first failure; doubled after each further one, up to LAST_RETRY
LAST_RETRY: Final = SECOND
RETRY_US: Final = 1_000_000


class BackendHealth:
    """What a process knows about Redis from its own trips, and when to try again after a failure.

    *partitioned*: keys lie on several servers, so that the failure of one says nothing about the others. Then
    `outage_error` stays None, and each lease has its own `blocked_until`.
    """

    def __init__(self, rng: random.Random, partitioned: bool) -> None:
        self.partitioned = partitioned
        self.outage_error: Exception | None = None  # why Redis is not asked; None while it answers
        self.last_error: Exception | None = None
        self.never_answered = True
        self.failures = 0  # failed trips, ever
        self.failures_in_row = 0
        self.outages = 0
        self.retry_at = 0
        self.rng = rng
        self.failed_at = 0
        self.retry_after = FIRST_RETRY

    def current_error(self, now: int) -> Exception | None:
        """Why Redis, or one of its servers, is not asked at *now*; None if all are asked."""
        recent = self.partitioned and self.last_error is not None and now < self.failed_at + 2 * SECOND
        return self.last_error if recent else self.outage_error

    def record_success(self) -> None:
        self.never_answered = False
        self.failures_in_row = 0
        self.retry_after = FIRST_RETRY
        self.outage_error = None

    def record_failure(self, now: int, error: Exception) -> None:
        self.failures += 1
        self.failures_in_row += 1
        if self.current_error(now) is None:
            self.outages += 1
        self.last_error = error
        self.failed_at = now
        if not self.partitioned:  # else each server has a breaker, which fails at once while that server is down
            self.outage_error = error
            self.retry_at = now + int(self.retry_after * self.rng.uniform(0.8, 1.2))
            self.retry_after = min(2 * self.retry_after, LAST_RETRY)

    def is_long_outage(self) -> bool:
        """Whether Redis has failed so often that the retries have reached their longest interval."""
        return self.outage_error is not None and self.retry_after >= LAST_RETRY


class FallbackPolicy:
    """What one `HybridLimiter` answers while Redis cannot be asked: from the lease, which has seen the other processes.

    `headgate.fallback.Fallback` does this for `Limiter`, which has no leases: there a limiter in memory decides.
    """

    def __init__(self, policy: str, name: str, quota: Quota, health: BackendHealth) -> None:
        self.policy = policy
        self.name = name
        self.health = health
        self.units = Units(quota.capacity, 1, 1)
        self.capacity = quota.capacity
        self.permit_time = max(quota.period_us * 1000 // quota.limit, 1)  # nanoseconds in which one permit refills
        self.answers = 0
        self.requested = 0  # permits of calls that the policy answered without a wait for Redis

    def take(self, lease: Lease, permits: int, now: int) -> Decision:
        """Answer a call in place of Redis at *now* (nanoseconds)."""
        decision = self.peek(lease, permits, now)
        if decision.allowed:
            lease.debt += permits
            if self.policy == "local":
                lease.share_full_at = max(lease.share_full_at, now) + multiply(permits, self._refill_time(lease))
        return decision

    def peek(self, lease: Lease, permits: int, now: int) -> Decision:
        """The same answer, with nothing granted."""
        self.answers += 1
        if self.policy == "local":
            return self._share(lease, permits, now)
        if self.policy == "allow":
            return self._degraded(True, self.capacity - permits, 0, 0)
        if self.policy == "deny":
            return self._degraded(False, 0, RETRY_US, RETRY_US)
        raise self.unavailable(None)

    def unavailable(self, error: Exception | None) -> StoreUnavailable:
        """The exception of the policy raise, caused by *error* or by what is known of Redis."""
        reason = error or self.health.outage_error or self.health.last_error
        failure = StoreUnavailable(f"the store of limiter {self.name!r} did not answer: {reason}")
        failure.__cause__ = reason
        return failure

    def _share(self, lease: Lease, permits: int, now: int) -> Decision:
        """Decide with a bucket of 1/nodes of the rate and of the capacity, but of one permit at least."""
        refill_time = self._refill_time(lease)
        share_size = max(multiply(self.permit_time, self.capacity), refill_time)
        if lease.share_full_at == 0:
            first = 0 if lease.expires else share_size if self.health.never_answered else refill_time
            lease.share_full_at = now + share_size - first
        full_in = max(lease.share_full_at - now, 0)
        after = full_in + multiply(permits, refill_time)
        if after > share_size:
            return self._degraded(
                False, (share_size - full_in) // refill_time, full_in // 1000, (after - share_size) // 1000 + 1
            )
        return self._degraded(True, (share_size - after) // refill_time, after // 1000, 0)

    def _degraded(self, allowed: bool, remaining: int, reset_us: int, retry_us: int) -> Decision:
        return decision_in(self.units, allowed, self.capacity - remaining, reset_us, retry_us, True)

    def _refill_time(self, lease: Lease) -> int:
        """Nanoseconds in which one permit refills in this process's share."""
        return multiply(self.permit_time, max(lease.nodes, 1))
