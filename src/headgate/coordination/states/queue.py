"""The state of a queue: its entries in order, until when each waits, which were served, and recent replies.

An entry has a deadline; one that is not served by then leaves the queue. An entry with a waiter, a caller that waits to
be served, leaves earlier if its waiter sends no heartbeat. Several callers may wait with the same id one after another:
the last one owns the entry, the others learn that theirs is gone.

enqueue    puts *id* at the end of the queue; an entry that is in it keeps its position. Replies with the position, or
           with -1 if the queue is full.
dequeue    takes the first entry out and marks it as served. Replies with its id, or with ''.
undo       puts back what the dequeue with the same call id took out, as its caller never got the reply.
cancel     takes *id* out of the queue. Replies with 1 if it was there, else with 0.
status     replies with what became of *id* (waiting, served, gone) and its position. From a waiter it is a heartbeat.
heartbeat  is a heartbeat of several waiters; replies with what became of the entry of each.
size       replies with the length of the queue.

Each may be run twice. The reply to a call id is remembered, and a repeated call gets it again; an operation that only
reads has no call id. A dequeue is remembered with the entry that it took out, so that undo can put the entry back where
it was: but not if it was cancelled or enqueued again meanwhile, which its mark among the served entries tells. The
waiter of that entry may have learned that it was served, and sends no more heartbeats; this is marked with a line feed
before the id. Such an entry comes back without a waiter, and is served once more unless its deadline comes first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import Operation, StateMachine, drop_expired

REPLY_TTL = 60 * MICROSECONDS  # how long the reply to a call, and a served entry, is remembered

NEVER = 2**53
UNDONE = (0, 0, None, 0, "")  # the reply that is remembered for a dequeue that was undone

# Keys: Sorted Sets of the queue (by score: the time of arrival, made unique), of deadlines, of when a waiter without a
# heartbeat is taken for dead, and of served entries; a Hash of replies by call id, and a Sorted Set of when to forget
# them; a String with the last score; a Hash of waiters by id.
#
# ARGV from 3: call id, id, timeout, max_length, heartbeat_ttl (0: the caller is no waiter), waiter ('': any); for
# "heartbeat" also pairs of id and waiter. Times in microseconds.
LUA = f"""
local queue, deadlines, alive, served, replies, reply_times, last_score, waiters = unpack(KEYS)
local call, id, timeout, max_length, heartbeat_ttl =
  ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local waiter = ARGV[8] or ''

local function drop_expired(times, act)
  while true do
    local expired = redis.call('ZRANGEBYSCORE', times, '-inf', format_int(now), 'LIMIT', 0, 500)
    if #expired == 0 then return end
    for _, each in ipairs(expired) do
      redis.call('ZREM', times, each)
      if act then act(each) end
    end
  end
end

local function take_out(entry)
  redis.call('ZREM', queue, entry)
  redis.call('ZREM', deadlines, entry)
  redis.call('ZREM', alive, entry)
end

local function forget_waiter(entry) redis.call('HDEL', waiters, entry) end

local function remove(entry)
  take_out(entry)
  forget_waiter(entry)
end

local function belongs_to(entry, owner) return owner == '' or redis.call('HGET', waiters, entry) == owner end

local function next_score()
  local score = math.max(now, tonumber(redis.call('GET', last_score) or 0) + 1)
  redis.call('SET', last_score, format_int(score))
  return score
end

local function forget_served(entry) redis.call('ZREM', served, entry, '\\n' .. entry) end

local function keep_keys(microseconds)
  local ttl = math.ceil((microseconds + {REPLY_TTL}) / 1000)
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
  end
end

local function remember(reply)
  redis.call('HSET', replies, call, reply)
  redis.call('ZADD', reply_times, format_int(now + {REPLY_TTL}), call)
  keep_keys(timeout)
end

drop_expired(deadlines, remove)
drop_expired(alive, remove)
drop_expired(served, forget_waiter)
drop_expired(reply_times, function(each) redis.call('HDEL', replies, each) end)
local known_reply = call ~= '' and redis.call('HGET', replies, call)

if op == 'enqueue' then
  if known_reply then return {{tonumber(known_reply)}} end
  local position = redis.call('ZRANK', queue, id)
  if not position then
    position = redis.call('ZCARD', queue)
    if max_length > 0 and position >= max_length then return {{-1}} end
    redis.call('ZADD', queue, format_int(next_score()), id)
    redis.call('ZADD', deadlines, format_int(now + timeout), id)
    forget_served(id)
    forget_waiter(id)
    redis.pcall('PUBLISH', queue, '')
  end
  if heartbeat_ttl > 0 then
    local deadline = math.max(now + timeout, tonumber(redis.call('ZSCORE', deadlines, id)))
    redis.call('ZADD', alive, format_int(now + heartbeat_ttl), id)
    redis.call('ZADD', deadlines, format_int(deadline), id)
    redis.call('HSET', waiters, id, waiter)
  end
  remember(position)
  return {{position}}
