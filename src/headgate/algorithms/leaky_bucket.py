"""Leaky bucket: calls pour in, water runs out evenly; what would overflow is refused.

Promises: what has come in and not yet run out is never more than the capacity; the outflow is constant. Asked
through `pace()` it is a queue: a call takes its place at once and starts when the water before it has run out.
Redis: Hash `level` (units of water) and `last_leak` (microseconds). A denial writes nothing. Bookings raise `level`
above the capacity and add `booked`: without it, so high a level would be that of another quota.
"""

from __future__ import annotations

from headgate.algorithms import bucket


class LeakyBucket(bucket.Bucket):
    __slots__ = ()


LUA = """-- the debt: what has not run out yet of the level at the last leak
local function load(key, q, now)
  local kept = redis.call('HMGET', key, 'level', 'last_leak', 'booked')
  if not kept[1] then return 0 end
  return owed(kept[1] - (now - kept[2]) * q.rate, q, kept[3] and tonumber(kept[1]))
end

local function consume(key, debt, q, now, permits)
  local level = math.max(debt + permits * q.cost, 0)
  redis.call('HSET', key, 'level', level, 'last_leak', now)
  if level > q.room then
    redis.call('HSET', key, 'booked', 1)
    q = booked_out(q, level)
  end
  redis.call('EXPIRE', key, q.ttl)
end
"""
