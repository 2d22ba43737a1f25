"""Several limiters and keys at once: all or nothing, in one step, exact beside single checks.

Every store runs these. One that cannot decide several limiters in one step never admits too much either, and gives back
what it took; only how many of several callers at once it admits is not promised there.
"""

import asyncio
import functools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import AsyncLimiter, Decision, Limiter, Quota
from headgate.errors import InvalidKey, InvalidPermits, PermitsExceedLimit, StoreUnavailable
from headgate.joint import JointCheck, try_acquire_all, try_acquire_all_async
from headgate.stores.base import JointStore
from headgate.testing import ManualClock
from tests.stores.test_outages import BRIEF, outage, recover
from tests.support.callers import Callers, in_threads
from tests.support.clocks import until
from tests.support.oracle import Oracle
from tests.support.quotas import LAWS, law

Asked = list[tuple[Limiter, str, int]]


def all_admitted(limiter: Limiter, admitted: int, limit: int) -> bool:
    """Whether exactly *limit* were admitted; less where the store decides one limiter in a step, and others give back.

    A store that decides several in one step has no excuse.
    """
    return admitted == limit if isinstance(limiter.store, JointStore) else 1 <= admitted <= limit


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns a thousand times as often, to meet where they should not."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# ----------------------------------------------------------------------------------------------- the exact model

KEYS = ["a", "b", "a}b", "사용자"]
RULES: list[tuple[str, list[Quota]]] = [
    ("token_bucket", [Quota(7, 60.0)]),
    ("token_bucket", [Quota(10, 60.0, burst=25), Quota(31, 3600.0)]),
    ("leaky_bucket", [Quota(70, 60.0, burst=4)]),
    ("gcra", [Quota(50, 90.5)]),
    ("fixed_window", [Quota(9, 61.0)]),
    ("first_window", [Quota(11, 70.0)]),
    ("sliding_window", [Quota(12, 77.777777), Quota(40, 600.0)]),
    ("sliding_window_counter", [Quota(8, 64.0)]),
]


class JointTrial:
    """Limiters on one store beside the exact models of their algorithms, and beside single limiters in memory."""

    def __init__(self, callers: Callers) -> None:
        self.callers, self.clock = callers, ManualClock()
        self.limiters: list[Limiter] = []
        self.twins: list[Limiter] = []
        self.oracles: list[defaultdict[str, Oracle]] = []
        for number, (algorithm, quotas) in enumerate(RULES):
            options = {"algorithm": algorithm, "name": f"rule {number}", "clock": self.clock}
            beside = self.limiters[0] if self.limiters else None
            self.limiters.append(callers.limiter(quotas, beside=beside, **options))
            self.twins.append(Limiter(quotas, clock=self.clock, **law(algorithm)))
            self.oracles.append(defaultdict(functools.partial(Oracle, algorithm, *quotas)))
        self.granted = self.denied = 0

    def take_all(self, asked: list[tuple[int, str, int]]) -> None:
        now = self.clock.now()
        totals: Counter[tuple[int, str]] = Counter()
        for rule, key, permits in asked:
            totals[rule, key] += permits
        if any(total > self.twins[rule].rule.capacity for (rule, _), total in totals.items()):
            return
        refusing = [bool(self.oracles[rule][key].refusing(now, total)) for (rule, key), total in totals.items()]
        expected = {state: self.twins[state[0]].peek(state[1], total) for state, total in totals.items()}
        assert [not decision for decision in expected.values()] == refusing, "the twins are wrong"
        spent = not any(refusing)
        for (rule, key), total in totals.items():
            if spent:
                self.oracles[rule][key].spend(now, total)
                assert self.twins[rule].try_acquire(key, total)
            elif expected[rule, key]:
                expected[rule, key] = self.twins[rule].peek(key, 0)
        made = self.callers.try_acquire_all([(self.limiters[rule], key, permits) for rule, key, permits in asked])
        assert made == [expected[rule, key] for rule, key, _ in asked]
        assert all(made) == spent
        self.granted += spent
        self.denied += not spent

    def take(self, rule: int, key: str, permits: int) -> None:
        made = self.limiters[rule].try_acquire(key, permits)
        assert made == self.twins[rule].try_acquire(key, permits)
        if made:
            self.oracles[rule][key].spend(self.clock.now(), permits)

    def refund(self, rule: int, key: str, permits: int) -> None:
        self.limiters[rule].refund(key, permits)
        self.twins[rule].refund(key, permits)
        self.oracles[rule][key].refund(self.clock.now(), permits)

    def reset(self, rule: int, key: str, _permits: int) -> None:
        self.limiters[rule].reset(key)
        self.twins[rule].reset(key)
        self.oracles[rule][key].reset()


