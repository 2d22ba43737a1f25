"""The table of algorithms. CONTRIBUTING.md has the steps to add one.

algorithm.py               what an algorithm is
all_of.py                  several quotas as one
bucket.py                  the arithmetic of the three buckets
booking.py                 places in time that are booked in buckets
token_bucket.py            a full bucket lets a burst through, then calls pass at the rate of the refill
leaky_bucket.py            the same calls, and their times are evenly spaced
gcra.py                    the same calls, with the time of the next one as the only state
fixed_window.py            a counter for each window of the clock
first_window.py            the same for a window that starts at a key's first call: fixed_window with start="first"
sliding_window.py          the times of all calls of one period
sliding_window_counter.py  two counters, the older one weighted
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from headgate.algorithms import (
    bucket,
    first_window,
    fixed_window,
    gcra,
    leaky_bucket,
    sliding_window,
    sliding_window_counter,
    token_bucket,
)
from headgate.algorithms.algorithm import Algorithm, AlgorithmSQL
from headgate.quota import Quota

AlgorithmName = Literal[
    "token_bucket", "leaky_bucket", "fixed_window", "sliding_window", "sliding_window_counter", "gcra"
]
Start = Literal["clock", "first"]  # of a fixed window: multiples of the period, or a key's first call


class AlgorithmSpec(NamedTuple):
    """An algorithm: its Python class, called with a quota, its Lua and its SQL; and what it takes."""

    make: Callable[[Quota], Algorithm[Any]]
    lua: str
    sql: AlgorithmSQL
    takes_burst: bool = False


ALGORITHMS: dict[AlgorithmName, AlgorithmSpec] = {
    "token_bucket": AlgorithmSpec(
        token_bucket.TokenBucket, bucket.LUA + token_bucket.LUA, bucket.SQL, takes_burst=True
    ),
    "leaky_bucket": AlgorithmSpec(
        leaky_bucket.LeakyBucket, bucket.LUA + leaky_bucket.LUA, bucket.SQL, takes_burst=True
    ),
    "fixed_window": AlgorithmSpec(fixed_window.FixedWindow, fixed_window.LUA, fixed_window.SQL),
    "sliding_window": AlgorithmSpec(sliding_window.SlidingWindow, sliding_window.LUA, sliding_window.SQL),
    "sliding_window_counter": AlgorithmSpec(
        sliding_window_counter.SlidingWindowCounter, sliding_window_counter.LUA, sliding_window_counter.SQL
    ),
    "gcra": AlgorithmSpec(gcra.GCRA, bucket.LUA + gcra.LUA, bucket.SQL, takes_burst=True),
}

# Variants that another argument selects (`start="first"`), by the name in Redis keys and labels: `Rule.state_kind`.
VARIANTS = {"first_window": AlgorithmSpec(first_window.FirstWindow, first_window.LUA, first_window.SQL)}
