"""Bookings: a place in time for each, spent from the buckets of a key at that moment, now or later.

A slot is the moment at which every quota of the key has room for the booking's permits. They are spent as of that
moment, so the debt of a bucket may be more than its room; until that is paid, calls that do not book are denied, and
later bookings come behind. A slot belongs to the id that booked it, from its moment on for *grace*: until then the same
id gets the same slot again. In any stretch of time t, calls that start within the grace of their slots are at most
capacity + rate * (t + grace).

To cancel gives the permits back only where that is exact:
- if nothing was spent after it, the buckets are as they were before it;
- else, if its moment is still to come, the slot goes to the next booking of as many permits that would be later;
- else it stays spent.

`KeySlots` has the slots of a key in Python, `LUA` the frame of a script with the same meaning: the tests compare them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from headgate.algorithms.bucket import Bucket
from headgate.decision import Decision

DENIED: Final = 0
BOOKED: Final = 1
KNOWN: Final = 2  # the id has a slot already
FREED_LOOKED_AT: Final = 100  # cancelled slots that a booking looks at, the next ones
EXACT: Final = 1 << 53  # a debt beyond it would be rounded in Lua


class Booking(NamedTuple):
    """What is asked: *op* is book, cancel or reset; times are microseconds."""

    op: str
    key: str
    id: str = ""
    permits: int = 1
    within: int = 0
    grace: int = 0


class Booked(NamedTuple):
    """The answer to a booking: when, by the clock of the store; *decision* is how the quotas stand, or the refusal."""

    outcome: int  # DENIED, BOOKED or KNOWN
    at: int  # microseconds since the epoch
    now: int
    permits: int
    decision: Decision


class SlotRecord(NamedTuple):
    """One slot, which belongs to its id until *until*."""

    at: int
    until: int
    permits: int
    paid: int  # when the first bucket will have paid its debt, in units, as of this booking; -1: it was another's slot


class KeySlots:
    """The slots of one key."""

    def __init__(self) -> None:
        self.records: dict[str, SlotRecord] = {}
        self.freed: list[tuple[int, bytes]] = []  # cancelled slots, in order: when, and permits and id

    def find(self, id: str, now: int) -> SlotRecord | None:
        record = self.records.get(id)
        return record if record is not None and record.until >= now else None

    def book(
        self, parts: Sequence[Bucket], states: list[int], now: int, asked: Booking, save: Callable[[list[int]], bool]
    ) -> tuple[int, int, int] | None:
        """Outcome, moment and permits; a denial has the earliest moment. None: *save* refused, as a state has changed.

        *save* takes the next states of the buckets.
        """
        record = self.find(asked.id, now)
        if record is not None:
            return KNOWN, record.at, record.permits
        wait = max([part.wait_for(state, now, asked.permits) for part, state in zip(parts, states, strict=True)])
        freed = self._freed(now, asked.permits, min(wait, asked.within))
        if freed >= 0:
            at, paid = self.freed.pop(freed)[0], -1
        elif wait > asked.within:
            return DENIED, now + wait, asked.permits
        else:
            at = now + wait
            after = [part.spend_at(state, at, asked.permits) for part, state in zip(parts, states, strict=True)]
            if not save(after):
                return None
            paid = after[0]
        self.records[asked.id] = SlotRecord(at, at + asked.grace, asked.permits, paid)
        return BOOKED, at, asked.permits

    def cancel(
        self, parts: Sequence[Bucket], states: list[int], now: int, id: str, save: Callable[[list[int]], bool]
    ) -> bool | None:
        """Whether the slot was given back; None as for `book`."""
        record = self.find(id, now)
        if record is None:
            return False
        is_last = max(states[0], now * parts[0].rate) == record.paid
        if is_last:
            after = [part.take(state, now, -record.permits)[4] for part, state in zip(parts, states, strict=True)]
            if not save(after):
                return None
        elif record.at > now:
            insort(self.freed, (record.at, b"%d:%b" % (record.permits, id.encode())))
        del self.records[id]
        return is_last or record.at > now

    def forget(self, id: str, now: int) -> None:
        """Drop the record of *id* if its time is over, and cancelled slots whose moment is."""
        record = self.records.get(id)
        if record is not None and record.until < now:
            del self.records[id]
        del self.freed[: bisect_left(self.freed, (now, b""))]

    def _freed(self, now: int, permits: int, most: int) -> int:
        """The place of the first cancelled slot of so many permits that comes within *most*; -1 if there is none."""
        first = bisect_left(self.freed, (now, b""))
        start = b"%d:" % permits
        for place in range(first, min(first + FREED_LOOKED_AT, len(self.freed))):
            if self.freed[place][0] - now > most:
                break
            if self.freed[place][1].startswith(start):
                return place
        return -1


# KEYS: those of the quotas, then a Hash of slots by id (moment, end of grace, permits, when the debt is paid), a Sorted
# Set of the ids by the end of their grace, a Sorted Set of cancelled slots by their moment. ARGV: op, time ('' for the
# server's), number of quotas, their arguments, id, permits, within, grace. The answer to a booking: outcome, moment,
# now, permits, and the quota that binds with what is left of it and the time to full. A second run changes nothing.
LUA = f"""
local op, now, many, argument = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), 4
if op == 'reset' then return {{redis.call('UNLINK', unpack(KEYS))}} end
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local slots, ends, freed = KEYS[many + 1], KEYS[many + 2], KEYS[many + 3]
local quotas, debts, aheads = {{}}, {{}}, {{}}
for i = 1, many do
  quotas[i], argument = quota(argument)
  debts[i], aheads[i] = load(KEYS[i], quotas[i], now)
