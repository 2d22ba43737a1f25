"""The state of a semaphore: its leases, each with an end and a weight, and the ids that were released lately.

Each acquisition has a lease id of its own, which its caller chose. The leases of a state weigh *limit* together at
most. The limit is an argument of each call, so a change of it needs no change of the state: under a lower limit nothing
is granted until enough leases are gone.

acquire  grants a lease of *weight* to *id* if there is room. Replies with granted, used and wait; used is the weight of
         all leases. Granted is 1, and wait is the time that the lease lasts; or 0, and wait is the time until the first
         lease ends if it is not renewed (-1: there is none); or -1, as this id was released before.
renew    starts the time of the lease again. Replies with 1 or, if there is no such lease, 0; and with used.
release  ends the lease. Replies with 1 or, if there is no such lease, 0; and with used.
evict    ends all leases; here *id* is that of this call. Replies with 1 or, if there was none, 0; and with used.
peek     replies with whether *id* has a lease, used, and the time until the first lease ends (-1: there is none).

Each may be run twice. An id that has a lease and acquires again keeps its weight and gets its full time. A released id
is remembered for a while, with a letter before it: `r` if it had a lease, `n` if it had none. A second release replies
as the first did, and an acquire that was delayed in the network and arrives after its release is refused: it would take
room that no caller is going to give back. The call of an eviction is remembered with `e`, or with `f` if it found none.
A lease that ends by itself is not remembered.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired

RELEASED_TTL = 60 * MICROSECONDS  # how long a released id is remembered
MAX_RELEASED = 1000  # released ids that are remembered; the oldest are forgotten first

# Keys: a Sorted Set of lease ids by when they end; a Hash of the weights above 1 by id, less 1, and of their sum by '';
# a Sorted Set of released ids by when to forget them. ARGV from 3: id, time of a lease, limit, weight. Times in
# microseconds.
LUA = f"""
local leases, extras, released = KEYS[1], KEYS[2], KEYS[3]
local id, lease, limit, weight = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local function drop_extra(each)
  local extra = redis.call('HGET', extras, each)
  if not extra then return end
  redis.call('HDEL', extras, each)
  redis.call('HINCRBY', extras, '', -extra)
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

local function is_known(mark) return tonumber(redis.call('ZSCORE', released, mark) or 0) > now end

local function remember(mark)
  redis.call('ZREMRANGEBYSCORE', released, '-inf', format_int(now))
  redis.call('ZADD', released, format_int(now + {RELEASED_TTL}), mark)
  redis.call('ZREMRANGEBYRANK', released, 0, -{MAX_RELEASED + 1})
  redis.call('PEXPIRE', released, {RELEASED_TTL // 1000})
end

local function hold()
  redis.call('ZADD', leases, format_int(now + lease), id)
  local last = redis.call('ZRANGE', leases, -1, -1, 'WITHSCORES')[2]
  local ttl = format_int(math.ceil((last - now) / 1000))
  redis.call('PEXPIRE', leases, ttl)
  redis.call('PEXPIRE', extras, ttl)
end

local held = redis.call('ZSCORE', leases, id)

if op == 'acquire' then
  if is_known('r' .. id) or is_known('n' .. id) then return {{-1, used(), 0}} end
  if not held then
    if used() + weight > limit then return {{0, used(), first_end()}} end
    if weight > 1 then
      redis.call('HSET', extras, id, weight - 1)
      redis.call('HINCRBY', extras, '', weight - 1)
    end
  end
  hold()
  return {{1, used(), lease}}
end

if op == 'renew' then
  if not held then return {{0, used()}} end
  hold()
  return {{1, used()}}
end

if op == 'release' then
  if is_known('r' .. id) then return {{1, used()}} end
  remember((held and 'r' or 'n') .. id)
  if not held then return {{0, used()}} end
  redis.call('ZREM', leases, id)
  drop_extra(id)
  redis.pcall('PUBLISH', leases, '')
  return {{1, used()}}
end

if op == 'evict' then
  if is_known('e' .. id) then return {{1, used()}} end
  if is_known('f' .. id) then return {{0, used()}} end
  local any = count() > 0
  remember((any and 'e' or 'f') .. id)
  redis.call('DEL', leases, extras)
  if any then redis.pcall('PUBLISH', leases, '') end
  return {{any and 1 or 0, 0}}
end

return {{held and 1 or 0, used(), first_end()}}
"""


class SemaphoreState:
    """The same in Python."""

    def __init__(self) -> None:
        self.leases: dict[str, tuple[int, int]] = {}  # end and weight
        self.ends: list[tuple[int, str]] = []  # a heap; also of leases that were renewed or released since
        self.used = 0
        self.released: dict[str, int] = {}

    def acquire(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        if "r" + id in self.released or "n" + id in self.released:
            return [-1, self.used, 0]
        if id in self.leases:
            weight = self.leases[id][1]
        elif self.used + weight > limit:
            return [0, self.used, self._first_end(now)]
        else:
            self.used += weight
        self._hold(id, now + lease, weight)
        return [1, self.used, lease]

    def renew(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        if id not in self.leases:
            return [0, self.used]
        self._hold(id, now + lease, self.leases[id][1])
        return [1, self.used]

    def release(self, now: int, id: str, lease: int, limit: int, weight: int) -> list[int]:
        self._expire(now)
        if "r" + id in self.released:
            return [1, self.used]
        held = id in self.leases
        self._remember(("r" if held else "n") + id, now)
        if held:
            self.used -= self.leases.pop(id)[1]
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

    def is_expired(self, now: int) -> bool:
        self._expire(now)
        return not (self.leases or self.released)

    def _hold(self, id: str, until: int, weight: int) -> None:
        self.leases[id] = (until, weight)
        heappush(self.ends, (until, id))
        if len(self.ends) > 2 * len(self.leases) + 16:  # most are out of date
            self.ends = [(end, each) for each, (end, _) in self.leases.items()]
            heapify(self.ends)

    def _first_end(self, now: int) -> int:
        while self.ends:
            until, id = self.ends[0]
            if self._ends_at(id, until):
                return until - now
            heappop(self.ends)
        return -1

    def _ends_at(self, id: str, until: int) -> bool:
        return id in self.leases and self.leases[id][0] == until

    def _remember(self, mark: str, now: int) -> None:
        self.released.pop(mark, None)  # put in again, it is the newest
        self.released[mark] = now + RELEASED_TTL
        if len(self.released) > MAX_RELEASED:
            del self.released[next(iter(self.released))]

    def _expire(self, now: int) -> None:
        while self.ends and self.ends[0][0] <= now:
            until, id = heappop(self.ends)
            if self._ends_at(id, until):
                self.used -= self.leases.pop(id)[1]
        drop_expired(self.released, now)


SEMAPHORE = StateMachine("semaphore", ("", ":extra", ":gone"), LUA, SemaphoreState)
