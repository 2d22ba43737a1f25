"""The state of a circuit breaker: CLOSED, OPEN or HALF_OPEN, the counts that change it, and the probes under way.

CLOSED admits every call. Failures in a row, or a share of failures among the calls of a window, make it OPEN, which
admits none. When its time is over it becomes HALF_OPEN, which admits as many probes at a time as successes are missing.
Enough successes make it CLOSED; one failure makes it OPEN again. A forced state stays until it is forced otherwise.

Each change of state begins a new generation, a number. A call is admitted in one, and its report counts only in the
same: a result that began under an earlier state says nothing about this one.

admit    allows the call *id*, or does not. A probe has a lease, whose end makes room if the probe never reports.
report   counts the *outcome* (success, failure, ignored, refused) of the call *id*, and ends its probe. Ignored and
         refused count nothing. Refused says that a part of the call in another thread or process found all probes
         taken; then one more is admitted from now on, as calls that need two probes could never succeed.
recover  makes an OPEN breaker HALF_OPEN if its time is over.
force    sets the state to *outcome* until the next force; '' ends that, and sets it to CLOSED.
peek     changes nothing.

All reply with: allowed (for recover and force: whether this call changed the state), the state, its generation, whether
the call is a probe, microseconds to wait before asking again, the state before if this call changed it, failures and
successes in a row.

Each may be run twice. An admitted probe is known by its id and stays one probe. A report is remembered for a while
and counts once. The operation and id that changed the state are kept with it, so the second run of that operation
replies as the first did.
"""

from __future__ import annotations

from typing import Any

from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import StateMachine, drop_expired

SLICES = 10  # of the window in which calls are counted
REPORT_TTL = 30 * MICROSECONDS  # how long a report is remembered
MIN_WAIT = MICROSECONDS  # a refused caller asks again no sooner, unless a probe's lease ends before
IDLE_TTL = 3_600_000  # milliseconds that a state is kept beyond the time that it may be open
FOREVER = 1 << 62
ANY_GENERATION = -1  # for a report without an admission: it counts in whatever generation there is

