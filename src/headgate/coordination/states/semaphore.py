"""The state of a semaphore: its leases, each with an end and a weight, the callers that wait, and released ids.

Each acquisition has a lease id of its own, which its caller chose. The leases of a state weigh *limit* together at
most. Under a lower limit than before nothing is granted until enough leases are gone.

acquire  grants a lease of *weight* to *id* if there is room. Replies with granted, used and wait; used is the weight of
         all leases. Granted is 1, and wait is the time that the lease lasts; or 0, and wait is the time until the first
         lease ends if it is not renewed (-1: there is none); or -1, as this id was released before.
claim    is an acquire with a fence, a number that grows with every claim that is granted, and with a queue: an id that
         is not granted waits for *waiter_ttl*, and longer if it asks again (0: it waits no longer). Replies with
         granted, used, wait and fence. Granted may also be -2: *weight* is more than the limit, which is in place of
         wait.
renew    starts the time of the lease again. Replies with 1 or, if there is no such lease, 0; and with used.
release  ends the lease, or takes *id* out of the queue. Replies with 1 or, if there is no such lease, 0; and with used.
         *outcome* says how the lease ended, by which an adaptive limit grows or shrinks: see `KeptLimit`.
evict    ends all leases; here *id* is that of this call. Replies with 1 or, if there was none, 0; and with used.
peek     replies with whether *id* has a lease, used, and the time until the first lease ends (-1: there is none).
status   replies with used, the number of leases, the number of ids in the queue, and the limit.

Neither an acquire nor a claim is granted the room that an id before it in the queue waits for, so light ones do not
overtake a heavy one. The service acquires, and the limit is an argument of each of its calls. A `Semaphore` claims: the
limit of the last claim that *configures* it is kept and holds for all claims. With *adaptive* settings it is where the
limit starts; a claim with the settings that are kept does not start it again.

Each may be run twice. An id that has a lease and acquires again keeps its weight and gets its full time. A released id
is remembered for a while, with a letter before it: `r` if it had a lease, `n` if it had none. A second release replies
as the first did, and an acquire that was delayed in the network and arrives after its release is refused: it would take
room that no caller is going to give back. The call of an eviction is remembered with `e`, or with `f` if it found none.
A lease that ends by itself is not remembered.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from headgate.clock import MICROSECONDS
from headgate.coordination.adaptive import LUA_ADAPT, KeptLimit
from headgate.coordination.states.machine import StateMachine, drop_expired, lua_of_released, remember

RELEASED_TTL = 60 * MICROSECONDS  # how long a released id is remembered
MAX_RELEASED = 1000  # released ids that are remembered; the oldest are forgotten first
LAST_TTL = 3600 * MICROSECONDS  # how long the limit and the last fence are kept after the last claim or renewal

# Keys: a Sorted Set of lease ids by when they end; a Hash of the weights above 1 by id, less 1, with a fence if the
# lease was claimed, and of the sum of these weights by ''; a Sorted Set of released ids by when to forget them; a
# Sorted Set of the ids in the queue by when they came; a Hash of them with when each is taken for dead, and its weight;
# a Hash of the last limit, what it adapts by, and the last fence. ARGV from 3: id, time of a lease, limit, weight; for
# a claim waiter_ttl, configures (1 or 0) and adaptive settings; for a release its outcome. Times in microseconds.
LUA = f"""
local leases, extras, released, waiting, waiters, last = unpack(KEYS)
local id, lease, limit, weight = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local function drop_extra(each)
  local extra = string.match(redis.call('HGET', extras, each) or '', '^%d+')
  if not extra then return end
  redis.call('HDEL', extras, each)
  if extra ~= '0' then redis.call('HINCRBY', extras, '', -extra) end
end

local weighted = redis.call('HLEN', extras) > 0
if weighted then
  for _, each in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', format_int(now))) do drop_extra(each) end
end
redis.call('ZREMRANGEBYSCORE', leases, '-inf', format_int(now))
local function count() return redis.call('ZCARD', leases) end
if weighted and count() == 0 then redis.call('DEL', extras) end  -- also where only the leases were lost

