"""What a pool gives out: a member for a time, kept alive while it is used, settled in the end."""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Any, Self

from headgate.clock import MICROSECONDS
from headgate.coordination.arguments import duration
from headgate.coordination.feedback import Feedback, Learn, checked_feedback, is_failure, of_response
from headgate.coordination.memory import Memory
from headgate.coordination.renewal import keep
from headgate.coordination.site import Plan, Site
from headgate.coordination.states.machine import Operation
from headgate.coordination.states.pool import UNANSWERED
from headgate.coordination.timers import Timer
from headgate.errors import StoreUnavailable


class Lease:
    """One lease as a value: what both kinds of `Leased` share."""

    def __init__(self, id: str, member: str, until: int) -> None:
        self.id = id
        self.member = member
        self.until = until  # by our own clock, a little before it ends in the store
        self.feedback: Feedback | None = None
        self.excused = False
        self.unanswered = False
        self.over = False
        self.lost = False
        self.process = os.getpid()
        self.timer: Timer | None = None

    def end(self) -> None:
        self.over = True
        if self.timer:
            self.timer.cancel()


class Leases:
    """What happens to leases, from when they are granted. *common*: what every step of the pool takes after its id."""

    def __init__(self, site: Site, lease: float, common: tuple[str | int, ...]) -> None:
        self.site = site
        self.clock = site.clock
        self.lease = lease
        self.lease_us = round(lease * MICROSECONDS)
        self.common = common
        # what two clocks may differ by in a lease
        self.margin = 0 if isinstance(site.place, Memory) else self.lease_us // 20

    def granted(self, id: str, member: str, sent: int) -> Lease:
        """The lease that was asked for at that time."""
        return Lease(id, member, self._until(sent))

    def settle(self, lease: Lease, outcome: Feedback) -> Plan[bool]:
        """Give it back; False if the lease was over before. A parent's is not its child's."""
        if lease.over or lease.process != os.getpid():
            return False
        in_time = not self.is_lost(lease)
        lease.end()
        cooldown = round(outcome.cooldown * MICROSECONDS)
        used = UNANSWERED if lease.unanswered else 1
        step = self.step("settle", lease.id, outcome.outcome, cooldown, int(outcome.retire), used)
        try:
            [ours] = yield step
        except StoreUnavailable:
            self.insist(step, lease.process)
            return in_time
        except BaseException:
            self.insist(step, lease.process)
            raise
        lease.lost = not ours
        return bool(ours)

    def renew(self, lease: Lease) -> Plan[bool]:
        if lease.over:
            return False
        sent = self.clock.now()
        try:
            [ours] = yield self.step("renew", lease.id)
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

    def release(self, lease: Lease, cooldown: float, failed: bool, retire: bool) -> Plan[bool]:
        """What was observed counts, and what is said here on top of it."""
        seen = lease.feedback or Feedback()
        outcome = "failure" if failed else seen.outcome
        longest = max(duration("cooldown", cooldown), seen.cooldown)
        return (yield from self.settle(lease, Feedback(outcome, longest, retire or seen.retire)))

    def leave(self, lease: Lease, error: BaseException | None) -> Plan[bool]:
        """The end of a ``with`` block: what was observed counts; else an exception is a failure, and no word a success.

        A cancelled block says nothing about the member, nor does one that something of ours refused.
        """
        verdict = lease.feedback
        if verdict is None:
            blamed = error is not None and is_failure(error) and not lease.excused
            verdict = Feedback("success" if error is None else "failure" if blamed else "")
        return (yield from self.settle(lease, verdict))

    def step(self, op: str, id: str, *arguments: str | int) -> Operation:
        return Operation(op, (id, *self.common, *arguments))

    def insist(self, step: Operation, process: int) -> None:
        """Settle in the background: nobody waits for it."""
        self.site.insist(step, self.clock.now() + self.lease_us, process)

    def _until(self, sent: int) -> int:
        return sent + self.lease_us - self.margin


class Lent:
    """A member that is ours for a lease: what needs nobody's answer."""

    def __init__(self, leases: Leases, lease: Lease) -> None:
        self._leases = leases
        self._lease = lease
        self.member = lease.member

    @property
    def lost(self) -> bool:
        """Whether the lease ran out before it was renewed or released, for all we know; asks nobody."""
        return self._leases.is_lost(self._lease)

    @property
    def unanswered(self) -> bool:
        """Set it when a request is on its way, which the other side may count later than we give up on it.

        A use that ends so counts from the end of its lease, and not from now; `observe` takes it back.
        """
        return self._lease.unanswered

    @unanswered.setter
    def unanswered(self, value: bool) -> None:
        self._lease.unanswered = value

    def observe(self, response: Any, learn: Learn = of_response) -> Feedback:
        """Learn from an HTTP answer: 429 cools the member down, 401 retires it, 5xx counts for its breaker."""
        self._lease.feedback = verdict = checked_feedback(learn, response)
        self._lease.unanswered = False
        return verdict

    def excuse(self) -> None:
        """Let an exception of this block count for nothing, unless an answer is observed or a failure is told."""
        self._lease.excused = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._leases.site.name!r}>"  # the member may be a secret


class Leased(Lent):
    """What `Pool.acquire` gives: `member` is ours for a lease. Within ``with`` it is renewed; released at the end."""

    def renew(self) -> bool:
        """Begin the lease anew; False if it was over."""
        return self._leases.site.run(lambda _: self._leases.renew(self._lease))

    def release(self, cooldown: float = 0.0, *, failed: bool = False, retire: bool = False) -> bool:
        """Give the member back; False if the lease was over. It is not had again for *cooldown* seconds.

        What was observed counts too: the longer cooldown, and a failure or a retirement of either.
        """
        return self._leases.site.run(lambda _: self._leases.release(self._lease, cooldown, failed, retire))

    def __enter__(self) -> Self:
        keep(self._leases, self._lease)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leases.site.run(lambda _: self._leases.leave(self._lease, error))


class AsyncLeased(Lent):
    """`Leased` for asyncio."""

    async def renew(self) -> bool:
        """Begin the lease anew; False if it was over."""
        return await self._leases.site.arun(lambda _: self._leases.renew(self._lease))

    async def release(self, cooldown: float = 0.0, *, failed: bool = False, retire: bool = False) -> bool:
        """Give the member back; False if the lease was over. It is not had again for *cooldown* seconds.

        What was observed counts too: the longer cooldown, and a failure or a retirement of either.
        """
        return await self._leases.site.arun(lambda _: self._leases.release(self._lease, cooldown, failed, retire))

    async def __aenter__(self) -> Self:
        keep(self._leases, self._lease, asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._leases.site.arun(lambda _: self._leases.leave(self._lease, error))
