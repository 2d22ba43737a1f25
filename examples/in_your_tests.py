"""Test code that is limited without waiting: move the clock."""

from headgate import Limiter
from headgate.testing import ManualClock


def may_log_in(limiter: Limiter, user: str) -> bool:
    return limiter.try_acquire(f"login:{user}").allowed


clock = ManualClock()
limiter = Limiter("3/hour", algorithm="sliding_window", clock=clock)

assert [may_log_in(limiter, "ann") for _ in range(4)] == [True, True, True, False]
clock.advance(3599.0)
assert not may_log_in(limiter, "ann")
clock.advance(1.0)
assert may_log_in(limiter, "ann")
print("an hour passed in no time")
