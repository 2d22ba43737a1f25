"""Every algorithm against an exact model of it, on random walks through calls and time.

The model is told what the limiter granted, so each step is judged on its own: the limiter must never grant what the
model does not, and where its numbers are exact it must grant all that the model does.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Decision, Limiter, Quota
from headgate.testing import ManualClock
from tests.support.oracle import Oracle
from tests.support.places import ALGORITHMS
from tests.support.quotas import CASES, exact, pauses, permits
from tests.support.scenario import microseconds
from tests.support.servers import Server

KEY = "k"
MICROSECOND = 0.000_001

Walk = list[tuple[int, str, int]]


def walks(quota: Quota) -> st.SearchStrategy[Walk]:
    """Lists of (pause before it, call, permits)."""
    calls = st.sampled_from(["take", "take", "take", "peek", "look", "refund", "reset", "wait", "rest"])
    return st.lists(st.tuples(pauses(quota), calls, permits(quota)), min_size=1, max_size=30)


@dataclass
class Trial:
    """A limiter and its model, side by side."""

    limiter: Limiter
    clock: ManualClock
    oracle: Oracle
    exact: bool
    granted: list[tuple[int, int]] = field(default_factory=list)

    def walk(self, walk: Walk) -> None:
        for pause, call, count in walk:
            self.clock.advance(pause / 1_000_000)
            getattr(self, call)(count)

    def take(self, count: int) -> Decision:
        """Peek, then take: the same answer, and the model agrees."""
        now = self.clock.now()
        expected = self.limiter.peek(KEY, permits=count)
        decision = self.limiter.try_acquire(KEY, permits=count)
        assert decision == expected, "peek is the answer that follows"
        self.judge(decision, now, count)
        if decision:
            self.oracle.spend(now, count)
            self.granted.append((now, count))
        self.judge_reset(decision, now)
        return decision

    def judge(self, decision: Decision, now: int, count: int) -> None:
        allows = self.oracle.allows(now, count)
        left = self.oracle.remaining(now) - (count if decision else 0)
        assert decision.limit == self.oracle.capacity
        assert 0 <= decision.remaining <= decision.limit
        if decision:
            assert allows, "more than the model admits"
            assert decision.retry_after == 0.0
        elif allows:
            assert not self.exact, "less than the model admits"
        assert decision.remaining == left if self.exact else decision.remaining <= left
        if not decision:
            retry = microseconds(decision.retry_after)
            assert retry >= 1
            assert self.oracle.allows(now + retry, count), "retry_after is too early"
            assert not self.exact or not self.oracle.allows(now + retry - 1, count), "retry_after is too late"

    def judge_reset(self, decision: Decision, now: int) -> None:
        reset = microseconds(decision.reset_after)
        assert self.oracle.fresh(now + reset), "reset_after is too early"
        if self.exact:
            assert reset == 0 or not self.oracle.fresh(now + reset - 1), "reset_after is too late"

    def peek(self, count: int) -> None:
        self.judge(self.limiter.peek(KEY, permits=count), self.clock.now(), count)

    def look(self, _count: int) -> None:
        now, decision = self.clock.now(), self.limiter.peek(KEY, permits=0)
        assert decision.allowed
        self.judge(decision, now, 0)
        self.judge_reset(decision, now)

    def refund(self, count: int) -> None:
        """Give back; what was spent before the refund can no longer be told from what was not."""
        self.limiter.refund(KEY, permits=count)
        self.oracle.refund(self.clock.now(), count)
        self.look(0)

    def reset(self, _count: int) -> None:
        self.limiter.reset(KEY)
        self.oracle.reset()
        self.look(0)

    def wait(self, count: int) -> None:
        """Wait exactly as long as a denial says, and not a microsecond less."""
        decision = self.take(count)
        if decision:
            return
        self.clock.advance(decision.retry_after - MICROSECOND)
        early = self.limiter.peek(KEY, permits=count)
        assert self.exact is False or (not early and early.retry_after == MICROSECOND)
        self.clock.advance(MICROSECOND)
        assert self.take(count), "retry_after is not true"

    def rest(self, count: int) -> None:
        """Wait as long as it takes to be as good as never seen."""
        self.clock.advance(self.take(count).reset_after)
        now = self.limiter.peek(KEY, permits=0)
        assert now.remaining == now.limit
        assert now.reset_after == 0.0
        assert self.limiter.peek(KEY, permits=now.limit)


def trial(algorithm: str, quota: Quota, store: str = "memory://") -> Trial:
    clock = ManualClock()
    limiter = Limiter(quota, algorithm=algorithm, clock=clock, store=store, on_store_error="raise")
    return Trial(limiter, clock, Oracle(algorithm, quota), exact(algorithm, quota))


@pytest.mark.parametrize(("algorithm", "quota"), CASES, ids=str)
@given(data=st.data())
def test_the_model_agrees(algorithm: str, quota: Quota, data: st.DataObject) -> None:
    side_by_side = trial(algorithm, quota)
    side_by_side.walk(data.draw(walks(quota)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("quota", [Quota(7, 60.0), Quota(999_983, 86400.0)], ids=str)
def test_the_model_agrees_on_redis(algorithm: str, quota: Quota, redis_server: Server) -> None:
    @settings(max_examples=settings().max_examples // 4)
    @given(walk=walks(quota))
    def check(walk: Walk) -> None:
        redis_server.flush()  # the clock starts again at midnight, so what is kept of that day has to go
        side_by_side = trial(algorithm, quota, redis_server.url)
        with side_by_side.limiter:
            side_by_side.walk(walk)

    check()
