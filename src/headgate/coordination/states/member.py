"""A member of a pool: when it may be leased, and what the end of a lease does to it. The pool's script includes this.

One number decides when a member may be leased: its ready time. A cooldown, a used-up quota and an open breaker each
make it later. A quota counts a use from when its lease was *settled* until its window has passed: however long a
request is on its way, the server never sees more than the limit within a window. A member's breaker is part of its
record and has the three states of `CircuitBreaker`.

The times of its uses are kept apart from the record, in chunks, so that one more use costs the same under any quota.
They are kept for as long as any quota that the pool ever had may count them.

A record has these fields, under these names in Redis, too:
used       leases of it that are not settled
failed, succeeded   uses in a row with that outcome, since the breaker's state changed
breaker    CLOSED, OPEN or HALF_OPEN
number     generation of the breaker: how often its state has changed. A lease is settled with the one it began in
cool, open until when it cools down, until when its breaker is open
retired    1 if it is not leased until it is added again
uses, kept (Redis only) how many uses were ever recorded, and the number of the oldest chunk that still exists
"""

from __future__ import annotations

from typing import Any

CHUNK = 64  # uses
WINDOW_MARGIN = 1000  # microseconds beyond a window, for servers that count in milliseconds or include both ends

DEFAULT_RULES = "1,0,600000000,3"  # those of a pool that was never given any

CLOSED, OPEN, HALF_OPEN = 0, 1, 2

# *rules_text* are the rules of the pool. *log* is a Hash with the times of uses: each field is a chunk, times of 16
# digits in the order in which they were recorded. A chunk that was lost reads as long ago. Its field '' has the largest
# limit and the longest window that any quota of the pool ever had.
LUA = f"""
local function parse(text)
  local numbers = {{}}
  for number in string.gmatch(text, '%d+') do table.insert(numbers, tonumber(number)) end
  return numbers
end

local numbers = parse(rules_text)
local slots, failures, open_for, successes = unpack(numbers)
local quotas = {{}}
local max_limit, max_window = unpack(parse(redis.call('HGET', log, '') or '0,0'))
for i = 5, #numbers, 2 do
  table.insert(quotas, {{numbers[i], numbers[i + 1]}})
  max_limit, max_window = math.max(max_limit, numbers[i]), math.max(max_window, numbers[i + 1])
end
local NEVER = 9007199254740992

local function new_record()
  return {{used = 0, failed = 0, succeeded = 0, breaker = {CLOSED}, number = 0, cool = 0, open = 0, uses = 0, kept = 0}}
end

local function chunk(member, number) return number .. '\\n' .. member end

local function used_at(member, use)
  local offset = (use - 1) % {CHUNK} * 16
  local times = redis.call('HGET', log, chunk(member, math.floor((use - 1) / {CHUNK})))
  return tonumber(string.sub(times or '', offset + 1, offset + 16)) or 0
end

local function is_past(times)
  for time in string.gmatch(times, string.rep('%d', 16)) do
    if time + max_window + {WINDOW_MARGIN} > now then return false end
  end
  return true
end

local function keep_log()
  redis.call('HSET', log, '', format_int(max_limit) .. ',' .. format_int(max_window))
  redis.call('PEXPIRE', log, math.ceil((max_window + {WINDOW_MARGIN}) / 1000))
end

local function record_use(member, record, at)
  if max_window == 0 then return end
  local field, offset = chunk(member, math.floor(record.uses / {CHUNK})), record.uses % {CHUNK} * 16
  local times = string.sub((redis.call('HGET', log, field) or '') .. string.rep('0', offset), 1, offset)
  redis.call('HSET', log, field, times .. string.format('%016.0f', at))
  record.uses = record.uses + 1
  local newer = record.uses - (record.kept + 1) * {CHUNK}
  if newer > 0 then
    local oldest = redis.call('HGET', log, chunk(member, record.kept)) or ''
    if newer >= max_limit or is_past(oldest) then
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
      wait(used_at(member, record.uses - free + 1) + quota[2] + {WINDOW_MARGIN}, 'limited')
    end
  end
  local places = slots
  if record.breaker == {HALF_OPEN} then places = math.max(math.min(slots, successes - record.succeeded), 1) end
  if record.used >= places then at, why = NEVER, 'leased' end
  if record.retired == 1 then at, why = NEVER, 'retired' end
  return at, why
end

local function change_breaker(record, breaker)
  record.breaker, record.number, record.failed, record.succeeded = breaker, record.number + 1, 0, 0
  if breaker == {OPEN} then record.open = now + open_for end
end

local function count_outcome(record, number, outcome)
  if failures > 0 and number == record.number then  -- else the lease began before the breaker changed
    if outcome == 'failure' then
      record.failed = record.failed + 1
      if record.breaker == {HALF_OPEN} or record.failed >= failures then change_breaker(record, {OPEN}) end
    elseif outcome == 'success' then
      record.failed, record.succeeded = 0, record.succeeded + 1
      if record.breaker == {HALF_OPEN} and record.succeeded >= successes then change_breaker(record, {CLOSED}) end
    end
  end
end
"""


class PoolRules:
    """The rules of a pool, parsed, and the other arguments of a call."""

    def __init__(self, text: str, lease: int, waiter_ttl: int, arguments: tuple[Any, ...]) -> None:
        self.slots, self.failures, self.open_for, self.successes, *quotas = (int(each) for each in text.split(","))
        self.quotas = list(zip(quotas[::2], quotas[1::2], strict=True))
        self.lease, self.waiter_ttl, self.arguments = lease, waiter_ttl, arguments


class MemberRecord:
    """The same in Python."""

    def __init__(self) -> None:
        self.used = self.failed = self.succeeded = self.number = self.cool = self.open = self.retired = 0
        self.breaker = CLOSED
        self.log: list[int] = []  # the times of its uses that are kept

    def record_use(self, at: int, max_limit: int, max_window: int, now: int) -> None:
        if max_window == 0:
            return
        self.log.append(at)
        newer = len(self.log) - CHUNK
        if newer > 0 and (newer >= max_limit or max(self.log[:CHUNK]) + max_window + WINDOW_MARGIN <= now):
            del self.log[:CHUNK]

    def ready_time(self, now: int, rules: PoolRules) -> tuple[int | None, str]:
        """When it may be leased (None: not known), and why not before."""
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
                waits.append((self.log[-free] + window + WINDOW_MARGIN, "limited"))
        for time, reason in waits:
            if time > at:
                at, why = time, reason
        return at, why

    def change_breaker(self, breaker: int, now: int, rules: PoolRules) -> None:
        self.breaker, self.number, self.failed, self.succeeded = breaker, self.number + 1, 0, 0
        if breaker == OPEN:
            self.open = now + rules.open_for

    def count_outcome(self, number: int, outcome: str, now: int, rules: PoolRules) -> None:
        if rules.failures > 0 and number == self.number:
            if outcome == "failure":
                self.failed += 1
                if self.breaker == HALF_OPEN or self.failed >= rules.failures:
                    self.change_breaker(OPEN, now, rules)
            elif outcome == "success":
                self.failed, self.succeeded = 0, self.succeeded + 1
                if self.breaker == HALF_OPEN and self.succeeded >= rules.successes:
                    self.change_breaker(CLOSED, now, rules)
