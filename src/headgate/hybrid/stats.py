"""How a hybrid limiter has decided: figures to look at now, and to export later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headgate.hybrid.member import Member


@dataclass(frozen=True, slots=True)
class Stats:
    """Permits, since the limiter was made; `keys`, `held` and `unreported` as of now."""

    local: int  # asked for and answered without waiting: from a lease, or by the policy while Redis is away
    remote: int  # asked for by callers who had to wait for Redis
    degraded: int  # calls that the policy answered, whether they waited or not
    syncs: int  # reports, one for each key
    trips: int  # round trips that carried them, those of other limiters on the same store included
    failures: int  # trips that failed
    keys: int  # that are known here
    held: int  # permits on lease here
    unreported: int  # spent here, not known to Redis yet: the divergence of the two
    burned: int  # permits of leases that ran out before they were spent
    voided: int  # leases that Redis did not know any more
    trip_seconds: float  # how long a trip takes, on average
    nodes: int  # processes at one key, lately
    backend: str  # "up" or "down"

    @property
    def local_ratio(self) -> float:
        """The part of all decisions that waited for nobody."""
        total = self.local + self.remote
        return self.local / total if total else 1.0


def _without_waiting(member: Member) -> int:
    """Permits that were asked for here and answered at once, as far as they are not with the leases yet."""
    return member.spent + member.denied + member.outage.asked + member.table.refunded // member.law.cost


def stats_of(members: Sequence[Member]) -> Stats:
    """The figures of *members*, added up."""
    nodes = {member.node for member in members}
    leases = [(lease, member.law.cost) for member in members for lease in list(member.table.leases.values())]
    leaving = [item for node in nodes for item in list(node.leaving.items())]  # in no table, but not told of yet
    gone = [(lease, member.law.cost) for (member, _), lease in leaving if member in members]
    fresh = sum((lease.mark - lease.balance + lease.denied) // cost for lease, cost in leases + gone)
    return Stats(
        local=sum(_without_waiting(member) for member in members) + fresh,
        remote=sum(member.remote for member in members),
        degraded=sum(member.outage.answers for member in members),
        syncs=sum(member.syncs for member in members),
        trips=sum(node.trips for node in nodes),
        failures=sum(node.backend.failures for node in nodes),
        keys=len(leases),
        held=sum(lease.balance // cost for lease, cost in leases),
        unreported=sum(max(lease.mark - lease.balance, 0) // cost for lease, cost in leases),
        burned=sum(member.burned for member in members),
        voided=sum(member.voided for member in members),
        trip_seconds=max((node.trip for node in nodes), default=0) / 1e9,
        nodes=max((node.seen for node in nodes), default=1),
        backend="down" if any(member.node.backend.sick(member.table.read_clock()) for member in members) else "up",
    )
