"""The log of a sliding window on Redis: a String with a ring of records, of which a call reads and writes a few."""

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headgate import AsyncLimiter, Limiter
from headgate.algorithms import ALGORITHMS
from headgate.testing import ManualClock
from tests.support.callers import MakeLimiter
from tests.support.servers import Server

LOG = "rate_limiter:sliding_window:{k}"
MIDNIGHT = 1_699_920_000_000_000
HEAD = (1, 4, 4, 4, 7, 7, 4, 4)  # bytes of its numbers: size of a time, first, count, slots, last, oldest, gone, total
READS = 60  # commands that read, in one call: two searches by halves in a log of a million


def write_log(server: Server, entries: int) -> None:
    """A log of single calls, a microsecond apart: as the limiter would have written it, but at once."""
    numbers = (4, 0, entries, entries, MIDNIGHT + entries - 1, MIDNIGHT, 0, entries)
    head = b"".join(number.to_bytes(size, "big") for number, size in zip(numbers, HEAD, strict=True))
    times = [(MIDNIGHT + i) % 2**32 for i in range(entries)]
    records = b"".join([(time << 32 | i + 1).to_bytes(8, "big") for i, time in enumerate(times)])
    server.client().set(LOG, head + records, ex=3600)


def head(server: Server) -> list[int]:
    """The numbers at the beginning of the log."""
    with redis.Redis(port=server.port) as client:
        return numbers_of(client.getrange(LOG, 0, sum(HEAD) - 1))


def numbers_of(log: Any) -> list[int]:
    ends = list(itertools.accumulate(HEAD, initial=0))
    return [int.from_bytes(log[start:end], "big") for start, end in itertools.pairwise(ends)]


def size(server: Server) -> int:
    """Calls that the log remembers."""
    return head(server)[2]


def length(server: Server) -> int:
    return int(server.client().strlen(LOG))


def traffic(server: Server, call: Callable[[], Any]) -> tuple[int, int]:
    """How many commands *call* made the server run that read a log, and how many that write one."""
    before = [server.calls(name) for name in ("getrange", "setrange", "set", "unlink")]
    call()
    after = [server.calls(name) for name in ("getrange", "setrange", "set", "unlink")]
    reads, *writes = (now - then for then, now in zip(before, after, strict=True))
    return reads, sum(writes)


