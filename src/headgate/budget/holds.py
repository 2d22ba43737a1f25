"""Holds: what a caller has reserved of a budget, from its request until it is settled, withdrawn or lost.

What a hold does in the store is written as plans (see `headgate._plan`).
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping
from decimal import Decimal
from types import TracebackType
from typing import Any, Self

from headgate._lifecycle import in_each_child
from headgate.budget.amounts import Amount, Amounts, BucketSpec
from headgate.clock import MICROSECONDS
from headgate.coordination.runner import Plan, Runner
from headgate.coordination.states.machine import Operation, entry_channel
from headgate.decision import Decision, decision
from headgate.errors import BudgetExceeded, RateLimited, StoreUnavailable
from headgate.rule import OnStoreError

WAITER_TTL = 5.0  # seconds without a request after which a waiter is taken for dead
LOW_WATER = 10  # a tenth of the reservation: with less than that left a hold reserves more

_process_id = ""
_counter = itertools.count()


@in_each_child
def _begin_process() -> None:
    global _process_id
    _process_id = secrets.token_hex(10) + "-"


_begin_process()


def unique_id() -> str:
    """An id that no other hold has, in any process."""
    return _process_id + format(next(_counter), "x")


class BudgetTerms:
    """What all holds of a `Budget` object have in common."""

    def __init__(self, runner: Runner, hold: float, on_lost: str, on_store_error: OnStoreError) -> None:
        self.runner = runner
        self.clock = runner.clock
        self.hold_us = round(hold * MICROSECONDS)
        self.on_lost = on_lost
        self.on_store_error = on_store_error
        self.open_holds: dict[str, _AnyHold] = {}  # of this process, not yet settled

    def opened(self, hold: _AnyHold) -> None:
        self.open_holds[hold.id] = hold
        if len(self.open_holds) % 1024 == 0:  # callers may have dropped some without settling them
            self.drop_lost()

    def drop_lost(self) -> None:
        """Forget the holds whose time is over."""
        now = self.clock.now()
        for id, hold in list(self.open_holds.items()):
            if hold.ends_at <= now:
                self.open_holds.pop(id, None)


class BudgetSubject:
    """What a key, or the keys of a hierarchy, mean: which state, which buckets, which queue."""

    def __init__(self, runner: Runner, amounts: Amounts, names: list[str], shown: str) -> None:
        self.runner = runner
        self.amounts = amounts
        self.shown = shown
        self._names = names
        self.spec = self.spec_of(amounts.buckets)
        self.path = names[-1] if len(names) > 1 else ""
        self.zeros = " ".join(["0"] * len(amounts.buckets))
        self._root = runner.channel.partition("\n")[0]

    def spec_of(self, buckets: list[BucketSpec]) -> str:
        """These buckets as the state reads them."""
        return " ".join([f"{self._names[each.level]} {each.label} {each.room} {each.rate}" for each in buckets])

    def operation(self, name: str, id: str, values: list[int] | None, *more: str | int) -> Operation:
        units = self.zeros if values is None else " ".join(map(str, self.amounts.units(values)))
        return Operation(name, (id, self.spec, units, *more))

    def ask(self, operation: Operation, size: int) -> Plan[list[Any]]:
        """Run *operation*, and wake the waiters of this process that its reply names behind *size* values."""
        reply = yield operation
        self._wake(reply, size)
        return reply  # type: ignore[no-any-return]  # what a plan is sent is Any

    def ask_locally(self, operation: Operation, size: int) -> list[Any]:
        """Run *operation* on the state of this process, in place of the store's."""
        reply = self.runner.backend.local_states.run(self.runner.machine, self.runner.name, operation)
        self._wake(reply, size)
        return reply

    def _wake(self, reply: list[Any], size: int) -> None:
        for path in reply[size:]:
            self.runner.backend.waiters.wake(entry_channel(self._root, path))


