"""A circuit breaker that a fleet shares: what one worker learns of a sick server, all know.

    breaker = CircuitBreaker("api.example.com", store="redis://...")
    with breaker:
        call()

CLOSED lets everybody through; `failures` in a row open it. OPEN refuses everybody, with `CircuitOpen`, for `open_for`
seconds. HALF_OPEN lets a few probes through, never more at once in the whole fleet than it needs successes to close; a
failure opens it again. A probe holds its place for a lease, so one that dies frees it.

A result counts for the state in which its call began: each change of state has a number, and a result that comes with
an older one is dropped. When Redis does not answer, a breaker of the same rules in this process decides.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast, overload

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.active_calls import ActiveCalls, Admission
from headgate.coordination.arguments import count, is_async, seconds
from headgate.coordination.feedback import ExceptionClassifier, Ignore
from headgate.coordination.site import Plan, Site
from headgate.coordination.states.breaker import BREAKER
from headgate.coordination.states.machine import Operation
from headgate.errors import CircuitOpen, StoreUnavailable
from headgate.stores.base import Store

if TYPE_CHECKING:
    from headgate.coordination.redis import Redis

logger = logging.getLogger("headgate")

P = ParamSpec("P")
T = TypeVar("T")

Listener = Callable[[str, str, str], object]  # name, the state before, the state now


class Plans:
    """What both breakers do."""

    def __init__(
        self,
        name: str,
        store: str | Store,
        failures: int,
        open_for: float,
        successes: int,
        lease: float,
        rate: float | None,
        window: float,
        min_calls: int,
        ignore: Ignore,
        on_change: Listener | None,
        clock: Clock | None,
    ) -> None:
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1):
            raise ValueError(f"rate must be a share of failures between 0 and 1, such as 0.5, got {rate!r}")
        self.lease = round(seconds("lease", lease) * MICROSECONDS)
        self.rules = (
            count("failures", failures),
            round(seconds("open_for", open_for) * MICROSECONDS),
            count("successes", successes),
            self.lease,
            0 if rate is None else max(round(rate * 1_000_000), 1),
            round(seconds("window", window) * MICROSECONDS),
            count("min_calls", min_calls),
        )
        self.site = Site(BREAKER, name, store, clock)
        if on_change is not None and (not callable(on_change) or is_async(on_change)):
            raise ValueError(f"on_change must be a function of name, state before and state now, got {on_change!r:.80}")
        self._classifier = ExceptionClassifier(name, ignore)
        self._on_change = on_change
        self.calls = ActiveCalls((self.site.place, name))
        self._alone = False  # since Redis did not answer

    def admit(self) -> Plan[None]:
        layer, now = self.calls.current(), self.site.clock.now()
        if layer and now < layer.call.until:
            self.calls.enter_again(layer.call)
            return
        id, process = secrets.token_hex(8), os.getpid()
        try:
            reply, local = yield from self._ask("admit", id)
        except BaseException:  # cancelled: a probe that nobody will make
            step = Operation("report", (id, -1, "ignored", *self.rules))
            self.site.insist(step, self.site.clock.now() + self.lease, process)
            raise
        allowed, _, number, _, wait, *_ = reply
        if not allowed:
            raise CircuitOpen(self.site.name, max(wait, 1) / MICROSECONDS)
        self.calls.enter(Admission(id, number, local), now + self.lease)

    def leave(self, error: BaseException | None) -> Plan[None]:
        """End a layer of a call. The outermost one reports what the call says about the server."""
        layer = self.calls.leave()
        if layer is None:
            raise RuntimeError(f"the circuit breaker {self.site.name!r} was left more often than entered")
        outcome = self._classifier.outcome(error)
        if isinstance(error, CircuitOpen) and error.name == self.site.name:
            outcome = "refused"  # a part of this call that runs elsewhere found all probes taken, one of them by us
        if outcome != "failure" and layer.inner_outcome:
            outcome = layer.inner_outcome
        if not layer.is_outermost:
            if (outer := self.calls.current()) and outer.call is layer.call:
                outer.inner_outcome = outcome
        elif layer.call.admission is not None:  # else its result was recorded on the way
            yield from self._report(layer.call.admission, outcome)

    def record(self, outcome: str) -> Plan[None]:
        layer, admission = self.calls.current(), None
        if layer:
            admission, layer.call.admission = layer.call.admission, None
        yield from self._report(admission or Admission(secrets.token_hex(8), -1, False), outcome)

    def state(self) -> Plan[str]:
        reply, _ = yield from self._ask("peek", "")
        return str(reply[1])

    def failure_count(self) -> Plan[int]:
        reply, _ = yield from self._ask("peek", "")
        return int(reply[6])

    def recover(self) -> Plan[bool]:
        reply, _ = yield from self._ask("recover", secrets.token_hex(8))
        return bool(reply[0])

    def force(self, state: str) -> Plan[None]:
        yield from self._ask("force", secrets.token_hex(8), outcome=state)

    def _report(self, admission: Admission, outcome: str) -> Plan[None]:
        if admission.local:
            self._locally("report", admission.id, admission.number, outcome)
            return
        process = os.getpid()
        try:
            yield from self._ask("report", admission.id, admission.number, outcome)
        except BaseException:
            step = Operation("report", (admission.id, admission.number, outcome, *self.rules))
            self.site.insist(step, self.site.clock.now() + self.lease, process)
            raise

    def _ask(self, op: str, id: str, number: int = -1, outcome: str = "") -> Plan[tuple[list[Any], bool]]:
        local = False
        try:
            if self._alone:
                # one that is read-only answers many steps, so it is asked for one that writes, and changes nothing
                yield Operation("report", (secrets.token_hex(8), -1, "ignored", *self.rules))
                self._alone = False
                logger.warning("circuit breaker %r is with the others again", self.site.name)
                self._locally("force", secrets.token_hex(8), -1, "")  # what was learned alone was about that time
            reply = yield Operation(op, (id, number, outcome, *self.rules))
        except StoreUnavailable as error:
            if not self._alone:
                logger.warning("circuit breaker %r goes on alone in this process: %s", self.site.name, error)
            reply, local, self._alone = self._locally(op, id, -1, outcome), True, True
        if reply[5]:
            self._tell(reply[5], reply[1])
        return reply, local

    def _locally(self, op: str, id: str, number: int, outcome: str) -> list[Any]:
        place = cast("Redis", self.site.place)  # memory always answers
        return place.fallback.step(BREAKER, self.site.name, Operation(op, (id, number, outcome, *self.rules)))

    def _tell(self, was: str, now: str) -> None:
        logger.warning("circuit breaker %r: %s, was %s", self.site.name, now, was)
        if self._on_change:
            try:
                self._on_change(self.site.name, was, now)
            except Exception:
                logger.exception("on_change of the circuit breaker %r failed", self.site.name)


def _check_function(function: object) -> None:
    """Refuse to decorate what would run after its call is over, when the breaker has heard of a success."""
    if not callable(function):
        raise TypeError(f"a circuit breaker decorates a function, got {function!r:.80}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function!r:.80} is a generator: use the breaker in it, with a `with` block")


class CircuitBreaker:
    """A circuit breaker that threads and processes share.

    name       what may be sick
    store      a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
    failures   in a row, by anybody, that open it
    open_for   seconds that it stays open
    successes  of probes that close it; as many at once at most
    lease      seconds that a probe may take before another may be made in its place
    rate       instead of failures in a row: the share of them, such as 0.5, among the calls of the last *window*
               seconds that opens it, once there are *min_calls*
    ignore     exceptions that count for nothing: a type, a tuple of types, or a function that says so. Cancellation
               never counts, nor does what headgate raises itself
    on_change  called with name, state before and state now, once in the fleet for each change
    clock      a `headgate.testing.ManualClock`, in tests
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        failures: int = 3,
        open_for: float = 600.0,
        successes: int = 3,
        lease: float = 30.0,
        rate: float | None = None,
        window: float = 60.0,
        min_calls: int = 20,
        ignore: Ignore = (),
        on_change: Listener | None = None,
        clock: Clock | None = None,
    ) -> None:
        rules = (failures, open_for, successes, lease, rate, window, min_calls)
        self._plans = Plans(name, store, *rules, ignore, on_change, clock)
        self._plans.site.place.check(tasks=False)
        self.name = name

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self._plans.site!r}>"

    @property
    def state(self) -> str:
        """CLOSED, OPEN or HALF_OPEN. One that could recover stays OPEN until somebody tries."""
        return self._run(self._plans.state())

    @property
    def failure_count(self) -> int:
        """Failures in a row so far; 0 while the breaker is not CLOSED, or where *rate* counts instead."""
        return self._run(self._plans.failure_count())

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call *function* through the breaker."""
        if is_async(function):
            raise TypeError(f"{function!r:.80} is async, and would be awaited outside: use AsyncCircuitBreaker")
        with self:
            return function(*args, **kwargs)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate a plain function: each call of it goes through the breaker."""
        _check_function(function)
        if is_async(function):
            raise TypeError(f"{function!r:.80} is async, and would be awaited outside: use AsyncCircuitBreaker")

        @functools.wraps(function)
        def through_breaker(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return through_breaker

    def record_success(self) -> None:
        """Count a success; within ``with``, as the result of this call."""
        self._run(self._plans.record("success"))

    def record_failure(self) -> None:
        """Count a failure; within ``with``, as the result of this call: for bad answers that are no exceptions."""
        self._run(self._plans.record("failure"))

    def try_recover(self) -> bool:
        """Go from OPEN to HALF_OPEN if the time has come; whether it did."""
        return self._run(self._plans.recover())

    def force_open(self) -> None:
        """Let nobody through until `reset` or `force_closed`."""
        self._run(self._plans.force("OPEN"))

    def force_closed(self) -> None:
        """Let everybody through, whatever fails, until `reset` or `force_open`."""
        self._run(self._plans.force("CLOSED"))

    def reset(self) -> None:
        """Begin anew: CLOSED, nothing counted, nothing forced."""
        self._run(self._plans.force(""))

    def close(self) -> None:
        """Let go of the connections, which all tools on this store share; the next call makes new ones."""
        self._plans.site.place.close()

    def __enter__(self) -> Self:
        self._run(self._plans.admit())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._plans.leave(error))

    def _run(self, plan: Plan[T]) -> T:
        return self._plans.site.run(lambda _: plan)


