"""Scenarios: what happens at which second, as a table that can be read aloud.

    at        call      permits   allowed  remaining  retry_after  reset_after  [limit]
    0.0       take      4         yes      0          0            0.4          4
    0.0       refund    2

Calls are `take` (try_acquire), `peek`, `refund` and `reset`; the last two answer nothing. Seconds count from the start
of the manual clock, which is midnight UTC. Numbers must agree to the microsecond.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headgate import Quota
from headgate.testing import ManualClock
from tests.support.callers import Callers


@dataclass(frozen=True)
class Step:
    at_us: int
    call: str
    permits: int
    expected: dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    story: str
    quota: str | Quota | list[str | Quota]
    table: str

    def steps(self) -> Iterator[Step]:
        for line in self.table.strip().splitlines():
            at, call, *rest = line.split()
            permits = int(rest[0]) if rest else 0
            yield Step(microseconds(float(at)), call, permits, _expected(rest[1:]))


def _expected(words: list[str]) -> dict[str, Any]:
    if not words:
        return {}
    allowed, remaining, retry, reset, *limit = words
    values = {"allowed": {"yes": True, "no": False}[allowed], "remaining": int(remaining)}
    values |= {"retry_us": microseconds(float(retry)), "reset_us": microseconds(float(reset))}
    return values | ({"limit": int(limit[0])} if limit else {})


def microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _seen(decision: Any, names: dict[str, Any]) -> dict[str, Any]:
    values = {"allowed": decision.allowed, "remaining": decision.remaining, "limit": decision.limit}
    values |= {"retry_us": microseconds(decision.retry_after), "reset_us": microseconds(decision.reset_after)}
    return {name: values[name] for name in names}


def play(scenario: Scenario, algorithm: str, callers: Callers) -> None:
    """Make the calls of *scenario* at its times, and compare the answers."""
    clock = ManualClock()
    start = clock.now()
    limiter = callers.limiter(scenario.quota, algorithm=algorithm, clock=clock)
    calls = {"take": limiter.try_acquire, "peek": limiter.peek, "refund": limiter.refund}
    for step in scenario.steps():
        clock.advance((start + step.at_us - clock.now()) / 1_000_000)
        answer = limiter.reset("k") if step.call == "reset" else calls[step.call]("k", permits=step.permits)
        if step.expected:
            assert _seen(answer, step.expected) == step.expected, step
