"""Algorithms, keys and quotas that have tripped limiters up, and random walks through time under them."""

from fractions import Fraction
from math import gcd
from typing import Any, get_args

from hypothesis import strategies as st

from headgate import Quota
from headgate.algorithms import ALGORITHMS as SPECS
from headgate.algorithms import VARIANTS, AlgorithmName

ALGORITHMS: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
BUCKETS = [name for name, spec in SPECS.items() if spec.takes_burst]  # they refill all the time
WINDOWS = [name for name, spec in SPECS.items() if not spec.takes_burst]
LAWS = (*ALGORITHMS, *VARIANTS)  # with the forms that another argument chooses


def law(name: str) -> dict[str, Any]:
    """The arguments of a limiter by one of `LAWS`."""
    return {"algorithm": "fixed_window", "start": "first"} if name == "first_window" else {"algorithm": name}


HOSTILE_KEYS = [
    "a", "b", "ab", "a}b", "a{b", "{", "}", "{}", "}{", "{a}", "{a", "a}", "a:b", "a:b:c", ":", "::",
    "%", "%7B", "%7D", "%25", "%257B", "%7b", "a%7Db", "a%7db", "a\u202eb", "\u202eab", "a\u200bb", "ab ", " ab", "AB",
    "é", "e\u0301", "😀" * 64, "😀" * 63, "a*b", "a?b", "[ab]", "a/b", "a\\b", "a\\}b", "default", "1699920000",
    "a}:1699920000", "{a}:1699920000", "a:1699920000", "a}:burst", "token_bucket:{a}", "rate_limiter:token_bucket:{a}",
]  # fmt: skip

PLAIN = [
    Quota(1, 1.0),
    Quota(7, 1.0),  # a permit each 142857.14... microseconds
    Quota(3, 60.0),
    Quota(1, 86400.0),
    Quota(100, 0.5),
    Quota(10, 7.0),  # windows that do not start at midnight
    Quota(999_983, 86400.0),  # a prime: the largest numbers in the arithmetic
]
BURSTS = [
    Quota(10, 1.0, burst=4),
    Quota(1, 60.0, burst=1000),
    Quota(10, 1.0, burst=100),
    Quota(80, 600.0, burst=1),
    Quota(7, 3.0, burst=11),
]


def quotas_for(algorithm: str) -> list[Quota]:
    return PLAIN + BURSTS if algorithm in BUCKETS else PLAIN


CASES = [(algorithm, quota) for algorithm in LAWS for quota in quotas_for(algorithm)]


def period_us(quota: Quota) -> int:
    return int(Fraction(quota.period).limit_denominator(10**6) * 10**6)


def exact(algorithm: str, quota: Quota) -> bool:
    """Whether the numbers fit a double's 52 bits, so that the library has no excuse to round."""
    period = period_us(quota)
    if algorithm in ("fixed_window", "first_window", "sliding_window"):
        return True
    if algorithm == "sliding_window_counter":
        return quota.limit * period < 2**52
    return quota.capacity * period // gcd(quota.limit, period) < 2**52


def pauses(quota: Quota) -> st.SearchStrategy[int]:
    """Microseconds between two calls: none, the smallest, around one permit and around whole periods, and ages."""
    period = period_us(quota)
    permit = max(1, period // quota.limit)
    near = st.sampled_from([-1, 0, 1])
    return st.one_of(
        st.just(0),
        st.just(0),
        st.integers(1, 3),
        st.integers(1, 2 * permit),
        near.map(lambda off: permit + off),
        st.integers(1, 3 * period),
        st.builds(lambda times, off: times * period + off, st.integers(1, 3), near),
        st.integers(10 * period, 1000 * period),
    )


def permits(quota: Quota) -> st.SearchStrategy[int]:
    """From one to all that fits, the ends more often."""
    capacity = quota.capacity
    return st.one_of(st.integers(1, min(3, capacity)), st.integers(1, capacity), st.just(capacity))