# Keys: a Hash with the state; Sorted Sets of probes and of reported ids, by when they end; a Hash with the counts of
# calls (n) and failures (f) of each slice of the window. ARGV from 3: id, generation it was admitted in (or
# ANY_GENERATION), outcome; failures, open_for, successes, lease; share of failures in millionths (0: count those in a
# row), window, min_calls. Times in microseconds.
LUA = f"""
local key, probes, reported, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, admitted_in, outcome = ARGV[3], tonumber(ARGV[4]), ARGV[5]
local failures, open_for, successes, lease = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local share, window, min_calls = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local fields = redis.call('HMGET', key, 'state', 'consecutive_failures', 'consecutive_successes', 'opened_at', 'number',
  'forced', 'changed_by', 'was', 'extra_probes')
local state, failed, succeeded = fields[1] or 'CLOSED', tonumber(fields[2] or 0), tonumber(fields[3] or 0)
local opened, generation = math.min(tonumber(fields[4] or 0), now), tonumber(fields[5] or 0)
local forced, changed_by, previous = fields[6] or '', fields[7] or '', fields[8] or ''
local extra_probes = tonumber(fields[9] or 0)
local caller = op .. id

local function change(new)
  previous, changed_by = state, caller
  state, generation, failed, succeeded, extra_probes = new, generation + 1, 0, 0, 0
  if new == 'OPEN' then opened = now end
  redis.call('DEL', probes, counts)
end

local function save()
  redis.call('HSET', key, 'state', state, 'consecutive_failures', failed, 'consecutive_successes', succeeded,
    'opened_at', format_int(opened), 'number', generation, 'forced', forced, 'changed_by', changed_by, 'was', previous,
    'extra_probes', extra_probes)
  redis.call('PEXPIRE', key, math.ceil(open_for / 1000) + {IDLE_TTL})
  if forced ~= '' then redis.call('PERSIST', key) end
end

local function reply(allowed, probe, wait)
  return {{allowed, state, generation, probe, wait, changed_by == caller and previous or '', failed, succeeded}}
end

local function recover()
  if state == 'OPEN' and forced == '' and now >= opened + open_for then
    change('HALF_OPEN')
    save()
  end
end

local function count_and_compare()
  local width = math.ceil(window / {SLICES})
  local slice = (now - now % width) / width
  redis.call('HINCRBY', counts, format_int(slice) .. ':n', 1)
  if outcome == 'failure' then redis.call('HINCRBY', counts, format_int(slice) .. ':f', 1) end
  redis.call('PEXPIRE', counts, math.ceil(window / 1000) * 2)
  local calls, bad, all = 0, 0, redis.call('HGETALL', counts)
  for i = 1, #all, 2 do
    local at, what = string.match(all[i], '(%d+):(%a)')
    if tonumber(at) <= slice - {SLICES} then
      redis.call('HDEL', counts, all[i])
    elseif what == 'n' then
      calls = calls + all[i + 1]
    else
      bad = bad + all[i + 1]
    end
  end
  return calls >= min_calls and bad > 0 and bad * 1000000 >= share * calls
end

if op == 'admit' then
  recover()
  if state == 'CLOSED' then return reply(1, 0, 0) end
  if state == 'OPEN' then return reply(0, 0, forced == '' and opened + open_for - now or lease) end
  redis.call('ZREMRANGEBYSCORE', probes, '-inf', format_int(now))
  if not redis.call('ZSCORE', probes, id) then
    local first = redis.call('ZRANGE', probes, 0, 0, 'WITHSCORES')[2]
    -- with no probe under way one is always admitted: *successes* may have been lowered since
    if first and redis.call('ZCARD', probes) + succeeded >= successes + extra_probes then
      local left = first - now  -- probes rarely take their whole lease: ask when this one has taken twice as long
      return reply(0, 0, math.min(left, math.max(lease - left, {MIN_WAIT})))
    end
    redis.call('ZADD', probes, format_int(now + lease), id)
    redis.call('PEXPIRE', probes, math.ceil(lease / 1000))
  end
  return reply(1, 1, 0)
end

if op == 'report' then
  local ended = redis.call('ZREM', probes, id) == 1
  if ended and outcome == 'refused' and state == 'HALF_OPEN' and extra_probes < successes then
    redis.call('HINCRBY', key, 'extra_probes', 1)
  end
  local late = changed_by == caller or (admitted_in >= 0 and admitted_in ~= generation) or state == 'OPEN'
  if late or outcome == 'ignored' or outcome == 'refused' or forced ~= '' then return reply(0, 0, 0) end
  if state == 'CLOSED' and share == 0 and outcome == 'success' then
    if failed > 0 then
      failed = 0
      save()
    end
    return reply(0, 0, 0)
  end
  redis.call('ZREMRANGEBYSCORE', reported, '-inf', format_int(now))
  if redis.call('ZSCORE', reported, id) then return reply(0, 0, 0) end
  redis.call('ZADD', reported, format_int(now + {REPORT_TTL}), id)
  redis.call('PEXPIRE', reported, {REPORT_TTL // 1000})
  if state == 'CLOSED' and share > 0 then
    if not count_and_compare() then return reply(0, 0, 0) end
    change('OPEN')
  elseif state == 'CLOSED' then
    failed = failed + 1
    if failed >= failures then change('OPEN') end
  elseif outcome == 'failure' then
    change('OPEN')
  else
    succeeded = succeeded + 1
    if succeeded >= successes then change('CLOSED') end
  end
  save()
  return reply(0, 0, 0)
end

if op == 'recover' then
  recover()
elseif op == 'force' then
  if changed_by ~= caller then
    local new = outcome == '' and 'CLOSED' or outcome
    forced, failed = outcome, 0
    if state ~= new then change(new) end
    redis.call('DEL', counts)
    save()
  end
end
return reply(changed_by == caller and 1 or 0, 0, state == 'OPEN' and math.max(opened + open_for - now, 0) or 0)
"""


