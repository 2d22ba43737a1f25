"""How a pool is, and each of its members."""

from __future__ import annotations

from dataclasses import dataclass, field

from headgate.clock import MICROSECONDS
from headgate.coordination.machine import Reply


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """How a member is: ready, leased, cooling, limited, open or retired; and when it may be had, in seconds."""

    state: str
    in_use: int
    ready_in: float | None  # None: when somebody brings it back
    breaker: str
    failures: int


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """How many members are in which state, how many processes wait, and every member by name."""

    ready: int
    leased: int
    cooling: int
    limited: int
    open: int
    retired: int
    waiting: int
    members: dict[str, MemberStatus] = field(repr=False)  # names that may be secrets


_BREAKERS = ("CLOSED", "OPEN", "HALF_OPEN")
REASONS = ("leased", "cooling", "limited", "open", "retired")


def status(reply: Reply) -> PoolStatus:
    """The status that a pool answered with."""
    waiting, *rows = reply
    members = {
        member: MemberStatus(why, used, None if wait < 0 else wait / MICROSECONDS, _BREAKERS[breaker], failed)
        for member, why, used, wait, breaker, failed in zip(*(rows[i::6] for i in range(6)), strict=True)
    }
    states = [member.state for member in members.values()]
    ready, leased, cooling, limited, opened, retired = (states.count(state) for state in ("ready", *REASONS))
    return PoolStatus(ready, leased, cooling, limited, opened, retired, waiting, members)
