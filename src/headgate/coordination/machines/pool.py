"""The rules of a pool: who is ready, who has what, and what a member must wait for.

One number decides when a member may be had: its ready time. To be used, to cool down, to be at its quota, to be broken:
each only writes a later one. So the member with the lowest is the least recently used, and when nobody is ready the
next ready time is exactly how long to wait.

No two get the same ready time: the clock, or one more than the last time that was given. So the order is right within
a microsecond, too, and a time that runs ahead of the clock for it counts as now.

A member is leased, not taken out: a lease has a deadline, and one that nobody settled in time is settled by the next
who asks. A quota counts a use until its window is over after the use was *settled*: whatever the network does, the
other side never sees more within a window. A member's breaker is part of its record, with the same three states as
`CircuitBreaker`.

Whoever finds nothing may queue: each stays in the queue as long as it asks now and then, and a member goes to nobody
who came later.
"""

from __future__ import annotations

from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.machine import Machine, forget

REAPED = 100  # leases that ran out, and those who wait no longer, settled on the way by one call
DONE = 30 * MICROSECONDS  # how long a settled lease is remembered: requests may be repeated, or late
APART = 1000  # microseconds more than a window, for those who count in milliseconds or include both ends

PLAIN = "1,0,600000000,3"  # the rules of a pool that nobody gave any

CLOSED, OPEN, HALF_OPEN = 0, 1, 2

