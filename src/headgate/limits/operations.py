"""What a storage of `limits` does, written once: each operation is a plan (see `headgate._plan`).

A plan yields what a backend answers: a value, or something to await. Every count is kept by an algorithm of headgate
under the key that `limits` makes; that key ends in ``/amount/multiples/granularity``, from which operations that are
told no quota read it. A key that ends otherwise is counted too, with the largest limit that there is.

A denied hit spends nothing. In `limits` it is counted in a fixed window, so that there a refused hit of cost 5 also
refuses a hit of cost 1 that would fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Any, TypeVar

from limits.limits import GRANULARITIES

from headgate.algorithms.sliding_window_counter import SlidingWindowCounter
from headgate.decision import Decision
from headgate.errors import InvalidKey
from headgate.keys import check_key, digest
from headgate.quota import Quota
from headgate.rule import Rule

T = TypeVar("T")
Plan = Generator[Any, Any, T]

FIRST, MOVING, SLIDING = "first_window", "sliding_window", "sliding_window_counter"

MOST = 1_000_000_000  # the largest limit of a quota


def quota_of(key: str) -> tuple[int, int] | None:
    """(limit, seconds) that the end of *key* says, if it was made by a `RateLimitItem`."""
    _, *tail = key.rsplit("/", 3)
    if len(tail) < 3 or not (tail[0].isdecimal() and tail[1].isdecimal() and tail[2] in GRANULARITIES):
        return None
    return int(tail[0]), int(tail[1]) * GRANULARITIES[tail[2]].GRANULARITY.seconds


def safe_key(key: str) -> str:
    """*key*, or a digest of it if headgate does not take it: longer than 256 bytes, empty, with control characters."""
    try:
        return check_key(key)
    except InvalidKey:
        return "digest:" + digest(key.encode("utf-8", "backslashreplace").decode())


def whole(amount: float) -> int:
    """*amount* in whole permits, rounded up: a part of a permit is never free."""
    return MOST + 1 if amount > MOST else math.ceil(amount)


class Operations:
    """All that does not depend on where the states are."""

    def __init__(self) -> None:
        self.backends: dict[tuple[str, int, float], Any] = {}

    def backend(self, kind: str, limit: int, seconds: float) -> Any:
        """The backend that counts by this algorithm and quota."""
        found = self.backends.get((kind, limit, seconds))
        if found is None:
            quota = Quota(limit, float(seconds))
            rule = Rule(quota, "fixed_window", start="first") if kind == FIRST else Rule(quota, kind)
            found = self.backends[kind, limit, seconds] = self.open(rule)
        return found

    def open(self, rule: Rule) -> Any:
        """A new backend."""
        raise NotImplementedError

    def readers(self, kind: str, key: str, seconds: float | None = None) -> list[Any]:
        """The backends that may have a state of *key*, whose quota the caller does not know."""
        said = quota_of(key)
        if said is None:
            return self.other_readers(kind, seconds)
        return [self.backend(kind, said[0], seconds or said[1])] if said[0] else []

    def other_readers(self, kind: str, seconds: float | None) -> list[Any]:
        """The same for a key that does not say its quota."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------- fixed window

    def incr(self, key: str, seconds: float, amount: float) -> Plan[int]:
        """Count *amount* if it fits; returns what the counter is then, or would be."""
        said = quota_of(key)
        limit, permits = said[0] if said else MOST, whole(amount)
        if limit == 0:
            return permits
        backend, key = self.backend(FIRST, limit, seconds), safe_key(key)
        if 0 < permits <= limit:
            made: Decision = yield backend.try_acquire(key, permits)
            return limit - made.remaining + (0 if made.allowed else permits)
        if permits < 0:
            yield backend.refund(key, -permits)
        seen: Decision = yield backend.peek(key, 0)
        return limit - seen.remaining + max(permits, 0)

    def get(self, key: str) -> Plan[int]:
        """What the counter is."""
        seen = yield from self._peek_all(key)
        return max((each.limit - each.remaining for each in seen), default=0)

    def get_expiry(self, key: str) -> Plan[float]:
        """When the window ends, in epoch seconds; now if there is none."""
        seen = yield from self._peek_all(key)
        return time.time() + max((each.reset_after for each in seen), default=0.0)

    def _peek_all(self, key: str) -> Plan[list[Decision]]:
        seen: list[Decision] = []
        for backend in self.readers(FIRST, key):
            seen.append((yield backend.peek(safe_key(key), 0)))
        return seen

    # ------------------------------------------------------------------------------------------ the other algorithms

    def take(self, kind: str, key: str, limit: int, seconds: float, amount: float) -> Plan[bool]:
        """Spend *amount* by that algorithm; False if it does not fit, and then nothing is spent."""
        return self._fits("try_acquire", kind, key, limit, seconds, whole(amount))

    def test(self, kind: str, key: str, limit: int, seconds: float, amount: float) -> Plan[bool]:
        """The answer that `take` would give."""
        return self._fits("peek", kind, key, limit, seconds, whole(amount))

    def _fits(self, call: str, kind: str, key: str, limit: int, seconds: float, permits: int) -> Plan[bool]:
        if permits <= 0 or permits > limit:
            return permits <= 0
        made: Decision = yield getattr(self.backend(kind, limit, seconds), call)(safe_key(key), permits)
        return made.allowed

    def stats(self, kind: str, key: str, limit: int, seconds: float) -> Plan[tuple[float, int]]:
        """(epoch seconds, remaining) of a bucket: when it is full again, or has its next permit if it has none."""
        if limit <= 0:
            return time.time(), 0
        backend, key = self.backend(kind, limit, seconds), safe_key(key)
        seen: Decision = yield backend.peek(key, 0)
        wait = seen.reset_after
        if not seen.remaining:
            wait = (yield backend.peek(key, 1)).retry_after
        return time.time() + wait, seen.remaining

    def moving_window(self, key: str, limit: int, seconds: float) -> Plan[tuple[float, int]]:
        """(when the oldest hit of the window was, how many hits it has); (now, 0) for none."""
        if limit <= 0:
            return time.time(), 0
        backend, key = self.backend(MOVING, limit, seconds), safe_key(key)
        seen: Decision = yield backend.peek(key, 1)
        left = seen.remaining + seen.allowed
        if 0 < left < limit:  # one more than is left has to wait for the oldest
            seen = yield backend.peek(key, left + 1)
        return time.time() + seen.retry_after - (seconds if left < limit else 0), limit - left

    def sliding_window(self, key: str, seconds: float) -> Plan[tuple[int, float, int, float]]:
        """(previous, its seconds in view, current, its seconds until it is out of view), of the fullest window.

        The strategy of `limits` rounds the weight of *previous* down, and headgate does not: the part of a hit that is
        still in view counts as a whole one in *current*. So `test` and `remaining` say what `hit` will do.
        """
        found, most = (0, 0.0, 0, 0.0), -1
        for backend in self.readers(SLIDING, key, seconds):
            algorithm, state, now = yield from self.counters(backend, safe_key(key))
            _, current, previous = algorithm.roll(state, now)
            elapsed = now % algorithm.period
            used = -(-algorithm.take(state, now, 0)[1] // algorithm.steps)
            if used > most:
                most, left = used, (algorithm.period - elapsed) / 1_000_000
                faded = math.floor(previous * left / seconds)
                found = (previous, left if previous else 0.0, max(used - faded, current), left + seconds)
        return found

    def counters(self, backend: Any, key: str) -> Plan[tuple[SlidingWindowCounter, int, int]]:
        """The algorithm of *backend*, the state of *key*, and the time."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- all of it

    def clear(self, key: str) -> Plan[None]:
        """Forget *key* in every algorithm."""
        raise NotImplementedError

    def reset(self) -> Plan[int]:
        """Forget all keys; returns how many records that were."""
        raise NotImplementedError

    def check(self) -> Plan[bool]:
        """Whether decisions can be made."""
        raise NotImplementedError
