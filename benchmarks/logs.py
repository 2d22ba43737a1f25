"""A sliding window log as a Sorted Set, as a Stream and as the String that it is: bytes, and the server's own time.

MEMORY USAGE of a log of so many admitted calls, and the server's own time for a check of one permit (INFO
commandstats, so neither Python nor the network is in it), admitted and denied, the kinds taking turns. The other two
scripts are as good as we could make them. Both keep a running total, so that sums are differences: the member of a
Sorted Set is the total and the permits, the ID of a Stream's entry is the time and the total. They do only what is
measured: neither can give permits back, and both take a server's clock for one that never steps back.
"""

from __future__ import annotations

import statistics

import redis

LENGTHS = (1, 10, 100, 1000, 10_000)
CALLS = 200

# What both have in common. A script has `newest` and `oldest_after`, which give a time, a total and the permits.
LOG = """
local function load(key, q, now)
  local last, total = newest(key)
  if not last or last <= now - q.period then return {used = 0, total = total or 0} end
  local first, first_total, permits = oldest_after(key, now - q.period)
  return {first = first, last = last, used = total - first_total + permits, total = total}
end
local function evaluate(state, q, now, permits)
  local after = state.used + permits
  if after > q.limit then
    return false, q.limit - state.used, state.last + q.period - now, state.first + q.period - now
  end
  return true, q.limit - after, q.period, 0
end
"""

SORTED_SET = """
local function entry(found)
  local total, permits = string.match(found[1], '^(%d+):(%d+)$')
  return tonumber(found[2]), tonumber(total), tonumber(permits)
end
local function newest(key)
  local found = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  if found[1] then return entry(found) end
end
local function oldest_after(key, edge)
  local after = string.format('(%.0f', edge)
  return entry(redis.call('ZRANGEBYSCORE', key, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
end
local function consume(key, state, q, now, permits)
  local gone = redis.call('ZCOUNT', key, '-inf', now - q.period)
  if gone > 0 then redis.call('ZREMRANGEBYRANK', key, 0, gone - 1) end
  redis.call('ZADD', key, now, string.format('%016.0f:%.0f', state.total + permits, permits))
  redis.call('EXPIRE', key, q.ttl)
end
"""

STREAM = """
local function entry(found)
  local time, total = string.match(found[1], '^(%d+)-(%d+)$')
  return tonumber(time), tonumber(total), tonumber(found[2][2])
end
local function newest(key)
  local found = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if found[1] then return entry(found[1]) end
end
local function oldest_after(key, edge)
  return entry(redis.call('XRANGE', key, string.format('%.0f', edge + 1), '+', 'COUNT', 1)[1])
end
local function consume(key, state, q, now, permits)
  redis.call('XADD', key, 'MINID', string.format('%.0f', now - q.period + 1),
    string.format('%.0f-%.0f', now, state.total + permits), 'p', permits)
  redis.call('EXPIRE', key, q.ttl)
end
"""


def scripts(limit: int) -> dict[str, tuple[str, list[int]]]:
    """The text of each kind's script, and the arguments of the quota."""
    from headgate import Quota
    from headgate.algorithms.fixed_window import QUOTA_LUA
    from headgate.redis.script import LimiterScript
    from headgate.rule import Rule

    rule = Rule(Quota(limit, 3600.0), "sliding_window", "default")
    string = LimiterScript(rule, "rate_limiter", False, None)
    frame = string.text[string.text.index("\nlocal op, now") :]
    texts = {
        kind: "local where\n" + QUOTA_LUA + functions.replace("local function consume", LOG + "local function consume")
        for kind, functions in (("Sorted Set", SORTED_SET), ("Stream", STREAM))
    }
    numbers = [number for part in string.numbers for number in part]
    return {kind: (text + frame, numbers) for kind, text in texts.items()} | {"String": (string.text, numbers)}


class Runner:
    """A script on a server, by EVALSHA."""

    def __init__(self, client: redis.Redis, script: tuple[str, list[int]]) -> None:
        self._client = client
        text, numbers = script
        self.sha = str(client.script_load(text))
        self._arguments: list[str | int] = ["take", "", 1, *numbers]

    def check(self, key: str) -> bool:
        reply = self._client.evalsha(self.sha, 1, key, *self._arguments, 1)
        return bool(reply[0])


def used(client: redis.Redis) -> float:
    """Microseconds that EVALSHA has taken since the statistics were reset, per call."""
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def measure(client: redis.Redis, length: int, rounds: int) -> dict[str, dict[str, float]]:
    """By kind of log: `bytes`, and microseconds of a check that is `admitted` and of one that is `denied`."""
    found: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    kinds = scripts(length + rounds * CALLS), scripts(length)
    for kind in kinds[0]:
        client.flushall()
        filler = Runner(client, kinds[0][kind])
        for _ in range(length):
            filler.check("log")
        found[kind] = {"bytes": client.memory_usage("log", samples=0) or 0}
        times[kind] = {"admitted": [], "denied": []}
    for _ in range(rounds):
        for kind in found:
            client.flushall()
            admits, denies = (Runner(client, scripts[kind]) for scripts in kinds)
            for _ in range(length):
                admits.check("log")
            for name, runner in (("denied", denies), ("admitted", admits)):
                client.config_resetstat()
                for _ in range(CALLS):
                    runner.check("log")
                times[kind][name].append(used(client))
    for kind, by in times.items():
        found[kind] |= {name: statistics.median(values) for name, values in by.items()}
    return found
