"""The short way of threads to Redis asks for the same, and leaves the same, as the plans that it shortens.

The one in memory, whose steps `test_budget_twins.py` compares, goes by the same clock and the same queue.
"""

import math
import os
import random
import re
from decimal import Decimal
from enum import IntEnum
from functools import partial
from typing import Any

import pytest

from headgate import Budget, RateLimited
from headgate._waiters import Waiter
from headgate.budget.holds import Hold
from headgate.budget.server_calls import WAITER_TTL, ServerCalls
from headgate.budget.subjects import check_any_timeout, process_id, read, unique_id
from headgate.clock import SYSTEM_CLOCK
from headgate.coordination.arguments import LONGEST, check_timeout
from headgate.redis.script import pack_arguments
from headgate.telemetry import snapshot, watching
from headgate.testing import ManualClock
from tests.support.servers import Server
from tests.test_processes import in_child

LEVELS: list[dict[str, Any]] = [{"tokens": "1000/minute", "usd": ["5/hour", "50/day"]}, {"requests": "30/minute"}]


class Sent:
    """Keeps the arguments of an operation, as `PackedOperation` sends them."""

    arguments = b""

    def run(self, arguments: bytes) -> list[Any]:
        self.arguments = arguments
        return [1]


@pytest.mark.parametrize("on_lost", ["charge", "spent"])
@pytest.mark.parametrize("path", [["org", "t€am"], ["org"]])
def test_the_same_request(path: list[str], on_lost: Any) -> None:
    """Byte by byte: of one level and of two, with counts and money, of callers that wait and of those that do not."""
    budget = outer = Budget(**LEVELS[0], on_lost=on_lost, hold=7.5)
    if len(path) > 1:
        budget = Budget(**LEVELS[1], name="team", on_lost=on_lost, hold=7.5, inside=outer)
    subject, sent = budget._subject(path), Sent()
    calls = ServerCalls(sent, sent, subject, budget._terms)
    values = subject.amounts.encode({"tokens": 900, "usd": "0.000000001"})
    units = subject.amounts.units(values)
    for waits, ttl in (True, WAITER_TTL), (False, 0):
        more = (7_500_000, "", on_lost, ttl, subject.path)
        calls.reserve("id-1f", units, waits)
        assert sent.arguments == pack_arguments(*subject.operation("reserve", "id-1f", values, *more).arguments)
    calls.settle("id-1f", units)
    assert sent.arguments == pack_arguments(*subject.operation("settle", "id-1f", values, "", 0).arguments)


