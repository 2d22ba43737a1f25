"""The rules of a queue: who stands where, until when, who was served, and what each call was answered."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired

REPLY_TTL = 60 * MICROSECONDS  # how long the answer to a call is remembered, and who was served

NEVER = 2**53
UNDONE = (0, 0, None, 0, "")

# Sorted Sets: the line (in order), until when each waits, until when it is taken to be alive (only those who say so),
# who was served; the answers to calls and until when they are remembered; the last place that was given out; who waits
# for an id, as several may have done one after the other, of whom the last counts.
#
# What a dequeue took out is remembered with its answer, and goes back to its place if nobody heard that: unless it was
# cancelled or came again meanwhile, which its mark in "served" tells. Whoever waited for it may have been told, and no
# longer says that it is there (a line feed before its name): it comes out once more all the same, within its time.
#
# ARGV from 3: call, id, timeout, most, alive, waiter ('': whoever it is); for "beat" pairs of id and waiter. Times in
# microseconds.
LUA = f"""
local line, deadlines, alive, served, answers, called, order, waiters = unpack(KEYS)
local call, id, timeout, most, beat = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local waiter = ARGV[8] or ''

local function due(times, act)
  while true do
    local old = redis.call('ZRANGEBYSCORE', times, '-inf', whole(now), 'LIMIT', 0, 500)
    if #old == 0 then return end
    for _, each in ipairs(old) do
      redis.call('ZREM', times, each)
      if act then act(each) end
    end
  end
end

local function take_out(each)
  redis.call('ZREM', line, each)
  redis.call('ZREM', deadlines, each)
  redis.call('ZREM', alive, each)
end

local function forget_waiter(each) redis.call('HDEL', waiters, each) end

local function remove(each)
  take_out(each)
  forget_waiter(each)
end

local function is_mine(each, who) return who == '' or redis.call('HGET', waiters, each) == who end

local function tick()
  local last = math.max(now, tonumber(redis.call('GET', order) or 0) + 1)
  redis.call('SET', order, whole(last))
  return last
end

local function forget_served(each) redis.call('ZREM', served, each, '\\n' .. each) end

local function keep(microseconds)
  local most = math.ceil((microseconds + {REPLY_TTL}) / 1000)
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < most then redis.call('PEXPIRE', key, most) end
  end
end

local function remember(answer)
  redis.call('HSET', answers, call, answer)
  redis.call('ZADD', called, whole(now + {REPLY_TTL}), call)
  keep(timeout)
end

due(deadlines, remove)
due(alive, remove)
due(served, forget_waiter)
due(called, function(each) redis.call('HDEL', answers, each) end)
local before = call ~= '' and redis.call('HGET', answers, call)

if op == 'enqueue' then
  if before then return {{tonumber(before)}} end
  local place = redis.call('ZRANK', line, id)
  if not place then
    place = redis.call('ZCARD', line)
    if most > 0 and place >= most then return {{-1}} end
    redis.call('ZADD', line, whole(tick()), id)
    redis.call('ZADD', deadlines, whole(now + timeout), id)
    forget_served(id)
    forget_waiter(id)
    redis.pcall('PUBLISH', line, '')
  end
  if beat > 0 then
    redis.call('ZADD', alive, whole(now + beat), id)
    redis.call('ZADD', deadlines, whole(math.max(now + timeout, tonumber(redis.call('ZSCORE', deadlines, id)))), id)
    redis.call('HSET', waiters, id, waiter)
  end
  remember(place)
  return {{place}}
end

if op == 'dequeue' then
  if before then return {{string.match(before, '^%d*:%d*:%d*:%d*:(.*)$') or ''}} end
  local first = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')
  if #first == 0 then return {{''}} end
  local heard = redis.call('ZSCORE', alive, first[1])
  local until_when = redis.call('ZSCORE', deadlines, first[1])
  local mark = whole(tick() + {REPLY_TTL})
  remember(table.concat({{whole(first[2]), whole(until_when), heard and whole(heard) or '', mark, first[1]}}, ':'))
  take_out(first[1])
  redis.call('ZADD', served, mark, first[1])
  redis.pcall('PUBLISH', line, first[1])
  keep(timeout)
  return {{first[1]}}
