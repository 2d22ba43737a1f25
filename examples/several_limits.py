"""Requests and language-model tokens at once, all or nothing, and the unused tokens given back."""

from headgate import Limiter
from headgate.testing import ManualClock

clock = ManualClock()
requests = Limiter(["3/second", "100/hour"], clock=clock)  # both must allow, else neither is spent
tokens = Limiter("10000/minute", clock=clock)

for call in range(4):
    decision = requests.try_acquire("team:7")
    print(f"call {call}: {'allowed' if decision else 'denied'} by the limit of {decision.limit}")
assert requests.peek("team:7", permits=0).limit == 3, "the limit that binds is the one reported"

clock.advance(1.0)
assert requests.try_acquire("team:7")

estimate, used = 4000, 1200
assert tokens.try_acquire("team:7", permits=estimate)
tokens.refund("team:7", permits=estimate - used)
assert tokens.peek("team:7", permits=0).remaining == 10000 - used
