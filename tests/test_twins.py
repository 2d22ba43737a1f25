"""Twins: the same random calls at the same moments, in memory and on Redis, give the same answers.

Ten thousand steps for each algorithm with one quota and as many with several, each step compared in full. Periods are
of minutes and more: Redis lets keys expire by real time, which the manual clock knows nothing about.
"""

import random
from collections.abc import Iterator

import pytest

from headgate import Decision, Limiter, Quota
from headgate.testing import ManualClock
from tests.support.places import ALGORITHMS, BUCKETS, Place
from tests.support.servers import Server

STEPS = 10_000
KEYS = ["a", "b", "a}b", "%7B", "사용자"]

ONE = [Quota(7, 60.0), Quota(3, 600.0), Quota(999_983, 86400.0), Quota(50, 90.5), Quota(1000, 77.777777)]
ONE_WITH_BURST = [Quota(10, 60.0, burst=25), Quota(70, 60.0, burst=4), Quota(999_983, 86400.0, burst=7919)]
SEVERAL = [[Quota(7, 60.0), Quota(31, 3600.0)], [Quota(50, 90.5), Quota(40, 61.000001), Quota(999_983, 86400.0)]]

Step = tuple[int, str, str, int]  # microseconds to wait first, call, key, permits


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
    pause = permit * capacity // 25 + 2
    for _ in range(count):
        wait = chance.choice([0, 0, 1, chance.randrange(pause), chance.randrange(pause)])
        if chance.random() < 0.003:
            wait = chance.choice([period, period - 1, period + 1, 2 * period, 50 * period])
        call = chance.choices(["take", "peek", "refund", "reset"], [75, 17, 6, 2])[0]
        permits = chance.choice([1, 1, chance.randint(1, capacity), chance.randint(1, max(1, capacity // 4))])
        yield wait, call, chance.choice(KEYS), permits


def answer(limiter: Limiter, call: str, key: str, permits: int) -> Decision:
    """Make the call. For those that answer nothing, look at what they left."""
    if call == "take":
        return limiter.try_acquire(key, permits=permits)
    if call == "refund":
        limiter.refund(key, permits=permits)
    elif call == "reset":
        limiter.reset(key)
    return limiter.peek(key, permits=permits if call == "peek" else 0)


def compare(algorithm: str, quotas: list[Quota], server: Server, count: int) -> None:
    clock = ManualClock()
    with Place(None) as memory, Place(server) as redis:
        twins = [place.limiter(quotas, algorithm=algorithm, clock=clock) for place in (memory, redis)]
        granted = denied = 0
        for number, (wait, call, key, permits) in enumerate(steps(quotas, f"{algorithm} {quotas}", count)):
            clock.advance(wait / 1_000_000)
            one, other = (answer(limiter, call, key, permits) for limiter in twins)
            assert one == other, f"step {number}: {call} {permits} of {key!r} at {clock.now()} under {quotas}"
            granted += call == "take" and one.allowed
            denied += call == "take" and not one.allowed
        assert granted > count // 20, "the walk must be granted something, or it tests nothing"
        assert denied > count // 20, "the walk must be denied something, or it tests nothing"


@pytest.mark.parametrize("several", [False, True], ids=["one quota", "several quotas"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_and_redis_agree(algorithm: str, several: bool, redis_server: Server) -> None:
    choices = quotas_for(algorithm, several)
    for quotas in choices:
        redis_server.flush()
        compare(algorithm, quotas, redis_server, -(-STEPS // len(choices)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_kind_of_server_agrees(algorithm: str, any_redis_server: Server) -> None:
    compare(algorithm, [Quota(7, 60.0), Quota(31, 3600.0)], any_redis_server, 1_000)
