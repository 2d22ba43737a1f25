"""`headgate.hybrid.ledger` in Lua, with the same names in the same order; how it is called, and its replies read.

One call takes any number of keys, each with a request of its own; an error at one key leaves the others alone. Redis
keeps one Hash for each key: `free` (or `window`, `current`, `previous`), `at`, `out` (`leased_out` in the code),
`demand`, `exp`, `nodes`, `born`, `law` (the parameters of the quota), and for each node a field `n:<node>` with its
record, eight numbers joined by colons. Leases with inflow add two numbers to their record, and a field `inflow`, the
sum of them; one that may last longer than LONGEST_LEASE adds `late`, the end of the latest such lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate.hybrid.protocol import (
    DEMAND_PART,
    DRAINING_ABOVE,
    DRAINING_FACTOR,
    ERROR,
    FULL_ABOVE,
    LEAST_ROOM,
    MIN_REPORT_PART,
    OVERSUBSCRIBED_ABOVE,
    PARTS,
    SHARE_FACTOR,
    SHORT_OF_INFLOW,
    LeaseReply,
)
from headgate.redis.script import LuaScript, ScriptCall
from headgate.stores.base import LeaseCall

FIELDS = 16  # of a reply
PER_KEY = 6  # arguments of a key

LEDGER = """
local OK, STALE, VOID, ERROR = 0, 1, 2, 3
local FOREVER, STEP, LONGEST_INTERVAL, LONGEST_LEASE = 4503599627370496, 1000000, 3600000000, 91000000
local PARTS = @PARTS@
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

local time = tonumber(ARGV[1])
if not time then
  local clock = redis.call('TIME')
  time = clock[1] * 1000000 + clock[2]
end