end

if op == 'undo' then  -- a dequeue that nobody heard the answer of: back to its place
  if before == '-' then return {{1}} end
  if before then
    local place, until_when, heard, mark, who = string.match(before, '^(%d*):(%d*):(%d*):(%d*):(.*)$')
    if tonumber(until_when) > now and tonumber(redis.call('ZSCORE', served, who)) == tonumber(mark) then
      redis.call('ZADD', line, place, who)
      redis.call('ZADD', deadlines, until_when, who)
      local told = redis.call('ZSCORE', served, '\\n' .. who)
      if heard ~= '' and not told then redis.call('ZADD', alive, whole(now + beat), who) end
      forget_served(who)
      redis.pcall('PUBLISH', line, '')
      keep(until_when - now)  -- the line may have been empty meanwhile: its key is a new one
    end
  end
  remember('-')
  return {{1}}
end

if op == 'cancel' then
  if before then return {{tonumber(before)}} end
  local mine = is_mine(id, waiter)
  local found = mine and redis.call('ZSCORE', line, id) and 1 or 0
  if mine then
    remove(id)
    forget_served(id)
    redis.pcall('PUBLISH', line, id)
  end
  remember(found)
  return {{found}}
end

local function status(each, who)
  if not is_mine(each, who) then return 'gone' end
  if redis.call('ZSCORE', line, each) then
    if beat > 0 then redis.call('ZADD', alive, whole(now + beat), each) end
    return 'waiting'
  end
  local mark = redis.call('ZSCORE', served, each)
  if mark and beat > 0 then redis.call('ZADD', served, mark, '\\n' .. each) end
  return mark and 'served' or 'gone'
end

if op == 'status' then return {{status(id, waiter), redis.call('ZRANK', line, id) or 0}} end

if op == 'heartbeat' then
  local states = {{}}
  for i = 9, #ARGV, 2 do table.insert(states, status(ARGV[i], ARGV[i + 1])) end
  return states
end