class _AnyHold:
    """What `Hold` and `AsyncHold` share: all that does not ask the store, and plans."""

    def __init__(
        self, terms: BudgetTerms, subject: BudgetSubject, id: str | None, values: list[int], until: int | None
    ) -> None:
        self._terms = terms
        self._subject = subject
        self.id = unique_id() if id is None else id
        self._nonce = "" if id is None else unique_id()
        self._reserved = values
        self._first = values
        self._spent = [0] * len(values)
        self._dry = False  # True: the last request for more was refused
        self._until = until  # when to stop waiting, by the clock; None: never
        self.ends_at = 0  # when it is lost, by our clock
        self._queued = self._unconfirmed = False
        self._denial: Decision | None = None
        self._process = os.getpid()
        self.settled = False  # or left without being settled
        self.degraded = False  # True: the store did not answer, and `on_store_error` granted it

    @property
    def key(self) -> str:
        """The key that it is of; of a hierarchy all keys, with ``>`` between them."""
        return self._subject.shown

    @property
    def reserved(self) -> dict[str, int | Decimal]:
        """What is reserved of each amount now."""
        return self._subject.amounts.read(self._reserved)

    @property
    def spent(self) -> dict[str, int | Decimal]:
        """What `spend` has counted so far."""
        return self._subject.amounts.read(self._spent)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.reserved.items())
        return f"<{type(self).__name__} of {self._subject.shown!r}, {shown}>"

    # --------------------------------------------------------------------------------------------------- reserve

    def _attempt(self) -> Plan[tuple[bool | None, float]]:
        """Ask for the reservation once, as `wait_in_queue` wants it."""
        terms, subject = self._terms, self._subject
        sent = terms.clock.now()
        waits = self._until is None or sent < self._until
        self._queued, self._unconfirmed = self._queued or waits, True
        ttl = round(WAITER_TTL * MICROSECONDS) if waits else 0
        more = (terms.hold_us, self._nonce, terms.on_lost, ttl, subject.path)
        operation = subject.operation("reserve", self.id, self._reserved, *more)
        try:
            reply = yield from subject.ask(operation, 5)
        except StoreUnavailable as error:
            reply = self._reserve_without_store(operation, error)
        self._unconfirmed = self._unconfirmed and self.degraded
        granted, wait, binds, available, reset = reply[:5]
        if granted == 1:
            self._granted(sent)
            return True, 0.0
        self._queued = waits and granted == 0
        if binds:
            bucket = subject.amounts.buckets[binds - 1]
            left, limit = max(available, 0) // bucket.cost, bucket.room // bucket.cost
            self._denial = decision(False, limit, left, max(reset, 1), max(wait, 1), self.degraded)
        return None, subject.runner.next_poll(wait / MICROSECONDS)

    def _reserve_without_store(self, operation: Operation, error: StoreUnavailable) -> list[Any]:
        policy = self._terms.on_store_error
        if policy == "raise":
            raise error
        self.degraded = True
        if policy == "deny":
            limit = self._subject.amounts.capacities[0]
            raise RateLimited(self.key, decision(False, limit, 0, MICROSECONDS, MICROSECONDS, True)) from error
        return self._subject.ask_locally(operation, 5) if policy == "local" else [1, 0, 0, 0, 0]

    def _granted(self, sent: int) -> None:
        self._queued = False
        self.ends_at = sent + self._terms.hold_us
        self._terms.opened(self)

    def _refused(self) -> RateLimited:
        if self._denial is None:  # the store refuses the id: a request that was withdrawn came back
            self._denial = decision(False, self._subject.amounts.capacities[0], 0, MICROSECONDS, MICROSECONDS)
        return RateLimited(self.key, self._denial)

    def _withdrawal(self) -> Operation:
        return self._subject.operation("withdraw", self.id, None, self._nonce, 0)

    def _leave_queue(self) -> Plan[None]:
        """Leave the queue of the store before the caller learns that its time is over."""
        if self._queued:
            try:
                yield from self._subject.ask(self._withdrawal(), 1)
                self._queued = False
            except StoreUnavailable:
                pass  # in the background, then

    def _withdraw(self) -> None:
        """Give up the request: leave the queue, and give back what may have been granted."""
        if self._queued or self._unconfirmed:
            self._repeat(self._withdrawal())

    def _repeat(self, operation: Operation) -> None:
        """Send *operation* in the background until the store answers, for as long as the hold could last."""
        until = self._terms.clock.now() + self._terms.hold_us
        self._subject.runner.retry_in_background(operation, until, self._process)

    # ----------------------------------------------------------------------------------------------------- spend

    def _count(self, amounts: Mapping[str, Amount]) -> bool:
        """Count what was spent; whether the store has to be asked for more, or for more time."""
        if self.settled:
            raise RuntimeError(f"the hold of {self.key!r} is settled, so nothing can be spent from it")
        added = self._subject.amounts.encode(amounts)
        self._spent = [spent + more for spent, more in zip(self._spent, added, strict=True)]
        late = self.ends_at - self._terms.clock.now() < self._terms.hold_us // 2
        return late or any(self._short(number) for number, more in enumerate(added) if more)

    def _short(self, number: int) -> bool:
        left = self._reserved[number] - self._spent[number]
        return left < 0 or (not self._dry and left <= self._first[number] // LOW_WATER and self._first[number] > 0)

    def _extend_plan(self) -> Plan[None]:
        """Reserve as much again of what is nearly spent, or else what is missing; raise if even that is not there."""
        amounts = self._subject.amounts
        wanted = list(self._reserved)
        for number, spent in enumerate(self._spent):
            if self._short(number):
                wanted[number] = min(spent + max(self._first[number], 1), max(spent, amounts.capacities[number]))
        missing = [max(pair) for pair in zip(self._spent, self._reserved, strict=True)]
        self._dry = False
        for target in (wanted, missing) if wanted != missing else (missing,):
            if (yield from self._extend(target)):
                self._reserved = target
                return
        self._dry = True
        for number, name in enumerate(amounts.names):
            if self._spent[number] > self._reserved[number]:
                raise BudgetExceeded(self.key, name)

    def _extend(self, target: list[int]) -> Plan[bool]:
        terms, subject = self._terms, self._subject
        sent = terms.clock.now()
        spent = " ".join(map(str, subject.amounts.units(self._spent)))
        operation = subject.operation("extend", self.id, target, terms.hold_us, spent)
        if self.degraded:
            reply = subject.ask_locally(operation, 1) if terms.on_store_error == "local" else [1]
        else:
            try:
                reply = yield from subject.ask(operation, 1)
            except StoreUnavailable:
                if terms.on_store_error == "raise":
                    raise
                reply = [0 if terms.on_store_error == "deny" else 1]
        self.ends_at = sent + terms.hold_us
        return bool(reply[0])

    # ---------------------------------------------------------------------------------------------------- settle

    def _final(self, amounts: Mapping[str, Amount] | None) -> list[int]:
        """What is charged in the end; None: what was spent so far."""
        if amounts is None:
            return self._spent
        touched = zip(self._spent, self._reserved, strict=True)
        return self._subject.amounts.encode(amounts, [spent or reserved for spent, reserved in touched])

    def _settle_plan(self, amounts: Mapping[str, Amount] | None) -> Plan[bool]:
        """Charge what was used; False if it was settled before, or is that of a parent process."""
        if self.settled:
            return False
        final = self._final(amounts)  # raises before anything is changed
        self.settled = True
        self._terms.open_holds.pop(self.id, None)
        if self._process != os.getpid():
            return False
        unknown = int(self.degraded)
        operation = self._subject.operation("settle", self.id, final, self._nonce, unknown)
        if self.degraded:
            if self._terms.on_store_error == "local":
                self._subject.ask_locally(operation, 1)
            self._repeat(operation)
            return True
        answered = False
        try:
            reply = yield from self._subject.ask(operation, 1)
            answered = True
            return bool(reply[0])
        except StoreUnavailable:
            return True  # in the background
        finally:
            if not answered:
                self._repeat(operation)


class Hold(_AnyHold):
    """What `Budget.reserve` gives. ``with`` settles it at the end: see `settle`; after an error, what was spent."""

    def spend(self, **amounts: Amount) -> None:
        """Count what was used. Reserves more before it runs out; raises `BudgetExceeded` when there is no more.

        What was used is counted all the same. Asks the store only to reserve more, and to keep the hold when half of
        its time is over.
        """
        if self._count(amounts):
            self._subject.runner.run(self._extend_plan())

    def settle(self, **amounts: Amount) -> bool:
        """Charge what was used, and give the rest back; more than was reserved is a debt. False if settled before.

        An amount that is not named is charged as spent, or as reserved if nothing of it was spent. Repeated in the
        background if the store does not answer.
        """
        return self._subject.runner.run(self._settle_plan(amounts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.settled:
            self._subject.runner.run(self._settle_plan({} if error is None else None))


class AsyncHold(_AnyHold):
    """`Hold` for asyncio."""

    async def spend(self, **amounts: Amount) -> None:
        """Count what was used. Reserves more before it runs out; raises `BudgetExceeded` when there is no more."""
        if self._count(amounts):
            await self._subject.runner.arun(self._extend_plan())

    async def settle(self, **amounts: Amount) -> bool:
        """Charge what was used, and give the rest back. See `Hold.settle`."""
        return await self._subject.runner.arun(self._settle_plan(amounts))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if not self.settled:
            await self._subject.runner.arun(self._settle_plan({} if error is None else None))
