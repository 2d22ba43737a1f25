"""A pool of things that a fleet shares: API tokens, User-Agents, proxies, accounts.

    pool = Pool("tokens", store="redis://...", quota="80/10 minutes", failures=3)
    pool.add("token-1", "token-2")
    with pool.acquire(timeout=10.0) as leased:
        leased.observe(requests.get(url, headers={"Authorization": leased.member}))

Who asks gets the member that was used longest ago, for a lease; it is back when it is released, or when its holder
died and the lease is over. A member may have a quota and a breaker of its own, and cool down for as long as the other
side asks: what one worker learns counts for all. Who finds nothing free waits in line, and is told exactly how long it
may take. One script admits, one settles.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypedDict, TypeVar

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import deadline, held_for
from headgate.coordination.leases import AsyncLeased, Lease, Leased, Leases
from headgate.coordination.members import REASONS, PoolStatus, Quotas, encode_rules, parse_status
from headgate.coordination.site import RETRY, Plan, Site, Turn, shorter
from headgate.coordination.states.pool import POOL
from headgate.errors import PoolExhausted, StoreUnavailable
from headgate.keys import check_key
from headgate.stores.base import Store

T = TypeVar("T")

PATIENCE = 5.0  # seconds without a word after which whoever waits is taken for dead
MANY = 100  # members; to look at more takes Redis a while
RECENT = 1 * MICROSECONDS  # how long what was seen of so many will do to say why there is nothing


def _check(member: str) -> str:
    return check_key(member, "member", secret=True)  # it may be a token, and errors are logged


class Preset(TypedDict):
    """Arguments of a pool."""

    quota: str
    failures: int
    open_for: float
    successes: int


CRAWLER: Preset = {"quota": "80/10 minutes", "failures": 3, "open_for": 600.0, "successes": 3}


class Plans:
    """What both pools do."""

    def __init__(
        self,
        name: str,
        store: str | Store,
        lease: float,
        slots: int | None,
        quota: Quotas,
        failures: int | None,
        open_for: float | None,
        successes: int | None,
        clock: Clock | None,
    ) -> None:
        lease = held_for("lease", lease)
        given = encode_rules(slots, quota, failures, open_for, successes)
        self.site = Site(POOL, name, store, clock)
        self.clock = self.site.clock
        common = (round(lease * MICROSECONDS), round(PATIENCE * MICROSECONDS), given)
        self.leases = Leases(self.site, lease, common)
        self._seen: tuple[PoolStatus, int] | None = None  # of many members, and when

    def acquire(self, turn: Turn, timeout: float | None) -> Plan[Lease]:
        until = deadline(self.clock, timeout)
        id, process = secrets.token_hex(12), os.getpid()
        waits = 0 if timeout == 0 else 1
        asked = under_way = False
        wait = -1
        with turn:
            try:
                while True:
                    pause: float | None = None  # until it is first
                    problem = None
                    # who may not wait asks once, first or not: the pool knows of those who were before
                    if turn.first or not (asked or until is None or self.clock.now() < until):
                        asked, pause = True, self.site.place.poll
                        sent, under_way = self.clock.now(), True
                        try:
                            granted, member, wait = yield self.leases.step("acquire", id, waits)
                        except StoreUnavailable as error:
                            problem, pause = error, RETRY
                        else:
                            under_way = False
                            if granted == 1:
                                return self.leases.granted(id, member, sent)
                            if wait > 0:
                                pause = min(self.site.place.poll, wait / MICROSECONDS)
                        turn.listen()
                    left = None if until is None else (until - self.clock.now()) / MICROSECONDS
                    if problem and (left is None or left <= 0):
                        raise problem
                    if left is not None and left <= 0:
                        raise (yield from self._exhausted(wait))
                    yield shorter(pause, left)
            except BaseException:
                if asked and (waits or under_way):  # it stands in the queue, or may have got what nobody heard of
                    self.leases.insist(self.leases.step("settle", id, "", 0, 0, 0), process)
                raise

    def add(self, members: tuple[str, ...], restore: bool) -> Plan[None]:
        yield self.leases.step("add" if restore else "add_new", "", *map(_check, members))

    def retire(self, members: tuple[str, ...]) -> Plan[None]:
        yield self.leases.step("retire", "", *map(_check, members))

    def status(self) -> Plan[PoolStatus]:
        return parse_status((yield self.leases.step("status", "")))

    def _exhausted(self, wait: int) -> Plan[PoolExhausted]:
        """*wait*: until the next is ready, or a lease is over; not above 0: nobody can tell."""
        now = self.clock.now()
        if self._seen and now < self._seen[1] + RECENT:
            seen, _ = self._seen
        else:
            seen = yield from self.status()
            self._seen = (seen, now) if len(seen.members) > MANY else None
        reasons = {reason: getattr(seen, reason) for reason in REASONS}
        return PoolExhausted(self.site.name, wait / MICROSECONDS if wait > 0 else None, reasons)


class Pool:
    """A pool of tokens, User-Agents or the like that threads and processes share.

    name       what is shared
    store      a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
    lease      seconds after which the member of a holder that died is back
    slots      how many may have the same member at once (1)
    quota      of each member, counted exactly, such as ``"80/10 minutes"``; several: all must allow
    failures   in a row that open a member's breaker; None: it has none
    open_for   seconds that the breaker keeps it out (600)
    successes  that close it again (3)
    clock      a `headgate.testing.ManualClock`, in tests

    The rules (slots, quota, failures, open_for, successes) of whoever added members last count for all who use it, and
    for all members. Who gives none changes none: an operator's script may add members without knowing them. Who gives
    one gives all: ``slots=1`` alone means no quota and no breaker. `CRAWLER` has those for careful crawlers.
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        lease: float = 30.0,
        slots: int | None = None,
        quota: Quotas = None,
        failures: int | None = None,
        open_for: float | None = None,
        successes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, lease, slots, quota, failures, open_for, successes, clock)
        self._plans.site.place.check(tasks=False)
        self.name = name

    def __repr__(self) -> str:
        return f"<Pool {self._plans.site!r}>"

    def add(self, *members: str, restore: bool = True) -> None:
        """Put members in, the first to be had first; retired ones come back, unless *restore* is False."""
        self._run(lambda _: self._plans.add(members, restore))

    def retire(self, *members: str) -> None:
        """Give members to nobody any more; who has one may finish."""
        self._run(lambda _: self._plans.retire(members))

    def acquire(self, timeout: float | None = None) -> Leased:
        """Lease the member that was used longest ago; raise `PoolExhausted` after *timeout* seconds (None: never)."""
        return Leased(self._plans.leases, self._run(lambda turn: self._plans.acquire(turn, timeout)))

    def status(self) -> PoolStatus:
        """Who is ready, in use, cooling, limited, open or retired, and until when."""
        return self._run(lambda _: self._plans.status())

    def close(self) -> None:
        """Let go of the connections, which all tools on this store share; the next call makes new ones."""
        self._plans.site.place.close()

    def _run(self, plan: Callable[[Turn], Plan[T]]) -> T:
        return self._plans.site.run(plan)


