"""Reserve, spend, settle: all or nothing, first come first served, and what is charged in the end is what was used."""

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, Inexact, localcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from headgate import Budget, BudgetExceeded, InvalidKey, InvalidPermits, InvalidQuota, PermitsExceedLimit, RateLimited
from headgate.budget import AsyncBudget, UnsettledHold
from headgate.errors import StoreUnavailable
from headgate.testing import ManualClock
from tests.support.awaited import Tools
from tests.support.clusters import wait_until
from tests.support.servers import Server, free_port

LONG = 20.0  # seconds that nothing here takes on a machine that is not overloaded
SLOW = {"requests": "500/30d", "tokens": "200000/30d"}


async def test_the_rest_goes_back(tools: Tools, url: str, name: str) -> None:
    """A hold counts in full until it is settled, and then what was used; what is not named as reserved."""
    llm = tools.Budget(**SLOW, store=url, name=name)
    async with llm.reserve("tenant:7", requests=1, tokens=2700, timeout=0) as hold:
        assert await llm.remaining("tenant:7") == {"requests": 499, "tokens": 197300}
        assert [held.amounts for held in await llm.unsettled("tenant:7")] == [{"requests": 1, "tokens": 2700}]
        [ours] = await llm.unsettled()
        assert isinstance(ours, UnsettledHold) and ours.id == hold.id and 0 < ours.expires_in <= 120
        await hold.spend(tokens=40)
        assert hold.spent == {"requests": 0, "tokens": 40} and not hold.settled
        assert await hold.settle(tokens=2515)
        assert not await hold.settle(tokens=1), "settled twice"
    assert await llm.remaining("tenant:7") == {"requests": 499, "tokens": 197485}
    assert await llm.unsettled("tenant:7") == await llm.unsettled() == []
    assert await llm.remaining("tenant:8") == {"requests": 500, "tokens": 200000}
    other = tools.Budget(**SLOW, store=url, name=name + "'")
    assert await other.remaining("tenant:7") == {"requests": 500, "tokens": 200000}, "another name is another budget"


async def test_all_or_nothing(tools: Tools, url: str, name: str) -> None:
    """If one amount is short nothing is held, and the refusal is about that one."""
    llm = tools.Budget(**SLOW, store=url, name=name)
    await llm.reserve("a", tokens=150000, timeout=0)
    with pytest.raises(RateLimited) as refused:
        await llm.reserve("a", requests=400, tokens=50001, timeout=0)
    decision = refused.value.decision
    assert (decision.limit, decision.remaining, decision.allowed) == (200000, 50000, False)
    assert 0 < decision.retry_after <= 120 and refused.value.key == "a"
    assert await llm.remaining("a") == {"requests": 500, "tokens": 50000}


async def test_how_a_block_ends(tools: Tools, url: str, name: str) -> None:
    """Normally what was spent is charged, or the reservation if nothing was; after an error what was spent."""
    llm = tools.Budget(tokens="1000/30d", store=url, name=name)
    async with llm.reserve("a", tokens=100):
        pass
    assert (await llm.remaining("a"))["tokens"] == 900
    async with llm.reserve("a", tokens=100) as hold:
        await hold.spend(tokens=30)
    assert (await llm.remaining("a"))["tokens"] == 870
    with pytest.raises(ZeroDivisionError):
        async with llm.reserve("a", tokens=100) as hold:
            print((await hold.spend(tokens=5)) or 1 / 0)
    assert (await llm.remaining("a"))["tokens"] == 865
    with pytest.raises(ZeroDivisionError):
        async with llm.reserve("a", tokens=100):
            print(1 / 0)
    assert (await llm.remaining("a"))["tokens"] == 865
    with pytest.raises(RuntimeError, match="is settled"):
        await hold.spend(tokens=1)


async def test_a_debt(tools: Tools, url: str, name: str, clock: ManualClock) -> None:
    """More than was reserved is a debt, which later calls wait for; it is never an error."""
    llm = tools.Budget(tokens="100/second", store="memory://", name=name, clock=clock)
    async with llm.reserve("a", tokens=10) as hold:
        assert await hold.settle(tokens=250)
    assert await llm.remaining("a") == {"tokens": 0}
    with pytest.raises(RateLimited) as refused:
        await llm.reserve("a", tokens=20, timeout=0)
    assert refused.value.decision.retry_after == 1.7
    clock.advance(1.699_999)
    with pytest.raises(RateLimited):
        await llm.reserve("a", tokens=20, timeout=0)
    clock.advance(0.000_001)
    await llm.reserve("a", tokens=20, timeout=0)


