"""The table of algorithms. A new one is a file beside this and a line below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from headgate.algorithms import (
    fixed_window,
    gcra,
    leaky_bucket,
    sliding_window,
    sliding_window_counter,
    token_bucket,
)
from headgate.algorithms.algorithm import Algorithm
from headgate.quota import Quota


class Entry(NamedTuple):
    """An algorithm's two halves: what makes it of a quota in Python, and its Lua."""

    make: Callable[[Quota], Algorithm[Any]]
    lua: str


ALGORITHMS: dict[str, Entry] = {
    "token_bucket": Entry(token_bucket.TokenBucket, token_bucket.LUA),
    "leaky_bucket": Entry(leaky_bucket.LeakyBucket, leaky_bucket.LUA),
    "fixed_window": Entry(fixed_window.FixedWindow, fixed_window.LUA),
    "sliding_window": Entry(sliding_window.SlidingWindow, sliding_window.LUA),
    "sliding_window_counter": Entry(sliding_window_counter.SlidingWindowCounter, sliding_window_counter.LUA),
    "gcra": Entry(gcra.GCRA, gcra.LUA),
}
