"""What to answer when the store cannot: a policy, chosen once, so that no caller needs an except clause.

allow   everybody goes on (the default: a limiter that is down should not take the service with it)
deny    nobody does
local   a limiter of the same rule in this process decides. It starts from what the store last said about the key, and
        what it grants is charged to the store when that is back: an outage is not worth a second quota
raise   `StoreUnavailable`, for those who want to decide themselves
"""

from __future__ import annotations

import logging
import math
import threading
from time import monotonic

from headgate._lifecycle import renew_after_fork
from headgate.clock import Clock
from headgate.decision import Decision, decision
from headgate.errors import StoreUnavailable
from headgate.rule import Rule, check_policy
from headgate.stores.memory import MemoryStore

logger = logging.getLogger("headgate")

_RETRY_US = 1_000_000
LOG_EVERY = 60.0  # seconds
MAX_OWED = 100_000  # keys whose debts are remembered through an outage


class Fallback:
    """One limiter's policy. Thread-safe.

    A store that is silent is the business of its breaker, which logs when it is lost and when it is back. One that
    answers with an error (out of memory, read-only, no permission) is logged here, once until it decides again, and at
    most once a minute: a single key can be at fault.
    """

    def __init__(self, policy: str, rule: Rule, clock: Clock | None) -> None:
        self.policy = check_policy(policy)
        self.rule = rule
        self.answers = 0  # given in place of the store, ever
        self.refused_at = 0.0  # monotonic; 0: it decides
        self._logged_at = -math.inf
        self.local = MemoryStore(clock=clock).open(rule) if policy == "local" else None
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Owe nothing: what a parent granted the parent pays."""
        self.owed: dict[str, int] = {}  # permits granted in place of the store, by key
        self._lock = threading.Lock()

    def follow(self, key: str, decision: Decision) -> None:
        """Let the local limiter know what the store said, so that it is no more generous when it has to answer."""
        if self.local:
            ahead = self.local.peek(key, 0).remaining - decision.remaining
            if ahead > 0:
                self.local.try_acquire(key, ahead)

    def take(self, key: str, permits: int, error: Exception, *, refused: bool, unsure: bool) -> Decision:
        """Answer a check that the store did not. *refused*: it answered with an error. *unsure*: it may have spent."""
        self.note(error, refused=refused)
        if self.local is None:
            return self._blind(permits)
        made = self.local.try_acquire(key, permits)
        if made.allowed and not unsure:  # else it may be spent there already, and would be a second time
            self.owe(key, permits)
        return _degraded(made)

    def peek(self, key: str, permits: int, error: Exception, *, refused: bool) -> Decision:
        self.note(error, refused=refused)
        if self.local:
            return _degraded(self.local.peek(key, permits))
        return self._blind(permits)

    def owe(self, key: str, permits: int) -> None:
        """Remember to charge the store for *permits*."""
        with self._lock:
            if key in self.owed or len(self.owed) < MAX_OWED:
                self.owed[key] = self.owed.get(key, 0) + permits

    def claim(self, key: str) -> int:
        """What the store is to be charged for *key* now, by the caller and nobody else. Debts age as limits do."""
        with self._lock:
            owed = self.owed.pop(key, 0)
        if not owed or self.local is None:
            return owed
        return min(owed, self.rule.capacity - self.local.peek(key, 0).remaining)

    def forgive(self, key: str, permits: int) -> int:
        """*permits* are given back: first those that are owed. Returns how many are left for the store."""
        if self.local is None:
            return permits
        self.local.refund(key, permits)
        with self._lock:
            owed = self.owed.pop(key, 0)
            if owed > permits:
                self.owed[key] = owed - permits
        return max(permits - owed, 0)

    def forget(self, key: str) -> None:
        """*key* is to be as if never seen."""
        if self.local:
            self.local.reset(key)
        with self._lock:
            self.owed.pop(key, None)

    def accepted(self) -> None:
        """The store decides again."""
        refused_at, self.refused_at = self.refused_at, 0.0
        if refused_at and self._logged_at >= refused_at:
            logger.warning("the store of limiter %r decides again", self.rule.name)

    def note(self, error: Exception, *, refused: bool) -> None:
        """Count an answer that the store did not give; raise if that is the policy."""
        self.answers += 1
        if self.policy == "raise":
            raise StoreUnavailable(f"the store of limiter {self.rule.name!r} did not answer: {error}") from error
        if not refused or self.refused_at:
            return
        self.refused_at = now = monotonic()
        if now - self._logged_at > LOG_EVERY:
            self._logged_at = now
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
