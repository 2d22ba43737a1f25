"""What travels to Redis, and for whom: callers who wait, and one ask about one key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from headgate.decision import Decision
from headgate.hybrid.lease import Lease
from headgate.hybrid.protocol import Ask

if TYPE_CHECKING:
    from headgate.hybrid.member import Member


class Waiter:
    """A caller who waits for Redis. *wake* is called when `result` is there."""

    __slots__ = ("error", "op", "permits", "result", "wake")

    def __init__(self, op: str, permits: int, wake: Callable[[], object]) -> None:
        self.op = op  # take, peek or reset
        self.permits = permits
        self.wake = wake
        self.result: Decision | None = None
        self.error: Exception | None = None  # of the policy

    def tell(self, made: Decision) -> None:
        self.result = made
        self.wake()

    def answer(self) -> Decision:
        """The result, once it is there; or the error, raised."""
        if self.error:
            raise self.error
        assert self.result is not None
        return self.result


class Errand(NamedTuple):
    """One ask, and for whom."""

    lease: Lease
    ask: Ask
    waiters: Sequence[Waiter]

    @property
    def member(self) -> Member:
        member: Member = self.lease.home
        return member


def needs_of(waiters: Sequence[Waiter]) -> tuple[tuple[int, int], ...]:
    """(how many in a row, for how many permits each)."""
    return tuple((len(list(group)), permits) for permits, group in groupby(waiter.permits for waiter in waiters))
