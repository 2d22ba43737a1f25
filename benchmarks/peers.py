"""What each peer calls the six algorithms, and the objects that memory and Redis contenders share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.workload import LIMIT, PERIOD_SECONDS

if TYPE_CHECKING:
    from pyrate_limiter import AbstractBucket, Limiter, Rate

LIMITS = {
    "fixed_window": "fixed-window",
    "sliding_window": "moving-window",
    "sliding_window_counter": "sliding-window-counter",
}
THROTTLED = {
    "token_bucket": "token_bucket",
    "leaky_bucket": "leaking_bucket",
    "fixed_window": "fixed_window",
    "sliding_window_counter": "sliding_window",
    "gcra": "gcra",
}
PYRATE_LOG = {"sliding_window": "SlidingWindowLog", "fixed_window": "FixedWindow"}
PYRATE_STATE = {"token_bucket": "TokenBucket", "gcra": "GCRA"}


def throttled_quota() -> Any:
    from throttled import per_hour

    return per_hour(LIMIT)


def pyrate_rates() -> list[Rate]:
    from pyrate_limiter import Rate

    return [Rate(LIMIT, PERIOD_SECONDS * 1000)]


def pyrate_policy(algorithm: str) -> Any:
    import pyrate_limiter

    return getattr(pyrate_limiter, (PYRATE_LOG | PYRATE_STATE)[algorithm])()


def pyrate_limiter_of(bucket_of: Callable[[str], AbstractBucket], now: Callable[[], int]) -> Limiter:
    """Make one limiter with a bucket per key: a plain pyrate `Limiter` shares one bucket among all names.

    No leaker thread is started for the buckets. That is kinder to this peer than its documented set-up.
    """
    from pyrate_limiter import BucketFactory, Limiter, RateItem

    class Buckets(BucketFactory):
        def __init__(self) -> None:
            self.buckets: dict[str, AbstractBucket] = {}

        def wrap_item(self, name: str, weight: int = 1) -> RateItem:
            return RateItem(name, now(), weight=weight)

        def get(self, item: RateItem) -> AbstractBucket:
            bucket = self.buckets.get(item.name)
            if bucket is None:
                bucket = self.buckets[item.name] = bucket_of(item.name)
            return bucket

    return Limiter(Buckets())
