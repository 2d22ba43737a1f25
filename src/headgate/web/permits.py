"""Permits of one request: taken all or nothing, waited for in line, given back exactly."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from headgate.clock import MICROSECONDS, SYSTEM_CLOCK, Clock
from headgate.decision import Decision, decision
from headgate.errors import RateLimited, StoreUnavailable
from headgate.joint import JointCheck, refund_degraded, try_acquire_all, try_acquire_all_async
from headgate.stores.base import Store, is_in_process
from headgate.web.exchange import Charge, Exchange

logger = logging.getLogger("headgate.web")

Answers = list[tuple[Charge, Decision]]


class Permits:
    """Takes and gives back the permits of requests, on one store.

    Every method is a coroutine. For an exchange that is `blocking` it calls the store without await.
    """

    def __init__(self, store: Store) -> None:
        self.in_process = is_in_process(store)  # then a plain call is quicker, and nothing can interrupt it
        self._clock: Clock = getattr(store, "clock", None) or SYSTEM_CLOCK  # what waiters go by
        self._tasks: set[asyncio.Task[None]] = set()

    def now(self) -> int:
        """Microseconds, of the clock that waiters go by."""
        return self._clock.now()

    def still_spent(self, charges: Sequence[Charge]) -> list[Charge]:
        """Those of *charges* that time has not given back yet: to give back the others would hand permits out twice."""
        now = self.now()
        return [charge for charge in charges if now - charge.taken_at < charge.limiter.recovery_us]

    async def take(self, exchange: Exchange, charges: list[Charge]) -> Answers:
        """Take all charges or none. Those of limits with a time-out wait in line where they are denied."""
        if any([charge.limit.timeout for charge in charges]) and all([charge.is_possible() for charge in charges]):
            return await self._take_in_line(exchange, charges)
        return await self.take_at_once(exchange, charges)

    async def give_back(self, exchange: Exchange, charges: Sequence[Charge]) -> None:
        """Give back what these charges took, even if the caller is cancelled or one of them cannot be given back."""
        if not charges:
            return
        exchange.taken = tuple(charge for charge in exchange.taken if charge not in charges)
        if not exchange.blocking and not self.in_process:
            await self.shielded(self._refund(charges))
            return
        for charge in charges:
            if charge.degraded:
                refund_degraded(charge.limiter.blocking, charge.key, charge.permits)
                continue
            try:
                charge.limiter.blocking.refund(charge.key, charge.permits)
            except StoreUnavailable as error:
                _log_lost(charge, error)

    def shielded(self, work: Coroutine[Any, Any, None]) -> Awaitable[None]:
        """*work* in a task that goes on if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)

    async def _refund(self, charges: Sequence[Charge]) -> None:
        for charge in charges:
            if charge.degraded:
                refund_degraded(charge.limiter.waiting, charge.key, charge.permits)
                continue
            try:
                await charge.limiter.waiting.refund(charge.key, charge.permits)
            except StoreUnavailable as error:
                _log_lost(charge, error)

    async def take_at_once(self, exchange: Exchange, charges: list[Charge]) -> Answers:
        """One step of the store."""
        if not all([charge.is_possible() for charge in charges]):
            return [(charge, await self._impossible(exchange, charge)) for charge in charges]
        blocking = exchange.blocking or self.in_process
        if len(charges) == 1:
            [charge] = charges
            limiter = charge.limiter
            if blocking:
                return [(charge, limiter.blocking.try_acquire(charge.key, charge.permits))]
            return [(charge, await limiter.waiting.try_acquire(charge.key, charge.permits))]
        if blocking:
            made = try_acquire_all([JointCheck(each.limiter.blocking, each.key, each.permits) for each in charges])
        else:
            checks = [JointCheck(each.limiter.waiting, each.key, each.permits) for each in charges]
            made = await try_acquire_all_async(checks)
        return list(zip(charges, made, strict=True))

    async def peek(self, exchange: Exchange, charge: Charge) -> Decision:
        """How things stand for the key of *charge*, of which nothing is taken."""
        if exchange.blocking or self.in_process:
            return charge.limiter.blocking.peek(charge.key, 0)
        return await charge.limiter.waiting.peek(charge.key, 0)

    async def _impossible(self, exchange: Exchange, charge: Charge) -> Decision:
        """The answer if one of the charges is more than its capacity: that one is denied, nothing is spent.

        Its `retry_after` is 0.0: no wait is long enough.
        """
        now = await self.peek(exchange, charge)
        if charge.is_possible():
            return now
        return decision(False, now.limit, now.remaining, now.reset_us, 0, now.degraded)

    async def _take_in_line(self, exchange: Exchange, charges: list[Charge]) -> Answers:
        """Take all charges or none, and wait in line for those that are denied, if all of these have a time-out.

        What was taken goes back if another charge is refused then, or if the caller is cancelled.
        """
        began = self._clock.now()
        made: dict[Charge, Decision] = {}
        held: list[Charge] = []
        # a new request does not overtake those in line
        waiting = [each for each in charges if each.limit.timeout and not each.limiter.waiters.is_empty(each.key)]
        try:
            while all([charge.limit.timeout for charge in waiting]):
                for charge in waiting:
                    made[charge] = await self._wait_for(exchange, charge, began)
                    if not made[charge]:
                        return list(made.items())
                    held.append(charge)
                rest = [charge for charge in charges if charge not in held]
                made |= await self.take_at_once(exchange, rest) if rest else []
                waiting = [charge for charge in rest if not made[charge]]
                if not waiting:
                    held = []
                    break
            return list(made.items())
        finally:
            await self.give_back(exchange, as_taken([(charge, made[charge]) for charge in held], began))

    async def _wait_for(self, exchange: Exchange, charge: Charge, began: int) -> Decision:
        """Wait for one charge until its time-out has passed since *began*."""
        waited = (self._clock.now() - began) / MICROSECONDS
        timeout = max((charge.limit.timeout or 0.0) - waited, 0.0)
        try:
            if exchange.blocking:
                return charge.limiter.blocking.acquire(charge.key, charge.permits, timeout)
            return await charge.limiter.waiting.acquire(charge.key, charge.permits, timeout)
        except RateLimited as denied:
            return denied.decision


def counted_once(taken: Sequence[Charge], charges: list[Charge]) -> list[Charge]:
    """*charges* without what the request has spent of the same keys: two limits of one scope count it once."""
    spent: Counter[tuple[object, ...]] = Counter()
    for charge in taken:
        spent[_place(charge)] += charge.permits
    found = []
    for charge in charges:
        more = charge.permits - spent[_place(charge)]
        if more > 0:
            spent[_place(charge)] = charge.permits
            found.append(charge._replace(permits=more))
    return found


def as_taken(answers: Answers, now: int) -> list[Charge]:
    """The charges of answers that allow them, taken at *now*."""
    return [charge._replace(degraded=made.degraded, taken_at=now) for charge, made in answers]


def _place(charge: Charge) -> tuple[object, ...]:
    return charge.limiter, charge.key, charge.limit.count_if, charge.limit.shadow


def _log_lost(charge: Charge, error: StoreUnavailable) -> None:
    logger.warning("%d permits of %r could not be given back: %s", charge.permits, charge.limit, error)
