"""A circuit breaker that a fleet shares: when a server keeps failing, all workers stop calling it.

    breaker = CircuitBreaker("api.example.com", store="redis://...")
    with breaker:
        call()

CLOSED admits all calls; `failures` in a row open it. OPEN refuses all, with `CircuitOpen`, for `open_for` seconds.
HALF_OPEN admits a few probes, never more at once in the whole fleet than it needs successes to close; a failure opens
it again. A probe holds its place for a lease at most, so the place of a process that died is free again.

Each change of state begins a new generation, and a result counts only in the generation in which its call began. When
Redis does not answer, a breaker with the same rules in this process decides.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, overload

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.active_calls import ActiveCalls, Admission
from headgate.coordination.arguments import check_count, check_seconds, is_async
from headgate.coordination.feedback import ExceptionClassifier, ExceptionKinds
from headgate.coordination.runner import AsyncTool, Plan, ThreadTool, Tool
from headgate.coordination.states.breaker import ANY_GENERATION, BREAKER
from headgate.coordination.states.machine import Operation
from headgate.errors import CircuitOpen, StoreUnavailable
from headgate.stores.base import Store
from headgate.telemetry.watching import Sample

logger = logging.getLogger("headgate")

P = ParamSpec("P")
T = TypeVar("T")

Listener = Callable[[str, str, str], object]  # name, the state before, the state now


class _AnyCircuitBreaker(Tool):
    """What `CircuitBreaker` and `AsyncCircuitBreaker` share: the constructor, and plans (see `headgate._plan`)."""

    _kind = "breaker"

    def __init__(
        self,
        name: str,
        *,
        failures: int = 3,
        open_for: float = 600.0,
        successes: int = 3,
        lease: float = 30.0,
        rate: float | None = None,
        window: float = 60.0,
        min_calls: int = 20,
        ignore: ExceptionKinds = (),
        on_change: Listener | None = None,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1):
            raise ValueError(f"rate must be a share of failures between 0 and 1, such as 0.5, got {rate!r}")
        self._lease = round(check_seconds("lease", lease) * MICROSECONDS)
        self._rules = (
            check_count("failures", failures),
            round(check_seconds("open_for", open_for) * MICROSECONDS),
            check_count("successes", successes),
            self._lease,
            0 if rate is None else max(round(rate * 1_000_000), 1),
            round(check_seconds("window", window) * MICROSECONDS),
            check_count("min_calls", min_calls),
        )
        self._set_up(BREAKER, name, store, clock)
        self._clock = self._runner.clock
        if on_change is not None and (not callable(on_change) or is_async(on_change)):
            raise ValueError(f"on_change must be a function of name, state before and state now, got {on_change!r:.80}")
        self._on_change = on_change
        self._classifier = ExceptionClassifier(name, ignore)
        self._calls = ActiveCalls((self._runner.backend, name))
        self._seen = "CLOSED"  # the state that a reply named last, for telemetry
        self._alone = False  # True: the store did not answer, and this process decides alone

    def _admit_plan(self) -> Plan[None]:
        layer, now = self._calls.current(), self._clock.now()
        if layer and now < layer.call.until:
            self._calls.enter_again(layer.call)
            return
        id, process = secrets.token_hex(8), os.getpid()
        try:
            reply, local = yield from self._ask("admit", id)
        except BaseException:  # such as a cancellation: give back the probe that may have been admitted
            report = self._operation("report", id, outcome="ignored")
            self._runner.retry_in_background(report, self._clock.now() + self._lease, process)
            raise
        allowed, _, generation, _, wait, *_ = reply
        if not allowed:
            self._count("refused")
            raise CircuitOpen(self.name, max(wait, 1) / MICROSECONDS)
        self._calls.enter(Admission(id, generation, local), now + self._lease)

    def _leave_plan(self, error: BaseException | None) -> Plan[None]:
        """End a layer of a call. The outermost one reports what the call says about the server."""
        layer = self._calls.leave()
        if layer is None:
            raise RuntimeError(f"the circuit breaker {self.name!r} was left more often than entered")
        outcome = self._classifier.outcome(error)
        if isinstance(error, CircuitOpen) and error.name == self.name:
            outcome = "refused"  # a part of this call in another thread or process found all probes taken, one by us
        if outcome != "failure" and layer.inner_outcome:
            outcome = layer.inner_outcome
        if not layer.is_outermost:
            if (outer := self._calls.current()) and outer.call is layer.call:
                outer.inner_outcome = outcome
        elif layer.call.admission is not None:  # None: `record_success` or `record_failure` reported it
            yield from self._report(layer.call.admission, outcome)

    def _record_plan(self, outcome: str) -> Plan[None]:
        layer, admission = self._calls.current(), None
        if layer:
            admission, layer.call.admission = layer.call.admission, None
        yield from self._report(admission or Admission(secrets.token_hex(8), ANY_GENERATION, False), outcome)

    def _state_plan(self) -> Plan[str]:
        reply, _ = yield from self._ask("peek", "")
        return str(reply[1])

    def _failure_count_plan(self) -> Plan[int]:
        reply, _ = yield from self._ask("peek", "")
        return int(reply[6])

    def _recover_plan(self) -> Plan[bool]:
        reply, _ = yield from self._ask("recover", secrets.token_hex(8))
        return bool(reply[0])

    def _force_plan(self, state: str) -> Plan[None]:
        yield from self._ask("force", secrets.token_hex(8), outcome=state)

    def _gauges(self) -> Iterator[Sample]:
        for state in ("CLOSED", "OPEN", "HALF_OPEN"):
            yield Sample("headgate.breaker.state", (("state", state.lower()),), int(state == self._seen))

    def _count(self, outcome: str) -> None:
        self._runner.counts.add(("headgate.breaker.calls", (("outcome", outcome),)))

    def _report(self, admission: Admission, outcome: str) -> Plan[None]:
        self._count("ignored" if outcome == "refused" else outcome)
        if admission.local:
            self._locally("report", admission.id, admission.generation, outcome)
            return
        process = os.getpid()
        try:
            yield from self._ask("report", admission.id, admission.generation, outcome)
        except BaseException:
            report = self._operation("report", admission.id, admission.generation, outcome)
            self._runner.retry_in_background(report, self._clock.now() + self._lease, process)
            raise

    def _ask(
        self, op: str, id: str, generation: int = ANY_GENERATION, outcome: str = ""
    ) -> Plan[tuple[list[Any], bool]]:
        """Run an operation, or decide locally while the store does not answer; the reply, and whether it is local."""
        local = False
        try:
            if self._alone:
                # A read-only Redis answers what only reads, so try an operation that may write, and changes nothing.
                yield self._operation("report", secrets.token_hex(8), outcome="ignored")
                self._alone = False
                logger.warning("circuit breaker %r shares its state again", self.name)
                self._locally("force", secrets.token_hex(8))  # start afresh when the store fails again
            reply = yield self._operation(op, id, generation, outcome)
        except StoreUnavailable as error:
            if not self._alone:
                logger.warning("circuit breaker %r decides alone in this process: %s", self.name, error)
            reply, local, self._alone = self._locally(op, id, outcome=outcome), True, True
        self._seen = str(reply[1])
        if reply[5]:
            self._runner.counts.add(("headgate.breaker.changes", ()))
            self._announce(reply[5], reply[1])
        return reply, local

    def _locally(self, op: str, id: str, generation: int = ANY_GENERATION, outcome: str = "") -> list[Any]:
        operation = self._operation(op, id, generation, outcome)
        return self._runner.backend.local_states.run(BREAKER, self.name, operation)

    def _operation(self, op: str, id: str, generation: int = ANY_GENERATION, outcome: str = "") -> Operation:
        return Operation(op, (id, generation, outcome, *self._rules))

    def _announce(self, was: str, now: str) -> None:
        logger.warning("circuit breaker %r: %s, was %s", self.name, now, was)
        if self._on_change:
            try:
                self._on_change(self.name, was, now)
            except Exception:
                logger.exception("on_change of the circuit breaker %r failed", self.name)


def _check_function(function: object) -> None:
    """Raise for a generator: its body runs after the call has returned, which the breaker counts as a success."""
    if not callable(function):
        raise TypeError(f"a circuit breaker decorates a function, got {function!r:.80}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{function!r:.80} is a generator: use `with breaker` around each request in it, without a yield inside"
        )


class CircuitBreaker(_AnyCircuitBreaker, ThreadTool):
    """A circuit breaker that threads and processes share.

    Args:
        name: of the server that is called, or of a part of it
        store: a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
        failures: in a row, in the whole fleet, that open it
        open_for: seconds that it stays open
        successes: of probes that close it; also how many probes may run at once
        lease: seconds that a probe may take before another may be made in its place
        rate: instead of failures in a row: the share of failures, such as 0.5, that opens it
        window: seconds whose calls *rate* looks at
        min_calls: how many there must have been of them
        ignore: exceptions that count for nothing: a type, a tuple of types, or a function that returns True for them. A
            cancellation never counts, nor does an exception of headgate itself
        on_change: called with name, state before and state now, once in the fleet for each change
        clock: a `headgate.testing.ManualClock`, in tests
    """

    @property
    def state(self) -> str:
        """CLOSED, OPEN or HALF_OPEN. After *open_for* it is still OPEN until the next call."""
        return self._runner.run(self._state_plan())

    @property
    def failure_count(self) -> int:
        """Failures in a row so far; 0 while the breaker is not CLOSED, or where *rate* counts instead."""
        return self._runner.run(self._failure_count_plan())

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call *function* through the breaker.

        Args:
            function: what to call
            *args: its arguments
            **kwargs: its named arguments

        Raises:
            CircuitOpen: the breaker rejects the call
        """
        if is_async(function):
            raise TypeError(f"{function!r:.80} is async: use AsyncCircuitBreaker")
        with self:
            return function(*args, **kwargs)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate a plain function: each call of it goes through the breaker."""
        _check_function(function)
        if is_async(function):
            raise TypeError(f"{function!r:.80} is async: use AsyncCircuitBreaker")

        @functools.wraps(function)
        def through_breaker(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return through_breaker

    def record_success(self) -> None:
        """Count a success; within ``with``, as the result of this call."""
        self._runner.run(self._record_plan("success"))

    def record_failure(self) -> None:
        """Count a failure; within ``with``, as the result of this call: for bad answers that raise nothing."""
        self._runner.run(self._record_plan("failure"))

    def try_recover(self) -> bool:
        """Go from OPEN to HALF_OPEN if *open_for* is over; whether it did."""
        return self._runner.run(self._recover_plan())

    def force_open(self) -> None:
        """Refuse all calls until `reset` or `force_closed`."""
        self._runner.run(self._force_plan("OPEN"))

    def force_closed(self) -> None:
        """Admit all calls, even if they fail, until `reset` or `force_open`."""
        self._runner.run(self._force_plan("CLOSED"))

    def reset(self) -> None:
        """Make it CLOSED, with nothing counted and nothing forced."""
        self._runner.run(self._force_plan(""))

    def __enter__(self) -> Self:
        self._runner.run(self._admit_plan())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.run(self._leave_plan(error))


class AsyncCircuitBreaker(_AnyCircuitBreaker, AsyncTool):
    """`CircuitBreaker` for asyncio: the same arguments, the same methods, awaited (``await breaker.state``, too)."""

    @property
    def state(self) -> Coroutine[Any, Any, str]:
        """CLOSED, OPEN or HALF_OPEN, awaited. After *open_for* it is still OPEN until the next call."""
        return self._runner.arun(self._state_plan())

    @property
    def failure_count(self) -> Coroutine[Any, Any, int]:
        """Failures in a row so far, awaited; 0 while the breaker is not CLOSED, or where *rate* counts instead."""
        return self._runner.arun(self._failure_count_plan())

    @overload
    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def call(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call *function* through the breaker; await its result if that is awaitable."""
        async with self:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    def __call__(self, function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Decorate an async function: each call of it goes through the breaker."""
        _check_function(function)
        if not is_async(function):
            raise TypeError(f"{function!r:.80} is not async: use CircuitBreaker for it")

        @functools.wraps(function)
        async def through_breaker(*args: P.args, **kwargs: P.kwargs) -> T:
            async with self:
                return await function(*args, **kwargs)

        return through_breaker

    async def record_success(self) -> None:
        """Count a success; within ``async with``, as the result of this call."""
        await self._runner.arun(self._record_plan("success"))

    async def record_failure(self) -> None:
        """Count a failure; within ``async with``, as the result of this call."""
        await self._runner.arun(self._record_plan("failure"))

    async def try_recover(self) -> bool:
        """Go from OPEN to HALF_OPEN if *open_for* is over; whether it did."""
        return await self._runner.arun(self._recover_plan())

    async def force_open(self) -> None:
        """Refuse all calls until `reset` or `force_closed`."""
        await self._runner.arun(self._force_plan("OPEN"))

    async def force_closed(self) -> None:
        """Admit all calls, even if they fail, until `reset` or `force_open`."""
        await self._runner.arun(self._force_plan("CLOSED"))

    async def reset(self) -> None:
        """Make it CLOSED, with nothing counted and nothing forced."""
        await self._runner.arun(self._force_plan(""))

    async def __aenter__(self) -> Self:
        await self._runner.arun(self._admit_plan())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._runner.arun(self._leave_plan(error))
