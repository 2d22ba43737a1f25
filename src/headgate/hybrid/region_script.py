"""`headgate.hybrid.stock` in Lua, with the same names in the same order; how it is called, and its replies read.

REGION runs in the Redis of a region: requests of its processes, and deposits. The Hash of a key has one field more than
that of a plain ledger, `stock`: eleven numbers joined by colons. HOME runs at home: requests of regions. REGISTER keeps
the floors at home, a Hash with a field for each region, and RECORD, in the region, the floor that home has promised and
since when; neither expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headgate.hybrid.protocol import OK, LeaseReply, LeaseRequest, QuotaParams
from headgate.hybrid.script import FIELDS, LEDGER, PER_KEY, call_arguments, reply_at
from headgate.hybrid.stock import (
    FETCH_TIMEOUT,
    FIRST_TRIP,
    HOME_PROFILE,
    LATEST_DEPOSIT,
    LONGEST,
    MOST_SHARES,
    REGION_TTL,
    SHARES,
    SHORTEST,
    STOCK_ENDS_EARLY,
    STOCK_TTL,
    Deposit,
    FetchOrder,
    home_params,
)
from headgate.redis.script import LuaScript, ScriptCall
from headgate.stores.base import LeaseCall

ORDER_FIELDS = len(FetchOrder._fields)

_CONSTANTS = "\n".join(
    f"local {name} = {value}"
    for name, value in {
        "STOCK_TTL": STOCK_TTL,
        "STOCK_ENDS_EARLY": STOCK_ENDS_EARLY,
        "REGION_TTL": REGION_TTL,
        "LATEST_DEPOSIT": LATEST_DEPOSIT,
        "FETCH_TIMEOUT": FETCH_TIMEOUT,
        "FIRST_TRIP": FIRST_TRIP,
        "SHORTEST": SHORTEST,
        "LONGEST": LONGEST,
    }.items()
)

REGION = LuaScript(
    LEDGER
    + _CONSTANTS
    + """
local function read_stock(key)
  local kept = redis.call('HMGET', key, 'stock', 'at', 'out', 'born')
  local n = kept[1] and numbers(kept[1]) or {0, 0, 0, 0, 0, 0, 0, FIRST_TRIP, 0, 0, 0}
  return {out = n[1], ends = n[2], lease_id = n[3], seq = n[4], acked_seq = n[5], sent_at = n[6], returned = n[7],
    trip = n[8], interval = n[9], due = n[10], fetch_after = n[11],
    at = tonumber(kept[2] or 0), leased_out = tonumber(kept[3] or 0), born = tonumber(kept[4] or 0)}
end
local function stock_text(k)
  return string.format('%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f:%.0f', k.out, k.ends, k.lease_id, k.seq,
    k.acked_seq, k.sent_at, k.returned, k.trip, k.interval, k.due, k.fetch_after)
end

local function with_stock(params, k)
  local made = {}
  for name, value in pairs(params) do made[name] = value end
  made.limit = params.limit + k.out
  made.capacity_units = made.limit * made.cost
  return made
end

local function drop_stock(k, params)
  k.ends, k.lease_id = 0, 0
  k.out = max(min(k.out, k.leased_out - params.limit), 0)
end

local function open_stock(k, params)
  local now = k.at - time > STEP and time or max(time, k.at)
  if time < k.at then k.sent_at, k.due, k.fetch_after = 0, 0, 0 end
  if time < k.at or now >= k.ends then drop_stock(k, params) end
  return now
end

local function begin_fetch(k, params, now, leaving)
  if k.sent_at > 0 and now < k.sent_at + max(FETCH_TIMEOUT, 4 * k.trip) then return nil end
  if k.out > 0 and k.ends == 0 then return nil end
  local has = ceil(k.free / params.cost) + k.leased_out
  local demand = max(k.demand - floor(params.rate / params.cost * 1e9), 0)
  local likely = demand / 1e9 * (k.interval + floor(k.trip * 3 / 2) + SHORTEST)
  local target = max(ceil(2 * likely + 2 * math.sqrt(likely)) - min(has, params.limit), 0)
  if target == 0 and k.out == 0 then return nil end
  likely = demand / 1e9 * (floor(k.trip * 13 / 10) + SHORTEST)
  local is_low = has <= likely + 2 * math.sqrt(likely) and now >= k.fetch_after
  if now < k.due and not is_low and not (leaving and target == 0) then return nil end
  local give = max(min(has - params.limit - target, floor(k.free / params.cost)), 0)
  k.free = k.free - give * params.cost
  k.returned = k.returned + give
  k.out = min(k.out, max(has - give - params.limit, 0))
  k.seq = k.seq + 1
  k.sent_at = now
  return {k.born, k.lease_id, k.seq, k.acked_seq, k.out, k.returned, target, demand}
