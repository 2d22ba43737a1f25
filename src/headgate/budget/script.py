"""The state of a budget in Lua: the twin of `headgate.budget.state`, which says what each operation does."""

from __future__ import annotations

from headgate.budget.records import CLOCK_STEP, DONE_TTL, LOST_TTL, MAX_WOKEN, MOST, PAUSE, ROOT
from headgate.budget.short_script import BUCKET, NOTES, NUMBER, QUOTA, RECORD, SHORT_LUA, WAITER

PAUSE_ID = PAUSE.encode("unicode_escape").decode()

LUA = f"""{SHORT_LUA}
local buckets, named, paths, told = {{}}, {{}}, {{}}, {{}}
local written

local function level_key(level) return level == '{ROOT}' and hash or hash .. ':' .. level end

local function add_bucket(level, name, room, rate, text)
  local b = {{level = level, name = name, index = level .. ' ' .. name, room = room, rate = rate,
    at = now, debt = 0, held = 0, ends = 0}}
  if text then b.at, b.debt, b.held, b.ends = struct.unpack('{BUCKET}', text) end
  if b.at > now + {CLOCK_STEP} then b.at = now end
  buckets[b.index] = b
  return b
end

local function parse(text)
  if not text then return end
  local kind, nonce, lost, its_spec, its_units, at = struct.unpack('{RECORD}', text)
  return {{kind = kind, nonce = nonce, lost = lost, spec = its_spec, units = its_units, spent = string.sub(text, at)}}
end

local record = parse(texts[2] or nil)
do
  local at = 2
  for i, level in ipairs(levels) do
    local text
    if level == '{ROOT}' then
      at = at + 1
      text = texts[at]
    else
      text = redis.call('HGET', level_key(level), names[i])
    end
    named[i] = add_bucket(level, names[i], rooms[i], rates[i], text or nil)
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
  local found, at = {{}}, 1
  while at <= #of do
    local room, rate, level, name, next_at = struct.unpack('{QUOTA}', of, at)
    local known = buckets[level .. ' ' .. name]
    found[#found + 1] = known or add_bucket(level, name, room, rate, redis.call('HGET', level_key(level), name) or nil)
    at = next_at
  end
  return found
end

local function numbers(text)
  local found = {{}}
  for at = 1, #text, 8 do found[#found + 1] = struct.unpack('{NUMBER}', text, at) end
  return found
end

local function text_of(r)
  return struct.pack('{RECORD}', r.kind, r.nonce, r.lost, #r.spec, r.spec, #r.units, r.units) .. r.spent
end

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
    local text = redis.call('HGET', hash, 'w' .. each)
    local path = text and select(2, struct.unpack('{WAITER}', text))
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
      if its and (its.kind == 'l' or its.kind == 'p') then
        local cost, amounts = charged(its), numbers(its.units)
        for number, b in ipairs(buckets_of(its.spec)) do
          drain(b, time)
          release(b, amounts[number])
          charge(b, cost[number] or 0)
        end
        freed = freed or its.lost ~= 'charge'
      end
      if its and its.kind == 'l' then
        its.kind = 'x'
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
      local text = struct.pack('{BUCKET}', b.at, b.debt, b.held, b.ends)
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
  written[#written + 1] = struct.pack('{NOTES}', next_due, has_queue and 1 or 0, lives_until)
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

local function paused_by(b)  -- what a pause holds of a bucket, and for how long
  local its = parse(redis.call('HGET', hash, 'h{PAUSE_ID}' .. b.index) or nil)
  if not its then return 0, 0 end
  return numbers(its.units)[1], redis.call('ZSCORE', due, '{PAUSE_ID}' .. b.index) - now
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
      local text = redis.call('HGET', hash, 'w' .. each)
      local till, path, its_spec, units_at = 0
      if text then till, path, its_spec, units_at = struct.unpack('{WAITER}', text) end
      if till > now then
        from = from + 1
        local at = 1
        while at <= #its_spec do
          local room, rate, level, name, next_at = struct.unpack('{QUOTA}', its_spec, at)
          local index = level .. ' ' .. name
          sums[index] = (sums[index] or 0) + struct.unpack('{NUMBER}', text, units_at)
          at, units_at = next_at, units_at + 8
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
  if record and record.kind == 'd' and record.nonce == nonce then return reply(hold, -1, 0, 0, 0, 0) end
  if record and record.kind == 'l' then
    for _, b in ipairs(buckets_of(record.spec)) do hold_units(b, 0, till) end
    write(id, record, till)
    if record.spec ~= spec or record.units == units then return reply(hold, 1, 0, 0, 0, 0) end
    local known = numbers(record.units)
    return reply(hold, 2, #known, 0, 0, 0, unpack(known))
  end
  local sums, queued = {{}}, false
  if has_queue then sums, queued = asked_before() end
  local wait, binds, available, reset = -1, 0, 0, 0
  for number, b in ipairs(named) do
    drain(b, now)
    local short = b.debt + held(b) + (sums[b.index] or 0) + amounts[number] - b.room
    if short > 0 then
      local paused, left = paused_by(b)
      short = short - paused
      local needed = math.max(short <= b.debt and math.ceil(short / b.rate) or math.max(b.ends - now, 1), left)
      if needed > wait then
        wait, binds, available = needed, number, b.room - b.debt - held(b)
        reset = math.max(math.ceil((b.debt + held(b) - paused) / b.rate), left)
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
      written[#written + 1] = struct.pack('{WAITER}', now + waiter_ttl, path, #spec, spec) .. units
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
  write(id, {{kind = 'l', nonce = nonce, lost = lost, spec = spec, units = units, spent = ''}}, till)
  return reply(hold, 1, 0, 0, 0, 0)
end

if op == 'extend' then
  local hold, spent = tonumber(ARGV[6]), ARGV[7]
  if not record or record.kind == 'd' or record.spec ~= spec then return reply(hold, 0) end
  local live, fits, till, packed = record.kind == 'l', true, now + hold, ''
  local raised, known = numbers(units), numbers(record.units)
  local paid = live and {{}} or charged(record)
  for number, b in ipairs(named) do
    drain(b, now)
    raised[number] = math.max(raised[number], known[number])
    packed = packed .. struct.pack('{NUMBER}', raised[number])
    local more = raised[number] - (live and known[number] or 0)
    local full = math.max(b.debt - (paid[number] or 0), 0) + held(b) + more > b.room
    if full and not (live and more == 0) then fits = false end
  end
  if fits then
    for number, b in ipairs(named) do
      charge(b, -(paid[number] or 0))
      hold_units(b, raised[number] - (live and known[number] or 0), till)
    end
    record.kind, record.units = 'l', packed
  end
  if record.kind == 'l' then
    record.spent = spent
    for _, b in ipairs(named) do hold_units(b, 0, till) end
    write(id, record, till)
  end
  return reply(hold, fits and 1 or 0)
end

if op == 'settle' or op == 'withdraw' then
  local nonce, unknown = ARGV[6], ARGV[7]
  local ended = record and record.kind ~= 'd'
  if op == 'withdraw' and ended and (record.nonce ~= nonce or record.kind == 'x') then return reply(0, 0) end
  local waited, amounts = leave_queue(id), numbers(units)
  if ended or (not record and unknown == '1') then
    for number, b in ipairs(named) do
      drain(b, now)
      charge(b, amounts[number])
    end
  end
  if ended then
    local live = record.kind == 'l'
    local back = live and numbers(record.units) or charged(record)
    for number, b in ipairs(buckets_of(record.spec)) do
      drain(b, now)
      if live then release(b, back[number]) else charge(b, -(back[number] or 0)) end
    end
  end
  local result = ended and 1 or 0
  if not record or ended then  -- the reply and the nonce of this call are kept in place of the policy
    local its_nonce = record and record.nonce or nonce
    local done = {{kind = 'd', nonce = its_nonce, lost = result .. nonce, spec = '', units = '', spent = ''}}
    write(id, done, (math.floor(now / {DONE_TTL}) + 2) * {DONE_TTL})
  elseif record.lost == '1' .. nonce then  -- the same call again
    result = 1
  end
  if result == 1 or waited then tell_waiters() end
  return reply(0, result)
end

if op == 'pause' then
  local amounts, duration = numbers(units), tonumber(ARGV[6])
  for number, b in ipairs(named) do
    drain(b, now)
    local paused, left = paused_by(b)
    charge(b, math.max(b.room + amounts[number] - (held(b) - paused) - b.debt, 0))
    if duration > left then
      hold_units(b, b.room - paused, now + duration)
      local alone, room = struct.pack('{QUOTA}', b.room, b.rate, b.level, b.name), struct.pack('{NUMBER}', b.room)
      local pause = {{kind = 'p', nonce = '', lost = 'release', spec = alone, units = room, spent = ''}}
      write('{PAUSE_ID}' .. b.index, pause, now + duration)
    end
  end
  return reply(duration, 1)
end

if op == 'holds' then
  local found = {{}}
  for _, each in ipairs(redis.call('ZRANGE', due, 0, -1)) do
    local its = parse(redis.call('HGET', hash, 'h' .. each) or nil)
    if its and its.kind == 'l' and its.spec == spec then
      local amounts = numbers(its.units)
      for number, amount in ipairs(amounts) do amounts[number] = format_int(amount) end
      local left = redis.call('ZSCORE', due, each) - now
      for _, value in ipairs({{each, left, table.concat(amounts, ' ')}}) do found[#found + 1] = value end
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
