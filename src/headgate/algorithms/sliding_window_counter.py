"""Sliding window counter: this window's count, and the last one's weighted by how much of it is still in view.

Promises: previous * (1 - elapsed / period) + current never above the limit. Two counters a key, so memory does
not grow with the limit; exact if the last window's calls came evenly, off by what they did not.
Redis: Hash `window` (its start in epoch microseconds), `current`, `previous`. A denial writes nothing.

Counts are kept in units of 1/steps of a permit, the period cut into so many steps: as many as microseconds, or
fewer where the numbers would leave the range in which doubles are exact. Then elapsed time is rounded down, so
that the last window weighs a trifle more, never less.
"""

from __future__ import annotations

from headgate.algorithms.algorithm import AlgorithmSQL, IntegerState, multiply
from headgate.algorithms.fixed_window import window_ttl, without_burst
from headgate.quota import Quota

_EXACT = 1 << 52


class SlidingWindowCounter(IntegerState):
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

    def take(self, state: int, now: int, permits: int) -> tuple[bool, int, int, int, int]:
        window, current, previous = self.roll(state, now)
        elapsed = now - multiply(window, self.period)
        faded = 0 if previous == 0 else multiply(previous, self.steps - elapsed // self.step)
        after = current + permits
        if after < 0:
            after = 0
        used = faded + multiply(after, self.steps)
        if used <= self.room:
            return True, used, self.reset(elapsed, after, previous), 0, self.state_of(window, after, previous)
        free = self.limit - permits
        if current <= free:
            # enough of the previous window has to slide out of view
            retry = self.fade(previous, free - current) - elapsed
        else:
            # this window becomes the previous one, and then has to slide out itself
            retry = self.period - elapsed + self.fade(current, free)
        used = min(faded + multiply(current, self.steps), self.room)
        return False, used, self.reset(elapsed, current, previous), retry, state

    def fade(self, count: int, free: int) -> int:
        """Microseconds into a window after which *count* calls of the one before weigh at most *free*."""
        return min(multiply(self.steps - multiply(free, self.steps) // count, self.step), self.period)

    def reset(self, elapsed: int, current: int, previous: int) -> int:
        if current:
            return self.period + self.period - elapsed
        return self.period - elapsed if previous else 0

    def roll(self, state: int, now: int) -> tuple[int, int, int]:
        """(window, current, previous) at *now*."""
        rest = state // self.width
        kept = rest // self.width
        previous, current = state - multiply(rest, self.width), rest - multiply(kept, self.width)
        window = now // self.period
        if window == kept:
            return window, current, previous
        return window, 0, current if window == kept + 1 else 0

    def state_of(self, window: int, current: int, previous: int) -> int:
        return multiply(multiply(window, self.width) + current, self.width) + previous

    def from_redis(self, start: int, current: int, previous: int) -> int:
        """The state that the fields of the Redis hash stand for."""
        return self.state_of(start // self.period, current, previous)

    def lua_arguments(self) -> tuple[int, ...]:
        return (self.limit, self.period, self.step, self.steps, window_ttl(2 * self.period))

    def sql_arguments(self) -> tuple[int, int, int, int]:
        return (self.limit, self.period, self.step, self.steps)


# The time and the fields, for a caller that shows the two counters; `from_redis` makes a state of them.
READ_LUA = "return {redis.call('TIME'), redis.call('HMGET', KEYS[1], 'window', 'current', 'previous')}"

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

# a: the start of the window, b: its count, c: that of the window before
SQL = AlgorithmSQL(
    number=4,
    load="""
x := now_us - now_us % n2;
IF a - now_us > n2 THEN
  a := x;
  ahead := true;
ELSIF a < x THEN
  c := CASE WHEN a + n2 = x THEN b ELSE 0 END;
  b := 0;
  a := x;
END IF;
""",
    evaluate="""
x := now_us - a;  -- below 0 where the clock stepped back
y := c * (n4 - greatest(x, 0) / n3) + b * n4;
ok := y + asked * n4 <= n1 * n4;
IF ok THEN
  left_permits := (n1 * n4 - y - asked * n4) / n4;
  full_us := CASE WHEN b + asked > 0 THEN 2 * n2 - x WHEN c > 0 THEN n2 - x ELSE 0 END;
  wait_us := 0;
ELSE
  left_permits := greatest(n1 * n4 - y, 0) / n4;
  full_us := CASE WHEN b > 0 THEN 2 * n2 - x WHEN c > 0 THEN n2 - x ELSE 0 END;
  IF b <= n1 - asked THEN
    wait_us := least((n4 - (n1 - asked - b) * n4 / c) * n3, n2) - x;
  ELSE
    wait_us := n2 - x + least((n4 - (n1 - asked) * n4 / b) * n3, n2);
  END IF;
END IF;
""",
    consume="""
b := greatest(b + spent, 0);
gone := CASE WHEN b > 0 THEN a + 2 * n2 ELSE a + n2 END;
""",
)