def test_agrees(any_callers: Callers) -> None:
    """Random checks of mixed algorithms, keys and permits, between single calls: each number is as the model says."""
    trial, chance = JointTrial(any_callers), random.Random("joint")
    steps = {(True, "sync"): 3_000, (True, "async"): 1_000}.get((any_callers.whole, any_callers.colour), 150)
    for _ in range(steps):
        trial.clock.advance(chance.choice([0, 0, 0.000_001, chance.random() * 4, chance.random() * 12]))
        if chance.random() < 0.005:
            trial.clock.advance(chance.choice([60, 600, 3600]))

        def any_check() -> tuple[int, str, int]:
            rule = chance.randrange(len(RULES))
            most = trial.twins[rule].rule.capacity
            return rule, chance.choice(KEYS), chance.choice([1, 1, 1, 2, chance.randint(1, most)])

        call = chance.random()
        if call < 0.7:
            checks = [any_check() for _ in range(chance.choice([2, 2, 3, 4]))]
            if chance.random() < 0.1:
                checks.append((*checks[0][:2], 1))
            trial.take_all(checks)
        elif call < 0.9:
            trial.take(*any_check())
        else:
            (trial.refund if call < 0.98 else trial.reset)(*any_check())
    assert min(trial.granted, trial.denied) > steps // 10, "the walk must be granted and denied, or it tests nothing"


# ------------------------------------------------------------------------------------------------ what is promised


def pair(callers: Callers, first: str = "10/30d", second: str = "3/30d", **options: Any) -> tuple[Limiter, Limiter]:
    """Two limiters on one store."""
    limiter = callers.limiter(first, name="first", **options)
    return limiter, callers.limiter(second, name="second", algorithm="sliding_window", beside=limiter)


def left(limiter: Limiter, key: str = "k") -> int:
    return limiter.peek(key, permits=0).remaining


def test_all_or_nothing(any_callers: Callers) -> None:
    """Nothing is spent when one refuses; it says so, and the other reports its state as it is."""
    first, second = pair(any_callers)
    made = any_callers.try_acquire_all([(first, "k", 4), (second, "other", 2)])
    assert [(decision.allowed, decision.remaining) for decision in made] == [(True, 6), (True, 1)]
    made = any_callers.try_acquire_all([(first, "k", 4), (second, "other", 2)])
    assert [(decision.allowed, decision.remaining) for decision in made] == [(True, 6), (False, 1)]
    assert made[0].retry_after == 0.0 < made[1].retry_after
    assert (left(first), left(second, "other")) == (6, 1)


def test_same_states(any_callers: Callers) -> None:
    """What a joint check spends is gone for single checks, and the other way round."""
    first, second = pair(any_callers)
    assert first.try_acquire("k", 9)
    assert second.try_acquire("k", 2)
    assert all(any_callers.try_acquire_all([(first, "k", 1), (second, "k", 1)]))
    assert not first.try_acquire("k")
    assert not second.try_acquire("k")
    assert first.refund("k")
    made = any_callers.try_acquire_all([(first, "k", 1), (second, "k", 1)])
    assert [decision.allowed for decision in made] == [True, False]
    assert left(first) == 1


def test_checks_of_one_key_add_up(any_callers: Callers) -> None:
    """Also if two limiter objects share the state; together they may not ask for more than there can ever be."""
    first, second = pair(any_callers)
    twin = any_callers.limiter("10/30d", name="first", beside=first)
    made = any_callers.try_acquire_all([(first, "k", 3), (second, "k", 1), (first, "k", 4)])
    assert [decision.remaining for decision in made] == [3, 2, 3]
    made = any_callers.try_acquire_all([(first, "k", 2), (second, "k", 1), (first, "k", 2)])
    assert [decision.allowed for decision in made] == [False, True, False]
    made = any_callers.try_acquire_all([(first, "k", 2), (twin, "k", 2)])
    assert not all(made)
    assert (left(first), left(second)) == (3, 2)
    assert all(any_callers.try_acquire_all([(first, "k", 1), (twin, "k", 2)]))
    assert left(first) == 0
    with pytest.raises(PermitsExceedLimit):
        any_callers.try_acquire_all([(second, "k", 2), (first, "new", 1), (second, "k", 2)])
    assert (left(second), left(first, "new")) == (2, 10)


