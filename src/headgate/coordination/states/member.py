"""A member of a pool: when it may be had, and what the end of a use says about it.

One number decides when a member may be had: its ready time. To cool down, to be at its quota, to be broken: each only
writes a later one. A quota counts a use until its window is over after the use was *settled*: whatever the network
does, the other side never sees more within a window. A member's breaker is part of its record, with the same three
states as `CircuitBreaker`.

The times of its uses are kept apart from the record, in chunks, so that one more costs the same with any quota. They
are kept for as long as any quota that the pool ever had may count them.
"""

from __future__ import annotations

from typing import Any

CHUNK = 64  # uses
APART = 1000  # microseconds more than a window, for those who count in milliseconds or include both ends

PLAIN = "1,0,600000000,3"  # the rules of a pool that nobody gave any

CLOSED, OPEN, HALF_OPEN = 0, 1, 2

# A record: used (leases), failed and succeeded in a row, breaker, its number of changes, cool and open until, retired,
# uses (that were ever noted), kept (the number of the oldest chunk of them that is).
#
# The scripts of a pool have these; *current* are its rules, *log* is the key of its uses. A chunk is a field of it:
# times of 16 digits, in the order in which they were noted. A chunk that is lost reads as long ago. Field '' has the
# largest limit and the longest window that any quota ever had.
LUA = f"""
local function parse(text)
  local numbers = {{}}
  for number in string.gmatch(text, '%d+') do table.insert(numbers, tonumber(number)) end
  return numbers
end

local numbers = parse(current)
local slots, failures, open_for, successes = unpack(numbers)
local quotas = {{}}
local most, longest = unpack(parse(redis.call('HGET', log, '') or '0,0'))
for i = 5, #numbers, 2 do
  table.insert(quotas, {{numbers[i], numbers[i + 1]}})
  most, longest = math.max(most, numbers[i]), math.max(longest, numbers[i + 1])
end
local NEVER = 9007199254740992

local function newcomer()
  return {{used = 0, failed = 0, succeeded = 0, breaker = {CLOSED}, number = 0, cool = 0, open = 0, uses = 0, kept = 0}}
end

local function chunk(member, number) return number .. '\\n' .. member end

local function used_at(member, use)
  local offset = (use - 1) % {CHUNK} * 16
  local times = redis.call('HGET', log, chunk(member, math.floor((use - 1) / {CHUNK})))
  return tonumber(string.sub(times or '', offset + 1, offset + 16)) or 0
end

local function is_over(times)
  for time in string.gmatch(times, string.rep('%d', 16)) do
    if time + longest + {APART} > now then return false end
  end
  return true
end

local function keep_log()
  redis.call('HSET', log, '', whole(most) .. ',' .. whole(longest))
  redis.call('PEXPIRE', log, math.ceil((longest + {APART}) / 1000))
end

local function note(member, record, at)
  if longest == 0 then return end
  local field, offset = chunk(member, math.floor(record.uses / {CHUNK})), record.uses % {CHUNK} * 16
  local times = string.sub((redis.call('HGET', log, field) or '') .. string.rep('0', offset), 1, offset)
  redis.call('HSET', log, field, times .. string.format('%016.0f', at))
  record.uses = record.uses + 1
  local newer = record.uses - (record.kept + 1) * {CHUNK}
  if newer > 0 then
    local oldest = redis.call('HGET', log, chunk(member, record.kept)) or ''
    if newer >= most or is_over(oldest) then
      redis.call('HDEL', log, chunk(member, record.kept))
      record.kept = record.kept + 1
    end
  end
  keep_log()
end

local function ready_time(member, record)
  local at, why = now, 'ready'
  local function wait(time, reason)
    if time > at then at, why = time, reason end
  end
  wait(record.cool, 'cooling')
  if record.breaker == {OPEN} then wait(record.open, 'open') end
  for _, quota in ipairs(quotas) do
    local free = quota[1] - record.used
    if free <= 0 then
      wait(NEVER, 'limited')
    elseif record.uses - record.kept * {CHUNK} >= free then
      wait(used_at(member, record.uses - free + 1) + quota[2] + {APART}, 'limited')
    end
  end
  local places = slots
  if record.breaker == {HALF_OPEN} then places = math.max(math.min(slots, successes - record.succeeded), 1) end
  if record.used >= places then at, why = NEVER, 'leased' end
  if record.retired == 1 then at, why = NEVER, 'retired' end
  return at, why
end

local function change(record, breaker)
  record.breaker, record.number, record.failed, record.succeeded = breaker, record.number + 1, 0, 0
  if breaker == {OPEN} then record.open = now + open_for end
end

local function judge(record, number, outcome)
  if failures > 0 and number == record.number then  -- else it began before the breaker changed
    if outcome == 'failure' then
      record.failed = record.failed + 1
      if record.breaker == {HALF_OPEN} or record.failed >= failures then change(record, {OPEN}) end
    elseif outcome == 'success' then
      record.failed, record.succeeded = 0, record.succeeded + 1
      if record.breaker == {HALF_OPEN} and record.succeeded >= successes then change(record, {CLOSED}) end
    end
  end
end
"""


class PoolRules:
    """The rules of a pool, and what a call takes besides."""

    def __init__(self, rules: str, lease: int, patience: int, rest: tuple[Any, ...]) -> None:
        self.slots, self.failures, self.open_for, self.successes, *quotas = (int(each) for each in rules.split(","))
        self.quotas = list(zip(quotas[::2], quotas[1::2], strict=True))
        self.lease, self.patience, self.rest = lease, patience, rest


class MemberRecord:
    """The same in Python: a member."""

    def __init__(self) -> None:
        self.used = self.failed = self.succeeded = self.number = self.cool = self.open = self.retired = 0
        self.breaker = CLOSED
        self.log: list[int] = []  # what is kept of it

    def note(self, at: int, most: int, longest: int, now: int) -> None:
        if longest == 0:
            return
        self.log.append(at)
        newer = len(self.log) - CHUNK
        if newer > 0 and (newer >= most or max(self.log[:CHUNK]) + longest + APART <= now):
            del self.log[:CHUNK]

    def ready_time(self, now: int, rules: PoolRules) -> tuple[int | None, str]:
        places = rules.slots
        if self.breaker == HALF_OPEN:
            places = max(min(places, rules.successes - self.succeeded), 1)
        if self.retired:
            return None, "retired"
        if self.used >= places:
            return None, "leased"
        at, why = now, "ready"
        waits = [(self.cool, "cooling")]
        if self.breaker == OPEN:
            waits.append((self.open, "open"))
        for limit, window in rules.quotas:
            free = limit - self.used
            if free <= 0:
                return None, "limited"
            if len(self.log) >= free:
                waits.append((self.log[-free] + window + APART, "limited"))
        for time, reason in waits:
            if time > at:
                at, why = time, reason
        return at, why

    def change(self, breaker: int, now: int, rules: PoolRules) -> None:
        self.breaker, self.number, self.failed, self.succeeded = breaker, self.number + 1, 0, 0
        if breaker == OPEN:
            self.open = now + rules.open_for

    def judge(self, number: int, outcome: str, now: int, rules: PoolRules) -> None:
        if rules.failures > 0 and number == self.number:
            if outcome == "failure":
                self.failed += 1
                if self.breaker == HALF_OPEN or self.failed >= rules.failures:
                    self.change(OPEN, now, rules)
            elif outcome == "success":
                self.failed, self.succeeded = 0, self.succeeded + 1
                if self.breaker == HALF_OPEN and self.succeeded >= rules.successes:
                    self.change(CLOSED, now, rules)
