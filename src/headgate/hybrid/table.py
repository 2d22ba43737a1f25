"""The leases of one limiter in this process, by key, and the way in for callers: no I/O, no lock where compiled.

What cannot be decided here goes to `remote`, which asks Redis and waits for the answer.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from headgate.algorithms.algorithm import multiply
from headgate.decision import Decision, QuickDecision, QuickDenial, Units, answer
from headgate.hybrid.lease import Lease
from headgate.hybrid.outage import Outage
from headgate.hybrid.protocol import Law, soonest
from headgate.keys import check_key
from headgate.rule import check_permits

COMPILED: Final = not isinstance(answer, FunctionType)

# As in the memory store: compiled, the steps from look-up to saved balance run no Python code and start no garbage
# collection, so nobody can come between them while there is an interpreter lock.
LOCKED: Final = not COMPILED or not getattr(sys, "_is_gil_enabled", lambda: True)()

ONE: Final[object] = 1  # by identity: quicker than to compare, and True is another object


class Table:
    """Arguments of callers are Any: they are checked here, and compiled code would turn True into 1 before that."""

    def __init__(
        self,
        units: Units,
        period: int,
        counter: bool,
        lock: Any,
        thirsty: deque[Lease],
        read_clock: Callable[[], int],
        remote: Callable[[str, int], Any],
        outage: Outage,
    ) -> None:
        self.units = units
        self.limit = units.limit
        self.cost = units.cost
        self.rate = units.rate
        self.room = units.limit * units.cost
        self.period = period  # microseconds; 0 for a bucket
        self.counter = counter
        self.thirsty = thirsty
        self.read_clock = read_clock
        self.remote = remote
        self.outage = outage
        self.leases: dict[Any, Lease] = {}
        self.refunded = 0  # units that were put back here: they were asked for all the same
        self.renew(lock)

    def renew(self, lock: Any) -> None:
        """Go on with another lock: after a fork nobody may ever release the old one."""
        self.lock = lock
        self.acquire_lock = lock.acquire
        self.release_lock = lock.release

    def try_acquire(self, key: Any, permits: Any = 1) -> Any:
        cost = self.cost if permits is ONE else multiply(check_permits(permits, self.limit), self.cost)
        if type(key) is not str:
            key = check_key(key)
        try:
            if LOCKED:
                self.acquire_lock()
            lease = self.leases[key]
            now = self.read_clock()
            left = lease.balance - cost
            if left >= 0 and now < lease.expires:
                lease.balance = left
                if left <= lease.low:
                    lease.low = -1
                    self.thirsty.append(lease)
                spare = left + lease.beyond
                decision = QuickDecision()
                decision._units = self.units
                decision._spare = spare
                decision._reset = self.room - spare if self.period == 0 else self.over(lease, now)
                decision._retry = 0
                return decision
            if now < lease.deny_until and self.certain(lease, cost):
                lease.denied += cost
                return self.deny(lease, now, cost)
            if self.outage.down is not None:
                self.outage.asked += cost // self.cost
                return self.outage.take(lease, cost // self.cost, now)
        except KeyError:
            check_key(key)
        finally:
            if LOCKED:
                try:
                    self.release_lock()
                except RuntimeError:
                    pass  # interrupted before it was ours
        return self.remote(key, permits)

    def take(self, lease: Lease, cost: int, now: int) -> bool:
        """Spend *cost* units of *lease*, if they are there: here, where it is one step."""
        if now >= lease.expires or lease.balance < cost:
            return False
        lease.balance -= cost
        return True

    def peek(self, key: str, permits: int) -> Decision | None:
        """The answer of `try_acquire` with nothing spent; None if it takes Redis to know."""
        with self.lock:
            lease = self.leases.get(key)
            if lease is None:
                return None
            now = self.read_clock()
            cost = multiply(permits, self.cost)
            left = lease.balance - cost
            if left >= 0 and now < lease.expires and lease.balance > 0:
                spare = left + lease.beyond
                return answer(True, self.units, spare, self.reset(lease, now, spare), 0)
            if now < lease.deny_until and self.certain(lease, cost):
                return self.deny(lease, now, cost)
            return None

    def refund(self, key: str, permits: int) -> bool:
        """Put back what was spent since the last report; whether that was all. The rest waits for the next one."""
        with self.lock:
            lease = self.leases.get(key)
            if lease is None:
                return False
            permits = min(permits, self.limit)
            cost = multiply(permits, self.cost)
            here = max(min(cost, lease.mark - lease.balance), 0) if self.read_clock() < lease.expires else 0
            lease.balance += here
            self.refunded += here
            lease.deny_until = 0
            # no more than makes it full now: by the time that Redis is told, some of it may be spent
            missing = self.room - lease.balance - lease.beyond - multiply(lease.others + lease.refund, self.cost)
            lease.refund += max(-(-min(cost - here, missing) // self.cost), 0)
            return lease.refund == 0

    def certain(self, lease: Lease, cost: int) -> bool:
        """Whether an ask for *cost* units can be refused here: not if it may have to wait for what is not reported."""
        if cost < lease.deny_from:
            return False
        if self.counter:  # what is here would count in the next window, and so would what is being fetched
            if cost == self.cost:
                return lease.flight == 0 or lease.deny_until + lease.later < lease.turns
            return lease.balance == 0 and lease.flight == 0
        return cost <= self.room - lease.unheard - lease.mark + lease.balance  # what was spent leaves no room to refill

    def deny(self, lease: Lease, now: int, cost: int) -> Decision:
        """The refusal of an ask for *cost* units, from what is known here."""
        here = lease.balance if now < lease.expires else 0
        until = lease.deny_until + lease.later
        wait = -((now - until) // 1000)  # microseconds, rounded up
        if self.period == 0:
            wait = multiply(wait, self.rate)
            short = cost - lease.there - here
            if short > 0:
                wait += short
                until += multiply(-(-short // self.rate), 1000)
        elif self.counter and (cost > self.cost or lease.others == 0):
            left = -((now - lease.ends) // 1000)
            if left > 0:
                law: Law = lease.home.law
                own = here // self.cost
                more = soonest(law, law.period - left, lease.current, lease.previous, cost // self.cost, own)
                wait = max(wait, more)
                until = now + multiply(wait, 1000)
        lease.told(now, until, cost > self.cost)
        spare = min(here + lease.beyond, cost - 1)
        denial = QuickDenial()
        denial._units = self.units
        denial._spare = spare
        denial._reset = max(self.reset(lease, now, spare), wait)
        denial._retry = wait
        return denial

    def reset(self, lease: Lease, now: int, spare: int) -> int:
        return self.room - spare if self.period == 0 else self.over(lease, now)

    def over(self, lease: Lease, now: int) -> int:
        """Microseconds until a window counts no more."""
        left = -((now - lease.ends) // 1000)
        if left < 0:
            left = 0
        return left + self.period if self.counter else left