end

local function wait_for(k, now, wait)
  local expected = k.trip + (k.sent_at > 0 and k.sent_at or max(k.due, now)) - now
  return expected > 0 and min(wait, expected) or wait
end

local function region_sync(key, params, profile, node, request, since)
  local k = read_stock(key)
  local now = open_stock(k, params)
  local lasts = min(request.ttl, REGION_TTL)
  if k.out > 0 then lasts = min(lasts, max(k.ends - now, 1)) end
  request.ttl, request.inflow = lasts, 0
  local effective = with_stock(params, k)
  effective.initial = min(params.capacity_units, max(time - since, 0) * params.rate)
  local answer = {sync(key, effective, profile, node, request)}
  local order
  if request.op ~= 'peek' then
    local kept = redis.call('HMGET', key, 'free', 'out', 'demand', 'born')
    k.free, k.leased_out, k.demand, k.born = tonumber(kept[1]), tonumber(kept[2]), tonumber(kept[3]), tonumber(kept[4])
    if k.ends == 0 then
      drop_stock(k, params)
      effective = with_stock(params, k)
      k.free = min(k.free, top_of(k, effective, effective.capacity_units))
    end
    if answer[1] == OK then
      order = begin_fetch(k, params, now, request.op == 'release')
      answer[9], answer[11] = wait_for(k, now, answer[9]), lasts
    end
    redis.call('HSET', key, 'free', k.free, 'stock', stock_text(k))
  end
  for i = 1, @ORDER_FIELDS@ do answer[@FIELDS@ + i] = order and order[i] or 0 end
  return unpack(answer)
end

local function deposit(key, params, d)
  local k = read_stock(key)
  local sent_at = k.sent_at
  if k.at == 0 or d.born ~= k.born or sent_at == 0 or d.seq ~= k.seq then return false end
  if time < k.at or time > sent_at + LATEST_DEPOSIT then return false end
  local now = open_stock(k, params)
  k.sent_at = 0
  local s = read(key, '')
  local effective = with_stock(params, k)
  open(s, effective, '')
  local free = load(s, effective, now)
  k.trip = k.trip + floor((now - sent_at - k.trip) / 4)
  local shortest = max(SHORTEST, k.trip)
  if d.status == OK then
    k.out = min(k.out, d.leased_here - d.granted) + d.granted
    free = free + d.granted * params.cost
    k.lease_id, k.acked_seq = d.lease_id, d.seq
    k.ends = sent_at + STOCK_TTL - STOCK_TTL / 1000 - STOCK_ENDS_EARLY
    local interval = min(max(d.report_interval, shortest), LONGEST)
    k.interval = k.interval > 0 and min(interval, 2 * k.interval) or shortest
    k.due = now + k.interval
    k.fetch_after = d.wait > 0 and k.due or now
  else
    if d.status == VOID then
      drop_stock(k, params)
      k.acked_seq = d.seq
    end
    k.due, k.fetch_after = now + FETCH_TIMEOUT, now + FETCH_TIMEOUT
  end
  effective = with_stock(params, k)
  free = min(free, top_of(s, effective, effective.capacity_units))
  redis.call('HSET', key, 'free', free, 'at', now, 'law', s.params, 'stock', stock_text(k))
  return true
end

local fields = @FIELDS@ + @ORDER_FIELDS@
for i = 1, #KEYS do
  local a = 2 + (i - 1) * (@PER_KEY@ + 1)
  local params = quota_params(ARGV[a])
  if ARGV[a + 3] == 'deposit' then
    local n = numbers(ARGV[a + 4])
    local d = {born = n[1], seq = n[2], status = n[3], lease_id = n[4], granted = n[5], leased_here = n[6],
      report_interval = n[7], wait = n[8]}
    local answer = {pcall(deposit, KEYS[i], params, d)}
    if answer[1] then answer[2] = answer[2] and OK or STALE end
    for j = 3, fields + 1 do answer[j] = answer[j] or 0 end
    reply(i, fields, answer)
  else
    reply(i, fields, {pcall(region_sync, KEYS[i], params, profile_of(ARGV[a + 1]), ARGV[a + 2], request_of(a),
      tonumber(ARGV[a + 6]))})
  end
end
return replies
""".replace("@ORDER_FIELDS@", str(ORDER_FIELDS))
    .replace("@FIELDS@", str(FIELDS))
    .replace("@PER_KEY@", str(PER_KEY))
)

_FLOORS = f"""
local SHARES, MOST_SHARES = {SHARES}, {MOST_SHARES}

