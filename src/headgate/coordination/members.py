"""The rules for the members of a pool, as its state machine reads them, and their status, as it replies with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headgate.clock import MICROSECONDS
from headgate.coordination.arguments import check_count, check_seconds
from headgate.coordination.states.machine import Reply
from headgate.errors import InvalidQuota
from headgate.quota import Quota

Quotas = str | Quota | Sequence[str | Quota] | None


def encode_rules(
    slots: int | None, quota: Quotas, failures: int | None, open_for: float | None, successes: int | None
) -> str:
    """The rules as the state machine reads them; '' if none is given, which keeps the rules that the pool has.

    Giving any rule sets the others to their defaults.
    """
    if all(rule is None for rule in (slots, quota, failures, open_for, successes)):
        return ""
    numbers = [
        check_count("slots", 1 if slots is None else slots),
        0 if failures is None else check_count("failures", failures),
        round(check_seconds("open_for", 600.0 if open_for is None else open_for) * MICROSECONDS),
        check_count("successes", 3 if successes is None else successes),
        *(number for each in _quotas(quota) for number in (each.limit, each.period_us)),
    ]
    return ",".join(map(str, numbers))


def _quotas(quota: Quotas) -> list[Quota]:
    if quota is None:
        return []
    listed = [quota] if isinstance(quota, str | Quota) else quota
    if not isinstance(listed, Sequence) or not all(isinstance(each, str | Quota) for each in listed):
        raise InvalidQuota(f"quota must be such as '80/10 minutes', or a list of such, got {quota!r:.80}")
    quotas = [each if isinstance(each, Quota) else Quota.parse(each) for each in listed]
    for each in quotas:
        if each.burst is not None:
            raise InvalidQuota(f"the quota of a pool's member is counted exactly, so it has no burst: {each}")
    return quotas


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member of a pool, as `Pool.status` reports it."""

    state: str  # ready, leased, cooling, limited, open or retired
    in_use: int  # how many leases it has
    ready_in: float | None  # seconds until it may be leased; None: not before a lease of it ends or it is added again
    breaker: str  # CLOSED, OPEN or HALF_OPEN
    failures: int  # in a row


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """How many members are in each state, how many callers are queued in the store, and each member by name.

    Attributes:
        ready: members that the next caller may get
        leased: in use
        cooling: not to be used for a while
        limited: at their quota
        open: kept back by their breaker
        retired: not leased any more
        waiting: callers that are queued in the store
        members: each member by name
    """

    ready: int
    leased: int
    cooling: int
    limited: int
    open: int
    retired: int
    waiting: int
    members: dict[str, MemberStatus] = field(repr=False)  # not shown: the names may be secrets


_BREAKERS = ("CLOSED", "OPEN", "HALF_OPEN")
REASONS = ("leased", "cooling", "limited", "open", "retired")


def parse_status(reply: Reply) -> PoolStatus:
    """The status in the reply of the state machine."""
    waiting, *rows = reply
    members = {
        member: MemberStatus(why, used, None if wait < 0 else wait / MICROSECONDS, _BREAKERS[breaker], failed)
        for member, why, used, wait, breaker, failed in zip(*(rows[i::6] for i in range(6)), strict=True)
    }
    states = [member.state for member in members.values()]
    ready, leased, cooling, limited, opened, retired = (states.count(state) for state in ("ready", *REASONS))
    return PoolStatus(ready, leased, cooling, limited, opened, retired, waiting, members)
