"""GCRA, the generic cell rate algorithm: one number a key, the time at which its bucket is full again.

Promises: the same decisions as the token bucket, to the microsecond, with half the state.
Redis: String, that time in microseconds. Quotas whose permits do not come at whole microseconds, such as
7/second, keep the rest in units behind a colon. A denial writes nothing. If bookings are ahead, the moment of writing
stands behind a second colon: without it, a time so far ahead would mean that the clock has stepped back.
"""

from __future__ import annotations

from headgate.algorithms import bucket


class GCRA(bucket.Bucket):
    __slots__ = ()


LUA = """-- the debt, from the time at which the bucket is full again
local function load(key, q, now)
  local kept = redis.call('GET', key)
  if not kept then return 0 end
  local whole, part, written = string.match(kept, '^(%d+):?(%d*):?(%d*)$')
  part = tonumber(part) or 0
  return owed((whole - now) * q.rate + part, q, written ~= '' and (whole - written) * q.rate + part)
end

local function consume(key, debt, q, now, permits)
  local after = math.max(debt + permits * q.cost, 0)
  local paid_at = now + math.floor(after / q.rate)
  if after > q.room then
    paid_at = string.format('%.0f:%.0f:%.0f', paid_at, after % q.rate, now)
    q = booked_out(q, after)
  elseif after % q.rate > 0 then
    paid_at = string.format('%.0f:%.0f', paid_at, after % q.rate)
  end
  redis.call('SET', key, paid_at, 'EX', q.ttl)
end
"""
