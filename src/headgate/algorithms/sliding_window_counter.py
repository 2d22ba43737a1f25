"""Sliding window counter: this window's count, and the last one's weighted by how much of it is still in view.

Promises: previous * (1 - elapsed / period) + current never above the limit. Two counters a key, so memory does
not grow with the limit; exact if the last window's calls came evenly, off by what they did not.
Redis: Hash `window` (its start in epoch microseconds), `current`, `previous`. A denial writes nothing.

Counts are kept in units of 1/steps of a permit, the period cut into so many steps: as many as microseconds, or
fewer where the numbers would leave the range in which doubles are exact. Then elapsed time is rounded down, so
that the last window weighs a trifle more, never less.
"""

from __future__ import annotations

from headgate.algorithms.algorithm import Algorithm, multiply
from headgate.algorithms.fixed_window import window_ttl, without_burst
from headgate.decision import Decision, decision_in
from headgate.quota import Quota

_EXACT = 1 << 52


class SlidingWindowCounter(Algorithm[int]):
    """State: (window * width + current) * width + previous, with width = limit + 1."""

    __slots__ = ("period", "room", "step", "steps", "width")

    def __init__(self, quota: Quota) -> None:
        without_burst(quota, "sliding_window_counter")
        period = quota.period_us
        step = -(-period * quota.limit // _EXACT)  # microseconds
        steps = -(-period // step)
        super().__init__(quota.limit, steps, 1)
        self.period = period
        self.step = step
        self.steps = steps
        self.room = quota.limit * steps
        self.width = quota.limit + 1

    def initial(self) -> int:
        return 0

    def evaluate(self, state: int, now: int, permits: int) -> Decision:
        _, current, previous = self.roll(state, now)
        elapsed = now % self.period
        used = self.used(elapsed, current, previous)
        after = used + multiply(permits, self.steps)
        if after <= self.room:
            return decision_in(self, True, after, self.reset(elapsed, current + permits, previous), 0)
        free = self.limit - permits
        if current <= free:
            # enough of the previous window has to slide out of view
            retry = self.fade(previous, free - current) - elapsed
        else:
            # this window becomes the previous one, and then has to slide out itself
            retry = self.period - elapsed + self.fade(current, free)
        return decision_in(self, False, min(used, self.room), self.reset(elapsed, current, previous), retry)

    def used(self, elapsed: int, current: int, previous: int) -> int:
        return multiply(previous, self.steps - elapsed // self.step) + multiply(current, self.steps)

    def fade(self, count: int, free: int) -> int:
        """Microseconds into a window after which *count* calls of the one before weigh at most *free*."""
        return min(multiply(self.steps - multiply(free, self.steps) // count, self.step), self.period)

    def reset(self, elapsed: int, current: int, previous: int) -> int:
        if current:
            return self.period + self.period - elapsed
        return self.period - elapsed if previous else 0

    def consume(self, state: int, now: int, permits: int) -> int:
        window, current, previous = self.roll(state, now)
        return multiply(multiply(window, self.width) + max(current + permits, 0), self.width) + previous

    def remaining(self, state: int, now: int) -> int:
        _, current, previous = self.roll(state, now)
        used = self.used(now % self.period, current, previous)
        return max(self.room - used, 0) // self.steps

    def is_expired(self, state: int, now: int) -> bool:
        _, current, previous = self.roll(state, now)
        return current == 0 and previous == 0

    def roll(self, state: int, now: int) -> tuple[int, int, int]:
        """(window, current, previous) at *now*."""
        rest, previous = divmod(state, self.width)
        kept, current = divmod(rest, self.width)
        window = now // self.period
        if window == kept:
            return window, current, previous
        return window, 0, current if window == kept + 1 else 0

    def lua_arguments(self) -> tuple[int, ...]:
        return (self.limit, self.period, self.step, self.steps, window_ttl(2 * self.period))


LUA = """
local function quota(a)
  return {limit = tonumber(ARGV[a]), period = tonumber(ARGV[a + 1]), step = tonumber(ARGV[a + 2]),
          steps = tonumber(ARGV[a + 3]), ttl = ARGV[a + 4]}, a + 5
end

local function load(key, q, now)
  local window = math.floor(now / q.period)
  local kept = redis.call('HMGET', key, 'window', 'current', 'previous')
  local then_, current, previous = math.floor((kept[1] or 0) / q.period), tonumber(kept[2] or 0), tonumber(kept[3] or 0)
  if then_ * q.period - now > q.period then return {window = window, current = current, previous = previous}, true end
  if then_ >= window then return {window = then_, current = current, previous = previous} end
  return {window = window, current = 0, previous = then_ + 1 == window and current or 0}
end

local function fade(count, free, q)
  return math.min((q.steps - math.floor(free * q.steps / count)) * q.step, q.period)
end

local function reset(elapsed, current, previous, q)
  if current > 0 then return 2 * q.period - elapsed end
  return previous > 0 and q.period - elapsed or 0
end

local function evaluate(state, q, now, permits)
  local current, previous = state.current, state.previous
  local elapsed = now - state.window * q.period  -- below 0 where the clock stepped back
  local used = previous * (q.steps - math.floor(math.max(elapsed, 0) / q.step)) + current * q.steps
  local spare = (q.limit - permits) * q.steps - used
  if spare >= 0 then
    return true, math.floor(spare / q.steps), reset(elapsed, current + permits, previous, q), 0
  end
  local free, retry = q.limit - permits, nil
  if current <= free then
    retry = fade(previous, free - current, q) - elapsed
  else
    retry = q.period - elapsed + fade(current, free, q)
  end
  local left = math.max(q.limit * q.steps - used, 0)
  return false, math.floor(left / q.steps), reset(elapsed, current, previous, q), retry
end

local function consume(key, state, q, now, permits)
  local current = math.max(state.current + permits, 0)
  redis.call('HSET', key, 'window', state.window * q.period, 'current', current, 'previous', state.previous)
  redis.call('EXPIRE', key, q.ttl)
end
"""
