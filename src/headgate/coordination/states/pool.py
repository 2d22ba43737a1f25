"""The state of a pool: when each member may be leased, the leases, and the callers that wait for one.

Each member has a ready time (see `headgate.coordination.states.member`), and each use makes it later. So the member
with the lowest ready time is the least recently used, and when no member is ready the lowest ready time is exactly how
long to wait. No two members get the same ready time: it is the clock's, or one more than the last that was given. So
the order is right even within a microsecond; a ready time that is ahead of the clock for this reason counts as now.

A lease has a deadline. A lease that was not settled in time is settled by the next call to the pool, whatever it is.

A caller that finds no member may queue. It stays queued as long as it asks again within *waiter_ttl*, and no caller
that came later gets a member before it.

acquire  leases a member to *id*, or queues it if it *waits*. Replies with granted, member and wait. Granted is 1; or 0,
         and wait is the microseconds until one may be ready (-1: not known); or -1, as this id was settled.
settle   ends the lease *id*: counts its outcome and its use, cools the member down, retires it. Also takes *id* out of
         the queue. Replies with 1 if it was leased, else with 0.
renew    starts the lease *id* again. Replies with 1, or with 0 if there is none.
add      adds members; one that is retired comes back. Replies with how many members there are.
add_new  the same, but one that is retired stays so.
retire   keeps members from being leased; leases that they have go on. Replies with how many members there are.
status   replies with how many callers wait, and six values for each member.

Each may be run twice with the same id. An acquire of a lease that exists replies with its member. A settled id is
remembered, so it is settled once, and an acquire that was delayed in the network and arrives after that is refused: it
would lease a member that no caller is going to return. An id that was settled without a lease is remembered with a
minus before it. The others only write what is already there.

On Redis the keys come in pairs of equal size, which every call checks. If one of a pair was deleted or evicted, the
pool is repaired from the other.
"""

from __future__ import annotations

from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired
from headgate.coordination.states.member import DEFAULT_RULES, HALF_OPEN, OPEN, MemberRecord, PoolRules
from headgate.coordination.states.member import LUA as MEMBER

UNANSWERED = 2  # a use that the server may still count, at any time until the end of its lease
EXPIRE_BATCH = 100  # expired leases, and expired waiters, that one call settles
IDLE_TTL = 3_600_000  # milliseconds that a key is kept after its last use, if no member depends on it
SETTLED_TTL = 30 * MICROSECONDS  # how long a settled id is remembered: requests may be repeated, or late

