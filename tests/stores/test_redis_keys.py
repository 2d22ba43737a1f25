"""What stands in Redis: names and types as the contract says, and a time to live on every key, always."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headgate import Quota
from headgate.testing import ManualClock
from tests.support.callers import MakeLimiter
from tests.support.quotas import BUCKETS, HOSTILE_KEYS, LAWS, WINDOWS
from tests.support.servers import Server

MIDNIGHT = 1_699_920_000  # where a manual clock starts

# algorithm                key of "user:123"                                                    type
LAYOUT = [
    ("token_bucket", "rate_limiter:token_bucket:{user:123}", "hash"),
    ("leaky_bucket", "rate_limiter:leaky_bucket:{user:123}", "hash"),
    ("fixed_window", f"rate_limiter:fixed_window:{{user:123}}:{MIDNIGHT}", "string"),
    ("first_window", "rate_limiter:first_window:{user:123}", "string"),
    ("sliding_window", "rate_limiter:sliding_window:{user:123}", "string"),
    ("sliding_window_counter", "rate_limiter:sliding_window_counter:{user:123}", "hash"),
    ("gcra", "rate_limiter:gcra:{user:123}", "string"),
]

# algorithm                quota                    seconds to live after a write
TIMES_TO_LIVE = [
    ("token_bucket", "10/second burst 100", 11),  # capacity / refill rate + 1
    ("token_bucket", "80/10 minutes", 601),
    ("token_bucket", "10/second burst 4", 2),  # 1.4, in whole seconds
    ("token_bucket", "1/minute burst 1000", 60001),
    ("fixed_window", "100/minute", 61),  # window + 1
    ("fixed_window", "5/second", 2),
    ("fixed_window", "5/day", 86401),
    ("first_window", "100/minute", 61),
    ("sliding_window", "100/minute", 61),
    ("sliding_window", "5/second", 2),
]


def contents(server: Server) -> dict[str, float]:
    """Every key there is, and its seconds to live (negative: for ever)."""
    client = server.client()
    found = {name: client.pttl(name) for name in client.keys("*")}
    return {name: left / 1000 for name, left in found.items() if left != GONE}


GONE = -2  # between the two questions


@pytest.mark.parametrize(("algorithm", "name", "kind"), LAYOUT)
def test_name_and_type(
    algorithm: str, name: str, kind: str, any_redis_server: Server, any_redis_limiter: MakeLimiter
) -> None:
    limiter = any_redis_limiter("100/minute", algorithm=algorithm, clock=ManualClock())
    limiter.try_acquire("user:123", permits=5)
    client = any_redis_server.client()
    assert client.keys("*") == [name]
    assert client.type(name) == kind


def test_token_bucket(redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """The hash shows the tokens and when they were counted."""
    redis_limiter("10/second burst 100", clock=ManualClock()).try_acquire("k", permits=5)
    fields = redis_server.client().hgetall("rate_limiter:token_bucket:{k}")
    assert fields["tokens"] == "95"
    assert int(fields["last_refill"]) == MIDNIGHT * 1_000_000


def test_fixed_window(redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """Each window has a counter that shows what was spent."""
    clock = ManualClock()
    limiter = redis_limiter("10/minute", algorithm="fixed_window", clock=clock)
    limiter.try_acquire("k", permits=5)
    limiter.try_acquire("k", permits=6)
    clock.advance(60)
    limiter.try_acquire("k", permits=7)
    client = redis_server.client()
    assert client.get(f"rate_limiter:fixed_window:{{k}}:{MIDNIGHT}") == "5"
    assert client.get(f"rate_limiter:fixed_window:{{k}}:{MIDNIGHT + 60}") == "7"


def test_first_window(redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """The text shows when the window ends and what was spent; a window of which nothing is spent is gone."""
    limiter = redis_limiter("10/minute", algorithm="first_window", clock=ManualClock())
    limiter.try_acquire("k", permits=5)
    assert redis_server.client().get("rate_limiter:first_window:{k}") == f"{(MIDNIGHT + 60) * 1_000_000}:5"
    limiter.refund("k", permits=5)
    assert redis_server.names() == []


def test_sliding_window(redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """The last record of the log is the time of the last call, in four bytes, and the permits of all."""
    clock = ManualClock()
    limiter = redis_limiter("10/minute", algorithm="sliding_window", clock=clock)
    for permits in (1, 3, 2):
        clock.advance(1.5)
        limiter.try_acquire("k", permits)
    with redis.Redis(port=redis_server.port) as client:
        record = client.getrange("rate_limiter:sliding_window:{k}", -8, -1)
    assert int.from_bytes(record[:4], "big") == int((MIDNIGHT + 4.5) * 1_000_000) % 2**32
    assert int.from_bytes(record[4:], "big") == 6


def test_size_of_the_log(redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """The log grows with calls that are granted, not with permits or denials."""
    limiter = redis_limiter("1000000/minute", algorithm="sliding_window")
    assert limiter.try_acquire("k", permits=999_999)
    for _ in range(50):
        assert not limiter.try_acquire("k", permits=2)
    assert redis_server.client().memory_usage("rate_limiter:sliding_window:{k}") < 1000


@pytest.mark.parametrize("algorithm", LAWS)
def test_state_stays_small(algorithm: str, redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """A log grows with what it admits and forgets what is old; everything else stays as it is."""
    clock = ManualClock()
    limiter = redis_limiter("10/minute", algorithm=algorithm, clock=clock)
    for _ in range(300):
        limiter.try_acquire("k")
        clock.advance(7.0)
    client = redis_server.client()
    newest = max(client.keys("*"))
    assert (client.memory_usage(newest) or 0) < 1000


@pytest.mark.parametrize(("algorithm", "quota", "seconds"), TIMES_TO_LIVE)
def test_time_to_live(
    algorithm: str, quota: str, seconds: int, any_redis_server: Server, any_redis_limiter: MakeLimiter
) -> None:
    limiter = any_redis_limiter(quota, algorithm=algorithm)
    limiter.peek("k")
    begun = time.monotonic()
    limiter.try_acquire("k")
    (left,) = contents(any_redis_server).values()
    assert seconds - (time.monotonic() - begun) - 0.01 <= left <= seconds


BUCKET_QUOTAS = ["10/second burst 4", "100/second burst 1", Quota(100, 0.5), "7/minute", "1/day"]
WINDOW_QUOTAS = ["10/second", Quota(100, 0.5), Quota(3, 0.001), "7/minute", "1/day"]


@pytest.mark.parametrize(
    ("algorithm", "quota"),
    [*itertools.product(BUCKETS, BUCKET_QUOTAS), *itertools.product([*WINDOWS, "first_window"], WINDOW_QUOTAS)],
    ids=str,
)
def test_every_write_expires(
    algorithm: str, quota: Any, any_redis_server: Server, any_redis_limiter: MakeLimiter
) -> None:
    """As long as the state matters, and never for ever."""
    limiter = any_redis_limiter(quota, algorithm=algorithm)
    capacity = limiter.peek("k", permits=0).limit
    calls: list[Callable[[], object]] = [
        lambda: limiter.try_acquire("k"),
        lambda: limiter.try_acquire("k", permits=capacity),
        lambda: limiter.refund("k"),
        lambda: limiter.refund("k", permits=capacity),
        lambda: limiter.refund("never seen"),
        lambda: limiter.peek("k"),
        lambda: limiter.try_acquire("other", permits=capacity),
        lambda: limiter.try_acquire("other"),
    ]
    for call in calls:
        call()
        begun = time.monotonic()
        reset_after = limiter.peek("k", permits=0).reset_after
        for name, left in contents(any_redis_server).items():
            assert left > 0, f"{name} lives for ever"
            assert "{k}" not in name or left > reset_after - 0.05 - (time.monotonic() - begun)


@pytest.mark.parametrize("algorithm", LAWS)
def test_state_ends_by_itself(algorithm: str, any_redis_server: Server, any_redis_limiter: MakeLimiter) -> None:
    """The shortest-lived key is gone when its time has come, and no earlier."""
    limiter = any_redis_limiter("100/30d", algorithm=algorithm)
    limiter.try_acquire("k", permits=100)
    client = any_redis_server.client()
    (name,) = client.keys("*")
    assert client.pexpire(name, 1)
    while client.exists(name):
        pass
    assert limiter.try_acquire("k", permits=100), "a key that has expired was never seen"
    assert client.pttl(name) > 1


@pytest.mark.parametrize("algorithm", LAWS)
def test_reset_leaves_nothing(algorithm: str, redis_server: Server, redis_limiter: MakeLimiter) -> None:
    limiter = redis_limiter(["5/minute", "9/hour"], algorithm=algorithm, clock=ManualClock())
    limiter.try_acquire("k")
    assert len(contents(redis_server)) == 2
    limiter.reset("k")
    assert contents(redis_server) == {}


@pytest.mark.parametrize("algorithm", LAWS)
def test_names_and_quotas(algorithm: str, redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """They are told apart after the brace."""
    redis_limiter("5/minute", algorithm=algorithm, name="login").try_acquire("k")
    redis_limiter(["6/minute", "7/hour"], algorithm=algorithm).try_acquire("k")
    names = redis_server.names()
    assert len(names) == 3
    for name in names:
        before, brace, after = name.partition("}")
        assert before + brace == f"rate_limiter:{algorithm}:{{k}}"
        assert after
    assert sum("login" in name for name in names) == 1


def test_prefix(redis_server: Server, redis_limiter: MakeLimiter) -> None:
    redis_limiter("5/minute", prefix="app").try_acquire("k")
    assert redis_server.names() == ["app:token_bucket:{k}"]
    assert redis_limiter("5/minute").try_acquire("k").remaining == 4, "another prefix is another state"


@pytest.mark.parametrize(
    ("key", "encoded"),
    [("a}b", "a%7Db"), ("{", "%7B"), ("%7B", "%257B"), ("a:b", "a:b"), ("사용자", "사용자")],
    ids=ascii,
)
def test_braces_and_percent_are_encoded(
    key: str, encoded: str, redis_server: Server, redis_limiter: MakeLimiter
) -> None:
    redis_limiter("5/minute").try_acquire(key)
    assert redis_server.names() == [f"rate_limiter:token_bucket:{{{encoded}}}"]


@pytest.mark.parametrize("algorithm", LAWS)
def test_hashed_keys(algorithm: str, redis_server: Server, redis_limiter: MakeLimiter) -> None:
    """A digest stands for the key, the same in every process."""
    keys = ["ann@example.com", "bob@example.com", "x" * 256]
    limiter = redis_limiter("2/minute", algorithm=algorithm, hash_keys=True, clock=ManualClock())
    for key in keys:
        assert limiter.try_acquire(key, permits=2)
        assert not limiter.try_acquire(key)
    names = redis_server.names()
    assert len(names) == len(keys)
    for name in names:
        assert name.startswith(f"rate_limiter:{algorithm}:{{")
        assert not any(part in name for part in ("ann", "bob", "example", "xxx"))
        assert len(name) < 100
    other = redis_limiter("2/minute", algorithm=algorithm, hash_keys=True, clock=ManualClock())
    assert not other.try_acquire(keys[0]), "the digest is the same in every process"


@pytest.mark.parametrize("algorithm", LAWS)
def test_refund_after_a_lower_quota(algorithm: str, redis_limiter: MakeLimiter) -> None:
    """More is spent than the new quota would allow: what is given back is given back."""
    clock = ManualClock()
    assert redis_limiter("10/minute", algorithm=algorithm, clock=clock).try_acquire("k", permits=10)
    lowered = redis_limiter("5/minute", algorithm=algorithm, clock=clock)
    before = lowered.peek("k", permits=0).remaining
    lowered.refund("k", permits=10)
    assert lowered.peek("k", permits=0).remaining == 5 > before


# ------------------------------------------------------------------------------------------------ Cluster slots

SLOTS = 16384


def crc16(data: bytes) -> int:
    """CRC-16/XMODEM, bit by bit: what a Redis Cluster hashes keys with."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def slot(redis_key: str) -> int:
    """The Cluster slot: of what is between the first { and the first } after it, if that is anything, else of all."""
    start = redis_key.find("{")
    end = redis_key.find("}", start + 1)
    tagged = start >= 0 and end > start + 1
    return crc16((redis_key[start + 1 : end] if tagged else redis_key).encode()) % SLOTS


