"""Sliding window log: every admitted call is remembered until it is one period old.

Promises: no stretch of time as long as the period ever holds more than the limit. Exact, and the price is memory:
one entry for each admitted call (not for each permit) in the last period; a denial adds none.
Redis: one String, a head of 35 bytes and then a ring of records. A record is the time of a call and the total of all
permits up to and including it, in 8 bytes: 4 for the time, modulo 2**32 microseconds (a period of more than 71 minutes
takes 5, one of more than 12 days 7), and 4 for the total, modulo 2**32. The head has the newest and the oldest time and
total in full, so most decisions read nothing else. The difference of two totals is the sum between them, so every
other one is a search by halves: O(log n), however large ``permits`` is. Records of expired calls are written over. A
ring that is full in its middle moves records to its end, and one that is eight times too large is written anew: both
are O(n) and rare, a few records for each call on average (docs/algorithms.md has the times).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Final

from headgate.algorithms.algorithm import Algorithm, AlgorithmSQL
from headgate.algorithms.fixed_window import QUOTA_LUA, window_ttl, without_burst
from headgate.decision import Decision, decision_in
from headgate.quota import Quota

_FORGET: Final = 8  # entries that are kept for nothing before a log is made shorter


class Log:
    """Times of the admitted calls, and the total of permits up to and including each."""

    __slots__ = ("before", "first", "newest", "oldest", "times", "totals")

    def __init__(self) -> None:
        self.before = 0  # the total before the first entry kept
        self.first = 0  # entries before this one have left the period
        self.oldest = 0  # the time of the entry at `first`, if there is one
        self.newest = 0  # the time of the last entry, if there is one: most decisions read no other
        self.times = array("q")
        self.totals: array[int] | None = None  # None while every entry is one permit

    def total(self, position: int) -> int:
        """Permits spent before the entry at *position*."""
        if self.totals is None:
            return self.before + position
        return self.totals[position - 1] if position else self.before

    def first_after(self, time: int) -> int:
        """The position of the first entry later than *time*, which never goes back."""
        first, size = self.first, len(self.times)
        if first == size or self.oldest > time:
            return first
        first += 1
        if first < size and self.times[first] <= time:
            first = bisect_right(self.times, time, first, size)
        return first

    def advance(self, first: int) -> None:
        """Let the log begin at *first*."""
        if first < len(self.times):
            self.oldest = self.times[first]
        self.first = first

    def position(self, total: int, first: int) -> int:
        """The position of the entry that brought the permits to *total*, not before *first*."""
        if self.totals is None:
            return max(total - self.before - 1, first)
        return bisect_left(self.totals, total, first, len(self.times))

    def fill(self, before: int, times: array[int], totals: array[int] | None) -> None:
        """Take over the entries of another log, of which none has left the period."""
        self.before, self.times, self.totals = before, times, totals
        if len(times):
            self.oldest, self.newest = times[0], times[len(times) - 1]

    def since(self, first: int) -> Log:
        """A log of the entries from *first* on."""
        recent = Log()
        recent.fill(self.total(first), self.times[first:], None if self.totals is None else self.totals[first:])
        return recent


class SlidingWindow(Algorithm[Log]):
    """State: the log. `consume` changes it in place, or makes a shorter one of it."""

    __slots__ = ("period",)

    def __init__(self, quota: Quota) -> None:
        without_burst(quota, "sliding_window")
        super().__init__(quota.limit, 1, 1)
        self.period = quota.period_us

    def initial(self) -> Log:
        return Log()

    def evaluate(self, state: Log, now: int, permits: int) -> Decision:
        times = state.times
        first = state.first_after(now - self.period)
        gone = state.total(first)
        used = state.total(len(times)) - gone
        after = used + permits
        if permits and after <= self.limit:
            return decision_in(self, True, after, self.period, 0)
        reset = state.newest + self.period - now if used else 0
        if not permits:
            return decision_in(self, True, after, reset, 0)
        frees = state.position(gone + after - self.limit, first)
        left_at = state.oldest if frees == state.first else times[frees]
        return decision_in(self, False, used, reset, left_at + self.period - now)

    def consume(self, state: Log, now: int, permits: int) -> Log:
        first = state.first_after(now - self.period)
        if first != state.first:
            state.advance(first)
            if first > _FORGET and first * 2 > len(state.times):  # in bulk: each entry is moved once at most
                state, first = state.since(first), 0
        times = state.times
        if first == len(times):
            state.oldest = now
        if permits > 0:
            state.newest = now
        if permits == 1 and state.totals is None:
            times.append(now)
            return state
        if state.totals is None:
            state.totals = array("q", range(state.before + 1, state.before + len(times) + 1))
        totals = state.totals
        # whatever interrupts these lines, a time is never without its total; a total without a time does not count
        del totals[len(times) :]
        total = state.total(len(times)) + permits
        if permits > 0:
            totals.append(total)
            times.append(now)
            return state
        total = max(total, state.total(first))
        keep = bisect_right(totals, total, first, len(times))
        if keep < len(times) and state.total(keep) < total:  # given back in part
            totals[keep] = total
            keep += 1
        del times[keep:]
        if keep:
            state.newest = times[keep - 1]
        return state

    def remaining(self, state: Log, now: int) -> int:
        first = state.first_after(now - self.period)
        return self.limit - (state.total(len(state.times)) - state.total(first))

    def is_expired(self, state: Log, now: int) -> bool:
        return not state.times or state.newest <= now - self.period

    def lua_arguments(self) -> tuple[int, ...]:
        return (self.limit, self.period, window_ttl(self.period))

    def sql_arguments(self) -> tuple[int, int, int, int]:
        return (self.limit, self.period, 0, 0)


LUA = (
    QUOTA_LUA
    + """
