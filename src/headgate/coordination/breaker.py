"""A circuit breaker that a fleet shares: what one worker learns of a sick server, all know.

    breaker = CircuitBreaker("api.example.com", store="redis://...")
    with breaker:
        call()

CLOSED lets everybody through; `failures` in a row open it. OPEN refuses everybody, with `CircuitOpen`, for `open_for`
seconds. HALF_OPEN lets a few probes through, never more at once in the whole fleet than it needs successes to close; a
failure opens it again. A probe holds its place for a lease, so one that dies frees it.

A result counts for the state in which its call began: each change of state has a number, and a result that comes with
an older one is dropped. When Redis does not answer, a breaker of the same rules in this process decides.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from headgate.clock import MICROSECONDS, Clock
from headgate.coordination.arguments import count, seconds
from headgate.coordination.place import Machine, Redis, Step
from headgate.coordination.site import Plan, Site
from headgate.errors import CircuitOpen, StoreUnavailable
from headgate.stores import Store

logger = logging.getLogger("headgate")

P = ParamSpec("P")
T = TypeVar("T")

SLICES = 10  # of a window of failure rates
SEEN = 30 * MICROSECONDS  # how long a report is remembered, so that it counts once however often it is sent
KEPT = 3_600_000  # milliseconds that a state is kept longer than it is open
FORCED = 30 * 86_400_000  # and how long one that somebody forced

# ARGV from 3: id, number of the state it began in (-1: any), outcome; failures, open_for, successes, lease; share of
# failures in a million (0: those in a row count), window, least calls. Times in microseconds.
LUA = f"""
local key, probes, seen, window = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, gen, outcome = ARGV[3], tonumber(ARGV[4]), ARGV[5]
local failures, open_for, successes, lease = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local share, span, least = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local fields = redis.call('HMGET', key, 'state', 'consecutive_failures', 'consecutive_successes', 'opened_at', 'number',
  'forced', 'changed_by', 'was')
local state, failed, succeeded = fields[1] or 'CLOSED', tonumber(fields[2] or 0), tonumber(fields[3] or 0)
local opened, number = math.min(tonumber(fields[4] or 0), now), tonumber(fields[5] or 0)
local forced, changed_by, was = fields[6] or '', fields[7] or '', fields[8] or ''
local me = op .. id

local function become(new)
  was, changed_by = state, me
  state, number, failed, succeeded = new, number + 1, 0, 0
  if new == 'OPEN' then opened = now end
  redis.call('DEL', probes, window)
end

local function save()
  redis.call('HSET', key, 'state', state, 'consecutive_failures', failed, 'consecutive_successes', succeeded,
    'opened_at', whole(opened), 'number', number, 'forced', forced, 'changed_by', changed_by, 'was', was)
  redis.call('PEXPIRE', key, forced ~= '' and {FORCED} or math.ceil(open_for / 1000) + {KEPT})
end

local function answer(allowed, probe, wait)
  return {{allowed, state, number, probe, wait, changed_by == me and was or '', failed, succeeded}}
end

local function recover()
  if state == 'OPEN' and forced == '' and now >= opened + open_for then
    become('HALF_OPEN')
    save()
  end
end

local function too_many()
  local width = math.ceil(span / {SLICES})
  local slice = (now - now % width) / width
  redis.call('HINCRBY', window, whole(slice) .. ':n', 1)
  if outcome == 'failure' then redis.call('HINCRBY', window, whole(slice) .. ':f', 1) end
  redis.call('PEXPIRE', window, math.ceil(span / 1000) * 2)
  local calls, bad, all = 0, 0, redis.call('HGETALL', window)
  for i = 1, #all, 2 do
    local at, what = string.match(all[i], '(%d+):(%a)')
    if tonumber(at) <= slice - {SLICES} then
      redis.call('HDEL', window, all[i])
    elseif what == 'n' then
      calls = calls + all[i + 1]
    else
      bad = bad + all[i + 1]
    end
  end
  return calls >= least and bad > 0 and bad * 1000000 >= share * calls
end

