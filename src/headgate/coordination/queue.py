"""A line for a whole fleet: first in, first out, and nobody stands in it longer than its time.

    queue = WaitQueue("tokens", store="redis://...", timeout=60.0)
    queue.enqueue("request-1")
    queue.dequeue()  # "request-1"

Whoever hands something out takes the next from the front with `dequeue`. Whoever wants it stands in line with `wait`,
which also says now and then that it is still there; one that died is passed over. Those that are expired, cancelled or
dead never come out and are never counted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import count, deadline, seconds
from headgate.coordination.place import Machine, Step
from headgate.coordination.site import Plan, Site, Turn, shorter
from headgate.errors import QueueFull, StoreUnavailable
from headgate.keys import check_key
from headgate.stores import Store

T = TypeVar("T")

ALIVE = 5.0  # seconds without a word after which whoever waits is taken for dead
BEAT = 2.0  # seconds between two words
RETRY = 0.1  # seconds between tries while Redis does not answer
KEPT = 60 * MICROSECONDS  # how long the answer to a call is remembered, and who was served

# Sorted Sets: the line (in order), until when each waits, until when it is taken to be alive (only those who say so),
# who was served; the answers to calls and until when they are remembered; the last place that was given out.
#
# ARGV from 3: call, id, timeout, most, alive. Times in microseconds.
LUA = f"""
local line, deadlines, alive, served, answers, called, order =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local call, id, timeout, most, beat = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

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

local function remove(each)
  redis.call('ZREM', line, each)
  redis.call('ZREM', deadlines, each)
  redis.call('ZREM', alive, each)
end

local function keep(microseconds)
  local most = math.ceil((microseconds + {KEPT}) / 1000)
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < most then redis.call('PEXPIRE', key, most) end
  end
end

local function remember(answer)
  redis.call('HSET', answers, call, answer)
  redis.call('ZADD', called, whole(now + {KEPT}), call)
  keep(timeout)
end

due(deadlines, remove)
due(alive, remove)
due(served)
due(called, function(each) redis.call('HDEL', answers, each) end)
local before = call ~= '' and redis.call('HGET', answers, call)

if op == 'enqueue' then
  if before then return {{tonumber(before)}} end
  local place = redis.call('ZRANK', line, id)
  if not place then
    place = redis.call('ZCARD', line)
    if most > 0 and place >= most then return {{-1}} end
    local last = math.max(now, tonumber(redis.call('GET', order) or 0) + 1)
    redis.call('SET', order, whole(last))
    redis.call('ZADD', line, whole(last), id)
    redis.call('ZADD', deadlines, whole(now + timeout), id)
    redis.call('ZREM', served, id)
    redis.pcall('PUBLISH', line, '')
  end
  if beat > 0 then redis.call('ZADD', alive, whole(now + beat), id) end
  remember(place)
  return {{place}}
end

if op == 'dequeue' then
  if before then return {{string.match(before, '^%d*:%d*:%d*:(.*)$') or ''}} end
  local first = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')
  if #first == 0 then return {{''}} end
  local heard = redis.call('ZSCORE', alive, first[1])
  local until_when = redis.call('ZSCORE', deadlines, first[1])
  remember(whole(first[2]) .. ':' .. whole(until_when) .. ':' .. (heard and whole(heard) or '') .. ':' .. first[1])
  remove(first[1])
  redis.call('ZADD', served, whole(now + {KEPT}), first[1])
  redis.pcall('PUBLISH', line, first[1])
  keep(timeout)
  return {{first[1]}}
end

if op == 'undo' then  -- a dequeue that nobody heard the answer of: back to its place
  if before == '-' then return {{1}} end
  if before then
    local place, until_when, heard, who = string.match(before, '^(%d*):(%d*):(%d*):(.*)$')
    if tonumber(until_when) > now and not redis.call('ZSCORE', line, who) then
      redis.call('ZADD', line, place, who)
      redis.call('ZADD', deadlines, until_when, who)
      if heard ~= '' then redis.call('ZADD', alive, whole(now + beat), who) end
      redis.call('ZREM', served, who)
      redis.pcall('PUBLISH', line, '')
    end
  end
  remember('-')
  return {{1}}
