"""Sliding window log: every admitted call is remembered until it is one period old.

Promises: no stretch of time as long as the period ever holds more than the limit. Exact, and the price is memory:
one entry for each admitted call (not for each permit) in the last period; a denial adds none.
Redis: Sorted Set, score = time in microseconds, member = ``total:permits``, where total counts every permit since
the set began. The difference of two totals is the sum between them, so a decision needs the two ends of the log
and never its middle: O(log n), however large ``permits`` is. What is to be removed goes a bounded piece at a time, or
whole by UNLINK, which frees it in the background: a log of a million entries never holds the server up.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

from headgate.algorithms.algorithm import Algorithm
from headgate.algorithms.fixed_window import QUOTA_LUA, window_ttl, without_burst
from headgate.decision import Decision, decision_in
from headgate.quota import Quota


class Log:
    """Times of the admitted calls, and the total of permits up to and including each."""

    __slots__ = ("before", "times", "totals")

    def __init__(self) -> None:
        self.before = 0  # the total before the first entry kept
        self.times = array("q")
        self.totals = array("q")

    def total(self, position: int) -> int:
        """Permits spent before the entry at *position*."""
        return self.totals[position - 1] if position else self.before


class SlidingWindow(Algorithm[Log]):
    """State: the log. `consume` changes it in place, or makes a shorter one of it."""

    __slots__ = ("period",)

    def __init__(self, quota: Quota) -> None:
        without_burst(quota, "sliding_window")
        super().__init__(quota.limit, 1, 1)
        self.period = quota.period_us

    def initial(self) -> Log:
        return Log()

    def evaluate(self, state: Log, now: int, permits: int) -> Decision:
        times = state.times
        first = bisect_right(times, now - self.period)
        gone = state.total(first)
        used = state.total(len(times)) - gone
        after = used + permits
        reset = times[-1] + self.period - now if used else 0
        if after > self.limit:
            frees = bisect_left(state.totals, gone + after - self.limit, first, len(times))
            return decision_in(self, False, used, reset, times[frees] + self.period - now)
        return decision_in(self, True, after, self.period if permits else reset, 0)

    def consume(self, state: Log, now: int, permits: int) -> Log:
        times, totals = state.times, state.totals
        first = bisect_right(times, now - self.period)
        if first * 2 > len(times):  # forget in bulk: each entry is moved once at most
            recent = Log()
            recent.before, recent.times, recent.totals = state.total(first), times[first:], totals[first:]
            state, times, totals, first = recent, recent.times, recent.totals, 0
        # whatever interrupts these lines, a time is never without its total; a total without a time does not count
        del totals[len(times) :]
        total = state.total(len(times)) + permits
        if permits > 0:
            totals.append(total)
            times.append(now)
            return state
        total = max(total, state.total(first))
        keep = bisect_right(totals, total, first, len(times))
        if keep < len(times) and state.total(keep) < total:  # given back in part
            totals[keep] = total
            keep += 1
        del times[keep:]
        return state

    def remaining(self, state: Log, now: int) -> int:
        first = bisect_right(state.times, now - self.period)
        return self.limit - (state.total(len(state.times)) - state.total(first))

    def is_expired(self, state: Log, now: int) -> bool:
        return not state.times or state.times[-1] <= now - self.period

    def lua_arguments(self) -> tuple[int, ...]:
        return (self.limit, self.period, window_ttl(self.period))


LUA = (
    QUOTA_LUA
    + """
local function entry(found)
  local total, permits = string.match(found[1], '^(%d+):(%d+)$')
  return {time = tonumber(found[2]), total = tonumber(total), permits = tonumber(permits)}
end

local function load(key, q, now)
  local found = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  if not found[1] then return {now = now, gone = 0, used = 0, total = 0} end
  local last = entry(found)
  local at = math.max(now, last.time)  -- a clock that stepped back forgets nothing, and the log stays in order
  if last.time <= at - q.period then return {now = at, gone = last.total, used = 0, total = last.total} end
  local alive = '(' .. string.format('%.0f', at - q.period)
  local first = entry(redis.call('ZRANGEBYSCORE', key, alive, '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
  local gone = first.total - first.permits
  local state = {key = key, now = at, first = first, last = last, gone = gone, used = last.total - gone,
                 total = last.total}
  if last.time - now > q.period then  -- by more than a period: all that is remembered counts as made now
    last.time, last.permits = now, state.used
    state.now, state.first, state.ahead = now, last, true
  end
  return state, state.ahead
end

-- the rank and the entry at which the total first reaches this one: by halves, since totals grow with time
local function find(state, q, total)
  local low = redis.call('ZCOUNT', state.key, '-inf', state.now - q.period)
  local high = redis.call('ZCARD', state.key) - 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local seen = entry(redis.call('ZRANGE', state.key, middle, middle, 'WITHSCORES'))
    if seen.total >= total then high = middle else low = middle + 1 end
  end
  return low, entry(redis.call('ZRANGE', state.key, low, low, 'WITHSCORES'))
end

local function evaluate(state, q, now, permits)
  local after = state.used + permits
  local reset = state.used > 0 and state.last.time + q.period - now or 0
  if after > q.limit then
    local goes, frees = state.gone + after - q.limit, state.first
    if frees.total < goes then frees = select(2, find(state, q, goes)) end
    return false, math.max(q.limit - state.used, 0), reset, frees.time + q.period - now
  end
  return true, q.limit - after, permits > 0 and state.now + q.period - now or reset, 0
end

local function add(key, time, total, permits)
  redis.call('ZADD', key, time, string.format('%016.0f:%.0f', total, permits))
end

-- entries removed by one call at most, of those that have expired: a call adds one, so that is quick enough
local EXPIRED = 100
local REFUNDED = 1000  -- and by one step of a refund

-- how many of these permits one call may give back, so that it removes no more than that
local function at_once(key, state, q, permits)
  if permits >= state.used or state.ahead then return permits end
  local found = redis.call('ZRANGE', key, -REFUNDED, -REFUNDED, 'WITHSCORES')
  if not found[1] then return permits end
  local oldest = entry(found)
  return math.min(permits, state.total - oldest.total + oldest.permits)
end

local function forget(key, state, q)
  if state.used == 0 then
    if state.total > 0 then redis.call('UNLINK', key) end
    return
  end
  local gone = redis.call('ZCOUNT', key, '-inf', state.now - q.period)
  if gone > 0 then redis.call('ZREMRANGEBYRANK', key, 0, math.min(gone, EXPIRED) - 1) end
end

local function consume(key, state, q, now, permits)
  if state.ahead then
    redis.call('UNLINK', key)
    add(key, now, state.total, state.used)
  end
  if permits > 0 then
    forget(key, state, q)
    add(key, state.now, state.total + permits, permits)
  elseif permits < 0 and -permits >= state.used then
    redis.call('UNLINK', key)
  elseif permits < 0 then
    local total = state.total + permits
    local rank, cut = find(state, q, total + 1)
    redis.call('ZREMRANGEBYRANK', key, rank, -1)
    local before = cut.total - cut.permits
    if before < total then add(key, cut.time, total, total - before) end  -- given back in part
  end
  redis.call('EXPIRE', key, q.ttl)
end
"""
)
