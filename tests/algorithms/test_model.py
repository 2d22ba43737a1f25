"""Every algorithm against an exact model of it, on random walks through calls and time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limiter, Quota
from headgate.testing import ManualClock
from tests.support.quotas import CASES, law, pauses, permits
from tests.support.trial import Trial

CALLS = ["take", "take", "take", "peek", "look", "refund", "reset", "wait", "rest"]


@pytest.mark.parametrize(("algorithm", "quota"), CASES, ids=str)
@given(data=st.data())
def test_the_model_agrees(algorithm: str, quota: Quota, data: st.DataObject) -> None:
    clock = ManualClock()
    trial = Trial(Limiter(quota, clock=clock, **law(algorithm)), clock, algorithm, quota)
    step = st.tuples(pauses(quota), st.sampled_from(CALLS), st.just("k"), permits(quota))
    trial.walk(data.draw(st.lists(step, min_size=1, max_size=30)))