end

if op == 'cancel' then
  if before then return {{tonumber(before)}} end
  local found = redis.call('ZSCORE', line, id) and 1 or 0
  remove(id)
  redis.call('ZREM', served, id)
  remember(found)
  redis.pcall('PUBLISH', line, id)
  return {{found}}
end

if op == 'look' then
  local place = redis.call('ZRANK', line, id)
  if place and beat > 0 then redis.call('ZADD', alive, whole(now + beat), id) end
  if place then return {{'waiting', place}} end
  return {{redis.call('ZSCORE', served, id) and 'served' or 'gone', 0}}
end

return {{redis.call('ZCARD', line)}}
"""


class QueueState:
    """The same in Python."""

    def __init__(self) -> None:
        self.line: dict[str, int] = {}
        self.deadlines: dict[str, int] = {}
        self.alive: dict[str, int] = {}
        self.served: dict[str, int] = {}
        self.answers: dict[str, Any] = {}
        self.called: dict[str, int] = {}
        self.last = 0

    def enqueue(self, now: int, call: str, id: str, timeout: int, most: int, beat: int) -> list[Any]:
        self._begin(now)
        if call in self.answers:
            return [self.answers[call]]
        if id in self.line:
            place = self._place(id)
        else:
            place = len(self.line)
            if most > 0 and place >= most:
                return [-1]
            self.last = max(now, self.last + 1)
            self.line[id] = self.last
            self.deadlines[id] = now + timeout
            self.served.pop(id, None)
        if beat > 0:
            self.alive[id] = now + beat
        self._remember(now, call, place)
        return [place]

    def dequeue(self, now: int, call: str, id: str, timeout: int, most: int, beat: int) -> list[Any]:
        self._begin(now)
        if call in self.answers:
            return [self.answers[call][3]]
        if not self.line:
            return [""]
        first = min(self.line, key=self.line.__getitem__)
        answer = (self.line[first], self.deadlines[first], self.alive.get(first), first)
        self._remember(now, call, answer)
        self._remove(first)
        self.served[first] = now + KEPT
        return [first]

    def undo(self, now: int, call: str, id: str, timeout: int, most: int, beat: int) -> list[Any]:
        self._begin(now)
        place, until, heard, who = self.answers.get(call, (0, 0, None, ""))
        if until > now and who not in self.line:
            self.line[who], self.deadlines[who] = place, until
            if heard is not None:
                self.alive[who] = now + beat
            self.served.pop(who, None)
        self._remember(now, call, (0, 0, None, ""))
        return [1]

    def cancel(self, now: int, call: str, id: str, timeout: int, most: int, beat: int) -> list[Any]:
        self._begin(now)
        if call in self.answers:
            return [self.answers[call]]
        found = int(id in self.line)
        self._remove(id)
        self.served.pop(id, None)
        self._remember(now, call, found)
        return [found]

    def look(self, now: int, call: str, id: str, timeout: int, most: int, beat: int) -> list[Any]:
        self._begin(now)
        if id in self.line:
            if beat > 0:
                self.alive[id] = now + beat
            return ["waiting", self._place(id)]
        return ["served" if id in self.served else "gone", 0]

    def size(self, now: int, call: str, id: str, timeout: int, most: int, beat: int) -> list[Any]:
        self._begin(now)
        return [len(self.line)]

    def idle(self, now: int) -> bool:
        self._begin(now)
        return not (self.line or self.called or self.served)

    def _begin(self, now: int) -> None:
        for times in (self.deadlines, self.alive):
            for each in [each for each, until in times.items() if until <= now]:
                self._remove(each)
        self.served = {each: until for each, until in self.served.items() if until > now}
        for each in [each for each, until in self.called.items() if until <= now]:
            del self.called[each], self.answers[each]

    def _remove(self, id: str) -> None:
        for times in (self.line, self.deadlines, self.alive):
            times.pop(id, None)

    def _place(self, id: str) -> int:
        return sum(place < self.line[id] for place in self.line.values())

    def _remember(self, now: int, call: str, answer: Any) -> None:
        self.answers[call] = answer
        self.called[call] = now + KEPT


SUFFIXES = ("", ":deadlines", ":alive", ":served", ":answers", ":calls", ":order")
MACHINE = Machine("token_queue", SUFFIXES, LUA, QueueState)


class Plans:
    """What both queues do."""

    def __init__(
        self, name: str, store: str | Store, timeout: float, max_length: int | None, clock: Clock | None
    ) -> None:
        self.timeout = seconds("timeout", timeout)
        self.most = 0 if max_length is None else count("max_length", max_length)
        self.site = Site(MACHINE, name, store, clock)
        self.clock = self.site.clock

    def enqueue(self, id: str, timeout: float | None, alive: float = 0.0) -> Plan[int]:
        time = self.timeout if timeout is None else seconds("timeout", timeout)
        [place] = yield self._step("enqueue", check_key(id, "id"), time, alive)
        if place < 0:
            raise QueueFull(f"the queue {self.site.name!r} has {self.most} already")
        return int(place)

    def dequeue(self, turn: Turn, timeout: float | None) -> Plan[str | None]:
        until = deadline(self.clock, timeout)
        with turn:
            while True:
                pause: float | None = None  # until it is first
                problem = None
                if turn.first:
                    pause = self.site.place.poll
                    step = self._step("dequeue")
                    try:
                        [id] = yield step
                    except StoreUnavailable as error:
                        self._undo(step)
                        problem, pause = error, RETRY
                    except BaseException:
                        self._undo(step)
                        raise
                    else:
                        if id:
                            return str(id)
                    turn.listen()
                left = None if until is None else (until - self.clock.now()) / MICROSECONDS
                if problem and (left is None or left <= 0):
                    raise problem
                if left is not None and left <= 0:
                    return None
                yield shorter(pause, left)

    def wait(self, turn: Turn, id: str, timeout: float | None) -> Plan[bool]:
        time = self.timeout if timeout is None else seconds("timeout", timeout)
        until = self.clock.now() + round(time * MICROSECONDS)
        served = False
        yield from self.enqueue(id, time, ALIVE)
        with turn:
            try:
                turn.listen()
                while True:
                    pause = min(BEAT, self.site.place.poll * BEAT)
                    try:
                        state, _ = yield self._step("look", id, alive=ALIVE)
                    except StoreUnavailable:
                        state, pause = "waiting", RETRY
                    served = bool(state == "served")
                    left = (until - self.clock.now()) / MICROSECONDS
                    if state != "waiting" or left <= 0:
                        return served
                    yield shorter(pause, left)
            finally:
                if not served:
                    self.site.insist(self._step("cancel", id), self.clock.now() + KEPT)

    def cancel(self, id: str) -> Plan[bool]:
        [found] = yield self._step("cancel", check_key(id, "id"))
        return bool(found)

    def position(self, id: str) -> Plan[int | None]:
        state, place = yield self._step("look", check_key(id, "id"))
        return place if state == "waiting" else None

    def size(self) -> Plan[int]:
        [length] = yield self._step("size")
        return int(length)

    def _step(self, op: str, id: str = "", timeout: float | None = None, alive: float = 0.0) -> Step:
        call = "" if op in ("look", "size") else secrets.token_hex(8)
        time = round((timeout or self.timeout) * MICROSECONDS)
        return Step(op, (call, id, time, self.most, round(alive * MICROSECONDS)))

    def _undo(self, dequeue: Step) -> None:
        """Nobody heard whom it took out: back to its place."""
        call, _, time, most, _ = dequeue.arguments
        step = Step("undo", (call, "", time, most, round(ALIVE * MICROSECONDS)))
        self.site.insist(step, self.clock.now() + KEPT)


class WaitQueue:
    """A queue for threads and processes.

    name        what is waited for
    store       a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
    timeout     seconds after which whoever was not served is out
    max_length  how many may wait; one more is `QueueFull`. None: any number
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        timeout: float = 60.0,
        max_length: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, timeout, max_length, clock)
        self._plans.site.place.check(tasks=False)
        self.name = name

    def enqueue(self, id: str, timeout: float | None = None) -> int:
        """Put *id* at the end, for *timeout* seconds; how many are before it. One that is in line keeps its place."""
        return self._run(lambda _: self._plans.enqueue(id, timeout))

    def dequeue(self, timeout: float | None = 0.0) -> str | None:
        """Take the first out; None if nobody comes within *timeout* seconds (None: wait for ever)."""
        return self._run(lambda turn: self._plans.dequeue(turn, timeout))

    def wait(self, id: str, timeout: float | None = None) -> bool:
        """Stand in line until somebody takes *id* out; False if the time is over before, or it was cancelled."""
        return self._plans.site.run(lambda turn: self._plans.wait(turn, id, timeout), check_key(id, "id"))

    def cancel(self, id: str) -> bool:
        """Take *id* out, wherever it stands; whether it was there."""
        return self._run(lambda _: self._plans.cancel(id))

    def position(self, id: str) -> int | None:
        """How many are before *id*; None if it is not in line."""
        return self._run(lambda _: self._plans.position(id))

    def __len__(self) -> int:
        """How many wait: alive, and in time."""
        return self._run(lambda _: self._plans.size())

    def __bool__(self) -> bool:
        """A queue is a queue, empty or not."""
        return True

    def close(self) -> None:
        """Let go of the connections, which all tools on this store share; the next call makes new ones."""
        self._plans.site.place.close()

    def _run(self, plan: Callable[[Turn], Plan[T]]) -> T:
        return self._plans.site.run(plan)


