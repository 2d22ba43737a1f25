"""The same random calls at the same moments: a store answers as the exact model does, and as memory does.

Thousands of steps for each algorithm, with one quota and with several. Periods are of minutes and more: Redis lets keys
expire by real time, which the manual clock knows nothing about.
"""

import os
import random
from collections.abc import Iterator

import pytest

from headgate import Limiter, Quota
from headgate.testing import ManualClock
from tests.support.callers import Callers
from tests.support.quotas import BUCKETS, LAWS, law
from tests.support.trial import Step, Trial

STEPS = int(os.environ.get("HEADGATE_MODEL_STEPS", "3000"))  # from threads
KEYS = ["a", "b", "a}b", "%7B", "사용자"]

ONE = [Quota(7, 60.0), Quota(3, 600.0), Quota(999_983, 86400.0), Quota(50, 90.5), Quota(1000, 77.777777)]
ONE_WITH_BURST = [Quota(10, 60.0, burst=25), Quota(70, 60.0, burst=4), Quota(999_983, 86400.0, burst=7919)]
SEVERAL = [[Quota(7, 60.0), Quota(31, 3600.0)], [Quota(50, 90.5), Quota(40, 61.000001), Quota(999_983, 86400.0)]]

CALLS = {"take": 70, "peek": 13, "look": 5, "refund": 6, "reset": 2, "wait": 3, "rest": 1}  # and how often


def quotas_for(algorithm: str, several: bool) -> list[list[Quota]]:
    if several:
        return SEVERAL
    return [[quota] for quota in (ONE + ONE_WITH_BURST if algorithm in BUCKETS else ONE)]


def steps(quotas: list[Quota], seed: str, count: int) -> Iterator[Step]:
    """A walk that spends somewhat faster than the quotas refill, so that grants and denials both abound."""
    chance = random.Random(seed)
    capacity = min(quota.capacity for quota in quotas)
    period = round(max(quota.period for quota in quotas) * 1_000_000)
    permit = round(max(quota.period / quota.limit for quota in quotas) * 1_000_000)
    pause = permit * capacity // 60 + 2
    for _ in range(count):
        wait = chance.choice([0, 0, 1, chance.randrange(pause), chance.randrange(pause)])
        if chance.random() < 0.003:
            wait = chance.choice([period, period - 1, period + 1, 2 * period, 50 * period])
        call = chance.choices(list(CALLS), list(CALLS.values()))[0]
        permits = chance.choice([1, 1, chance.randint(1, capacity), chance.randint(1, max(1, capacity // 4))])
        yield wait, call, chance.choice(KEYS), permits


@pytest.mark.parametrize("several", [False, True], ids=["one quota", "several quotas"])
@pytest.mark.parametrize("algorithm", LAWS)
def test_agrees(algorithm: str, several: bool, any_callers: Callers) -> None:
    """Every number of every decision is as the model says; what cannot be exact is as in memory."""
    choices = quotas_for(algorithm, several)
    if not any_callers.whole:
        choices = choices[:1]
    most = round(STEPS * any_callers.share)
    count = {(True, "sync"): most, (True, "async"): 1_000}.get((any_callers.whole, any_callers.colour), 250)
    for number, quotas in enumerate(choices):
        clock = ManualClock()
        limiter = any_callers.limiter(quotas, algorithm=algorithm, clock=clock, name=f"walk {number}")
        twin = Limiter(quotas, clock=clock, **law(algorithm))
        trial = Trial(limiter, clock, algorithm, *quotas, twin=twin)
        each = count // len(choices)
        trial.walk(steps(quotas, f"{algorithm} {quotas}", each))
        assert min(trial.granted, trial.denied) > each // 25, "the walk must be granted and denied, or it tests nothing"