async def test_spend_reserves_more(tools: Tools, url: str, name: str) -> None:
    """A stream reserves as much again before it runs out, and is stopped when there is no more; all is counted."""
    llm = tools.Budget(requests="5/30d", tokens="1000/30d", store=url, name=name)
    hold = await llm.reserve("a", requests=1, tokens=100, timeout=0)
    await hold.spend(tokens=89)
    assert hold.reserved["tokens"] == 100
    await hold.spend(tokens=1)
    assert hold.reserved == {"requests": 1, "tokens": 190}, "before it runs out"
    assert await llm.remaining("a") == {"requests": 4, "tokens": 810}
    other = await llm.reserve("a", tokens=780, timeout=0)
    await hold.spend(tokens=110)
    assert hold.reserved["tokens"] == 200, "what is missing, if there is not as much again"
    await hold.spend(tokens=15)
    with pytest.raises(BudgetExceeded, match="'a' has no more tokens") as stopped:
        await hold.spend(tokens=50)
    assert stopped.value.amount == "tokens" and hold.spent["tokens"] == 265
    await other.settle(tokens=0)
    await hold.spend(tokens=1)
    assert await hold.settle()
    assert await llm.remaining("a") == {"requests": 4, "tokens": 734}


async def test_first_come_first_served(url: str, name: str) -> None:
    """Small reservations do not overtake a large one that waits, in this process or another."""
    llm, order = AsyncBudget(tokens="100/30d", store=url, name=name), []
    first = await llm.reserve("a", tokens=70)

    async def work(number: int, tokens: int) -> None:
        async with llm.reserve("a", tokens=tokens, timeout=LONG) as hold:
            order.append(number)
            await hold.settle(tokens=0)

    tasks = []
    for number, tokens in enumerate((100, 10, 30, 1)):
        tasks.append(asyncio.create_task(work(number, tokens)))
        await asyncio.sleep(0.01)
    with pytest.raises(RateLimited):
        await llm.reserve("a", tokens=1, timeout=0)
    assert await llm.remaining("a") == {"tokens": 30} and order == []
    await first.settle(tokens=0)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]


async def test_a_deadline(tools: Tools, url: str, name: str) -> None:
    """A reservation waits until its time is over, and then leaves the line, so that others are not held up."""
    llm = tools.Budget(tokens="100/30d", store=url, name=name)
    await llm.reserve("a", tokens=50, timeout=0)
    begun = time.monotonic()
    with pytest.raises(RateLimited):
        await llm.reserve("a", tokens=51, timeout=0.2)
    assert time.monotonic() - begun >= 0.2
    await llm.reserve("a", tokens=50, timeout=LONG)


def test_refill(url: str, name: str) -> None:
    """A waiter is served when the bucket has refilled, and not much later."""
    llm = Budget(tokens="100/second", store=url, name=name)
    with llm.reserve("a", tokens=100):
        pass
    begun = time.monotonic()
    llm.reserve("a", tokens=30, timeout=LONG)
    assert 0.25 < time.monotonic() - begun < 5


@pytest.mark.parametrize("on_lost, left", [("charge", 900), ("release", 1000), ("spent", 990)])
async def test_lost(tools: Tools, name: str, clock: ManualClock, on_lost: Any, left: int) -> None:
    """A hold that is not settled in time costs what the policy says; a late settle corrects it, and counts once."""
    llm = tools.Budget(tokens="1000/30d", store="memory://", name=name, clock=clock, hold=30.0, on_lost=on_lost)
    hold = await llm.reserve("a", tokens=100)
    clock.advance(20)
    await hold.spend(tokens=10)  # half of its time is over: this keeps it, and reports what was spent
    clock.advance(29.999_999)
    assert (await llm.remaining("a"))["tokens"] == 900
    clock.advance(0.000_001)
    assert (await llm.remaining("a"))["tokens"] == left
    assert await llm.unsettled("a") == await llm.unsettled() == []
    assert await hold.settle(tokens=60)
    assert not await hold.settle(tokens=60)
    assert (await llm.remaining("a"))["tokens"] == 940


