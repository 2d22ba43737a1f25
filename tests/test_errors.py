"""Bad input: each a clear error that says what would be right, and no state has changed afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

import headgate
from headgate import AsyncLimiter, Limiter
from headgate.errors import (
    HeadgateError,
    InvalidKey,
    InvalidPermits,
    InvalidQuota,
    PermitsExceedLimit,
    RateLimited,
    StoreUnavailable,
)
from headgate.redis.url import parse_url
from headgate.rule import Rule
from headgate.stores import MemoryStore
from headgate.testing import ManualClock
from tests.support.callers import Callers
from tests.support.quotas import ALGORITHMS

Error = type[Exception]

# arguments of a call              error               a word of the message that helps
BAD_CALLS: list[tuple[tuple[Any, ...], Error, str]] = [
    (("",), InvalidKey, "256"),
    (("k" * 300,), InvalidKey, "256"),
    (("a\x00b",), InvalidKey, "control"),
    (("a\nb",), InvalidKey, "control"),
    ((None,), InvalidKey, "text"),
    ((b"k",), InvalidKey, "text"),
    ((["k"],), InvalidKey, "text"),
    (("k", 0), ValueError, "at least 1"),
    (("k", -1), ValueError, "at least 1"),
    (("k", 1.5), ValueError, "whole"),
    (("k", 1.0), ValueError, "whole"),
    (("k", True), ValueError, "whole"),
    (("k", "2"), ValueError, "whole"),
    (("k", None), ValueError, "whole"),
    (("k", 6), PermitsExceedLimit, "5"),
    (("k", 10**30), PermitsExceedLimit, "5"),
]

BAD_LIMITERS: list[tuple[dict[str, Any], Error, str]] = [
    ({"quota": "10/fortnight"}, InvalidQuota, "minute"),
    ({"quota": "0/s"}, InvalidQuota, "1"),
    ({"quota": "10/s burst 20", "algorithm": "fixed_window"}, InvalidQuota, "burst"),
    ({"quota": "10/s burst 20", "algorithm": "sliding_window"}, InvalidQuota, "burst"),
    ({"quota": "10/s burst 20", "algorithm": "sliding_window_counter"}, InvalidQuota, "burst"),
    ({"quota": "10/s", "algorithm": "bucket_of_tokens"}, ValueError, "token_bucket"),
    ({"quota": "10/s", "algorithm": None}, ValueError, "token_bucket"),
    ({"quota": "10/s", "store": "mongodb://localhost"}, ValueError, "redis"),
    ({"quota": "10/s", "store": "localhost:6379"}, ValueError, "redis"),
    ({"quota": "10/s", "store": ""}, ValueError, "memory://"),
    ({"quota": "10/s", "on_store_error": "ignore"}, ValueError, "allow"),
    ({"quota": "10/s", "on_store_error": None}, ValueError, "allow"),
    ({"quota": "10/s", "on_store_error": 5}, ValueError, "allow"),
    ({"quota": "10/s", "name": ""}, ValueError, "name"),
    ({"quota": "10/s", "max_keys": 0}, ValueError, "max_keys"),
    ({"quota": "10/s", "max_keys": "5"}, ValueError, "max_keys must be a whole number"),
    ({"quota": "10/s", "max_keys": True}, ValueError, "max_keys must be a whole number"),
    ({"quota": "10/s", "store": "memory://?max_keys=5"}, ValueError, "max_keys="),
    ({"quota": "10/s", "clock": 5}, ValueError, "ManualClock"),
    ({"quota": "10/s", "store": "redis://h", "clock": "now"}, ValueError, "ManualClock"),
    ({"quota": "10/s", "store": "redis://h", "hash_keys": "no"}, ValueError, "True or False"),
    ({"quota": "10/s", "store": "redis://h", "timeout": True}, ValueError, "seconds"),
    ({"quota": "10/s", "store": "redis://h", "timeout": 0}, ValueError, "more than 0"),
    ({"quota": "10/s", "store": "redis://h", "timeout": "1"}, ValueError, "^timeout must be a number"),
    ({"quota": "10/s", "store": "redis://h", "max_connections": True}, ValueError, "whole number"),
    ({"quota": "10/s", "store": "redis://h", "max_connections": 0}, ValueError, "^max_connections must be"),
    ({"quota": "10/s", "store": "redis://h", "max_connections": "8"}, ValueError, "^max_connections must be"),
    ({"quota": "10/s", "store": "redis://h?max_connections=0"}, ValueError, "URL .*max_connections must be"),
    ({"quota": "10/s", "store": "redis://h?timeout=soon"}, ValueError, "URL .*timeout must be a number"),
    ({"quota": "10/s", "store": "redis://h?time_out=1"}, ValueError, "known are timeout, connect_timeout, max_conn"),
]


def state(limiter: Limiter) -> tuple[headgate.Decision, ...]:
    return tuple(limiter.peek(key, permits=0) for key in ("k", "other"))


# a peek of 0 permits is how to look
BAD_PEEKS = [(row[0], row[1], row[2].replace("1", "0")) for row in BAD_CALLS if row[0] != ("k", 0)]
METHODS = {"try_acquire": BAD_CALLS, "acquire": BAD_CALLS, "peek": BAD_PEEKS}


@pytest.mark.parametrize(
    ("method", "arguments", "error", "word"),
    [(method, *row) for method, rows in METHODS.items() for row in rows],
    ids=lambda value: repr(value)[:30],
)
def test_bad_call(method: str, arguments: tuple[Any, ...], error: Error, word: str, callers: Callers) -> None:
    limiter = callers.limiter("5/minute", clock=ManualClock())
    limiter.try_acquire("k", permits=2)
    before = state(limiter)
    with pytest.raises(error, match=word) as caught:
        getattr(limiter, method)(*arguments)
    assert isinstance(caught.value, HeadgateError)
    assert isinstance(caught.value, ValueError)
    assert state(limiter) == before
    assert callers.store.count() == 1


@pytest.mark.parametrize("arguments", [("", 1), ("k" * 300, 1), ("k", 0), ("k", -1), ("k", 1.5), ("k", True)], ids=repr)
def test_bad_refund(arguments: tuple[Any, Any], callers: Callers) -> None:
    limiter = callers.limiter("5/minute", clock=ManualClock())
    limiter.try_acquire("k", permits=2)
    before = state(limiter)
    with pytest.raises((InvalidKey, InvalidPermits)):
        limiter.refund(*arguments)
    assert state(limiter) == before


@pytest.mark.parametrize("key", ["", "k" * 300, "a\x00b", None, 5], ids=repr)
def test_bad_reset(key: Any, callers: Callers) -> None:
    limiter = callers.limiter("5/minute", clock=ManualClock())
    with pytest.raises(InvalidKey):
        limiter.reset(key)


@pytest.mark.parametrize("door", [Limiter, AsyncLimiter], ids=lambda door: door.__name__)
@pytest.mark.parametrize(("arguments", "error", "word"), BAD_LIMITERS, ids=[str(row[0]) for row in BAD_LIMITERS])
def test_bad_limiter(arguments: dict[str, Any], error: Error, word: str, door: Callable[..., object]) -> None:
    with pytest.raises(error, match=word):
        door(**arguments)


@pytest.mark.parametrize("store", ["memory://", "redis://localhost:1"])
@pytest.mark.parametrize("door", [Limiter, AsyncLimiter], ids=lambda door: door.__name__)
def test_unknown_option(door: Callable[..., object], store: str) -> None:
    with pytest.raises(TypeError, match=r"no time_out; .*max_keys, .*timeout"):
        door("10/s", store=store, time_out=5)


@pytest.mark.parametrize("door", [Limiter, AsyncLimiter], ids=lambda door: door.__name__)
def test_options_of_another_store(door: Callable[..., Any]) -> None:
    """A store takes no notice of the options of others, so that the store can be a setting."""
    options = {"prefix": "p", "hash_keys": True, "timeout": 1.0, "connect_timeout": 0.5, "max_connections": 3}
    assert door("10/s", max_keys=7, **options).store.max_keys == 7
    assert door("10/s", store="redis://localhost:1", max_keys=7, **options).store.prefix == "p"


@pytest.mark.parametrize("client", [redis.Redis, redis.asyncio.Redis, redis.ConnectionPool])
def test_client_instead_of_store(client: Callable[[], Any]) -> None:
    """The error says how to make a store of a client."""
    for door in (Limiter, AsyncLimiter):
        with pytest.raises(ValueError, match=r"RedisStore\(client\).*headgate\.stores"):
            door("10/s", store=client())


def test_argument_before_url() -> None:
    """An argument counts more than the URL."""
    target = parse_url("redis://h?timeout=1&connect_timeout=1&max_connections=5", timeout=2, max_connections=6)
    assert (target.timeout, target.connect_timeout, target.max_connections) == (2.0, 1.0, 6)
    target = parse_url("redis://h?socket_timeout=0.5&max_connections=5")
    assert (target.timeout, target.connect_timeout, target.max_connections) == (0.5, 0.5, 5)


def test_bad_store() -> None:
    for wrong in ("5", True, None, 0):
        with pytest.raises(ValueError, match="max_keys must be a whole number"):
            MemoryStore(max_keys=wrong)
    for policy in (None, 5, "ignore"):
        with pytest.raises(ValueError, match="on_store_error must be one of"):
            MemoryStore().open(Rule("5/s"), policy)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_than_the_smallest_quota(algorithm: str, callers: Callers) -> None:
    limiter = callers.limiter(["5/second", "3/minute"], algorithm=algorithm, clock=ManualClock())
    with pytest.raises(PermitsExceedLimit, match="3"):
        limiter.try_acquire("k", permits=4)
    assert limiter.try_acquire("k", permits=3)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"], ids=repr)
def test_bad_timeout(timeout: Any, callers: Callers) -> None:
    limiter = callers.limiter("5/minute", clock=ManualClock())
    with pytest.raises((ValueError, TypeError), match=r"timeout|number"):
        limiter.acquire("k", timeout=timeout)
    assert limiter.peek("k", permits=0).remaining == 5


def test_the_tree() -> None:
    for error in (InvalidQuota, InvalidKey, PermitsExceedLimit):
        assert issubclass(error, HeadgateError)
        assert issubclass(error, ValueError)
    for failure in (RateLimited, StoreUnavailable):
        assert issubclass(failure, HeadgateError)
        assert not issubclass(failure, ValueError)


def test_rate_limited() -> None:
    """`RateLimited` has the decision, and says when to come back."""
    limiter = Limiter("1/minute", clock=ManualClock())
    limiter.try_acquire("k")
    with pytest.raises(RateLimited) as caught:
        limiter.acquire("k", timeout=0)
    assert caught.value.decision == limiter.peek("k") and caught.value.retry_after == 60.0
    assert "60" in str(caught.value)
