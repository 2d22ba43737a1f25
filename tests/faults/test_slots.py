"""Keys spread evenly over a Cluster, and all limits of one client are in one slot."""

import uuid
from collections.abc import Callable

import pytest
from redis.crc import key_slot

from headgate.redis.script import LimiterScript
from headgate.rule import Rule
from tests.support.clusters import SLOTS, slots_of
from tests.support.quotas import ALGORITHMS

COUNT = 100_000
NAMES: dict[str, Callable[[int], str]] = {
    "users": lambda i: f"user:{i}",
    "addresses": lambda i: f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}",
    "UUIDs": lambda i: str(uuid.uuid5(uuid.NAMESPACE_URL, str(i))),
    "braces": lambda i: "{all}" + str(i),
}


@pytest.mark.parametrize("hash_keys", [False, True])
@pytest.mark.parametrize("names", NAMES)
def test_keys_are_spread(names: str, hash_keys: bool) -> None:
    """Each of three primaries gets a third of the keys."""
    script = LimiterScript(Rule("10/s"), "rate_limiter", hash_keys, None)
    counts = [0] * SLOTS
    for number in range(COUNT):
        counts[key_slot(script.keys(NAMES[names](number))[0].encode())] += 1
    for index in range(3):
        share = sum(counts[slot] for slot in slots_of(index))
        assert share == pytest.approx(COUNT / 3, rel=0.05)


@pytest.mark.parametrize("key", ["user:1", "{all}1", "}{", "{}", "ü%", "a{b}c"])
@pytest.mark.parametrize("hash_keys", [False, True])
def test_a_client_has_one_slot(key: str, hash_keys: bool) -> None:
    rules = [Rule(["10/s", "100/m"], algorithm, name) for algorithm in ALGORITHMS for name in ("default", "{x}:y")]
    names = [name for rule in rules for name in LimiterScript(rule, "rate_limiter", hash_keys, None).keys(key)]
    assert len(set(names)) == len(names) == 2 * 2 * len(ALGORITHMS)
    assert len({key_slot(name.encode()) for name in names}) == 1
