"""A long log of a sliding window is cleared in small pieces: no single call may hold the server up for long."""

import asyncio
import itertools
import random

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.algorithms import ALGORITHMS, sliding_window
from headgate.testing import ManualClock
from tests.support.callers import MakeLimiter
from tests.support.servers import Server

LOG = "rate_limiter:sliding_window:{k}"
MIDNIGHT = 1_699_920_000_000_000
PIECE = 1_000  # entries that one call removes, at most


def write_log(server: Server, entries: int) -> None:
    """A log of single calls, a microsecond apart: as the limiter would have written it, but at once."""
    client = server.client()
    client.zadd(LOG, {f"{i + 1:016d}:1": MIDNIGHT + i for i in range(entries)})
    client.expire(LOG, 3600)


def size(server: Server) -> int:
    return int(server.client().zcard(LOG))


def test_expired_entries(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """Each call removes a few entries that have expired."""
    clock = ManualClock()
    write_log(any_redis_server, 5_000)
    limiter = any_redis_limiter("5000/minute", algorithm="sliding_window", clock=clock)
    assert not limiter.try_acquire("k", permits=1)
    clock.advance(60 + 0.004_899)  # all but a hundred of them are a minute old
    sizes = [size(any_redis_server)]
    for remaining in range(4_899, 4_799, -1):
        assert limiter.try_acquire("k").remaining == remaining
        sizes.append(size(any_redis_server))
    assert max(before - after for before, after in itertools.pairwise(sizes)) <= PIECE
    assert sizes[-1] == 200, "and in the end nothing is left of them"


def test_expired_log(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """UNLINK frees in the background."""
    clock = ManualClock()
    write_log(any_redis_server, 5_000)
    limiter = any_redis_limiter("5000/minute", algorithm="sliding_window", clock=clock)
    clock.advance(65)
    assert limiter.try_acquire("k", permits=2).remaining == 4_998
    assert limiter.try_acquire("k", permits=4_998).remaining == 0
    assert not limiter.try_acquire("k")
    assert size(any_redis_server) == 2
    assert any_redis_server.calls("unlink") == 1


# refund, what is left in the log, trips that it takes
REFUNDS = [(1, 4_999, 1), (PIECE, 4_000, 1), (PIECE + 1, 3_999, 2), (4_999, 1, 5), (5_000, 0, 1), (10**9, 0, 1)]


@pytest.mark.parametrize(("permits", "left", "trips"), REFUNDS)
def test_large_refund(
    permits: int, left: int, trips: int, any_redis_server: Server, any_redis_limiter: MakeLimiter
) -> None:
    """A large refund goes in steps, a call for each."""
    write_log(any_redis_server, 5_000)
    limiter = any_redis_limiter("5000/minute", algorithm="sliding_window", clock=ManualClock())
    limiter.peek("k")
    before = any_redis_server.calls("evalsha")
    limiter.refund("k", permits=permits)
    assert any_redis_server.calls("evalsha") - before == trips
    assert size(any_redis_server) == left
    assert limiter.peek("k", permits=0).remaining == 5_000 - left
    assert left == 5_000 or limiter.try_acquire("k", permits=5_000 - left)
    assert not limiter.try_acquire("k")


async def test_large_refunds_at_once(redis_server: Server) -> None:
    """Refunds of several tasks go in steps, and nothing is lost between them."""
    write_log(redis_server, 5_000)
    options = {"algorithm": "sliding_window", "store": redis_server.url, "clock": ManualClock()}
    async with AsyncLimiter("5000/minute", **options) as limiter:  # type: ignore[arg-type]  # options of several types
        await asyncio.gather(*(limiter.refund("k", permits=1_500) for _ in range(3)))
        assert (await limiter.peek("k", permits=0)).remaining == 4_500


def test_refund_of_several_quotas(redis_limiter: MakeLimiter) -> None:
    """One log is long and the other short: the longer one sets the pace, and both get all of it back."""
    clock = ManualClock()
    limiter = redis_limiter(["4000/minute", "9000/hour"], algorithm="sliding_window", clock=clock)
    for _ in range(2_500):
        assert limiter.try_acquire("k")
    clock.advance(70)
    assert limiter.try_acquire("k", permits=7)
    limiter.refund("k", permits=2_200)
    decision = limiter.try_acquire("k", permits=4_000)
    assert decision.remaining == 0
    clock.advance(60)
    assert limiter.peek("k", permits=4_000).remaining == 0
    clock.advance(60)
    assert limiter.try_acquire("k", permits=4_000)
    clock.advance(60)
    assert not limiter.try_acquire("k", permits=9_000 - 8_000 - 307 + 1)
    assert limiter.try_acquire("k", permits=9_000 - 8_000 - 307)


@pytest.mark.parametrize("quotas", ["40/second", ["30/second", "60/3s"]], ids=["one", "several"])
def test_pieces(
    quotas: str | list[str], redis_server: Server, redis_limiter: MakeLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of one and two entries, beside the memory store, through thousands of calls."""
    lua = sliding_window.LUA.replace("EXPIRED = 100", "EXPIRED = 1").replace("REFUNDED = 1000", "REFUNDED = 2")
    assert lua.count("EXPIRED = 1\n") == 1 and lua.count("REFUNDED = 2 ") == 1
    monkeypatch.setitem(ALGORITHMS, "sliding_window", ALGORITHMS["sliding_window"]._replace(lua=lua))
    clock, chance = ManualClock(), random.Random(7)
    pieces = redis_limiter(quotas, algorithm="sliding_window", clock=clock)
    memory = Limiter(quotas, algorithm="sliding_window", clock=clock)
    for _ in range(3_000):
        clock.advance(chance.choice([0, 0.001, 0.02, 0.3, 1.0, 4.0]) if chance.random() < 0.5 else 0)
        permits = chance.choice([1, 1, 1, 2, 5, 30])
        call = chance.choice(["try_acquire", "try_acquire", "try_acquire", "peek", "refund"])
        assert getattr(pieces, call)("k", permits) == getattr(memory, call)("k", permits)
    assert not redis_server.calls("zremrangebyscore")
