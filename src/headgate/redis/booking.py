"""The bookings of a limiter as bytes: its algorithm's Lua with the frame of `headgate.algorithms.booking`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate.algorithms.booking import BOOKED, DENIED, LUA, Booked, Booking
from headgate.clock import Clock
from headgate.decision import Decision, Units, decision_in
from headgate.keys import label
from headgate.redis.script import LimiterScript, LuaScript, algorithm_lua, tag_function
from headgate.rule import Rule

SLOTS, ENDS, FREED = "", ":ends", ":freed"  # what the keys of slots end in


class BookingScript:
    """One limiter's calls of its booking script.

    The slots of a key lie beside its buckets, in the same Cluster slot:
    ``rate_limiter:token_bucket_slots:{<key>}:<name>``, with the quotas behind it if there are several.
    """

    repeatable = True  # a booking has an id, and a second one of that id takes nothing
    mergeable = False  # two calls are two commands

    def __init__(self, rule: Rule, limiter: LimiterScript, prefix: str, hash_keys: bool, clock: Clock | None) -> None:
        self.quota_count = limiter.quota_count
        self._limiter = limiter
        self._script = LuaScript(algorithm_lua(rule) + LUA, repeatable=True)
        self._tag = tag_function(hash_keys)
        self._before = f"{prefix}:{rule.state_kind}_slots:"
        quotas = [str(quota).replace(" ", "") for quota in rule.quotas] if len(rule.quotas) > 1 else []
        self._after = ":" + ":".join([label(rule.name), *[",".join(quotas)][: len(quotas)]])
        self._numbers = [number for part in limiter.numbers for number in part]
        self._units = [Units(part.limit, 1, 1) for part in rule.parts]
        self._clock = clock

    def keys(self, key: str) -> list[str]:
        """The Redis keys of a client's key: of its quotas, and of its slots."""
        slots = self._before + self._tag(key) + self._after
        return [*self._limiter.keys(key), *[slots + end for end in (SLOTS, ENDS, FREED)]]

    def slot(self, key: str) -> int:
        """The Cluster slot of all keys of a client's key."""
        return self._limiter.slot(key)

    def command(self, calls: Sequence[Booking], send_source: bool = False) -> bytes:
        """The command of one call; *send_source* sends the script, which the server then knows."""
        [call] = calls
        now = self._clock.now() if self._clock else ""
        own = (call.id, call.permits, call.within, call.grace)
        packed = self._script.call(self.keys(call.key), call.op, now, self.quota_count, *self._numbers, *own)
        return self._script.command([packed], send_source)

    def booked(self, reply: Sequence[int], within: int) -> Booked:
        """What *reply* says to a booking that may be *within* so many microseconds."""
        outcome, at, now, permits, binds, left, reset = reply
        units = self._units[binds - 1]
        retry = at - now - within if outcome == DENIED else 0
        made: Decision = decision_in(units, outcome != DENIED, units.limit - left, reset, retry)
        return Booked(outcome, at, now, permits, made)

    def refunds(self, call: Booking, reply: Any) -> list[tuple[BookingScript, Booking]]:
        """A booking whose caller is gone is cancelled."""
        return [(self, call._replace(op="cancel"))] if call.op == "book" and reply[0] == BOOKED else []
