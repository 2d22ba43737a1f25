"""What to answer when the store cannot: a policy, chosen once, so that no caller needs an except clause.

allow   everybody goes on (the default: a limiter that is down should not take the service with it)
deny    nobody does
local   a limiter of the same rule in this process decides. It starts from what the store last said about the key, and
        what it grants is charged to the store when that is back: an outage is not worth a second quota
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
MAX_OWED = 100_000  # keys whose debts are remembered through an outage


class Fallback:
    """One limiter's policy.

    A store that is silent is the business of its breaker, which logs when it is lost and when it is back. One that
    answers with an error (out of memory, read-only, no permission) is logged here, once until it decides again.
    """

    def __init__(self, policy: str, rule: Rule, clock: Clock | None) -> None:
        self.policy = check_policy(policy)
        self.rule = rule
        self.answers = 0  # given in place of the store, ever
        self.refused = False
        self.local = MemoryStore(clock=clock).open(rule) if policy == "local" else None
        self.owed: dict[str, int] = {}  # permits granted in place of the store, by key

    def follow(self, key: str, decision: Decision) -> None:
        """Let the local limiter know what the store said, so that it is no more generous when it has to answer."""
        if self.local and decision.allowed:
            ahead = self.local.peek(key, 0).remaining - decision.remaining
            if ahead > 0:
                self.local.try_acquire(key, ahead)

    def take(self, key: str, permits: int, error: Exception, refused: bool) -> Decision:
        """Answer a check that the store did not; *refused*: it answered with an error."""
        self._note(error, refused)
        if self.local:
            made = self.local.try_acquire(key, permits)
            if made.allowed and (key in self.owed or len(self.owed) < MAX_OWED):
                self.owed[key] = self.owed.get(key, 0) + permits
            return _degraded(made)
        return self._blind(permits)

    def peek(self, key: str, permits: int, error: Exception, refused: bool) -> Decision:
        self._note(error, refused)
        if self.local:
            return _degraded(self.local.peek(key, permits))
        return self._blind(permits)

    def refund(self, key: str, permits: int, error: Exception, refused: bool) -> None:
        self._note(error, refused)
        if self.local:
            self.local.refund(key, permits)
            if key in self.owed:
                self.owed[key] = max(self.owed[key] - permits, 0)

    def reset(self, key: str, error: Exception, refused: bool) -> None:
        self._note(error, refused)
        if self.local:
            self.local.reset(key)
            self.owed.pop(key, None)

    def accepted(self) -> None:
        """The store decides again."""
        self.refused = False
        logger.warning("the store of limiter %r decides again", self.rule.name)

    def _note(self, error: Exception, refused: bool) -> None:
        self.answers += 1
        if self.policy == "raise":
            raise StoreUnavailable(f"the store of limiter {self.rule.name!r} did not answer: {error}") from error
        if refused and not self.refused:
            self.refused = True
            logger.error(
                "the store of limiter %r refuses (%s); on_store_error=%r answers until it decides again",
                self.rule.name,
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
