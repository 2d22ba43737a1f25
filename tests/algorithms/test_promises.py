"""What each algorithm promises about everything it grants, counted over the whole walk and not step by step."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limiter, Quota
from headgate.rule import AlgorithmName
from headgate.testing import ManualClock
from tests.support.quotas import BUCKETS, BURSTS, PLAIN, law, pauses, period_us, permits

Grants = list[tuple[int, int]]  # (microsecond, permits)


def grants(algorithm: str, quota: Quota, data: st.DataObject) -> Grants:
    """Take and take again through random pauses; list what was granted."""
    clock = ManualClock()
    with Limiter(quota, clock=clock, **law(algorithm)) as limiter:
        granted = []
        for pause, count in data.draw(st.lists(st.tuples(pauses(quota), permits(quota)), max_size=60)):
            clock.advance(pause / 1_000_000)
            if limiter.try_acquire("k", permits=count):
                granted.append((clock.now(), count))
        return granted


@pytest.mark.parametrize("quota", PLAIN, ids=str)
@given(data=st.data())
def test_sliding_window(quota: Quota, data: st.DataObject) -> None:
    """No window of a period, wherever it starts, holds more than the limit."""
    granted = grants("sliding_window", quota, data)
    period = period_us(quota)
    for start, _ in granted:  # a window that is too full is as full when it starts at its first grant
        assert sum(count for time, count in granted if start <= time < start + period) <= quota.limit


@pytest.mark.parametrize("quota", PLAIN, ids=str)
@given(data=st.data())
def test_fixed_window(quota: Quota, data: st.DataObject) -> None:
    """No aligned window holds more than the limit."""
    granted = grants("fixed_window", quota, data)
    period = period_us(quota)
    for window in {time // period for time, _ in granted}:
        assert sum(count for time, count in granted if time // period == window) <= quota.limit


@pytest.mark.parametrize("quota", PLAIN, ids=str)
@given(data=st.data())
def test_first_window(quota: Quota, data: st.DataObject) -> None:
    """A window starts at a grant that no window holds; none holds more than the limit."""
    ends = total = 0
    for time, count in grants("first_window", quota, data):
        if time >= ends:
            ends, total = time + period_us(quota), 0
        total += count
        assert total <= quota.limit


@pytest.mark.parametrize("quota", PLAIN, ids=str)
@given(data=st.data())
def test_sliding_window_counter(quota: Quota, data: st.DataObject) -> None:
    """It is an estimate, but every aligned window holds, and no window of a period holds two limits' worth."""
    granted = grants("sliding_window_counter", quota, data)
    period = period_us(quota)
    for start, _ in granted:
        assert sum(count for time, count in granted if time // period == start // period) <= quota.limit
        assert sum(count for time, count in granted if start <= time < start + period) <= 2 * quota.limit


@pytest.mark.parametrize("algorithm", BUCKETS)
@pytest.mark.parametrize("quota", PLAIN + BURSTS, ids=str)
@given(data=st.data())
def test_buckets(algorithm: AlgorithmName, quota: Quota, data: st.DataObject) -> None:
    """Never more than the capacity, and what flows in meanwhile."""
    granted = grants(algorithm, quota, data)
    rate = Fraction(quota.limit, period_us(quota))
    for i, (start, _) in enumerate(granted):
        total = 0
        for time, count in granted[i:]:
            total += count
            assert total <= quota.capacity + (time - start) * rate
