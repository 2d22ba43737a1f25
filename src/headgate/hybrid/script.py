"""The ledger in Lua: `headgate.hybrid.ledger` again, the same names in the same order. And the bytes around it.

One call takes any number of keys, each with an ask of its own; a key of another type is nobody else's trouble. Redis
keeps one Hash a key: `free` (or `window`, `current`, `previous`), `at`, `out`, `demand`, `exp`, `nodes`, `born`,
`law`, and for each node a field `n:<node>` with its record, eight numbers joined by colons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate.hybrid.protocol import BRISK, BUSY, DRAINING, ERROR, FULL, RUSH, WIDE, Ask, Law, Reply, Style
from headgate.redis.lua import Eval, Lua

FIELDS = 14  # of a reply
PER_KEY = 6  # arguments of a key

SYNC = Lua(
    """
local OK, STALE, VOID, ERROR = 0, 1, 2, 3
local FOREVER, STEP, LONGEST_PAUSE, LONGEST_LEASE = 4503599627370496, 1000000, 3600000000, 91000000
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

local laws, styles = {}, {}
local function law_of(text)
  local law = laws[text]
  if not law then
    local n = numbers(text)
    law = {kind = n[1], limit = n[2], cost = n[3], rate = n[4], period = n[5], step = n[6], speed = n[7], text = text}
    law.room = law.limit * law.cost
    law.windowed = law.period > 0
    laws[text] = law
  end
  return law
end
local function style_of(text)
  local style = styles[text]
  if not style then
    local n = numbers(text)
    style = {leased = n[1], report = n[2], report_full = n[3]}
    styles[text] = style
  end
  return style
end

local function record_of(text)
  local n = numbers(text)
  return {lid = n[1], seq = n[2], out = n[3], exp = n[4], demand = n[5], returned = n[6], lease = n[7], debt = n[8]}
end
local function record_text(r)
  return string.format('%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f',
    r.lid, r.seq, r.out, r.exp, r.demand, r.returned, r.lease, r.debt)
end

local function read(key, node)
  local kept = redis.call('HMGET', key, 'law', 'at', 'free', 'window', 'current', 'previous', 'out', 'demand', 'exp',
    'nodes', 'born', 'lost', 'n:' .. node)
  local s = {key = key, law = kept[1]}
  s.at, s.free = tonumber(kept[2] or 0), tonumber(kept[3] or 0)
  s.window, s.current, s.previous = tonumber(kept[4] or 0), tonumber(kept[5] or 0), tonumber(kept[6] or 0)
  s.out, s.demand, s.exp = tonumber(kept[7] or 0), tonumber(kept[8] or 0), tonumber(kept[9] or FOREVER)
  s.nodes, s.born, s.lost = tonumber(kept[10] or 0), tonumber(kept[11] or 0), tonumber(kept[12] or 0)
  s.record = kept[13] and record_of(kept[13])
  s.changed, s.gone = {}, {}
  return s
end

local function everybody(s, node)
  local all, kept = {}, redis.call('HGETALL', s.key)
  for i = 1, #kept, 2 do
    local name = string.match(kept[i], '^n:(.*)$')
    if name then all[name] = name == node and s.record or record_of(kept[i + 1]) end
  end
  return all
end

local function top_of(s, law, ceiling)
  local top = ceiling - s.out * law.cost
  return law.windowed and top or max(top, 0)
end

local function open(s, law, node)
  if not s.law then
    s.at, s.born, s.free = time, time, law.room
    s.window = law.windowed and floor(time / law.period) or 0
  elseif s.law ~= law.text then
    s.free = max(floor(s.free / law_of(s.law).cost) * law.cost, -law.room)
    s.window = law.windowed and floor(s.at / law.period) or 0
  end
  s.law = law.text
  local back = s.at - time
  if back > STEP then
    s.at = time
    s.window = law.windowed and min(s.window, floor(time / law.period)) or 0
    for name, record in pairs(everybody(s, node)) do
      record.exp = record.exp - back
      s.changed[name] = record
    end
    s.exp = s.exp - back
  end
  return max(time, s.at)
end

local function load(s, law, now)
  if not law.windowed then
    return min(s.free + (now - s.at) * law.rate, top_of(s, law, law.room)), law.room
  end
  local window = floor(now / law.period)
  if window > s.window then
    s.previous = window == s.window + 1 and s.current or 0
    s.window, s.current = window, 0
  end
  local ceiling = law.room
  if law.kind == 'counter' then
    ceiling = ceiling - s.previous * (law.cost - floor(now % law.period / law.step))
  end
  return ceiling - s.current * law.cost, ceiling
end