local function used() return count() + tonumber(redis.call('HGET', extras, '') or 0) end

local function first_end()
  local first = redis.call('ZRANGE', leases, 0, 0, 'WITHSCORES')[2]
  return first and first - now or -1
end
{lua_of_released(RELEASED_TTL, MAX_RELEASED)}
{LUA_ADAPT}
local function hold()
  redis.call('ZADD', leases, format_int(now + lease), id)
  local last_end = redis.call('ZRANGE', leases, -1, -1, 'WITHSCORES')[2]
  local ttl = format_int(math.ceil((last_end - now) / 1000))
  redis.call('PEXPIRE', leases, ttl)
  redis.call('PEXPIRE', extras, ttl)
end

local function keep_last()
  redis.call('PEXPIRE', last, format_int(math.ceil(math.max({LAST_TTL}, lease) / 1000)))
end

local function leave_queue(each)
  return redis.call('ZREM', waiting, each) == 1 and redis.call('HDEL', waiters, each)
end

local function asked_weight(each)  -- nil if it is taken for dead
  local till, asked = string.match(redis.call('HGET', waiters, each) or '', '^(%d+):(%d+)$')
  return till and tonumber(till) > now and tonumber(asked)
end

local function has_room()  -- beside what the ids before this one wait for
  local room, from = limit - used() - weight, 0
  while room >= 0 do
    local ahead = redis.call('ZRANGE', waiting, from, from + 49)
    if #ahead == 0 then return true end
    for _, each in ipairs(ahead) do
      if each == id then return room >= 0 end
      local asked = asked_weight(each)
      if asked then
        room, from = room - asked, from + 1
      else
        leave_queue(each)
      end
    end
  end
  return false
end

local held = redis.call('ZSCORE', leases, id)

if op == 'acquire' then
  if was_released('r' .. id) or was_released('n' .. id) then return {{-1, used(), 0}} end
  if not held then
    if not has_room() then return {{0, used(), first_end()}} end
    if weight > 1 then
      redis.call('HSET', extras, id, weight - 1)
      redis.call('HINCRBY', extras, '', weight - 1)
    end
  end
  hold()
  return {{1, used(), lease}}
end