# A record: used (leases), failed and succeeded in a row, breaker, its number of changes, cool and open until, retired,
# log (when its uses were settled, oldest first).
#
# ARGV from 3: id; lease, patience (of those who wait), rules; then what the operation takes. The rules are numbers with
# commas: slots, failures (0: no breaker), open_for, successes, limit and window of each quota; or nothing. Those of
# whoever gave some and added members last count for all: somebody who only looks need not know them.
LUA = f"""
local ready, members, leases, holders, done, waiting, alive, order, rules =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local id, lease, patience, rest = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), 7
local before = redis.call('GET', rules)
local given = ARGV[6] ~= '' and ARGV[6]
local current = before or given or '{PLAIN}'
if op == 'add' and given then current = given end
if op == 'add' and current ~= before then redis.call('SET', rules, current) end
local numbers = {{}}
for number in string.gmatch(current, '%d+') do table.insert(numbers, tonumber(number)) end
local slots, failures, open_for, successes = unpack(numbers)
local quotas, most = {{}}, 0
for i = 5, #numbers, 2 do
  table.insert(quotas, {{numbers[i], numbers[i + 1]}})
  most = math.max(most, numbers[i])
end
local NEVER = 9007199254740992
local last = tonumber(redis.call('GET', order) or 0)

local function tick()
  last = math.max(now, last + 1)
  redis.call('SET', order, whole(last))
  return last
end

local function load(member)
  local packed = redis.call('HGET', members, member)
  return packed and cmsgpack.unpack(packed)
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

local function save(member, record)
  while #record.log > most do table.remove(record.log, 1) end
  redis.call('HSET', members, member, cmsgpack.pack(record))
  redis.call('ZREM', ready, member)
  local at, why = ready_time(record)
  if at == NEVER then return end
  redis.call('ZADD', ready, whole(why == 'ready' and tick() or at), member)
end

local function change(record, breaker)
  record.breaker, record.number, record.failed, record.succeeded = breaker, record.number + 1, 0, 0
  if breaker == {OPEN} then record.open = now + open_for end
end

local function settle(lease_id, holder, outcome, cooldown, retire, used)
  local number, member = string.match(holder, '^(%d+):(.*)$')
  redis.call('HDEL', holders, lease_id)
  redis.call('ZREM', leases, lease_id)
  local record = load(member)
  record.used = record.used - 1
  if used == 1 and most > 0 then table.insert(record.log, now) end
  record.cool = math.max(record.cool, now + cooldown)
  if retire == 1 then record.retired = 1 end
  if failures > 0 and tonumber(number) == record.number then  -- else it began before the breaker changed
    if outcome == 'failure' then
      record.failed = record.failed + 1
      if record.breaker == {HALF_OPEN} or record.failed >= failures then change(record, {OPEN}) end
    elseif outcome == 'success' then
      record.failed, record.succeeded = 0, record.succeeded + 1
      if record.breaker == {HALF_OPEN} and record.succeeded >= successes then change(record, {CLOSED}) end
    end
  end
  save(member, record)
end

for _, old in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', whole(now), 'LIMIT', 0, {REAPED})) do
  settle(old, redis.call('HGET', holders, old), '', 0, 0, 1)
end
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', whole(now), 'LIMIT', 0, {REAPED})) do
  redis.call('ZREM', alive, dead)
  redis.call('ZREM', waiting, dead)
end

if op == 'acquire' then
  local waits = ARGV[rest] == '1'
  if redis.call('ZSCORE', done, id) or redis.call('ZSCORE', done, '-' .. id) then return {{-1, '', 0}} end
  local holder = redis.call('HGET', holders, id)
  if holder then return {{1, string.match(holder, ':(.*)$'), 0}} end
  local ahead = redis.call('ZRANK', waiting, id) or redis.call('ZCARD', waiting)
  if redis.call('ZCOUNT', ready, '-inf', whole(math.max(now, last))) > ahead then
    local member = redis.call('ZRANGE', ready, 0, 0)[1]
    local record = load(member)
    if record.breaker == {OPEN} then change(record, {HALF_OPEN}) end
    record.used = record.used + 1
    redis.call('ZADD', leases, whole(now + lease), id)
    redis.call('HSET', holders, id, record.number .. ':' .. member)
    redis.call('ZREM', waiting, id)
    redis.call('ZREM', alive, id)
    save(member, record)
    if redis.call('ZCARD', waiting) > 0 and redis.call('ZCOUNT', ready, '-inf', whole(math.max(now, last))) > 0 then
      redis.pcall('PUBLISH', ready, '')  -- one more may be had, and somebody else is the first now
    end
    return {{1, member, 0}}
  end
  if waits then
    if not redis.call('ZSCORE', waiting, id) then
      redis.call('ZADD', waiting, whole(tick()), id)
    end
    redis.call('ZADD', alive, whole(now + patience), id)
    redis.call('PEXPIRE', waiting, 3600000)
    redis.call('PEXPIRE', alive, 3600000)
  end
  local wait = NEVER
  local next_ready = redis.call('ZRANGE', ready, ahead, ahead, 'WITHSCORES')[2]  -- those before are somebody else's
  if next_ready then wait = next_ready - now end
  local next_lease = redis.call('ZRANGE', leases, 0, 0, 'WITHSCORES')[2]
  if next_lease then wait = math.min(wait, next_lease - now) end
  return {{0, '', wait == NEVER and -1 or wait}}
end

if op == 'settle' then
  local outcome, cooldown, retire, used =
    ARGV[rest], tonumber(ARGV[rest + 1]), tonumber(ARGV[rest + 2]), tonumber(ARGV[rest + 3])
  redis.call('ZREM', waiting, id)
  redis.call('ZREM', alive, id)
  redis.call('ZREMRANGEBYSCORE', done, '-inf', whole(now))
  if redis.call('ZSCORE', done, id) then return {{1}} end
  local holder = redis.call('HGET', holders, id)
  redis.call('ZADD', done, whole(now + {DONE}), holder and id or '-' .. id)
  redis.call('PEXPIRE', done, {DONE // 1000})
  if holder then settle(id, holder, outcome, cooldown, retire, used) end
  redis.pcall('PUBLISH', ready, '')
  return {{holder and 1 or 0}}
end

if op == 'renew' then
  if redis.call('HEXISTS', holders, id) == 0 then return {{0}} end
  redis.call('ZADD', leases, whole(now + lease), id)
  return {{1}}
end

if op == 'add' then
  if before and before ~= current then  -- new rules are for those who are here, too, who keep their order
    local all = redis.call('HKEYS', members)
    table.sort(all)
    for _, member in ipairs(all) do
      local at, why = ready_time(load(member))
      local score = tonumber(redis.call('ZSCORE', ready, member) or NEVER)
      if at == NEVER then
        redis.call('ZREM', ready, member)
      elseif why ~= 'ready' then
        redis.call('ZADD', ready, whole(at), member)
      elseif score > math.max(now, last) then
        redis.call('ZADD', ready, whole(tick()), member)
      end
    end
  end
  for i = rest, #ARGV do
    local record = load(ARGV[i])
    if not record or record.retired == 1 then
      record = record or {{used = 0, failed = 0, succeeded = 0, breaker = {CLOSED}, number = 0, cool = 0, open = 0,
        log = {{}}}}
      record.retired = 0
      save(ARGV[i], record)
    end
  end
  redis.pcall('PUBLISH', ready, '')
  return {{redis.call('HLEN', members)}}
end

if op == 'retire' then
  for i = rest, #ARGV do
    local record = load(ARGV[i])
    if record then
      record.retired = 1
      save(ARGV[i], record)
    end
  end
  return {{redis.call('HLEN', members)}}
end

local names = redis.call('HKEYS', members)
table.sort(names)
local answer = {{redis.call('ZCARD', waiting)}}
for _, member in ipairs(names) do
  local record = load(member)
  local at, why = ready_time(record)
  local wait = why == 'ready' and 0 or at == NEVER and -1 or at - now
  for _, part in ipairs({{member, why, record.used, wait, record.breaker, record.failed}}) do
    table.insert(answer, part)
  end
end
return answer
"""