end

if op == 'dequeue' then
  if known_reply then return {{string.match(known_reply, '^%d*:%d*:%d*:%d*:(.*)$') or ''}} end
  local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  if #first == 0 then return {{''}} end
  local entry, score = first[1], first[2]
  local deadline, alive_until = redis.call('ZSCORE', deadlines, entry), redis.call('ZSCORE', alive, entry)
  local mark = format_int(next_score() + {REPLY_TTL})
  alive_until = alive_until and format_int(alive_until) or ''
  remember(table.concat({{format_int(score), format_int(deadline), alive_until, mark, entry}}, ':'))
  take_out(entry)
  redis.call('ZADD', served, mark, entry)
  redis.pcall('PUBLISH', queue, entry)
  keep_keys(timeout)
  return {{entry}}
end

if op == 'undo' then
  if known_reply == '-' then return {{1}} end
  if known_reply then
    local score, deadline, alive_until, mark, entry = string.match(known_reply, '^(%d*):(%d*):(%d*):(%d*):(.*)$')
    if tonumber(deadline) > now and tonumber(redis.call('ZSCORE', served, entry)) == tonumber(mark) then
      redis.call('ZADD', queue, score, entry)
      redis.call('ZADD', deadlines, deadline, entry)
      local notified = redis.call('ZSCORE', served, '\\n' .. entry)
      if alive_until ~= '' and not notified then
        redis.call('ZADD', alive, format_int(now + heartbeat_ttl), entry)
      end
      forget_served(entry)
      redis.pcall('PUBLISH', queue, '')
      keep_keys(deadline - now)  -- a queue that was empty meanwhile is a new key without a TTL
    end
  end
  remember('-')
  return {{1}}
end

if op == 'cancel' then
  if known_reply then return {{tonumber(known_reply)}} end
  local owned = belongs_to(id, waiter)
  local found = owned and redis.call('ZSCORE', queue, id) and 1 or 0
  if owned then
    remove(id)
    forget_served(id)
    redis.pcall('PUBLISH', queue, id)
  end
  remember(found)
  return {{found}}
end

local function status(entry, owner)
  if not belongs_to(entry, owner) then return 'gone' end
  if redis.call('ZSCORE', queue, entry) then
    if heartbeat_ttl > 0 then redis.call('ZADD', alive, format_int(now + heartbeat_ttl), entry) end
    return 'waiting'
  end
  local mark = redis.call('ZSCORE', served, entry)
  if mark and heartbeat_ttl > 0 then redis.call('ZADD', served, mark, '\\n' .. entry) end
  return mark and 'served' or 'gone'
end

if op == 'status' then return {{status(id, waiter), redis.call('ZRANK', queue, id) or 0}} end

if op == 'heartbeat' then
  local states = {{}}
  for i = 9, #ARGV, 2 do table.insert(states, status(ARGV[i], ARGV[i + 1])) end
  return states
end

