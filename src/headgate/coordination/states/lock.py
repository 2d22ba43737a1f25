"""The rules of a lock: whose it is, until when, and the number of its acquisition."""

from __future__ import annotations

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired

FENCE_TTL = 7 * 86_400_000  # milliseconds that the counter outlives the last acquisition
GONE = 600 * MICROSECONDS  # how long it is remembered who released it, or will never have it
MOST_GONE = 1000

# A String with the holder's id, as everybody expects a lock to be; the last fence; who released it, with until when to
# remember that. The last one is for requests that come late: a lock that was given back is not taken again by a request
# from before. One with a minus never had it, or was evicted; one with an equals sign is a call that evicted a holder.
LUA = f"""
local lock, counter, gone = KEYS[1], KEYS[2], KEYS[3]
local owner, ttl, before = ARGV[3], ARGV[4], ARGV[5]
local holder = redis.call('GET', lock)
local function has_gone(who) return tonumber(redis.call('ZSCORE', gone, who) or 0) > now end

if op == 'acquire' then
  if has_gone(owner) or has_gone('-' .. owner) then return {{-1, 0, 0}} end
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

if op == 'peek' then return {{holder == owner and 1 or 0, holder and 1 or 0}} end

local function remember(who)
  redis.call('ZREMRANGEBYSCORE', gone, '-inf', whole(now))
  redis.call('ZADD', gone, whole(now + {GONE}), who)
  redis.call('ZREMRANGEBYRANK', gone, 0, -{MOST_GONE + 1})
  redis.call('PEXPIRE', gone, {GONE // 1000})
end

if op == 'evict' then  -- *owner* is the id of this call: repeated, it must not evict the next holder
  if has_gone('=' .. owner) then return {{1}} end
  if not holder then return {{0}} end
  remember('=' .. owner)
  remember('-' .. holder)
else
  if has_gone(owner) then return {{1}} end
  remember(holder == owner and owner or '-' .. owner)
  if holder ~= owner then return {{0}} end  -- it never was, or is no longer; and from now on it never will be
end
redis.call('DEL', lock)
redis.pcall('PUBLISH', lock, '')
return {{1}}
"""


class LockState:
    """The same in Python. Times are microseconds, TTLs milliseconds."""

    def __init__(self) -> None:
        self.holder, self.until = "", 0
        self.last, self.last_until = 0, 0
        self.gone: dict[str, int] = {}

    def acquire(self, now: int, owner: str, ttl: int, before: str) -> list[int]:
        self._expire(now)
        if owner in self.gone or "-" + owner in self.gone:
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
        if owner in self.gone:
            return [1]
        ours = self.holder == owner
        self._remember(owner if ours else "-" + owner, now)
        if ours:
            self.holder = ""
        return [int(ours)]

    def evict(self, now: int, call: str, ttl: int) -> list[int]:
        """Take the lock from its holder. *call* is the id of this call: repeated, it must not evict the next holder."""
        self._expire(now)
        if "=" + call in self.gone:
            return [1]
        if not self.holder:
            return [0]
        self._remember("=" + call, now)
        self._remember("-" + self.holder, now)
        self.holder = ""
        return [1]

    def peek(self, now: int, owner: str, ttl: int) -> list[int]:
        """Whether *owner* holds the lock, and whether it is held at all."""
        self._expire(now)
        return [int(self.holder == owner), int(bool(self.holder))]

    def is_expired(self, now: int) -> bool:
        self._expire(now)
        return not (self.holder or self.gone) and now > self.last  # the next fence is at least the time

    def _remember(self, who: str, now: int) -> None:
        self.gone.pop(who, None)
        self.gone[who] = now + GONE
        if len(self.gone) > MOST_GONE:
            del self.gone[next(iter(self.gone))]

    def _expire(self, now: int) -> None:
        if now >= self.until:
            self.holder = ""
        drop_expired(self.gone, now)
        if now >= self.last_until:
            self.last = 0


LOCK = StateMachine("lock", ("", ":fence", ":gone"), LUA, LockState)