async def test_ids(tools: Tools, url: str, name: str) -> None:
    """The same id is the same hold until it is settled, in all processes, and a new one after that."""
    one, other = (tools.Budget(tokens="1000/30d", store=url, name=name) for _ in "ab")
    first, second = await one.reserve("a", tokens=100, id="job"), await other.reserve("a", tokens=100, id="job")
    assert (await one.remaining("a"))["tokens"] == 900
    assert await second.settle(tokens=70)
    assert not await first.settle(tokens=80), "settled twice"
    assert (await one.remaining("a"))["tokens"] == 930
    async with one.reserve("a", tokens=100, id="job"):
        assert (await one.remaining("a"))["tokens"] == 830
    odd = tools.Budget(hits="10/30d", words="10/30d", store=url, name=f"{name}:odd")
    for id in ("m", "its/10/2592000000000/10", "ords/10/2592000000000/10"):  # no id is taken for a quota
        await (await odd.reserve("a", hits=1, words=1, id=id)).settle()
    assert await odd.remaining("a") == {"hits": 7, "words": 7}


async def test_an_id_with_other_amounts(tools: Tools, url: str, name: str) -> None:
    """It has what it held, so that no more is spent than is held; an id counts for its keys alone."""
    llm = tools.Budget(tokens="1000/30d", requests="5/30d", store=url, name=name)
    await llm.reserve("a", tokens=100, requests=1, id="job", timeout=0)
    again = await llm.reserve("a", tokens=900, id="job", timeout=0)
    assert again.reserved == {"tokens": 100, "requests": 1}
    await llm.reserve("a", tokens=850, timeout=0)
    with pytest.raises(BudgetExceeded):
        await again.spend(tokens=800)
    assert await again.settle()
    assert await llm.remaining("a") == {"tokens": 0, "requests": 4}
    other = await llm.reserve("b", tokens=900, id="job", timeout=0)
    assert other.reserved == {"tokens": 900, "requests": 0}
    org = tools.Budget(tokens="1000/30d", store=url, name=name + "org")
    user = tools.Budget(tokens="1000/30d", inside=org)
    for who, left in (("u", 700), ("v", 400)):
        hold = await user.reserve(["c", who], tokens=300, id="job", timeout=0)
        assert hold.reserved == {"tokens": 300} and await user.remaining(["c", who]) == {"tokens": left}
        assert [held.id for held in await user.unsettled(["c", who])] == ["job"]
    assert len(await user.unsettled()) == 2
    assert await hold.settle(tokens=0) and await org.remaining("c") == {"tokens": 700}
    assert len(await user.unsettled()) == 1


async def test_a_pause(tools: Tools, name: str, clock: ManualClock) -> None:
    """Nothing can be reserved for so long, also if holds end meanwhile; then the amounts come back bit by bit."""
    llm = tools.Budget(tokens="600/minute", requests="60/minute", store="memory://", name=name, clock=clock)
    holds = [await llm.reserve("a", tokens=200, timeout=0) for _ in range(3)]
    await llm.pause("a", 30.0, "tokens")
    await llm.pause("a", 10.0, "tokens")
    await holds[0].settle(tokens=0)
    await holds[1].settle(tokens=200)
    for seconds in (0.0, 29.0, 0.9):
        clock.advance(seconds)
        assert await llm.remaining("a") == {"tokens": 0, "requests": 60}
        with pytest.raises(RateLimited) as refused:
            await llm.reserve("a", tokens=1, timeout=0)
        assert refused.value.retry_after <= 30
    clock.advance(refused.value.retry_after)
    await (await llm.reserve("a", tokens=200, timeout=0)).settle()
    assert await llm.remaining("a") == {"tokens": 0, "requests": 60}
    assert len(await llm.unsettled("a")) == 1, "a pause is none"
    await holds[2].settle(tokens=0)
    clock.advance(10.0)
    assert await llm.remaining("a") == {"tokens": 300, "requests": 60}