def with_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what happens in long logs happen in those of a few calls."""
    lua = ALGORITHMS["sliding_window"].lua
    for number, small in (("SHORT = 200 ", 60), ("PIECE = 65536 ", 24), ("ROOMY = 64 ", 6)):
        assert lua.count(number) == 1
        lua = lua.replace(number, f"{number.split()[0]} = {small} ")
    monkeypatch.setitem(ALGORITHMS, "sliding_window", ALGORITHMS["sliding_window"]._replace(lua=lua))


def test_size(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    limiter = any_redis_limiter("1000/hour", algorithm="sliding_window", clock=ManualClock())
    while limiter.try_acquire("k"):
        pass
    assert size(any_redis_server) == 1_000
    assert length(any_redis_server) == sum(HEAD) + 8_000
    assert any_redis_server.client().memory_usage(LOG, samples=0) <= 24_000


def test_a_million_calls(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """Whatever is asked of such a log, it is a few small commands."""
    clock = ManualClock()
    write_log(any_redis_server, 1_000_000)
    limiter = any_redis_limiter("1000000/minute", algorithm="sliding_window", clock=clock)
    limiter.peek("k")
    calls: list[tuple[Callable[[], Any], int]] = [
        (lambda: limiter.try_acquire("k"), 0),
        (lambda: limiter.try_acquire("k", permits=700_000), 0),
        (lambda: limiter.peek("k", permits=1_000), 0),
        (lambda: clock.advance(60.4), 0),
        (lambda: limiter.peek("k"), 0),
        (lambda: limiter.try_acquire("k"), 2),
        (lambda: limiter.try_acquire("k", permits=100_000), 2),
        (lambda: limiter.try_acquire("k", permits=500_000), 0),
        (lambda: limiter.refund("k", permits=50_000), 2),
        (lambda: limiter.refund("k", permits=200_000), 1),
        (lambda: limiter.refund("k", permits=1_000_000), 1),
    ]
    for call, writes in calls:
        reads, wrote = traffic(any_redis_server, call)
        assert reads <= READS and wrote == writes
    assert limiter.peek("k", permits=0).remaining == 1_000_000


def test_expired_entries(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """A log that has become eight times too large is written anew, as long as it has to be."""
    clock = ManualClock()
    write_log(any_redis_server, 5_000)
    limiter = any_redis_limiter("5000/minute", algorithm="sliding_window", clock=clock)
    assert not limiter.try_acquire("k", permits=1)
    clock.advance(60 + 0.004_399)  # all but six hundred of them are a minute old
    for entries in range(601, 621):
        assert limiter.try_acquire("k").remaining == 5_000 - entries
        assert length(any_redis_server) == sum(HEAD) + 8 * entries


def test_time_to_live(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """The first call of a second that is admitted lets the log live for a period and a second more."""
    clock = ManualClock()
    limiter = any_redis_limiter("1000/minute", algorithm="sliding_window", clock=clock)
    client = any_redis_server.client()
    for _ in range(50):
        limiter.try_acquire("k")
    assert any_redis_server.calls("expire") == 0
    for step in (0.999_999, 0.000_001, 1.0):
        client.expire(LOG, 30)
        clock.advance(step)
        limiter.try_acquire("k")
        assert (client.ttl(LOG) > 60) == (step != 0.999_999)


def test_steady_traffic(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """The log takes the places of expired calls again: it grows with what it remembers, not with what it has seen."""
    clock = ManualClock()
    limiter = any_redis_limiter("100000/minute", algorithm="sliding_window", clock=clock)
    for _ in range(2_000):
        clock.advance(0.2)
        limiter.try_acquire("k")
    assert size(any_redis_server) == 300
    assert length(any_redis_server) <= sum(HEAD) + 8 * 300 * 1.5


def test_expired_log(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """What has expired is gone with the next call."""
    clock = ManualClock()
    write_log(any_redis_server, 5_000)
    limiter = any_redis_limiter("5000/minute", algorithm="sliding_window", clock=clock)
    clock.advance(65)
    assert limiter.try_acquire("k", permits=2).remaining == 4_998
    assert limiter.try_acquire("k", permits=4_998).remaining == 0
    assert not limiter.try_acquire("k")
    assert size(any_redis_server) == 2
    assert length(any_redis_server) == sum(HEAD) + 2 * 8


@pytest.mark.parametrize(("permits", "left"), [(1, 4_999), (1_001, 3_999), (4_999, 1), (5_000, 0), (10**9, 0)])
def test_large_refund(permits: int, left: int, any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """However large a refund is, it is one call."""
    write_log(any_redis_server, 5_000)
    limiter = any_redis_limiter("5000/minute", algorithm="sliding_window", clock=ManualClock())
    limiter.peek("k")
    before = any_redis_server.calls("evalsha")
    limiter.refund("k", permits=permits)
    assert any_redis_server.calls("evalsha") - before == 1
    assert size(any_redis_server) == left
    assert limiter.peek("k", permits=0).remaining == 5_000 - left
    assert left == 5_000 or limiter.try_acquire("k", permits=5_000 - left)
    assert not limiter.try_acquire("k")


async def test_large_refunds_at_once(redis_server: Server) -> None:
    """Of the refunds of several tasks nothing is lost."""
    write_log(redis_server, 5_000)
    options = {"algorithm": "sliding_window", "store": redis_server.url, "clock": ManualClock()}
    async with AsyncLimiter("5000/minute", **options) as limiter:  # type: ignore[arg-type]  # options of several types
        await asyncio.gather(*(limiter.refund("k", permits=1_500) for _ in range(3)))
        assert (await limiter.peek("k", permits=0)).remaining == 4_500


def test_refund_of_several_quotas(redis_limiter: MakeLimiter) -> None:
    """One log is long and the other short: both get all of it back."""
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


@pytest.mark.parametrize(
    "quotas", ["40/second", ["30/second", "60/3s"], ["25/day", "90/30d"]], ids=["one", "several", "long"]
)
def test_pieces(
    quotas: str | list[str], any_redis_server: Server, any_redis_limiter: MakeLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With records moved two or three at a time, beside the memory store, through thousands of calls."""
    with_small_pieces(monkeypatch)
    clock, chance = ManualClock(), random.Random(7)
    pieces = any_redis_limiter(quotas, algorithm="sliding_window", clock=clock)
    memory = Limiter(quotas, algorithm="sliding_window", clock=clock)
    unit = 86_400 if "day" in quotas[0] else 1
    for _ in range(4_000):
        clock.advance(unit * chance.choice([0, 0.001, 0.02, 0.02, 0.3, 1.0, 4.0]) if chance.random() < 0.5 else 0)
        permits = chance.choice([1, 1, 1, 1, 2, 5, 25])
        call = chance.choice(["try_acquire"] * 4 + ["peek", "refund"])
        assert getattr(pieces, call)("k", permits) == getattr(memory, call)("k", permits)