def test_the_same_outcome(redis_server: Server, name: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random calls of a budget that may go the short way, and of one that may not: replies, state and counters."""
    monkeypatch.setattr(watching, "_names", {})  # other tests may have used up the names that are told apart
    short, law = (
        Budget(**LEVELS[0], store=redis_server.url, name=name + each, clock=clock, hold=20.0)
        for each in ("short", "law")
    )
    law._subject("a").calls = None
    assert short._subject("a").calls is not None
    dice, holds, seen = random.Random(7), list[Any](), set[str]()
    for _ in range(400):
        clock.advance(dice.choice([0.0, 0.3, 2.0, dice.choice([0.0, 25.0])]))
        if dice.random() < 0.6 or not holds:
            amounts: dict[str, Any] = {"tokens": dice.choice([0, 50, 400]), "usd": dice.choice(["0.1", "1.25"])}
            both = [_reserved(budget, amounts) for budget in (short, law)]
            assert type(both[0]) is type(both[1])
            if isinstance(both[0], RateLimited):
                assert both[0].decision == both[1].decision
                seen.add("refused")
            else:
                holds.append(both)
                seen.add("granted")
        else:
            both = holds.pop(dice.randrange(len(holds)))
            final = {"tokens": dice.choice([0, 30, 450])}
            replies = [hold.settle(**final) for hold in both]
            assert replies[0] == replies[1] and [hold.settle(**final) for hold in both] == [False, False]
            seen.add(f"settled {replies[0]}")
        assert short.remaining("a") == law.remaining("a")
        left = [
            sorted((hold.expires_in, str(hold.amounts)) for hold in budget.unsettled("a")) for budget in (short, law)
        ]
        assert left[0] == left[1] and len(short.unsettled()) == len(law.unsettled())
    assert seen == {"granted", "refused", "settled True"}
    assert _counted(name + "short") == _counted(name + "law") != {}


def test_the_same_clock(clock: ManualClock) -> None:
    before = SYSTEM_CLOCK.now()
    assert before <= read(SYSTEM_CLOCK) <= SYSTEM_CLOCK.now()
    assert read(clock) == clock.now()
    clock.advance(2.5)
    assert read(clock) == clock.now()


def test_the_same_queue(clock: ManualClock) -> None:
    """While a caller of this process waits, no other goes the short way; a waiter for another key does not matter."""
    budget = Budget(tokens="100/30d", clock=clock)
    budget.reserve("a", tokens=1, timeout=0).settle()  # the state is there from now on
    subject, woken = budget._subject("a"), list[str]()
    for key, granted in ("b", True), ("a", False):
        waiter = Waiter(budget._subject(key).runner.channel, partial(woken.append, key))
        waiters = subject.runner.backend.waiters
        waiters.join(waiter)
        assert subject._has_waiters() is not waiters.is_empty(subject.runner.channel)
        assert bool(subject.grant(f"beside {key}", [1], 1_000_000, "charge")) is granted
        waiters.leave(waiter)
        assert not subject._has_waiters()
    waiters.join(waiter)
    assert subject.settle("beside b", [1]) and woken == ["a"], "the caller that waits was not woken"
    waiters.leave(waiter)


class Seconds(IntEnum):
    TEN = 10


GOOD = [None, 0, 0.0, -0.0, 1, 1.5, 3600.0, 3600.1, LONGEST, Seconds.TEN]
BAD = [-0.1, -1, LONGEST * 1.01, math.inf, -math.inf, math.nan, 10**400, True, False, "1", Decimal(1), [1.0]]


@pytest.mark.parametrize("timeout", GOOD, ids=repr)
def test_a_timeout(timeout: Any) -> None:
    """Any number of seconds that is right ends the wait at the same microsecond, whatever its type."""
    check_timeout(timeout)
    check_any_timeout(timeout)
    full = Budget(tokens="100/30d", clock=ManualClock())
    full.reserve("a", tokens=100)
    hold = Hold(full._terms, full._subject("a"), None, {"tokens": 1})
    assert not hold._is_granted(timeout)
    assert hold._until == (None if timeout is None else full._terms.clock.now() + round(timeout * 1_000_000))


@pytest.mark.parametrize("timeout", BAD, ids=repr)
def test_no_timeout(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout") as expected:
        check_timeout(timeout)
    with pytest.raises(ValueError, match="timeout") as raised:
        check_any_timeout(timeout)
    assert str(raised.value) == str(expected.value)


def test_ids() -> None:
    """A name of the process and a number in hexadecimal: the same in no two holds, and in no two processes."""
    ids = [unique_id() for _ in range(20)]
    assert all(re.fullmatch("[0-9a-f]{20}-[0-9a-f]+", id) for id in ids)
    process, first = ids[0].split("-")
    assert ids == [f"{process}-{int(first, 16) + number:x}" for number in range(20)]
    assert process_id() == os.getpid()
    in_child(lambda: process_id() == os.getpid() and unique_id().split("-")[0] != process)


def test_a_hold_without_a_wait_is_counted(name: str) -> None:
    budget = Budget(tokens="100/30d", name=name)
    for _ in range(3):
        budget.reserve("a", tokens=1, timeout=0)
    assert budget._terms.totals.granted == 2, "all but the first, which made the state"
    with pytest.raises(RateLimited):
        budget.reserve("a", tokens=98, timeout=0)
    assert budget._terms.totals.granted == 2


def _reserved(budget: Budget, amounts: dict[str, Any]) -> Any:
    try:
        return budget.reserve("a", timeout=0, **amounts)
    except RateLimited as refused:
        return refused


def _counted(name: str) -> dict[Any, float]:
    return {
        (row.name, row.labels.get("amount"), row.labels.get("result")): row.value
        for row in snapshot()
        if row.labels.get("budget") == name and not row.name.endswith("time")
    }
