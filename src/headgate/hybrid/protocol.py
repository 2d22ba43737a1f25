"""The messages between a process and the ledger in Redis, and the constants that both sides use.

A process sends one `LeaseRequest` for each key on which it holds or wants a lease; requests travel in batches. Counts
are whole permits, `free` and `free_before` are units of the quota (*cost* units are one permit), times microseconds.
A "node" is one process, or one event loop of a process, with leases of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from headgate.algorithms.bucket import Bucket
from headgate.algorithms.fixed_window import FixedWindow
from headgate.algorithms.sliding_window_counter import SlidingWindowCounter
from headgate.clock import MICROSECONDS
from headgate.rule import Rule

OK, STALE, VOID, ERROR = 0, 1, 2, 3  # the status of a reply

SHARE_FACTOR = 4  # a process may take this many times its share of what is free: demand moves faster than reports
FULL_ABOVE = 0.8  # above this part of its capacity a bucket counts as full: unreported permits then cost refill
OVERSUBSCRIBED_ABOVE = 950  # of 1,000 of the rate: with more demand than this, permits are rationed
DRAINING_ABOVE = 1250  # of 1,000 of the rate: demand above it empties a full bucket, and is no coincidence
DRAINING_FACTOR = 8  # reports come this many times as often while a full bucket drains
MIN_REPORT_PART = (
    125  # of 1,000 of the capacity: a nearly full bucket alone never makes reports more frequent than this
)


PARTS = 1_000_000  # of the rate: inflow is a whole number of these
DEMAND_PART = 5  # callers that ask for less than four fifths of the rate get a quarter more inflow than they ask for
LEAST_ROOM = 5  # permits: a lease of fewer has no inflow
SHORT_OF_INFLOW = 0.75  # a lease with less than this of its share of the rate reports sooner: others have too much

SHORTEST_SYNC, LONGEST_SYNC = 0.5, 300.0  # seconds between two reports that an accuracy may name
FEW_REPORTS = 15.0  # seconds between two reports: from there on most of the capacity may be on lease


class QuotaParams(NamedTuple):
    """A quota as the ledger applies it: a bucket that refills all the time, or a window that starts anew."""

    kind: str  # bucket, fixed or counter
    limit: int
    cost: int  # units a permit
    rate: int  # bucket: units a microsecond
    period: int  # windows: microseconds
    step: int  # counter: microseconds in a step
    speed: int  # permits in a thousand seconds, in the long run

    @property
    def capacity_units(self) -> int:
        return self.limit * self.cost

    @property
    def text(self) -> str:
        """The parameters as the script takes them, and as Redis keeps them to notice that a quota was changed."""
        return f"{self.kind}:{self.limit}:{self.cost}:{self.rate}:{self.period}:{self.step}:{self.speed}"


def quota_params(rule: Rule) -> QuotaParams:
    """The parameters of a rule of one quota; raise ValueError for a rule that leases cannot serve."""
    if len(rule.quotas) != 1:
        raise ValueError(
            f"HybridLimiter takes one quota, got {len(rule.quotas)}: use one limiter for each, or Limiter, which "
            "checks several at once"
        )
    quota, algorithm = rule.quotas[0], rule.algorithm
    speed = min(-(-quota.limit * 1000 * MICROSECONDS // quota.period_us), 10**12)
    if isinstance(algorithm, Bucket) and rule.kind != "leaky_bucket":
        return QuotaParams("bucket", algorithm.limit, algorithm.cost, algorithm.rate, 0, 0, speed)
    if isinstance(algorithm, FixedWindow):
        return QuotaParams("fixed", algorithm.limit, 1, 0, algorithm.period, 0, speed)
    if isinstance(algorithm, SlidingWindowCounter):
        return QuotaParams("counter", algorithm.limit, algorithm.steps, 0, algorithm.period, algorithm.step, speed)
    reasons = {
        "leaky_bucket": "it spaces calls in time, which a lease cannot do; token_bucket admits the same calls",
        "sliding_window": "every call has a time of its own there; sliding_window_counter comes close",
    }
    reason = reasons.get(rule.kind, "there are no leases for this algorithm")
    raise ValueError(f"HybridLimiter does not serve {rule.kind}: {reason}, and Limiter serves {rule.kind} exactly")


class AccuracyProfile(NamedTuple):
    """How far a process may go without asking Redis. Thousandths of the capacity, and microseconds."""

    leased: int  # at most this much is leased out at a time
    report: int  # a report is due after this much demand
    report_full: int  # the same while the bucket is full
    longest: int  # between two reports
    inflow: int = 0  # 1: a lease of a bucket refills by itself, with a part of the rate


def seconds_profile(seconds: float) -> AccuracyProfile:
    """The profile of an accuracy given as the seconds between two reports."""
    leased, report, report_full = (600, 400, 250) if seconds < FEW_REPORTS else (800, 600, 500)
    return AccuracyProfile(leased, report, report_full, int(seconds * MICROSECONDS), 1)


PROFILES = {
    "high": AccuracyProfile(500, 250, 125, 2 * MICROSECONDS),
    "medium": seconds_profile(5),
    "low": seconds_profile(30),
}


def accuracy_profile(accuracy: object) -> AccuracyProfile:
    """The profile of what a caller gave as *accuracy*; raise ValueError for anything else."""
    if isinstance(accuracy, str) and accuracy.lower() in PROFILES:
        return PROFILES[accuracy.lower()]
    is_number = isinstance(accuracy, int | float) and not isinstance(accuracy, bool)
    if is_number and SHORTEST_SYNC <= accuracy <= LONGEST_SYNC:  # type: ignore[operator]  # it is a number
        return seconds_profile(accuracy)  # type: ignore[arg-type]
    raise ValueError(
        f"accuracy must be one of {', '.join(PROFILES)}, or the seconds between two reports, from {SHORTEST_SYNC:g} to "
        f"{LONGEST_SYNC:g}; got {accuracy!r:.40}"
    )


class LeaseRequest(NamedTuple):
    """What a node reports about one key, and what it asks for."""

    op: str  # sync, release, reset or peek
    node: str  # the id of the node
    lease_id: int  # of the lease that the node holds, 0 for none
    seq: int  # grows with every request of a node
    acked_seq: int  # the last request whose reply the node received
    held: int  # permits of the lease that the node keeps
    returned: int  # permits that the node has given back, ever
    refund: int  # permits that callers gave back after they had been reported as spent
    debt: int  # permits that the node granted while Redis could not be asked
    waiting: tuple[tuple[int, int], ...]  # (number of waiting callers, permits that each of them wants)
    target: int  # permits that the node would like to hold
    is_reserve: int  # 1: *target* is one permit for the next caller, to be granted only from a full bucket
    demand: int  # permits in a thousand seconds that callers ask this node for
    ttl: int  # how long the lease lasts
    inflow: int = 0  # 1: a part of the rate is wanted too, for a lease that refills by itself


class LeaseReply(NamedTuple):
    """What the ledger answers."""

    status: int
    lease_id: int = 0
    granted: int = 0  # permits granted in addition to those held
    leased_here: int = 0  # permits that are leased to this node now
    free_before: int = 0  # units that were free before `waiting` were served, in their order, as far as they went
    free: int = 0  # units that are free now
    others: int = 0  # permits leased to other nodes
    nodes: int = 0  # nodes that hold or want something, this one included
    wait: int = 0  # time before which nothing is free; exact if no other node holds a lease
    report_interval: int = 0  # time until the next report
    window_ends_in: int = 0  # windows: time until this one is over
    oversubscribed: int = 0  # 1: all nodes together ask for more than refills
    current: int = 0  # windows: permits used or leased in this one
    previous: int = 0  # windows: the same in the one before
    room: int = 0  # permits that the lease may grow by with its inflow
    inflow: int = 0  # of PARTS of the rate: what comes into the lease until the next request arrives, or it ends


def time_until_free(params: QuotaParams, elapsed: int, current: int, previous: int, permits: int, own: int = 0) -> int:
    """Microseconds until a counter has *permits* free if nothing else is spent; *own* of *current* can go back.

    The same as in `headgate.algorithms.sliding_window_counter`.
    """

    def fade(count: int, free: int) -> int:
        return min((params.cost - free * params.cost // count) * params.step, params.period) if count > 0 else 0

    free = params.limit - permits
    if current - own <= free:
        return max(fade(previous, free - current + own) - elapsed, 0)
    return params.period - elapsed + fade(current, free)  # permits that are not back by then count as used


def count_served(free: int, cost: int, waiting: tuple[tuple[int, int], ...]) -> list[int]:
    """How many callers of each group of *waiting* are served from *free* units: in order, each all or nothing."""
    served = []
    for count, permits in waiting:
        price = permits * cost
        many = min(count, free // price) if free > 0 else 0
        free -= many * price
        served.append(many)
    return served
