"""Commands as bytes: `LimiterScript` calls the Lua that decides for a limiter, `LuaScript` any other, `pack` the rest.

The frame of a limiter's script is written once: take the server's time, load each quota's state, evaluate all, spend
from all or from none, answer in five integers. An algorithm supplies these functions:

quota(i)                              -> a quota from the arguments at i, and the index after them
load(key, q, now)                     -> its state, and whether that is ahead of the clock
evaluate(state, q, now, permits)      -> allowed, permits left, time to full, time to retry
consume(key, state, q, now, permits)  writes the state and its time to live; negative permits give back
where(key, q, now)                    -> the key of the state, where it is not the key itself (optional)

A second value of ``load`` says that a state lies so far ahead of the clock that the clock must have stepped back (a
failover to a server whose clock is behind). Such a state is brought back to now, and written even for a denied call.

One call of the script takes any number of checks of one limiter, each decided by itself; what they have in common is
sent and read once. Everything that does not change from call to call is packed when the limiter is made.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any, NamedTuple, Protocol

from headgate.clock import Clock
from headgate.decision import Decision, Units, decision_in
from headgate.keys import digest, hash_tag, label
from headgate.rule import Rule
from headgate.stores.remote import LimiterCall


def pack(*arguments: str | int) -> bytes:
    """A whole command as the Redis protocol writes it."""
    return b"*%d\r\n" % len(arguments) + pack_arguments(*arguments)


def pack_arguments(*arguments: str | int | bytes) -> bytes:
    """The arguments of a command, without the count that comes before them."""
    packed = b""
    for argument in arguments:
        encoded = argument if isinstance(argument, bytes) else str(argument).encode()
        packed += b"$%d\r\n%b\r\n" % (len(encoded), encoded)
    return packed


def text(reply: Any) -> str:
    """A reply as text, whether the connection decodes or not; a reply that is an error is raised."""
    if isinstance(reply, Exception):
        raise reply
    return reply.decode() if isinstance(reply, bytes) else str(reply or "")


def slot_of(key: str) -> int:
    """The Cluster slot of a Redis key: the text between its first braces decides, or else the whole key."""
    start = key.find("{")
    end = key.find("}", start + 1)
    tag = key[start + 1 : end] if start >= 0 and end > start + 1 else key
    return binascii.crc_hqx(tag.encode(), 0) % 16384


# ARGV: op, time ('' for the server's), number of quotas, their arguments, and then the permits of each check.
# KEYS: the keys of the first check, one for each quota, then those of the next.
_FRAME = """
local op, now, many, argument = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), 4
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function one(key, q, permits)
  if where then key = where(key, q, now) end
  local state, ahead = load(key, q, now)
  local ok, left, full, wait = evaluate(state, q, now, permits)
  if op == 'take' and (ok or ahead) then consume(key, state, q, now, ok and permits or 0) end
  return ok and 1 or 0, 1, left, full, wait
end

local share = #op > 5 and tonumber(string.match(op, '^take:(%d+)$'))  -- of the capacity that must remain, in millionths
if share then op = 'take' end
local simple = many == 1 and not share and (op == 'take' or op == 'peek')
if simple and #KEYS == 1 then  -- nearly every call: it needs nothing of what follows
  local q, last = quota(argument)
  return {one(KEYS[1], q, tonumber(ARGV[last]))}
end
local quotas = {}
for i = 1, many do quotas[i], argument = quota(argument) end

local function all(first, permits)
  local keys, states, aheads = {}, {}, {}
  local allowed, binds, remaining, reset, retry = true, 0, 0, 0, 0
  for i, q in ipairs(quotas) do
    local key = KEYS[first + i]
    if where then key = where(key, q, now) end
    if op == 'reset' then
      redis.call('UNLINK', key)
    else
      local state, ahead = load(key, q, now)
      keys[i], states[i], aheads[i] = key, state, ahead
      local asked = (op == 'take' or op == 'peek') and permits or 0
      local kept = share and math.ceil(q.limit * share / 1000000) or 0
      local ok, left, full, wait = evaluate(state, q, now, asked + kept)
      if ok and share then ok, left, full, wait = evaluate(state, q, now, asked) end
      if binds == 0 or allowed and (not ok or left < remaining) or not ok and wait > retry then
        allowed, binds, remaining, retry = ok, i, left, wait
      end
      reset = math.max(reset, full)
    end
  end
  if op == 'refund' then
    if reset > 0 then
      for i, key in ipairs(keys) do consume(key, states[i], quotas[i], now, -permits) end
    end
    return 1, binds, remaining, reset, 0
  end
  if not allowed then  -- nothing is spent, so those that would have allowed stay as they are
    reset = 0
    for i, state in ipairs(states) do
      local _, _, full = evaluate(state, quotas[i], now, 0)
      reset = math.max(reset, full)
      if aheads[i] and op == 'take' then consume(keys[i], state, quotas[i], now, 0) end
    end
  elseif op == 'take' then
    for i, key in ipairs(keys) do consume(key, states[i], quotas[i], now, permits) end
  elseif op == 'charge' and remaining > 0 then  -- what was granted during an outage, as far as there is room for it
    for i, key in ipairs(keys) do consume(key, states[i], quotas[i], now, math.min(permits, remaining)) end
  end
  return allowed and 1 or 0, binds, remaining, reset, retry
