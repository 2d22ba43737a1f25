"""What to answer when the store cannot: a policy, chosen once, so that no caller needs an except clause.

allow   everybody goes on (the default: a limiter that is down should not take the service with it)
deny    nobody does
local   a limiter of the same rule in this process decides
raise   `StoreUnavailable`, for those who want to decide themselves
"""

from __future__ import annotations

import logging

from headgate.clock import Clock
from headgate.decision import Decision, decision
from headgate.errors import StoreUnavailable
from headgate.rule import Rule, check_policy
from headgate.stores.memory import MemoryStore

logger = logging.getLogger("headgate")

_RETRY_US = 1_000_000


class Fallback:
    """One limiter's policy. Logs when the store is lost and when it is back, not each time in between."""

    def __init__(self, policy: str, rule: Rule, clock: Clock | None) -> None:
        self.policy = check_policy(policy)
        self.rule = rule
        self.lost = False
        self.local = MemoryStore(clock=clock).open(rule) if policy == "local" else None

    def take(self, key: str, permits: int, error: Exception) -> Decision:
        """Answer a check that the store did not."""
        self._note(error)
        if self.local:
            return _degraded(self.local.try_acquire(key, permits))
        return self._blind(permits)

    def peek(self, key: str, permits: int, error: Exception) -> Decision:
        self._note(error)
        if self.local:
            return _degraded(self.local.peek(key, permits))
        return self._blind(permits)

    def refund(self, key: str, permits: int, error: Exception) -> None:
        self._note(error)
        if self.local:
            self.local.refund(key, permits)

    def reset(self, key: str, error: Exception) -> None:
        self._note(error)
        if self.local:
            self.local.reset(key)

    def found(self) -> None:
        """The store answers again."""
        self.lost = False
        logger.warning("the store of limiter %r answers again", self.rule.name)

    def _note(self, error: Exception) -> None:
        if self.policy == "raise":
            raise StoreUnavailable(f"the store of limiter {self.rule.name!r} did not answer: {error}") from error
        if not self.lost:
            self.lost = True
            logger.error(
                "the store of limiter %r does not answer (%s: %s); on_store_error=%r answers until it does",
                self.rule.name,
                type(error).__name__,
                error,
                self.policy,
            )

    def _blind(self, permits: int) -> Decision:
        limit = self.rule.capacity
        if self.policy == "deny":
            return decision(False, limit, 0, _RETRY_US, _RETRY_US, degraded=True)
        return decision(True, limit, limit - permits, degraded=True)


def _degraded(made: Decision) -> Decision:
    return decision(made.allowed, made.limit, made.remaining, made.reset_us, made.retry_us, degraded=True)
