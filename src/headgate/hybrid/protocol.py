"""What a process and the ledger in Redis say to each other, and the numbers that both go by.

A process asks about one key at a time of which it may hold a lease; asks travel in batches. Counts are whole permits,
`free` and `before` are units of the law (*cost* of them are a permit), times are microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

from headgate.algorithms.bucket import Bucket
from headgate.algorithms.fixed_window import FixedWindow
from headgate.algorithms.sliding_window_counter import SlidingWindowCounter
from headgate.clock import MICROSECONDS
from headgate.rule import Rule

OK, STALE, VOID, ERROR = 0, 1, 2, 3  # the status of a reply

WIDE = 4  # a process may take this many times its share of what is free: demand moves faster than reports
FULL = 0.8  # above this part of its capacity a bucket counts as full, and what is spent but not reported costs refill
BUSY = 950  # of 1,000 of the rate: demand above it makes permits something to ration
RUSH = 1250  # of 1,000 of the rate: demand above it empties a full bucket, and is no chance
DRAINING = 8  # reports come this many times as often while that goes on
BRISK = 125  # of 1,000 of the capacity: reports come no more often than after so much because there is little room


class Law(NamedTuple):
    """A quota as the ledger applies it: a bucket that refills all the time, or a window that starts anew."""

    kind: str  # bucket, fixed or counter
    limit: int
    cost: int  # units a permit
    rate: int  # bucket: units a microsecond
    period: int  # windows: microseconds
    step: int  # counter: microseconds in a step
    speed: int  # permits in a thousand seconds, on the long run

    @property
    def room(self) -> int:
        return self.limit * self.cost

    @property
    def text(self) -> str:
        """What tells it apart from other laws in Redis, and tells the script all about it."""
        return f"{self.kind}:{self.limit}:{self.cost}:{self.rate}:{self.period}:{self.step}:{self.speed}"


def law_of(rule: Rule) -> Law:
    """The law of a rule of one quota; raise ValueError for those that leases cannot serve."""
    if len(rule.quotas) != 1:
        raise ValueError(
            f"HybridLimiter takes one quota, got {len(rule.quotas)}: use one limiter for each, or Limiter, which "
            "checks several at once"
        )
    quota, algorithm = rule.quotas[0], rule.algorithm
    speed = min(-(-quota.limit * 1000 * MICROSECONDS // quota.period_us), 10**12)
    if isinstance(algorithm, Bucket) and rule.kind != "leaky_bucket":
        return Law("bucket", algorithm.limit, algorithm.cost, algorithm.rate, 0, 0, speed)
    if isinstance(algorithm, FixedWindow):
        return Law("fixed", algorithm.limit, 1, 0, algorithm.period, 0, speed)
    if isinstance(algorithm, SlidingWindowCounter):
        return Law("counter", algorithm.limit, algorithm.steps, 0, algorithm.period, algorithm.step, speed)
    instead = {
        "leaky_bucket": "it spaces calls in time, which a lease cannot do; token_bucket admits the same calls",
        "sliding_window": "every call has a time of its own there; sliding_window_counter comes close",
    }[rule.kind]
    raise ValueError(f"HybridLimiter does not serve {rule.kind}: {instead}, and Limiter serves {rule.kind} exactly")


class Style(NamedTuple):
    """How far a process may go on its own. Thousandths of the capacity, and microseconds."""

    leased: int  # at most this much is leased out at a time
    report: int  # reports are due after this much of demand
    report_full: int  # the same while the bucket is full
    longest: int  # between two reports


STYLES = {
    "high": Style(500, 250, 125, 2 * MICROSECONDS),
    "medium": Style(600, 400, 250, 5 * MICROSECONDS),
    "low": Style(800, 600, 500, 30 * MICROSECONDS),
}


class Ask(NamedTuple):
    """One key's report and request."""

    op: str  # sync, release, reset or peek
    node: str  # who asks
    lid: int  # the lease it holds, 0 for none
    seq: int  # grows with every ask of a node
    ack: int  # the last ask of which it got the reply
    held: int  # permits of the lease that it keeps
    returned: int  # permits given back, ever
    refund: int  # permits that callers gave back, reported as spent before
    debt: int  # permits granted while nobody could be asked
    needs: tuple[tuple[int, int], ...]  # (how many callers wait, for how many permits each)
    want: int  # permits that it would like to hold
    spare: int  # 1: one permit in case somebody comes; only if there is plenty
    demand: int  # permits in a thousand seconds that are asked of it
    ttl: int  # how long the lease lasts


class Reply(NamedTuple):
    """What the ledger said."""

    status: int
    lid: int = 0
    lease: int = 0  # permits granted on top of what is held
    out: int = 0  # permits that are leased to this node now
    before: int = 0  # units that were free before `needs` were served, in their order, as far as they went
    free: int = 0  # units that are free now
    others: int = 0  # permits leased to other nodes
    nodes: int = 0  # how many hold or want something, this one included
    wait: int = 0  # do not ask for more before; exact if nobody else holds a lease
    pause: int = 0  # report after
    ends: int = 0  # windows: microseconds until this one is over
    busy: int = 0  # 1: more is asked for, of all nodes, than comes in
    current: int = 0  # windows: permits used or leased in this one
    previous: int = 0  # and in the one before


def soonest(law: Law, elapsed: int, current: int, previous: int, permits: int, own: int = 0) -> int:
    """Microseconds until a counter has room for *permits*, if nobody spends any; *own* of *current* can go back.

    As in `headgate.algorithms.sliding_window_counter`.
    """

    def fade(count: int, free: int) -> int:
        return min((law.cost - free * law.cost // count) * law.step, law.period) if count > 0 else 0

    free = law.limit - permits
    if current - own <= free:
        return max(fade(previous, free - current + own) - elapsed, 0)
    return law.period - elapsed + fade(current, free)  # what is not back by then counts as used


def serve(before: int, cost: int, needs: tuple[tuple[int, int], ...]) -> list[int]:
    """How many of each group of *needs* are served from *before* units: first come, first served, all or nothing."""
    served = []
    for count, permits in needs:
        price = permits * cost
        many = min(count, before // price) if before > 0 else 0
        before -= many * price
        served.append(many)
    return served