if op == 'admit' then
  recover()
  if state == 'CLOSED' then return answer(1, 0, 0) end
  if state == 'OPEN' then return answer(0, 0, forced == '' and opened + open_for - now or lease) end
  redis.call('ZREMRANGEBYSCORE', probes, '-inf', whole(now))
  if not redis.call('ZSCORE', probes, id) then
    if redis.call('ZCARD', probes) + succeeded >= successes then
      return answer(0, 0, redis.call('ZRANGE', probes, 0, 0, 'WITHSCORES')[2] - now)
    end
    redis.call('ZADD', probes, whole(now + lease), id)
    redis.call('PEXPIRE', probes, math.ceil(lease / 1000))
  end
  return answer(1, 1, 0)
end

if op == 'report' then
  redis.call('ZREM', probes, id)
  if changed_by == me or outcome == 'ignored' or forced ~= '' or (gen >= 0 and gen ~= number) or state == 'OPEN' then
    return answer(0, 0, 0)
  end
  if state == 'CLOSED' and share == 0 and outcome == 'success' then
    if failed > 0 then
      failed = 0
      save()
    end
    return answer(0, 0, 0)
  end
  redis.call('ZREMRANGEBYSCORE', seen, '-inf', whole(now))
  if redis.call('ZSCORE', seen, id) then return answer(0, 0, 0) end
  redis.call('ZADD', seen, whole(now + {SEEN}), id)
  redis.call('PEXPIRE', seen, {SEEN // 1000})
  if state == 'CLOSED' and share > 0 then
    if not too_many() then return answer(0, 0, 0) end
    become('OPEN')
  elseif state == 'CLOSED' then
    failed = failed + 1
    if failed >= failures then become('OPEN') end
  elseif outcome == 'failure' then
    become('OPEN')
  else
    succeeded = succeeded + 1
    if succeeded >= successes then become('CLOSED') end
  end
  save()
  return answer(0, 0, 0)
end

if op == 'recover' then
  recover()
elseif op == 'force' then  -- outcome: the state, or nothing, which begins anew
  if changed_by ~= me then
    local new = outcome == '' and 'CLOSED' or outcome
    forced, failed = outcome, 0
    if state ~= new then become(new) end
    save()
  end
end
return answer(changed_by == me and 1 or 0, 0, state == 'OPEN' and math.max(opened + open_for - now, 0) or 0)
"""


class BreakerState:
    """The same in Python."""

    def __init__(self) -> None:
        self.state, self.failed, self.succeeded, self.opened, self.number = "CLOSED", 0, 0, 0, 0
        self.forced, self.changed_by, self.was = "", "", ""
        self.probes: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.window: dict[int, list[int]] = {}
        self.until = 0

    def admit(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        _, open_for, successes, lease, *_ = rules
        me = self._begin("admit" + id, now)
        self._recover(me, now, open_for)
        if self.state == "CLOSED":
            return self._answer(me, 1, 0, 0)
        if self.state == "OPEN":
            return self._answer(me, 0, 0, lease if self.forced else self.opened + open_for - now)
        self.probes = {probe: until for probe, until in self.probes.items() if until > now}
        if id not in self.probes:
            if len(self.probes) + self.succeeded >= successes:
                return self._answer(me, 0, 0, min(self.probes.values()) - now)
            self.probes[id] = now + lease
        return self._answer(me, 1, 1, 0)

    def report(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        failures, open_for, successes, _, share, span, least = rules
        me = self._begin("report" + id, now)
        self.probes.pop(id, None)
        late = self.changed_by == me or (gen >= 0 and gen != self.number) or self.state == "OPEN"
        if late or outcome == "ignored" or self.forced:
            return self._answer(me, 0, 0, 0)
        if self.state == "CLOSED" and share == 0 and outcome == "success":
            if self.failed:
                self.failed = 0
                self._save(now, open_for)
            return self._answer(me, 0, 0, 0)
        self.seen = {report: until for report, until in self.seen.items() if until > now}
        if id in self.seen:
            return self._answer(me, 0, 0, 0)
        self.seen[id] = now + SEEN
        if self.state == "CLOSED" and share > 0:
            if not self._too_many(now, outcome, share, span, least):
                return self._answer(me, 0, 0, 0)
            self._become("OPEN", me, now)
        elif self.state == "CLOSED":
            self.failed += 1
            if self.failed >= failures:
                self._become("OPEN", me, now)
        elif outcome == "failure":
            self._become("OPEN", me, now)
        else:
            self.succeeded += 1
            if self.succeeded >= successes:
                self._become("CLOSED", me, now)
        self._save(now, open_for)
        return self._answer(me, 0, 0, 0)

    def recover(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        me = self._begin("recover" + id, now)
        self._recover(me, now, rules[1])
        return self._seen(me, now, rules[1])

    def force(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        me = self._begin("force" + id, now)
        if self.changed_by != me:
            self.forced, self.failed = outcome, 0
            if self.state != (outcome or "CLOSED"):
                self._become(outcome or "CLOSED", me, now)
            self._save(now, rules[1])
        return self._seen(me, now, rules[1])

    def look(self, now: int, id: str, gen: int, outcome: str, *rules: int) -> list[Any]:
        return self._seen(self._begin("look" + id, now), now, rules[1])

    def idle(self, now: int) -> bool:
        return now >= self.until and not self.probes

    def _begin(self, me: str, now: int) -> str:
        self.opened = min(self.opened, now)
        return me

    def _become(self, new: str, me: str, now: int) -> None:
        self.was, self.changed_by = self.state, me
        self.state, self.number, self.failed, self.succeeded = new, self.number + 1, 0, 0
        if new == "OPEN":
            self.opened = now
        self.probes, self.window = {}, {}

    def _save(self, now: int, open_for: int) -> None:
        self.until = now + (FORCED * 1000 if self.forced else open_for + KEPT * 1000)

    def _recover(self, me: str, now: int, open_for: int) -> None:
        if self.state == "OPEN" and not self.forced and now >= self.opened + open_for:
            self._become("HALF_OPEN", me, now)
            self._save(now, open_for)

    def _too_many(self, now: int, outcome: str, share: int, span: int, least: int) -> bool:
        slice = now // -(-span // SLICES)
        counts = self.window.setdefault(slice, [0, 0])
        counts[0] += 1
        counts[1] += outcome == "failure"
        self.window = {at: counts for at, counts in self.window.items() if at > slice - SLICES}
        calls, bad = (sum(counts[i] for counts in self.window.values()) for i in (0, 1))
        return calls >= least and bad > 0 and bad * 1_000_000 >= share * calls

    def _seen(self, me: str, now: int, open_for: int) -> list[Any]:
        wait = max(self.opened + open_for - now, 0) if self.state == "OPEN" else 0
        return self._answer(me, int(self.changed_by == me), 0, wait)

    def _answer(self, me: str, allowed: int, probe: int, wait: int) -> list[Any]:
        was = self.was if self.changed_by == me else ""
        return [allowed, self.state, self.number, probe, wait, was, self.failed, self.succeeded]


MACHINE = Machine("circuit_breaker", ("", ":probes", ":seen", ":window"), LUA, BreakerState)

Ignore = tuple[type[BaseException], ...] | type[BaseException] | Callable[[BaseException], bool]
Listener = Callable[[str, str, str], object]  # name, the state before, the state now


class Admission(NamedTuple):
    """A call that was let through: who, in which state of the breaker, and whether Redis or we said so."""

    id: str
    number: int
    local: bool


class Plans:
    """What both breakers do."""

    def __init__(
        self,
        name: str,
        store: str | Store,
        failures: int,
        open_for: float,
        successes: int,
        lease: float,
        rate: float | None,
        window: float,
        min_calls: int,
        ignore: Ignore,
        on_change: Listener | None,
        clock: Clock | None,
    ) -> None:
        times = [round(seconds(*each) * MICROSECONDS) for each in (("open_for", open_for), ("lease", lease))]
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1):
            raise ValueError(f"rate must be a share of failures between 0 and 1, such as 0.5, got {rate!r}")
        share = 0 if rate is None else max(round(rate * 1_000_000), 1)
        self.rules = (
            *(count("failures", failures), times[0], count("successes", successes), times[1]),
            *(share, round(seconds("window", window) * MICROSECONDS), count("min_calls", min_calls)),
        )
        self.site = Site(MACHINE, name, store, clock)
        if not (callable(ignore) or (isinstance(ignore, tuple) and all(isinstance(each, type) for each in ignore))):
            raise ValueError(f"ignore must be types of exceptions, or a function that says so, got {ignore!r:.80}")
        self._ignores = ignore if callable(ignore) and not isinstance(ignore, type) else None
        self._ignored = ignore if isinstance(ignore, type | tuple) else ()
        self._on_change = on_change
        self._inside: dict[object, list[Admission | None]] = {}

    def admit(self, caller: object) -> Plan[None]:
        id = secrets.token_hex(8)
        try:
            reply, local = yield from self._ask("admit", id)
        except BaseException:  # cancelled: a probe that nobody will make
            self.site.insist(Step("report", (id, -1, "ignored", *self.rules)), self.site.clock.now() + self.rules[3])
            raise
        allowed, _, number, _, wait, *_ = reply
        if not allowed:
            raise CircuitOpen(self.site.name, max(wait, 1) / MICROSECONDS)
        self._inside.setdefault(caller, []).append(Admission(id, number, local))

    def leave(self, caller: object, error: BaseException | None) -> Plan[None]:
        """The end of a call that was let through."""
        admission = self._inside[caller].pop()
        if not self._inside[caller]:
            del self._inside[caller]
        if admission is not None:  # else it was recorded on the way
            yield from self._report(admission, self._outcome(error))

    def record(self, caller: object, outcome: str) -> Plan[None]:
        inside = self._inside.get(caller)
        admission = None
        if inside:
            admission, inside[-1] = inside[-1], None
        yield from self._report(admission or Admission(secrets.token_hex(8), -1, False), outcome)

    def look(self) -> Plan[str]:
        reply, _ = yield from self._ask("look", "")
        return str(reply[1])

    def recover(self) -> Plan[bool]:
        reply, _ = yield from self._ask("recover", secrets.token_hex(8))
        return bool(reply[0])

    def force(self, state: str) -> Plan[None]:
        yield from self._ask("force", secrets.token_hex(8), outcome=state)

    def _report(self, admission: Admission, outcome: str) -> Plan[None]:
        if admission.local:
            self._locally("report", admission.id, admission.number, outcome)
            return
        try:
            yield from self._ask("report", admission.id, admission.number, outcome)
        except BaseException:
            step = Step("report", (admission.id, admission.number, outcome, *self.rules))
            self.site.insist(step, self.site.clock.now() + self.rules[3])
            raise

    def _ask(self, op: str, id: str, number: int = -1, outcome: str = "") -> Plan[tuple[list[Any], bool]]:
        local = False
        try:
            reply = yield Step(op, (id, number, outcome, *self.rules))
        except StoreUnavailable:
            reply, local = self._locally(op, id, -1, outcome), True
        if reply[5]:
            self._tell(reply[5], reply[1])
        return reply, local

    def _locally(self, op: str, id: str, number: int, outcome: str) -> list[Any]:
        place = self.site.place
        assert isinstance(place, Redis)
        return place.fallback.step(MACHINE, self.site.name, Step(op, (id, number, outcome, *self.rules)))

    def _outcome(self, error: BaseException | None) -> str:
        if error is None:
            return "success"
        if not isinstance(error, Exception) or isinstance(error, self._ignored):
            return "ignored"  # a cancelled call says nothing about the server
        return "ignored" if self._ignores and self._ignores(error) else "failure"

    def _tell(self, was: str, now: str) -> None:
        logger.warning("circuit breaker %r: %s, was %s", self.site.name, now, was)
        if self._on_change:
            try:
                self._on_change(self.site.name, was, now)
            except Exception:
                logger.exception("on_change of the circuit breaker %r failed", self.site.name)


class CircuitBreaker:
    """A breaker for threads and processes.

    name       what may be sick
    store      a URL (``memory://``, ``redis://host:port/db``, ...) or a store object
    failures   in a row, by anybody, that open it
    open_for   seconds that it stays open
    successes  of probes that close it; as many at once at most
    lease      seconds that a probe may take before another may be made in its place
    rate       instead of failures in a row: the share of them, such as 0.5, among the calls of the last *window*
               seconds that opens it, once there are *min_calls*
    ignore     exceptions that count for nothing: types, or a function that says so. Cancellation never counts
    on_change  called with name, state before and state now, once in the fleet for each change
    """

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        failures: int = 3,
        open_for: float = 600.0,
        successes: int = 3,
        lease: float = 30.0,
        rate: float | None = None,
        window: float = 60.0,
        min_calls: int = 20,
        ignore: Ignore = (),
        on_change: Listener | None = None,
        clock: Clock | None = None,
    ) -> None:
        rules = (failures, open_for, successes, lease, rate, window, min_calls)
        self._plans = Plans(name, store, *rules, ignore, on_change, clock)
        self._plans.site.place.check(tasks=False)
        self.name = name

    @property
    def state(self) -> str:
        """CLOSED, OPEN or HALF_OPEN. One that could recover stays OPEN until somebody tries."""
        return self._run(self._plans.look())

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call *function* through the breaker."""
        with self:
            return function(*args, **kwargs)

    def record_success(self) -> None:
        """Count a success; within ``with``, as the result of this call."""
        self._run(self._plans.record(threading.get_ident(), "success"))

    def record_failure(self) -> None:
        """Count a failure; within ``with``, as the result of this call: for bad answers that are no exceptions."""
        self._run(self._plans.record(threading.get_ident(), "failure"))

    def try_recover(self) -> bool:
        """Go from OPEN to HALF_OPEN if the time has come; whether it did."""
        return self._run(self._plans.recover())

    def force_open(self) -> None:
        """Let nobody through until `reset` or `force_closed`."""
        self._run(self._plans.force("OPEN"))

    def force_closed(self) -> None:
        """Let everybody through, whatever fails, until `reset` or `force_open`."""
        self._run(self._plans.force("CLOSED"))

    def reset(self) -> None:
        """Begin anew: CLOSED, nothing counted, nothing forced."""
        self._run(self._plans.force(""))

    def close(self) -> None:
        """Let go of the connections, which all tools on this store share; the next call makes new ones."""
        self._plans.site.place.close()

    def __enter__(self) -> Self:
        self._run(self._plans.admit(threading.get_ident()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run(self._plans.leave(threading.get_ident(), error))

    def _run(self, plan: Plan[T]) -> T:
        return self._plans.site.run(lambda _: plan)


class AsyncCircuitBreaker:
    """`CircuitBreaker` for asyncio: the same arguments, the same methods, awaited (``await breaker.state``, too)."""

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        failures: int = 3,
        open_for: float = 600.0,
        successes: int = 3,
        lease: float = 30.0,
        rate: float | None = None,
        window: float = 60.0,
        min_calls: int = 20,
        ignore: Ignore = (),
        on_change: Listener | None = None,
        clock: Clock | None = None,
    ) -> None:
        rules = (failures, open_for, successes, lease, rate, window, min_calls)
        self._plans = Plans(name, store, *rules, ignore, on_change, clock)
        self._plans.site.place.check(tasks=True)
        self.name = name

    @property
    def state(self) -> Coroutine[Any, Any, str]:
        """CLOSED, OPEN or HALF_OPEN, awaited. One that could recover stays OPEN until somebody tries."""
        return self._run(self._plans.look())

    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await *function* through the breaker."""
        async with self:
            return await function(*args, **kwargs)

    async def record_success(self) -> None:
        """Count a success; within ``async with``, as the result of this call."""
        await self._run(self._plans.record(asyncio.current_task(), "success"))

    async def record_failure(self) -> None:
        """Count a failure; within ``async with``, as the result of this call."""
        await self._run(self._plans.record(asyncio.current_task(), "failure"))

    async def try_recover(self) -> bool:
        """Go from OPEN to HALF_OPEN if the time has come; whether it did."""
        return await self._run(self._plans.recover())

    async def force_open(self) -> None:
        """Let nobody through until `reset` or `force_closed`."""
        await self._run(self._plans.force("OPEN"))

    async def force_closed(self) -> None:
        """Let everybody through, whatever fails, until `reset` or `force_open`."""
        await self._run(self._plans.force("CLOSED"))

    async def reset(self) -> None:
        """Begin anew: CLOSED, nothing counted, nothing forced."""
        await self._run(self._plans.force(""))

    async def aclose(self) -> None:
        """Let go of this event loop's connections; it does so itself when it ends."""
        await self._plans.site.place.aclose()

    async def __aenter__(self) -> Self:
        await self._run(self._plans.admit(asyncio.current_task()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._run(self._plans.leave(asyncio.current_task(), error))

    def _run(self, plan: Plan[T]) -> Coroutine[Any, Any, T]:
        return self._plans.site.arun(lambda _: plan)
