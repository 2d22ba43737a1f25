"""A limit for each user, in this process: no server needed."""

from headgate import Limiter

limiter = Limiter("5/minute")

for attempt in range(1, 8):
    decision = limiter.try_acquire("user:123")
    if decision:
        print(f"call {attempt}: allowed, {decision.remaining} left")
    else:
        print(f"call {attempt}: denied, try again in {decision.retry_after:.1f} s")

assert not limiter.try_acquire("user:123")
assert limiter.try_acquire("user:456"), "another user has a limit of their own"
