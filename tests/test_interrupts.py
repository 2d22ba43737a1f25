"""A signal handler that raises in mid-call: the next call is answered as if nothing had happened."""

import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.rule import AlgorithmName
from tests.support.quotas import ALGORITHMS
from tests.support.servers import Server

ROOT = Path(__file__).parent.parent


def interrupted(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.support.interrupts", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_goes_on(algorithm: AlgorithmName) -> None:
    assert interrupted("memory", algorithm, "1000000/second", "999983/second", "7/day") == "survived\n"


def test_redis_replies_are_apart(redis_server: Server) -> None:
    """A connection never keeps the reply to another call."""
    assert interrupted("redis", redis_server.bare_url + "?timeout=10") == "survived\n"


def test_redis_answers_other_threads(redis_server: Server) -> None:
    """No call of a thread that shares trips with the main thread is lost, or stuck."""
    assert interrupted("threads", redis_server.bare_url + "?timeout=10") == "survived\n"


class Folded(str):
    """Text that takes upper and lower case for the same."""

    def __hash__(self) -> int:
        return hash(self.lower())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_with_ideas_of_its_own(algorithm: AlgorithmName) -> None:
    limiter = Limiter("3/30d", algorithm=algorithm)
    assert [limiter.try_acquire(Folded("Bob")).allowed for _ in range(4)] == [True, True, True, False]
    limiter.reset(Folded("Bob"))
    assert limiter.peek("Bob", permits=0).remaining == 3


class Size(IntEnum):
    LARGE = 50


def test_a_count_with_a_name(redis_server: Server) -> None:
    with Limiter("100/30d", store=redis_server.url, on_store_error="raise") as limiter:
        assert limiter.try_acquire("k", permits=Size.LARGE).remaining == 50


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:hunter2@h/db",
        "Redis+x://:hunter2@h/0",
        "redis://:hunter2@h:port/0",
        "redis://:hun/hunter2@h:6379/0",
        "redis://h/0?password=hunter2&foo=1",
        "redis+sentinel://h:1?sentinel_password=hunter2",
    ],
)
@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
def test_no_message_shows_a_password(url: str, kind: type[Limiter] | type[AsyncLimiter]) -> None:
    with pytest.raises(ValueError, match="redis") as caught:
        kind("1/s", store=url)
    assert "hunter2" not in str(caught.value)
