"""A limiter beside the exact model of its algorithm, and perhaps beside a memory store, step by step.

The model is told what the limiter granted, so each step is judged on its own: the limiter must never grant what the
model does not, and where its numbers are exact it must grant all that the model does.
"""

from collections import defaultdict
from collections.abc import Iterable

from headgate import Decision, Limiter, Quota
from headgate.testing import ManualClock
from tests.support.oracle import Oracle
from tests.support.quotas import exact
from tests.support.scenario import microseconds

MICROSECOND = 0.000_001

Step = tuple[int, str, str, int]  # microseconds to wait first, call, key, permits


class Trial:
    """`walk` makes each call of the steps, and compares what comes back."""

    def __init__(
        self, limiter: Limiter, clock: ManualClock, algorithm: str, *quotas: Quota, twin: Limiter | None = None
    ) -> None:
        self.limiter, self.clock = limiter, clock
        self.twin = twin  # in memory
        self.oracles = defaultdict[str, Oracle](lambda: Oracle(algorithm, *quotas))
        self.exact = all(exact(algorithm, quota) for quota in quotas)
        self.granted = self.denied = 0

    def walk(self, steps: Iterable[Step]) -> None:
        for pause, call, key, permits in steps:
            self.clock.advance(pause / 1_000_000)
            getattr(self, call)(key, permits)

    def take(self, key: str, permits: int) -> Decision:
        """Peek, then take: the same answer."""
        now, oracle = self.clock.now(), self.oracles[key]
        expected = self.limiter.peek(key, permits)
        decision = self.limiter.try_acquire(key, permits)
        assert decision == expected, "peek is the answer that follows"
        if self.twin:
            assert decision == self.twin.try_acquire(key, permits), "the memory store answers otherwise"
        self.judge(decision, key, permits)
        if decision:
            oracle.spend(now, permits)
        self.granted += decision.allowed
        self.denied += not decision.allowed
        self.judge_reset(decision, key)
        return decision

    def judge(self, decision: Decision, key: str, permits: int) -> None:
        now, oracle = self.clock.now(), self.oracles[key]
        refusing, left = oracle.refusing(now, permits), oracle.remaining(now)
        retry = microseconds(decision.retry_after)
        if decision:
            assert not refusing, "more than the model admits"
            assert retry == 0
            binding = min(left, key=left.__getitem__)
            left[binding] -= permits
        else:
            assert refusing or not self.exact, "less than the model admits"
            assert retry >= 1
            assert not oracle.refusing(now + retry, permits), "retry_after is too early"
            late = oracle.refusing(now + retry - 1, permits)
            assert late or not self.exact, "retry_after is too late"
            binding = (late or oracle.quotas)[0]
        assert 0 <= decision.remaining <= decision.limit
        if self.exact or len(oracle.quotas) == 1:
            assert decision.limit == binding.capacity
            assert decision.remaining == left[binding] if self.exact else decision.remaining <= left[binding]

    def judge_reset(self, decision: Decision, key: str) -> None:
        now, oracle, reset = self.clock.now(), self.oracles[key], microseconds(decision.reset_after)
        assert oracle.fresh(now + reset), "reset_after is too early"
        if self.exact:
            assert reset == 0 or not oracle.fresh(now + reset - 1), "reset_after is too late"

    def peek(self, key: str, permits: int) -> Decision:
        decision = self.limiter.peek(key, permits)
        if self.twin:
            assert decision == self.twin.peek(key, permits), "the memory store answers otherwise"
        self.judge(decision, key, permits)
        return decision

    def look(self, key: str, _permits: int = 0) -> None:
        decision = self.peek(key, 0)
        assert decision.allowed
        self.judge_reset(decision, key)

    def refund(self, key: str, permits: int) -> None:
        assert self.limiter.refund(key, permits) is True
        if self.twin:
            self.twin.refund(key, permits)
        self.oracles[key].refund(self.clock.now(), permits)
        self.look(key)

    def reset(self, key: str, _permits: int) -> None:
        assert self.limiter.reset(key) is True
        if self.twin:
            self.twin.reset(key)
        self.oracles[key].reset()
        self.look(key)

    def wait(self, key: str, permits: int) -> None:
        """Wait exactly as long as a denial says, and not a microsecond less."""
        decision = self.take(key, permits)
        if decision:
            return
        self.clock.advance(decision.retry_after - MICROSECOND)
        early = self.peek(key, permits)
        assert not self.exact or (not early and early.retry_after == MICROSECOND)
        self.clock.advance(MICROSECOND)
        assert self.take(key, permits), "retry_after is not true"

    def rest(self, key: str, permits: int) -> None:
        """Wait as long as it takes to be as good as never seen."""
        self.clock.advance(self.take(key, permits).reset_after)
        decision = self.limiter.peek(key, permits=0)
        assert (decision.remaining, decision.reset_after) == (decision.limit, 0.0)
        assert self.limiter.peek(key, decision.limit)