local function save(s, law, now, loaded, free)
  s.at = now
  if law.windowed then s.current = s.current + floor((loaded - free) / law.cost) else s.free = free end
  local pairs_ = {'law', s.law, 'at', now, 'out', s.out, 'demand', s.demand, 'exp', s.exp, 'nodes', s.nodes,
    'born', s.born}
  local size = #pairs_
  local function set(name, value)
    pairs_[size + 1], pairs_[size + 2], size = name, value, size + 2
  end
  local full_in
  if law.windowed then
    set('window', s.window) set('current', s.current) set('previous', s.previous)
    full_in = 2 * law.period
  else
    set('free', free)
    full_in = (law.room - free) / law.rate
  end
  if s.lost > 0 then set('lost', 1) end
  for name, record in pairs(s.changed) do set('n:' .. name, record_text(record)) end
  for i = 1, size, 1000 do redis.call('HSET', s.key, unpack(pairs_, i, min(i + 999, size))) end
  for name in pairs(s.gone) do redis.call('HDEL', s.key, 'n:' .. name) end
  redis.call('EXPIRE', s.key, ceil((full_in + LONGEST_LEASE) / 1000000))
end

local function drop(s, name, record)
  s.demand = s.demand - record.demand
  s.nodes = s.nodes - 1
  s.changed[name] = nil
  s.gone[name] = true
end

local function burn(s, now, node)
  s.exp = FOREVER
  for name, record in pairs(everybody(s, node)) do
    record = s.changed[name] or record
    if record.exp <= now then
      s.out = s.out - record.out
      drop(s, name, record)
      if name == node then s.record = nil end
    else
      s.exp = min(s.exp, record.exp)
    end
  end
end

local function overhang(s, law)
  return law.windowed and max(s.out - s.current, 0) * law.cost or 0
end

local function lease_of(s, law, style, ask, held, free, refused)
  local full = (free + s.out * law.cost) / law.room > @FULL@
  local there = max(floor(free / law.cost), 0)
  local room = (law.kind ~= 'counter' or refused == 0) and law.limit - refused - s.out or 0
  if ask.op ~= 'sync' or ask.want <= held or room < 1 then return 0, full, false end
  if ask.spare > 0 then
    local plenty = full and s.nodes * 1000 <= style.report_full * law.limit
    return plenty and min(ask.want - held, there, room) or 0, full, false
  end
  local part = s.demand > 0 and ask.demand / s.demand or 1 / s.nodes
  local most = style.leased * law.limit / 1000
  local cap = most * max(part, 1 / s.nodes) - held
  local fair = max(1, ceil(there * min(1, @WIDE@ * part)))
  local lease = max(floor(min(ask.want - held, cap, fair, there, most - s.out, room)), 0)
  return lease, full, fair <= lease and lease < ask.want - held
end

local function pause_of(s, law, style, full, busy, free)
  local part = full and style.report_full or style.report
  if full and s.demand * 1000 > law.speed * @RUSH@ then part = part / @DRAINING@ end
  if busy and not law.windowed then
    part = min(part, max((law.room - free - s.out * law.cost) / law.room * 500, @BRISK@))
  end
  local spent = max(min(s.demand, law.speed), 1)
  return floor(min(part * law.limit * 1000000 / spent, LONGEST_PAUSE))
end

local function soonest(s, law, now, free)
  if not law.windowed then return ceil((law.cost - free) / law.rate) end
  local elapsed = now % law.period
  if law.kind == 'fixed' then return law.period - elapsed end
  local function fade(count, left)
    return count > 0 and min((law.cost - floor(left * law.cost / count)) * law.step, law.period) or 0
  end
  local ceiling = law.room - s.previous * (law.cost - floor(elapsed / law.step))
  local current, left = floor((ceiling - free) / law.cost), law.limit - 1
  if current <= left then return max(fade(s.previous, left - current) - elapsed, 0) end
  return law.period - elapsed + fade(current, left)
end

