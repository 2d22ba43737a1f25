"""One rule of a limiter on one server: each call checks its arguments, asks the server, or lets the fallback answer.

The calls are plans (see `headgate._plan`). A store adds two classes: one runs the plans for threads, one for asyncio.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple, Protocol, Self

from headgate._plan import arun, run
from headgate.algorithms.booking import BOOKED, KNOWN, Booked, Booking
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision, decision
from headgate.errors import StoreUnavailable
from headgate.fallback import Fallback
from headgate.keys import check_key
from headgate.rule import Rule, check_permits
from headgate.stores.base import StoreHealth
from headgate.stores.breaker import Breaker
from headgate.telemetry.counts import DecisionCounts
from headgate.telemetry.watching import Watched


class LimiterCall(NamedTuple):
    """A call of a limiter: take, peek, refund, reset or charge; ``take:200000`` leaves a fifth of the capacity."""

    op: str
    key: str
    permits: int


def share_of(op: str) -> int:
    """The millionths of the capacity that a take leaves."""
    return int(op[5:] or 0)


class RuleScript(Protocol):
    """What a server runs for a rule."""

    capacity: int

    def decision(self, reply: Any) -> Decision: ...


class RuleBookings(Protocol):
    """What a server runs for the bookings of a rule, and to reset a key with its slots."""

    def booked(self, reply: Any, within: int) -> Booked: ...


class ServerExecutor(Protocol):
    """What makes calls to a server, from threads or from an event loop."""

    timeout: float

    def plan(self, script: Any, call: Any, time_limit: float | None) -> Generator[Any, Any, Any]:
        """The reply to *call*; raises at once while the breaker is open. *time_limit*: None for the time-out."""
        ...

    def answer(self, request: Any) -> Any:
        """Do what the plan requests; to be awaited in an event loop."""
        ...

    def breakers(self) -> list[Breaker]: ...


class ServerStore(Protocol):
    """A store on a server, as its backends need it."""

    clock: Clock | None

    def sync_executor(self) -> Any: ...
    def async_executor(self) -> Any: ...
    def latest_executor(self) -> Any:
        """That of the running event loop, or of the last event loop that had one."""
        ...


class RuleOnServer:
    """What the backends of a store share: the rule's script, its fallback, and the plans of its calls."""

    in_process = False
    store_errors: tuple[type[Exception], ...] = (OSError,)  # of a call, all of which `on_store_error` answers
    refusals: type[Exception] = OSError  # those with which the server answered
    unsent: type[Exception] = ConnectionError  # those of a call that never left this process

    def __init__(self, store: ServerStore, rule: Rule, on_store_error: str) -> None:
        self.clock = store.clock or SYSTEM_CLOCK
        self.script: RuleScript
        self.booking: RuleBookings | None = None  # None: this store keeps no slots
        self.fallback = Fallback(on_store_error, rule, store.clock)
        self.counts = DecisionCounts()
        self.watched: Watched | None = None
        self._store = store
        self.time_limit: float | None = None  # seconds for a call; None: the store's time-out

    def refused(self, error: Exception) -> bool:
        """Whether the server answered, with an error."""
        return isinstance(error, self.refusals)

    def may_have_run(self, error: Exception) -> bool:
        """Whether the server may have run the call although no reply came."""
        return not isinstance(error, (self.refusals, self.unsent))

    def with_timeout(self, seconds: float) -> Self:
        """The same backend with *seconds* for a call, if that is less than the store's time-out."""
        other = copy.copy(self)
        other.time_limit = seconds
        return other

    def _take(self, executor: ServerExecutor, key: str, permits: int, share: int = 0) -> Generator[Any, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity)
        fallback, time_limit = self.fallback, self.time_limit
        op = f"take:{share}" if share else "take"
        try:
            if fallback.debts and (debt := fallback.take_debt(key)):
                time_limit = yield from self.charge(executor, key, debt, time_limit)
            reply = yield from executor.plan(self.script, LimiterCall(op, key, permits), time_limit)
        except self.store_errors as error:
            refused, unsure = self.refused(error), self.may_have_run(error)
            with self.counted_failure():
                made = fallback.take(key, permits, error, refused=refused, unsure=unsure, share=share)
            self.counts.add(made, permits)
            return made
        if fallback.refused_at:
            fallback.record_success()
        made = self.script.decision(reply)
        self.counts.add(made, permits)
        if fallback.local:
            fallback.follow_store(key, made)
        return made

    def charge(
        self, executor: ServerExecutor, key: str, debt: int, time_limit: float | None
    ) -> Generator[Any, Any, float]:
        """Charge what was granted in an outage, once at most; returns the seconds that are left for the check."""
        begun = monotonic()
        try:
            yield from executor.plan(self.script, LimiterCall("charge", key, debt), time_limit)
        except self.unsent:
            self.fallback.record_debt(key, debt)  # it was not sent
            raise
        return max((time_limit or executor.timeout) - (monotonic() - begun), 0.001)

    def _peek(self, executor: ServerExecutor, key: str, permits: int) -> Generator[Any, Any, Decision]:
        key, permits = check_key(key), check_permits(permits, self.script.capacity, 0)
        try:
            reply = yield from executor.plan(self.script, LimiterCall("peek", key, permits), self.time_limit)
        except self.store_errors as error:
            return self.fallback.peek(key, permits, error, refused=self.refused(error))
        if self.fallback.refused_at:
            self.fallback.record_success()
        return self.script.decision(reply)

    def _refund(self, executor: ServerExecutor, key: str, permits: int) -> Generator[Any, Any, bool]:
        key, permits = check_key(key), check_permits(permits)
        left = self.fallback.refund(key, permits)
        try:
            if left:
                yield from executor.plan(self.script, LimiterCall("refund", key, left), self.time_limit)
        except self.store_errors as error:
            self.fallback.record_failure(error, refused=self.refused(error))
            return False
        return True

    def _reset(self, executor: ServerExecutor, key: str) -> Generator[Any, Any, bool]:
        key = check_key(key)
        self.fallback.reset(key)
        try:
            if self.booking is None:
                yield from executor.plan(self.script, LimiterCall("reset", key, 1), self.time_limit)
            else:
                yield from executor.plan(self.booking, Booking("reset", key), self.time_limit)
        except self.store_errors as error:
            self.fallback.record_failure(error, refused=self.refused(error))
            return False
        return True

    @property
    def books(self) -> bool:
        return self.booking is not None

    def _book(self, executor: ServerExecutor, asked: Booking) -> Generator[Any, Any, Booked]:
        fallback, key, time_limit = self.fallback, asked.key, self.time_limit
        assert self.booking is not None, "the limiter has checked it"
        try:
            if fallback.debts and (debt := fallback.take_debt(key)):
                time_limit = yield from self.charge(executor, key, debt, time_limit)
            reply = yield from executor.plan(self.booking, asked, time_limit)
        except self.store_errors as error:
            with self.counted_failure():
                booked = fallback.book(asked, error, refused=self.refused(error), unsure=self.may_have_run(error))
            self.count_booked(asked, booked)
            return booked
        if fallback.refused_at:
            fallback.record_success()
        booked = self.booking.booked(reply, asked.within)
        self.count_booked(asked, booked)
        if fallback.local:
            fallback.follow_store(key, booked.decision)
        return booked

    def count_booked(self, asked: Booking, booked: Booked) -> None:
        """Count a booking as a decision, unless the id had a slot already."""
        if booked.outcome != KNOWN:
            made = booked.decision
            answer = decision(booked.outcome == BOOKED, made.limit, made.remaining, degraded=made.degraded)
            self.counts.add(answer, asked.permits)

    @contextmanager
    def counted_failure(self) -> Iterator[None]:
        """Count a check that raises because on_store_error is raise."""
        try:
            yield
        except StoreUnavailable:
            self.counts.fail()
            raise

    def _cancel(self, executor: ServerExecutor, key: str, id: str) -> Generator[Any, Any, bool]:
        asked = Booking("cancel", key, id)
        if self.fallback.local and self.fallback.local.cancel_slot(key, id):
            return True
        try:
            reply = yield from executor.plan(self.booking, asked, self.time_limit)
        except self.store_errors as error:
            self.fallback.record_failure(error, refused=self.refused(error))
            return False
        return bool(reply[0])

    def _health(self, executor: ServerExecutor | None) -> StoreHealth:
        """How the store has served the calls so far; sends nothing."""
        breakers = executor.breakers() if executor else []
        return StoreHealth(
            state="open" if any(breaker.open for breaker in breakers) else "closed",
            failures=max((breaker.failures for breaker in breakers), default=0),
            opened=sum(breaker.opened for breaker in breakers),
            degraded=self.fallback.answers,
            last_error=next((breaker.last_error for breaker in breakers if breaker.last_error), ""),
        )