class AsyncWaitQueue:
    """`WaitQueue` for asyncio: the same arguments, the same methods, awaited; ``await queue.size()`` for ``len``."""

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        timeout: float = 60.0,
        max_length: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plans = Plans(name, store, timeout, max_length, clock)
        self._plans.site.place.check(tasks=True)
        self.name = name

    async def enqueue(self, id: str, timeout: float | None = None) -> int:
        """Put *id* at the end, for *timeout* seconds; how many are before it. One that is in line keeps its place."""
        return await self._run(lambda _: self._plans.enqueue(id, timeout))

    async def dequeue(self, timeout: float | None = 0.0) -> str | None:
        """Take the first out; None if nobody comes within *timeout* seconds (None: wait for ever)."""
        return await self._run(lambda turn: self._plans.dequeue(turn, timeout))

    async def wait(self, id: str, timeout: float | None = None) -> bool:
        """Stand in line until somebody takes *id* out; False if the time is over before, or it was cancelled."""
        return await self._plans.site.arun(lambda turn: self._plans.wait(turn, id, timeout), check_key(id, "id"))

    async def cancel(self, id: str) -> bool:
        """Take *id* out, wherever it stands; whether it was there."""
        return await self._run(lambda _: self._plans.cancel(id))

    async def position(self, id: str) -> int | None:
        """How many are before *id*; None if it is not in line."""
        return await self._run(lambda _: self._plans.position(id))

    async def size(self) -> int:
        """How many wait: alive, and in time."""
        return await self._run(lambda _: self._plans.size())

    async def aclose(self) -> None:
        """Let go of this event loop's connections; it does so itself when it ends."""
        await self._plans.site.place.aclose()

    def _run(self, plan: Callable[[Turn], Plan[T]]) -> Coroutine[Any, Any, T]:
        return self._plans.site.arun(plan)