@pytest.mark.parametrize(
    ("key", "permits", "error"), [("", 1, InvalidKey), ("k", 0, InvalidPermits), ("k", 4, PermitsExceedLimit)]
)
def test_bad_arguments(key: str, permits: int, error: type[Exception], callers: Callers) -> None:
    """They raise, and nothing is spent."""
    first, second = pair(callers)
    for checks in ([(first, "k", 1), (second, key, permits)], [(second, key, permits), (first, "k", 1)]):
        with pytest.raises(error):
            callers.try_acquire_all(checks)
    assert left(first) == 10


def test_few(callers: Callers) -> None:
    """No check is granted, and one is a single check."""
    limiter = callers.limiter("2/30d")
    assert callers.try_acquire_all([]) == []
    assert callers.try_acquire_all([(limiter, "k", 2)])[0].remaining == 0
    assert not callers.try_acquire_all([(limiter, "k", 1)])[0]


def test_limiters_of_the_other_kind() -> None:
    """They are refused, with the name of the function that takes them."""
    with pytest.raises(TypeError, match="try_acquire_all_async"):
        try_acquire_all([JointCheck(AsyncLimiter("5/s"), "k"), JointCheck(Limiter("5/s"), "k")])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"try_acquire_all$"):
        asyncio.run(try_acquire_all_async([JointCheck(Limiter("5/s"), "k")]))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- all callers at once


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("algorithm", LAWS)
def test_exact(algorithm: str, callers: Callers) -> None:
    """Joint checks of a scarce limiter and of a plentiful one: exactly the limit, and no permit is lost."""
    scarce = callers.limiter("50/30d", name="scarce", algorithm=algorithm)
    plenty = callers.limiter(["4000/30d", "3000/60d"], name="plenty", beside=scarce)
    asked = [(plenty, "k", 3), (scarce, "k", 1)]
    made = callers.at_once(callers.try_acquire_all, 320, asked)
    admitted = sum(all(decisions) for decisions in made)
    assert all_admitted(scarce, admitted, 50)
    assert (left(scarce), left(plenty)) == (50 - admitted, 3000 - 3 * admitted)


@pytest.mark.usefixtures("eager_switching")
@pytest.mark.parametrize("algorithm", LAWS)
def test_exact_beside_single_checks(algorithm: str, sync_callers: Callers) -> None:
    """Two pairs of limiters that overlap, and single checks of each, from many threads, on new keys each time."""
    first = sync_callers.limiter("20/30d", name="first", algorithm=algorithm)
    second = sync_callers.limiter("20/30d", name="second", beside=first)
    third = sync_callers.limiter("20/30d", name="third", algorithm="gcra", beside=first)
    limiters = [first, second, third]
    for round_ in range(5 if sync_callers.whole else 1):
        key = f"k{round_}"

        def work(key: str = key) -> Counter[Limiter]:
            spent: Counter[Limiter] = Counter()
            for _ in range(3):
                for asked in ([first, second], [second, third], [third, first], [first], [second], [third]):
                    checks: Asked = [(limiter, key, 1) for limiter in asked]
                    if all(sync_callers.try_acquire_all(checks)):
                        spent.update(asked)
            return spent

        spent = sum(in_threads(16, work), Counter[Limiter]())
        assert all(all_admitted(limiter, spent[limiter], 20) for limiter in limiters)
        assert [left(limiter, key) for limiter in limiters] == [20 - spent[limiter] for limiter in limiters]


@pytest.mark.usefixtures("eager_switching")
def test_never_too_many(any_callers: Callers, request: pytest.FixtureRequest) -> None:
    """Whatever decides them: never above the limit, and what a refused check took is back.

    A majority may count a few permits too many until they refill, as docs/several.md says; never too few.
    """
    first, second = pair(any_callers, "40/30d", "15/30d")
    asked = [(first, "k", 2), (second, "other", 1)]
    granted = sum(all(decisions) for decisions in any_callers.at_once(any_callers.try_acquire_all, 100, asked))
    assert 1 <= granted <= 15
    if "majority" in request.node.name:
        assert left(first) <= 40 - 2 * granted and left(second, "other") <= 15 - granted
    else:
        until(lambda: (left(first), left(second, "other")) == (40 - 2 * granted, 15 - granted))


