"""The rules of a circuit breaker: three states, what changes them, and who may probe.

Each change of state has a number. A call is admitted under one, and its report counts only under the same.
"""

from __future__ import annotations

from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired

SLICES = 10  # of a window of failure rates
SEEN = 30 * MICROSECONDS  # how long a report is remembered, so that it counts once however often it is sent
SOON = MICROSECONDS  # who finds every place taken asks again no sooner, unless one is free by then for certain
KEPT = 3_600_000  # milliseconds that a state is kept longer than it is open
FOR_EVER = 1 << 62  # when one is forgotten that somebody forced

# ARGV from 3: id, number of the state it began in (-1: any), outcome; failures, open_for, successes, lease; share of
# failures in a million (0: those in a row count), window, least calls. Times in microseconds.
LUA = f"""
local key, probes, seen, window = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, gen, outcome = ARGV[3], tonumber(ARGV[4]), ARGV[5]
local failures, open_for, successes, lease = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local share, span, least = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local fields = redis.call('HMGET', key, 'state', 'consecutive_failures', 'consecutive_successes', 'opened_at', 'number',
  'forced', 'changed_by', 'was', 'extra_probes')
local state, failed, succeeded = fields[1] or 'CLOSED', tonumber(fields[2] or 0), tonumber(fields[3] or 0)
local opened, number = math.min(tonumber(fields[4] or 0), now), tonumber(fields[5] or 0)
local forced, changed_by, was, extra = fields[6] or '', fields[7] or '', fields[8] or '', tonumber(fields[9] or 0)
local me = op .. id

local function become(new)
  was, changed_by = state, me
  state, number, failed, succeeded, extra = new, number + 1, 0, 0, 0
  if new == 'OPEN' then opened = now end
  redis.call('DEL', probes, window)
end

local function save()
  redis.call('HSET', key, 'state', state, 'consecutive_failures', failed, 'consecutive_successes', succeeded,
    'opened_at', whole(opened), 'number', number, 'forced', forced, 'changed_by', changed_by, 'was', was,
    'extra_probes', extra)
  redis.call('PEXPIRE', key, math.ceil(open_for / 1000) + {KEPT})
  if forced ~= '' then redis.call('PERSIST', key) end
end

local function answer(allowed, probe, wait)
  return {{allowed, state, number, probe, wait, changed_by == me and was or '', failed, succeeded}}
end

local function recover()
  if state == 'OPEN' and forced == '' and now >= opened + open_for then
    become('HALF_OPEN')
    save()
  end
end

local function too_many()
  local width = math.ceil(span / {SLICES})
  local slice = (now - now % width) / width
  redis.call('HINCRBY', window, whole(slice) .. ':n', 1)
  if outcome == 'failure' then redis.call('HINCRBY', window, whole(slice) .. ':f', 1) end
  redis.call('PEXPIRE', window, math.ceil(span / 1000) * 2)
  local calls, bad, all = 0, 0, redis.call('HGETALL', window)
  for i = 1, #all, 2 do
    local at, what = string.match(all[i], '(%d+):(%a)')
    if tonumber(at) <= slice - {SLICES} then
      redis.call('HDEL', window, all[i])
    elseif what == 'n' then
      calls = calls + all[i + 1]
    else
      bad = bad + all[i + 1]
    end
  end
  return calls >= least and bad > 0 and bad * 1000000 >= share * calls
end

if op == 'admit' then
  recover()
  if state == 'CLOSED' then return answer(1, 0, 0) end
  if state == 'OPEN' then return answer(0, 0, forced == '' and opened + open_for - now or lease) end
  redis.call('ZREMRANGEBYSCORE', probes, '-inf', whole(now))
  if not redis.call('ZSCORE', probes, id) then
    local first = redis.call('ZRANGE', probes, 0, 0, 'WITHSCORES')[2]
    -- one may always probe: rules may change
    if first and redis.call('ZCARD', probes) + succeeded >= successes + extra then
      local left = first - now  -- its result comes long before, as a rule: ask when it has taken twice as long
      return answer(0, 0, math.min(left, math.max(lease - left, {SOON})))
    end
    redis.call('ZADD', probes, whole(now + lease), id)
    redis.call('PEXPIRE', probes, math.ceil(lease / 1000))
  end
  return answer(1, 1, 0)
end

if op == 'report' then
  -- A part of the call in another thread or process found all probes taken: next time there must be one more, or calls
  -- that need two could never succeed.
  if redis.call('ZREM', probes, id) == 1 and outcome == 'refused' and state == 'HALF_OPEN' and extra < successes then
    redis.call('HINCRBY', key, 'extra_probes', 1)
  end
  if outcome == 'refused' then outcome = 'ignored' end
  if changed_by == me or outcome == 'ignored' or forced ~= '' or (gen >= 0 and gen ~= number) or state == 'OPEN' then
    return answer(0, 0, 0)
  end
  if state == 'CLOSED' and share == 0 and outcome == 'success' then
    if failed > 0 then
      failed = 0
      save()
    end
    return answer(0, 0, 0)
  end
  redis.call('ZREMRANGEBYSCORE', seen, '-inf', whole(now))
  if redis.call('ZSCORE', seen, id) then return answer(0, 0, 0) end
  redis.call('ZADD', seen, whole(now + {SEEN}), id)
  redis.call('PEXPIRE', seen, {SEEN // 1000})
  if state == 'CLOSED' and share > 0 then
    if not too_many() then return answer(0, 0, 0) end
    become('OPEN')
  elseif state == 'CLOSED' then
    failed = failed + 1
    if failed >= failures then become('OPEN') end
  elseif outcome == 'failure' then
    become('OPEN')
  else
    succeeded = succeeded + 1
    if succeeded >= successes then become('CLOSED') end
  end
  save()
  return answer(0, 0, 0)
end

if op == 'recover' then
  recover()
elseif op == 'force' then  -- outcome: the state, or nothing, which begins anew
  if changed_by ~= me then
    local new = outcome == '' and 'CLOSED' or outcome
    forced, failed = outcome, 0
    if state ~= new then become(new) end
    redis.call('DEL', window)
    save()
  end
end
return answer(changed_by == me and 1 or 0, 0, state == 'OPEN' and math.max(opened + open_for - now, 0) or 0)
"""