async def test_money(tools: Tools, name: str, clock: ManualClock) -> None:
    """Money is exact to a billionth, as text or Decimal; floats are refused; two quotas of one amount both hold."""
    spend = tools.Budget(usd=["0.5/30d", "50/300d"], credits="12.5/30d burst 20", name=name, clock=clock)
    hold = await spend.reserve("a", usd="0.1", credits=Decimal("0.000000001"))
    assert hold.reserved == {"usd": Decimal("0.1"), "credits": Decimal("1E-9")}
    await hold.settle(usd="0.100000001")
    left = await spend.remaining("a")
    assert left == {"usd": Decimal("0.399999999"), "credits": Decimal("20") - Decimal("1E-9")}
    with pytest.raises(InvalidPermits, match=r"float 0\.1, as a float cannot hold a cent exactly"):
        await spend.reserve("a", usd=0.1)
    with pytest.raises(PermitsExceedLimit, match=r"usd=0.6 is more than the budget of 0.5"):
        await spend.reserve("a", usd="0.6")
    assert (await spend.reserve("a", usd=0, credits=20 - 1)).reserved["credits"] == 19


def test_money_whatever_the_context(name: str) -> None:
    """What a program does to the context of `decimal` rounds no money; what cannot be counted is refused."""
    odd: list[Any] = [
        "1e9999999",
        "1." + "0" * 99 + "1",
        "NaN",
        "sNaN",
        "-Infinity",
        Decimal("1e-10"),
        Decimal("1e999999"),
    ]
    with localcontext() as context:
        context.prec, context.traps[Inexact] = 3, False
        llm = Budget(usd="50.123456789/30d", name=name)
        with llm.reserve("a", usd="12.345678901", timeout=0) as hold:
            assert hold.reserved == {"usd": Decimal("12.345678901")}
        context.traps[Inexact] = True
        assert llm.remaining("a") == {"usd": Decimal("37.777777888")}
        for amount in odd:
            with pytest.raises(InvalidPermits, match="must be money from 0 to"):
                llm.reserve("a", usd=amount, timeout=0)


