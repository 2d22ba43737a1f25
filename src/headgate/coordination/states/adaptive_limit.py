"""How the limit of a semaphore adapts: up by one after enough successes, down by a share at a sign of overload.

The settings are one text, ``start:low:high:grow_after:shrink``: the limit starts at *start* and stays from *low* to
*high*. It grows by one after *grow_after* successes (0: as many as the limit is), and shrinks to *shrink* thousandths
of itself, by one at least.

A success counts only if at least half of the limit was in use: an idle system says nothing about what it could bear. A
lease counts only if it was granted after the limit was lowered last, which its fence tells. So the calls that
were under way when the server became overloaded lower the limit once, and not once each.

The last limit, the successes since it changed and the fence at which it was lowered last are kept together, in the Hash
`last` of a semaphore in Redis.
"""

from __future__ import annotations

SUCCESS, OVERLOADED = 1, -1  # how a lease ended; 0: neither

# `adapt` is called before the lease is gone. It uses `last`, `used` and `format_int` of the script around it.
LUA_ADAPT = """
local function adapt(outcome, fence)
  local settings = redis.call('HGET', last, 'adaptive') or ''
  local low, high, grow_after, shrink = string.match(settings, '^%d+:(%d+):(%d+):(%d+):(%d+)$')
  if not low or fence <= tonumber(redis.call('HGET', last, 'lowered') or 0) then return end
  local limit = tonumber(redis.call('HGET', last, 'limit'))
  local new = limit
  if outcome < 0 then
    new = math.max(tonumber(low), math.min(limit - 1, math.floor(limit * shrink / 1000)))
    redis.call('HSET', last, 'lowered', redis.call('HGET', last, 'fence') or 0, 'successes', 0)
  elseif used() * 2 >= limit then
    local needed = grow_after == '0' and limit or tonumber(grow_after)
    if redis.call('HINCRBY', last, 'successes', 1) >= needed then
      new = math.min(tonumber(high), limit + 1)
      redis.call('HSET', last, 'successes', 0)
    end
  end
  if new ~= limit then redis.call('HSET', last, 'limit', format_int(new)) end
end
"""


class KeptLimit:
    """The same in Python: the limit that was set last, with what it adapts by."""

    def __init__(self, limit: int = 0, adaptive: str = "") -> None:
        self.limit = limit  # 0: none is kept
        self.adaptive = adaptive  # the settings; "" if the limit is fixed
        self.successes = 0
        self.lowered = 0

    def adapt(self, outcome: int, fence: int, used: int, last_fence: int) -> None:
        """Count a lease that is about to end; *used* is the weight of all leases with it."""
        if not self.adaptive or fence <= self.lowered:
            return
        _, low, high, grow_after, shrink = map(int, self.adaptive.split(":"))
        if outcome == OVERLOADED:
            self.limit = max(low, min(self.limit - 1, self.limit * shrink // 1000))
            self.lowered, self.successes = last_fence, 0
        elif used * 2 >= self.limit:
            self.successes += 1
            if self.successes >= (grow_after or self.limit):
                self.limit, self.successes = min(high, self.limit + 1), 0