# ------------------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("limit", [1000, 30], ids=["plenty", "scarce"])
def test_cancelled(limit: int, async_callers: Callers) -> None:
    """Cancel at random moments, most of them while the call is under way; then what is spent is what was granted."""
    chance = random.Random(limit)
    first, second = pair(async_callers, f"{2 * limit}/30d", f"{limit}/30d")
    joint: Any = async_callers.try_acquire_all

    async def cancel_some(key: str) -> list[Any]:
        tasks = []
        for _ in range(40):
            tasks.append(asyncio.create_task(joint.function([(first, key, 2), (second, f"other {key}", 1)])))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.choice([0, 0, 0.0001, 0.0005]))
            if chance.random() < 0.7:
                chance.choice(tasks).cancel()
        await asyncio.sleep(chance.choice([0, 0.0002, 0.001, 0.003]))
        for task in tasks:
            if chance.random() < 0.5:
                task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first.peek("k")
    for number in range(8):
        key = f"k{number}"
        results = async_callers.run(cancel_some(key))
        assert all(isinstance(result, list | asyncio.CancelledError) for result in results)
        granted = sum(all(result) for result in results if isinstance(result, list))
        until(lambda key, granted: left(first, key) == 2 * (limit - granted), key, granted)
        until(lambda key, granted: left(second, f"other {key}") == limit - granted, key, granted)


# ------------------------------------------------------------------------------------------------------------ outages

HOW = ["gone", "silent"]


@pytest.mark.parametrize("how", HOW)
def test_policies(how: str, failing_callers: Callers) -> None:
    """Each limiter answers by its own policy, and all are granted or none; raise raises."""
    allow = failing_callers.limiter("5/30d", name="allow", on_store_error="allow", **BRIEF)
    also = failing_callers.limiter("7/30d", name="also", on_store_error="allow", beside=allow)
    local = failing_callers.limiter("3/30d", name="local", on_store_error="local", beside=allow)
    deny = failing_callers.limiter("5/30d", name="deny", on_store_error="deny", beside=allow)
    strict = failing_callers.limiter("5/30d", name="strict", on_store_error="raise", beside=allow)
    joint = failing_callers.try_acquire_all

    def answers(checks: Asked) -> list[tuple[bool, int]]:
        made: list[Decision] = timed(joint, checks)
        assert all(decision.degraded for decision in made)
        return [(decision.allowed, decision.remaining) for decision in made]

    with outage(failing_callers, how, allow=allow, also=also, local=local, deny=deny) as timed:
        for _ in range(4):
            assert answers([(allow, "k", 1), (also, "k", 7)]) == [(True, 4), (True, 0)]
        assert answers([(allow, "k", 1), (deny, "k", 1)]) == [(True, 5), (False, 0)]
        assert answers([(local, "k", 2), (deny, "k", 1), (allow, "k", 1)]) == [(True, 3), (False, 0), (True, 5)]
        assert answers([(local, "k", 2), (allow, "k", 1)]) == [(True, 1), (True, 4)]
        assert answers([(allow, "k", 1), (local, "k", 2)]) == [(True, 5), (False, 1)]
        assert answers([(local, "k", 1), (allow, "k", 1)]) == [(True, 0), (True, 4)]
        before = local.peek("other", 0).remaining
        with pytest.raises(StoreUnavailable):
            timed(joint, [(local, "other", 1), (strict, "k", 1)])
        assert timed(local.peek, "other", 0).remaining == before


def test_local_debts(failing_callers: Callers) -> None:
    """What was granted together in an outage is charged when the store is back, before it decides again."""
    first = failing_callers.limiter("50/300d", name="first", on_store_error="local", **BRIEF)
    second = failing_callers.limiter("50/300d", name="second", on_store_error="local", beside=first)
    joint = failing_callers.try_acquire_all
    with outage(failing_callers, "gone", first=first, second=second):  # it comes back empty
        until(lambda: first.peek("warm").degraded and first.store_health().state == "open")
        for _ in range(5):
            assert all(joint([(first, "k", 2), (second, "k", 3)]))
        assert not all(joint([(first, "k", 2), (second, "k", 40)]))
    recover(first, second)
    made = joint([(first, "k", 1), (second, "k", 1)])
    assert [decision.remaining for decision in made] == [50 - 10 - 1, 50 - 15 - 1]