# ARGV from 3: id; lease, waiter_ttl, rules; then the arguments of the operation. The rules are numbers with commas:
# slots, failures (0: no breaker), open_for, successes, then limit and window of each quota; or ''. The rules of the
# last add or add_new that gave some hold for all callers, so a caller that only reads need not know them. A pool with
# members but without rules takes those of the first call that gives some.
#
# A member whose ready time is not known (leased, retired) is in "ready", too, at NEVER.
LUA = f"""
local ready, members, leases, holders, settled, waiting, alive, last_time, rules, log = unpack(KEYS)
local id, lease, waiter_ttl, first = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), 7
local stored_rules = redis.call('GET', rules)
local given_rules = ARGV[6] ~= '' and ARGV[6]
local adds = op == 'add' or op == 'add_new'
local sets_rules = given_rules and (adds or not stored_rules and redis.call('HLEN', members) > 0)
local rules_text = sets_rules and given_rules or stored_rules or given_rules or '{DEFAULT_RULES}'
{MEMBER}
local last = tonumber(redis.call('GET', last_time) or 0)

local function next_time()
  last = math.max(now, last + 1)
  redis.call('SET', last_time, format_int(last), 'PX', {IDLE_TTL})
  return last
end

local function load(member)
  local packed = redis.call('HGET', members, member)
  return packed and cmsgpack.unpack(packed)
end

local function save(member, record)
  redis.call('HSET', members, member, cmsgpack.pack(record))
  local at, why = ready_time(member, record)
  redis.call('ZADD', ready, format_int(why == 'ready' and next_time() or at), member)
end

local function settle(lease_id, holder, outcome, cooldown, retire, use)
  local number, member = string.match(holder, '^(%d+):(.*)$')
  local lease_end = tonumber(redis.call('ZSCORE', leases, lease_id))
  redis.call('HDEL', holders, lease_id)
  redis.call('ZREM', leases, lease_id)
  local record = load(member)
  if not record then return end
  record.used = record.used - 1
  if use > 0 then record_use(member, record, use == {UNANSWERED} and math.max(now, lease_end or 0) or now) end
  record.cool = math.max(record.cool, now + cooldown)
  if retire == 1 then record.retired = 1 end
  count_outcome(record, tonumber(number), outcome)
  save(member, record)
end

local function repair()
  local used, names, known = {{}}, redis.call('ZRANGE', ready, 0, -1), {{}}
  local held = redis.call('HGETALL', holders)
  for i = 1, #held, 2 do
    local member = string.match(held[i + 1], ':(.*)$')
    used[member] = (used[member] or 0) + 1
    if not redis.call('ZSCORE', leases, held[i]) then redis.call('ZADD', leases, format_int(now + lease), held[i]) end
  end
  for _, each in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    if redis.call('HEXISTS', holders, each) == 0 then redis.call('ZREM', leases, each) end
  end
  for _, each in ipairs(redis.call('ZRANGE', waiting, 0, -1)) do
    if not redis.call('ZSCORE', alive, each) then redis.call('ZADD', alive, format_int(now + waiter_ttl), each) end
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
        record = new_record()
        local never = tonumber(redis.call('ZSCORE', ready, member)) == NEVER
        record.retired = never and not used[member] and 1 or 0  -- NEVER without a lease means that it was retired
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
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', format_int(now), 'LIMIT', 0, {EXPIRE_BATCH})) do
  settle(expired, redis.call('HGET', holders, expired), '', 0, 0, 1)
end
for _, silent in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', format_int(now), 'LIMIT', 0, {EXPIRE_BATCH})) do
  redis.call('ZREM', alive, silent)
  redis.call('ZREM', waiting, silent)
end
if sets_rules and rules_text ~= stored_rules then  -- they hold for all members; those that are ready keep their order
  redis.call('SET', rules, rules_text)
  if max_window > 0 then keep_log() end
  local all = redis.call('HKEYS', members)
  table.sort(all)
  for _, member in ipairs(all) do
    local at, why = ready_time(member, load(member))
    local score = tonumber(redis.call('ZSCORE', ready, member))
    if why ~= 'ready' then
      redis.call('ZADD', ready, format_int(at), member)
    elseif score > math.max(now, last) then
      redis.call('ZADD', ready, format_int(next_time()), member)
    end
  end
end

local function ready_members() return redis.call('ZCOUNT', ready, '-inf', format_int(math.max(now, last))) end

if op == 'acquire' then
  local waits = ARGV[first] == '1'
  if redis.call('ZSCORE', settled, id) or redis.call('ZSCORE', settled, '-' .. id) then return {{-1, '', 0}} end
  local holder = redis.call('HGET', holders, id)
  if holder then return {{1, string.match(holder, ':(.*)$'), 0}} end
  local ahead = redis.call('ZRANK', waiting, id) or redis.call('ZCARD', waiting)
  if ready_members() > ahead then
    local member = redis.call('ZRANGE', ready, 0, 0)[1]
    local record = load(member)
    if record.breaker == {OPEN} then change_breaker(record, {HALF_OPEN}) end
    record.used = record.used + 1
    redis.call('ZADD', leases, format_int(now + lease), id)
    redis.call('HSET', holders, id, record.number .. ':' .. member)
    redis.call('ZREM', waiting, id)
    redis.call('ZREM', alive, id)
    save(member, record)
    if redis.call('ZCARD', waiting) > 0 and ready_members() > 0 then
      redis.pcall('PUBLISH', ready, '')  -- another member is ready for the caller that is first now
    end
    return {{1, member, 0}}
  end
  if waits then
    if not redis.call('ZSCORE', waiting, id) then
      redis.call('ZADD', waiting, format_int(next_time()), id)
    end
    redis.call('ZADD', alive, format_int(now + waiter_ttl), id)
    redis.call('PEXPIRE', waiting, {IDLE_TTL})
    redis.call('PEXPIRE', alive, {IDLE_TTL})
  end
  local wait = NEVER
  -- the members that are ready earlier are for the callers ahead
  local next_ready = redis.call('ZRANGE', ready, ahead, ahead, 'WITHSCORES')[2]
  if next_ready and tonumber(next_ready) < NEVER then wait = next_ready - now end
  local next_lease = redis.call('ZRANGE', leases, 0, 0, 'WITHSCORES')[2]
  if next_lease then wait = math.min(wait, next_lease - now) end
  return {{0, '', wait == NEVER and -1 or wait}}
end

if op == 'settle' then
  local outcome, cooldown, retire, use =
    ARGV[first], tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
  redis.call('ZREM', waiting, id)
  redis.call('ZREM', alive, id)
  redis.call('ZREMRANGEBYSCORE', settled, '-inf', format_int(now))
  if redis.call('ZSCORE', settled, id) then return {{1}} end
  local holder = redis.call('HGET', holders, id)
  redis.call('ZADD', settled, format_int(now + {SETTLED_TTL}), holder and id or '-' .. id)
  redis.call('PEXPIRE', settled, {SETTLED_TTL // 1000})
  if holder then settle(id, holder, outcome, cooldown, retire, use) end
  redis.pcall('PUBLISH', ready, '')
  return {{holder and 1 or 0}}
end

if op == 'renew' then
  if redis.call('HEXISTS', holders, id) == 0 then return {{0}} end
  redis.call('ZADD', leases, format_int(now + lease), id)
  return {{1}}
end

if adds then
  for i = first, #ARGV do
    local record = load(ARGV[i])
    if not record then
      save(ARGV[i], new_record())
    elseif op == 'add' and record.retired == 1 then
      record.retired = 0
      save(ARGV[i], record)
    end
  end
  redis.pcall('PUBLISH', ready, '')
  return {{redis.call('HLEN', members)}}
end

if op == 'retire' then
  for i = first, #ARGV do
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
local reply = {{redis.call('ZCARD', waiting)}}
for _, member in ipairs(names) do
  local record = load(member)
  local at, why = ready_time(member, record)
  local wait = why == 'ready' and 0 or at == NEVER and -1 or at - now
  for _, part in ipairs({{member, why, record.used, wait, record.breaker, record.failed}}) do
    table.insert(reply, part)
  end
end
return reply
"""


