"""Storages of `limits` on headgate: what each operation counts, returns and refuses."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from limits import RateLimitItem, RateLimitItemPerHour, RateLimitItemPerMinute, RateLimitItemPerSecond, parse
from limits.limits import GRANULARITIES, Granularity

from headgate.testing import ManualClock
from tests.limits.conftest import Place

BUILT_IN = ["fixed-window", "moving-window", "sliding-window-counter"]
OURS = ["token-bucket", "leaky-bucket", "gcra"]
STRATEGIES = BUILT_IN + OURS
ROUND_DOWN = ["fixed-window", "sliding-window-counter"]  # their `test`, which limits computes, for a part of a hit


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exact_under_concurrency(strategy: str, place: Place) -> None:
    """Sixty hits at once against 20 per hour: 20."""
    limiter = place.limiter(strategy)
    hits = place.at_once(60, limiter.hit, RateLimitItemPerHour(20), "k")
    assert sum(hits) == 20
    assert limiter.get_window_stats(RateLimitItemPerHour(20), "k").remaining == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_costs(strategy: str, place: Place) -> None:
    """A part of a hit costs a whole one, nothing is free, and what can never fit is refused."""
    limiter, item = place.limiter(strategy), RateLimitItemPerHour(10)

    def left() -> int:
        return int(limiter.get_window_stats(item, "k").remaining)

    assert limiter.hit(item, "k", cost=2.5)
    assert left() == 7
    assert limiter.hit(item, "k", cost=0)
    assert limiter.test(item, "k", cost=0)
    assert left() == 7
    for cost in (11, 8, 7.5, 10**12, float("inf")):
        assert not limiter.test(item, "k", cost=cost) or (cost == 7.5 and strategy in ROUND_DOWN)
        assert not limiter.hit(item, "k", cost=cost)
        assert left() == 7, "a hit that was refused spends nothing"
    assert limiter.hit(item, "k", cost=7)
    assert left() == 0
    assert limiter.hit(item, "k", cost=0)
    assert not limiter.hit(item, "k", cost=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_limit_of_zero(strategy: str, place: Place) -> None:
    limiter, item = place.limiter(strategy), RateLimitItemPerHour(0)
    assert not limiter.hit(item, "k")
    assert not limiter.test(item, "k")
    assert limiter.get_window_stats(item, "k").remaining == 0
    limiter.clear(item, "k")


@pytest.mark.parametrize("text", ["5 per 2 year", "5/month", "5 per 7 minute"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_multiples(strategy: str, text: str, place: Place) -> None:
    limiter, item = place.limiter(strategy), parse(text)
    assert limiter.hit(item, "k", cost=5)
    assert not limiter.hit(item, "k")
    left = limiter.get_window_stats(item, "k").reset_time - time.time()
    assert 0 <= left <= 2 * item.get_expiry()


class RateLimitItemPerWeek(RateLimitItem):
    GRANULARITY = Granularity(7 * 86400, "week")


def test_granularity_of_an_application(place: Place) -> None:
    """A period that `limits` does not have is known by the class that names it."""
    try:
        limiter, item = place.limiter("fixed-window"), RateLimitItemPerWeek(2)
        assert limiter.hit(item, "k", cost=2)
        assert not limiter.hit(item, "k")
        assert limiter.get_window_stats(item, "k").reset_time == pytest.approx(time.time() + 7 * 86400, abs=30)
    finally:
        GRANULARITIES.setdefault("week", RateLimitItemPerWeek)


HOSTILE = [
    "",
    "x" * 300,
    "x" * 300 + "y",
    "a\nb",
    "a\x00b",
    "a b",
    "{a}",
    "a/1/1/minute",
    "사용자" * 100,
    "\ud800",
    "\ud801",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keys_are_told_apart(strategy: str, place: Place) -> None:
    """However long they are, and whatever they are made of."""
    limiter, item = place.limiter(strategy), RateLimitItemPerHour(2)
    for identifier in HOSTILE:
        assert limiter.hit(item, identifier, cost=2), "another key has spent it"
    for identifier in HOSTILE:
        assert not limiter.hit(item, identifier)
        limiter.clear(item, identifier)
        assert limiter.hit(item, identifier)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clear_forgets_one_key(strategy: str, place: Place) -> None:
    limiter, item = place.limiter(strategy), RateLimitItemPerHour(3)
    for key in ("k", "other"):
        assert limiter.hit(item, key, cost=3)
    limiter.clear(item, "k")
    assert limiter.get_window_stats(item, "k").remaining == 3
    assert not limiter.hit(item, "other")


def test_counter(place: Place) -> None:
    """`incr` says what the counter is, or would be; with less than nothing it gives back."""
    storage, item = place.storage(), RateLimitItemPerMinute(10)
    key = item.key_for("k")
    assert (storage.get(key), storage.get_expiry(key)) == (0, pytest.approx(time.time(), abs=5))
    assert [storage.incr(key, 60), storage.incr(key, 60, 7), storage.incr(key, 60, amount=2)] == [1, 8, 10]
    assert storage.get(key) == 10
    assert storage.get_expiry(key) == pytest.approx(time.time() + 60, abs=5)
    assert storage.incr(key, 60, 5) == 15, "more than the limit, so the strategy refuses it"
    assert storage.get(key) == 10, "and it was not counted"
    assert storage.incr(key, 60, -4) == 6
    assert storage.incr(key, 60, 0) == 6
    storage.clear(key)
    assert storage.get(key) == 0


def test_keys_without_a_quota(place: Place) -> None:
    """A key that no `RateLimitItem` has made is counted without a limit, in any window that it is given."""
    storage = place.storage()
    assert storage.incr("bytes", 60, 1_000_000) == 1_000_000
    assert storage.incr("bytes", 60, 5) == 1_000_005
    assert storage.get("bytes") == 1_000_005
    assert storage.get_expiry("bytes") == pytest.approx(time.time() + 60, abs=5)
    assert storage.acquire_entry("log", 2, 60, 2)
    assert not storage.acquire_entry("log", 2, 60)
    assert storage.acquire_sliding_window_entry("pair", 3, 3600, 2)
    previous, _, current, _ = storage.get_sliding_window("pair", 3600)
    assert previous + current == 2
    for key in ("bytes", "log", "pair"):
        storage.clear(key)
    assert storage.get("bytes") == 0
    assert storage.get_sliding_window("pair", 3600)[::2] == (0, 0)
    assert storage.acquire_entry("log", 2, 60, 2)


def test_reset_forgets_everything(place: Place) -> None:
    storage, item = place.storage(), RateLimitItemPerHour(5)
    limiters = [place.limiter(strategy, storage) for strategy in STRATEGIES]
    for limiter in limiters:
        for key in ("a", "b"):
            assert limiter.hit(item, key, cost=5)
    assert storage.reset() == 2 * len(STRATEGIES)
    assert storage.reset() == 0
    for limiter in limiters:
        assert limiter.hit(item, "a", cost=5)


def test_check(place: Place) -> None:
    assert place.storage().check() is True


# ------------------------------------------------------------------------------------------------ by a manual clock


def test_window_starts_at_the_first_hit(memory: Place, clock: ManualClock) -> None:
    clock.advance(37.5)
    storage = memory.storage(clock=clock)
    limiter, item = memory.limiter("fixed-window", storage), RateLimitItemPerMinute(2)
    assert limiter.hit(item, "k")
    assert storage.get_expiry(item.key_for("k")) == pytest.approx(time.time() + 60, abs=1)
    clock.advance(59.999999)
    assert limiter.hit(item, "k")
    assert not limiter.hit(item, "k")
    clock.advance(0.000001)
    assert limiter.get_window_stats(item, "k").remaining == 2
    assert limiter.hit(item, "k", cost=2)


def test_moving_window_values(memory: Place, clock: ManualClock) -> None:
    """When the oldest hit was, and how many there are, whether the window is empty, in between or full."""
    storage = memory.storage(clock=clock)

    def values() -> Any:
        start, count = storage.get_moving_window("k", 4, 60)
        return round(time.time() - start, 1), count

    assert values() == (0, 0)
    assert storage.acquire_entry("k", 4, 60)
    clock.advance(10)
    assert values() == (10, 1)
    assert storage.acquire_entry("k", 4, 60, 2)
    clock.advance(10)
    assert values() == (20, 3)
    assert storage.acquire_entry("k", 4, 60)
    assert not storage.acquire_entry("k", 4, 60)
    assert values() == (20, 4)
    clock.advance(45)
    assert values() == (55, 3)


def test_sliding_window_values(memory: Place, clock: ManualClock) -> None:
    """What is still in view of a hit counts as a whole one."""
    storage, key = memory.storage(clock=clock), RateLimitItemPerMinute(10).key_for("k")
    assert storage.get_sliding_window(key, 60)[::2] == (0, 0)
    clock.advance(15)
    assert storage.acquire_sliding_window_entry(key, 10, 60, 4)
    assert storage.get_sliding_window(key, 60) == (0, 0.0, 4, 105.0)
    clock.advance(60)
    assert storage.get_sliding_window(key, 60) == (4, 45.0, 0, 105.0), "3 of 4 in view"
    clock.advance(1)
    assert storage.get_sliding_window(key, 60) == (4, 44.0, 1, 104.0), "2.93 of them, so 3"
    assert storage.acquire_sliding_window_entry(key, 10, 60, 7)
    assert not storage.acquire_sliding_window_entry(key, 10, 60)
    clock.advance(120)
    assert storage.get_sliding_window(key, 60)[::2] == (0, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_test_and_stats_say_is_true(strategy: str, memory: Place, clock: ManualClock) -> None:
    """`test` is the answer of `hit`; what remains can be had, and one more cannot; by the reset time there is more."""
    dice = random.Random(strategy)
    limiter = memory.limiter(strategy, memory.storage(clock=clock))
    item = RateLimitItemPerSecond(7, 10)
    refused = 0
    for _ in range(400):
        clock.advance(dice.choice([0, 0.1, 0.7, dice.uniform(0, 3), 9.999999]))
        remaining = limiter.get_window_stats(item, "k").remaining
        assert limiter.test(item, "k", cost=max(remaining, 1)) is (remaining > 0)
        assert not limiter.test(item, "k", cost=remaining + 1)
        cost = dice.choice([1, 1, 2, 5, 1 if strategy in ROUND_DOWN else 0.5])
        said = limiter.test(item, "k", cost=cost)
        assert limiter.hit(item, "k", cost=cost) is said
        refused += not said
        reset, remaining = limiter.get_window_stats(item, "k")
        if not remaining and strategy != "sliding-window-counter" and dice.random() < 0.3:  # limits computes that one
            clock.advance(max(reset - time.time(), 0) + 0.05)  # the reset time was asked for a moment ago
            assert limiter.test(item, "k"), "more should be there by now"
    assert refused > 20


def test_patched_time_moves_windows_in_memory(memory: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of applications that freeze or move `time.time` go on working."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    limiter, item = memory.limiter("fixed-window"), RateLimitItemPerMinute(2)
    assert limiter.hit(item, "k", cost=2)
    assert not limiter.hit(item, "k")
    now += 60
    assert limiter.hit(item, "k", cost=2)


def test_wall_clock_that_is_set_back(memory: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window ends a minute after it began, not an hour later."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    limiter, item = memory.limiter("fixed-window"), RateLimitItemPerMinute(2)
    assert limiter.hit(item, "k", cost=2)
    now -= 3600
    assert not limiter.hit(item, "k")
    now += 59
    assert not limiter.hit(item, "k")
    now += 1
    assert limiter.hit(item, "k")


def test_storages_in_memory_are_apart(memory: Place) -> None:
    one, other = (memory.limiter("fixed-window") for _ in range(2))
    assert one.hit(RateLimitItemPerHour(1), "k")
    assert other.hit(RateLimitItemPerHour(1), "k")


# ------------------------------------------------------------------------------------------------------- on Redis


def test_storages_on_redis_share(redis_place: Place) -> None:
    """Two processes, or two storages of one, count the same hits; another prefix is another count."""
    item, key = RateLimitItemPerHour(3), RateLimitItemPerHour(3).key_for("k")
    one, other = (redis_place.storage() for _ in range(2))
    assert one.incr(key, 3600) == 1
    assert other.incr(key, 3600) == 2
    assert other.get_expiry(key) == pytest.approx(time.time() + 3600, abs=5)
    assert redis_place.storage(key_prefix="app").get(item.key_for("k")) == 0


def test_values_on_redis(redis_place: Place) -> None:
    """By the server's clock, told in the time of this machine."""
    storage = redis_place.storage()
    assert storage.get_moving_window("k", 4, 600) == (pytest.approx(time.time(), abs=5), 0)
    before = time.time()
    for _ in range(3):
        assert storage.acquire_entry("k", 4, 600)
        assert storage.acquire_sliding_window_entry("k", 4, 86400)
    start, count = storage.get_moving_window("k", 4, 600)
    assert count == 3
    assert before - 5 < start < time.time() + 5
    previous, _, current, left = storage.get_sliding_window("k", 86400)
    assert previous + current == 3
    assert 0 < left <= 2 * 86400
