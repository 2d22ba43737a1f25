"""A store that does not answer is a policy, not an exception: allow, deny, local or raise, in a call's time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate import Limiter
from headgate.errors import HeadgateError, InvalidKey, InvalidPermits, RateLimited, StoreUnavailable
from tests.support.callers import Callers
from tests.support.clocks import until
from tests.support.pulse import Pulse
from tests.support.quotas import ALGORITHMS

QUOTA = "3/30d"
BUDGET = 0.5  # seconds that a call may take; a busy machine must not take as long for a call that is answered
BRIEF = {"timeout": BUDGET, "connect_timeout": BUDGET}
OUTAGES = ["gone", "silent"]


def recover(*limiters: Limiter) -> None:
    """Wait until the store answers all of them."""
    for limiter in limiters:
        until(lambda limiter: not limiter.peek("other", permits=0).degraded, limiter)


@contextmanager
def outage(callers: Callers, name: str, **policies: Limiter) -> Iterator[Callable[..., Any]]:
    """An outage of that *name*, in which the function that it gives makes calls and sees that each is in time."""
    for limiter in policies.values():
        recover(limiter)  # to connect takes several trips, for which a busy machine may need more than BUDGET
        assert not limiter.try_acquire("warm").degraded
    slowest = 0.0

    def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal slowest
        begun = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            slowest = max(slowest, time.monotonic() - begun)

    with getattr(callers.store, name)(), Pulse() as pulse:
        yield timed
    assert slowest <= BUDGET + pulse.slack
    recover(*policies.values())


@pytest.mark.parametrize("how", OUTAGES)
def test_policies(how: str, failing_callers: Callers) -> None:
    """Calls are allowed, which is the default, or denied, or decided by a limiter of the same quota in this process.

    The three are on one store, so they have one breaker: the first call of each waits for the store, the others do not.
    """
    allow = failing_callers.limiter(QUOTA, on_store_error="allow", **BRIEF)
    deny = failing_callers.limiter(QUOTA, on_store_error="deny", beside=allow)
    local = failing_callers.limiter(QUOTA, on_store_error="local", beside=allow)
    with outage(failing_callers, how, allow=allow, deny=deny, local=local) as timed:
        for left in (2, 1, 0):
            decision = timed(allow.try_acquire, "k")
            assert decision.allowed and decision.degraded
            assert 0 <= decision.remaining <= decision.limit == 3
            decision = timed(deny.try_acquire, "k")
            assert not decision.allowed and decision.degraded
            assert decision.retry_after > 0
            decision = timed(local.try_acquire, "k")
            assert (decision.allowed, decision.remaining, decision.degraded) == (True, left, True)

        for limiter in (allow, deny, local):
            assert timed(limiter.peek, "k", permits=0).degraded
        assert timed(allow.peek, "k").allowed and not timed(deny.peek, "k").allowed
        assert timed(allow.acquire, "k", timeout=0).degraded
        with pytest.raises(RateLimited) as caught:
            timed(deny.acquire, "k", timeout=0)
        assert caught.value.decision.degraded

        assert not timed(local.try_acquire, "k").allowed
        assert timed(local.try_acquire, "another", permits=3)
        timed(local.refund, "k", permits=2)
        assert timed(local.try_acquire, "k", permits=2)
        timed(local.reset, "k")
        assert timed(local.acquire, "k", permits=3, timeout=0).degraded


@pytest.mark.parametrize("how", OUTAGES)
def test_raise(how: str, failing_callers: Callers) -> None:
    limiter = failing_callers.limiter(QUOTA, on_store_error="raise", **BRIEF)
    with getattr(failing_callers.store, how)():
        for call in (limiter.try_acquire, limiter.peek, limiter.refund, limiter.reset, limiter.acquire):
            with pytest.raises(StoreUnavailable) as caught:
                call("k")
            assert isinstance(caught.value, HeadgateError)
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_refund_and_reset(policy: str, failing_callers: Callers) -> None:
    """They are True when the store did it and False when it could not; raise raises."""
    limiter = failing_callers.limiter(QUOTA, on_store_error=policy)
    for _ in range(3):
        assert limiter.try_acquire("k")
    assert limiter.refund("k", 2) is True
    assert limiter.peek("k", 0).remaining == 2
    assert limiter.reset("k") is True
    assert limiter.peek("k", 0).remaining == 3
    assert limiter.reset("never seen") is True
    with failing_callers.store.gone():
        for call in (limiter.refund, limiter.reset) * 3:  # before and after the breaker opens
            if policy == "raise":
                with pytest.raises(StoreUnavailable):
                    call("k")
            else:
                assert call("k") is False


@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_bad_input(policy: str, failing_callers: Callers) -> None:
    """What is wrong is an error in an outage too."""
    limiter = failing_callers.limiter(QUOTA, on_store_error=policy)
    with failing_callers.store.gone():
        for arguments in (("",), ("k", 0), ("k", 4)):
            with pytest.raises((InvalidKey, InvalidPermits)):
                limiter.try_acquire(*arguments)


def test_recovery(failing_callers: Callers, caplog: pytest.LogCaptureFixture) -> None:
    """An outage is noticed at once, and over as soon as the store is back; the log says each once for all limiters."""
    limiter = failing_callers.limiter("1000/30d", on_store_error="allow")
    other = failing_callers.limiter("1000/30d", on_store_error="allow", name="other")  # with a breaker of its own
    for outages in (1, 2):
        assert not any(decision.degraded for decision in failing_callers.at_once(limiter.try_acquire, 100, "k"))
        with failing_callers.store.gone():
            for decision in failing_callers.at_once(limiter.try_acquire, 100, "k"):
                assert decision.allowed and decision.degraded
            for _ in range(5):  # those that fail together are one failure: the breaker opens now
                assert limiter.try_acquire("k").degraded and other.try_acquire("k").degraded
            assert limiter.store_health().state == other.store_health().state == "open"
        recover(limiter, other)
        assert limiter.try_acquire("k").remaining == 999, "a new store has forgotten everything"
        said = [record for record in caplog.records if record.name == "headgate"]
        assert [record.levelname for record in said] == ["ERROR", "WARNING"] * outages
        assert all(failing_callers.store.url.rpartition("@")[2] in record.getMessage() for record in said)


def test_answers_are_not_mixed_up(failing_callers: Callers) -> None:
    """When a store that hung goes on, no call gets the answer to another."""
    limiter = failing_callers.limiter("1000/30d", on_store_error="allow", **BRIEF)
    for key, permits in (("a", 100), ("b", 200)):
        limiter.try_acquire(key, permits=permits)
    with outage(failing_callers, "silent", allow=limiter):
        hung = [failing_callers.start(limiter.peek, key, permits=0) for key in "ab" * 20]
        assert all(call.result().degraded for call in hung)

    def peek_often() -> int:
        """How many of many calls at once the store has answered, each for its own key."""
        calls = [(key, failing_callers.start(limiter.peek, key, permits=0)) for key in "ab" * 20]
        answers = [(key, call.result()) for key, call in calls]
        answered = [(key, answer.remaining) for key, answer in answers if not answer.degraded]
        assert set(answered) <= {("a", 900), ("b", 800)}
        return len(answered)

    total = 0
    while total < 200:
        total += peek_often()


def test_local_is_no_second_quota(failing_callers: Callers) -> None:
    """30 of 50 are spent before the outage, the rest in it, and then nothing is left, for this limiter or another."""
    locals_: dict[str, Limiter] = {}
    for kind in ALGORITHMS:  # on one store they have one breaker, which waits for a silent server three times
        options: dict[str, Any] = {"beside": next(iter(locals_.values()))} if locals_ else dict(BRIEF)
        locals_[kind] = failing_callers.limiter("50/300d", algorithm=kind, on_store_error="local", **options)
    for limiter in locals_.values():
        assert sum(limiter.try_acquire("k").allowed for _ in range(30)) == 30
    with outage(failing_callers, "silent", **locals_) as timed:
        for algorithm, limiter in locals_.items():
            during = [timed(limiter.try_acquire, "k") for _ in range(40)]
            assert all(decision.degraded for decision in during), algorithm
            assert sum(decision.allowed for decision in during) == 20, algorithm
    for algorithm, limiter in locals_.items():
        assert not limiter.try_acquire("k"), algorithm
        assert failing_callers.limiter("50/300d", algorithm=algorithm).peek("k", permits=0).remaining == 0, algorithm


def test_local_owes_what_was_kept(failing_callers: Callers) -> None:
    """What was granted in an outage is charged to the store afterwards, less what was given back."""
    limiter = failing_callers.limiter("50/300d", on_store_error="local", **BRIEF)
    with outage(failing_callers, "silent", local=limiter) as timed:
        for _ in range(5):
            timed(limiter.try_acquire, "warm", permits=2)
        timed(limiter.refund, "warm", permits=4)
    settled = 50 - 1 - 6 - 1
    sent = 3 * 2  # calls that the breaker let through: the store may have made them when it woke
    assert settled - sent <= limiter.try_acquire("warm").remaining <= settled
