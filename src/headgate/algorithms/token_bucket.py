"""Token bucket: *capacity* tokens at most, refilled evenly; a call takes tokens or is refused.

Promises: a burst of up to the capacity, and in any stretch of time t at most capacity + t * limit / period.
Redis: Hash `tokens` (whole ones) and `last_refill` (microseconds, the moment at which there were exactly that
many). Quotas whose tokens do not come at whole microseconds, such as 7/second, add `part`, the rest of the last
microsecond in units. Two numbers a key; a denial writes nothing. Bookings make `tokens` negative.
"""

from __future__ import annotations

from headgate.algorithms import bucket


class TokenBucket(bucket.Bucket):
    __slots__ = ()


LUA = """-- the debt: the tokens that are missing, less what has been refilled since
local function load(key, q, now)
  local kept = redis.call('HMGET', key, 'tokens', 'last_refill', 'part')
  if not kept[1] then return 0 end
  local written = (q.limit - kept[1]) * q.cost - (kept[3] or 0)
  return owed(written - (now - kept[2]) * q.rate, q, written)
end

local function consume(key, debt, q, now, permits)
  local spare = math.min(q.room - debt - permits * q.cost, q.room)
  local tokens = math.floor(spare / q.cost)
  local rest = spare - tokens * q.cost
  if spare < 0 then q = booked_out(q, q.room - spare) end
  local since = math.floor(rest / q.rate)
  if q.rate == 1 then
    redis.call('HSET', key, 'tokens', tokens, 'last_refill', now - since)
  else
    redis.call('HSET', key, 'tokens', tokens, 'last_refill', now - since, 'part', rest % q.rate)
  end
  redis.call('EXPIRE', key, q.ttl)
end
"""