local function numbers(text)
  local list = {}
  for word in string.gmatch(text, '[^:]+') do list[#list + 1] = tonumber(word) or word end
  return list
end

local known_params, profiles = {}, {}
local function quota_params(text)
  local params = known_params[text]
  if not params then
    local n = numbers(text)
    params = {text = text, kind = n[1], limit = n[2], cost = n[3], rate = n[4], period = n[5], step = n[6],
      speed = n[7]}
    params.capacity_units = params.limit * params.cost
    params.windowed = params.period > 0
    known_params[text] = params
  end
  return params
end
local function profile_of(text)
  local profile = profiles[text]
  if not profile then
    local n = numbers(text)
    profile = {leased = n[1], report = n[2], report_full = n[3]}
    profiles[text] = profile
  end
  return profile
end

local function record_of(text)
  local n = numbers(text)
  return {lease_id = n[1], seq = n[2], leased_out = n[3], exp = n[4], demand = n[5], returned = n[6], granted = n[7],
    debt = n[8], room = n[9] or 0, inflow = n[10] or 0}
end
local function record_text(r)
  local text = string.format('%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f',
    r.lease_id, r.seq, r.leased_out, r.exp, r.demand, r.returned, r.granted, r.debt)
  return r.inflow > 0 and string.format('%s:%.0f:%.0f', text, r.room, r.inflow) or text
end

local function read(key, node)
  local kept = redis.call('HMGET', key, 'law', 'at', 'free', 'window', 'current', 'previous', 'out', 'demand', 'exp',
    'nodes', 'born', 'lost', 'n:' .. node, 'inflow', 'late')
  local s = {key = key, params = kept[1]}
  s.at, s.free = tonumber(kept[2] or 0), tonumber(kept[3] or 0)
  s.window, s.current, s.previous = tonumber(kept[4] or 0), tonumber(kept[5] or 0), tonumber(kept[6] or 0)
  s.leased_out, s.demand, s.exp = tonumber(kept[7] or 0), tonumber(kept[8] or 0), tonumber(kept[9] or FOREVER)
  s.nodes, s.born, s.lost = tonumber(kept[10] or 0), tonumber(kept[11] or 0), tonumber(kept[12] or 0)
  s.record = kept[13] and record_of(kept[13])
  s.inflow, s.late = tonumber(kept[14] or 0), tonumber(kept[15] or 0)
  s.had_inflow = s.inflow > 0
  s.changed, s.gone = {}, {}
  return s
end

local function all_records(s, node)
  local all, kept = {}, redis.call('HGETALL', s.key)
  for i = 1, #kept, 2 do
    local name = string.match(kept[i], '^n:(.*)$')
    if name then all[name] = name == node and s.record or record_of(kept[i + 1]) end
  end
  return all
end

local function top_of(s, params, ceiling)
  local top = ceiling - s.leased_out * params.cost
  return params.windowed and top or max(top, 0)
end

local function open(s, params, node)
  if not s.params then
    s.at, s.born, s.free = time, time, params.initial or params.capacity_units
    s.window = params.windowed and floor(time / params.period) or 0
  elseif s.params ~= params.text then
    s.free = max(floor(s.free / quota_params(s.params).cost) * params.cost, -params.capacity_units)
    s.window = params.windowed and floor(s.at / params.period) or 0
  end
  s.params = params.text
  local back = s.at - time
  if back > STEP then
    s.at = time
    s.window = params.windowed and min(s.window, floor(time / params.period)) or 0
    for name, record in pairs(all_records(s, node)) do
      record.exp = record.exp - back
      s.changed[name] = record
    end
    s.exp = s.exp - back
    s.late = max(s.late - back, 0)
  end
  return max(time, s.at)
end

local function withheld(came, inflow)
  local whole = floor(came / PARTS)
  return inflow * whole + ceil(inflow * (came - whole * PARTS) / PARTS)
end

local function load(s, params, now)
  if not params.windowed then
    local top = top_of(s, params, params.capacity_units)
    local came = (now - s.at) * params.rate
    if s.inflow > 0 then came = came - withheld(came, s.inflow) end
    return min(s.free + came, top), params.capacity_units
  end
  local window = floor(now / params.period)
  if window > s.window then
    s.previous = window == s.window + 1 and s.current or 0
    s.window, s.current = window, 0
  end
  local ceiling = params.capacity_units
  if params.kind == 'counter' then
    ceiling = ceiling - s.previous * (params.cost - floor(now % params.period / params.step))
  end
  return ceiling - s.current * params.cost, ceiling
end

local function save(s, params, now, loaded, free)
  s.at = now
  if params.windowed then s.current = s.current + floor((loaded - free) / params.cost) else s.free = free end
  local pairs_ = {'law', s.params, 'at', now, 'out', s.leased_out, 'demand', s.demand, 'exp', s.exp, 'nodes', s.nodes,
    'born', s.born}
  local size = #pairs_
  local function set(name, value)
    pairs_[size + 1], pairs_[size + 2], size = name, value, size + 2
  end
  local full_in
  if params.windowed then
    set('window', s.window) set('current', s.current) set('previous', s.previous)
    full_in = 2 * params.period
  else
    set('free', free)
    full_in = (params.capacity_units - free) / params.rate
  end
  if s.lost > 0 then set('lost', 1) end
  if s.inflow > 0 or s.had_inflow then set('inflow', s.inflow) end
  if s.late > 0 then set('late', s.late) end
  for name, record in pairs(s.changed) do set('n:' .. name, record_text(record)) end
  for i = 1, size, 1000 do redis.call('HSET', s.key, unpack(pairs_, i, min(i + 999, size))) end
  for name in pairs(s.gone) do redis.call('HDEL', s.key, 'n:' .. name) end
  redis.call('EXPIRE', s.key, ceil((full_in + max(LONGEST_LEASE, s.late - now)) / 1000000))
end

local function drop(s, name, record)
  s.demand = s.demand - record.demand
  s.nodes = s.nodes - 1
  s.changed[name] = nil
  s.gone[name] = true
end

local function burn(s, params, now, node)
  s.exp = FOREVER
  local unclaimed = 0
  for name, record in pairs(all_records(s, node)) do
    record = s.changed[name] or record
    if record.exp <= now then
      s.leased_out = s.leased_out - record.leased_out
      if record.inflow > 0 then
        s.inflow = s.inflow - record.inflow
        local came = (now - max(record.exp, s.at)) * params.rate
        unclaimed = unclaimed + came - withheld(came, PARTS - record.inflow)
      end
      drop(s, name, record)
      if name == node then s.record = nil end
    else
      s.exp = min(s.exp, record.exp)
    end
  end
  return unclaimed
end

local function overhang(s, params)
  return params.windowed and max(s.leased_out - s.current, 0) * params.cost or 0
end

local function grant_of(s, params, profile, request, held, free, refused)
  local full = (free + s.leased_out * params.cost) / params.capacity_units > @FULL_ABOVE@
  local free_permits = max(floor(free / params.cost), 0)
  local leasable = (params.kind ~= 'counter' or refused == 0) and params.limit - refused - s.leased_out or 0
  if request.op ~= 'sync' or request.target <= held or leasable < 1 then return 0, full, false end
  if request.is_reserve > 0 then
    local plenty = full and s.nodes * 1000 <= profile.report_full * params.limit
    return plenty and min(request.target - held, free_permits, leasable) or 0, full, false
  end
  local part = s.demand > 0 and request.demand / s.demand or 1 / s.nodes
  local most = profile.leased * params.limit / 1000
  local cap = most * max(part, 1 / s.nodes) - held
  local fair = max(1, ceil(free_permits * min(1, @SHARE_FACTOR@ * part)))
  local granted = max(floor(min(request.target - held, cap, fair, free_permits, most - s.leased_out, leasable)), 0)
  return granted, full, fair <= granted and granted < request.target - held
end

local function share_of(s, params, profile, request, has, free, refused)
  if request.inflow == 0 or request.op ~= 'sync' or params.windowed or request.target < 1 or request.is_reserve > 0 then
    return 0, 0, false
  end
  if s.nodes == 1 or refused > 1 then return 0, 0, false end
  local part = s.demand > 0 and request.demand / s.demand or 1 / s.nodes
  local most = profile.leased * params.limit / 1000
  local unused = floor((params.capacity_units - free) / params.cost) - s.leased_out
  local cap = most * max(part, 1 / s.nodes)
  local room = max(floor(min(min(request.target, cap) - has, most - s.leased_out, unused)), 0)
  local wanted = floor(PARTS * (request.demand / max(s.demand, params.speed * @DEMAND_LESS@ / @DEMAND_PART@)))
  local inflow = min(wanted, PARTS - s.inflow)
  if inflow < 1 or has + room < @LEAST_ROOM@ then return 0, 0, false end
  return room, inflow, inflow < wanted * @SHORT_OF_INFLOW@
end

local function report_interval_of(s, params, profile, full, oversubscribed, free)
  local part = full and profile.report_full or profile.report
  if full and s.demand * 1000 > params.speed * @DRAINING_ABOVE@ then part = part / @DRAINING_FACTOR@ end
  if oversubscribed and not params.windowed then
    local spent = params.capacity_units - free - s.leased_out * params.cost
    part = min(part, max(spent / params.capacity_units * 500, @MIN_REPORT_PART@))
  end
  local speed = max(min(s.demand, params.speed), 1)
  return floor(min(part * params.limit * 1000000 / speed, LONGEST_INTERVAL))
end

local function time_until_free(s, params, now, free)
  if not params.windowed then return ceil((params.cost - free) / params.rate) end
  local elapsed = now % params.period
  if params.kind == 'fixed' then return params.period - elapsed end
  local function fade(count, left)
    return count > 0 and min((params.cost - floor(left * params.cost / count)) * params.step, params.period) or 0
  end
  local ceiling = params.capacity_units - s.previous * (params.cost - floor(elapsed / params.step))
  local current, left = floor((ceiling - free) / params.cost), params.limit - 1
  if current <= left then return max(fade(s.previous, left - current) - elapsed, 0) end
  return params.period - elapsed + fade(current, left)
end

local function sync(key, params, profile, node, request)
  local s = read(key, node)
  local now = open(s, params, node)
  local free, ceiling = load(s, params, now)
  local loaded = free
  if now >= s.exp then
    local top = top_of(s, params, ceiling)
    local unclaimed = burn(s, params, now, node)
    if unclaimed > 0 then free = min(free + unclaimed, top) end
  end
  free = free - overhang(s, params)
  local window_ends_in = params.windowed and params.period - now % params.period or 0
  local record = s.record
  if request.op == 'peek' then
    local own = record and record.leased_out or 0
    return OK, 0, 0, own, free, free, s.leased_out - own, s.nodes, 0, 0, window_ends_in, 0, s.current, s.previous, 0, 0
  end

  if record and request.seq <= record.seq then
    save(s, params, now, loaded, free)
    return STALE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  end
  if request.lease_id > 0 and (not record or record.lease_id ~= request.lease_id) then
    if request.lease_id < s.born and s.lost == 0 then
      s.lost = 1
      free = min(free, 0)
    end
    save(s, params, now, loaded, free)
    return VOID, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  end
  if not record then
    record = {lease_id = now, seq = 0, leased_out = 0, exp = 0, demand = 0, returned = 0, granted = 0, debt = 0,
      room = 0, inflow = 0}
    s.nodes = s.nodes + 1
    s.gone[node] = nil
  end
  if request.acked_seq < record.seq then
    free = free + record.granted * params.cost
    s.leased_out = s.leased_out - record.granted - record.room
    record.leased_out = record.leased_out - record.granted - record.room
  else
    record.debt = 0
  end
  s.inflow = s.inflow - record.inflow
  if request.lease_id == 0 then
    record.lease_id = now
    record.returned = request.returned
  end
  local held = request.lease_id > 0 and request.op ~= 'release' and min(request.held, record.leased_out) or 0
  local returned = max(0, min(request.returned - record.returned, record.leased_out - held))
  s.leased_out = s.leased_out - (record.leased_out - held)
  free = free + returned * params.cost

  if request.op == 'reset' then
    s.previous = 0
    if params.windowed then loaded = params.capacity_units - s.current * params.cost end
    ceiling, free = params.capacity_units, top_of(s, params, params.capacity_units)
  end
  local top = top_of(s, params, ceiling)
  if not params.windowed then free = min(free, top) end
  free = max(free, min(free + request.refund * params.cost, top))
  local debt = max(request.debt - record.debt, 0)
  if debt > 0 then free = min(free, max(free - debt * params.cost, -params.capacity_units)) end
  local free_before, refused = free, 0
  for count, permits in string.gmatch(request.waiting, '(%d+)x(%d+)') do
    local price, many = permits * params.cost, 0
    if free > 0 then many = min(tonumber(count), floor(free / price)) end
    free = free - many * price
    if many < tonumber(count) then refused = max(refused, tonumber(permits)) end
  end

  s.demand = s.demand + request.demand - record.demand
  local node_count = s.nodes
  local oversubscribed = s.demand * 1000 > params.speed * @OVERSUBSCRIBED_ABOVE@
  local granted, full, rationed = grant_of(s, params, profile, request, held, free, refused)
  free = free - granted * params.cost
  s.leased_out = s.leased_out + granted
  local room, inflow, short = share_of(s, params, profile, request, held + granted, free, refused)
  s.leased_out = s.leased_out + room
  local others = s.leased_out - held - granted - room
  local report_interval = report_interval_of(s, params, profile, full, oversubscribed, free)
  if inflow > 0 and not short then report_interval = LONGEST_INTERVAL end
  local wait = 0
  if free < params.cost then
    wait = others == 0 and time_until_free(s, params, now, free) or report_interval
  elseif oversubscribed and rationed and 2 * request.demand < s.demand and 2 * free < params.capacity_units then
    wait = report_interval
  end

  record.seq = request.seq
  record.leased_out = held + granted + room
  local exp = now + request.ttl
  if params.windowed then exp = min(exp, now - now % params.period + params.period) end
  record.exp = held > 0 and max(exp, record.exp) or exp
  record.demand = request.demand
  record.returned = request.returned
  record.granted = granted
  record.debt = record.debt + debt
  record.room, record.inflow = room, inflow
  s.inflow = s.inflow + inflow
  s.exp = min(s.exp, record.exp)
  if record.exp > now + LONGEST_LEASE then s.late = max(s.late, record.exp) end
  s.changed[node] = record
  if request.op == 'release' then drop(s, node, record) end
  save(s, params, now, loaded, free)
  return OK, record.lease_id, granted, held + granted, free_before, free, others, node_count, wait, report_interval,
    window_ends_in, oversubscribed and 1 or 0, s.current, s.previous, room, inflow
end

local function request_of(a)
  local n = numbers(ARGV[a + 4])
  return {op = ARGV[a + 3], waiting = ARGV[a + 5], lease_id = n[1], seq = n[2], acked_seq = n[3], held = n[4],
    returned = n[5], refund = n[6], debt = n[7], target = n[8], is_reserve = n[9], demand = n[10], ttl = n[11],
    inflow = n[12]}
end

local replies = {}
local function reply(place, fields, answer)
  local at = (place - 1) * fields
  if answer[1] then
    for j = 1, fields do replies[at + j] = answer[j + 1] end
  else
    replies[at + 1], replies[at + 2] = ERROR, type(answer[2]) == 'table' and answer[2].err or tostring(answer[2])
    for j = 3, fields do replies[at + j] = 0 end
  end
end
""".replace("@FULL_ABOVE@", str(FULL_ABOVE))
LEDGER = (
    LEDGER.replace("@SHARE_FACTOR@", str(SHARE_FACTOR))
    .replace("@OVERSUBSCRIBED_ABOVE@", str(OVERSUBSCRIBED_ABOVE))
    .replace("@DRAINING_ABOVE@", str(DRAINING_ABOVE))
    .replace("@MIN_REPORT_PART@", str(MIN_REPORT_PART))
    .replace("@DRAINING_FACTOR@", str(DRAINING_FACTOR))
    .replace("@PARTS@", str(PARTS))
    .replace("@DEMAND_LESS@", str(DEMAND_PART - 1))
    .replace("@DEMAND_PART@", str(DEMAND_PART))
    .replace("@LEAST_ROOM@", str(LEAST_ROOM))
    .replace("@SHORT_OF_INFLOW@", str(SHORT_OF_INFLOW))
)

SYNC = LuaScript(
    LEDGER
    + f"""
for i = 1, #KEYS do
  local a = 2 + (i - 1) * {PER_KEY}
  local params, profile = quota_params(ARGV[a]), profile_of(ARGV[a + 1])
  reply(i, {FIELDS}, {{pcall(sync, KEYS[i], params, profile, ARGV[a + 2], request_of(a))}})
end
return replies
"""
)


def call(calls: Sequence[LeaseCall], now: int | None = None) -> ScriptCall:
    """The call of the script for the requests of *calls*; *now*, in tests only, replaces the server's clock."""
    arguments: list[str | int] = ["" if now is None else now]
    for each in calls:
        arguments += call_arguments(each)
    return SYNC.call([each.key for each in calls], *arguments)


def call_arguments(call: LeaseCall) -> list[str | int]:
    """The PER_KEY arguments of one request."""
    _, params, profile, request = call
    numbers = (*request[2:9], *request[10:])
    waiting = ",".join([f"{count}x{permits}" for count, permits in request.waiting])
    law = f"{profile.leased}:{profile.report}:{profile.report_full}"
    return [params.text, law, request.node, request.op, ":".join(map(str, numbers)), waiting]


def replies(reply: Sequence[Any]) -> list[LeaseReply | str]:
    """The reply about each key; text is an error of Redis about that key alone."""
    return [reply_at(reply, at) for at in range(0, len(reply), FIELDS)]


def reply_at(reply: Sequence[Any], at: int) -> LeaseReply | str:
    """The reply whose FIELDS begin at *at*."""
    if reply[at] != ERROR:
        return LeaseReply(*reply[at : at + FIELDS])
    text = reply[at + 1]
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)
