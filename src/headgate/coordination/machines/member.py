"""A member of a pool: when it may be had, and what the end of a use says about it.

One number decides when a member may be had: its ready time. To cool down, to be at its quota, to be broken: each only
writes a later one. A quota counts a use until its window is over after the use was *settled*: whatever the network
does, the other side never sees more within a window. A member's breaker is part of its record, with the same three
states as `CircuitBreaker`.
"""

from __future__ import annotations

from typing import Any

APART = 1000  # microseconds more than a window, for those who count in milliseconds or include both ends

PLAIN = "1,0,600000000,3"  # the rules of a pool that nobody gave any

CLOSED, OPEN, HALF_OPEN = 0, 1, 2

# A record: used (leases), failed and succeeded in a row, breaker, its number of changes, cool and open until, retired,
# log (when its uses were settled, oldest first).
#
# The scripts of a pool have these; *current* are its rules.
LUA = f"""
local numbers = {{}}
for number in string.gmatch(current, '%d+') do table.insert(numbers, tonumber(number)) end
local slots, failures, open_for, successes = unpack(numbers)
local quotas, most = {{}}, 0
for i = 5, #numbers, 2 do
  table.insert(quotas, {{numbers[i], numbers[i + 1]}})
  most = math.max(most, numbers[i])
end
local NEVER = 9007199254740992

local function newcomer()
  return {{used = 0, failed = 0, succeeded = 0, breaker = {CLOSED}, number = 0, cool = 0, open = 0, log = {{}}}}
end

local function ready_time(record)
  local at, why = now, 'ready'
  local function wait(time, reason)
    if time > at then at, why = time, reason end
  end
  wait(record.cool, 'cooling')
  if record.breaker == {OPEN} then wait(record.open, 'open') end
  for _, quota in ipairs(quotas) do
    local free = quota[1] - record.used
    local oldest = #record.log - free + 1
    if free <= 0 then
      wait(NEVER, 'limited')
    elseif oldest >= 1 then
      wait(record.log[oldest] + quota[2] + {APART}, 'limited')
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


class Rules:
    """The rules of a pool, and what a call takes besides."""

    def __init__(self, rules: str, lease: int, patience: int, rest: tuple[Any, ...]) -> None:
        self.slots, self.failures, self.open_for, self.successes, *quotas = (int(each) for each in rules.split(","))
        self.quotas = list(zip(quotas[::2], quotas[1::2], strict=True))
        self.most = max([limit for limit, _ in self.quotas], default=0)
        self.lease, self.patience, self.rest = lease, patience, rest


class Record:
    """The same in Python: a member."""

    def __init__(self) -> None:
        self.used = self.failed = self.succeeded = self.number = self.cool = self.open = self.retired = 0
        self.breaker = CLOSED
        self.log: list[int] = []

    def ready_time(self, now: int, rules: Rules) -> tuple[int | None, str]:
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

    def change(self, breaker: int, now: int, rules: Rules) -> None:
        self.breaker, self.number, self.failed, self.succeeded = breaker, self.number + 1, 0, 0
        if breaker == OPEN:
            self.open = now + rules.open_for

    def judge(self, number: int, outcome: str, now: int, rules: Rules) -> None:
        if rules.failures > 0 and number == self.number:
            if outcome == "failure":
                self.failed += 1
                if self.breaker == HALF_OPEN or self.failed >= rules.failures:
                    self.change(OPEN, now, rules)
            elif outcome == "success":
                self.failed, self.succeeded = 0, self.succeeded + 1
                if self.breaker == HALF_OPEN and self.succeeded >= rules.successes:
                    self.change(CLOSED, now, rules)