local function sync(key, law, style, node, ask)
  local s = read(key, node)
  local now = open(s, law, node)
  local free, ceiling = load(s, law, now)
  local loaded = free
  if now >= s.exp then burn(s, now, node) end
  free = free - overhang(s, law)
  local ends = law.windowed and law.period - now % law.period or 0
  local record = s.record
  if ask.op == 'peek' then
    local own = record and record.out or 0
    return OK, 0, 0, own, free, free, s.out - own, s.nodes, 0, 0, ends, 0, s.current, s.previous
  end

  if record and ask.seq <= record.seq then
    save(s, law, now, loaded, free)
    return STALE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  end
  if ask.lid > 0 and (not record or record.lid ~= ask.lid) then
    if ask.lid < s.born and s.lost == 0 then
      s.lost = 1
      free = min(free, 0)
    end
    save(s, law, now, loaded, free)
    return VOID, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  end
  if not record then
    record = {lid = now, seq = 0, out = 0, exp = 0, demand = 0, returned = 0, lease = 0, debt = 0}
    s.nodes = s.nodes + 1
    s.gone[node] = nil
  end
  if ask.ack < record.seq then
    free = free + record.lease * law.cost
    s.out = s.out - record.lease
    record.out = record.out - record.lease
  else
    record.debt = 0
  end
  if ask.lid == 0 then
    record.lid = now
    record.returned = ask.returned
  end
  local held = ask.lid > 0 and ask.op ~= 'release' and min(ask.held, record.out) or 0
  local returned = max(0, min(ask.returned - record.returned, record.out - held))
  s.out = s.out - (record.out - held)
  free = free + returned * law.cost

  if ask.op == 'reset' then
    s.previous = 0
    if law.windowed then loaded = law.room - s.current * law.cost end
    ceiling, free = law.room, top_of(s, law, law.room)
  end
  local top = top_of(s, law, ceiling)
  if not law.windowed then free = min(free, top) end
  free = max(free, min(free + ask.refund * law.cost, top))
  local debt = max(ask.debt - record.debt, 0)
  if debt > 0 then free = min(free, max(free - debt * law.cost, -law.room)) end
  local before, refused = free, 0
  for count, permits in string.gmatch(ask.needs, '(%d+)x(%d+)') do
    local price, many = permits * law.cost, 0
    if free > 0 then many = min(tonumber(count), floor(free / price)) end
    free = free - many * price
    if many < tonumber(count) then refused = max(refused, tonumber(permits)) end
  end

  s.demand = s.demand + ask.demand - record.demand
  local many = s.nodes
  local busy = s.demand * 1000 > law.speed * @BUSY@
  local lease, full, rationed = lease_of(s, law, style, ask, held, free, refused)
  free = free - lease * law.cost
  s.out = s.out + lease
  local others = s.out - held - lease
  local pause = pause_of(s, law, style, full, busy, free)
  local wait = 0
  if free < law.cost then
    wait = others == 0 and soonest(s, law, now, free) or pause
  elseif busy and rationed and 2 * ask.demand < s.demand and 2 * free < law.room then
    wait = pause
  end

  record.seq = ask.seq
  record.out = held + lease
  local exp = now + ask.ttl
  if law.windowed then exp = min(exp, now - now % law.period + law.period) end
  record.exp = held > 0 and max(exp, record.exp) or exp
  record.demand = ask.demand
  record.returned = ask.returned
  record.lease = lease
  record.debt = record.debt + debt
  s.exp = min(s.exp, record.exp)
  s.changed[node] = record
  if ask.op == 'release' then drop(s, node, record) end
  save(s, law, now, loaded, free)
  return OK, record.lid, lease, record.out, before, free, others, many, wait, pause, ends, busy and 1 or 0,
    s.current, s.previous
end

local replies = {}
for i = 1, #KEYS do
  local a = 2 + (i - 1) * @PER_KEY@
  local n = numbers(ARGV[a + 4])
  local ask = {op = ARGV[a + 3], needs = ARGV[a + 5], lid = n[1], seq = n[2], ack = n[3], held = n[4], returned = n[5],
    refund = n[6], debt = n[7], want = n[8], spare = n[9], demand = n[10], ttl = n[11]}
  local answer = {pcall(sync, KEYS[i], law_of(ARGV[a]), style_of(ARGV[a + 1]), ARGV[a + 2], ask)}
  local at = (i - 1) * @FIELDS@
  if answer[1] then
    for j = 1, @FIELDS@ do replies[at + j] = answer[j + 1] end
  else
    replies[at + 1], replies[at + 2] = ERROR, type(answer[2]) == 'table' and answer[2].err or tostring(answer[2])
    for j = 3, @FIELDS@ do replies[at + j] = 0 end
  end
end
return replies
""".replace("@FULL@", str(FULL))
    .replace("@WIDE@", str(WIDE))
    .replace("@BUSY@", str(BUSY))
    .replace("@RUSH@", str(RUSH))
    .replace("@BRISK@", str(BRISK))
    .replace("@DRAINING@", str(DRAINING))
    .replace("@PER_KEY@", str(PER_KEY))
    .replace("@FIELDS@", str(FIELDS))
)


def call(asks: Sequence[tuple[str, Law, Style, Ask]], now: int | None = None) -> Eval:
    """The call for (Redis key, law, style, ask) of each; *now* in tests only: this time instead of the server's."""
    arguments: list[str | int] = ["" if now is None else now]
    for _, law, style, ask in asks:
        numbers = (*ask[2:9], *ask[10:])
        needs = ",".join([f"{count}x{permits}" for count, permits in ask.needs])
        arguments += [law.text, f"{style.leased}:{style.report}:{style.report_full}", ask.node, ask.op]
        arguments += [":".join(map(str, numbers)), needs]
    return SYNC.with_keys([key for key, _, _, _ in asks], *arguments)


def replies(reply: Sequence[Any]) -> list[Reply | str]:
    """What the script said of each key; text is an error of Redis about that key alone."""
    found: list[Reply | str] = []
    for at in range(0, len(reply), FIELDS):
        if reply[at] == ERROR:
            text = reply[at + 1]
            found.append(text.decode(errors="replace") if isinstance(text, bytes) else str(text))
        else:
            found.append(Reply(*reply[at : at + FIELDS]))
    return found