-- first: the slot of the oldest record. last, oldest: times in full. gone: the total before the oldest record.
local HEAD, START = '>BI4I4I4I7I7I4I4', 35  -- bytes, first, count, slots, last, oldest, gone, total
local TOTALS = 2 ^ 32  -- a quota has fewer permits than that
local SHORT = 200  -- a shorter log is read in one piece, and written in one piece
local PIECE = 65536  -- bytes that are moved at once
local ROOMY = 64  -- slots that a ring may have for nothing

local function form(bytes)
  return bytes == 4 and '>I4I4' or bytes == 5 and '>I5I4' or '>I7I4'
end

-- all that counts, as if one call had spent it at this time
local function fold(state, time)
  state.bytes, state.first, state.count, state.slots = 7, 0, 1, 1
  state.last, state.oldest, state.gone, state.total = time, time, 0, state.used
  state.data = string.rep(' ', START) .. struct.pack(form(7), time, state.used)
end

-- A Sorted Set, as logs were before: scores are times, members are 'total:permits'. Reading all of it could take long.
local function folded_set(key, q, now)
  local last = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  local time = tonumber(last[2])
  local alive = string.format('(%.0f', math.max(now, time) - q.period)
  local first = redis.call('ZRANGEBYSCORE', key, alive, '+inf', 'LIMIT', 0, 1)[1]
  local state = {key = key, now = math.max(now, time), used = 0, set = true}
  if first then
    local total, permits = string.match(first, '^(%d+):(%d+)$')
    state.used = tonumber(string.match(last[1], '^%d+')) - total + permits
    fold(state, time)
  end
  return state
end

-- the time of a record, counted from that of the oldest, and its total, counted likewise
local function record(state, i)
  local slot, bytes, data, at = state.first + i, state.bytes, state.data, START
  if slot >= state.slots then slot = slot - state.slots end
  at = START + slot * (bytes + 4)
  if data then
    at = at + 1
  else
    data, at = redis.call('GETRANGE', state.key, at, at + bytes + 3), 1
  end
  local time, total = struct.unpack(form(bytes), data, at)
  return (time - state.oldest) % 256 ^ bytes, (total - state.gone) % TOTALS
end

-- leave out the records that have expired: most often few, so the steps get longer as they go
local function expire(state, edge)
  local low, high, step, since = 0, state.count - 1, 0, edge - state.oldest
  local oldest, gone = state.last - state.oldest, 0
  while low < high do
    local middle = math.min(low + step, math.floor((low + high) / 2))
    local time, total = record(state, middle)
    if time > since then high, oldest = middle, time else low, gone = middle + 1, total end
    step = step * 2 + 1
  end
  state.first, state.count = (state.first + low) % state.slots, state.count - low
  state.oldest, state.gone = state.oldest + oldest, (state.gone + gone) % TOTALS
  state.used = state.used - gone
