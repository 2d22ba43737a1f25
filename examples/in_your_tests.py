"""Test code that is limited: move the clock instead of waiting, and let a limiter make the refusals."""

from unittest import mock

from headgate import Limiter
from headgate.testing import ManualClock

# the code under test, with a limiter of module level
limiter = Limiter("3/hour", algorithm="sliding_window")


def log_in(user: str, limiter: Limiter) -> str:
    decision = limiter.try_acquire(f"login:{user}")
    if decision:
        return "welcome"
    return "not now" if decision.degraded else f"come back in {decision.retry_after:.0f} s"


# 1. a limiter on a clock that you move: an hour passes in no time
clock = ManualClock()
ours = Limiter("3/hour", algorithm="sliding_window", clock=clock)
assert [log_in("ann", ours) for _ in range(4)] == ["welcome", "welcome", "welcome", "come back in 3600 s"]
clock.advance(3599.0)
assert log_in("ann", ours) == "come back in 1 s"
clock.advance(1.0)
assert log_in("ann", ours) == "welcome"

# 2. a store that is down: nobody listens on that port
try:
    down = Limiter("3/hour", store="redis://127.0.0.1:1/0", on_store_error="deny")
except ImportError as error:
    print(error)  # without headgate[redis]
else:
    assert log_in("ann", down) == "not now"

# 3. a mock, if it must be one: of the object, or of the class for all limiters
spent = Limiter("1/minute", clock=clock)
spent.try_acquire("k")
denied = spent.try_acquire("k")
with mock.patch.object(limiter, "try_acquire", return_value=denied) as asked:
    assert log_in("ann", limiter) == "come back in 60 s"
asked.assert_called_once_with("login:ann")
assert log_in("ann", limiter) == "welcome"

print("an hour passed in no time")
