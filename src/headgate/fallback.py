"""What to answer when the store cannot: a policy, chosen once, so that callers need no except clause.

allow   every call is granted (the default: a limiter that is down should not take the service with it)
deny    every call is denied
local   a limiter of the same rule in this process decides. It starts from what the store last said about the key, and
        its grants are charged to the store when that is back, so that an outage does not give a key a second quota
raise   `StoreUnavailable`, for callers that decide themselves
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from time import monotonic

from headgate._lifecycle import renew_after_fork
from headgate.algorithms.booking import BOOKED, DENIED, Booked, Booking
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision, decision
from headgate.errors import StoreUnavailable
from headgate.rule import Rule, check_policy
from headgate.stores.memory import MemoryStore

logger = logging.getLogger("headgate")

_RETRY_US = 1_000_000
LOG_EVERY = 60.0  # seconds
MAX_DEBTS = 100_000  # keys whose debts are kept during an outage


class Fallback:
    """What one `Limiter` answers while its store cannot. Thread-safe. `HybridLimiter` has its own: `FallbackPolicy`.

    The store's circuit breaker logs when the store stops answering and when it is back. A store that answers with an
    error (out of memory, read-only, no permission) is logged here, once until it decides again, and at most once a
    minute: the error may concern a single key.
    """

    def __init__(self, policy: str, rule: Rule, clock: Clock | None) -> None:
        self.policy = check_policy(policy)
        self.rule = rule
        self.answers = 0  # how many this policy has given
        self.refused_at = 0.0  # monotonic; 0: the store decides
        self._logged_at = -math.inf
        self._clock = clock or SYSTEM_CLOCK
        self.local = MemoryStore(clock=clock).open(rule) if policy == "local" else None
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start without debts: the parent charges what it has granted."""
        self.debts: dict[str, int] = {}  # permits granted in place of the store, by key
        self._lock = threading.RLock()  # a signal handler may call the limiter in the middle of a call

    def follow_store(self, key: str, decision: Decision) -> None:
        """Spend from the local limiter until it is no more generous than *decision*, which the store made."""
        if self.local:
            ahead = self.local.peek(key, 0).remaining - decision.remaining
            if ahead > 0:
                self.local.try_acquire(key, ahead)

    def take(
        self, key: str, permits: int, error: Exception, *, refused: bool, unsure: bool, share: int = 0
    ) -> Decision:
        """Answer a check that the store did not. *refused*: it answered with an error. *unsure*: it may have spent."""
        self.record_failure(error, refused=refused)
        made = self._take(key, permits, share)
        if self.local and made.allowed and not unsure:  # the store may have spent it: a debt would charge it twice
            self.record_debt(key, permits)
        return made

    def book(self, asked: Booking, error: Exception, *, refused: bool, unsure: bool) -> Booked:
        """Answer a booking that the store did not: allow gives a slot now, local one of the limiter in this process."""
        self.record_failure(error, refused=refused)
        if self.local is None:
            made, now = self._fixed_answer(asked.permits), self._clock.now()
            return Booked(BOOKED if made.allowed else DENIED, now, now, asked.permits, made)
        booked: Booked = self.local.book(asked)
        if booked.outcome == BOOKED and not unsure:
            self.record_debt(asked.key, asked.permits)
        return booked._replace(decision=_degraded(booked.decision))

    def peek(self, key: str, permits: int, error: Exception, *, refused: bool) -> Decision:
        self.record_failure(error, refused=refused)
        return self._peek(key, permits)

    def record_debt(self, key: str, permits: int) -> None:
        """Remember to charge *permits* to the store."""
        with self._lock:
            if key in self.debts or len(self.debts) < MAX_DEBTS:
                self.debts[key] = self.debts.get(key, 0) + permits

    def take_debt(self, key: str) -> int:
        """Remove the debt of *key* and return what the caller must charge to the store: permits refill meanwhile."""
        with self._lock:
            debt = self.debts.pop(key, 0)
        if not debt or self.local is None:
            return debt
        return min(debt, self.rule.capacity - self.local.peek(key, 0).remaining)

    def refund(self, key: str, permits: int) -> int:
        """Give *permits* back, first those of the debt. Returns how many are left for the store to give back."""
        if self.local is None:
            return permits
        self.local.refund(key, permits)
        with self._lock:
            debt = self.debts.pop(key, 0)
            if debt > permits:
                self.debts[key] = debt - permits
        return max(permits - debt, 0)

    def reset(self, key: str) -> None:
        """Forget *key*, as if never seen."""
        if self.local:
            self.local.reset(key)
        with self._lock:
            self.debts.pop(key, None)

    def record_success(self) -> None:
        """Log that the store decides again, if the log has said that it does not."""
        refused_at, self.refused_at = self.refused_at, 0.0
        if refused_at and self._logged_at >= refused_at:
            logger.warning("the store of limiter %r decides again", self.rule.name)

    def record_failure(self, error: Exception, *, refused: bool) -> None:
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

    def _take(self, key: str, permits: int, share: int = 0) -> Decision:
        return (
            _degraded(self.local.try_acquire_above(key, permits, share)) if self.local else self._fixed_answer(permits)
        )

    def _peek(self, key: str, permits: int) -> Decision:
        return _degraded(self.local.peek(key, permits)) if self.local else self._fixed_answer(permits)

    def _fixed_answer(self, permits: int) -> Decision:
        limit = self.rule.capacity
        if self.policy == "deny":
            return decision(False, limit, 0, _RETRY_US, _RETRY_US, degraded=True)
        return decision(True, limit, limit - permits, degraded=True)


def take_all(
    checks: Sequence[tuple[Fallback, str, int]], error: Exception, *, refused: bool, unsure: bool
) -> list[Decision]:
    """Answer checks that the store did not decide together: each by its own policy, and all allow or none is granted.

    A check is a fallback, a key and permits; *refused* and *unsure* are as for `Fallback.take`.
    """
    for fallback, _, _ in sorted(checks, key=lambda check: check[0].policy != "raise"):  # raise, before others count
        fallback.record_failure(error, refused=refused)
    made = [fallback._peek(key, permits) for fallback, key, permits in checks]
    if all(made):
        for i, (fallback, key, permits) in enumerate(checks):
            made[i] = fallback._take(key, permits)
            if not made[i]:  # another call came first
                for earlier, its_key, its_permits in checks[:i]:
                    if earlier.local:
                        earlier.local.refund(its_key, its_permits)
                break
        else:
            for fallback, key, permits in checks:
                if fallback.local and not unsure:
                    fallback.record_debt(key, permits)
            return made
    pairs = zip(checks, made, strict=True)
    return [fallback._peek(key, 0) if decision else decision for (fallback, key, _), decision in pairs]


def _degraded(made: Decision) -> Decision:
    return decision(made.allowed, made.limit, made.remaining, made.reset_us, made.retry_us, degraded=True)
