"""Measure a sliding window log kept in a Stream against the one in a Sorted Set, as redis.md tells it.

    python docs/measure_streams.py     takes about two minutes

Prints Markdown: MEMORY USAGE of a log of so many admitted calls, and the server's own time for a check of one permit
(INFO commandstats, so neither Python nor the network is in it), admitted and denied, the kinds taking turns. "Packed"
is the Sorted Set again on a server that may pack sets of up to 1,024 entries. The Stream's script is as good as we
could make it: the entry's ID is the time and the running total, its body is one byte.
"""

from __future__ import annotations

import statistics

import redis
from measure_memory import binaries, server

from headgate import Quota
from headgate.redis.script import LimiterCall, LimiterScript
from headgate.rule import Rule

LENGTHS = [1, 10, 100, 128, 129, 1000, 10_000]
ROUNDS = 7
CALLS = 200
PACKED = "Sorted Set, packed"

# ID = microseconds-total; the total of all permits since the log began makes sums out of differences, as in the set.
STREAM = """
local function quota(a)
  return {limit = tonumber(ARGV[a]), period = tonumber(ARGV[a + 1]), ttl = ARGV[a + 2]}, a + 3
end
local function entry(found)
  local time, total = string.match(found[1], '^(%d+)-(%d+)$')
  return {time = tonumber(time), total = tonumber(total), permits = tonumber(found[2][2])}
end
local function load(key, q, now)
  local found = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if not found[1] then return {now = now, gone = 0, used = 0, total = 0} end
  local last = entry(found[1])
  local at = math.max(now, last.time)
  if last.time <= at - q.period then return {now = at, gone = last.total, used = 0, total = last.total} end
  local first = entry(redis.call('XRANGE', key, string.format('%.0f', at - q.period + 1), '+', 'COUNT', 1)[1])
  local gone = first.total - first.permits
  return {now = at, first = first, last = last, gone = gone, used = last.total - gone, total = last.total}
end
local function look(state, q, now, permits)
  local after = state.used + permits
  local reset = state.used > 0 and state.last.time + q.period - now or 0
  if after > q.limit then return false, q.limit - state.used, reset, state.first.time + q.period - now end
  return true, q.limit - after, q.period, 0
end
local function spend(key, state, q, now, permits)
  redis.call('XADD', key, 'MINID', string.format('%.0f', state.now - q.period + 1),
    string.format('%.0f-%.0f', state.now, state.total + permits), 'p', permits)
  redis.call('EXPIRE', key, q.ttl)
end
"""


def scripts(limit: int) -> dict[str, LimiterScript]:
    rule = Rule(Quota(limit, 3600.0), "sliding_window", "default")
    sorted_set, packed, stream = (LimiterScript(rule, "rate_limiter", False, None) for _ in range(3))
    frame = sorted_set.text[sorted_set.text.index("\nlocal op, now") :]
    stream.text = "local where\n" + STREAM + frame
    return {"Sorted Set": sorted_set, PACKED: packed, "Stream": stream}


class Runner:
    """A script on a server, by EVALSHA."""

    def __init__(self, client: redis.Redis, script: LimiterScript) -> None:
        self._client = client
        self._script = script
        self.sha = str(client.script_load(script.text))
        self._arguments: list[str | int] = ["take", "", 1, *script_numbers(script)]

    def check(self, key: str) -> bool:
        reply = self._client.evalsha(self.sha, 1, key, *self._arguments, 1)
        return bool(reply[0])


def script_numbers(script: LimiterScript) -> list[int]:
    """The quota's arguments, as the packed command has them."""
    packed = script.command([LimiterCall("take", "k", 1)]).decode().split("\r\n")
    words = [word for word in packed[1:] if not word.startswith("$")]
    return [int(word) for word in words[-5:-2]]


def used(client: redis.Redis) -> float:
    """Microseconds that EVALSHA has taken since the statistics were reset, per call."""
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def empty(client: redis.Redis, kind: str) -> None:
    client.flushall()
    client.config_set("zset-max-ziplist-entries", 1024 if kind == PACKED else 128)  # a name that newer servers know too


def measure(client: redis.Redis, length: int) -> list[str]:
    memory: dict[str, int] = {}
    times: dict[str, dict[str, list[float]]] = {}
    kinds = scripts(length + ROUNDS * CALLS), scripts(length)
    for kind in kinds[0]:
        empty(client, kind)
        filler = Runner(client, kinds[0][kind])
        for _ in range(length):
            filler.check("log")
        memory[kind] = client.memory_usage("log", samples=0) or 0
        times[kind] = {"admitted": [], "denied": []}
    for _ in range(ROUNDS):
        for kind in memory:
            empty(client, kind)
            admits, denies = (Runner(client, scripts[kind]) for scripts in kinds)
            for _ in range(length):
                admits.check("log")
            for name, runner in (("denied", denies), ("admitted", admits)):
                client.config_resetstat()
                for _ in range(CALLS):
                    runner.check("log")
                times[kind][name].append(used(client))
    row = [f"{length:,}"]
    for kind in memory:
        row += [
            f"{memory[kind]:,}",
            *(f"{statistics.median(times[kind][name]):.1f}" for name in ("admitted", "denied")),
        ]
    return row


def main() -> None:
    for binary in binaries():
        with server(binary) as client:
            info = client.info("server")
            version = info.get("valkey_version") or info["redis_version"]
            name = "Valkey" if "valkey_version" in info else "Redis"
            heads = "".join(f" {kind}, bytes | admitted, us | denied, us |" for kind in scripts(1))
            print(f"\n| {name} {version}: calls in the log |{heads}\n|---|---|---|---|---|---|---|---|---|---|")
            for length in LENGTHS:
                print("| " + " | ".join(measure(client, length)) + " |", flush=True)


if __name__ == "__main__":
    main()
