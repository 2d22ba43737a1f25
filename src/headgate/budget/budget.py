"""Budgets: several amounts with quotas, reserved together before a call and settled when its cost is known.

    llm = Budget(requests="500/minute", tokens="200000/minute", store="redis://...", name="gpt")
    with llm.reserve("tenant:7", requests=1, tokens=2700, timeout=30.0) as hold:
        answer = call()
        hold.settle(tokens=answer.usage.total_tokens)

A reservation is a hold: a record beside the buckets, which expires. What is available is what the buckets have less
what is held, so callers at the same time cannot spend more than there is, whatever their calls will cost in the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, Self, get_args
from urllib.parse import quote

from headgate.budget.amounts import Amount, Amounts, AnyQuota
from headgate.budget.holds import AsyncHold, Hold
from headgate.budget.records import MOST, ROOT, packed
from headgate.budget.server_calls import server_calls
from headgate.budget.state import budget_machine
from headgate.budget.subjects import BudgetSubject, BudgetTerms, check_any_timeout
from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import check_seconds_or_0, check_ttl
from headgate.coordination.runner import Acquiring, AsyncTool, Plan, Runner, ThreadTool, Ticket, Tool, wait_in_queue
from headgate.coordination.states.machine import Operation
from headgate.errors import StoreUnavailable
from headgate.keys import check_key
from headgate.rule import OnStoreError, check_policy
from headgate.stores.base import Store
from headgate.telemetry.tally import AmountSamples
from headgate.telemetry.watching import Sample, watch

OnLost = Literal["charge", "release", "spent"]
MAX_SUBJECTS = 10_000  # whose specs are kept
MAX_LEVELS = 8

Keys = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class UnsettledHold:
    """A hold that is not settled yet.

    Attributes:
        id: of the reservation
        amounts: what is held
        expires_in: seconds until it is lost
    """

    id: str
    amounts: dict[str, int | Decimal]
    expires_in: float  # seconds


class _AnyBudget(Tool):
    """What `Budget` and `AsyncBudget` share: the constructor, and plans (see `headgate._plan`)."""

    _kind = "budget"

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        name: str = "default",
        hold: float = 120.0,
        on_lost: OnLost = "charge",
        on_store_error: OnStoreError = "allow",
        inside: Self | None = None,
        clock: Clock | None = None,
        **quotas: AnyQuota,
    ) -> None:
        if on_lost not in get_args(OnLost):
            raise ValueError(f"on_lost must be one of {', '.join(get_args(OnLost))}, got {on_lost!r:.80}")
        if inside is not None and not isinstance(inside, type(self)):
            raise TypeError(f"inside must be a {type(self).__name__}, got {type(inside).__name__}")
        if inside is not None and (store is not None or clock is not None):
            raise ValueError("a budget inside another one is on the same store: give store and clock to the outer one")
        check_policy(on_store_error)
        check_ttl("hold", hold)
        check_key(name, "name")
        outer = inside._levels if inside else ()
        self._levels: tuple[tuple[str, dict[str, AnyQuota]], ...] = (*outer, (name, quotas))
        self._amounts = Amounts([quotas for _, quotas in self._levels])
        if inside:
            for name_, money in zip(inside._amounts.names, inside._amounts.money, strict=True):
                if money != self._amounts.money[self._amounts.numbers[name_]]:
                    raise ValueError(f"{name_} must be money on all levels or on none: write each quota with a point")
            self.name, self._runner, self._watched = name, inside._runner, inside._watched
        else:
            self._set_up(budget_machine(name), name, store or "memory://", clock)
        self._terms = BudgetTerms(self._runner, hold, on_lost, on_store_error, len(self._amounts.names))
        amounts = AmountSamples(self._terms.totals, self._amounts.read)
        self._watched_amounts = watch("budget", name, self._labels(), amounts)
        self._subjects: OrderedDict[Keys, BudgetSubject] = OrderedDict()

    def _gauges(self) -> Iterator[Sample]:
        yield from super()._gauges()
        yield Sample("headgate.budget.holds", (), len(self._terms.open_holds))

    def _subject(self, key: Keys) -> BudgetSubject:
        if type(key) is str and (known := self._subjects.get(key)):
            return known
        index = tuple(key) if isinstance(key, Sequence) and not isinstance(key, str) else check_key(key)
        known = self._subjects.get(index)
        if known is None:
            known = self._subjects[index] = self._new_subject([index] if isinstance(index, str) else list(index))
            if len(self._subjects) > MAX_SUBJECTS:
                self._subjects.popitem(last=False)
        return known

    def _new_subject(self, keys: list[str]) -> BudgetSubject:
        depth = len(self._levels)
        if depth > 1 and len(keys) != depth:
            shown = " > ".join(name for name, _ in self._levels)
            raise ValueError(f"this budget takes a list of {depth} keys, for {shown}; got {keys!r:.80}")
        if not 1 <= len(keys) <= MAX_LEVELS:
            raise ValueError(f"a hierarchy has 1 to {MAX_LEVELS} keys, the outermost first, got {len(keys)}")
        keys = [check_key(key) for key in keys]
        names = [name for name, _ in self._levels] if depth > 1 else [self.name] * len(keys)
        levels, path = [ROOT], ""
        for key, name in zip(keys[1:], names[1:], strict=True):
            path += "/" * bool(path) + (quote(name, safe="") + ":" if depth > 1 else "") + quote(key, safe="")
            levels.append(path)
        amounts = self._amounts if depth > 1 or len(keys) == 1 else Amounts([self._levels[0][1]] * len(keys))
        runner = self._runner.for_state(keys[0], path)
        subject = BudgetSubject(runner, amounts, levels, " > ".join(keys))
        subject.calls = None if self._for_tasks else server_calls(subject, self._terms)
        return subject

    def _runner_of(self, key: Keys | None) -> Runner:
        return self._runner if key is None else self._subject(key).runner

    def _reserve_plan(self, new_ticket: Callable[[], Ticket], hold: Any) -> Plan[Any]:
        try:
            if (yield from wait_in_queue(hold._subject.runner, new_ticket, hold._attempt, hold._until)):
                return hold
            yield from hold._leave_queue()
            raise hold._refused()
        except BaseException:
            hold._withdraw()
            raise

    def _remaining_plan(self, key: Keys) -> Plan[dict[str, int | Decimal]]:
        subject = self._subject(key)
        operation = subject.operation("available", "", None)
        try:
            available = yield operation
        except StoreUnavailable:
            policy = self._terms.on_store_error
            if policy == "raise":
                raise
            if policy == "local":
                available = subject.ask_locally(operation, len(subject.amounts.buckets))
            else:
                available = [0 if policy == "deny" else bucket.room for bucket in subject.amounts.buckets]
        return subject.amounts.read(subject.amounts.least(available))

    def _pause_plan(self, key: Keys, seconds: float, names: tuple[str, ...]) -> Plan[None]:
        subject, duration = self._subject(key), round(check_seconds_or_0("seconds", seconds) * MICROSECONDS)
        chosen = {subject.amounts.number(name) for name in names or subject.amounts.names}
        buckets = [bucket for bucket in subject.amounts.buckets if bucket.amount in chosen]
        units = packed([min(bucket.rate * duration, MOST) for bucket in buckets])
        try:
            yield Operation("pause", ("", subject.spec_of(buckets), units, duration))
        except StoreUnavailable:
            if self._terms.on_store_error == "raise":
                raise

    @property
    def capacity(self) -> dict[str, int | Decimal]:
        """The most that can be reserved of each amount at once."""
        return self._amounts.read(self._amounts.capacities)

    def _unsettled_plan(self, key: Keys | None) -> Plan[list[UnsettledHold]]:
        if key is None:
            self._terms.forget_expired()
            now = self._terms.clock.now()
            holds = list(self._terms.open_holds.values())
            return [UnsettledHold(hold.id, hold.reserved, (hold.ends_at - now) / MICROSECONDS) for hold in holds]
        subject = self._subject(key)
        reply = yield subject.operation("holds", "", None)
        found = []
        for id, left, units in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
            values = subject.amounts.values([int(held) for held in units.split(" ")])
            found.append(UnsettledHold(str(id).rpartition("\n")[2], subject.amounts.read(values), left / MICROSECONDS))
        return found


class Budget(_AnyBudget, ThreadTool):
    """Amounts that are reserved together before a call, and settled when its cost is known. Shared by processes.

    Args:
        store: a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
        name: tells budgets on one store apart; budgets of one name and the same quotas share their state
        hold: seconds after which a hold that was not settled is lost; one that spends is kept
        on_lost: what a lost hold costs: ``charge``, all of it, as its call may have been made; ``spent``, what it had
            reported as spent when it last reserved more; ``release``, nothing
        on_store_error: ``allow``, ``deny``, ``local`` (a budget in this process decides) or ``raise``
        inside: a budget around this one: `reserve` takes a key for each, from the outermost to the innermost
        clock: a `headgate.testing.ManualClock`, in tests
        **quotas: an amount each: ``requests="500/minute"``, ``usd=["5/hour", "50/day"]``
    """

    def reserve(self, key: Keys, id: str | None = None, timeout: float | None = None, **amounts: Amount) -> Hold:
        """Reserve all *amounts* or none; wait in line for them.

        First come, first served: no small reservation overtakes a large one that waits for the same amounts.

        Args:
            key: the client's; of a hierarchy a list, from the outermost to the innermost
            id: makes it idempotent: a hold with this id that is not settled is given again, and not held twice
            timeout: seconds; 0 does not wait, None waits for ever
            **amounts: what to reserve of each amount

        Raises:
            RateLimited: *timeout* is over; nothing is reserved
            PermitsExceedLimit: more than the budget can ever have
        """
        subject = self._subject(key)
        check_any_timeout(timeout)
        hold = Hold(self._terms, subject, id, amounts)
        if not hold._is_granted(timeout) and not hold._reserve_at_server():
            subject.runner.run(self._reserve_plan(subject.runner.ticket, hold))
        return hold

    def remaining(self, key: Keys) -> dict[str, int | Decimal]:
        """What could be reserved of each amount now; 0 if there is a debt. One round trip.

        Args:
            key: the client's; of a hierarchy a list, from the outermost to the innermost
        """
        return self._runner_of(key).run(self._remaining_plan(key))

    def pause(self, key: Keys, seconds: float, *names: str) -> None:
        """Let nothing be reserved for so many *seconds*, of all amounts or of those named: the server said so.

        Args:
            key: the client's; of a hierarchy a list, from the outermost to the innermost
            seconds: how long
            *names: of the amounts; none: all of them
        """
        self._runner_of(key).run(self._pause_plan(key, seconds, names))

    def unsettled(self, key: Keys | None = None) -> list[UnsettledHold]:
        """The live holds of *key* in the store; without one, those of this process, which asks no store.

        Args:
            key: the client's; of a hierarchy a list, from the outermost to the innermost; None: all keys of this
                process
        """
        return self._runner_of(key).run(self._unsettled_plan(key))


class AsyncBudget(_AnyBudget, AsyncTool):
    """`Budget` for asyncio: the same arguments, the same methods, awaited.

    async with llm.reserve("tenant:7", requests=1, tokens=2700, timeout=30.0) as hold:
        await hold.settle(tokens=2515)
    """

    def reserve(
        self, key: Keys, id: str | None = None, timeout: float | None = None, **amounts: Amount
    ) -> Acquiring[AsyncHold]:
        """Reserve all *amounts* or none; wait in line for them. See `Budget.reserve`."""
        return Acquiring(self._reserve(key, id, timeout, amounts))

    async def _reserve(self, key: Keys, id: str | None, timeout: float | None, amounts: dict[str, Amount]) -> AsyncHold:
        subject = self._subject(key)
        check_any_timeout(timeout)
        hold = AsyncHold(self._terms, subject, id, amounts)
        if not hold._is_granted(timeout):
            await subject.runner.arun(self._reserve_plan(subject.runner.async_ticket, hold))
        return hold

    async def remaining(self, key: Keys) -> dict[str, int | Decimal]:
        """What could be reserved of each amount now; 0 if there is a debt. One round trip."""
        return await self._runner_of(key).arun(self._remaining_plan(key))

    async def pause(self, key: Keys, seconds: float, *names: str) -> None:
        """Let nothing be reserved for so many *seconds*, of all amounts or of those named: the server said so."""
        await self._runner_of(key).arun(self._pause_plan(key, seconds, names))

    async def unsettled(self, key: Keys | None = None) -> list[UnsettledHold]:
        """The live holds of *key* in the store; without one, those of this process, which asks no store."""
        return await self._runner_of(key).arun(self._unsettled_plan(key))