end

local function load(key, q, now)
  local data = redis.pcall('GETRANGE', key, 0, SHORT - 1)
  if data == '' then return {key = key, now = now, used = 0} end
  local state
  if not data.err then
    local bytes, first, count, slots, last, oldest, gone, total = struct.unpack(HEAD, data)
    if bytes > 7 then error('WRONGTYPE the value is no log') end
    state = {key = key, now = math.max(now, last), bytes = bytes, first = first, count = count, slots = slots,
             before = last, last = last, oldest = oldest, gone = gone, total = total, used = (total - gone) % TOTALS,
             data = #data < SHORT and data}
    local edge = state.now - q.period  -- a clock that stepped back forgets nothing, and the log stays in order
    if last <= edge then return {key = key, now = now, used = 0} end
    if oldest <= edge then expire(state, edge) end
  elseif string.find(data.err, 'WRONGTYPE') then
    state = folded_set(key, q, now)
  else
    return redis.call('GETRANGE', key, 0, 0)  -- the error again, raised
  end
  local ahead = state.used > 0 and state.last - now > q.period
  if ahead then  -- the clock stepped back by more than a period: all that is remembered counts as made now
    fold(state, now)
    state.now = now
  end
  return state, ahead or state.set
end

-- the record at which so many permits are reached: each record has one at least, which leaves nothing to search for
-- if none has more
local function find(state, permits)
  local low, high = math.max(state.count - 1 - state.used + permits, 0), math.min(state.count, permits) - 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local _, total = record(state, middle)
    if total >= permits then high = middle else low = middle + 1 end
  end
  return low
end

local function evaluate(state, q, now, permits)
  local after = state.used + permits
  local reset = state.used > 0 and state.last + q.period - now or 0
  if after > q.limit then
    local frees = after - q.limit > 1 and find(state, after - q.limit) or 0
    local time = state.oldest + (frees > 0 and record(state, frees) or 0)
    return false, math.max(q.limit - state.used, 0), reset, time + q.period - now
  end
  return true, q.limit - after, permits > 0 and state.now + q.period - now or reset, 0
end

-- the records between two places of the ring
local function records(state, from, to)
  local size = state.bytes + 4
  if state.data then return string.sub(state.data, START + from * size + 1, START + to * size) end
  if from == to then return '' end
  return redis.call('GETRANGE', state.key, START + from * size, START + to * size - 1)
end

-- keep so many of the records, and add this one
local function write(key, state, q, keep, added)
  local first, count, slots, size = state.first, keep + (added and 1 or 0), state.slots, state.bytes + 4
  local short = state.data and START + count * size < SHORT
  if short or slots > ROOMY and slots > 8 * count then  -- also a ring that has become far too large
    local kept = records(state, first, math.min(first + keep, slots))
    if first + keep > slots then kept = kept .. records(state, 0, first + keep - slots) end
    local head = struct.pack(HEAD, state.bytes, 0, count, count, state.last, state.oldest, state.gone, state.total)
    redis.call('SET', key, head .. kept .. (added or ''), 'EX', q.ttl)
    return
  end
  if added then
    if keep == slots and first > 0 then  -- the ring is full: what is before the oldest record moves behind the end
      local bytes = first * size
      for at = START, START + bytes - 1, PIECE do
        local piece = redis.call('GETRANGE', key, at, math.min(at + PIECE, START + bytes) - 1)
        redis.call('SETRANGE', key, at + slots * size, piece)
      end
      slots = slots + first
    end
    local slot = first + keep
    if slot > slots then
      slot = slot - slots
    elseif slot == slots then
      if first > 0 and (first * 4 >= slots or slots >= q.limit) then slot = 0 else slots = slots + 1 end
    end
    redis.call('SETRANGE', key, START + slot * size, added)
  end
  redis.call('SETRANGE', key, 0,
    struct.pack(HEAD, state.bytes, first, count, slots, state.last, state.oldest, state.gone, state.total))
  -- once a second is enough: the time to live is a second more than the period
  if math.floor(state.before / 1000000) < math.floor(state.last / 1000000) then redis.call('EXPIRE', key, q.ttl) end
end

local function consume(key, state, q, now, permits)
  if state.set then redis.call('UNLINK', key) end
  local used = state.used + permits
  if used <= 0 then
    redis.call('UNLINK', key)
    return
  end
  if state.used == 0 then  -- a new log, its times in as few bytes as a period needs
    local bytes, time = q.period <= 256 ^ 4 and 4 or q.period <= 256 ^ 5 and 5 or 7, state.now
    local head = struct.pack(HEAD, bytes, 0, 1, 1, time, time, 0, permits)
    redis.call('SET', key, head .. struct.pack(form(bytes), time % 256 ^ bytes, permits), 'EX', q.ttl)
    return
  end
  if permits > 0 and state.now - state.oldest >= 256 ^ state.bytes then
    fold(state, state.last)  -- the log of a quota with a shorter period
  end
  local keep, changed = state.count, permits > 0
  if changed then
    state.last = state.now
  elseif permits < 0 then
    keep = find(state, used + 1)
    local time, total = 0, 0
    if keep > 0 then time, total = record(state, keep - 1) end
    changed = total < used  -- given back in part
    if changed then time = record(state, keep) end
    state.last = state.oldest + time
  end
  state.total = (state.gone + used) % TOTALS
  local bytes = state.bytes
  write(key, state, q, keep, changed and struct.pack(form(bytes), state.last % 256 ^ bytes, state.total))
end
"""
)

# a: the newest time, b: the total of all permits, c: the total before the oldest call that counts, d: its time. The
# calls are rows of a second table, {log}, with their times and totals; the row of the state is locked first.
SQL = AlgorithmSQL(
    number=5,
    load="""
log_now := greatest(now_us, a);  -- a clock that stepped back forgets nothing, and the log stays in order
x := log_now - n2;
IF b > c AND a <= x THEN
  c := b;
ELSIF b > c AND d <= x THEN
  FOR entry IN SELECT l.total, l.time FROM {log} l WHERE l.key = row_key AND l.total > c ORDER BY l.total LOOP
    d := entry.time;
    EXIT WHEN d > x;
    c := entry.total;
  END LOOP;
END IF;
IF b > c AND a - now_us > n2 THEN  -- it stepped back by more than a period: all that counts was made now
  log_now := now_us;
  a := now_us;
  d := now_us;
  ahead := true;
END IF;
""",
    evaluate="""
x := b - c + asked;
ok := x <= n1;
full_us := CASE WHEN b > c THEN a + n2 - now_us ELSE 0 END;
IF ok THEN
  left_permits := n1 - x;
  wait_us := 0;
  IF asked > 0 THEN full_us := log_now + n2 - now_us; END IF;
ELSE
  left_permits := greatest(n1 - b + c, 0);
  y := d;
  IF x - n1 > 1 AND NOT ahead THEN
    SELECT l.time INTO y FROM {log} l WHERE l.key = row_key AND l.total >= c + x - n1 ORDER BY l.total LIMIT 1;
  END IF;
  wait_us := y + n2 - now_us;
END IF;
""",
    consume="""
IF ahead THEN
  DELETE FROM {log} l WHERE l.key = row_key;
  INSERT INTO {log} (key, total, time) VALUES (row_key, b, a);
ELSIF c > kept_c THEN
  DELETE FROM {log} l WHERE l.key = row_key AND l.total <= c;
END IF;
IF spent > 0 THEN
  IF b = c THEN d := log_now; END IF;
  a := log_now;
  b := b + spent;
  INSERT INTO {log} (key, total, time) VALUES (row_key, b, a);
ELSIF spent < 0 AND b > c THEN
  b := greatest(b + spent, c);
  SELECT l.time INTO x FROM {log} l WHERE l.key = row_key AND l.total >= b ORDER BY l.total LIMIT 1;
  DELETE FROM {log} l WHERE l.key = row_key AND l.total > b;
  IF b > c THEN
    a := x;
    INSERT INTO {log} (key, total, time) VALUES (row_key, b, a) ON CONFLICT DO NOTHING;
  END IF;
END IF;
gone := CASE WHEN b > c THEN a + n2 ELSE now_us END;
""",
)