class BreakerState:
    """The same in Python."""

    def __init__(self) -> None:
        self.state, self.failed, self.succeeded, self.opened, self.generation = "CLOSED", 0, 0, 0, 0
        self.forced, self.changed_by, self.previous, self.extra_probes = "", "", "", 0
        self.probes: dict[str, int] = {}
        self.reported: dict[str, int] = {}
        self.counts: dict[int, list[int]] = {}  # calls and failures of each slice
        self.until = 0
        self.counts_until = 0

    def admit(self, now: int, id: str, admitted_in: int, outcome: str, *rules: int) -> list[Any]:
        _, open_for, successes, lease, *_ = rules
        caller = self._begin("admit" + id, now)
        self._recover(caller, now, open_for)
        if self.state == "CLOSED":
            return self._reply(caller, 1, 0, 0)
        if self.state == "OPEN":
            return self._reply(caller, 0, 0, lease if self.forced else self.opened + open_for - now)
        self.probes = {probe: until for probe, until in self.probes.items() if until > now}
        if id not in self.probes:
            if self.probes and len(self.probes) + self.succeeded >= successes + self.extra_probes:
                left = min(self.probes.values()) - now
                return self._reply(caller, 0, 0, min(left, max(lease - left, MIN_WAIT)))
            self.probes[id] = now + lease
        return self._reply(caller, 1, 1, 0)

    def report(self, now: int, id: str, admitted_in: int, outcome: str, *rules: int) -> list[Any]:
        failures, open_for, successes, _, share, window, min_calls = rules
        caller = self._begin("report" + id, now)
        ended = self.probes.pop(id, None) is not None
        if ended and outcome == "refused" and self.state == "HALF_OPEN" and self.extra_probes < successes:
            self.extra_probes += 1
        late = self.changed_by == caller or (admitted_in >= 0 and admitted_in != self.generation)
        if late or self.state == "OPEN" or outcome in ("ignored", "refused") or self.forced:
            return self._reply(caller, 0, 0, 0)
        if self.state == "CLOSED" and share == 0 and outcome == "success":
            if self.failed:
                self.failed = 0
                self._save(now, open_for)
            return self._reply(caller, 0, 0, 0)
        drop_expired(self.reported, now)
        if id in self.reported:
            return self._reply(caller, 0, 0, 0)
        self.reported[id] = now + REPORT_TTL
        if self.state == "CLOSED" and share > 0:
            if not self._count_and_compare(now, outcome, share, window, min_calls):
                return self._reply(caller, 0, 0, 0)
            self._change("OPEN", caller, now)
        elif self.state == "CLOSED":
            self.failed += 1
            if self.failed >= failures:
                self._change("OPEN", caller, now)
        elif outcome == "failure":
            self._change("OPEN", caller, now)
        else:
            self.succeeded += 1
            if self.succeeded >= successes:
                self._change("CLOSED", caller, now)
        self._save(now, open_for)
        return self._reply(caller, 0, 0, 0)

    def recover(self, now: int, id: str, admitted_in: int, outcome: str, *rules: int) -> list[Any]:
        caller = self._begin("recover" + id, now)
        self._recover(caller, now, rules[1])
        return self._snapshot(caller, now, rules[1])

    def force(self, now: int, id: str, admitted_in: int, outcome: str, *rules: int) -> list[Any]:
        caller = self._begin("force" + id, now)
        if self.changed_by != caller:
            self.forced, self.failed = outcome, 0
            if self.state != (outcome or "CLOSED"):
                self._change(outcome or "CLOSED", caller, now)
            self.counts = {}
            self._save(now, rules[1])
        return self._snapshot(caller, now, rules[1])

    def peek(self, now: int, id: str, admitted_in: int, outcome: str, *rules: int) -> list[Any]:
        return self._snapshot(self._begin("peek" + id, now), now, rules[1])

    def is_expired(self, now: int) -> bool:
        return now >= max(self.until, self.counts_until, *self.probes.values())

    def _begin(self, caller: str, now: int) -> str:
        self.opened = min(self.opened, now)  # a clock that was set back must not keep it open for longer
        return caller

    def _change(self, new: str, caller: str, now: int) -> None:
        self.previous, self.changed_by = self.state, caller
        self.state, self.generation, self.failed, self.succeeded, self.extra_probes = new, self.generation + 1, 0, 0, 0
        if new == "OPEN":
            self.opened = now
        self.probes, self.counts = {}, {}

    def _save(self, now: int, open_for: int) -> None:
        self.until = FOREVER if self.forced else now + open_for + IDLE_TTL * 1000

    def _reply(self, caller: str, allowed: int, probe: int, wait: int) -> list[Any]:
        previous = self.previous if self.changed_by == caller else ""
        return [allowed, self.state, self.generation, probe, wait, previous, self.failed, self.succeeded]

    def _recover(self, caller: str, now: int, open_for: int) -> None:
        if self.state == "OPEN" and not self.forced and now >= self.opened + open_for:
            self._change("HALF_OPEN", caller, now)
            self._save(now, open_for)

    def _count_and_compare(self, now: int, outcome: str, share: int, window: int, min_calls: int) -> bool:
        current = now // -(-window // SLICES)
        counts = self.counts.setdefault(current, [0, 0])
        counts[0] += 1
        counts[1] += outcome == "failure"
        self.counts_until = now + window * 2
        self.counts = {at: counts for at, counts in self.counts.items() if at > current - SLICES}
        calls, bad = (sum(counts[i] for counts in self.counts.values()) for i in (0, 1))
        return calls >= min_calls and bad > 0 and bad * 1_000_000 >= share * calls

    def _snapshot(self, caller: str, now: int, open_for: int) -> list[Any]:
        wait = max(self.opened + open_for - now, 0) if self.state == "OPEN" else 0
        return self._reply(caller, int(self.changed_by == caller), 0, wait)


BREAKER = StateMachine("circuit_breaker", ("", ":probes", ":seen", ":window"), LUA, BreakerState)
