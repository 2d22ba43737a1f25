"""What a state machine is: a few operations on a named state, in Lua for Redis and as a Python class for memory.

Every operation carries an id that its caller chose, and running it twice has the effect of running it once. So a call
whose reply was lost is sent again with the same id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headgate._waiters import WaiterQueue
from headgate.keys import hash_tag

Reply = list[Any]  # of int and str

# Every script starts with this. ARGV: the operation, and the time in microseconds ('' for the server's own time).
# Numbers are written with format_int, as tostring keeps only 14 digits.
LUA_PRELUDE = """
local op, now = ARGV[1], tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local function format_int(number) return string.format('%.0f', number) end
"""


def lua_of_released(ttl: int, most: int) -> str:
    """Lua that keeps released ids for *ttl* microseconds in the Sorted Set `released`, the latest *most* of them."""
    return f"""
local function was_released(id) return tonumber(redis.call('ZSCORE', released, id) or 0) > now end

local function remember(id)
  redis.call('ZREMRANGEBYSCORE', released, '-inf', format_int(now))
  redis.call('ZADD', released, format_int(now + {ttl}), id)
  redis.call('ZREMRANGEBYRANK', released, 0, -{most + 1})
  redis.call('PEXPIRE', released, {ttl // 1000})
end
"""


@dataclass(frozen=True)
class StateMachine:
    """The operations on one kind of state: *lua* is a script for Redis; *state* is a class with a method for each."""

    prefix: str
    suffixes: tuple[str, ...]  # of its Redis keys; the first is empty
    lua: str
    state: Callable[[], Any]

    def keys(self, name: str) -> list[str]:
        """The Redis keys of the state with this *name*."""
        tag = f"{self.prefix}:{hash_tag(name)}"
        return [tag + suffix for suffix in self.suffixes]


class Operation(NamedTuple):
    """An operation to run on a state, as a plan (see `headgate._plan`) yields it; the plan is sent the reply."""

    name: str
    arguments: tuple[str | int | bytes, ...]


# Operations after which the first waiter for the state may succeed.
WAKING = frozenset({"release", "evict", "settle", "add", "add_new", "enqueue", "undo", "withdraw"})


def wake_waiters(waiters: WaiterQueue, channel: str, operation: Operation, reply: Reply) -> None:
    """Wake the waiters of this process that may succeed now that *operation* got this *reply*."""
    if operation.name in WAKING:
        waiters.wake(channel)
    elif operation.name == "cancel":
        waiters.wake(entry_channel(channel, str(operation.arguments[1])))
    elif operation.name == "dequeue" and reply[0]:  # an empty reply concerns no entry, and would wake other dequeuers
        waiters.wake(entry_channel(channel, str(reply[0])))


def entry_channel(channel: str, id: str) -> str:
    """The channel of the waiters for the queue entry *id*; without an id, of those for the whole state."""
    return f"{channel}\n{id}" if id else channel  # no name contains a line feed


def remember(released: dict[str, int], id: str, until: int, most: int) -> None:
    """The twin of `lua_of_released`: keep *id* until that time, and at *most* so many ids, the latest."""
    released.pop(id, None)  # put in again, it is the newest
    released[id] = until
    if len(released) > most:
        del released[next(iter(released))]


def drop_expired(times: dict[str, int], now: int) -> list[str]:
    """Remove the ids whose time has come, and return them.

    All ids of *times* live equally long, so the dict is in the order of their times and the first are the oldest.
    """
    expired = []
    for id, until in times.items():
        if until > now:
            break
        expired.append(id)
    for id in expired:
        del times[id]
    return expired