return {{redis.call('ZCARD', line)}}
"""


class QueueState:
    """The same in Python. The line is a sorted list of places, so to find one is quick, and to close a gap a move."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.who: dict[int, str] = {}  # stands at that place
        self.line: dict[str, int] = {}
        self.deadlines: dict[str, int] = {}
        self.alive: dict[str, int] = {}
        self.waiters: dict[str, str] = {}
        self.served: dict[str, int] = {}
        self.told: set[str] = set()
        self.answers: dict[str, Any] = {}
        self.called: dict[str, int] = {}
        self.last = 0
        self.due = NEVER

    def enqueue(self, now: int, call: str, id: str, timeout: int, most: int, beat: int, waiter: str = "") -> list[Any]:
        self._begin(now)
        if call in self.answers:
            return [self.answers[call]]
        if id in self.line:
            place = self._place(id)
        else:
            place = len(self.line)
            if most > 0 and place >= most:
                return [-1]
            self._stand(id, self._tick(now))
            self.deadlines[id] = now + timeout
            self._forget_served(id)
            self.waiters.pop(id, None)
        if beat > 0:
            self.alive[id] = now + beat
            self.deadlines[id] = max(now + timeout, self.deadlines[id])
            self.waiters[id] = waiter
        self.due = min(self.due, now + timeout, now + (beat or timeout))
        self._remember(now, call, place)
        return [place]

    def dequeue(self, now: int, call: str, id: str, timeout: int, most: int, beat: int, waiter: str = "") -> list[Any]:
        self._begin(now)
        if call in self.answers:
            return [self.answers[call][4]]
        if not self.line:
            return [""]
        first = self.who[self.places[0]]
        mark = self._tick(now) + REPLY_TTL
        answer = (self.line[first], self.deadlines[first], self.alive.get(first), mark, first)
        self._remember(now, call, answer)
        self._take_out(first)
        self._forget_served(first)
        self.served[first] = mark
        return [first]

    def undo(self, now: int, call: str, id: str, timeout: int, most: int, beat: int, waiter: str = "") -> list[Any]:
        self._begin(now)
        place, until, heard, mark, who = self.answers.get(call, UNDONE)
        if until > now and self.served.get(who) == mark:
            self._stand(who, place)
            self.deadlines[who] = until
            if heard is not None and who not in self.told:
                self.alive[who] = now + beat
            self.due = now  # look at all
            self._forget_served(who)
        self._remember(now, call, UNDONE)
        return [1]

    def cancel(self, now: int, call: str, id: str, timeout: int, most: int, beat: int, waiter: str = "") -> list[Any]:
        self._begin(now)
        if call in self.answers:
            return [self.answers[call]]
        mine = self._is_mine(id, waiter)
        found = int(mine and id in self.line)
        if mine:
            self._remove(id)
            self._forget_served(id)
        self._remember(now, call, found)
        return [found]

    def status(self, now: int, call: str, id: str, timeout: int, most: int, beat: int, waiter: str = "") -> list[Any]:
        self._begin(now)
        return [self._status(now, id, waiter, beat), self._place(id) if id in self.line else 0]

    def heartbeat(
        self, now: int, call: str, id: str, timeout: int, most: int, beat: int, waiter: str, *pairs: str
    ) -> list[Any]:
        self._begin(now)
        return [self._status(now, *pair, beat) for pair in zip(pairs[::2], pairs[1::2], strict=True)]

    def size(self, now: int, call: str, id: str, timeout: int, most: int, beat: int, waiter: str = "") -> list[Any]:
        self._begin(now)
        return [len(self.line)]

    def is_expired(self, now: int) -> bool:
        self._begin(now)
        return not (self.line or self.called or self.served)

    def _begin(self, now: int) -> None:
        if now >= self.due:  # else nobody's time can have come
            for times in (self.deadlines, self.alive):
                for each in [each for each, until in times.items() if until <= now]:
                    self._remove(each)
            self.due = min([*self.deadlines.values(), *self.alive.values()], default=NEVER)
        for each in drop_expired(self.served, now):
            self.told.discard(each)
            self.waiters.pop(each, None)
        for each in drop_expired(self.called, now):
            del self.answers[each]

    def _status(self, now: int, id: str, waiter: str, beat: int) -> str:
        if not self._is_mine(id, waiter):
            return "gone"
        if id in self.line:
            if beat > 0:
                self.alive[id] = now + beat
                self.due = min(self.due, now + beat)
            return "waiting"
        if id in self.served and beat > 0:
            self.told.add(id)
        return "served" if id in self.served else "gone"

    def _is_mine(self, id: str, waiter: str) -> bool:
        return not waiter or self.waiters.get(id) == waiter

    def _stand(self, id: str, place: int) -> None:
        insort(self.places, place)
        self.who[place], self.line[id] = id, place

    def _take_out(self, id: str) -> None:
        if id in self.line:
            del self.places[self._place(id)]
            del self.who[self.line.pop(id)]
        self.deadlines.pop(id, None)
        self.alive.pop(id, None)

    def _remove(self, id: str) -> None:
        self._take_out(id)
        self.waiters.pop(id, None)

    def _forget_served(self, id: str) -> None:
        self.served.pop(id, None)
        self.told.discard(id)

    def _tick(self, now: int) -> int:
        self.last = max(now, self.last + 1)
        return self.last

    def _place(self, id: str) -> int:
        return bisect_left(self.places, self.line[id])

    def _remember(self, now: int, call: str, answer: Any) -> None:
        self.answers[call] = answer
        self.called.pop(call, None)
        self.called[call] = now + REPLY_TTL


SUFFIXES = ("", ":deadlines", ":alive", ":served", ":answers", ":calls", ":order", ":waiters")
QUEUE = StateMachine("token_queue", SUFFIXES, LUA, QueueState)
