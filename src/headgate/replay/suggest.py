"""The smallest quota under which at most a share of the keys would have been refused at all.

At a given rate, the burst that a key would have needed is the largest level of a bucket that each request fills by one
and that drains at the rate: one pass, in whole numbers. A key is refused under a burst if, and only if, it would
have needed more. The limit of a window that it would have needed is the most requests in any such window.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from headgate.quota import Quota
from headgate.replay.decide import replay
from headgate.replay.rules import ReplayRule
from headgate.replay.traffic import Traffic
from headgate.rule import Rule

BUCKETS = ("token_bucket", "leaky_bucket", "gcra")
PERIODS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


class Suggestion(NamedTuple):
    """A quota, and what it would have refused: counts of keys and of requests, from a replay."""

    quota: Quota
    algorithm: str
    keys_refused: int
    requests_refused: int


def suggest(traffic: Traffic, share: float, algorithm: str, given: Quota | None = None) -> list[Suggestion]:
    """Quotas under which at most *share* of the keys are refused: at the rate of *given*, else one for each period.

    For a bucket the burst is suggested, for a window the limit. Periods that are longer than the log are left out.
    """
    if not len(traffic):
        return []
    span = (traffic.times[-1] - traffic.times[0]) / 1_000_000
    found = []
    if given is not None and algorithm in BUCKETS:
        found.append(_with_burst(traffic, share, given))
    else:
        periods = [given.period] if given else [length for length in PERIODS.values() if length <= max(span, 1)]
        for period in periods:
            plain = Quota(_least(needed_limits(traffic, round(period * 1_000_000)), share), period)
            found.append(_with_burst(traffic, share, plain) if algorithm in BUCKETS else plain)
    return [_verified(traffic, quota, algorithm) for quota in found]


def needed_bursts(traffic: Traffic, quota: Quota) -> list[int]:
    """The burst that each key would have needed at the rate of *quota*, by its number; in one pass."""
    cost, rate = quota.period_us, quota.limit  # a request fills the bucket by cost; it drains by rate a microsecond
    levels, seen, most = ([0] * len(traffic.names) for _ in range(3))
    for now, key in zip(traffic.times, traffic.keys, strict=True):
        level = levels[key] - (now - seen[key]) * rate
        level = (level if level > 0 else 0) + cost
        levels[key], seen[key] = level, now
        if level > most[key]:
            most[key] = level
    return [-(-level // cost) for level in most]


def needed_limits(traffic: Traffic, period_us: int) -> list[int]:
    """The most requests of each key in any period, by its number; in one pass."""
    recent: list[deque[int]] = [deque() for _ in traffic.names]
    most = [0] * len(traffic.names)
    for now, key in zip(traffic.times, traffic.keys, strict=True):
        queue = recent[key]
        while queue and queue[0] <= now - period_us:
            queue.popleft()
        queue.append(now)
        if len(queue) > most[key]:
            most[key] = len(queue)
    return most


def _least(needed: list[int], share: float) -> int:
    """The smallest number that at most *share* of the keys need more than."""
    ordered = sorted(needed, reverse=True)
    return max(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1)


def _with_burst(traffic: Traffic, share: float, quota: Quota) -> Quota:
    return Quota(quota.limit, quota.period, _least(needed_bursts(traffic, quota), share))


def _verified(traffic: Traffic, quota: Quota, algorithm: str) -> Suggestion:
    outcome = replay(traffic, ReplayRule(Rule(quota, algorithm)))
    return Suggestion(quota, algorithm, len(outcome.keys), outcome.refused)
