"""What a limiter's own script cannot: several limiters and keys at once, all or nothing, and slots in time.

The joint script has the functions of each algorithm in use in a block of its own, so one call takes any mix of
algorithms, quotas, names, keys and permits. It reads and writes the same states as the limiters' own scripts do. Checks
that share a state add up, also if two limiters with different quotas have one name by mistake.

The script of bookings is the algorithm's Lua with the frame of `headgate.algorithms.booking`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headgate.algorithms.booking import BOOKED, DENIED, LUA, Booked, Booking
from headgate.clock import Clock
from headgate.decision import Decision, Units, decision_in
from headgate.keys import label
from headgate.redis.script import (
    LimiterScript,
    LuaScript,
    algorithm_lua,
    pack_arguments,
    pack_permits,
    sha,
    tag_function,
)
from headgate.rule import Rule, check_permits
from headgate.stores.remote import LimiterCall, binding
from headgate.stores.remote_joint import JointCall

SLOTS, ENDS, FREED = "", ":ends", ":freed"  # what the keys of slots end in

_ALGORITHM = """
do
%s
algorithms[%d] = {quota = quota, where = where, load = load, evaluate = evaluate, consume = consume}
end
"""

# KEYS: a key for each quota of each check. ARGV: time ('' for the server's), the permits of each key, and then for each
# key the number of its algorithm and the quota's arguments. The answer: whether all was spent, and then four numbers
# for each key: whether its quota allows, what is left, reset and wait. If not all was spent, left and reset are as if
# no permits were asked for.
_FRAME = """
local now, argument = tonumber(ARGV[1]), 2 + #KEYS
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local parts, totals = {}, {}
for i, key in ipairs(KEYS) do
  local algorithm, q = algorithms[tonumber(ARGV[argument])], nil
  q, argument = algorithm.quota(argument + 1)
  if algorithm.where then key = algorithm.where(key, q, now) end
  local permits = tonumber(ARGV[i + 1])
  local state, ahead = algorithm.load(key, q, now)
  parts[i] = {key = key, algorithm = algorithm, q = q, permits = permits, state = state, ahead = ahead}
  totals[key] = (totals[key] or 0) + permits
end

local allowed, answer = true, {1}
for i, part in ipairs(parts) do
  local ok, left, full, wait = part.algorithm.evaluate(part.state, part.q, now, totals[part.key])
  allowed = allowed and ok
  local at = 4 * i - 2
  answer[at], answer[at + 1], answer[at + 2], answer[at + 3] = ok and 1 or 0, left, full, wait
end

if allowed then
  local written = {}
  for _, part in ipairs(parts) do
    local algorithm, key, state = part.algorithm, part.key, part.state
    if written[key] then state = algorithm.load(key, part.q, now) end
    algorithm.consume(key, state, part.q, now, part.permits)
    written[key] = true
  end
  return answer
end

answer[1] = 0
for i, part in ipairs(parts) do
  local _, left, full = part.algorithm.evaluate(part.state, part.q, now, 0)
  answer[4 * i - 1], answer[4 * i] = left, full
  if part.ahead then part.algorithm.consume(part.key, part.state, part.q, now, 0) end
end
return answer
"""


@functools.lru_cache(maxsize=64)
def _source(algorithms: tuple[str, ...]) -> tuple[str, bytes, bytes]:
    """The script for these algorithms, given as Lua: its text, and its start as EVALSHA and as EVAL."""
    blocks = [_ALGORITHM % (lua, number) for number, lua in enumerate(algorithms, start=1)]
    text = "".join(["local algorithms = {}\n", *blocks, _FRAME])
    return text, pack_arguments("EVALSHA", sha(text)), pack_arguments("EVAL", text)


class JointScript:
    """The checks of these limiters, in this order, as bytes."""

    repeatable = False  # a second run would spend a second time
    mergeable = False  # two calls are two commands

    def __init__(self, parts: Sequence[LimiterScript], clock: Clock | None) -> None:
        self.parts = parts
        self.quota_count = sum(part.quota_count for part in parts)
        algorithms = tuple(sorted({part.lua for part in parts}))
        self.text, self._evalsha, self._eval = _source(algorithms)
        quotas = [(algorithms.index(part.lua) + 1, *numbers) for part in parts for numbers in part.numbers]
        arguments = [number for quota in quotas for number in quota]
        self._count = b"*%d\r\n" % (2 + 1 + self.quota_count + 1 + self.quota_count + len(arguments))
        self._key_count = pack_arguments(self.quota_count)
        self._arguments = pack_arguments(*arguments)
        self._clock = clock
        patterns = [pattern for part in parts for pattern in part.patterns]
        self._may_share = len(set(patterns)) < len(patterns)  # whether two checks of one key would share a state

    def check_totals(self, call: JointCall) -> None:
        """Raise if the checks that share a state ask for more of it than its capacity."""
        if not self._may_share or len(set(call.keys)) == len(call.keys):
            return
        totals: Counter[tuple[str, str]] = Counter()
        for part, key, permits in zip(self.parts, call.keys, call.permits, strict=True):
            totals.update({(pattern, key): permits for pattern in part.patterns})
        for part, key in zip(self.parts, call.keys, strict=True):
            for pattern, capacity in zip(part.patterns, part.capacities, strict=True):
                check_permits(totals[pattern, key], capacity)

    def slot(self, key: str) -> int:
        """The Cluster slot of all keys of a client's key."""
        return self.parts[0].slot(key)

    def command(self, calls: Sequence[JointCall], send_source: bool = False) -> bytes:
        """The command of one call; *send_source* sends the script, which the server then knows."""
        [call] = calls
        keys: list[str] = []
        counts: list[bytes] = []
        for part, key, permits in zip(self.parts, call.keys, call.permits, strict=True):
            keys += part.keys(key)
            counts += [pack_permits(permits)] * part.quota_count
        start = self._eval if send_source else self._evalsha
        now = pack_arguments(self._clock.now() if self._clock else "")
        return b"".join([self._count, start, self._key_count, pack_arguments(*keys), now, *counts, self._arguments])

    def decisions(self, reply: Any) -> list[Decision]:
        """A decision for each check."""
        made, at = [], 1
        for part in self.parts:
            end = at + 4 * part.quota_count
            made.append(part.decision(binding(reply[at:end])))
            at = end
        return made

    def refunds(self, call: JointCall, reply: Any) -> list[tuple[LimiterScript, LimiterCall]]:
        if reply[0] != 1:
            return []
        checks = zip(self.parts, call.keys, call.permits, strict=True)
        return [(part, LimiterCall("refund", key, permits)) for part, key, permits in checks]


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