def test_threads_share_a_hold(name: str) -> None:
    """What each of them spends is counted."""
    hold = Budget(tokens="1000000/30d", name=name).reserve("a", tokens=500_000)

    def spend(_: int) -> None:
        for _ in range(5000):
            hold.spend(tokens=1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(spend, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert hold.spent == {"tokens": 20_000}


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupted_after(lines: int, call: Callable[[], object]) -> bool:
    """Make *call*, and interrupt it after so many *lines* of the budget; whether it has come so far."""
    left = lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "line" and Path(frame.f_code.co_filename).name in ("state.py", "records.py"):
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("id", [None, "job"])
def test_a_signal_forgets_nothing(name: str, id: str | None) -> None:
    """An interrupt anywhere in the state in memory costs what the call may have used, and nobody else's amounts."""
    for lines in itertools.count(1):
        clock = ManualClock()
        llm = Budget(tokens=["1000/30d", "2000/30d"], name=name, clock=clock, hold=60)
        held = llm.reserve("a", tokens=600)
        llm.reserve("a", tokens=100).settle()

        def call(llm: Budget = llm) -> None:
            with llm.reserve("a", id=id, tokens=50, timeout=0) as hold:
                hold.settle(tokens=50)

        interrupted = interrupted_after(lines, call)
        left = llm.remaining("a")["tokens"]
        assert 200 <= left <= 300, lines
        assert [each.amounts for each in llm.unsettled("a") if each.id == held.id] == [{"tokens": 600}], lines
        assert held.settle(tokens=0)
        clock.advance(61)
        left = llm.remaining("a")["tokens"]
        assert 800 <= left <= 900 and llm.unsettled("a") == [], lines
        if not interrupted:
            break


async def test_hierarchy(tools: Tools, url: str, name: str) -> None:
    """Budgets inside each other: all levels have room or nothing is held, and a branch does not hold up another."""
    org = tools.Budget(tokens="1000/30d", usd="1/30d", store=url, name=name)
    team = tools.Budget(tokens="600/30d", name="team", inside=org)
    key = tools.Budget(tokens="300/30d", requests="10/30d", name="key", inside=team)
    hold = await key.reserve(["org", "team:1", "key:1"], tokens=300, requests=1, usd="0.5", timeout=0)
    assert hold.key == "org > team:1 > key:1"
    with pytest.raises(RateLimited):
        await key.reserve(["org", "team:1", "key:1"], tokens=1, timeout=0.01)
    await key.reserve(["org", "team:1", "key:2"], tokens=300, timeout=0)
    with pytest.raises(RateLimited) as refused:
        await key.reserve(["org", "team:1", "key:3"], tokens=1, timeout=0)
    assert refused.value.decision.limit == 600
    assert (await key.remaining(["org", "team:1", "key:3"]))["tokens"] == 0
    assert (await key.remaining(["org", "team:2", "key:1"]))["tokens"] == 300
    await hold.settle(tokens=100)
    left = await org.remaining("org")
    assert left["tokens"] == 600 and 0 <= left["usd"] - Decimal("0.5") < Decimal(
        "0.01"
    )  # a nano-dollar in 3 ms is back
    assert (await team.remaining(["org", "team:1"]))["tokens"] == 200
    assert len(await key.unsettled(["org", "team:1", "key:2"])) == 1
    with pytest.raises(ValueError, match=r"a list of 3 keys, for .+ > team > key"):
        await key.reserve(["org"], tokens=1)
    same = tools.Budget(tokens="100/30d", store=url, name=name + " same")
    await same.reserve(["a", "b"], tokens=60, timeout=0)
    with pytest.raises(RateLimited):
        await same.reserve(["a", "c"], tokens=60, timeout=0)
    assert await same.remaining(["a", "c"]) == {"tokens": 40}


async def test_waiters_of_another_branch_are_woken(url: str, name: str) -> None:
    """What one branch gives back serves a waiter of another one at once."""
    org = AsyncBudget(tokens="100/30d", store=url, name=name)
    user = AsyncBudget(tokens="90/30d", name="user", inside=org)
    first = await user.reserve(["org", "a"], tokens=80)
    waiting = asyncio.ensure_future(user.reserve(["org", "b"], tokens=80, timeout=LONG))
    await asyncio.sleep(0.05)
    begun = time.monotonic()
    await first.settle(tokens=0)
    await waiting
    assert time.monotonic() - begun < 10


async def test_cancellation(url: str, name: str) -> None:
    """A task that is cancelled while it waits leaves the line; one inside a block settles what it has spent."""
    llm = AsyncBudget(tokens="100/30d", store=url, name=name)
    first = await llm.reserve("a", tokens=60)
    waiting = asyncio.ensure_future(llm.reserve("a", tokens=50))
    await asyncio.sleep(0.05)
    waiting.cancel()
    async with llm.reserve("a", tokens=40, timeout=LONG) as hold:  # would be behind the other
        await hold.settle(tokens=0)
    await first.settle(tokens=0)
    started = asyncio.Event()

    async def stream() -> None:
        async with llm.reserve("a", tokens=50) as hold:
            await hold.spend(tokens=7)
            started.set()
            await asyncio.sleep(LONG)

    task = asyncio.create_task(stream())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await llm.remaining("a") == {"tokens": 93}


def test_threads(url: str, name: str) -> None:
    """Threads that reserve random sizes never hold more than there is, and all is back in the end."""
    llm, guard, held, most = Budget(tokens="100/30d", store=url, name=name), threading.Lock(), 0, 0

    def work(number: int) -> None:
        nonlocal held, most
        for turn in range(8):
            tokens = 1 + (number * 31 + turn * 17) % 60
            with llm.reserve("a", tokens=tokens, timeout=LONG) as hold:
                with guard:
                    held += tokens
                    most = max(most, held)
                with guard:
                    held -= tokens
                hold.settle(tokens=0)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))
    assert most <= 100 and llm.remaining("a") == {"tokens": 100}


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, InvalidQuota, "needs an amount"),
    ({"tokens": "many"}, InvalidQuota, "cannot read the quota"),
    ({"tokens": []}, InvalidQuota, "a quota or a list of them"),
    ({"tokens": ["5/day", ["9/day"]]}, InvalidQuota, "a quota or a list of them"),
    ({"tokens": b"5/day"}, InvalidQuota, "a quota or a list of them"),
    ({"usd": "1e9/day"}, InvalidQuota, "write money such as"),
    ({"usd": "2000000/day"}, InvalidQuota, "at most 1,000,000"),
    ({"timeout": "5/day"}, ValueError, "cannot be called 'timeout'"),
    ({"tokens": "5/day", "hold": 0}, ValueError, "hold must be"),
    ({"tokens": "5/day", "on_lost": "forget"}, ValueError, "charge, release, spent"),
    ({"tokens": "5/day", "on_store_error": "ignore"}, ValueError, "on_store_error"),
    ({"tokens": "5/day", "name": ""}, InvalidKey, "name is empty"),
    ({"tokens": "1/10d burst 1000000000"}, InvalidQuota, "too long to fill"),
]


