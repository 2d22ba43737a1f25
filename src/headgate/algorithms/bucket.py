"""The arithmetic of token bucket, leaky bucket and GCRA: the debt of a key, and when it will be paid.

The three are one law in three forms. A token bucket counts the tokens that remain, a leaky bucket the water that was
poured in, GCRA the time at which the bucket is full again; each number gives the others. So the law is written once,
over the *debt*: what is missing from a full bucket. The three files beside this one say how each is kept in Redis.
`headgate.stores.key_table.BucketTable` has the law a second time, without calls, and is tested against this one.

Exact in integers: a microsecond brings *rate* units and a permit costs *cost* of them, the period and the limit
with their common divisor taken out. 10/second is 1 unit a microsecond and 100,000 a permit; 7/second is 7 and
1,000,000. Numbers stay below 2**52 so that Lua, whose numbers are doubles, computes every one of them exactly.

Bookings (see `headgate.algorithms.booking`) spend at moments to come, so a debt may be more than a full bucket. Then
every call is denied until so much of it is paid that the call finds room.
"""

from __future__ import annotations

from math import gcd

from headgate.algorithms.algorithm import AlgorithmSQL, IntegerState, multiply
from headgate.errors import InvalidQuota
from headgate.quota import Quota

_EXACT = 1 << 52
_CENTURY = 100 * 366 * 86400 * 1_000_000


class Bucket(IntegerState):
    """State: the moment the debt is paid, in units since the epoch. One number, whatever the quota."""

    __slots__ = ("quota", "room")

    def __init__(self, quota: Quota) -> None:
        cost, rate = _units(quota)
        super().__init__(quota.capacity, cost, rate)
        self.quota = quota
        self.room = quota.capacity * cost

    def take(self, state: int, now: int, permits: int) -> tuple[bool, int, int, int, int]:
        start = multiply(now, self.rate)
        debt = state - start
        if debt < 0:
            debt = 0
        after = debt + multiply(permits, self.cost)
        if after > self.room and permits > 0:
            return False, debt, debt, after - self.room, state
        if after < 0:
            after = 0
        return True, after, after, 0, start + after

    def wait_for(self, state: int, now: int, permits: int) -> int:
        """Microseconds until *permits* can be had, if no other call comes first."""
        retry = self.take(state, now, permits)[3]
        return -(-retry // self.rate)

    def spend_at(self, state: int, at: int, permits: int) -> int:
        """The state after *permits* are spent at the moment *at*, now or later; there must be room for them then."""
        return max(state, multiply(at, self.rate)) + multiply(permits, self.cost)

    def lua_arguments(self) -> tuple[int, ...]:
        fill_us = -(-self.room // self.rate)
        return (self.limit, self.cost, self.rate, -(-fill_us // 1_000_000) + 1)

    def sql_arguments(self) -> tuple[int, int, int, int]:
        return (self.limit, self.cost, self.rate, self.room)


LUA = """
local function quota(a)
  local q = {limit = tonumber(ARGV[a]), cost = tonumber(ARGV[a + 1]), rate = tonumber(ARGV[a + 2]), ttl = ARGV[a + 3]}
  q.room = q.limit * q.cost
  return q, a + 4
end

local function owed(debt, q, booked)  -- booked: the debt as written, which bookings may make more than the room
  local most = math.max(q.room, booked or 0)
  if debt > most then return most, true end
  return math.max(debt, 0)
end

local function evaluate(debt, q, now, permits)
  local after = debt + permits * q.cost
  local short = after - q.room
  if short > 0 and permits > 0 then
    local left = math.max(math.floor((q.room - debt) / q.cost), 0)
    return false, left, math.ceil(debt / q.rate), math.ceil(short / q.rate)
  end
  return true, math.max(math.floor(-short / q.cost), 0), math.ceil(after / q.rate), 0
end

local function booked_out(q, debt)  -- the quota with the time to live of a debt that is more than its room
  local ttl = math.ceil(debt / q.rate / 1000000) + 1
  return {limit = q.limit, cost = q.cost, rate = q.rate, room = q.room, ttl = ttl}
end
"""

# a: a moment, b: the debt at that moment, which bookings may make more than the room. The three are kept alike.
SQL = AlgorithmSQL(
    number=1,
    load="""
IF a <= now_us THEN
  IF now_us - a > b / n3 THEN b := 0; ELSE b := b - (now_us - a) * n3; END IF;
ELSIF a - now_us > (n4 - b) / n3 THEN
  b := greatest(n4, b);
  ahead := true;
ELSE
  b := b + (a - now_us) * n3;
END IF;
a := now_us;
""",
    evaluate="""
x := b + asked * n2;
ok := x <= n4 OR asked <= 0;
IF ok THEN
  left_permits := greatest((n4 - x) / n2, 0);
  full_us := (x + n3 - 1) / n3;
  wait_us := 0;
ELSE
  left_permits := greatest((n4 - b) / n2, 0);
  full_us := (b + n3 - 1) / n3;
  wait_us := (x - n4 + n3 - 1) / n3;
END IF;
""",
    consume="""
b := greatest(b + spent * n2, 0);
gone := now_us + (b + n3 - 1) / n3;
""",
)


def _units(quota: Quota) -> tuple[int, int]:
    """(cost of a permit, units a microsecond) of *quota*."""
    period, limit, capacity = quota.period_us, quota.limit, quota.capacity
    if capacity * period > limit * _CENTURY:
        raise InvalidQuota(f"{quota} would take more than a century to fill; choose a smaller burst")
    common = gcd(period, limit)
    cost, rate = period // common, limit // common
    if capacity * cost > _EXACT:
        # too fine for a double: fewer units, and a permit that costs up to one unit more, so never one too many
        rate = min(rate, _EXACT * limit // (capacity * period))
        cost = -(-period * rate // limit)
    return cost, rate
