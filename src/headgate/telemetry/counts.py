"""What limiters count, always: a few integers, which a scrape reads and which no call waits for.

The memory and the shared store add to them in the step that decides, hybrid limiters in the step that spends from a
lease. With an interpreter lock no count is lost. Without one, those that are added under the store's lock are exact
too; `DecisionCounts.add` takes a lock there.
"""

from __future__ import annotations

import threading
from typing import Any

from headgate._mypyc import FREE_THREADED
from headgate.decision import Decision


class DecisionCounts:
    """The decisions of one backend. A call for one permit adds to one of the first two, and to nothing else."""

    __slots__ = (
        "allowed",
        "degraded_allowed",
        "degraded_denied",
        "denied",
        "failed",
        "lock",
        "more_allowed",
        "more_denied",
    )

    def __init__(self) -> None:
        self.lock: Any = threading.RLock() if FREE_THREADED else None
        self.reset()

    def reset(self) -> None:
        """Start at 0, as in the child of a fork: the parent reports its own."""
        self.allowed = 0  # decisions, in all of them: those of the store, not of a policy
        self.denied = 0
        self.more_allowed = 0  # permits beyond one a decision, of all decisions
        self.more_denied = 0
        self.degraded_allowed = 0  # decisions of on_store_error
        self.degraded_denied = 0
        self.failed = 0  # checks that raised StoreUnavailable

    def add(self, decision: Decision, permits: int) -> None:
        """Count a decision about so many permits; for callers that hold no lock."""
        if FREE_THREADED:
            with self.lock:
                self.add_locked(decision, permits)
        else:
            self.add_locked(decision, permits)

    def add_locked(self, decision: Decision, permits: int) -> None:
        """The same, for callers that hold the lock of their store."""
        if decision._allowed:
            if decision._degraded:
                self.degraded_allowed += 1
            else:
                self.allowed += 1
            self.more_allowed += permits - 1
        else:
            if decision._degraded:
                self.degraded_denied += 1
            else:
                self.denied += 1
            self.more_denied += permits - 1

    def fail(self) -> None:
        """Count a check that raised `StoreUnavailable`."""
        self.failed += 1

    def permits(self, allowed: bool) -> int:
        """How many permits were granted, or refused."""
        if allowed:
            return self.allowed + self.degraded_allowed + self.more_allowed
        return self.denied + self.degraded_denied + self.more_denied


class AmountTotals:
    """What one `Budget` object has reserved and settled, in whole units of each amount.

    Without a lock: where there is no interpreter lock, threads that settle in the same instant may lose a count.
    """

    __slots__ = ("debt", "granted", "reserved", "settled", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.reset()

    def reset(self) -> None:
        """Start at 0, as in the child of a fork."""
        self.granted = 0  # holds that were granted the short way, without a wait
        self.reserved: list[int] = [0] * self.size
        self.settled: list[int] = [0] * self.size
        self.debt: list[int] = [0] * self.size

    def reserve(self, values: list[int]) -> None:
        totals = self.reserved
        for number, value in enumerate(values):
            totals[number] = totals[number] + value  # compiled, quicker than +=

    def settle(self, final: list[int], reserved: list[int]) -> None:
        """Count what a hold was charged, and as a debt what that is beyond what it had reserved."""
        totals = self.settled
        for number, value in enumerate(final):
            totals[number] = totals[number] + value  # compiled, quicker than +=
            if value > reserved[number]:
                self.debt[number] += value - reserved[number]