@pytest.mark.parametrize("arguments, kind, message", BAD)
def test_bad_budgets(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    """The error says what would be right."""
    with pytest.raises(kind, match=message):
        Budget(**arguments)


async def test_bad_calls(tools: Tools, name: str) -> None:
    """They raise before anything is changed."""
    llm = tools.Budget(tokens="100/30d", requests="5/30d", name=name)
    rows: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("a", {}, TypeError, "Name an amount, such as tokens=1"),
        ("a", {"words": 1}, TypeError, "no amount 'words'; it has tokens, requests"),
        ("a", {"tokens": -1}, InvalidPermits, "from 0 to"),
        ("a", {"tokens": "5"}, InvalidPermits, "must be a whole number"),
        ("a", {"tokens": True}, InvalidPermits, "must be a whole number"),
        ("a", {"tokens": 101}, PermitsExceedLimit, "more than the budget of 100"),
        ("", {"tokens": 1}, InvalidKey, "key is empty"),
        (5, {"tokens": 1}, InvalidKey, "must be text"),
        ([], {"tokens": 1}, ValueError, "1 to 8 keys"),
        ("a", {"tokens": 1, "id": "a\n"}, InvalidKey, "id has the control character"),
        ("a", {"tokens": 1, "timeout": -1}, ValueError, "timeout must be"),
    ]
    for key, arguments, kind, message in rows:
        with pytest.raises(kind, match=message):
            await llm.reserve(key, **arguments)
    hold = await llm.reserve("a", tokens=10)
    with pytest.raises(InvalidPermits):
        await hold.settle(tokens=-5)
    assert not hold.settled and await hold.settle(tokens=5)
    assert await llm.remaining("a") == {"tokens": 95, "requests": 5}
    with pytest.raises(TypeError, match="inside must be"):
        Budget(tokens="5/day", inside="org")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match="on the same store"):
        Budget(tokens="5/day", inside=Budget(tokens="9/day"), store="memory://")
    with pytest.raises(ValueError, match="money on all levels or on none"):
        Budget(points="5.5/day", inside=Budget(points="9/day"))


@pytest.mark.store_timeout(None)
async def test_a_store_that_is_down(tools: Tools, name: str) -> None:
    """Each policy answers at once: grants, refuses, counts in this process, or raises."""
    url = f"redis://127.0.0.1:{free_port()}"
    allow, deny, local, error = (
        tools.Budget(tokens="100/30d", store=url, name=name + policy, on_store_error=policy)
        for policy in ("allow", "deny", "local", "raise")
    )
    for _ in range(2):
        hold = await allow.reserve("a", tokens=100, timeout=LONG)
        assert hold.degraded
        await hold.spend(tokens=500)
        assert await hold.settle()
    assert await allow.remaining("a") == {"tokens": 100} and await deny.remaining("a") == {"tokens": 0}
    with pytest.raises(RateLimited) as refused:
        await deny.reserve("a", tokens=1, timeout=LONG)
    assert refused.value.decision.degraded
    async with local.reserve("a", tokens=60, timeout=LONG) as hold:
        assert hold.degraded and await local.remaining("a") == {"tokens": 40}
        with pytest.raises(RateLimited):
            await local.reserve("a", tokens=60, timeout=0)
        await hold.settle(tokens=5)
    assert await local.remaining("a") == {"tokens": 95}
    for call in (error.reserve("a", tokens=1, timeout=0), error.remaining("a")):
        with pytest.raises(StoreUnavailable):
            await call


def test_where_it_is(redis_server: Server, name: str) -> None:
    """Keys have one hash tag for each root, the name before it, and a TTL."""
    llm = Budget(tokens="100/hour", store=redis_server.url, name="gpt:4")
    user = Budget(tokens="50/hour", name="user", inside=llm)
    hold = user.reserve(["org{1}", "a b"], tokens=5)
    client = redis_server.client()
    tag = "budget:gpt%3A4:{org%7B1%7D}"
    assert {str(key) for key in client.keys("*")} == {tag, tag + ":due", tag + ":user:a%20b"}
    assert all(client.ttl(key) > 3600 for key in client.keys("*"))
    hold.settle()
    wait_until(lambda: llm.remaining("org{1}") == {"tokens": 95}, "the charge")
