"""Stores that may have missed something are compared with the others, key by key. Pure: no I/O, times are arguments.

What a store has counted less than the others is taken from it (`StoreLease.extra`), by each process its part. One that
did not know a lease that it had given has forgotten the key, and has taken all that was free from it: it is set to
what the others count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headgate.hybrid.protocol import LeaseReply, LeaseRequest, QuotaParams
from headgate.hybrid.several_lease import SETTLES, WINDOW_MARGIN, StoreLease

KNOWN_PART = 10  # a key of which a tenth and two permits are used is known well enough to doubt a store that knows none
KNOWN_PERMITS = 2


class Levels:
    """What the stores of one key are to count, of which *needed* must answer."""

    __slots__ = ("needed", "stores", "to_set")

    def __init__(self, stores: Sequence[StoreLease], needed: int) -> None:
        self.stores = stores
        self.needed = needed
        self.to_set: dict[int, tuple[int, int]] = {}  # of stores that lost the key: what others count, spent by then

    def compare(
        self,
        now: int,
        params: QuotaParams,
        total: int,
        asked: Mapping[int, LeaseRequest],
        good: Mapping[int, LeaseReply],
        effective: Mapping[int, LeaseReply],
        met: Mapping[int, LeaseReply],
    ) -> None:
        """Compare the stores that may have missed something with the others, and note what to take from them.

        *total*: permits that the process has spent, ever; *good*: what the stores replied that lend; *effective*: the
        same with what goes back to them; *met*: the replies of those that were only looked at.
        """
        enough = params.capacity_units // KNOWN_PART + KNOWN_PERMITS * params.cost
        empty = {place for place, reply in met.items() if _is_unknown(reply, reply.free, params)}
        for place, reply in good.items():
            new = not asked[place].lease_id and not asked[place].debt
            if new and _is_unknown(reply, reply.free_before, params):
                empty.add(place)
        known = [params.capacity_units - _left(effective[place], params) for place in good if place not in empty]
        if not known or max(known) <= enough:
            empty.clear()
        for place in empty:
            self.stores[place].level_from = self.stores[place].level_from or now + SETTLES
        intact = [place for place in effective if not self.stores[place].level_from] or list(effective)
        self._note(params, total, {place: effective[place] for place in intact})
        for place, reply in (*effective.items(), *met.items()):
            store = self.stores[place]
            others = sorted(_left(effective[other], params) for other in intact if other != place)
            if not store.level_from or not others or (now < store.level_from and place not in empty):
                continue
            right = self._right(others)
            if not all(_same_window(reply, effective[other]) for other in intact):
                continue
            nodes = max(effective[other].nodes for other in intact)
            units = _left(reply, params) - right - (total - store.told) * params.cost
            store.extra = max(-(-units // (params.cost * max(nodes, 1))), 0)
            if not store.extra and place in effective:
                store.level_from = 0

    def _right(self, others: Sequence[int]) -> int:
        """What is left by the most generous of *others*, in order, that can have missed nothing.

        As many stores as a majority can do without may have missed something; the one that is compared is one of them.
        """
        may_lag = len(self.stores) - self.needed
        return others[min(max(len(others) - may_lag, 0), len(others) - 1)]

    def _note(self, params: QuotaParams, total: int, intact: Mapping[int, LeaseReply]) -> None:
        """Note what stores that have lost the key are to be set to: they have taken all that was free."""
        self.to_set.clear()
        for place, store in enumerate(self.stores):
            others = sorted(_left(reply, params) for other, reply in intact.items() if other != place)
            ends = [reply.window_ends_in for reply in intact.values()]
            if store.lost and others and (not params.period or min(ends) >= 2 * WINDOW_MARGIN):
                counted = -(-(params.capacity_units - self._right(others)) // params.cost)
                self.to_set[place] = (max(counted, 0), total)


def set_level(request: LeaseRequest, store: StoreLease, counted: int) -> LeaseRequest:
    """Set a store to *counted* permits: a reset and a debt. Any number of processes may do so, as it adds nothing up.

    It says that all replies have come, so that a debt is not taken off for one that did not.
    """
    return request._replace(
        op="reset", lease_id=0, acked_seq=request.seq - 1, held=0, returned=store.returned, refund=0, debt=counted,
        waiting=(), target=0, is_reserve=0, demand=0,
    )  # fmt: skip


def _left(reply: LeaseReply, params: QuotaParams) -> int:
    """Units that can still be spent: free ones, and those on lease."""
    return reply.free + (reply.leased_here + reply.others) * params.cost


def _is_unknown(reply: LeaseReply, free: int, params: QuotaParams) -> bool:
    """Whether the store knew nothing of the key."""
    return reply.nodes <= 1 and reply.others == 0 and free >= params.capacity_units


def _same_window(one: LeaseReply, other: LeaseReply) -> bool:
    if not other.window_ends_in:
        return True
    ends = (one.window_ends_in, other.window_ends_in)
    return min(ends) >= WINDOW_MARGIN and max(ends) - min(ends) <= WINDOW_MARGIN
