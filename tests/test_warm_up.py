"""Connections before the first check, and how often a call is sent again."""

import asyncio
from collections.abc import Generator
from time import monotonic
from typing import Any

import pytest
from redis.exceptions import BusyLoadingError, ConnectionError, TryAgainError

from headgate import AsyncLimiter, Limiter
from headgate.errors import StoreUnavailable
from headgate.redis.execute import RetryPolicy, ScriptRequest, _attempts
from headgate.redis.script import LuaScript
from headgate.redis.topology import Single, Unreached
from headgate.redis.url import Address, parse_url
from headgate.stores import RedisStore
from tests.support.servers import Server


def test_threads(redis_server: Server) -> None:
    """Nothing connects before the warm-up, which opens as many connections as were asked for."""
    store = RedisStore(redis_server.url, min_connections=3)
    with Limiter("5/s", store=store):
        assert store.sync_executor().connections() == []
        store.warm_up()
        [connections] = store.sync_executor().connections()
        assert (connections.idle(), connections.in_use()) == (3, 0)
        store.warm_up()  # they are there already
        assert connections.idle() == 3
    store.close()


@pytest.mark.parametrize("given, opened", [(0, 0), (2, 2), (50, 4)])
def test_event_loop(redis_server: Server, given: int, opened: int) -> None:
    """An event loop opens no more connections than it can use at a time, which are four."""

    async def check() -> None:
        store = RedisStore(redis_server.url, min_connections=given)
        await store.awarm_up()
        assert store.connections() == {"in_use": 0, "idle": opened, "waiting": 0}
        limiter = AsyncLimiter("1000/30d", store=store, on_store_error="raise")
        await asyncio.gather(*(limiter.try_acquire("k") for _ in range(2000)))
        assert store.connections()["idle"] <= 4
        await store.aclose()

    asyncio.run(check())


def test_no_server() -> None:
    """A warm-up without a server raises, for threads and for event loops."""
    store = RedisStore("redis://127.0.0.1:1", timeout=5)
    with pytest.raises(StoreUnavailable, match=r"cannot connect to Redis at redis://127\.0\.0\.1:1"):
        store.warm_up()
    with pytest.raises(StoreUnavailable, match="cannot connect"):
        asyncio.run(store.awarm_up())


@pytest.mark.parametrize(
    "options, says",
    [
        ("min_connections=-1", "min_connections must be a whole number of at least 0"),
        ("min_connections=9&max_connections=8", "min_connections must be at most max_connections, which is 8, got 9"),
        ("retries=many", "retries must be a whole number of at least 0"),
        ("retry_pause=0", "retry_pause must be more than 0 seconds"),
    ],
)
def test_wrong_options(options: str, says: str) -> None:
    """An option that cannot be used is an error that says what would be right."""
    with pytest.raises(ValueError, match=says):
        parse_url(f"redis://h?{options}")


def test_defaults() -> None:
    """A small bound of connections needs no second setting."""
    assert parse_url("redis://h").min_connections == 4
    assert parse_url("redis://h?max_connections=2").min_connections == 2
    found = parse_url("redis://h?retries=3&retry_pause=0.02", retries=1)
    assert (found.retries, found.retry_pause) == (1, 0.02)


SCRIPT = LuaScript("return 1")
REPEATABLE = LuaScript("return 1", repeatable=True)


def attempts(policy: RetryPolicy, errors: list[Exception], script: LuaScript = SCRIPT) -> int:
    """How often a call to a single server was sent that got *errors* one after another, and then a reply."""
    plan: Generator[Any, Any, Any] = _attempts(
        Single(Address("h", 1)), script, script.call(["k"]), 0, monotonic() + 60, False, policy
    )
    sent = 0
    waiting = iter(errors)
    request = next(plan)
    while True:
        try:
            if isinstance(request, ScriptRequest):
                sent += 1
                error = next(waiting, None)
                request = plan.send("reply") if error is None else plan.throw(error)
            else:
                request = plan.send(None)  # a pause
        except StopIteration:
            return sent
        except (ConnectionError, TryAgainError):
            return -sent  # it was given up


@pytest.mark.parametrize(
    "most, errors, script, sent",
    [
        (None, [Unreached("no")], SCRIPT, -1),  # as shipped: a single server is not asked again
        (2, [Unreached("no")] * 2, SCRIPT, 3),
        (2, [Unreached("no")] * 3, SCRIPT, -3),
        (2, [BusyLoadingError("loading")], SCRIPT, 2),
        (0, [TryAgainError("later")], SCRIPT, -1),
        (None, [TryAgainError("later")] * 3, SCRIPT, 4),
        (5, [ConnectionError("lost")], SCRIPT, -1),  # it may have run, so it is never sent again
        (5, [ConnectionError("lost")] * 2, REPEATABLE, 3),
        (1, [ConnectionError("lost")] * 2, REPEATABLE, -2),
    ],
)
def test_retries(most: int | None, errors: list[Exception], script: LuaScript, sent: int) -> None:
    """A call is sent again as often as the policy says, and only where that is safe; negative: it was given up."""
    assert attempts(RetryPolicy(most), errors, script) == sent