def test_another_limit(
    any_redis_server: Server, any_redis_limiter: MakeLimiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that is raised or lowered finds the calls of before; a ring that is full then grows."""
    with_small_pieces(monkeypatch)
    clock, chance, client = ManualClock(), random.Random(5), redis.Redis(port=any_redis_server.port)
    calls: list[int] = []
    slots = set()
    limiters = {n: any_redis_limiter(f"{n}/second", algorithm="sliding_window", clock=clock) for n in (5, 12, 40)}
    for step in range(2_000):
        limit = (5, 12, 40, 12)[step // 50 % 4]
        clock.advance(chance.choice([0, 0, 0.01, 0.03, 0.2]))
        calls = [time for time in calls if clock.now() < time + 1_000_000]
        decision = limiters[limit].try_acquire("k")
        assert decision.allowed == (len(calls) < limit)
        if decision.allowed:
            calls.append(clock.now())
        else:
            assert decision.retry_us == calls[len(calls) - limit] + 1_000_000 - clock.now()
        assert decision.remaining == max(limit - len(calls), 0)
        _, first, count, ring, *_ = numbers_of(client.getrange(LOG, 0, sum(HEAD) - 1))
        slots.add((ring, first + count > ring))
    assert len({ring for ring, wrapped in slots if wrapped}) > 3, "it never went around at several sizes"
    client.close()


def test_another_period(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """In a log of hours there is no room for the times of a day: its calls then count as made at the last of them."""
    clock = ManualClock()
    hour = any_redis_limiter("50/hour", algorithm="sliding_window", clock=clock)
    day = any_redis_limiter("50/day", algorithm="sliding_window", clock=clock)
    for _ in range(4):
        assert hour.try_acquire("k", permits=7)
        clock.advance(900)
    assert day.try_acquire("k").remaining == 50 - 29
    clock.advance(900)
    assert day.try_acquire("k").remaining == 50 - 30
    assert size(any_redis_server) == 2
    clock.advance(86_400 - 900)
    assert day.peek("k", permits=0).remaining == 50 - 1
    clock.advance(900)
    assert day.peek("k", permits=0).remaining == 50


@pytest.mark.parametrize("op", ["take", "peek", "refund"])
def test_sorted_set(op: str, any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """Logs were Sorted Sets before: what such a one remembers counts, as made by the last of its calls."""
    clock = ManualClock()
    entries = {"0000000000000003:3": -70, "0000000000000008:5": -50, "0000000000000009:1": -10}
    client = any_redis_server.client()
    client.zadd(LOG, {member: MIDNIGHT + seconds * 1_000_000 for member, seconds in entries.items()})
    limiter = any_redis_limiter("10/minute", algorithm="sliding_window", clock=clock)
    assert limiter.peek("k", permits=0).remaining == 4
    if op == "take":
        assert limiter.try_acquire("k", permits=4).remaining == 0
        clock.advance(49.999_999)
        assert not limiter.try_acquire("k")
    elif op == "refund":
        limiter.refund("k", permits=2)
        assert limiter.peek("k", permits=0).remaining == 6
        clock.advance(49.999_999)
        assert not limiter.try_acquire("k", permits=7)
    else:
        clock.advance(49.999_999)
        assert not limiter.try_acquire("k", permits=10)
    assert client.type(LOG) == "string"
    clock.advance(0.000_001)
    assert limiter.try_acquire("k", permits=6)


def test_expired_sorted_set(any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    client = any_redis_server.client()
    client.zadd(LOG, {"0000000000000003:3": MIDNIGHT - 60_000_000})
    limiter = any_redis_limiter("10/minute", algorithm="sliding_window", clock=ManualClock())
    assert limiter.try_acquire("k", permits=10)
    assert client.type(LOG) == "string"


@pytest.mark.parametrize("value", ["no log", "no log at all, and longer than the numbers that a log begins with"])
def test_foreign_value(value: str, redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """A value that another program wrote there is an error, and stays."""
    redis_server.client().set(LOG, value)
    limiter = redis_limiter("10/minute", algorithm="sliding_window", on_store_error="raise")
    with pytest.raises(Exception, match=r"script: |running script"):
        limiter.try_acquire("k")
    assert redis_server.client().get(LOG) == value
