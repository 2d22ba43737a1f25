"""Fixed window: a counter that starts again at each multiple of the period since the epoch.

Promises: at most *limit* in each window; so up to twice that in a stretch of one period that crosses an edge.
Redis: String counter, its key ending in the window's start in epoch seconds. A denial writes nothing.
"""

from __future__ import annotations

from headgate.algorithms.algorithm import AlgorithmSQL, IntegerState, multiply
from headgate.errors import InvalidQuota
from headgate.quota import Quota


def without_burst(quota: Quota, algorithm: str) -> Quota:
    """Refuse a burst where it has no meaning."""
    if quota.burst is not None:
        raise InvalidQuota(
            f"{algorithm} has no burst, the window itself is one; write '{Quota(quota.limit, quota.period)}', "
            "or use token_bucket, leaky_bucket or gcra"
        )
    return quota


# the Lua twin of `lua_arguments`, here and in the sliding window
QUOTA_LUA = """
local function quota(a)
  return {limit = tonumber(ARGV[a]), period = tonumber(ARGV[a + 1]), ttl = ARGV[a + 2]}, a + 3
end
"""


def window_ttl(period_us: int) -> int:
    """Seconds to keep a window of that length: all of it and one more."""
    return -(-period_us // 1_000_000) + 1


class WindowCount(IntegerState):
    """A count in a window of one period: what windows of the clock and those of a first call share."""

    __slots__ = ("period", "width")

    def __init__(self, quota: Quota) -> None:
        without_burst(quota, "fixed_window")
        super().__init__(quota.limit, 1, 1)
        self.period = quota.period_us
        self.width = quota.limit + 1

    def lua_arguments(self) -> tuple[int, ...]:
        return (self.limit, self.period, window_ttl(self.period))

    def sql_arguments(self) -> tuple[int, int, int, int]:
        return (self.limit, self.period, 0, 0)


class FixedWindow(WindowCount):
    """State: window number * (limit + 1) + count, so that an older window's state is a smaller number."""

    __slots__ = ()

    def take(self, state: int, now: int, permits: int) -> tuple[bool, int, int, int, int]:
        window = now // self.period
        left = multiply(window + 1, self.period) - now
        empty = multiply(window, self.width)
        count = state - empty
        if count < 0:  # it is of an older window
            count = 0
        after = count + permits
        if after > self.limit:
            return False, count, left, left, state
        if after <= 0:
            return True, 0, 0, 0, empty
        return True, after, left, 0, empty + after

    def redis_suffix(self, now: int) -> str:
        start = now - now % self.period
        return f":{start / 1_000_000:.6f}" if start % 1_000_000 else f":{start // 1_000_000}"


LUA = (
    QUOTA_LUA
    + """
-- the client names the key of the window that its own clock is in, so that a Cluster that moves the slot looks for the
-- right one; what counts is the window that the server's clock is in
local function where(key, q, now)
  local start = now - now % q.period
  local same = tonumber(string.sub(key, -10)) == start / 1000000 and string.byte(key, -11) == 58  -- a colon
  if same then return key end  -- nearly always, and it makes no text
  return string.match(key, '^(.*):') .. string.format(start % 1000000 == 0 and ':%.0f' or ':%.6f', start / 1000000)
end

local function load(key, q, now)
  return tonumber(redis.call('GET', key) or 0)
end

local function evaluate(count, q, now, permits)
  local left = q.period - now % q.period
  local after = count + permits
  if after > q.limit then return false, math.max(q.limit - count, 0), left, left end
  return true, q.limit - after, after > 0 and left or 0, 0
end

local function consume(key, count, q, now, permits)
  if count > 0 and permits > 0 then
    redis.call('INCRBY', key, permits)  -- the first call has set the time to live, which is longer than the window
  else
    redis.call('SET', key, math.max(count + permits, 0), 'EX', q.ttl)
  end
end
"""
)

# the SQL twin of `evaluate`, here and for windows of a first call: a is the end of the window, b the count
COUNT_SQL = """
x := b + asked;
ok := x <= n1;
IF ok THEN
  left_permits := n1 - x;
  full_us := CASE WHEN x > 0 THEN a - now_us ELSE 0 END;
  wait_us := 0;
ELSE
  left_permits := greatest(n1 - b, 0);
  full_us := a - now_us;
  wait_us := full_us;
END IF;
"""

# a: the end of a window, b: its count. Where the clock stepped back, the count is that of the window it is in now.
SQL = AlgorithmSQL(
    number=2,
    load="""
x := now_us - now_us % n2 + n2;
IF a < x THEN b := 0; ELSIF a > x THEN ahead := true; END IF;
a := x;
""",
    evaluate=COUNT_SQL,
    consume="""
b := greatest(b + spent, 0);
gone := a;
""",
)