class AsyncCircuitBreaker:
    """`CircuitBreaker` for asyncio: the same arguments, the same methods, awaited (``await breaker.state``, too)."""

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        failures: int = 3,
        open_for: float = 600.0,
        successes: int = 3,
        lease: float = 30.0,
        rate: float | None = None,
        window: float = 60.0,
        min_calls: int = 20,
        ignore: Ignore = (),
        on_change: Listener | None = None,
        clock: Clock | None = None,
    ) -> None:
        rules = (failures, open_for, successes, lease, rate, window, min_calls)
        self._plans = Plans(name, store, *rules, ignore, on_change, clock)
        self._plans.site.place.check(tasks=True)
        self.name = name

    def __repr__(self) -> str:
        return f"<AsyncCircuitBreaker {self._plans.site!r}>"

    @property
    def state(self) -> Coroutine[Any, Any, str]:
        """CLOSED, OPEN or HALF_OPEN, awaited. One that could recover stays OPEN until somebody tries."""
        return self._run(self._plans.state())

    @property
    def failure_count(self) -> Coroutine[Any, Any, int]:
        """Failures in a row so far, awaited; 0 while the breaker is not CLOSED, or where *rate* counts instead."""
        return self._run(self._plans.failure_count())

    @overload
    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def call(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call *function* through the breaker; await what it gives, if that is to be awaited."""
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
        await self._run(self._plans.record("success"))

    async def record_failure(self) -> None:
        """Count a failure; within ``async with``, as the result of this call."""
        await self._run(self._plans.record("failure"))

    async def try_recover(self) -> bool:
        """Go from OPEN to HALF_OPEN if the time has come; whether it did."""
        return await self._run(self._plans.recover())

    async def force_open(self) -> None:
        """Let nobody through until `reset` or `force_closed`."""
        await self._run(self._plans.force("OPEN"))

    async def force_closed(self) -> None:
        """Let everybody through, whatever fails, until `reset` or `force_open`."""
        await self._run(self._plans.force("CLOSED"))

    async def reset(self) -> None:
        """Begin anew: CLOSED, nothing counted, nothing forced."""
        await self._run(self._plans.force(""))

    async def aclose(self) -> None:
        """Let go of this event loop's connections; it does so itself when it ends."""
        await self._plans.site.place.aclose()

    async def __aenter__(self) -> Self:
        await self._run(self._plans.admit())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._run(self._plans.leave(error))

    def _run(self, plan: Plan[T]) -> Coroutine[Any, Any, T]:
        return self._plans.site.arun(lambda _: plan)
