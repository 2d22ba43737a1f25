"""The table of algorithms. A new algorithm is a file in this folder, its name in `AlgorithmName`, and a line below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from headgate.algorithms import (
    bucket,
    fixed_window,
    gcra,
    leaky_bucket,
    sliding_window,
    sliding_window_counter,
    token_bucket,
)
from headgate.algorithms.algorithm import Algorithm
from headgate.quota import Quota

AlgorithmName = Literal[
    "token_bucket", "leaky_bucket", "fixed_window", "sliding_window", "sliding_window_counter", "gcra"
]


class AlgorithmSpec(NamedTuple):
    """The two halves of an algorithm: its Python class, called with a quota, and its Lua."""

    make: Callable[[Quota], Algorithm[Any]]
    lua: str


ALGORITHMS: dict[AlgorithmName, AlgorithmSpec] = {
    "token_bucket": AlgorithmSpec(token_bucket.TokenBucket, bucket.LUA + token_bucket.LUA),
    "leaky_bucket": AlgorithmSpec(leaky_bucket.LeakyBucket, bucket.LUA + leaky_bucket.LUA),
    "fixed_window": AlgorithmSpec(fixed_window.FixedWindow, fixed_window.LUA),
    "sliding_window": AlgorithmSpec(sliding_window.SlidingWindow, sliding_window.LUA),
    "sliding_window_counter": AlgorithmSpec(sliding_window_counter.SlidingWindowCounter, sliding_window_counter.LUA),
    "gcra": AlgorithmSpec(gcra.GCRA, bucket.LUA + gcra.LUA),
}
