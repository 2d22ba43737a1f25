"""Fixed window that starts at a key's first call: ``algorithm="fixed_window", start="first"``.

Promises: at most *limit* in each window, and a window ends one period after the call that started it; so up to twice
the limit in a stretch of one period, as with windows of the clock. Keys start at different moments, so that a
thousand clients are not all let in again in the same microsecond.
Redis: String ``end:count``, the end of the window in epoch microseconds. A denial writes nothing. To give everything
back ends the window: the next call starts another.
"""

from __future__ import annotations

from headgate.algorithms.algorithm import AlgorithmSQL, multiply
from headgate.algorithms.fixed_window import COUNT_SQL, QUOTA_LUA, WindowCount


class FirstWindow(WindowCount):
    """State: end of the window * (limit + 1) + count; 0 when nothing is counted."""

    __slots__ = ()

    def take(self, state: int, now: int, permits: int) -> tuple[bool, int, int, int, int]:
        end = state // self.width
        count = state - multiply(end, self.width)
        if end <= now:  # a call would start a window
            end = now + self.period
            count = 0
        after = count + permits
        if after > self.limit:
            return False, count, end - now, end - now, state
        if after <= 0:
            return True, 0, 0, 0, 0
        return True, after, end - now, 0, multiply(end, self.width) + after


LUA = (
    QUOTA_LUA
    + """
local function load(key, q, now)
  local last, count = string.match(redis.call('GET', key) or '0:0', '^(%d+):(%d+)$')
  last, count = tonumber(last), tonumber(count)
  if last <= now then return {last = now + q.period, count = 0} end
  if last - now > q.period then return {last = now + q.period, count = count}, true end
  return {last = last, count = count}
end

local function evaluate(state, q, now, permits)
  local left = state.last - now
  local after = state.count + permits
  if after > q.limit then return false, math.max(q.limit - state.count, 0), left, left end
  return true, q.limit - after, after > 0 and left or 0, 0
end

local function consume(key, state, q, now, permits)
  local after = state.count + permits
  if after <= 0 then return redis.call('UNLINK', key) end
  redis.call('SET', key, string.format('%.0f:%.0f', state.last, after), 'EX', q.ttl)
end
"""
)

# a: the end of the window, b: its count; both 0 when nothing is counted
SQL = AlgorithmSQL(
    number=3,
    load="""
IF a <= now_us THEN
  a := now_us + n2;
  b := 0;
ELSIF a - now_us > n2 THEN
  a := now_us + n2;
  ahead := true;
END IF;
""",
    evaluate=COUNT_SQL,
    consume="""
b := b + spent;
IF b <= 0 THEN
  a := 0;
  b := 0;
END IF;
gone := a;
""",
)