local function register(key, region, share)
  local kept, known, sum = redis.call('HGETALL', key), 0, 0
  for i = 1, #kept, 2 do
    sum = sum + tonumber(kept[i + 1])
    if kept[i] == region then known = tonumber(kept[i + 1]) end
  end
  if share <= known then return true, sum end
  if sum - known + share > MOST_SHARES then return false, sum end
  redis.call('HSET', key, region, share)
  return true, sum - known + share
end
"""

REGISTER = LuaScript(
    _FLOORS
    + """
local is_first = #redis.call('HGETALL', KEYS[1]) == 0
local done = register(KEYS[1], ARGV[1], tonumber(ARGV[2]))
return {done and 1 or 0, is_first and 1 or 0, unpack(redis.call('HGETALL', KEYS[1]))}
""",
    repeatable=True,
)

# KEYS: the region's record of its floor. ARGV: time ('' for the server's), share ('' to read), 1 if it starts full.
RECORD = LuaScript(
    """
local kept, new = redis.call('HMGET', KEYS[1], 'share', 'since'), tonumber(ARGV[2])
local share, since = tonumber(kept[1] or 0), tonumber(kept[2] or 0)
if new and new > share then
  local clock = redis.call('TIME')
  share, since = new, ARGV[3] == '1' and 0 or tonumber(ARGV[1]) or clock[1] * 1000000 + clock[2]
  redis.call('HSET', KEYS[1], 'share', share, 'since', since)
end
return {share, since}
""",
    repeatable=True,
)

HOME = LuaScript(
    LEDGER
    + _FLOORS
    + """
local function home_params(base, floors)
  local left = SHARES - floors
  local limit = floor(base.limit * left / SHARES)
  return {text = base.text, kind = base.kind, limit = limit, cost = base.cost, rate = base.rate * left, period = 0,
    step = 0, speed = floor(base.speed * left / SHARES), capacity_units = limit * base.cost, windowed = false}
end

local function home_sync(floors, key, base, profile, node, request, region, share)
  local done, sum = register(floors, region, share)
  if not done then error('FLOORS') end
  return sync(key, home_params(base, sum), profile, node, request)
end

for i = 1, #KEYS, 2 do
  local a = 2 + (i - 1) / 2 * (@PER_KEY@ + 2)
  reply((i + 1) / 2, @FIELDS@, {pcall(home_sync, KEYS[i], KEYS[i + 1], quota_params(ARGV[a]), profile_of(ARGV[a + 1]),
    ARGV[a + 2], request_of(a), ARGV[a + 6], tonumber(ARGV[a + 7]))})
end
return replies
""".replace("@FIELDS@", str(FIELDS)).replace("@PER_KEY@", str(PER_KEY))
)


class HomeCall(NamedTuple):
    """A region's request to home, about one key."""

    floors: str  # the key of the limiter's floors
    ledger: str
    params: QuotaParams  # of the whole quota
    request: LeaseRequest
    region: str
    share: int


class RegionCall(NamedTuple):
    """What a process asks of the ledger of its region; the params of *call* are the floor's."""

    call: LeaseCall
    since: int  # when the region got its floor

    @property
    def key(self) -> str:
        return self.call.key


class DepositCall(NamedTuple):
    """What home answered, for the ledger *key* of a region."""

    key: str
    params: QuotaParams  # of the floor
    deposit: Deposit


def region_call(calls: Sequence[RegionCall | DepositCall], now: int | None = None) -> ScriptCall:
    """The call of REGION; the params of *calls* are the floor's. *now*, in tests only, is the time."""
    arguments: list[str | int] = ["" if now is None else now]
    for call in calls:
        if isinstance(call, DepositCall):
            arguments += [call.params.text, "", "", "deposit", ":".join(map(str, call.deposit)), "", 0]
        else:
            arguments += [*call_arguments(call.call), call.since]
    return REGION.call([call.key for call in calls], *arguments)


def region_replies(reply: Sequence[Any]) -> list[tuple[LeaseReply | str, FetchOrder | None]]:
    """The reply about each key, and the order to fetch if there is one. A deposit that was dropped is STALE."""
    found: list[tuple[LeaseReply | str, FetchOrder | None]] = []
    for at in range(0, len(reply), FIELDS + ORDER_FIELDS):
        order = FetchOrder(*reply[at + FIELDS : at + FIELDS + ORDER_FIELDS])
        found.append((reply_at(reply, at), order if reply[at] == OK and order.seq else None))
    return found


def home_call(calls: Sequence[HomeCall], now: int | None = None) -> ScriptCall:
    """The call of HOME; `headgate.hybrid.script.replies` reads the reply."""
    arguments: list[str | int] = ["" if now is None else now]
    keys = []
    for call in calls:
        keys += [call.floors, call.ledger]
        asked = LeaseCall(call.ledger, home_params(call.params), HOME_PROFILE, call.request)
        arguments += [*call_arguments(asked), call.region, call.share]
    return HOME.call(keys, *arguments)
