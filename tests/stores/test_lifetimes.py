"""Nothing stays behind for ever."""

import pytest

from headgate import Quota
from tests.support.callers import Callers
from tests.support.clocks import until
from tests.support.quotas import LAWS

BRIEF = Quota(5, 0.25)
ONE_OR_SEVERAL = [BRIEF], [BRIEF, Quota(9, 0.5)]


@pytest.mark.slow
def test_records_go(callers: Callers) -> None:
    """Whatever wrote them, records are gone soon after they have ceased to matter, while other keys are asked for."""
    limiters = [
        callers.limiter(quotas, algorithm=algorithm, name=f"{len(quotas)} quotas")
        for algorithm in LAWS
        for quotas in ONE_OR_SEVERAL
    ]
    for limiter in limiters:
        for number in range(20):
            limiter.try_acquire(f"spent {number}", permits=5)
            limiter.try_acquire(f"denied {number}", permits=4)
            limiter.try_acquire(f"denied {number}", permits=4)
            limiter.try_acquire(f"refunded {number}", permits=3)
            limiter.refund(f"refunded {number}", permits=2)
            limiter.refund(f"refunded whole {number}", permits=9)

    def nearly_all_are_gone() -> bool:
        for limiter in limiters:
            limiter.try_acquire("another")
        return 0 < callers.store.count() < 54  # of 7 * 60 of one quota, and twice as many of several

    until(nearly_all_are_gone)


@pytest.mark.parametrize("algorithm", LAWS)
def test_nothing_is_written_in_vain(algorithm: str, callers: Callers) -> None:
    """A look, a refund or a reset of a key never seen makes no record; a reset leaves none that is kept."""
    limiter = callers.limiter(["5/minute", "9/hour"], algorithm=algorithm)
    for number in range(20):
        limiter.peek(f"k{number}")
        limiter.peek(f"k{number}", permits=0)
        assert limiter.refund(f"k{number}") and limiter.reset(f"k{number}")
    assert callers.store.count() == 0