class BreakerState:
    """The same in Python."""

    def __init__(self) -> None:
        self.state, self.failed, self.succeeded, self.opened, self.number = "CLOSED", 0, 0, 0, 0
        self.forced, self.changed_by, self.was, self.extra = "", "", "", 0
        self.probes: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.window: dict[int, list[int]] = {}
        self.until = 0
        self.counted = 0  # until when the window is kept

    def admit(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        _, open_for, successes, lease, *_ = rules
        me = self._begin("admit" + id, now)
        self._recover(me, now, open_for)
        if self.state == "CLOSED":
            return self._answer(me, 1, 0, 0)
        if self.state == "OPEN":
            return self._answer(me, 0, 0, lease if self.forced else self.opened + open_for - now)
        self.probes = {probe: until for probe, until in self.probes.items() if until > now}
        if id not in self.probes:
            if self.probes and len(self.probes) + self.succeeded >= successes + self.extra:
                left = min(self.probes.values()) - now
                return self._answer(me, 0, 0, min(left, max(lease - left, SOON)))
            self.probes[id] = now + lease
        return self._answer(me, 1, 1, 0)

    def report(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        failures, open_for, successes, _, share, span, least = rules
        me = self._begin("report" + id, now)
        freed = self.probes.pop(id, None) is not None
        if outcome == "refused":
            if freed and self.state == "HALF_OPEN" and self.extra < successes:
                self.extra += 1
            outcome = "ignored"
        late = self.changed_by == me or (gen >= 0 and gen != self.number) or self.state == "OPEN"
        if late or outcome == "ignored" or self.forced:
            return self._answer(me, 0, 0, 0)
        if self.state == "CLOSED" and share == 0 and outcome == "success":
            if self.failed:
                self.failed = 0
                self._save(now, open_for)
            return self._answer(me, 0, 0, 0)
        drop_expired(self.seen, now)
        if id in self.seen:
            return self._answer(me, 0, 0, 0)
        self.seen[id] = now + SEEN
        if self.state == "CLOSED" and share > 0:
            if not self._too_many(now, outcome, share, span, least):
                return self._answer(me, 0, 0, 0)
            self._become("OPEN", me, now)
        elif self.state == "CLOSED":
            self.failed += 1
            if self.failed >= failures:
                self._become("OPEN", me, now)
        elif outcome == "failure":
            self._become("OPEN", me, now)
        else:
            self.succeeded += 1
            if self.succeeded >= successes:
                self._become("CLOSED", me, now)
        self._save(now, open_for)
        return self._answer(me, 0, 0, 0)

    def recover(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        me = self._begin("recover" + id, now)
        self._recover(me, now, rules[1])
        return self._seen(me, now, rules[1])

    def force(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        me = self._begin("force" + id, now)
        if self.changed_by != me:
            self.forced, self.failed = outcome, 0
            if self.state != (outcome or "CLOSED"):
                self._become(outcome or "CLOSED", me, now)
            self.window = {}
            self._save(now, rules[1])
        return self._seen(me, now, rules[1])

    def peek(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        return self._seen(self._begin("peek" + id, now), now, rules[1])

    def is_expired(self, now: int) -> bool:
        return now >= max(self.until, self.counted, *self.probes.values())

    def _begin(self, me: str, now: int) -> str:
        self.opened = min(self.opened, now)
        return me

    def _become(self, new: str, me: str, now: int) -> None:
        self.was, self.changed_by = self.state, me
        self.state, self.number, self.failed, self.succeeded, self.extra = new, self.number + 1, 0, 0, 0
        if new == "OPEN":
            self.opened = now
        self.probes, self.window = {}, {}

    def _save(self, now: int, open_for: int) -> None:
        self.until = FOR_EVER if self.forced else now + open_for + KEPT * 1000

    def _recover(self, me: str, now: int, open_for: int) -> None:
        if self.state == "OPEN" and not self.forced and now >= self.opened + open_for:
            self._become("HALF_OPEN", me, now)
            self._save(now, open_for)

    def _too_many(self, now: int, outcome: str, share: int, span: int, least: int) -> bool:
        slice = now // -(-span // SLICES)
        counts = self.window.setdefault(slice, [0, 0])
        counts[0] += 1
        counts[1] += outcome == "failure"
        self.counted = now + span * 2
        self.window = {at: counts for at, counts in self.window.items() if at > slice - SLICES}
        calls, bad = (sum(counts[i] for counts in self.window.values()) for i in (0, 1))
        return calls >= least and bad > 0 and bad * 1_000_000 >= share * calls

    def _seen(self, me: str, now: int, open_for: int) -> list[Any]:
        wait = max(self.opened + open_for - now, 0) if self.state == "OPEN" else 0
        return self._answer(me, int(self.changed_by == me), 0, wait)

    def _answer(self, me: str, allowed: int, probe: int, wait: int) -> list[Any]:
        was = self.was if self.changed_by == me else ""
        return [allowed, self.state, self.number, probe, wait, was, self.failed, self.succeeded]


BREAKER = StateMachine("circuit_breaker", ("", ":probes", ":seen", ":window"), LUA, BreakerState)
