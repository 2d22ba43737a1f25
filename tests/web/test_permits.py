"""Permits are given back exactly: by the answer, when a handler raises, when a client leaves, when a task is cancelled.

And they are waited for in line.
"""

import asyncio
import functools
import logging
import threading
from concurrent.futures import CancelledError
from typing import Any

import anyio
import pytest

from headgate.errors import StoreUnavailable
from headgate.web.exchange import ResponseInfo
from tests.support.clocks import WatchedClock, until
from tests.support.door import Door, Request
from tests.support.servers import Server


def user(request: Request) -> Any:
    return request.user


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


# ------------------------------------------------------------------------------------------------------- count_if


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_count_if(door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """Only failures count: what a success took goes back, of every subject, and exactly that."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    limit = door.limits(store=url).limit("3/hour", key=["address", user], cost=1, count_if=failed)
    assert door.admitted(limit, times=5, user="a") == 5
    assert door.admitted(limit, times=2, user="a", answer=401) == 2
    assert door.admitted(limit, times=5, user="a") == 5
    assert door.admitted(limit, times=5, user="a", answer=401) == 1
    assert not door.get(limit, user="a")


def test_count_if_at_once(door: Door, redis_url: str) -> None:
    """Those under way count; when they have ended, all is as before."""
    limits = door.limits(store=redis_url)
    limit = limits.limit("20/hour", count_if=failed)
    ending = threading.Event()
    under_way = [door.send(limit, handler=door.handler(lambda: ending.wait(20))) for _ in range(60)]
    until(lambda: sum(request.done() for request in under_way) == 40)
    ending.set()
    assert sum(bool(request.result()) for request in under_way) == 20
    assert door.get(limits.limit("20/hour", scope="GET /")).remaining == 19


def test_count_if_reads_the_response(door: Door) -> None:
    limit = door.limits().limit("1/hour", count_if=lambda response: response.headers.get("x-cache") != "hit")
    assert door.admitted(limit, times=3, answer=ResponseInfo(200, {"x-cache": "hit"})) == 3
    assert door.admitted(limit, times=3, answer=ResponseInfo(200)) == 1


class Broken(Exception):
    """A bug of a handler."""


@pytest.mark.parametrize(
    ("counts", "left"), [(lambda response: response.status_code == 500, 1), (lambda response: 0, 2)]
)
def test_handler_raises(door: Door, counts: Any, left: int) -> None:
    """Its status is 500 for `count_if`, and its exception goes on."""
    limit = door.limits().limit("3/hour", count_if=counts)
    with pytest.raises(Broken):
        door.get(limit, answer=Broken())
    assert door.get(limit, answer=ResponseInfo(500)).remaining == left


def test_handler_raises_without_count_if(door: Door) -> None:
    """The request was made, so it counts."""
    limit = door.limits().limit("3/hour")
    with pytest.raises(Broken):
        door.get(limit, answer=Broken())
    assert door.get(limit).remaining == 1


def wrong(response: ResponseInfo) -> bool:
    raise Broken


async def wrong_later(response: ResponseInfo) -> bool:
    raise Broken


class Undecided:
    def __bool__(self) -> bool:
        raise Broken


@pytest.mark.parametrize("counts", [wrong, wrong_later, lambda response: Undecided(), lambda: True])
def test_count_if_raises(door: Door, counts: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The answer goes out, the error is logged once, the permits stay spent; those of other limits go back."""
    limits = door.limits()
    both = [
        limits.limit("3/hour", scope="wrong", count_if=counts),
        limits.limit("9/hour", scope="right", count_if=failed),
    ]
    assert door.get(both).status == 200
    [record] = [record for record in caplog.records if record.name == "headgate.web"]
    assert record.exc_info and "count_if of <Limit 3/hour by address> failed" in record.getMessage()
    assert [door.get(limit, answer=401).remaining for limit in both] == [1, 8]
    with pytest.raises(ZeroDivisionError):  # the handler's own error goes on
        door.get(both, answer=ZeroDivisionError())


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_client_leaves(async_door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """The task of a request is cancelled: its status is 499 for `count_if`, and what goes back does so all the same."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    seen: list[int] = []

    def counts(response: ResponseInfo) -> bool:
        seen.append(response.status_code)
        return response.status_code != 499

    limits = async_door.limits(store=url)
    limit = limits.limit("3/hour", key=["address", user], count_if=counts)
    running = threading.Event()

    async def handler() -> None:
        running.set()
        await asyncio.Event().wait()

    leaving = async_door.send(limit, user="a", handler=handler)
    assert running.wait(20)
    leaving.cancel()
    until(lambda: seen == [499])
    until(lambda: async_door.get(limit, user="a", answer=499).remaining == 2)


def test_a_refusal_is_not_settled(door: Door) -> None:
    """A request that was refused took nothing, so nothing goes back for it, though its 429 is not counted."""
    limits = door.limits()
    limit, narrow = limits.limit("9/hour", scope="wide", count_if=failed), limits.limit("1/hour", scope="narrow")
    assert door.get([limit, narrow], answer=401).remaining == 0
    assert [bool(door.get(limit, narrow)) for _ in range(3)] == [False] * 3
    assert door.get(limit, answer=401).remaining == 7


def test_settled_once(door: Door) -> None:
    """However often a framework says that a request has ended: the first time decides."""
    limits = door.limits()
    limit = limits.limit("9/hour", count_if=failed)
    exchange = door.get(limit, answer=401).exchange
    for _ in range(3):
        door.run(lambda: limits.settle(exchange, ResponseInfo(200)))
    assert door.get(limit).remaining == 7


# --------------------------------------------------------------------------------------------------------- outages


@pytest.mark.store_timeout(2)
@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_store_is_down(door: Door, mortal_server: Server, policy: Any) -> None:
    """Each limit has its own answer to that."""
    limit = door.limits(store=mortal_server.url).limit("3/hour", on_store_error=policy)
    assert door.get(limit)
    mortal_server.kill()
    if policy == "raise":
        with pytest.raises(StoreUnavailable):
            door.get(limit)
        return
    answers = [door.get(limit) for _ in range(4)]
    assert [bool(answer) for answer in answers] == {
        "allow": [True] * 4,
        "deny": [False] * 4,
        "local": [True, True, False, False],
    }[policy]
    assert all(_degraded(answer) for answer in answers)
    if policy == "deny":
        assert answers[0].headers["retry-after"] == "1"
        assert answers[0].body["detail"] == "The rate limit could not be checked; retry in 1 s"


@pytest.mark.store_timeout(2)
def test_what_was_not_taken_is_not_given_back(door: Door, mortal_server: Server) -> None:
    """A request that was allowed in an outage gives nothing back to the store that is there again."""
    limits = door.limits(store=mortal_server.url)
    limit, counted = limits.limit("3/hour", count_if=failed), limits.limit("3/hour", scope="GET /")

    def back() -> None:
        mortal_server.restart()
        until(lambda: not _degraded(door.get(limits.limit("100000/second", scope="probe"))))
        assert door.admitted(counted, times=2) == 2

    mortal_server.kill()
    assert _degraded(door.get(limit, handler=door.handler(back)))
    assert door.get(counted).remaining == 0


@pytest.mark.store_timeout(2)
def test_local_permits_are_not_given_back_to_the_store(door: Door, mortal_server: Server) -> None:
    """The store may have spent them when its reply was lost, or not: it gives back nothing that it may not have."""
    limits = door.limits(store=mortal_server.url)
    limit = limits.limit("3/hour", count_if=failed, on_store_error="local")
    counted = limits.limit("3/hour", scope="GET /", on_store_error="local")

    def back() -> None:
        mortal_server.restart()
        until(lambda: not _degraded(door.get(limits.limit("100000/second", scope="probe"))))
        door.admitted(counted, times=2)

    door.get(limit)  # connects
    mortal_server.kill()
    assert _degraded(door.get(limit, handler=door.handler(back)))
    assert door.admitted(counted, times=3) <= 1


@pytest.mark.store_timeout(2)
def test_local_permits_go_back(door: Door, mortal_server: Server) -> None:
    """In an outage this process counts, and gives back what `count_if` says."""
    limit = door.limits(store=mortal_server.url).limit("3/hour", count_if=failed, on_store_error="local")
    mortal_server.kill()
    assert door.admitted(limit, times=6) == 6
    assert door.admitted(limit, times=6, answer=401) == 3


def _degraded(answer: Any) -> bool:
    return bool(answer.exchange.decision.degraded)


@pytest.mark.store_timeout(2)
def test_outage_before_permits_go_back(door: Door, mortal_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The handler has answered: its answer stays, whatever the policy, and the log says what was lost."""
    limit = door.limits(store=mortal_server.url).limit("3/hour", count_if=failed, on_store_error="raise")
    assert door.get(limit, handler=door.handler(mortal_server.kill)).status == 200
    assert any("could not be given back" in record.getMessage() for record in caplog.records)


@pytest.mark.store_timeout(2)
def test_shadow_in_an_outage(door: Door, mortal_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """It never refuses a request, and never raises."""
    limits = door.limits(store=mortal_server.url)
    shadow = limits.limit("3/hour", shadow=True, on_store_error="raise")
    mortal_server.kill()
    with caplog.at_level(logging.WARNING, "headgate.web"):
        assert door.get(shadow)
    assert any("cannot decide" in record.getMessage() for record in caplog.records)


# ------------------------------------------------------------------------------------------------------------ line


def test_waits_in_line(door: Door) -> None:
    """A request waits for its permits as long as its limit says, first come first served; then it is refused."""
    clock = WatchedClock()
    limit = door.limits(clock=clock).limit("1/second", timeout=2.5)
    assert door.get(limit)
    order: list[int] = []
    waiting = []
    for number in range(4):
        waiting.append(door.send(limit, handler=functools.partial(order.append, number)))
        until(lambda count: clock.sleeping == count, number + 1)
    for count in (1, 2):
        clock.advance(1.0)
        until(lambda count: len(order) == count, count)
    clock.advance(0.5)
    answers = [one.result(20) for one in waiting]
    assert order == [0, 1] and [bool(answer) for answer in answers] == [True, True, False, False]
    assert answers[3].headers["retry-after"] == "1"


def test_no_one_overtakes(door: Door) -> None:
    """Permits that come while others wait are theirs."""
    clock = WatchedClock()
    limit = door.limits(clock=clock).limit("2/second", cost=lambda request: request.user, timeout=30.0)
    assert door.get(limit, user=2)
    first = door.send(limit, user=2)
    until(lambda: clock.sleeping == 1)
    clock.advance(0.5)  # one permit is there, and not enough for the first
    second = door.send(limit, user=1)
    until(lambda: clock.sleeping == 2)
    clock.advance(0.5)
    assert first.result(20)
    assert not second.done()
    clock.advance(0.5)
    assert second.result(20)


def test_permits_that_come_back_wake_the_line(door: Door) -> None:
    """Also those that `count_if` gives back."""
    clock = WatchedClock()
    limits = door.limits(clock=clock)
    limit = limits.limit("1/hour", count_if=failed, timeout=60.0)
    holding, ending = threading.Event(), threading.Event()

    def handler() -> None:
        holding.set()
        ending.wait(20)

    first = door.send(limit, handler=door.handler(handler))
    assert holding.wait(20)
    second = door.send(limit)
    until(lambda: clock.sleeping == 1)
    ending.set()
    assert first.result(20) and second.result(20)


def test_gives_back_what_it_took_while_it_waited(door: Door) -> None:
    """Another limit refuses after the wait: the permits that were waited for go back."""
    clock = WatchedClock()
    limits = door.limits(clock=clock)
    patient, other = limits.limit("1/second", scope="patient", timeout=5.0), limits.limit("2/hour", scope="other")
    assert door.get([patient, other])
    waiting = door.send([patient, other])
    until(lambda: clock.sleeping == 1)
    assert door.get(other)
    clock.advance(1.0)
    denied = waiting.result(20)
    assert not denied and denied.headers["x-ratelimit-limit"] == "2"
    assert door.get(patient)


def test_a_refusal_without_timeout_is_at_once(door: Door) -> None:
    """No request waits for one limit if another refuses it anyway."""
    limits = door.limits(clock=WatchedClock())
    patient, other = limits.limit("1/second", scope="patient", timeout=5.0), limits.limit("1/hour", scope="other")
    assert door.get([patient, other])
    assert not door.get([patient, other]) and not door.get([other, patient])


def test_several_waits_have_one_end(door: Door) -> None:
    """Two limits with a time-out of two seconds: the request waits for two seconds in all, not for four."""
    clock = WatchedClock()
    limits = door.limits(clock=clock)
    both = [limits.limit(f"1/{seconds}s", scope=str(seconds), timeout=2.0) for seconds in (1, 3)]
    assert door.get(both)
    waiting = door.send(both)
    until(lambda: clock.sleeping == 1)
    clock.advance(1.0)  # the first is granted, the second waits
    until(lambda: clock.naps[-1] == 1.0)
    clock.advance(1.0)
    assert not waiting.result(20)
    assert door.get(both[0]), "what the first granted went back"


def test_waits_for_several(door: Door) -> None:
    """And is admitted once all of them allow it."""
    clock = WatchedClock()
    limits = door.limits(clock=clock)
    both = [limits.limit(f"1/{seconds}s", scope=str(seconds), timeout=9.0) for seconds in (1, 3)]
    assert door.get(both)
    waiting = door.send(both)
    until(lambda: clock.sleeping == 1)
    clock.advance(1.0)
    until(lambda: clock.naps[-1] == 2.0)
    clock.advance(2.0)
    assert waiting.result(20).remaining == 0


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_cancelled_in_line(async_door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """The client leaves while its request waits: what it holds goes back, and the next one is served."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    clock = WatchedClock()
    limits = async_door.limits(store=url, clock=clock)
    both = [limits.limit(f"1/{seconds}s", scope=str(seconds), timeout=60.0) for seconds in (1, 30)]
    assert async_door.get(both)
    waiting = async_door.send(both)
    until(lambda: clock.sleeping == 1)
    clock.advance(1.0)  # it holds a permit of the first, and waits for the second
    until(lambda: clock.naps[-1] == 29.0)
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result(20)
    until(lambda: bool(async_door.get(limits.limit("1/1s", scope="1"))))


def test_cancelled_in_line_by_a_scope(async_door: Door, redis_url: str) -> None:
    """The same where every further await of the request is cancelled, too, as frameworks do it."""
    clock = WatchedClock()
    limits = async_door.limits(store=redis_url, clock=clock)
    *held, late = [limits.limit(f"1/{seconds}s", scope=str(seconds), timeout=60.0) for seconds in (1, 2, 3, 30)]
    assert async_door.get([*held, late])
    scopes: list[anyio.CancelScope] = []

    async def request() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await async_door.request([[*held, late]])

    waiting = async_door.start(request)
    for nap in (1.0, 1.0, 1.0, 27.0):
        until(lambda nap: clock.sleeping == 1 and clock.naps[-1] == nap, nap)
        clock.advance(1.0 if nap == 1.0 else 0.0)
    async_door.loop.call_soon_threadsafe(scopes[0].cancel)
    waiting.result(20)
    until(lambda: bool(async_door.get(held)))


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_cancelled_at_any_moment(async_door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """Requests that are cancelled while they are decided or settled lose no permits."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    limits = async_door.limits(store=url)
    several = [limits.limit("50/hour", scope=str(n), key=["address", user], count_if=lambda _: False) for n in range(2)]

    async def storm() -> None:
        for turns in range(60):
            task = asyncio.create_task(async_door.request([several[:1], several[1:]], user="a"))
            for _ in range(turns % 30):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    async_door.run(storm)
    until(lambda: async_door.get(several, user="a", answer=200).remaining == 49)