end

local function check(i)
  local permits = tonumber(ARGV[argument + i])
  if simple then return one(KEYS[i + 1], quotas[1], permits) end
  return all(i * many, permits)
end

local checks = #KEYS / many
if checks == 1 then return {check(0)} end
local answers = {}
for i = 0, checks - 1 do
  local fine, a, b, c, d, e = pcall(check, i)  -- a key of another type fails alone
  local at = 5 * i
  if fine then
    answers[at + 1], answers[at + 2], answers[at + 3], answers[at + 4], answers[at + 5] = a, b, c, d, e
  else
    answers[at + 1], answers[at + 2], answers[at + 3], answers[at + 4], answers[at + 5] = -1, tostring(a), 0, 0, 0
  end
end
return answers
"""

REPLY_SIZE = 5  # integers that the script answers for each check


def algorithm_lua(rule: Rule) -> str:
    """The functions of the rule's algorithm; ``where`` is nil if the key itself is that of the state."""
    lua = rule.spec.lua
    return lua if "local function where(" in lua else "local where\n" + lua


class Script(Protocol):
    """A script as an executor needs it: its calls as bytes, and what is known about them."""

    repeatable: bool  # a second run changes nothing, so a call whose reply was lost is sent again
    mergeable: bool  # several calls of one op can be one command; its reply has `REPLY_SIZE` integers for each

    @property
    def quota_count(self) -> int:
        """How many quotas a call decides, which bounds a batch."""
        ...

    def slot(self, key: str) -> int:
        """The Cluster slot of the key of a call."""
        ...

    def command(self, calls: Sequence[Any], send_source: bool = False) -> bytes: ...

    def refunds(self, call: Any, reply: Any) -> list[tuple[LimiterScript, LimiterCall]]:
        """The calls that give back what *call* took, by its *reply*."""
        ...