end
local id, permits, within = ARGV[argument], tonumber(ARGV[argument + 1]), tonumber(ARGV[argument + 2])
local grace = tonumber(ARGV[argument + 3])
local function whole(number) return string.format('%.0f', number) end

local function paid()  -- when the first bucket will have paid its debt
  return whole(now + math.floor(debts[1] / quotas[1].rate)) .. ':' .. whole(debts[1] % quotas[1].rate)
end

local function live_as_long(key)  -- as its last member is needed
  local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  return math.ceil((last - now) / 1000000) + 1
end

local function find()
  local at, till, count, paid_at = string.match(redis.call('HGET', slots, id) or '', '^(%d+) (%d+) (%d+) (.+)$')
  if at and tonumber(till) >= now then return tonumber(at), tonumber(count), paid_at end
end

local function outcome(number, at, count)
  local binds, left, reset = 0, 0, 0
  for i, q in ipairs(quotas) do
    local _, remains, full = evaluate(debts[i], q, now, 0)
    if binds == 0 or remains < left then binds, left = i, remains end
    reset = math.max(reset, full)
  end
  return {{number, at, now, count, binds, left, reset}}
end

for _, old in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', '(' .. whole(now), 'LIMIT', 0, 20)) do
  redis.call('ZREM', ends, old)
  redis.call('HDEL', slots, old)
end
redis.call('ZREMRANGEBYSCORE', freed, '-inf', '(' .. whole(now))
local at, count, paid_at = find()

if op == 'cancel' then
  if not at then return {{0}} end
  redis.call('HDEL', slots, id)
  redis.call('ZREM', ends, id)
  if paid_at == paid() then
    for i, q in ipairs(quotas) do consume(KEYS[i], debts[i], q, now, -count) end
    return {{1}}
  end
  if at <= now then return {{0}} end
  redis.call('ZADD', freed, whole(at), whole(at) .. ':' .. whole(count) .. ':' .. id)
  redis.call('EXPIRE', freed, live_as_long(freed))
  return {{1}}
end

if at then return outcome({KNOWN}, at, count) end
local wait = 0
for i, q in ipairs(quotas) do
  local _, _, _, each = evaluate(debts[i], q, now, permits)
  wait = math.max(wait, each)
end

local latest, found = whole(now + math.min(wait, within)), nil
for _, member in ipairs(redis.call('ZRANGEBYSCORE', freed, whole(now), latest, 'LIMIT', 0, {FREED_LOOKED_AT})) do
  local moment, asked = string.match(member, '^(%d+):(%d+):')
  if tonumber(asked) == permits then
    found, at = member, tonumber(moment)
    break
  end
end
if found then
  redis.call('ZREM', freed, found)
  paid_at = '-'
elseif wait > within then
  for i, q in ipairs(quotas) do
    if aheads[i] then consume(KEYS[i], debts[i], q, now, 0) end
  end
  return outcome({DENIED}, now + wait, permits)
else
  at = now + wait
  for i, q in ipairs(quotas) do
    local before = math.max(debts[i] - wait * q.rate, 0) + wait * q.rate  -- no less than what is paid until then
    consume(KEYS[i], before, q, now, permits)
    debts[i] = before + permits * q.cost
  end
  paid_at = paid()
end
local till = whole(at + grace)
redis.call('HSET', slots, id, table.concat({{whole(at), till, whole(permits), paid_at}}, ' '))
redis.call('ZADD', ends, till, id)
local ttl = live_as_long(ends)
redis.call('EXPIRE', ends, ttl)
redis.call('EXPIRE', slots, ttl)
return outcome({BOOKED}, at, permits)
"""
