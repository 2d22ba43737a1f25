"""The rules of a pool: who is ready, who has what, and who waits.

Each member has a ready time (see `headgate.coordination.machines.member`), and to be used writes a later one. So the
member with the lowest is the least recently used, and when nobody is ready the next ready time is exactly how long to
wait.

No two get the same ready time: the clock, or one more than the last time that was given. So the order is right within
a microsecond, too, and a time that runs ahead of the clock for it counts as now.

A member is leased, not taken out: a lease has a deadline, and one that nobody settled in time is settled by the next
who asks.

Whoever finds nothing may queue: each stays in the queue as long as it asks now and then, and a member goes to nobody
who came later.
"""

from __future__ import annotations

from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.machine import Machine, forget
from headgate.coordination.machines.member import HALF_OPEN, OPEN, PLAIN, Record, Rules
from headgate.coordination.machines.member import LUA as MEMBER

REAPED = 100  # leases that ran out, and those who wait no longer, settled on the way by one call
DONE = 30 * MICROSECONDS  # how long a settled lease is remembered: requests may be repeated, or late

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
{MEMBER}
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

local function save(member, record)
  while #record.log > most do table.remove(record.log, 1) end
  redis.call('HSET', members, member, cmsgpack.pack(record))
  redis.call('ZREM', ready, member)
  local at, why = ready_time(record)
  if at == NEVER then return end
  redis.call('ZADD', ready, whole(why == 'ready' and tick() or at), member)
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
  judge(record, tonumber(number), outcome)
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
      record = record or newcomer()
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
                record.change(HALF_OPEN, now, rules)
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
                at, why = self.members[member].ready_time(now, rules)
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
            at, why = record.ready_time(now, rules)
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

    def _save(self, member: str, record: Record, now: int, rules: Rules) -> None:
        record.log = record.log[-rules.most :] if rules.most else []
        self.members[member] = record
        self.ready.pop(member, None)
        at, why = record.ready_time(now, rules)
        if at is not None:
            self.ready[member] = self._tick(now) if why == "ready" else at

    def _tick(self, now: int) -> int:
        self.last = max(now, self.last + 1)
        return self.last

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
        record.judge(number, outcome, now, rules)
        self._save(member, record, now, rules)


def _due(times: dict[str, int], now: int) -> list[str]:
    """The first of those whose time has come, as Redis orders them."""
    return sorted((each for each, until in times.items() if until <= now), key=lambda each: (times[each], each))[
        :REAPED
    ]


MACHINE = Machine(
    "pool", ("", ":members", ":leases", ":holders", ":done", ":waiting", ":alive", ":order", ":rules"), LUA, PoolState
)