if op == 'claim' then
  if was_released('r' .. id) or was_released('n' .. id) then return {{-1, used(), 0, 0}} end
  local queued = asked_weight(id)
  if not queued then leave_queue(id) end
  local kept, settings, adaptive = redis.call('HGET', last, 'limit'), redis.call('HGET', last, 'adaptive'), ARGV[9]
  if kept and (held or ARGV[8] ~= '1' or (settings and settings == adaptive)) then
    limit = tonumber(kept)
  elseif kept ~= ARGV[5] or settings or adaptive then
    redis.call('HDEL', last, 'adaptive', 'successes', 'lowered')
    redis.call('HSET', last, 'limit', ARGV[5])
    if adaptive then redis.call('HSET', last, 'adaptive', adaptive) end
    if kept then redis.pcall('PUBLISH', leases, '') end
  end
  keep_last()
  if not held and weight > limit then
    if leave_queue(id) then redis.pcall('PUBLISH', leases, '') end
    return {{-2, used(), limit, 0}}
  end
  if not held and not has_room() then
    local waiter_ttl = tonumber(ARGV[7])
    if waiter_ttl > 0 then
      if not queued then
        local newest = redis.call('ZRANGE', waiting, -1, -1, 'WITHSCORES')[2]
        redis.call('ZADD', waiting, format_int(math.max(now, (newest or 0) + 1)), id)
      end
      redis.call('HSET', waiters, id, format_int(now + waiter_ttl) .. ':' .. ARGV[6])
      redis.call('PEXPIRE', waiting, {LAST_TTL // 1000})
      redis.call('PEXPIRE', waiters, {LAST_TTL // 1000})
    elseif leave_queue(id) then
      redis.pcall('PUBLISH', leases, '')
    end
    return {{0, used(), first_end(), 0}}
  end
  leave_queue(id)
  local extra = held and string.match(redis.call('HGET', extras, id) or '0', '^%d+') or format_int(weight - 1)
  local fence = held and string.match(redis.call('HGET', extras, id) or '', ':(%d+)$')
  if not fence then
    -- the time is part of it, so fences still grow if the last one is lost
    fence = format_int(math.max((redis.call('HGET', last, 'fence') or 0) + 1, now))
    redis.call('HSET', last, 'fence', fence)
    keep_last()
    redis.call('HSET', extras, id, extra .. ':' .. fence)
    if not held and weight > 1 then redis.call('HINCRBY', extras, '', extra) end
  end
  hold()
  return {{1, used(), lease, tonumber(fence)}}
end

if op == 'renew' then
  if not held then return {{0, used()}} end
  hold()
  keep_last()
  return {{1, used()}}
end

if op == 'release' then
  if was_released('r' .. id) then return {{1, used()}} end
  remember((held and 'r' or 'n') .. id)
  local waited = leave_queue(id)
  if held then
    local fence = ARGV[7] and ARGV[7] ~= '0' and string.match(redis.call('HGET', extras, id) or '', ':(%d+)$')
    if fence then adapt(tonumber(ARGV[7]), tonumber(fence)) end
    redis.call('ZREM', leases, id)
    drop_extra(id)
  end
  if held or waited then redis.pcall('PUBLISH', leases, '') end
  return {{held and 1 or 0, used()}}
end

if op == 'evict' then
  if was_released('e' .. id) then return {{1, used()}} end
  if was_released('f' .. id) then return {{0, used()}} end
  local any = count() > 0
  remember((any and 'e' or 'f') .. id)
  redis.call('DEL', leases, extras)
  if any then redis.pcall('PUBLISH', leases, '') end
  return {{any and 1 or 0, 0}}
end

if op == 'status' then
  local queue_length = 0
  for _, each in ipairs(redis.call('ZRANGE', waiting, 0, -1)) do
    if asked_weight(each) then queue_length = queue_length + 1 end
  end
  return {{used(), count(), queue_length, tonumber(redis.call('HGET', last, 'limit') or limit)}}
end

return {{held and 1 or 0, used(), first_end()}}
"""


class LeaseRecord(NamedTuple):
    """One lease."""

    until: int
    weight: int
    fence: int  # 0 if it was acquired and not claimed


class SemaphoreState:
    """The same in Python."""

    def __init__(self) -> None:
        self.leases: dict[str, LeaseRecord] = {}
        self.ends: list[tuple[int, str]] = []  # a heap; also of leases that were renewed or released since
        self.used = 0
        self.released: dict[str, int] = {}
        self.waiting: dict[str, tuple[int, int]] = {}  # when each is taken for dead, and its weight; in their order
        self.last, self.last_fence, self.last_until = KeptLimit(), 0, 0

    def acquire(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        if self._was_released(id):
            return [-1, self.used, 0]
        if id not in self.leases and not self._has_room(now, id, limit, weight):
            return [0, self.used, self._first_end(now)]
        self._hold(id, now + lease, weight)
        return [1, self.used, lease]

    def claim(
        self,
        now: int,
        id: str,
        lease: int,
        limit: int,
        weight: int,
        waiter_ttl: int,
        configures: int,
        adaptive: str = "",
    ) -> list[int]:
        self._expire(now)
        if self._was_released(id):
            return [-1, self.used, 0, 0]
        self._drop_dead_waiters(now)
        held = id in self.leases
        same = bool(adaptive) and adaptive == self.last.adaptive
        if not self.last.limit or (configures and not held and not same):
            self.last = KeptLimit(limit, adaptive)
        self._keep_last(now, lease)
        if not held and weight > self.last.limit:
            self.waiting.pop(id, None)
            return [-2, self.used, self.last.limit, 0]
        if not held and not self._has_room(now, id, self.last.limit, weight):
            if waiter_ttl > 0:
                self.waiting[id] = now + waiter_ttl, weight
            else:
                self.waiting.pop(id, None)
            return [0, self.used, self._first_end(now), 0]
        self.waiting.pop(id, None)
        fence = self.leases[id].fence if held else 0
        if not fence:
            fence = self.last_fence = max(self.last_fence + 1, now)
        self._hold(id, now + lease, weight, fence)
        return [1, self.used, lease, fence]

    def renew(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        if id not in self.leases:
            return [0, self.used]
        self._hold(id, now + lease, weight)
        if self.last_until:
            self._keep_last(now, lease)
        return [1, self.used]

    def release(self, now: int, id: str, lease: int, limit: int, weight: int, outcome: int = 0) -> list[int]:
        self._expire(now)
        if "r" + id in self.released:
            return [1, self.used]
        held = id in self.leases
        self._remember(("r" if held else "n") + id, now)
        self.waiting.pop(id, None)
        if held:
            if outcome and self.leases[id].fence:
                self.last.adapt(outcome, self.leases[id].fence, self.used, self.last_fence)
            self.used -= self.leases.pop(id).weight
        return [int(held), self.used]

    def evict(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        if "e" + id in self.released:
            return [1, self.used]
        if "f" + id in self.released:
            return [0, self.used]
        held = bool(self.leases)
        self._remember(("e" if held else "f") + id, now)
        self.leases, self.ends, self.used = {}, [], 0
        return [int(held), 0]

    def peek(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        return [int(id in self.leases), self.used, self._first_end(now)]

    def status(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        self._drop_dead_waiters(now)
        return [self.used, len(self.leases), len(self.waiting), self.last.limit or limit]

    def is_expired(self, now: int) -> bool:
        self._expire(now)
        self._drop_dead_waiters(now)
        return not (self.leases or self.released or self.waiting or self.last_until)

    def _was_released(self, id: str) -> bool:
        return "r" + id in self.released or "n" + id in self.released

    def _has_room(self, now: int, id: str, limit: int, weight: int) -> bool:
        """Whether *weight* fits beside what the ids before *id* wait for."""
        room = limit - self.used - weight
        for each, (until, asked) in self.waiting.items():
            if each == id or room < 0:
                break
            room -= asked if until > now else 0
        return room >= 0

    def _drop_dead_waiters(self, now: int) -> None:
        if self.waiting:
            self.waiting = {id: waiter for id, waiter in self.waiting.items() if waiter[0] > now}

    def _keep_last(self, now: int, lease: int) -> None:
        self.last_until = now + max(LAST_TTL, lease)

    def _hold(self, id: str, until: int, weight: int, fence: int = 0) -> None:
        """Start the time of the lease *id*, which has the weight that it was granted with."""
        known = self.leases.get(id)
        if known:
            weight, fence = known.weight, fence or known.fence
        else:
            self.used += weight
        self.leases[id] = LeaseRecord(until, weight, fence)
        heappush(self.ends, (until, id))
        if len(self.ends) > 2 * len(self.leases) + 16:  # most are out of date
            self.ends = [(each.until, id) for id, each in self.leases.items()]
            heapify(self.ends)

    def _first_end(self, now: int) -> int:
        while self.ends:
            until, id = self.ends[0]
            if self._ends_at(id, until):
                return until - now
            heappop(self.ends)
        return -1

    def _ends_at(self, id: str, until: int) -> bool:
        return id in self.leases and self.leases[id].until == until

    def _remember(self, mark: str, now: int) -> None:
        remember(self.released, mark, now + RELEASED_TTL, MAX_RELEASED)

    def _expire(self, now: int) -> None:
        while self.ends and self.ends[0][0] <= now:
            until, id = heappop(self.ends)
            if self._ends_at(id, until):
                self.used -= self.leases.pop(id).weight
        drop_expired(self.released, now)
        if self.last_until and now >= self.last_until:
            self.last, self.last_fence, self.last_until = KeptLimit(), 0, 0


SUFFIXES = ("", ":extra", ":gone", ":waiting", ":waiters", ":last")
SEMAPHORE = StateMachine("semaphore", SUFFIXES, LUA, SemaphoreState)
