"""The decision about every request of a log, as a limiter would have made it then, and what became of the keys.

The algorithms of `headgate.algorithms` decide, with the times of the log; a limiter in memory with a `ManualClock` at
these times gives the same decisions, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headgate.algorithms.algorithm import Algorithm, IntegerState
from headgate.replay.rules import ReplayRule
from headgate.replay.traffic import Traffic


@dataclass(slots=True)
class RefusedKey:
    """What became of a key that was refused. Times in microseconds."""

    refused: int = 0
    first: int = 0
    last: int = 0
    longest_lockout: int = 0  # from a refusal to the next request that was allowed, or to the last refusal
    locked_since: int | None = None


@dataclass(slots=True)
class ReplayOutcome:
    """The decisions about the requests of a log, and the keys that were refused, by their number."""

    rule: ReplayRule
    verdicts: bytearray  # 1: allowed, 0: refused; in the order of the requests
    refused: int
    keys: dict[int, RefusedKey] = field(default_factory=dict)

    @property
    def longest_lockout(self) -> int:
        """In microseconds; 0 if no request was refused."""
        return max((key.longest_lockout for key in self.keys.values()), default=0)


def replay(traffic: Traffic, rule: ReplayRule) -> ReplayOutcome:
    """Decide about all requests."""
    verdicts = decide(traffic, rule)
    outcome = ReplayOutcome(rule, verdicts, verdicts.count(0))
    if outcome.refused:
        outcome.keys = _refused_keys(traffic, verdicts)
    return outcome


def decide(traffic: Traffic, rule: ReplayRule) -> bytearray:
    """1 for each request that is allowed, 0 for each that is refused."""
    algorithms = rule.algorithms(traffic.names)
    common = rule.rule.algorithm
    if isinstance(common, IntegerState) and all(each is common for each in algorithms):
        return _decide_alike(traffic, common, rule.cost)
    states: list[Any] = [each.initial() if each else None for each in algorithms]
    verdicts = bytearray(b"\1") * len(traffic)
    for number, (now, key) in enumerate(zip(traffic.times, traffic.keys, strict=True)):
        algorithm: Algorithm[Any] | None = algorithms[key]
        if algorithm is None:
            continue
        if algorithm.evaluate(states[key], now, rule.cost).allowed:
            states[key] = algorithm.consume(states[key], now, rule.cost)
        else:
            verdicts[number] = 0
    return verdicts


def _decide_alike(traffic: Traffic, algorithm: IntegerState, cost: int) -> bytearray:
    """`decide` where one algorithm with a whole number as its state decides about all keys."""
    states, take = [0] * len(traffic.names), algorithm.take
    verdicts = bytearray()
    add = verdicts.append
    for now, key in zip(traffic.times, traffic.keys, strict=True):
        allowed, _, _, _, states[key] = take(states[key], now, cost)
        add(allowed)
    return verdicts


def _refused_keys(traffic: Traffic, verdicts: bytearray) -> dict[int, RefusedKey]:
    keys: dict[int, RefusedKey] = {}
    for now, key, allowed in zip(traffic.times, traffic.keys, verdicts, strict=True):
        if not allowed:
            found = keys.get(key)
            if found is None:
                found = keys[key] = RefusedKey(first=now)
            if found.locked_since is None:
                found.locked_since = now
            found.refused += 1
            found.last = now
        elif key in keys and (since := keys[key].locked_since) is not None:
            found = keys[key]
            found.longest_lockout = max(found.longest_lockout, now - since)
            found.locked_since = None
    for found in keys.values():
        if found.locked_since is not None:
            found.longest_lockout = max(found.longest_lockout, found.last - found.locked_since)
    return keys
