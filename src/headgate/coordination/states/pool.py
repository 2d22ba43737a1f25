"""The rules of a pool: who is ready, who has what, and who waits.

Each member has a ready time (see `headgate.coordination.states.member`), and to be used writes a later one. So the
member with the lowest is the least recently used, and when nobody is ready the next ready time is exactly how long to
wait.

No two get the same ready time: the clock, or one more than the last time that was given. So the order is right within
a microsecond, too, and a time that runs ahead of the clock for it counts as now.

A member is leased, not taken out: a lease has a deadline, and one that nobody settled in time is settled by the next
who asks.

Whoever finds nothing may queue: each stays in the queue as long as it asks now and then, and a member goes to nobody
who came later.

On Redis the keys come in pairs of equal size, which every call checks: where one of them was deleted or evicted, the
pool goes on with what the other says.
"""

from __future__ import annotations

from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired
from headgate.coordination.states.member import HALF_OPEN, OPEN, PLAIN, MemberRecord, PoolRules
from headgate.coordination.states.member import LUA as MEMBER

UNANSWERED = 2  # a use that the other side may still count, at any time until the lease would have ended
REAPED = 100  # leases that ran out, and those who wait no longer, settled on the way by one call
IDLE = 3_600_000  # milliseconds that what no member needs is kept for
DONE = 30 * MICROSECONDS  # how long a settled lease is remembered: requests may be repeated, or late