return {{redis.call('ZCARD', queue)}}
"""


def queue_operation(
    name: str,
    *,
    call: str = "",
    id: str = "",
    timeout: int = 0,
    max_length: int = 0,
    heartbeat_ttl: int = 0,
    waiter: str = "",
    waiters: tuple[str, ...] = (),
) -> Operation:
    """An operation on a queue; *waiters* are the ids and waiters of a "heartbeat". Times in microseconds."""
    return Operation(name, (call, id, timeout, max_length, heartbeat_ttl, waiter, *waiters))


class QueueState:
    """The same in Python. The scores of the queue are a sorted list, so that a position is found by bisection."""

    def __init__(self) -> None:
        self.scores: list[int] = []
        self.entries: dict[int, str] = {}  # ids by score
        self.queue: dict[str, int] = {}  # scores by id
        self.deadlines: dict[str, int] = {}
        self.alive: dict[str, int] = {}
        self.waiters: dict[str, str] = {}
        self.served: dict[str, int] = {}
        self.notified: set[str] = set()
        self.replies: dict[str, Any] = {}
        self.reply_times: dict[str, int] = {}
        self.last_score = 0
        self.next_expiry = NEVER  # no deadline and no heartbeat ends before

    def enqueue(
        self, now: int, call: str, id: str, timeout: int, max_length: int, heartbeat_ttl: int, waiter: str = ""
    ) -> list[Any]:
        self._begin(now)
        if call in self.replies:
            return [self.replies[call]]
        if id in self.queue:
            position = self._position(id)
        else:
            position = len(self.queue)
            if max_length > 0 and position >= max_length:
                return [-1]
            self._put(id, self._next_score(now))
            self.deadlines[id] = now + timeout
            self._forget_served(id)
            self.waiters.pop(id, None)
        if heartbeat_ttl > 0:
            self.alive[id] = now + heartbeat_ttl
            self.deadlines[id] = max(now + timeout, self.deadlines[id])
            self.waiters[id] = waiter
        self.next_expiry = min(self.next_expiry, now + timeout, now + (heartbeat_ttl or timeout))
        self._remember(now, call, position)
        return [position]

    def dequeue(self, now: int, call: str, *_: Any) -> list[Any]:
        self._begin(now)
        if call in self.replies:
            return [self.replies[call][4]]
        if not self.queue:
            return [""]
        entry = self.entries[self.scores[0]]
        mark = self._next_score(now) + REPLY_TTL
        reply = (self.queue[entry], self.deadlines[entry], self.alive.get(entry), mark, entry)
        self._remember(now, call, reply)
        self._take_out(entry)
        self._forget_served(entry)  # put in again, it is the newest
        self.served[entry] = mark
        return [entry]

    def undo(
        self, now: int, call: str, id: str, timeout: int, max_length: int, heartbeat_ttl: int, waiter: str = ""
    ) -> list[Any]:
        self._begin(now)
        score, deadline, alive_until, mark, entry = self.replies.get(call, UNDONE)
        if deadline > now and self.served.get(entry) == mark:
            self._put(entry, score)
            self.deadlines[entry] = deadline
            if alive_until is not None and entry not in self.notified:
                self.alive[entry] = now + heartbeat_ttl
            self.next_expiry = now
            self._forget_served(entry)
        self._remember(now, call, UNDONE)
        return [1]

    def cancel(
        self, now: int, call: str, id: str, timeout: int, max_length: int, heartbeat_ttl: int, waiter: str = ""
    ) -> list[Any]:
        self._begin(now)
        if call in self.replies:
            return [self.replies[call]]
        owned = self._belongs_to(id, waiter)
        found = int(owned and id in self.queue)
        if owned:
            self._remove(id)
            self._forget_served(id)
        self._remember(now, call, found)
        return [found]

    def status(
        self, now: int, call: str, id: str, timeout: int, max_length: int, heartbeat_ttl: int, waiter: str = ""
    ) -> list[Any]:
        self._begin(now)
        return [self._status(now, id, waiter, heartbeat_ttl), self._position(id) if id in self.queue else 0]

    def heartbeat(
        self, now: int, call: str, id: str, timeout: int, max_length: int, heartbeat_ttl: int, waiter: str, *pairs: str
    ) -> list[Any]:
        self._begin(now)
        return [self._status(now, *pair, heartbeat_ttl) for pair in zip(pairs[::2], pairs[1::2], strict=True)]

    def size(self, now: int, *_: Any) -> list[Any]:
        self._begin(now)
        return [len(self.queue)]

    def is_expired(self, now: int) -> bool:
        self._begin(now)
        return not (self.queue or self.reply_times or self.served)

    def _begin(self, now: int) -> None:
        if now >= self.next_expiry:
            for times in (self.deadlines, self.alive):
                for entry in [entry for entry, until in times.items() if until <= now]:
                    self._remove(entry)
            self.next_expiry = min([*self.deadlines.values(), *self.alive.values()], default=NEVER)
        for entry in drop_expired(self.served, now):
            self.notified.discard(entry)
            self.waiters.pop(entry, None)
        for call in drop_expired(self.reply_times, now):
            del self.replies[call]

    def _put(self, id: str, score: int) -> None:
        insort(self.scores, score)
        self.entries[score], self.queue[id] = id, score

    def _position(self, id: str) -> int:
        return bisect_left(self.scores, self.queue[id])

    def _take_out(self, id: str) -> None:
        if id in self.queue:
            del self.scores[self._position(id)]
            del self.entries[self.queue.pop(id)]
        self.deadlines.pop(id, None)
        self.alive.pop(id, None)

    def _remove(self, id: str) -> None:
        self._take_out(id)
        self.waiters.pop(id, None)

    def _belongs_to(self, id: str, waiter: str) -> bool:
        return not waiter or self.waiters.get(id) == waiter

    def _next_score(self, now: int) -> int:
        self.last_score = max(now, self.last_score + 1)
        return self.last_score

    def _forget_served(self, id: str) -> None:
        self.served.pop(id, None)
        self.notified.discard(id)

    def _remember(self, now: int, call: str, reply: Any) -> None:
        self.replies[call] = reply
        self.reply_times.pop(call, None)  # put in again, it is the newest
        self.reply_times[call] = now + REPLY_TTL

    def _status(self, now: int, id: str, waiter: str, heartbeat_ttl: int) -> str:
        if not self._belongs_to(id, waiter):
            return "gone"
        if id in self.queue:
            if heartbeat_ttl > 0:
                self.alive[id] = now + heartbeat_ttl
                self.next_expiry = min(self.next_expiry, now + heartbeat_ttl)
            return "waiting"
        if id in self.served and heartbeat_ttl > 0:
            self.notified.add(id)
        return "served" if id in self.served else "gone"


SUFFIXES = ("", ":deadlines", ":alive", ":served", ":answers", ":calls", ":order", ":waiters")
QUEUE = StateMachine("token_queue", SUFFIXES, LUA, QueueState)
