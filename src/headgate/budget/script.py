"""The state of a budget in Lua: the twin of `headgate.budget.state`, which says what each operation does."""

from __future__ import annotations

from headgate.budget.records import CLOCK_STEP, DONE_TTL, LOST_TTL, MAX_WOKEN, MOST, ROOT

# Keys: a Hash of the buckets of the root by label, of the records of holds by h and their id, and of waiters by w and
# their id; a Sorted Set of holds by when they end or are forgotten; a Sorted Set of the ids in the queue by when they
# came. The buckets of other levels are Hashes of their own. ARGV from 3: id, spec, units, and what each operation says.
LUA = f"""
local hash, due, waiting = unpack(KEYS)
local id, spec, units = ARGV[3], ARGV[4], ARGV[5]

local buckets, paths, told, changed = {{}}, {{}}, {{}}, false

local function level_key(level) return level == '{ROOT}' and hash or hash .. ':' .. level end

local function bucket(level, name, rate)
  local index = level .. ' ' .. name
  local found = buckets[index]
  if found then return found end
  local at, debt, held, ends =
    string.match(redis.call('HGET', level_key(level), name) or '', '^(%d+) (%d+) (%d+) (%d+)$')
  found = {{level = level, name = name, index = index, rate = tonumber(rate), at = tonumber(at or now),
    debt = tonumber(debt or 0), held = tonumber(held or 0), ends = tonumber(ends or 0)}}
  if found.at > now + {CLOCK_STEP} then found.at = now end
  buckets[index] = found
  return found
end

local function drain(b, time)
  if time > b.at then
    b.debt, b.at = math.max(b.debt - (time - b.at) * b.rate, 0), time
  end
end

local function charge(b, amount) b.debt, b.dirty = math.max(math.min(b.debt + amount, {MOST}), 0), true end
local function release(b, amount) b.held, b.dirty = math.max(b.held - amount, 0), true end

local function each_bucket(of, amounts, act)
  local next_amount = string.gmatch(amounts, '%d+')
  for level, name, room, rate in string.gmatch(of, '(%S+) (%S+) (%d+) (%d+)') do
    act(bucket(level, name, rate), tonumber(next_amount()), tonumber(room))
  end
end

local function read(each)
  local kind, nonce, lost, its_spec, its_units, spent =
    string.match(redis.call('HGET', hash, 'h' .. each) or '', '^(%a+)\\n(.-)\\n(%a*)\\n(.-)\\n(.-)\\n(.*)$')
  return kind and {{kind = kind, nonce = nonce, lost = lost, spec = its_spec, units = its_units, spent = spent}}
end

local function write(each, record, till)
  local text = {{record.kind, record.nonce, record.lost, record.spec, record.units, record.spent}}
  redis.call('HSET', hash, 'h' .. each, table.concat(text, '\\n'))
  redis.call('ZADD', due, format_int(till), each)
  changed = true
end

local function charged(record)
  return record.lost == 'charge' and record.units or record.lost == 'spent' and record.spent or ''
end

local function tell_waiters()
  if redis.call('ZCARD', waiting) == 0 then return end
  for _, each in ipairs(redis.call('ZRANGE', waiting, 0, {MAX_WOKEN - 1})) do
    local path = string.match(redis.call('HGET', hash, 'w' .. each) or '', '^%d+\\n(.-)\\n')
    if path and not told[path] then
      told[path] = true
      table.insert(paths, path)
      redis.pcall('PUBLISH', path == '' and hash or hash .. '\\n' .. path, '')
    end
  end
end

local function end_due()
  local freed = false
  while true do
    local over = redis.call('ZRANGEBYSCORE', due, '-inf', format_int(now), 'WITHSCORES', 'LIMIT', 0, 100)
    if #over == 0 then return freed end
    for i = 1, #over, 2 do
      local each, time = over[i], tonumber(over[i + 1])
      local record = read(each)
      if record and record.kind == 'live' then
        each_bucket(record.spec, record.units, function(b, amount)
          drain(b, time)
          release(b, amount)
        end)
        local cost = charged(record)
        if cost ~= '' then each_bucket(record.spec, cost, charge) end
        freed = freed or record.lost ~= 'charge'
        record.kind = 'lost'
        write(each, record, time + {LOST_TTL})
      else
        redis.call('HDEL', hash, 'h' .. each)
        redis.call('ZREM', due, each)
      end
    end
  end
end

local function keep(key, microseconds)
  local ttl = math.ceil(microseconds / 1000)
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, format_int(2 * ttl)) end
end

local function save(hold)
  local longest = hold + {LOST_TTL + DONE_TTL}
  for _, b in pairs(buckets) do
    if b.dirty then
      drain(b, now)
      local key = level_key(b.level)
      local text = {{format_int(b.at), format_int(b.debt), format_int(b.held), format_int(b.ends)}}
      redis.call('HSET', key, b.name, table.concat(text, ' '))
      local full = (b.debt + b.held) / b.rate
      if key == hash then longest = math.max(longest, full) else keep(key, math.max(full, longest)) end
    end
  end
  if changed then
    keep(hash, longest)
    keep(due, hold + {LOST_TTL + DONE_TTL})
  end
end

local function reply(...)
  local made = {{...}}
  for _, path in ipairs(paths) do table.insert(made, path) end
  return made
end

local function held(b) return b.ends > now and b.held or 0 end

local function leave_queue(each)
  return redis.call('ZREM', waiting, each) == 1 and redis.call('HDEL', hash, 'w' .. each)
end

local function asked_before()
  local sums, from = {{}}, 0
  while true do
    local ahead = redis.call('ZRANGE', waiting, from, from + 49)
    if #ahead == 0 then return sums end
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

local function hold_units(b, amount, till)
  b.held, b.ends, b.dirty = held(b) + amount, math.max(b.ends, till), true
end

local freed = end_due()
if freed then tell_waiters() end

if op == 'reserve' then
  local hold, nonce, lost, waiter_ttl, path = tonumber(ARGV[6]), ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10]
  local record, till = read(id), now + hold
  if record and record.kind == 'done' and record.nonce == nonce then
    save(hold)
    return reply(-1, 0, 0, 0, 0)
  end
  if record and record.kind == 'live' then
    each_bucket(record.spec, record.units, function(b) hold_units(b, 0, till) end)
    write(id, record, till)
    save(hold)
    return reply(1, 0, 0, 0, 0)
  end
  local sums, queued = {{}}, false
  if redis.call('ZCARD', waiting) > 0 then sums, queued = asked_before() end
  local wait, binds, available, reset, number = -1, 0, 0, 0, 0
  each_bucket(spec, units, function(b, amount, room)
    drain(b, now)
    number = number + 1
    local short = b.debt + held(b) + (sums[b.index] or 0) + amount - room
    if short > 0 then
      local needed = short <= b.debt and math.ceil(short / b.rate) or math.max(b.ends - now, 1)
      if needed > wait then
        wait, binds, available = needed, number, room - b.debt - held(b)
        reset = math.ceil((b.debt + held(b)) / b.rate)
      end
    end
  end)
  if binds > 0 then
    if waiter_ttl > 0 then
      if not queued then
        local newest = redis.call('ZRANGE', waiting, -1, -1, 'WITHSCORES')[2]
        redis.call('ZADD', waiting, format_int(math.max(now, (newest or 0) + 1)), id)
      end
      local text = {{format_int(now + waiter_ttl), path, spec, units}}
      redis.call('HSET', hash, 'w' .. id, table.concat(text, '\\n'))
      changed = true
      keep(waiting, {LOST_TTL})
    elseif leave_queue(id) then
      tell_waiters()
    end
    save(hold)
    return reply(0, wait, binds, available, reset)
  end
  if queued then
    leave_queue(id)
    tell_waiters()
  end
  each_bucket(spec, units, function(b, amount) hold_units(b, amount, till) end)
  local none = string.gsub(units, '%d+', '0')
  write(id, {{kind = 'live', nonce = nonce, lost = lost, spec = spec, units = units, spent = none}}, till)
  save(hold)
  return reply(1, 0, 0, 0, 0)
end

if op == 'extend' then
  local hold, spent, record = tonumber(ARGV[6]), ARGV[7], read(id)
  if not record or record.kind == 'done' or record.spec ~= spec then
    save(hold)
    return reply(0)
  end
  local fits, till, raised = true, now + hold, {{}}
  local next_known, next_charged = string.gmatch(record.units, '%d+'), string.gmatch(charged(record), '%d+')
  each_bucket(spec, units, function(b, amount, room)
    drain(b, now)
    local known, paid = tonumber(next_known()), 0
    if record.kind == 'lost' then paid = tonumber(next_charged() or 0) end
    amount = math.max(amount, known)
    table.insert(raised, {{b, amount, record.kind == 'live' and known or 0, paid}})
    if record.kind == 'live' and amount == known then return end
    local more = amount - (record.kind == 'live' and known or 0)
    if math.max(b.debt - paid, 0) + held(b) + more > room then fits = false end
  end)
  if fits then
    local texts = {{}}
    for i, each in ipairs(raised) do
      local b, amount, known, paid = unpack(each)
      charge(b, -paid)
      hold_units(b, amount - known, till)
      texts[i] = format_int(amount)
    end
    record.kind, record.units = 'live', table.concat(texts, ' ')
  end
  if record.kind == 'live' then
    record.spent = spent
    for _, each in ipairs(raised) do hold_units(each[1], 0, till) end
    write(id, record, till)
  end
  save(hold)
  return reply(fits and 1 or 0)
end

if op == 'settle' or op == 'withdraw' then
  local nonce, unknown, record = ARGV[6], ARGV[7], read(id)
  local ended = record and record.kind ~= 'done'
  if op == 'withdraw' and ended and (record.nonce ~= nonce or record.kind == 'lost') then
    save(0)
    return reply(0)
  end
  local waited = leave_queue(id)
  if ended or (not record and unknown == '1') then
    each_bucket(spec, units, function(b, amount)
      drain(b, now)
      charge(b, amount)
    end)
    if ended and record.kind == 'live' then
      each_bucket(record.spec, record.units, function(b, amount)
        drain(b, now)
        release(b, amount)
      end)
    elseif ended and charged(record) ~= '' then
      each_bucket(record.spec, charged(record), function(b, amount)
        drain(b, now)
        charge(b, -amount)
      end)
    end
  end
  if not record or ended then
    local its_nonce = record and record.nonce or nonce
    write(id, {{kind = 'done', nonce = its_nonce, lost = '', spec = '', units = '', spent = ''}}, now + {DONE_TTL})
  end
  if ended or waited then tell_waiters() end
  save(0)
  return reply(ended and 1 or 0)
end

if op == 'holds' then
  local found = {{}}
  for _, each in ipairs(redis.call('ZRANGE', due, 0, -1)) do
    local record = read(each)
    if record and record.kind == 'live' then
      local left = redis.call('ZSCORE', due, each) - now
      for _, value in ipairs({{each, left, record.spec, record.units}}) do table.insert(found, value) end
    end
  end
  save(0)
  return found
end

local found = {{}}
each_bucket(spec, units, function(b, _, room)
  drain(b, now)
  table.insert(found, room - b.debt - held(b))
end)
save(0)
return found
"""