class PoolState:
    """The same in Python."""

    def __init__(self) -> None:
        self.ready: dict[str, int] = {}
        self.members: dict[str, MemberRecord] = {}
        self.leases: dict[str, int] = {}
        self.holders: dict[str, tuple[int, str]] = {}
        self.settled: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.alive: dict[str, int] = {}
        self.last = 0
        self.rules = ""
        self.max_limit = self.max_window = 0

    def acquire(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        [waits] = rules.arguments
        if id in self.settled or "-" + id in self.settled:
            return [-1, "", 0]
        if id in self.holders:
            return [1, self.holders[id][1], 0]
        order = sorted(self.waiting, key=self.waiting.__getitem__)
        ahead = order.index(id) if id in self.waiting else len(order)
        if self._ready_members(now) > ahead:
            member = min(self.ready, key=lambda each: (self.ready[each], each))
            record = self.members[member]
            if record.breaker == OPEN:
                record.change_breaker(HALF_OPEN, now, rules)
            record.used += 1
            self.leases[id] = now + rules.lease
            self.holders[id] = (record.number, member)
            self.waiting.pop(id, None)
            self.alive.pop(id, None)
            self._save(member, record, now, rules)
            return [1, member, 0]
        if waits == 1:
            if id not in self.waiting:
                self.waiting[id] = self._next_time(now)
            self.alive[id] = now + rules.waiter_ttl
        waits_for = sorted(self.ready.values())[ahead : ahead + 1] + list(self.leases.values())
        return [0, "", min([at - now for at in waits_for], default=-1)]

    def settle(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        outcome, cooldown, retire, use = rules.arguments
        self.waiting.pop(id, None)
        self.alive.pop(id, None)
        drop_expired(self.settled, now)
        if id in self.settled:
            return [1]
        held = id in self.holders
        self.settled[id if held else "-" + id] = now + SETTLED_TTL
        if held:
            self._settle(id, outcome, cooldown, retire, use, now, rules)
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
        for member in rules.arguments:
            record = self.members.get(member)
            if record is None:
                self._save(member, MemberRecord(), now, rules)
            elif restore and record.retired:
                record.retired = 0
                self._save(member, record, now, rules)
        return [len(self.members)]

    def retire(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        for member in rules.arguments:
            if record := self.members.get(member):
                record.retired = 1
                self._save(member, record, now, rules)
        return [len(self.members)]

    def status(self, now: int, id: str, *arguments: Any) -> list[Any]:
        rules = self._begin(now, arguments)
        reply: list[Any] = [len(self.waiting)]
        for member in sorted(self.members):
            record = self.members[member]
            at, why = record.ready_time(now, rules)
            wait = 0 if why == "ready" else -1 if at is None else at - now
            reply += [member, why, record.used, wait, record.breaker, record.failed]
        return reply

    def is_expired(self, now: int) -> bool:
        return not self.members and not self.waiting

    def _begin(self, now: int, arguments: tuple[Any, ...], adds: bool = False) -> PoolRules:
        lease, waiter_ttl, given, *rest = arguments
        before = self.rules
        if given and (adds or (not before and self.members)):
            self.rules = given
        rules = PoolRules(self.rules or given or DEFAULT_RULES, lease, waiter_ttl, tuple(rest))
        if self.rules:
            self.max_limit = max([self.max_limit, *(limit for limit, _ in rules.quotas)])
            self.max_window = max([self.max_window, *(window for _, window in rules.quotas)])
        for expired in _due(self.leases, now):
            self._settle(expired, "", 0, 0, 1, now, rules)
        for silent in _due(self.alive, now):
            del self.alive[silent]
            self.waiting.pop(silent, None)
        if self.rules != before:
            for member in sorted(self.members):
                at, why = self.members[member].ready_time(now, rules)
                if at is None:
                    self.ready.pop(member, None)
                elif why != "ready":
                    self.ready[member] = at
                elif self.ready.get(member, at + self.last + 1) > max(now, self.last):
                    self.ready[member] = self._next_time(now)
        return rules

    def _ready_members(self, now: int) -> int:
        return sum(at <= max(now, self.last) for at in self.ready.values())

    def _save(self, member: str, record: MemberRecord, now: int, rules: PoolRules) -> None:
        self.members[member] = record
        self.ready.pop(member, None)
        at, why = record.ready_time(now, rules)
        if at is not None:
            self.ready[member] = self._next_time(now) if why == "ready" else at

    def _next_time(self, now: int) -> int:
        self.last = max(now, self.last + 1)
        return self.last

    def _settle(self, id: str, outcome: str, cooldown: int, retire: int, use: int, now: int, rules: PoolRules) -> None:
        number, member = self.holders.pop(id)
        lease_end = self.leases.pop(id)
        record = self.members[member]
        record.used -= 1
        if use:
            record.record_use(max(now, lease_end) if use == UNANSWERED else now, self.max_limit, self.max_window, now)
        record.cool = max(record.cool, now + cooldown)
        if retire == 1:
            record.retired = 1
        record.count_outcome(number, outcome, now, rules)
        self._save(member, record, now, rules)


def _due(times: dict[str, int], now: int) -> list[str]:
    """The ids whose time has come, as many as one call handles, in the order of Redis."""
    return sorted((each for each, until in times.items() if until <= now), key=lambda each: (times[each], each))[
        :EXPIRE_BATCH
    ]


SUFFIXES = ("", ":members", ":leases", ":holders", ":done", ":waiting", ":alive", ":order", ":rules", ":log")
POOL = StateMachine("pool", SUFFIXES, LUA, PoolState)
