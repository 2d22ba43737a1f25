"""How the Lua of a budget reads its state, and the short way of most calls through it.

Keys: a Hash of the buckets of the root by label (it begins with b), of the records of holds by h and their id, of
waiters by w and their id, and of notes by m; a Sorted Set of holds by when they end or are forgotten; a Sorted Set of
the ids in the queue by when they came. The buckets of other levels are Hashes of their own. The notes save calls: the
time before which no hold ends, whether there may be a queue, and the time until which the keys live. What nearly every
call needs is read with one HMGET and written with one HSET. All values are packed, as Lua takes several times longer to
read numbers from text.

ARGV from 3: id, spec and units, and what each operation says. A spec is room, rate, level and label of each bucket; in
units, each has a number.
"""

from __future__ import annotations

from headgate.budget.records import CLOCK_STEP, DONE_TTL, LOST_TTL, MOST, ROOT

NUMBER = "<d"
QUOTA = "<ddss"  # room, rate, level, label; as `headgate.budget.records.spec_of` packs it
BUCKET = "<dddd"  # time, debt, held, when the last hold ends
RECORD = "<c1ssI4c0I4c0"  # kind (l: live, x: lost, d: done, p: pause), nonce, policy, spec, units; then what was spent
WAITER = "<dsI4c0"  # until when, path, spec; then the units
NOTES = "<dBd"  # when the next hold ends, whether there may be a queue, until when the keys live

SHORT_LUA = f"""
local hash, due, waiting = KEYS[1], KEYS[2], KEYS[3]
local id, spec, units = ARGV[3], ARGV[4], ARGV[5]

local fields, levels, names, rooms, rates, at_root = {{'m', 'h' .. id}}, {{}}, {{}}, {{}}, {{}}, true
local count, position, size = 0, 1, #spec
while position <= size do
  count = count + 1
  rooms[count], rates[count], levels[count], names[count], position = struct.unpack('{QUOTA}', spec, position)
  if levels[count] == '{ROOT}' then fields[#fields + 1] = names[count] else at_root = false end
end
local texts = redis.call('HMGET', hash, unpack(fields))
local next_due, has_queue, lives_until = 0, true, 0
if texts[1] then
  next_due, has_queue, lives_until = struct.unpack('{NOTES}', texts[1])
  has_queue = has_queue ~= 0
end

-- The short way of most calls: a new id is granted, or a live hold settled, at the root alone, while no caller waits,
-- no hold ends and no key needs a longer TTL. It does what the operations below do; else it has changed nothing.
local till, kept, back, longest
if at_root and not has_queue and next_due > now and next_due < {MOST} then
  if op == 'reserve' then
    if not texts[2] then
      till, longest = now + ARGV[6], ARGV[6] + {LOST_TTL + 2 * DONE_TTL}
      kept = struct.pack('{RECORD}', 'l', ARGV[7], ARGV[8], size, spec, #units, units)
    end
  elseif op == 'settle' and texts[2] then
    local kind, nonce, _, its_spec, its_units = struct.unpack('{RECORD}', texts[2])
    if kind == 'l' and its_spec == spec then
      till, longest, back = (math.floor(now / {DONE_TTL}) + 2) * {DONE_TTL}, {LOST_TTL + 2 * DONE_TTL}, its_units
      kept = struct.pack('{RECORD}', 'd', nonce, '1' .. ARGV[6], 0, '', 0, '')
    end
  end
end
if till then
  local fresh = {{fields[2], kept}}
  for i = 1, count do
    local text, rate = texts[i + 2], rates[i]
    if not text then till = nil break end
    local at, debt, held, ends = struct.unpack('{BUCKET}', text)
    local amount = struct.unpack('{NUMBER}', units, 8 * i - 7)
    if at > now + {CLOCK_STEP} then at = now end
    if now > at then
      debt, at = debt - (now - at) * rate, now
      if debt < 0 then debt = 0 end
    end
    if back then
      debt, held = math.min(debt + amount, {MOST}), math.max(held - struct.unpack('{NUMBER}', back, 8 * i - 7), 0)
    else
      held = (ends > now and held or 0) + amount
      if till > ends then ends = till end
      if debt + held > rooms[i] then till = nil break end
    end
    local needed = (debt + held) / rate
    if needed > longest then longest = needed end
    fresh[2 * i + 1], fresh[2 * i + 2] = names[i], struct.pack('{BUCKET}', at, debt, held, ends)
  end
  if till and lives_until >= now + longest then
    if till < next_due then
      fresh[#fresh + 1] = 'm'
      fresh[#fresh + 1] = struct.pack('{NOTES}', till, 0, lives_until)
    end
    redis.call('HSET', hash, unpack(fresh))
    redis.call('ZADD', due, format_int(till), id)
    return back and {{1}} or {{1, 0, 0, 0, 0}}
  end
end
"""