class RuleForThreads(RuleOnServer):
    """One rule on one server, for threads."""

    def try_acquire(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.sync_executor()
        return run(self._take(executor, key, permits), executor.answer)

    def try_acquire_above(self, key: str, permits: int, share: int) -> Decision:
        executor = self._store.sync_executor()
        return run(self._take(executor, key, permits, share), executor.answer)

    def peek(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.sync_executor()
        return run(self._peek(executor, key, permits), executor.answer)

    def refund(self, key: str, permits: int = 1) -> bool:
        executor = self._store.sync_executor()
        return run(self._refund(executor, key, permits), executor.answer)

    def reset(self, key: str) -> bool:
        executor = self._store.sync_executor()
        return run(self._reset(executor, key), executor.answer)

    def book(self, asked: Booking) -> Booked:
        executor = self._store.sync_executor()
        return run(self._book(executor, asked), executor.answer)

    def cancel_slot(self, key: str, id: str) -> bool:
        executor = self._store.sync_executor()
        return run(self._cancel(executor, key, id), executor.answer)

    def store_health(self) -> StoreHealth:
        return self._health(self._store.sync_executor())


class RuleForTasks(RuleOnServer):
    """One rule on one server, for asyncio."""

    async def try_acquire(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.async_executor()
        return await arun(self._take(executor, key, permits), executor.answer)

    async def try_acquire_above(self, key: str, permits: int, share: int) -> Decision:
        executor = self._store.async_executor()
        return await arun(self._take(executor, key, permits, share), executor.answer)

    async def peek(self, key: str, permits: int = 1) -> Decision:
        executor = self._store.async_executor()
        return await arun(self._peek(executor, key, permits), executor.answer)

    async def refund(self, key: str, permits: int = 1) -> bool:
        executor = self._store.async_executor()
        return await arun(self._refund(executor, key, permits), executor.answer)

    async def reset(self, key: str) -> bool:
        executor = self._store.async_executor()
        return await arun(self._reset(executor, key), executor.answer)

    async def book(self, asked: Booking) -> Booked:
        executor = self._store.async_executor()
        return await arun(self._book(executor, asked), executor.answer)

    async def cancel_slot(self, key: str, id: str) -> bool:
        executor = self._store.async_executor()
        return await arun(self._cancel(executor, key, id), executor.answer)

    def store_health(self) -> StoreHealth:
        return self._health(self._store.latest_executor())


def binding(answers: Sequence[int]) -> tuple[int, int, int, int, int]:
    """The answer of a limiter from those of its quotas, four numbers each: the tightest quota's."""
    if len(answers) == 4:
        return (answers[0], 1, answers[1], answers[2], answers[3])
    allowed, binds, remaining, reset, retry = 1, 0, 0, 0, 0
    for i in range(0, len(answers), 4):
        ok, left, full, wait = answers[i : i + 4]
        if not binds or (allowed and (not ok or left < remaining)) or (not ok and wait > retry):
            allowed, binds, remaining, retry = ok, i // 4 + 1, left, wait
        reset = max(reset, full)
    return allowed, binds, remaining, reset, retry