# ARGV from 3: id; lease, patience (of those who wait), rules; then what the operation takes. The rules are numbers with
# commas: slots, failures (0: no breaker), open_for, successes, limit and window of each quota; or nothing. Those of
# whoever gave some and added members last count for all: somebody who only looks need not know them. Where nobody has
# given any yet, the first who does counts, whatever it came for.
#
# Who cannot be had at any time is in "ready", too, at NEVER.
LUA = f"""
local ready, members, leases, holders, done, waiting, alive, order, rules, log = unpack(KEYS)
local id, lease, patience, rest = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), 7
local before = redis.call('GET', rules)
local given = ARGV[6] ~= '' and ARGV[6]
local states = given and (op == 'add' or op == 'add_new' or not before and redis.call('HLEN', members) > 0)
local current = states and given or before or given or '{PLAIN}'
{MEMBER}
local last = tonumber(redis.call('GET', order) or 0)

local function tick()
  last = math.max(now, last + 1)
  redis.call('SET', order, whole(last), 'PX', {IDLE})
  return last
end

local function load(member)
  local packed = redis.call('HGET', members, member)
  return packed and cmsgpack.unpack(packed)
end

local function save(member, record)
  redis.call('HSET', members, member, cmsgpack.pack(record))
  local at, why = ready_time(member, record)
  redis.call('ZADD', ready, whole(why == 'ready' and tick() or at), member)
end

local function settle(lease_id, holder, outcome, cooldown, retire, used)
  local number, member = string.match(holder, '^(%d+):(.*)$')
  local lease_end = tonumber(redis.call('ZSCORE', leases, lease_id))
  redis.call('HDEL', holders, lease_id)
  redis.call('ZREM', leases, lease_id)
  local record = load(member)
  if not record then return end
  record.used = record.used - 1
  if used > 0 then note(member, record, used == {UNANSWERED} and math.max(now, lease_end or 0) or now) end
  record.cool = math.max(record.cool, now + cooldown)
  if retire == 1 then record.retired = 1 end
  judge(record, tonumber(number), outcome)
  save(member, record)
end

local function repair()
  local used, names, known = {{}}, redis.call('ZRANGE', ready, 0, -1), {{}}
  local held = redis.call('HGETALL', holders)
  for i = 1, #held, 2 do
    local member = string.match(held[i + 1], ':(.*)$')
    used[member] = (used[member] or 0) + 1
    if not redis.call('ZSCORE', leases, held[i]) then redis.call('ZADD', leases, whole(now + lease), held[i]) end
  end
  for _, each in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    if redis.call('HEXISTS', holders, each) == 0 then redis.call('ZREM', leases, each) end
  end
  for _, each in ipairs(redis.call('ZRANGE', waiting, 0, -1)) do
    if not redis.call('ZSCORE', alive, each) then redis.call('ZADD', alive, whole(now + patience), each) end
  end
  for _, each in ipairs(redis.call('ZRANGE', alive, 0, -1)) do
    if not redis.call('ZSCORE', waiting, each) then redis.call('ZREM', alive, each) end
  end
  for _, member in ipairs(redis.call('HKEYS', members)) do table.insert(names, member) end
  for _, member in ipairs(names) do
    if not known[member] then
      known[member] = true
      local record = load(member)
      if not record then
        record = newcomer()
        local never = tonumber(redis.call('ZSCORE', ready, member)) == NEVER
        record.retired = never and not used[member] and 1 or 0  -- else somebody has it
      end
      record.used = used[member] or 0
      save(member, record)
    end
  end
end

if redis.call('ZCARD', ready) ~= redis.call('HLEN', members)
  or redis.call('ZCARD', leases) ~= redis.call('HLEN', holders)
  or redis.call('ZCARD', waiting) ~= redis.call('ZCARD', alive) then
  repair()
end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', whole(now), 'LIMIT', 0, {REAPED})) do
  settle(old, redis.call('HGET', holders, old), '', 0, 0, 1)
end
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', whole(now), 'LIMIT', 0, {REAPED})) do
  redis.call('ZREM', alive, dead)
  redis.call('ZREM', waiting, dead)
end
if states and current ~= before then  -- they are for those who are here, too, who keep their order
  redis.call('SET', rules, current)
  if longest > 0 then keep_log() end
  local all = redis.call('HKEYS', members)
  table.sort(all)
  for _, member in ipairs(all) do
    local at, why = ready_time(member, load(member))
    local score = tonumber(redis.call('ZSCORE', ready, member))
    if why ~= 'ready' then
      redis.call('ZADD', ready, whole(at), member)
    elseif score > math.max(now, last) then
      redis.call('ZADD', ready, whole(tick()), member)
    end
  end
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
    redis.call('PEXPIRE', waiting, {IDLE})
    redis.call('PEXPIRE', alive, {IDLE})
  end
  local wait = NEVER
  local next_ready = redis.call('ZRANGE', ready, ahead, ahead, 'WITHSCORES')[2]  -- those before are somebody else's
  if next_ready and tonumber(next_ready) < NEVER then wait = next_ready - now end
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

if op == 'add' or op == 'add_new' then
  for i = rest, #ARGV do
    local record = load(ARGV[i])
    if not record then
      save(ARGV[i], newcomer())
    elseif op == 'add' and record.retired == 1 then
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
  local at, why = ready_time(member, record)
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
        self.members: dict[str, MemberRecord] = {}
        self.leases: dict[str, int] = {}
        self.holders: dict[str, tuple[int, str]] = {}
        self.done: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.alive: dict[str, int] = {}
        self.last = 0
        self.rules = ""
        self.most = self.longest = 0

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
        drop_expired(self.done, now)
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
        return self._add(now, arguments, restore=True)

    def add_new(self, now: int, id: str, *arguments: Any) -> list[Any]:
        return self._add(now, arguments, restore=False)

    def _add(self, now: int, arguments: tuple[Any, ...], restore: bool) -> list[Any]:
        rules = self._begin(now, arguments, adds=True)
        for member in rules.rest:
            record = self.members.get(member)
            if record is None:
                self._save(member, MemberRecord(), now, rules)
            elif restore and record.retired:
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

    def is_expired(self, now: int) -> bool:
        return not self.members and not self.waiting

    def _begin(self, now: int, arguments: tuple[Any, ...], adds: bool = False) -> PoolRules:
        lease, patience, given, *rest = arguments
        before = self.rules
        if given and (adds or (not before and self.members)):
            self.rules = given
        rules = PoolRules(self.rules or given or PLAIN, lease, patience, tuple(rest))
        if self.rules:
            self.most = max([self.most, *(limit for limit, _ in rules.quotas)])
            self.longest = max([self.longest, *(window for _, window in rules.quotas)])
        for old in _due(self.leases, now):
            self._settle(old, "", 0, 0, 1, now, rules)
        for dead in _due(self.alive, now):
            del self.alive[dead]
            self.waiting.pop(dead, None)
        if self.rules != before:
            for member in sorted(self.members):
                at, why = self.members[member].ready_time(now, rules)
                if at is None:
                    self.ready.pop(member, None)
                elif why != "ready":
                    self.ready[member] = at
                elif self.ready.get(member, at + self.last + 1) > max(now, self.last):
                    self.ready[member] = self._tick(now)
        return rules

    def _save(self, member: str, record: MemberRecord, now: int, rules: PoolRules) -> None:
        self.members[member] = record
        self.ready.pop(member, None)
        at, why = record.ready_time(now, rules)
        if at is not None:
            self.ready[member] = self._tick(now) if why == "ready" else at

    def _tick(self, now: int) -> int:
        self.last = max(now, self.last + 1)
        return self.last

    def _settle(self, id: str, outcome: str, cooldown: int, retire: int, used: int, now: int, rules: PoolRules) -> None:
        number, member = self.holders.pop(id)
        lease_end = self.leases.pop(id)
        record = self.members[member]
        record.used -= 1
        if used:
            record.note(max(now, lease_end) if used == UNANSWERED else now, self.most, self.longest, now)
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


SUFFIXES = ("", ":members", ":leases", ":holders", ":done", ":waiting", ":alive", ":order", ":rules", ":log")
POOL = StateMachine("pool", SUFFIXES, LUA, PoolState)
