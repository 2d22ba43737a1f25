"""The state of a lock: its holder, the end of the holder's TTL, and the last fence.

Each acquisition has an owner id of its own; the holder is known by it.

acquire  gives the lock to *owner* if it is free or held by *replaces*: an earlier owner of the same lock object whose
         release was not confirmed. Replies with granted, fence and wait. Granted is 1; or 0, and wait is the holder's
         TTL in milliseconds; or -1, as this owner was released before.
renew    starts the TTL of *owner* again. Replies with 1, or with 0 if it is not the holder.
release  frees the lock if *owner* holds it. Replies with 1 if it did hold it, else with 0.
evict    frees the lock, whatever its holder; here *owner* is the id of this call. Replies with 1 if it was held, else
         with 0.
peek     replies with whether *owner* holds the lock, and whether it is held at all. Changes nothing.

Each may be run twice. The holder that acquires again gets the same fence and a fresh TTL. A released owner is
remembered, so that a second release replies as the first did, and so that an acquire that was delayed in the network
and arrives after its release is refused: it would take a lock that no caller is going to release. An owner that was
evicted, or released without having held the lock, is remembered with a minus before its id. The call of an eviction is
remembered with an equals sign: repeated, it must not evict the next holder.
"""

from __future__ import annotations

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired, lua_of_released, remember

FENCE_TTL = 7 * 86_400_000  # milliseconds that the last fence is kept after the last acquisition or renewal
RELEASED_TTL = 600 * MICROSECONDS  # how long a released owner is remembered
MAX_RELEASED = 1000  # released owners that are remembered; the oldest are forgotten first

# Keys: a String with the holder, as other clients expect of a lock; a String with the last fence; a Sorted Set of
# released owners by when to forget them. ARGV from 3: owner, ttl in milliseconds, replaces.
LUA = f"""
local lock, counter, released = KEYS[1], KEYS[2], KEYS[3]
local owner, ttl, replaces = ARGV[3], ARGV[4], ARGV[5]
local holder = redis.call('GET', lock)
{lua_of_released(RELEASED_TTL, MAX_RELEASED)}
local function free()
  redis.call('DEL', lock)
  redis.pcall('PUBLISH', lock, '')
  return {{1}}
end

if op == 'acquire' then
  if was_released(owner) or was_released('-' .. owner) then return {{-1, 0, 0}} end
  local last = tonumber(redis.call('GET', counter) or 0)
  if holder == owner then
    redis.call('PEXPIRE', lock, ttl)
    return {{1, last, 0}}
  end
  if holder and holder ~= replaces then return {{0, 0, redis.call('PTTL', lock)}} end
  local fence = math.max(last + 1, now)  -- the time is part of it, so fences still grow if the counter is lost
  redis.call('SET', counter, format_int(fence), 'PX', {FENCE_TTL})
  redis.call('SET', lock, owner, 'PX', ttl)
  return {{1, fence, 0}}
end

if op == 'renew' then
  if holder ~= owner then return {{0}} end
  redis.call('PEXPIRE', lock, ttl)
  redis.call('PEXPIRE', counter, {FENCE_TTL})
  return {{1}}
end

if op == 'release' then
  if was_released(owner) then return {{1}} end
  remember(holder == owner and owner or '-' .. owner)
  if holder ~= owner then return {{0}} end
  return free()
end

if op == 'evict' then
  if was_released('=' .. owner) then return {{1}} end
  if not holder then return {{0}} end
  remember('=' .. owner)
  remember('-' .. holder)
  return free()
end

return {{holder == owner and 1 or 0, holder and 1 or 0}}
"""


class LockState:
    """The same in Python. Times are in microseconds, TTLs in milliseconds."""

    def __init__(self) -> None:
        self.holder, self.until = "", 0
        self.last, self.last_until = 0, 0  # fence
        self.released: dict[str, int] = {}

    def acquire(self, now: int, owner: str, ttl: int, replaces: str) -> list[int]:
        self._expire(now)
        if owner in self.released or "-" + owner in self.released:
            return [-1, 0, 0]
        if self.holder == owner:
            self.until = now + ttl * 1000
            return [1, self.last, 0]
        if self.holder and self.holder != replaces:
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
        if owner in self.released:
            return [1]
        held = self.holder == owner
        self._remember(owner if held else "-" + owner, now)
        if held:
            self.holder = ""
        return [int(held)]

    def evict(self, now: int, owner: str, ttl: int) -> list[int]:
        self._expire(now)
        if "=" + owner in self.released:
            return [1]
        if not self.holder:
            return [0]
        self._remember("=" + owner, now)
        self._remember("-" + self.holder, now)
        self.holder = ""
        return [1]

    def peek(self, now: int, owner: str, ttl: int) -> list[int]:
        self._expire(now)
        return [int(self.holder == owner), int(bool(self.holder))]

    def is_expired(self, now: int) -> bool:
        self._expire(now)
        return not (self.holder or self.released) and now > self.last  # a new state starts with a fence of now

    def _remember(self, id: str, now: int) -> None:
        remember(self.released, id, now + RELEASED_TTL, MAX_RELEASED)

    def _expire(self, now: int) -> None:
        if now >= self.until:
            self.holder = ""
        drop_expired(self.released, now)
        if now >= self.last_until:
            self.last = 0


LOCK = StateMachine("lock", ("", ":fence", ":gone"), LUA, LockState)
