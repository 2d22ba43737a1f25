"""Leases of a pool: a member on loan to one caller, renewed while it is used, settled in the end.

What a lease does in the store is written as plans (see `headgate._plan`). The leases of `headgate.hybrid` are
unrelated: those are permits of a limiter that a process has taken in advance.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from types import TracebackType
from typing import Any, Self

from headgate.clock import MICROSECONDS
from headgate.coordination.acquisition import keep_renewed
from headgate.coordination.arguments import check_seconds_or_0
from headgate.coordination.feedback import Feedback, Learn, checked_feedback, is_failure, of_response
from headgate.coordination.runner import Plan, Runner
from headgate.coordination.states.machine import Operation
from headgate.coordination.states.pool import UNANSWERED
from headgate.coordination.timers import Timer
from headgate.errors import StoreUnavailable

WAITER_TTL = 5.0  # seconds without a request after which a waiter is taken for dead


class LeaseTerms:
    """What all leases of a `Pool` object have in common: their length, and the rules that every operation takes."""

    def __init__(self, runner: Runner, lease: float, rules: str) -> None:
        self.runner = runner
        self.clock = runner.clock
        self.lease = lease  # seconds
        self.lease_us = round(lease * MICROSECONDS)
        self._common = (self.lease_us, round(WAITER_TTL * MICROSECONDS), rules)
        # We take it for lost a little before Redis does: clocks run differently.
        self.margin = 0 if runner.backend.in_process else self.lease_us // 20

    def operation(self, name: str, id: str, *arguments: str | int) -> Operation:
        return Operation(name, (id, *self._common, *arguments))


class MemberLease:
    """One lease of a member, from the first request until it is settled or lost."""

    def __init__(self, terms: LeaseTerms, waits: bool) -> None:
        self.terms = terms
        self.id = secrets.token_hex(12)
        self.waits = waits  # in the queue of the pool, if no member is free
        self.requested = False
        self.unconfirmed = False  # a request was sent, and it is not known whether it was granted
        self.ready_in = -1  # microseconds until a member may be free; 0 or less: not known
        self.member = ""
        self.until = 0  # by our own clock, a little before it ends in the store
        self.feedback: Feedback | None = None
        self.ignores_errors = False
        self.unanswered = False  # see `Leased.unanswered`
        self.over = False
        self.lost = False
        self.process = os.getpid()
        self.timer: Timer | None = None

    def attempt(self) -> Plan[tuple[bool | None, float]]:
        """Ask for a member once, as `wait_in_queue` wants it."""
        terms = self.terms
        sent, self.requested, self.unconfirmed = terms.clock.now(), True, True
        granted, member, self.ready_in = yield terms.operation("acquire", self.id, int(self.waits))
        self.unconfirmed = False
        if granted == 1:
            self.member, self.until = member, sent + terms.lease_us - terms.margin
            terms.runner.counts.hold(self)
            return True, 0.0
        poll = terms.runner.backend.states.poll
        return None, min(poll, self.ready_in / MICROSECONDS) if self.ready_in > 0 else poll

    def withdraw(self) -> None:
        """Give up the request: leave the queue, and give back a member that may have been granted."""
        if self.requested and (self.waits or self.unconfirmed):
            self._settle_in_background(self._settle_operation(Feedback(""), uses=0))

    def renew(self) -> Plan[bool]:
        if self.over:
            return False
        sent = self.terms.clock.now()
        try:
            [ours] = yield self.terms.operation("renew", self.id)
        except StoreUnavailable:
            ours = self.terms.clock.now() < self.until  # if so, there is time for the next renewal to try again
        else:
            self.until = sent + self.terms.lease_us - self.terms.margin
        if not ours and not self.over:
            self.lost = True
            self._end()
        return bool(ours)

    def is_held(self) -> bool:
        return not self.over and not self.is_lost()

    def is_lost(self) -> bool:
        return self.lost or (not self.over and self.terms.clock.now() >= self.until)

    def seconds_to_renewal(self) -> float:
        """A third of the lease, or less when a renewal has failed."""
        left = max((self.until - self.terms.clock.now()) / MICROSECONDS, 0.0)
        return self.terms.lease / 3 if left > self.terms.lease / 2 else min(self.terms.lease / 10, left)

    def release(self, cooldown: float, failed: bool, retire: bool) -> Plan[bool]:
        """Settle it with what was observed and with these arguments: the worse of the two counts."""
        seen = self.feedback or Feedback()
        outcome = "failure" if failed else seen.outcome
        longest = max(check_seconds_or_0("cooldown", cooldown), seen.cooldown)
        return (yield from self._settle(Feedback(outcome, longest, retire or seen.retire)))

    def leave(self, error: BaseException | None) -> Plan[bool]:
        """Settle it at the end of a ``with`` block with what was observed; if nothing was, an exception is a failure.

        A cancellation says nothing about the member, nor does an error of headgate itself.
        """
        verdict = self.feedback
        if verdict is None:
            failed = error is not None and is_failure(error) and not self.ignores_errors
            verdict = Feedback("success" if error is None else "failure" if failed else "")
        return (yield from self._settle(verdict))

    def _settle(self, verdict: Feedback) -> Plan[bool]:
        """Give the member back; False if the lease was over before, or is that of a parent process."""
        if self.over or self.process != os.getpid():
            return False
        in_time = not self.is_lost()
        self._end()
        settle = self._settle_operation(verdict, UNANSWERED if self.unanswered else 1)
        try:
            [ours] = yield settle
        except StoreUnavailable:
            self._settle_in_background(settle)
            return in_time
        except BaseException:
            self._settle_in_background(settle)
            raise
        self.lost = not ours
        return bool(ours)

    def _settle_operation(self, verdict: Feedback, uses: int) -> Operation:
        cooldown = round(verdict.cooldown * MICROSECONDS)
        return self.terms.operation("settle", self.id, verdict.outcome, cooldown, int(verdict.retire), uses)

    def _settle_in_background(self, settle: Operation) -> None:
        self.terms.runner.retry_in_background(settle, self.terms.clock.now() + self.terms.lease_us, self.process)

    def _end(self) -> None:
        self.over = True
        self.terms.runner.counts.end(self)
        if self.timer:
            self.timer.cancel()


class _AnyLeased:
    """What `Leased` and `AsyncLeased` share: all that does not ask the store."""

    def __init__(self, lease: MemberLease) -> None:
        self._lease = lease
        self._runner = lease.terms.runner
        self.member = lease.member

    @property
    def lost(self) -> bool:
        """Whether the lease ended before it was renewed or released, for all we know. Does not ask the store."""
        return self._lease.is_lost()

    @property
    def unanswered(self) -> bool:
        """Set it to True when a request was sent: the server may still count it after the caller has given up.

        If it is still True at the release, the use counts for the quota from the end of the lease, not from the
        release. `observe` sets it to False.
        """
        return self._lease.unanswered

    @unanswered.setter
    def unanswered(self, value: bool) -> None:
        self._lease.unanswered = value

    def observe(self, response: Any, learn: Learn = of_response) -> Feedback:
        """Learn from an HTTP answer: 429 cools the member down, 401 retires it, 5xx counts for its breaker.

        Args:
            response: of httpx, requests, aiohttp, or anything with a status and headers
            learn: what it says, as a function that returns a `Feedback`; None: as above
        """
        self._lease.feedback = verdict = checked_feedback(learn, response)
        self._lease.unanswered = False
        return verdict

    def ignore_errors(self) -> None:
        """Count no exception of this block as a failure. What `observe` learns, and ``failed=True``, still count."""
        self._lease.ignores_errors = True

    excuse = ignore_errors  # its name in the first versions

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._runner.name!r}>"  # the member may be a secret


class Leased(_AnyLeased):
    """What `Pool.acquire` gives: `member` is leased to us. ``with`` renews the lease, and releases it at the end."""

    def renew(self) -> bool:
        """Start the time of the lease again; False if it was over."""
        return self._runner.run(self._lease.renew())

    def release(self, cooldown: float = 0.0, *, failed: bool = False, retire: bool = False) -> bool:
        """Give the member back; False if the lease was over.

        What was observed counts too: the longer cooldown, and a failure or a retirement of either.

        Args:
            cooldown: seconds for which no caller gets the member again
            failed: whether its use counts as a failure
            retire: do not lease it any more
        """
        return self._runner.run(self._lease.release(cooldown, failed, retire))

    def __enter__(self) -> Self:
        keep_renewed(self._runner, self._lease)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.run(self._lease.leave(error))


class AsyncLeased(_AnyLeased):
    """`Leased` for asyncio."""

    async def renew(self) -> bool:
        """Start the time of the lease again; False if it was over."""
        return await self._runner.arun(self._lease.renew())

    async def release(self, cooldown: float = 0.0, *, failed: bool = False, retire: bool = False) -> bool:
        """Give the member back; False if the lease was over. See `Leased.release`."""
        return await self._runner.arun(self._lease.release(cooldown, failed, retire))

    async def __aenter__(self) -> Self:
        keep_renewed(self._runner, self._lease, asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._runner.arun(self._lease.leave(error))
