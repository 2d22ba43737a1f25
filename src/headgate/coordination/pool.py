"""A pool of things that a fleet shares: API tokens, User-Agents, proxies, accounts.

    pool = Pool("tokens", store="redis://...", quota="80/10 minutes", failures=3)
    pool.add("token-1", "token-2")
    with pool.acquire(timeout=10.0) as leased:
        leased.observe(requests.get(url, headers={"Authorization": leased.member}))

A caller leases the member that was used longest ago. The member is free again when the caller releases it, or when the
lease of a caller that died is over. A member may have a quota and a breaker of its own, and cool down for as long as a
server asks: what one worker learns counts for all. A caller that finds no free member queues, and is told exactly how
long it may take. Two operations matter: `acquire` leases a member, `settle` returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypedDict

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import check_ttl, deadline_after
from headgate.coordination.leases import AsyncLeased, Leased, LeaseTerms, MemberLease
from headgate.coordination.members import REASONS, PoolStatus, Quotas, encode_rules, parse_status
from headgate.coordination.runner import Acquiring, AsyncTool, Plan, ThreadTool, Ticket, Tool, wait_in_queue
from headgate.coordination.states.pool import POOL
from headgate.errors import PoolExhausted
from headgate.keys import check_key
from headgate.stores.base import Store
from headgate.telemetry.watching import Sample

CACHE_STATUS_ABOVE = 100  # members; the status of more takes Redis a while
CACHED_STATUS_TTL = 1 * MICROSECONDS  # how long a cached status is good enough to say why no member is free


class Preset(TypedDict):
    """Arguments of a pool that can be given as ``**CRAWLER``."""

    quota: str
    failures: int
    open_for: float
    successes: int


CRAWLER: Preset = {"quota": "80/10 minutes", "failures": 3, "open_for": 600.0, "successes": 3}


class _AnyPool(Tool):
    """What `Pool` and `AsyncPool` share: the constructor, and plans (see `headgate._plan`)."""

    _kind = "pool"

    def __init__(
        self,
        name: str,
        *,
        slots: int | None = None,
        quota: Quotas = None,
        failures: int | None = None,
        open_for: float | None = None,
        successes: int | None = None,
        lease: float = 30.0,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        lease = check_ttl("lease", lease)
        rules = encode_rules(slots, quota, failures, open_for, successes)
        self._set_up(POOL, name, store, clock)
        self._terms = LeaseTerms(self._runner, lease, rules)
        self._cached_status: tuple[PoolStatus, int] | None = None  # and when it was asked for
        self._seen: PoolStatus | None = None  # the last, for telemetry

    def _gauges(self) -> Iterator[Sample]:
        yield from super()._gauges()
        yield Sample("headgate.pool.leased", (), len(self._runner.counts.held()))
        if self._runner.backend.in_process:
            self._runner.run(self._status_plan())
        if self._seen is not None:
            for state in ("ready", *REASONS):
                yield Sample("headgate.pool.members", (("state", state),), getattr(self._seen, state))

    def _acquire_plan(self, new_ticket: Callable[[], Ticket], timeout: float | None) -> Plan[MemberLease]:
        until = deadline_after(self._runner.clock, timeout)
        lease = MemberLease(self._terms, waits=timeout != 0)
        try:
            if (yield from wait_in_queue(self._runner, new_ticket, lease.attempt, until)):
                return lease
            raise (yield from self._exhausted(lease))
        except BaseException:
            lease.withdraw()
            raise

    def _add_plan(self, members: tuple[str, ...], restore: bool) -> Plan[None]:
        yield self._terms.operation("add" if restore else "add_new", "", *map(_check, members))

    def _retire_plan(self, members: tuple[str, ...]) -> Plan[None]:
        yield self._terms.operation("retire", "", *map(_check, members))

    def _status_plan(self) -> Plan[PoolStatus]:
        self._seen = parse_status((yield self._terms.operation("status", "")))
        return self._seen

    def _exhausted(self, lease: MemberLease) -> Plan[PoolExhausted]:
        """Why *lease* was not granted, and when to ask again."""
        now = self._runner.clock.now()
        if self._cached_status and now < self._cached_status[1] + CACHED_STATUS_TTL:
            status, _ = self._cached_status
        else:
            status = yield from self._status_plan()
            self._cached_status = (status, now) if len(status.members) > CACHE_STATUS_ABOVE else None
        reasons = {reason: getattr(status, reason) for reason in REASONS}
        return PoolExhausted(self.name, lease.ready_in / MICROSECONDS if lease.ready_in > 0 else None, reasons)


def _check(member: str) -> str:
    return check_key(member, "member", secret=True)  # it may be a token, and errors are logged


class Pool(_AnyPool, ThreadTool):
    """A pool of tokens, User-Agents or the like that threads and processes share.

    The rules (slots, quota, failures, open_for, successes) of the process that added members last count for all
    processes and all members. A `Pool` object without rules changes none: an operator's script may add members without
    knowing them. Giving any rule sets the others to their defaults: ``slots=1`` alone means no quota and no breaker.
    `CRAWLER` has rules for careful crawlers.

    Args:
        name: of the pool
        store: a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
        lease: seconds after which the member of a holder that died is free again
        slots: how many callers may have the same member at once (1)
        quota: of each member, such as ``"80/10 minutes"``, counted exactly; of a list all must allow
        failures: in a row that open a member's breaker; None: it has none
        open_for: seconds for which an open breaker keeps its member from being leased (600)
        successes: that close a breaker again (3)
        clock: a `headgate.testing.ManualClock`, in tests
    """

    def add(self, *members: str, restore: bool = True) -> None:
        """Add members.

        Args:
            *members: tokens, User-Agents or names of them; handed out in this order
            restore: whether retired ones come back
        """
        self._runner.run(self._add_plan(members, restore))

    def retire(self, *members: str) -> None:
        """Do not lease these members any more; a lease that has begun goes on.

        Args:
            *members: which
        """
        self._runner.run(self._retire_plan(members))

    def acquire(self, timeout: float | None = None) -> Leased:
        """Lease the member that was used longest ago.

        Args:
            timeout: seconds to wait; 0: not at all, None: for ever

        Raises:
            PoolExhausted: no member came free in time
        """
        return Leased(self._runner.run(self._acquire_plan(self._runner.ticket, timeout)))

    def status(self) -> PoolStatus:
        """Which members are ready, leased, cooling, limited, open or retired, and until when."""
        return self._runner.run(self._status_plan())


class AsyncPool(_AnyPool, AsyncTool):
    """`Pool` for asyncio: the same arguments, the same methods, awaited.

    async with pool.acquire(timeout=10.0) as leased:
        leased.observe(await client.get(url, headers={"Authorization": leased.member}))
    """

    async def add(self, *members: str, restore: bool = True) -> None:
        """Add members; they are handed out in this order. Retired ones come back, unless *restore* is False."""
        await self._runner.arun(self._add_plan(members, restore))

    async def retire(self, *members: str) -> None:
        """Do not lease these members any more; a lease that has begun goes on."""
        await self._runner.arun(self._retire_plan(members))

    def acquire(self, timeout: float | None = None) -> Acquiring[AsyncLeased]:
        """Lease the member that was used longest ago; raise `PoolExhausted` after *timeout* seconds (None: never)."""
        return Acquiring(self._acquire(timeout))

    async def _acquire(self, timeout: float | None) -> AsyncLeased:
        return AsyncLeased(await self._runner.arun(self._acquire_plan(self._runner.async_ticket, timeout)))

    async def status(self) -> PoolStatus:
        """Which members are ready, leased, cooling, limited, open or retired, and until when."""
        return await self._runner.arun(self._status_plan())