class LimiterScript:
    """One limiter's calls of its script, as bytes."""

    repeatable = False  # a second run would spend a second time
    mergeable = True  # several calls of one op can be one command; its reply has `REPLY_SIZE` integers for each

    def __init__(self, rule: Rule, prefix: str, hash_keys: bool, clock: Clock | None) -> None:
        self.lua = algorithm_lua(rule)
        self.text = self.lua + _FRAME
        self.sha = sha(self.text)
        self.capacity = rule.capacity
        self.capacities = [part.limit for part in rule.parts]
        self.quota_count = len(rule.parts)
        self._dated = rule.parts if rule.parts[0].redis_suffix(0) else []  # quotas whose keys change with time
        self._tag = tag_function(hash_keys)
        self._clock = clock
        self._units = [Units(part.limit, 1, 1) for part in rule.parts]
        self._before = f"{prefix}:{rule.state_kind}:"
        name = "" if rule.name == "default" else ":" + label(rule.name)
        quotas = [""] if len(rule.quotas) == 1 else [":" + str(quota).replace(" ", "") for quota in rule.quotas]
        self._after = [name + quota for quota in quotas]
        self.numbers = [part.lua_arguments() for part in rule.parts]
        numbers = [number for part in self.numbers for number in part]
        self._arguments = pack_arguments(len(rule.parts), *numbers)
        self._fixed = 3 + 3 + len(numbers)  # arguments of a call that are not a key or its permits
        self._evalsha = pack_arguments("EVALSHA", self.sha)
        self._eval = pack_arguments("EVAL", self.text)
        self._take = pack_arguments("take", "") + self._arguments
        self._one = self._start(self._evalsha, 1)

    @property
    def patterns(self) -> list[str]:
        """The Redis keys of any client's key, without that key and without what changes with time."""
        return [self._before + after for after in self._after]

    def keys(self, key: str) -> list[str]:
        """The Redis keys of a client's key, one for each quota."""
        start = self._before + self._tag(key)
        if not self._dated:
            return [start + after for after in self._after]
        now = self._clock.now() if self._clock else time_ns() // 1000
        return [start + after + part.redis_suffix(now) for after, part in zip(self._after, self._dated, strict=True)]

    def slot(self, key: str) -> int:
        """The Cluster slot of all keys of a client's key."""
        return slot_of(self._tag(key))

    def command(self, calls: Sequence[LimiterCall], send_source: bool = False) -> bytes:
        """One command for several calls of the same op; *send_source* sends the script, which the server then knows."""
        first = calls[0]
        middle = self._take if first.op == "take" and not self._clock else self._middle(first.op)
        if len(calls) == 1 and not send_source:
            permits = pack_permits(first.permits)
            return self._one + pack_arguments(*self.keys(first.key)) + middle + permits
        keys = [pack_arguments(*self.keys(call.key)) for call in calls]
        counts = [pack_permits(call.permits) for call in calls]
        start = self._start(self._eval if send_source else self._evalsha, len(calls))
        return b"".join([start, *keys, middle, *counts])

    def decision(self, reply: Any) -> Decision:
        allowed, binds, remaining, reset, retry = reply
        units = self._units[binds - 1]
        return decision_in(units, allowed == 1, units.limit - remaining, reset, retry)

    def refunds(self, call: LimiterCall, reply: Any) -> list[tuple[LimiterScript, LimiterCall]]:
        return [(self, call._replace(op="refund"))] if call.op.startswith("take") and reply[0] == 1 else []

    def _start(self, script: bytes, checks: int) -> bytes:
        keys = checks * self.quota_count
        return b"*%d\r\n" % (self._fixed + keys + checks) + script + pack_arguments(keys)

    def _middle(self, op: str) -> bytes:
        return pack_arguments(op, self._clock.now() if self._clock else "") + self._arguments


_PERMITS = {permits: pack_arguments(permits) for permits in range(1, 17)}


def pack_permits(permits: int) -> bytes:
    return _PERMITS.get(permits) or pack_arguments(permits)


def tag_function(hash_keys: bool) -> Callable[[str], str]:
    """What turns a client's key into the part of a Redis key that decides the slot."""
    return _hashed_tag if hash_keys else hash_tag


def _hashed_tag(key: str) -> str:
    return "{" + digest(key) + "}"


def sha(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(NamedTuple):
    """A call of a `LuaScript`: its first key, which decides the slot, and the packed arguments behind the digest."""

    key: str
    packed: bytes
    size: int  # how many arguments are packed
    op: str = "eval"


class LuaScript:
    """Any Lua script, called by its digest, with any keys of one slot and any arguments.

        RELEASE = LuaScript("if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end")
        reply = store.sync_executor().execute(RELEASE, RELEASE.call(["lock:{a}"], owner))

    *repeatable*: a second run changes nothing, so a call whose reply was lost is sent again while there is time.
    """

    quota_count = 1
    mergeable = False  # two calls are two commands

    def __init__(self, source: str, repeatable: bool = False) -> None:
        self.text = source
        self.repeatable = repeatable
        self.sha = sha(source)
        self._evalsha = pack_arguments("EVALSHA", self.sha)
        self._eval = pack_arguments("EVAL", source)

    def call(self, keys: Sequence[str], *arguments: str | int | bytes) -> ScriptCall:
        """A call with these keys, all with one hash tag, and these arguments."""
        return ScriptCall(keys[0], pack_arguments(len(keys), *keys, *arguments), 1 + len(keys) + len(arguments))

    def slot(self, key: str) -> int:
        """The Cluster slot of a Redis key."""
        return slot_of(key)

    def command(self, calls: Sequence[ScriptCall], send_source: bool = False) -> bytes:
        """The command of one call; *send_source* sends the script, which the server then knows."""
        [call] = calls
        return b"*%d\r\n" % (2 + call.size) + (self._eval if send_source else self._evalsha) + call.packed

    def refunds(self, call: ScriptCall, reply: Any) -> list[tuple[LimiterScript, LimiterCall]]:
        return []