class Record:
    """A member."""

    def __init__(self) -> None:
        self.used = self.failed = self.succeeded = self.number = self.cool = self.open = self.retired = 0
        self.breaker = CLOSED
        self.log: list[int] = []


class Rules:
    """The rules of a pool, and what a call takes besides."""

    def __init__(self, rules: str, lease: int, patience: int, rest: tuple[Any, ...]) -> None:
        self.slots, self.failures, self.open_for, self.successes, *quotas = (int(each) for each in rules.split(","))
        self.quotas = list(zip(quotas[::2], quotas[1::2], strict=True))
        self.most = max([limit for limit, _ in self.quotas], default=0)
        self.lease, self.patience, self.rest = lease, patience, rest


class PoolState:
    """The same in Python."""

    def __init__(self) -> None:
        self.ready: dict[str, int] = {}
        self.members: dict[str, Record] = {}
        self.leases: dict[str, int] = {}
        self.holders: dict[str, tuple[int, str]] = {}
        self.done: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.alive: dict[str, int] = {}
        self.last = 0
        self.rules = ""

    def acquire(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        [waits] = rules.rest
        if id in self.done or "-" + id in self.done:
            return [-1, "", 0]
        if id in self.holders:
            return [1, self.holders[id][1], 0]
        order = sorted(self.waiting, key=self.waiting.__getitem__)
        ahead = order.index(id) if id in self.waiting else len(order)
        if sum(at <= max(now, self.last) for at in self.ready.values()) > ahead:
            member = min(self.ready, key=lambda each: (self.ready[each], each))
            record = self.members[member]
            if record.breaker == OPEN:
                self._change(record, HALF_OPEN, now, rules)
            record.used += 1
            self.leases[id] = now + rules.lease
            self.holders[id] = (record.number, member)
            self.waiting.pop(id, None)
            self.alive.pop(id, None)
            self._save(member, record, now, rules)
            return [1, member, 0]
        if waits == 1:
            if id not in self.waiting:
                self.waiting[id] = self._tick(now)
            self.alive[id] = now + rules.patience
        waits_for = sorted(self.ready.values())[ahead : ahead + 1] + list(self.leases.values())
        return [0, "", min([at - now for at in waits_for], default=-1)]

    def settle(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        outcome, cooldown, retire, used = rules.rest
        self.waiting.pop(id, None)
        self.alive.pop(id, None)
        forget(self.done, now)
        if id in self.done:
            return [1]
        held = id in self.holders
        self.done[id if held else "-" + id] = now + DONE
        if held:
            self._settle(id, outcome, cooldown, retire, used, now, rules)
        return [int(held)]

    def renew(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        if id not in self.holders:
            return [0]
        self.leases[id] = now + rules.lease
        return [1]

    def add(self, now: int, id: str, *arguments: Any) -> list[Any]:
        before = self.rules
        self.rules = arguments[2] or before or PLAIN
        rules = self._begin(now, arguments)
        if before and before != self.rules:
            for member in sorted(self.members):
                at, why = self._ready_time(self.members[member], now, rules)
                if at is None:
                    self.ready.pop(member, None)
                elif why != "ready":
                    self.ready[member] = at
                elif self.ready.get(member, at + self.last + 1) > max(now, self.last):
                    self.ready[member] = self._tick(now)
        for member in rules.rest:
            record = self.members.get(member)
            if record is None or record.retired:
                record = record or Record()
                record.retired = 0
                self._save(member, record, now, rules)
        return [len(self.members)]

    def retire(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        for member in rules.rest:
            if record := self.members.get(member):
                record.retired = 1
                self._save(member, record, now, rules)
        return [len(self.members)]

    def status(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        answer: list[Any] = [len(self.waiting)]
        for member in sorted(self.members):
            record = self.members[member]
            at, why = self._ready_time(record, now, rules)
            wait = 0 if why == "ready" else -1 if at is None else at - now
            answer += [member, why, record.used, wait, record.breaker, record.failed]
        return answer

    def idle(self, now: int) -> bool:
        return not self.members and not self.waiting

    def _begin(self, now: int, arguments: tuple[Any, ...]) -> Rules:
        lease, patience, given, *rest = arguments
        rules = Rules(self.rules or given or PLAIN, lease, patience, tuple(rest))
        for old in _due(self.leases, now):
            self._settle(old, "", 0, 0, 1, now, rules)
        for dead in _due(self.alive, now):
            del self.alive[dead]
            self.waiting.pop(dead, None)
        return rules

    def _ready_time(self, record: Record, now: int, rules: Rules) -> tuple[int | None, str]:
        places = rules.slots
        if record.breaker == HALF_OPEN:
            places = max(min(places, rules.successes - record.succeeded), 1)
        if record.retired:
            return None, "retired"
        if record.used >= places:
            return None, "leased"
        at, why = now, "ready"
        waits = [(record.cool, "cooling")]
        if record.breaker == OPEN:
            waits.append((record.open, "open"))
        for limit, window in rules.quotas:
            free = limit - record.used
            if free <= 0:
                return None, "limited"
            if len(record.log) >= free:
                waits.append((record.log[-free] + window + APART, "limited"))
        for time, reason in waits:
            if time > at:
                at, why = time, reason
        return at, why

    def _save(self, member: str, record: Record, now: int, rules: Rules) -> None:
        record.log = record.log[-rules.most :] if rules.most else []
        self.members[member] = record
        self.ready.pop(member, None)
        at, why = self._ready_time(record, now, rules)
        if at is not None:
            self.ready[member] = self._tick(now) if why == "ready" else at

    def _tick(self, now: int) -> int:
        self.last = max(now, self.last + 1)
        return self.last

    def _change(self, record: Record, breaker: int, now: int, rules: Rules) -> None:
        record.breaker, record.number, record.failed, record.succeeded = breaker, record.number + 1, 0, 0
        if breaker == OPEN:
            record.open = now + rules.open_for

    def _settle(self, id: str, outcome: str, cooldown: int, retire: int, used: int, now: int, rules: Rules) -> None:
        number, member = self.holders.pop(id)
        del self.leases[id]
        record = self.members[member]
        record.used -= 1
        if used == 1 and rules.quotas:
            record.log.append(now)
        record.cool = max(record.cool, now + cooldown)
        if retire == 1:
            record.retired = 1
        if rules.failures > 0 and number == record.number:
            if outcome == "failure":
                record.failed += 1
                if record.breaker == HALF_OPEN or record.failed >= rules.failures:
                    self._change(record, OPEN, now, rules)
            elif outcome == "success":
                record.failed, record.succeeded = 0, record.succeeded + 1
                if record.breaker == HALF_OPEN and record.succeeded >= rules.successes:
                    self._change(record, CLOSED, now, rules)
        self._save(member, record, now, rules)


def _due(times: dict[str, int], now: int) -> list[str]:
    """The first of those whose time has come, as Redis orders them."""
    return sorted((each for each, until in times.items() if until <= now), key=lambda each: (times[each], each))[
        :REAPED
    ]


MACHINE = Machine(
    "pool", ("", ":members", ":leases", ":holders", ":done", ":waiting", ":alive", ":order", ":rules"), LUA, PoolState
)
