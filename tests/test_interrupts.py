"""What comes in mid-call, from a signal handler that raises: the next call must not notice."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import pytest

from headgate import AsyncLimiter, Limiter
from tests.places import ALGORITHMS
from tests.servers import Server


class Interrupt(BaseException):
    pass


@contextmanager
def interrupted(every: float) -> Iterator[None]:
    """Raise `Interrupt` in the main thread, again and again. The suite's own time bound rests meanwhile."""

    def handler(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    rest, _ = signal.setitimer(signal.ITIMER_REAL, every, every)
    try:
        yield
    finally:
        while signal.getsignal(signal.SIGALRM) is handler:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            except Interrupt:
                pass
        signal.setitimer(signal.ITIMER_REAL, max(rest, 1.0))


def pester(call: Callable[[], object], seconds: float) -> int:
    """Make *call* over and over under interrupts; how many there were."""
    count, until = 0, time.monotonic() + seconds
    with interrupted(0.002):
        while time.monotonic() < until:
            try:
                while time.monotonic() < until:
                    call()
            except Interrupt:
                count += 1
    return count


@pytest.mark.parametrize("quota", ["1000000/second", "999983/second", "7/day"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_goes_on(algorithm: str, quota: str) -> None:
    limiter = Limiter(quota, algorithm=algorithm)
    try:
        assert pester(lambda: limiter.try_acquire("k", permits=3), 0.3) > 5
    except Interrupt:
        pass  # one that was under way when the clock stopped
    assert limiter.try_acquire("another")


def test_a_redis_connection_never_keeps_somebody_elses_reply(redis_server: Server) -> None:
    with (
        Limiter("1000/30d", store=redis_server.url, name="large") as large,
        Limiter("1/30d", store=redis_server.url, name="small") as small,
    ):
        small.try_acquire("k")
        for _ in range(5):
            try:
                pester(lambda: large.peek("k", permits=0), 0.2)
            except Interrupt:
                pass
            for _ in range(20):
                assert large.peek("k", permits=0).limit == 1000
                assert not small.try_acquire("k")


class Folded(str):
    """Text that takes upper and lower case for the same."""

    def __hash__(self) -> int:
        return hash(self.lower())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_with_ideas_of_its_own(algorithm: str) -> None:
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
        "postgresql://u:hunter2@h/db",
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
