"""What comes into a lease by itself: a part of the rate, up to a room, from a reply until the next report.

The ledger refills by this part less and counts all of the room as leased, so never one too many rests on three rules:

1. Nothing comes in after the lease has ended here, which is before it ends in Redis.
2. Nothing comes in while the lease is full. Units are added now and then, when a caller needs them; so at most as many
   are added as there was room for at the last time, as if all that was spent since were spent just now.
3. From a report to its reply, Redis may apply the old part or the new one: the smaller of both comes in, with the
   reply, as far as there was room at the report. If the reply is lost, nothing more comes in until another reply.

Times are nanoseconds of this process's clock, which may be off by a thousandth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headgate.algorithms.algorithm import multiply

if TYPE_CHECKING:
    from headgate.hybrid.protocol import LeaseReply, QuotaParams

PARTS: Final = 1_000_000  # as `headgate.hybrid.protocol.PARTS`, for compiled code
SLOWER: Final = 0.999  # a clock that runs fast must not bring more than Redis withholds
STEPS: Final = 8  # units are added when callers have spent an eighth of the room


class Inflow:
    """The inflow of one lease. Amounts are units."""

    __slots__ = ("added_at", "fetch_below", "headroom", "rate", "room", "scarce")

    def __init__(self, room: int, rate: float, balance: int, now: int) -> None:
        self.room = room  # the lease never has more
        self.rate = rate  # units a nanosecond
        self.added_at = now
        self.headroom = room - balance  # at `added_at`; what was spent since does not count
        self.scarce = False  # nothing was free in Redis: a caller who asks there gets nothing
        self.fetch_below = -1  # at this balance more is fetched; -1: that is in vain

    def add(self, now: int, balance: int) -> int:
        """Units that have come in until *now*, to be added to *balance* by the caller."""
        came = int((now - self.added_at) * self.rate)
        if came >= self.headroom:
            came = self.headroom
            self.added_at = now  # the rest is lost: the lease is full
        elif came > 0:
            self.added_at += int(came / self.rate) + 1
        else:
            came = 0
        self.headroom = self.room - balance - came
        return came

    def nanoseconds_until(self, units: int) -> int:
        """How long it takes until *units* more have come in."""
        return int(units / self.rate) + 1


def inflow_of(reply: LeaseReply, params: QuotaParams, balance: int, now: int) -> Inflow:
    """The inflow that *reply* gives a lease of *balance* units."""
    room = multiply(reply.leased_here + reply.room, params.cost)
    return Inflow(room, params.rate / 1000 * SLOWER * (reply.inflow / PARTS), balance, now)
