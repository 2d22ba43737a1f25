"""The rules of a lock: whose it is, until when, and the number of its acquisition."""

from __future__ import annotations

from headgate.coordination.place import Machine

FENCE_TTL = 7 * 86_400_000  # milliseconds that the counter outlives the last acquisition

# A String with the holder's id, as everybody expects a lock to be; the last fence; who released it last. The last one
# is for requests that come late: a lock that was given back is not taken again by a request from before.
LUA = f"""
local lock, counter, gone = KEYS[1], KEYS[2], KEYS[3]
local owner, ttl, before = ARGV[3], ARGV[4], ARGV[5]
local holder = redis.call('GET', lock)

if op == 'acquire' then
  local left = redis.call('GET', gone)
  if left == owner or left == '-' .. owner then return {{-1, 0, 0}} end
  local last = tonumber(redis.call('GET', counter) or 0)
  if holder == owner then
    redis.call('PEXPIRE', lock, ttl)
    return {{1, last, 0}}
  end
  if holder and holder ~= before then return {{0, 0, redis.call('PTTL', lock)}} end
  local fence = math.max(last + 1, now)  -- with the time in it: a counter that was lost does not start again
  redis.call('SET', counter, whole(fence), 'PX', {FENCE_TTL})
  redis.call('SET', lock, owner, 'PX', ttl)
  return {{1, fence, 0}}
end

if op == 'renew' then
  if holder ~= owner then return {{0}} end
  redis.call('PEXPIRE', lock, ttl)
  redis.call('PEXPIRE', counter, {FENCE_TTL})
  return {{1}}
end

local left = redis.call('GET', gone)
if left == owner then return {{1}} end
if holder ~= owner then  -- it never was, or is no longer; and from now on it never will be
  redis.call('SET', gone, '-' .. owner, 'PX', ttl)
  return {{0}}
end
redis.call('SET', gone, owner, 'PX', ttl)
redis.call('DEL', lock)
redis.pcall('PUBLISH', lock, '')
return {{1}}
"""


class LockState:
    """The same in Python. Times are microseconds, TTLs milliseconds."""

    def __init__(self) -> None:
        self.holder, self.until = "", 0
        self.last, self.last_until = 0, 0
        self.gone, self.gone_until = "", 0

    def acquire(self, now: int, owner: str, ttl: int, before: str) -> list[int]:
        self._expire(now)
        if self.gone in (owner, "-" + owner):
            return [-1, 0, 0]
        if self.holder == owner:
            self.until = now + ttl * 1000
            return [1, self.last, 0]
        if self.holder and self.holder != before:
            return [0, 0, -(-(self.until - now) // 1000)]
        self.last = max(self.last + 1, now)
        self.last_until = now + FENCE_TTL * 1000
        self.holder, self.until = owner, now + ttl * 1000
        return [1, self.last, 0]

    def renew(self, now: int, owner: str, ttl: int) -> list[int]:
        self._expire(now)
        if self.holder != owner:
            return [0]
        self.until, self.last_until = now + ttl * 1000, now + FENCE_TTL * 1000
        return [1]

    def release(self, now: int, owner: str, ttl: int) -> list[int]:
        self._expire(now)
        if self.gone == owner:
            return [1]
        ours = self.holder == owner
        self.gone, self.gone_until = (owner if ours else "-" + owner), now + ttl * 1000
        if ours:
            self.holder = ""
        return [int(ours)]

    def idle(self, now: int) -> bool:
        self._expire(now)
        return not (self.holder or self.gone or self.last)

    def _expire(self, now: int) -> None:
        if now >= self.until:
            self.holder = ""
        if now >= self.gone_until:
            self.gone = ""
        if now >= self.last_until:
            self.last = 0


MACHINE = Machine("lock", ("", ":fence", ":gone"), LUA, LockState)