class Acquiring(Coroutine[Any, Any, AsyncLeased]):
    """What `AsyncPool.acquire` gives: await it for a lease, make a task of it, or use it with ``async with``."""

    def __init__(self, acquire: Coroutine[Any, Any, AsyncLeased]) -> None:
        self._acquire = acquire
        self._leased: AsyncLeased | None = None

    def __await__(self) -> Generator[Any, Any, AsyncLeased]:
        return self._acquire.__await__()

    def send(self, value: Any) -> Any:
        return self._acquire.send(value)

    def throw(self, *error: Any) -> Any:
        return self._acquire.throw(*error)

    def close(self) -> None:
        self._acquire.close()

    async def __aenter__(self) -> AsyncLeased:
        self._leased = await self
        return await self._leased.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._leased is not None
        await self._leased.__aexit__(kind, error, at)


class AsyncPool:
    """`Pool` for asyncio: the same arguments, the same methods, awaited.

    async with pool.acquire(timeout=10.0) as leased:
        leased.observe(await client.get(url, headers={"Authorization": leased.member}))
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        lease: float = 30.0,
        slots: int | None = None,
        quota: Quotas = None,
        failures: int | None = None,
        open_for: float | None = None,
        successes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, lease, slots, quota, failures, open_for, successes, clock)
        self._plans.site.place.check(tasks=True)
        self.name = name

    def __repr__(self) -> str:
        return f"<AsyncPool {self._plans.site!r}>"

    async def add(self, *members: str, restore: bool = True) -> None:
        """Put members in, the first to be had first; retired ones come back, unless *restore* is False."""
        await self._run(lambda _: self._plans.add(members, restore))

    async def retire(self, *members: str) -> None:
        """Give members to nobody any more; who has one may finish."""
        await self._run(lambda _: self._plans.retire(members))

    def acquire(self, timeout: float | None = None) -> Acquiring:
        """Lease the member that was used longest ago; raise `PoolExhausted` after *timeout* seconds (None: never)."""
        return Acquiring(self._acquire(timeout))

    async def status(self) -> PoolStatus:
        """Who is ready, in use, cooling, limited, open or retired, and until when."""
        return await self._run(lambda _: self._plans.status())

    async def aclose(self) -> None:
        """Let go of this event loop's connections; it does so itself when it ends."""
        await self._plans.site.place.aclose()

    async def _acquire(self, timeout: float | None) -> AsyncLeased:
        lease = await self._run(lambda turn: self._plans.acquire(turn, timeout))
        return AsyncLeased(self._plans.leases, lease)

    def _run(self, plan: Callable[[Turn], Plan[T]]) -> Coroutine[Any, Any, T]:
        return self._plans.site.arun(plan)
