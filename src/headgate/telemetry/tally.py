"""Counts of what takes microseconds and more: calls to stores, waits, locks, pools, budgets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from types import TracebackType
from typing import Any

from headgate._mypyc import FREE_THREADED
from headgate.errors import StoreUnavailable
from headgate.telemetry.counts import AmountTotals, DecisionCounts
from headgate.telemetry.watching import Labels, Sample

Series = tuple[str, Labels]


class Tally:
    """Counters by family and labels. Adding takes a lock: about a tenth of a microsecond. Exact in every build."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in the middle of an addition
        self._values: dict[Series, float] = {}

    def add(self, series: Series, amount: float = 1) -> None:
        with self._lock:
            self._values[series] = self._values.get(series, 0) + amount

    def samples(self) -> Iterator[Sample]:
        for (family, labels), value in list(self._values.items()):
            yield Sample(family, labels, value)


class DecisionSamples:
    """The decisions of one backend, as samples."""

    def __init__(self, decisions: DecisionCounts) -> None:
        self.decisions = decisions
        self.reset = decisions.reset

    def samples(self) -> Iterator[Sample]:
        counts = self.decisions
        for result, degraded, value in (
            ("allowed", "false", counts.allowed),
            ("denied", "false", counts.denied),
            ("allowed", "true", counts.degraded_allowed),
            ("denied", "true", counts.degraded_denied),
            ("error", "true", counts.failed),
        ):
            yield Sample("headgate.decisions", (("result", result), ("degraded", degraded)), value)
        for result, allowed in (("allowed", True), ("denied", False)):
            yield Sample("headgate.permits", (("result", result),), counts.permits(allowed))


class WaitCounts:
    """Calls of a limiter that wait: how they ended, and how long they took."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.RLock()
        self.allowed = self.denied = self.ended = 0
        self.seconds = 0.0

    def add(self, result: str, begun: float) -> None:
        """Count a call that began at that time of the monotonic clock."""
        took = monotonic() - begun
        if FREE_THREADED:
            with self._lock:
                self._add(result, took)
        else:
            self._add(result, took)

    def _add(self, result: str, took: float) -> None:
        self.seconds += took
        if result == "allowed":
            self.allowed += 1
        elif result == "denied":
            self.denied += 1
        else:
            self.ended += 1

    def samples(self) -> Iterator[Sample]:
        for result in ("allowed", "denied", "ended"):
            yield Sample("headgate.waits", (("result", result),), getattr(self, result))
        yield Sample("headgate.wait.time", (), self.seconds)


class StoreCalls:
    """Calls to a store on a server, and the seconds that they took. Without a lock where the interpreter has one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.RLock()
        self.answered = self.refused = self.failed = self.skipped = self.opened = 0
        self.seconds = 0.0

    def answer(self, begun: float) -> None:
        """Count a call that began at that time of the monotonic clock and was answered."""
        took = monotonic() - begun
        if FREE_THREADED:
            with self._lock:
                self.answered += 1
                self.seconds += took
        else:
            self.answered += 1
            self.seconds += took

    def fail(self, begun: float, *, refused: bool = False) -> None:
        """Count one that was not answered, or *refused*: answered with an error."""
        took = monotonic() - begun
        with self._lock:
            if refused:
                self.refused += 1
            else:
                self.failed += 1
            self.seconds += took

    def skip(self) -> None:
        """Count a call that was not sent, as the breaker is open."""
        with self._lock:
            self.skipped += 1

    def open(self) -> None:
        """Count a breaker that has opened."""
        with self._lock:
            self.opened += 1

    def samples(self) -> Iterator[Sample]:
        for result in ("answered", "refused", "failed", "skipped"):
            yield Sample("headgate.store.calls", (("result", result),), getattr(self, result))
        yield Sample("headgate.store.call.time", (), self.seconds)
        yield Sample("headgate.store.breaker.opened", (), self.opened)


class AmountSamples:
    """What a budget has reserved and settled, in what callers give: tokens, or dollars; *read* converts."""

    def __init__(self, totals: AmountTotals, read: Callable[[list[int]], Mapping[str, Any]]) -> None:
        self.totals = totals
        self.read = read
        self.reset = totals.reset

    def samples(self) -> Iterator[Sample]:
        totals = self.totals
        yield Sample("headgate.budget.acquires", (("result", "acquired"),), totals.granted)
        for family, values in (("reserved", totals.reserved), ("settled", totals.settled), ("debt", totals.debt)):
            for name, value in self.read(list(values)).items():
                yield Sample(f"headgate.budget.{family}", (("amount", name),), float(value))


class ToolCounts(Tally):
    """The counters of a tool, such as a lock, of that *kind*; and what it holds and who waits, for gauges."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._lost: Series = (f"headgate.{kind}.lost", ())
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.waiting = 0
        self.acquired = self.timeout = self.failed = self.cancelled = 0
        self.seconds = 0.0
        self._held: dict[int, weakref.ref[Any]] = {}

    def begin(self) -> float:
        """Count one more caller that waits; returns the time."""
        if FREE_THREADED:
            with self._lock:
                self.waiting += 1
        else:
            self.waiting += 1
        return monotonic()

    def finish(self, result: str, begun: float) -> None:
        """Count how a request that began at that time has ended."""
        took = monotonic() - begun
        if FREE_THREADED:
            with self._lock:
                self._finish(result, took)
        else:
            self._finish(result, took)

    def _finish(self, result: str, took: float) -> None:
        self.waiting -= 1
        self.seconds += took
        if result == "acquired":
            self.acquired += 1
        elif result == "timeout":
            self.timeout += 1
        elif result == "failed":
            self.failed += 1
        else:
            self.cancelled += 1

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        if self.kind != "breaker":  # a call through a breaker waits for nothing
            for result in ("acquired", "timeout", "failed", "cancelled"):
                yield Sample(f"headgate.{self.kind}.acquires", (("result", result),), getattr(self, result))
            yield Sample(f"headgate.{self.kind}.wait.time", (), self.seconds)

    def acquiring(self) -> Acquiring:
        """Count one request: ``with counts.acquiring() as request``, and `request.granted` is set if it is."""
        return Acquiring(self)

    def hold(self, thing: Any) -> None:
        """Note what is held from now on; `thing.is_held()` tells whether it still is. The reference is weak."""
        self._held[id(thing)] = weakref.ref(thing)

    def end(self, thing: Any) -> None:
        self._held.pop(id(thing), None)

    def lose(self) -> None:
        self.add(self._lost)

    def held(self) -> list[Any]:
        """What is held now."""
        found = []
        for number, reference in list(self._held.items()):
            thing = reference()
            if thing is None:
                self._held.pop(number, None)
            elif thing.is_held():
                found.append(thing)
        return found


class Acquiring:
    """One request of a tool, from its beginning to its end."""

    __slots__ = ("_begun", "_counts", "granted")

    def __init__(self, counts: ToolCounts) -> None:
        self._counts = counts
        self._begun = 0.0
        self.granted = False

    def __enter__(self) -> Acquiring:
        self._begun = self._counts.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            result = "acquired" if self.granted else "timeout"
        elif isinstance(error, StoreUnavailable):
            result = "failed"
        else:
            result = "timeout" if isinstance(error, Exception) else "cancelled"
        self._counts.finish(result, self._begun)
