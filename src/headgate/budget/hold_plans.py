"""What a hold does, from its request until it is settled, withdrawn or lost: in the store as plans.

See `headgate._plan`. The short ways past them, for calls that find room and no waiter, do the same.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

from headgate.budget.amounts import Amount
from headgate.budget.records import packed
from headgate.budget.server_calls import WAITER_TTL
from headgate.budget.subjects import BudgetSubject, BudgetTerms, count_lock, process_id, unique_id
from headgate.clock import MICROSECONDS
from headgate.coordination.runner import Plan
from headgate.coordination.states.machine import Operation
from headgate.decision import Decision, decision
from headgate.errors import BudgetExceeded, RateLimited, StoreUnavailable

KNOWN: Final = 2  # the reply of the store where the id holds other amounts already
LOW_WATER: Final = 10  # a tenth of the reservation: with less than that left a hold reserves more


class AnyHold:
    """What `Hold` and `AsyncHold` share: all that does not ask the store, and plans."""

    def __init__(self, terms: BudgetTerms, subject: BudgetSubject, id: str | None, amounts: dict[str, Amount]) -> None:
        values = subject.values_of(id, amounts)
        self._terms = terms
        self._subject = subject
        self.id = unique_id() if id is None else id
        self._nonce = "" if id is None else unique_id()
        self._reserved = values
        self._first = values
        self._spent = [0] * len(values)
        self._dry = False  # True: the last request for more was refused
        self._until: int | None = None  # when to stop waiting, by the clock; None: never
        self.ends_at = 0  # when it is lost, by our clock
        self._queued = self._unconfirmed = False
        self._denial: Decision | None = None
        self._process = process_id()
        self.settled = False  # or left without being settled
        self.degraded = False  # True: the store did not answer, and `on_store_error` granted it

    @property
    def key(self) -> str:
        """The key that it is of; of a hierarchy all keys, with ``>`` between them."""
        return self._subject.shown

    def _name_in_store(self) -> str:
        """The id; one that a caller gave counts within its keys, not for all that have the same outermost one."""
        path = self._subject.path if self._nonce else ""
        return f"{path}\n{self.id}" if path else self.id

    def _name_here(self) -> str:
        """What tells it apart from the other open holds of this process: a caller may give one id for several keys."""
        return f"{self._subject.runner.name}\n{self._name_in_store()}" if self._nonce else self.id

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

    def _is_granted(self, timeout: float | None) -> bool:
        """Whether it is granted at once, the short way; if not, its wait for up to *timeout* seconds begins."""
        if self._grant_directly():
            self._terms.totals.granted += 1
            return True
        if timeout is not None:
            self._until = self._terms.clock.now() + round(timeout * MICROSECONDS)
        return False

    def _grant_directly(self) -> bool:
        """Reserve in memory the short way, if no caller waits and there is room; False: ask as all others do."""
        if self._nonce:
            return False  # an id that was given may have been used before
        terms, subject = self._terms, self._subject
        self._unconfirmed = True
        try:
            now = subject.grant(self.id, self._reserved, terms.hold_us, terms.on_lost)
            if now:
                self._granted(now)
        except BaseException:  # a signal handler may raise anywhere
            self._withdraw()
            raise
        self._unconfirmed = False
        return now > 0

    def _attempt(self) -> Plan[tuple[bool | None, float]]:
        """Ask for the reservation once, as `wait_in_queue` wants it."""
        sent = self._terms.clock.now()
        waits = self._asks_at(sent)
        operation = self._request(waits)
        try:
            reply = yield operation
            self._subject.wake(reply, 5 if reply[0] != KNOWN else 5 + reply[1])
        except StoreUnavailable as error:
            reply = self._reserve_without_store(operation, error)
        return self._answered(reply, sent, waits)

    def _asks_at(self, now: int) -> bool:
        """Note that the store may grant it from *now* on; whether it waits in the queue of the store."""
        waits = self._until is None or now < self._until
        self._queued, self._unconfirmed = self._queued or waits, True
        return waits

    def _request(self, waits: bool) -> Operation:
        terms, subject = self._terms, self._subject
        more = (terms.hold_us, self._nonce, terms.on_lost, WAITER_TTL if waits else 0, subject.path)
        return subject.operation("reserve", self._name_in_store(), self._reserved, *more)

    def _answered(self, reply: list[Any], sent: int, waits: bool) -> tuple[bool | None, float]:
        """What the *reply* to an attempt means: True if it is granted, else the seconds after which to ask again."""
        subject = self._subject
        self._unconfirmed = self._unconfirmed and self.degraded
        granted, wait, binds, available, reset = reply[:5]
        if granted == KNOWN:
            self._reserved = self._first = subject.amounts.values(reply[5 : 5 + wait])
        if granted in (1, KNOWN):
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
        self._terms.opened(self._name_here(), self)
        self._terms.totals.reserve(self._reserved)

    def _refused(self) -> RateLimited:
        if self._denial is None:  # the store refuses the id: a request that was withdrawn came back
            self._denial = decision(False, self._subject.amounts.capacities[0], 0, MICROSECONDS, MICROSECONDS)
        return RateLimited(self.key, self._denial)

    def _withdrawal(self) -> Operation:
        return self._subject.operation("withdraw", self._name_in_store(), None, self._nonce, 0)

    def _leave_queue(self) -> Plan[None]:
        """Leave the queue of the store before the caller learns that its time is over."""
        if self._queued:
            try:
                self._subject.wake((yield self._withdrawal()), 1)
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

    def _count(self, amounts: dict[str, Amount]) -> bool:
        """Count what was spent; whether the store has to be asked for more, or for more time."""
        if self.settled:
            raise RuntimeError(f"the hold of {self.key!r} is settled, so nothing can be spent from it")
        added = self._subject.amounts.encode(amounts)
        with count_lock():
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
                more = [max(new - old, 0) for new, old in zip(target, self._reserved, strict=True)]
                self._terms.totals.reserve(more)
                self._reserved = target
                return
        self._dry = True
        for number, name in enumerate(amounts.names):
            if self._spent[number] > self._reserved[number]:
                raise BudgetExceeded(self.key, name)

    def _extend(self, target: list[int]) -> Plan[bool]:
        terms, subject = self._terms, self._subject
        sent = terms.clock.now()
        spent = packed(subject.amounts.units(self._spent))
        operation = subject.operation("extend", self._name_in_store(), target, terms.hold_us, spent)
        if self.degraded:
            reply = subject.ask_locally(operation, 1) if terms.on_store_error == "local" else [1]
        else:
            try:
                reply = yield operation
                subject.wake(reply, 1)
            except StoreUnavailable:
                if terms.on_store_error == "raise":
                    raise
                reply = [0 if terms.on_store_error == "deny" else 1]
        self.ends_at = sent + terms.hold_us
        return bool(reply[0])

    # ---------------------------------------------------------------------------------------------------- settle

    def _final(self, amounts: dict[str, Amount] | None) -> list[int]:
        """What is charged in the end; None: what was spent so far."""
        if amounts is None:
            return self._spent
        touched = [spent or self._reserved[number] for number, spent in enumerate(self._spent)]
        return self._subject.amounts.encode(amounts, touched)

    def _settle_directly(self, amounts: dict[str, Amount] | None) -> bool:
        """Settle in memory the short way, as `_grant_directly`; False: nothing was done."""
        if self.settled or self._nonce or self.degraded or self._process != process_id():
            return False
        final = self._final(amounts)
        if not self._subject.settle(self.id, final):
            return False
        self._ended(final)
        return True

    def _ended(self, final: list[int]) -> None:
        self.settled = True
        self._terms.open_holds.pop(self._name_here(), None)
        if self._process == process_id():
            self._terms.totals.settle(final, self._reserved)

    def _settle_plan(self, amounts: dict[str, Amount] | None) -> Plan[bool]:
        """Charge what was used; False if it was settled before, or is that of a parent process."""
        if self.settled:
            return False
        final = self._final(amounts)  # raises before anything is changed
        self._ended(final)
        if self._process != process_id():
            return False
        operation = self._settlement(final)
        if self.degraded:
            if self._terms.on_store_error == "local":
                self._subject.ask_locally(operation, 1)
            self._repeat(operation)
            return True
        answered = False
        try:
            reply = yield operation
            answered = True
            self._subject.wake(reply, 1)
            return bool(reply[0])
        except StoreUnavailable:
            return True  # in the background
        finally:
            if not answered:
                self._repeat(operation)

    def _settlement(self, final: list[int]) -> Operation:
        return self._subject.operation("settle", self._name_in_store(), final, self._nonce, int(self.degraded))
