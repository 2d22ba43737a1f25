"""What a pool does, as plans, and the leases that it gives out."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import count, deadline, duration, seconds
from headgate.coordination.feedback import Feedback, of_response
from headgate.coordination.machines.pool import MACHINE
from headgate.coordination.place import Memory, Step
from headgate.coordination.renewal import keep
from headgate.coordination.site import Plan, Site, Turn, shorter
from headgate.coordination.timers import Timer
from headgate.errors import InvalidQuota, PoolExhausted, StoreUnavailable
from headgate.keys import check_key
from headgate.quota import Quota
from headgate.stores import Store

PATIENCE = 5.0  # seconds without a word after which whoever waits is taken for dead
RETRY = 0.1  # seconds between tries while Redis does not answer

Quotas = str | Quota | Sequence[str | Quota] | None


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
    members: dict[str, MemberStatus]


_BREAKERS = ("CLOSED", "OPEN", "HALF_OPEN")
_REASONS = ("leased", "cooling", "limited", "open", "retired")


class Lease:
    """One lease as a value: what both kinds of `Leased` share."""

    def __init__(self, id: str, member: str, until: int) -> None:
        self.id = id
        self.member = member
        self.until = until  # by our own clock, a little before it ends in the store
        self.feedback: Feedback | None = None
        self.excused = False
        self.over = False
        self.lost = False
        self.process = os.getpid()
        self.timer: Timer | None = None

    def end(self) -> None:
        self.over = True
        if self.timer:
            self.timer.cancel()


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
        self.lease = seconds("lease", lease)
        given = any(rule is not None for rule in (slots, quota, failures, open_for, successes))
        rules = _rules(slots, quota, failures, open_for, successes) if given else ""
        self.lease_us = round(self.lease * MICROSECONDS)
        self.rules = (self.lease_us, round(PATIENCE * MICROSECONDS), rules)
        self.site = Site(MACHINE, name, store, clock)
        self.clock = self.site.clock
        # what two clocks may differ by in a lease
        self.margin = 0 if isinstance(self.site.place, Memory) else self.lease_us // 20

    def acquire(self, turn: Turn, timeout: float | None) -> Plan[Lease]:
        until = deadline(self.clock, timeout)
        id = secrets.token_hex(12)
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
                            granted, member, wait = yield self._step("acquire", id, waits)
                        except StoreUnavailable as error:
                            problem, pause = error, RETRY
                        else:
                            under_way = False
                            if granted == 1:
                                return Lease(id, member, self._until(sent))
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
                    self._later(self._step("settle", id, "", 0, 0, 0))
                raise

    def settle(self, lease: Lease, outcome: Feedback) -> Plan[bool]:
        """Give it back; False if the lease was over before. A parent's is not its child's."""
        if lease.over or lease.process != os.getpid():
            return False
        in_time = not self.is_lost(lease)
        lease.end()
        cooldown = round(outcome.cooldown * MICROSECONDS)
        step = self._step("settle", lease.id, outcome.outcome, cooldown, int(outcome.retire), 1)
        try:
            [ours] = yield step
        except StoreUnavailable:
            self._later(step)
            return in_time
        except BaseException:
            self._later(step)
            raise
        lease.lost = not ours
        return bool(ours)

    def renew(self, lease: Lease) -> Plan[bool]:
        if lease.over:
            return False
        sent = self.clock.now()
        try:
            [ours] = yield self._step("renew", lease.id)
        except StoreUnavailable:
            ours = self.clock.now() < lease.until  # there is time for another try, or there is not
        else:
            lease.until = self._until(sent)
        if not ours and not lease.over:
            lease.lost = True
            lease.end()
        return bool(ours)

    def is_lost(self, lease: Lease) -> bool:
        return lease.lost or (not lease.over and self.clock.now() >= lease.until)

    def next_renewal(self, lease: Lease) -> float:
        """A third of the lease, sooner when that has failed."""
        left = max((lease.until - self.clock.now()) / MICROSECONDS, 0.0)
        return self.lease / 3 if left > self.lease / 2 else min(self.lease / 10, left)

    def _until(self, sent: int) -> int:
        return sent + self.lease_us - self.margin

    def add(self, members: tuple[str, ...]) -> Plan[None]:
        yield self._step("add", "", *(check_key(member, "member") for member in members))

    def retire(self, members: tuple[str, ...]) -> Plan[None]:
        yield self._step("retire", "", *(check_key(member, "member") for member in members))

    def status(self) -> Plan[PoolStatus]:
        waiting, *rows = yield self._step("status", "")
        members = {
            member: MemberStatus(why, used, None if wait < 0 else wait / MICROSECONDS, _BREAKERS[breaker], failed)
            for member, why, used, wait, breaker, failed in zip(*(rows[i::6] for i in range(6)), strict=True)
        }
        states = [member.state for member in members.values()]
        ready, leased, cooling, limited, opened, retired = (states.count(state) for state in ("ready", *_REASONS))
        return PoolStatus(ready, leased, cooling, limited, opened, retired, waiting, members)

    def release(self, lease: Lease, cooldown: float, failed: bool, retire: bool) -> Plan[bool]:
        """What was observed counts, and what is said here on top of it."""
        seen = lease.feedback or Feedback()
        outcome = "failure" if failed else seen.outcome
        longest = max(duration("cooldown", cooldown), seen.cooldown)
        return (yield from self.settle(lease, Feedback(outcome, longest, retire or seen.retire)))

    def leave(self, lease: Lease, error: BaseException | None) -> Plan[bool]:
        """The end of a ``with`` block: what was observed counts; else an exception is a failure, and no word a success.

        A cancelled block says nothing about the member.
        """
        verdict = lease.feedback
        if verdict is None:
            blamed = isinstance(error, Exception) and not lease.excused
            verdict = Feedback("success" if error is None else "failure" if blamed else "")
        return (yield from self.settle(lease, verdict))

    def _exhausted(self, wait: int) -> Plan[PoolExhausted]:
        """*wait*: until the next is ready, or a lease is over; not above 0: nobody can tell."""
        status = yield from self.status()
        reasons = {reason: getattr(status, reason) for reason in _REASONS}
        return PoolExhausted(self.site.name, wait / MICROSECONDS if wait > 0 else None, reasons)

    def _step(self, op: str, id: str, *arguments: str | int) -> Step:
        return Step(op, (id, *self.rules, *arguments))

    def _later(self, step: Step) -> None:
        self.site.insist(step, self.clock.now() + self.lease_us)


def _rules(
    slots: int | None, quota: Quotas, failures: int | None, open_for: float | None, successes: int | None
) -> str:
    rules = [
        count("slots", 1 if slots is None else slots),
        0 if failures is None else count("failures", failures),
        round(seconds("open_for", 600.0 if open_for is None else open_for) * MICROSECONDS),
        count("successes", 3 if successes is None else successes),
        *(number for each in _quotas(quota) for number in (each.limit, each.period_us)),
    ]
    return ",".join(map(str, rules))


def _quotas(quota: Quotas) -> list[Quota]:
    if quota is None:
        return []
    listed = [quota] if isinstance(quota, str | Quota) else list(quota)
    quotas = [each if isinstance(each, Quota) else Quota.parse(each) for each in listed]
    for each in quotas:
        if each.burst is not None:
            raise InvalidQuota(f"the quota of a pool's member is counted exactly, so it has no burst: {each}")
    return quotas


class Leased:
    """A member that is ours for a lease. Within ``with`` the lease is renewed; released at the end."""

    def __init__(self, plans: Plans, lease: Lease) -> None:
        self._plans = plans
        self._lease = lease
        self.member = lease.member

    @property
    def lost(self) -> bool:
        """Whether the lease ran out before it was renewed or released, for all we know; asks nobody."""
        return self._plans.is_lost(self._lease)

    def observe(self, response: Any) -> Feedback:
        """Learn from an HTTP answer: 429 cools the member down, 401 retires it, 5xx counts for its breaker."""
        self._lease.feedback = verdict = of_response(response)
        return verdict

    def excuse(self) -> None:
        """Let an exception of this block count for nothing, unless an answer is observed or a failure is told."""
        self._lease.excused = True

    def renew(self) -> bool:
        """Begin the lease anew; False if it was over."""
        return self._plans.site.run(lambda _: self._plans.renew(self._lease))

    def release(self, cooldown: float = 0.0, *, failed: bool = False, retire: bool = False) -> bool:
        """Give the member back; False if the lease was over. It is not had again for *cooldown* seconds.

        What was observed counts too: the longer cooldown, and a failure or a retirement of either.
        """
        return self._plans.site.run(lambda _: self._plans.release(self._lease, cooldown, failed, retire))

    def __enter__(self) -> Self:
        keep(self._plans, self._lease)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._plans.site.run(lambda _: self._plans.leave(self._lease, error))

    def __repr__(self) -> str:
        return f"Leased({self.member!r})"


class AsyncLeased:
    """`Leased` for asyncio."""

    def __init__(self, plans: Plans, lease: Lease) -> None:
        self._plans = plans
        self._lease = lease
        self.member = lease.member

    @property
    def lost(self) -> bool:
        """Whether the lease ran out before it was renewed or released, for all we know; asks nobody."""
        return self._plans.is_lost(self._lease)

    def observe(self, response: Any) -> Feedback:
        """Learn from an HTTP answer: 429 cools the member down, 401 retires it, 5xx counts for its breaker."""
        self._lease.feedback = verdict = of_response(response)
        return verdict

    def excuse(self) -> None:
        """Let an exception of this block count for nothing, unless an answer is observed or a failure is told."""
        self._lease.excused = True

    async def renew(self) -> bool:
        """Begin the lease anew; False if it was over."""
        return await self._plans.site.arun(lambda _: self._plans.renew(self._lease))

    async def release(self, cooldown: float = 0.0, *, failed: bool = False, retire: bool = False) -> bool:
        """Give the member back; False if the lease was over. It is not had again for *cooldown* seconds.

        What was observed counts too: the longer cooldown, and a failure or a retirement of either.
        """
        return await self._plans.site.arun(lambda _: self._plans.release(self._lease, cooldown, failed, retire))

    async def __aenter__(self) -> Self:
        keep(self._plans, self._lease, asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._plans.site.arun(lambda _: self._plans.leave(self._lease, error))

    def __repr__(self) -> str:
        return f"AsyncLeased({self.member!r})"
