"""Keys that try to break out of their place: they never share state, and never choose each other's Cluster slot."""

import itertools

import pytest

from headgate import Limiter
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore
from headgate.testing import ManualClock
from tests.support.places import ALGORITHMS, Place
from tests.support.servers import Server

HOSTILE = [
    "a", "b", "ab", "a}b", "a{b", "{", "}", "{}", "}{", "{a}", "{a", "a}", "a:b", "a:b:c", ":", "::",
    "%", "%7B", "%7D", "%25", "%257B", "%7b", "a%7Db", "a%7db", "a\u202eb", "\u202eab", "a\u200bb", "ab ", " ab", "AB",
    "é", "e\u0301", "😀" * 64, "😀" * 63, "a*b", "a?b", "[ab]", "a/b", "a\\b", "a\\}b", "default", "1699920000",
    "a}:1699920000", "{a}:1699920000", "a:1699920000", "a}:burst", "token_bucket:{a}", "rate_limiter:token_bucket:{a}",
]  # fmt: skip

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


def test_hostile_keys_are_distinct() -> None:
    assert len(set(HOSTILE)) == len(HOSTILE)


@pytest.mark.parametrize("name", ["default", "a"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hostile_keys_never_share_state(algorithm: str, name: str, place: Place) -> None:
    never_share_state(place.limiter("2/minute", algorithm=algorithm, clock=ManualClock(), name=name))


def test_hashed_hostile_keys_never_share_state(redis_server: Server) -> None:
    with Place(redis_server) as place:
        never_share_state(place.limiter("2/minute", clock=ManualClock(), hash_keys=True))


def never_share_state(limiter: Limiter) -> None:
    for key in HOSTILE:
        assert limiter.try_acquire(key, permits=2), f"{key!a} shares its state"
    for key in HOSTILE:
        assert not limiter.try_acquire(key)
    for key in HOSTILE[::6]:  # and a reset is of that key alone
        limiter.reset(key)
        assert limiter.try_acquire(key, permits=2)
        assert sum(not limiter.peek(other) for other in HOSTILE) == len(HOSTILE)


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_limiters_of_one_store_never_share_state(kind: str, redis_server: Server) -> None:
    """Names, algorithms and numbers of quotas are as hostile as keys can be."""
    names = ["default", "a", "a:b", "a:b:0", "{a}", "}", "%7D", "0", "1", "1699920000", "b"]
    quotas: list[list[str]] = [["2/minute"], ["2/minute", "3/minute"]]
    clock = ManualClock()
    store = MemoryStore(clock=clock) if kind == "memory" else RedisStore(redis_server.url, clock=clock)
    limiters = [
        Limiter(quota, algorithm=algorithm, name=name, store=store, on_store_error="raise")
        for algorithm, name, quota in itertools.product(ALGORITHMS, names, quotas)
    ]
    for key in ("a", "b", "a}b", "a:0"):
        granted = [limiter.try_acquire(key, permits=2).allowed for limiter in limiters]
        assert all(granted)
    store.close()


@pytest.mark.parametrize("hash_keys", [False, True])
def test_hostile_keys_spread_over_slots(hash_keys: bool, redis_server: Server) -> None:
    with Place(redis_server) as place:
        limiter = place.limiter("2/minute", hash_keys=hash_keys)
        for key in HOSTILE:
            limiter.try_acquire(key)
        slots = {slot(name) for name in redis_server.names()}
    assert len(slots) >= len(HOSTILE) - 2  # 49 keys on 16384 slots: two that meet by chance are already rare


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", ["a", "a}b", "{", "}", "{}", "}{x}", "a:b", "%7B", "😀" * 64], ids=ascii)
def test_all_limits_of_one_client_share_a_slot(key: str, algorithm: str, redis_server: Server) -> None:
    with Place(redis_server) as place:
        for name in ("default", "login", "{x}", "}{y}"):
            place.limiter(["2/minute", "9/hour"], algorithm=algorithm, name=name).try_acquire(key)
    names = redis_server.names()
    assert len(names) == 8
    assert len({slot(name) for name in names}) == 1