def test_our_slot_is_the_clusters() -> None:
    assert crc16(b"123456789") == 0x31C3  # the published check value
    assert slot("foo{}{bar}") == crc16(b"foo{}{bar}") % SLOTS
    assert slot("foo{{bar}}zap") == crc16(b"{bar") % SLOTS
    assert slot("{user1000}.following") == slot("{user1000}.followers")


@pytest.mark.parametrize("hash_keys", [False, True])
def test_keys_spread_over_slots(hash_keys: bool, redis_server: Server, redis_limiter: MakeLimiter) -> None:
    limiter = redis_limiter("2/minute", hash_keys=hash_keys)
    for key in HOSTILE_KEYS:
        limiter.try_acquire(key)
    slots = {slot(name) for name in redis_server.names()}
    assert len(slots) >= len(HOSTILE_KEYS) - 2  # 49 keys on 16384 slots: two that meet by chance are already rare


@pytest.mark.parametrize("algorithm", LAWS)
@pytest.mark.parametrize("key", ["a", "a}b", "{", "}", "{}", "}{x}", "a:b", "%7B", "😀" * 64], ids=ascii)
def test_one_slot_for_a_client(key: str, algorithm: str, redis_server: Server, redis_limiter: MakeLimiter) -> None:
    for name in ("default", "login", "{x}", "}{y}"):
        redis_limiter(["2/minute", "9/hour"], algorithm=algorithm, name=name).try_acquire(key)
    names = redis_server.names()
    assert len(names) == 8
    assert len({slot(name) for name in names}) == 1
