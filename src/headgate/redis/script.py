"""The Lua that decides, and the bytes that call it.

The frame is written once: take the server's time, load each quota's state, look at all, spend from all or from
none, answer in five integers. An algorithm supplies ``quota``, ``load``, ``look`` and ``spend``; ``load`` says with a
second value that a state lies so far ahead of the clock that the clock must have stepped back (a failover to a
server whose clock is behind): such a state is brought back to now, and written even if the call is denied. All that
does not change from call to call is packed when the limiter is made, so that a call joins three pieces of bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from headgate.algorithms import ALGORITHMS
from headgate.clock import Clock
from headgate.decision import Decision, Units, answer
from headgate.keys import digest, hash_tag, label
from headgate.rule import Rule

_FRAME = """
local op, permits, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
if not KEYS[2] and (op == 'take' or op == 'peek') then  -- nearly every call; the loop below costs a third more
  local key, q = KEYS[1], quota(4)
  if where then key = where(key, q, now) end
  local state, ahead = load(key, q, now)
  local ok, left, full, wait = look(state, q, now, permits)
  if op == 'take' and (ok or ahead) then spend(key, state, q, now, ok and permits or 0) end
  return {ok and 1 or 0, 1, left, full, wait}
end
local keys, quotas, states, aheads, argument = {}, {}, {}, {}, 4
local allowed, binds, remaining, reset, retry = true, 0, 0, 0, 0
for i, key in ipairs(KEYS) do
  local q
  q, argument = quota(argument)
  if where then key = where(key, q, now) end
  if op == 'reset' then
    redis.call('DEL', key)
  else
    local state, ahead = load(key, q, now)
    keys[i], quotas[i], states[i], aheads[i] = key, q, state, ahead
    local ok, left, full, wait = look(state, q, now, op == 'refund' and 0 or permits)
    if binds == 0 or allowed and (not ok or left < remaining) or not ok and wait > retry then
      allowed, binds, remaining, retry = ok, i, left, wait
    end
    reset = math.max(reset, full)
  end
end
if not allowed then  -- nothing is spent, so those that would have allowed stay as they are
  reset = 0
  for i, state in ipairs(states) do
    local _, _, full = look(state, quotas[i], now, 0)
    reset = math.max(reset, full)
    if aheads[i] and op == 'take' then spend(keys[i], state, quotas[i], now, 0) end
  end
elseif op == 'take' then
  for i, key in ipairs(keys) do spend(key, states[i], quotas[i], now, permits) end
elseif op == 'refund' and reset > 0 then
  for i, key in ipairs(keys) do spend(key, states[i], quotas[i], now, -permits) end
end
return {allowed and 1 or 0, binds, remaining, reset, retry}
"""

_HERE = "local where\n"  # for those that keep a state under the key itself


class Call(NamedTuple):
    """A question to the script: take, peek, refund or reset."""

    op: str
    key: str
    permits: int


class Script:
    """One limiter's calls of the script, as bytes."""

    def __init__(self, rule: Rule, prefix: str, hash_keys: bool, clock: Clock | None) -> None:
        lua = ALGORITHMS[rule.kind].lua
        self.text = (lua if "function where" in lua else _HERE + lua) + _FRAME
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        self.capacity = rule.capacity
        self.weight = len(rule.parts)  # how much of Redis's time a call takes, roughly
        self._hash_keys = hash_keys
        self._clock = clock
        self._units = [Units(part.limit, 1, 1) for part in rule.parts]
        self._before = f"{prefix}:{rule.kind}:"
        name = "" if rule.name == "default" else ":" + label(rule.name)
        quotas = [""] if len(rule.quotas) == 1 else [":" + str(quota).replace(" ", "") for quota in rule.quotas]
        self._after = [name + quota for quota in quotas]
        self._arguments = _pack(*(number for part in rule.parts for number in part.lua_arguments()))
        size = 3 + len(rule.parts) + 3 + sum(len(part.lua_arguments()) for part in rule.parts)
        count = _pack(len(rule.parts))
        # a call starts with the script's digest, or with all of it for a server that does not know it yet
        self.by_digest = b"*%d\r\n" % size + _pack("EVALSHA", self.sha) + count
        self.whole = b"*%d\r\n" % size + _pack("EVAL", self.text) + count
        self._one = self._tail("take", 1)

    def keys(self, key: str) -> list[str]:
        """The Redis keys of a client's key, one for each quota. (The fixed window adds the window's start.)"""
        tag = "{" + digest(key) + "}" if self._hash_keys else hash_tag(key)
        return [self._before + tag + after for after in self._after]

    def command(self, op: str, key: str, permits: int) -> bytes:
        """The keys and arguments of a call, packed: what comes behind `by_digest` or `whole`."""
        tail = self._one if permits == 1 and op == "take" and not self._clock else self._tail(op, permits)
        return _pack(*self.keys(key)) + tail

    def decision(self, reply: Any) -> Decision:
        allowed, binds, remaining, reset, retry = reply
        return answer(allowed == 1, self._units[binds - 1], remaining, reset, retry)

    def _tail(self, op: str, permits: int) -> bytes:
        return _pack(op, permits, self._clock.now() if self._clock else "") + self._arguments


def _pack(*arguments: str | int) -> bytes:
    """Arguments as the Redis protocol writes them."""
    packed = b""
    for argument in arguments:
        encoded = str(argument).encode()
        packed += b"$%d\r\n%b\r\n" % (len(encoded), encoded)
    return packed
