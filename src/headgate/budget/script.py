"""The state of a budget in Lua: the twin of `headgate.budget.state`, which says what each operation does."""

from __future__ import annotations

from headgate.budget.records import CLOCK_STEP, DONE_TTL, LOST_TTL, MAX_WOKEN, MOST, ROOT

# Keys: a Hash of the buckets of the root by label, of the records of holds by h and their id, of waiters by w and
# their id, and of notes by m; a Sorted Set of holds by when they end or are forgotten; a Sorted Set of the ids in the
# queue by when they came. The buckets of other levels are Hashes of their own. The notes save calls: the time before
# which no hold ends, whether there may be a queue, and the time until which the keys live. ARGV from 3: id, spec and
# units, and what each operation says. What nearly every call needs is read with one HMGET and written with one HSET.
LUA = f"""
local hash, due, waiting = unpack(KEYS)
local id, spec, units = ARGV[3], ARGV[4], ARGV[5]

local fields, wanted, at_root = {{'m', 'h' .. id}}, {{}}, true
for level, name, room, rate in string.gmatch(spec, '(%S+) (%S+) (%d+) (%d+)') do
  wanted[#wanted + 1] = {{level, name, tonumber(room), tonumber(rate)}}
  if level == '{ROOT}' then fields[#fields + 1] = name else at_root = false end
end
local texts = redis.call('HMGET', hash, unpack(fields))
local first, queue, lives = string.match(texts[1] or '', '^(%d+) (%d) (%d+)$')
local next_due, has_queue, lives_until = tonumber(first or 0), queue ~= '0', tonumber(lives or 0)

-- The short way of most calls: a new id is granted, or a live hold settled, at the root alone, while no caller waits,
-- no hold ends and no key needs a longer TTL. It does what the operations below do; else it has changed nothing.
local till, kept, its_units, longest
if at_root and not has_queue and next_due > now and next_due < {MOST} then
  if op == 'reserve' and not texts[2] then
    longest = ARGV[6] + {LOST_TTL + 2 * DONE_TTL}
    till, kept = now + ARGV[6], 'live\\n' .. ARGV[7] .. '\\n' .. ARGV[8] .. '\\n' .. spec .. '\\n' .. units .. '\\n'
  elseif op == 'settle' and texts[2] and string.sub(texts[2], 1, 5) == 'live\\n' then
    local _, before = string.find(texts[2], '\\n' .. spec .. '\\n', 5, true)
    its_units = before and string.match(texts[2], '^[%d ]+', before + 1)
    longest = {LOST_TTL + 2 * DONE_TTL}
    till = its_units and (math.floor(now / {DONE_TTL}) + 2) * {DONE_TTL}
    kept = 'done\\n' .. string.match(texts[2], '^[^\\n]*', 6) .. '\\n1' .. ARGV[6] .. '\\n\\n\\n'
  end
end
if till then
  local next_amount, next_back = string.gmatch(units, '%d+'), its_units and string.gmatch(its_units, '%d+')
  local fresh = {{'h' .. id, kept}}
  for i, each in ipairs(wanted) do
    local at, debt, held, ends = string.match(texts[i + 2] or '', '^(%d+) (%d+) (%d+) (%d+)$')
    if not at then till = nil break end
    local amount = tonumber(next_amount())
    at, debt, held, ends = tonumber(at), tonumber(debt), tonumber(held), tonumber(ends)
    if at > now + {CLOCK_STEP} then at = now end
    if now > at then debt, at = math.max(debt - (now - at) * each[4], 0), now end
    if its_units then
      debt, held = math.min(debt + amount, {MOST}), math.max(held - next_back(), 0)
    else
      held, ends = (ends > now and held or 0) + amount, math.max(ends, till)
      if debt + held > each[3] then till = nil break end
    end
    longest = math.max(longest, (debt + held) / each[4])
    fresh[#fresh + 1] = each[2]
    fresh[#fresh + 1] = string.format('%.0f %.0f %.0f %.0f', at, debt, held, ends)
  end
  if till and lives_until >= now + longest then
    if till < next_due then
      fresh[#fresh + 1] = 'm'
      fresh[#fresh + 1] = string.format('%.0f 0 %.0f', till, lives_until)
    end
    redis.call('HSET', hash, unpack(fresh))
    redis.call('ZADD', due, format_int(till), id)
    return its_units and {{1}} or {{1, 0, 0, 0, 0}}
  end
end

local buckets, named, paths, told = {{}}, {{}}, {{}}, {{}}
local written

local function level_key(level) return level == '{ROOT}' and hash or hash .. ':' .. level end

local function add_bucket(level, name, room, rate, text)
  local at, debt, held, ends = string.match(text or '', '^(%d+) (%d+) (%d+) (%d+)$')
  local b = {{level = level, name = name, index = level .. ' ' .. name, room = tonumber(room), rate = tonumber(rate),
    at = tonumber(at or now), debt = tonumber(debt or 0), held = tonumber(held or 0), ends = tonumber(ends or 0)}}
  if b.at > now + {CLOCK_STEP} then b.at = now end
  buckets[b.index] = b
  return b
end

local function parse(text)
  if not text then return end
  local kind, nonce, lost, its_spec, its_units, spent =
    string.match(text, '^(%a+)\\n(.-)\\n(.-)\\n(.-)\\n(.-)\\n(.*)$')
  return {{kind = kind, nonce = nonce, lost = lost, spec = its_spec, units = its_units, spent = spent}}
end

local record = parse(texts[2] or nil)
do
  local at = 2
  for i, each in ipairs(wanted) do
    local text
    if each[1] == '{ROOT}' then
      at = at + 1
      text = texts[at]
    else
      text = redis.call('HGET', level_key(each[1]), each[2])
    end
    named[i] = add_bucket(each[1], each[2], each[3], each[4], text or nil)
  end
end

local function drain(b, time)
  if time > b.at then
    b.debt, b.at = math.max(b.debt - (time - b.at) * b.rate, 0), time
  end
end

local function charge(b, amount) b.debt, b.dirty = math.max(math.min(b.debt + amount, {MOST}), 0), true end
local function release(b, amount) b.held, b.dirty = math.max(b.held - amount, 0), true end
local function held(b) return b.ends > now and b.held or 0 end
local function hold_units(b, amount, till)
  b.held, b.ends, b.dirty = held(b) + amount, math.max(b.ends, till), true
end

local function buckets_of(of)
  if of == spec then return named end
  local found = {{}}
  for level, name, room, rate in string.gmatch(of, '(%S+) (%S+) (%d+) (%d+)') do
    local known = buckets[level .. ' ' .. name]
    found[#found + 1] = known or add_bucket(level, name, room, rate, redis.call('HGET', level_key(level), name) or nil)
  end
  return found
end

local function numbers(text)
  local found = {{}}
  for number in string.gmatch(text, '%d+') do found[#found + 1] = tonumber(number) end
  return found
end

local function text_of(r) return table.concat({{r.kind, r.nonce, r.lost, r.spec, r.units, r.spent}}, '\\n') end

local function write(each, new, till)
  written = written or {{}}
  written[#written + 1] = 'h' .. each
  written[#written + 1] = text_of(new)
  redis.call('ZADD', due, format_int(till), each)
  if next_due == {MOST} then lives_until = 0 end  -- the set was empty, so it is a new key without a TTL
  if till < next_due then next_due = till end
end

local function charged(r)
  return r.lost == 'charge' and numbers(r.units) or r.lost == 'spent' and numbers(r.spent) or {{}}
end

local function tell_waiters()
  if not has_queue then return end
  for _, each in ipairs(redis.call('ZRANGE', waiting, 0, {MAX_WOKEN - 1})) do
    local path = string.match(redis.call('HGET', hash, 'w' .. each) or '', '^%d+\\n(.-)\\n')
    if path and not told[path] then
      told[path] = true
      paths[#paths + 1] = path
      redis.pcall('PUBLISH', path == '' and hash or hash .. '\\n' .. path, '')
    end
  end
end

local function end_due()
  local freed = false
  written = {{}}
  while true do
    local over = redis.call('ZRANGEBYSCORE', due, '-inf', format_int(now), 'WITHSCORES', 'LIMIT', 0, 100)
    if #over == 0 then break end
    for i = 1, #over, 2 do
      local each, time = over[i], tonumber(over[i + 1])
      local its = parse(redis.call('HGET', hash, 'h' .. each) or nil)
      if its and its.kind == 'live' then
        local cost, amounts = charged(its), numbers(its.units)
        for number, b in ipairs(buckets_of(its.spec)) do
          drain(b, time)
          release(b, amounts[number])
          charge(b, cost[number] or 0)
        end
        freed = freed or its.lost ~= 'charge'
        its.kind = 'lost'
        redis.call('HSET', hash, 'h' .. each, text_of(its))
        redis.call('ZADD', due, format_int(time + {LOST_TTL}), each)
      else
        redis.call('HDEL', hash, 'h' .. each)
        redis.call('ZREM', due, each)
      end
    end
  end
  next_due = tonumber(redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2] or {MOST})
  record = parse(redis.call('HGET', hash, 'h' .. id) or nil)
  if freed then tell_waiters() end
end

local function save(hold)
  local longest = hold + {LOST_TTL + 2 * DONE_TTL}
  for _, b in pairs(buckets) do
    if b.dirty then
      drain(b, now)
      local text = string.format('%.0f %.0f %.0f %.0f', b.at, b.debt, b.held, b.ends)
      written = written or {{}}
      longest = math.max(longest, (b.debt + b.held) / b.rate)
      if b.level == '{ROOT}' then
        written[#written + 1] = b.name
        written[#written + 1] = text
      else
        redis.call('HSET', level_key(b.level), b.name, text)
        redis.call('PEXPIRE', level_key(b.level), format_int(math.ceil(longest / 1000)))
      end
    end
  end
  if not written then return end
  local extend = lives_until < now + longest
  if extend then lives_until = now + 2 * longest end
  written[#written + 1] = 'm'
  written[#written + 1] = string.format('%.0f %d %.0f', next_due, has_queue and 1 or 0, lives_until)
  for i = 1, #written, 100 do redis.call('HSET', hash, unpack(written, i, math.min(i + 99, #written))) end
  if extend then
    for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, format_int(math.ceil(2 * longest / 1000))) end
  end
end

local function reply(hold, ...)
  save(hold)
  local made = {{...}}
  for _, path in ipairs(paths) do made[#made + 1] = path end
  return made
end

local function leave_queue(each)
  return has_queue and redis.call('ZREM', waiting, each) == 1 and redis.call('HDEL', hash, 'w' .. each)
end

local function asked_before()
  local sums, from = {{}}, 0
  while true do
    local ahead = redis.call('ZRANGE', waiting, from, from + 49)
    if #ahead == 0 then
      if from == 0 then has_queue = false end
      return sums
    end
    for _, each in ipairs(ahead) do
      if each == id then return sums, true end
      local till, its_spec, its_units =
        string.match(redis.call('HGET', hash, 'w' .. each) or '', '^(%d+)\\n.-\\n(.-)\\n(.*)$')
      if till and tonumber(till) > now then
        from = from + 1
        local next_amount = string.gmatch(its_units, '%d+')
        for level, name in string.gmatch(its_spec, '(%S+) (%S+) %d+ %d+') do
          local index = level .. ' ' .. name
          sums[index] = (sums[index] or 0) + tonumber(next_amount())
        end
      else
        leave_queue(each)
      end
    end
  end
end

if next_due <= now then end_due() end

if op == 'reserve' then
  local hold, nonce, lost, waiter_ttl, path = tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10]
  local till, amounts = now + hold, numbers(units)
  if record and record.kind == 'done' and record.nonce == nonce then return reply(hold, -1, 0, 0, 0, 0) end
  if record and record.kind == 'live' then
    for _, b in ipairs(buckets_of(record.spec)) do hold_units(b, 0, till) end
    write(id, record, till)
    return reply(hold, 1, 0, 0, 0, 0)
  end
  local sums, queued = {{}}, false
  if has_queue then sums, queued = asked_before() end
  local wait, binds, available, reset = -1, 0, 0, 0
  for number, b in ipairs(named) do
    drain(b, now)
    local short = b.debt + held(b) + (sums[b.index] or 0) + amounts[number] - b.room
    if short > 0 then
      local needed = short <= b.debt and math.ceil(short / b.rate) or math.max(b.ends - now, 1)
      if needed > wait then
        wait, binds, available = needed, number, b.room - b.debt - held(b)
        reset = math.ceil((b.debt + held(b)) / b.rate)
      end
    end
  end
  if binds > 0 then
    if waiter_ttl > 0 then
      if not queued then
        local newest = redis.call('ZRANGE', waiting, -1, -1, 'WITHSCORES')[2]
        redis.call('ZADD', waiting, format_int(math.max(now, (newest or 0) + 1)), id)
        redis.call('PEXPIRE', waiting, format_int(math.ceil((hold + {LOST_TTL}) / 1000)))
      end
      has_queue, written = true, written or {{}}
      written[#written + 1] = 'w' .. id
      written[#written + 1] = table.concat({{format_int(now + waiter_ttl), path, spec, units}}, '\\n')
    elseif leave_queue(id) then
      tell_waiters()
    end
    return reply(hold, 0, wait, binds, available, reset)
  end
  if queued then
    leave_queue(id)
    tell_waiters()
  end
  for number, b in ipairs(named) do hold_units(b, amounts[number], till) end
  write(id, {{kind = 'live', nonce = nonce, lost = lost, spec = spec, units = units, spent = ''}}, till)
  return reply(hold, 1, 0, 0, 0, 0)
end

if op == 'extend' then
  local hold, spent = tonumber(ARGV[6]), ARGV[7]
  if not record or record.kind == 'done' or record.spec ~= spec then return reply(hold, 0) end
  local live, fits, till, texts = record.kind == 'live', true, now + hold, {{}}
  local raised, known = numbers(units), numbers(record.units)
  local paid = live and {{}} or charged(record)
  for number, b in ipairs(named) do
    drain(b, now)
    raised[number] = math.max(raised[number], known[number])
    texts[number] = format_int(raised[number])
    local more = raised[number] - (live and known[number] or 0)
    local full = math.max(b.debt - (paid[number] or 0), 0) + held(b) + more > b.room
    if full and not (live and more == 0) then fits = false end
  end
  if fits then
    for number, b in ipairs(named) do
      charge(b, -(paid[number] or 0))
      hold_units(b, raised[number] - (live and known[number] or 0), till)
    end
    record.kind, record.units = 'live', table.concat(texts, ' ')
  end
  if record.kind == 'live' then
    record.spent = spent
    for _, b in ipairs(named) do hold_units(b, 0, till) end
    write(id, record, till)
  end
  return reply(hold, fits and 1 or 0)
end

if op == 'settle' or op == 'withdraw' then
  local nonce, unknown = ARGV[6], ARGV[7]
  local ended = record and record.kind ~= 'done'
  if op == 'withdraw' and ended and (record.nonce ~= nonce or record.kind == 'lost') then return reply(0, 0) end
  local waited, amounts = leave_queue(id), numbers(units)
  if ended or (not record and unknown == '1') then
    for number, b in ipairs(named) do
      drain(b, now)
      charge(b, amounts[number])
    end
  end
  if ended then
    local live = record.kind == 'live'
    local back = live and numbers(record.units) or charged(record)
    for number, b in ipairs(buckets_of(record.spec)) do
      drain(b, now)
      if live then release(b, back[number]) else charge(b, -(back[number] or 0)) end
    end
  end
  local result = ended and 1 or 0
  if not record or ended then  -- the reply and the nonce of this call are kept in place of the policy
    local its_nonce = record and record.nonce or nonce
    local done = {{kind = 'done', nonce = its_nonce, lost = result .. nonce, spec = '', units = '', spent = ''}}
    write(id, done, (math.floor(now / {DONE_TTL}) + 2) * {DONE_TTL})
  elseif record.lost == '1' .. nonce then  -- the same call again
    result = 1
  end
  if result == 1 or waited then tell_waiters() end
  return reply(0, result)
end

if op == 'pause' then
  local amounts = numbers(units)
  for number, b in ipairs(named) do
    drain(b, now)
    charge(b, math.max(b.room + amounts[number] - held(b) - b.debt, 0))
  end
  return reply(0, 1)
end

if op == 'holds' then
  local found = {{}}
  for _, each in ipairs(redis.call('ZRANGE', due, 0, -1)) do
    local its = parse(redis.call('HGET', hash, 'h' .. each) or nil)
    if its and its.kind == 'live' then
      local left = redis.call('ZSCORE', due, each) - now
      for _, value in ipairs({{each, left, its.spec, its.units}}) do found[#found + 1] = value end
    end
  end
  save(0)
  return found
end

local found = {{}}
for number, b in ipairs(named) do
  drain(b, now)
  found[number] = b.room - b.debt - held(b)
end
save(0)
return found
"""
