"""What a tool is: a few operations on a state, written in Lua for Redis and as a plain Python class for memory.

Every operation carries an id that its caller chose, and to run it twice is to run it once; so a call whose reply was
lost is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headgate._waiters import WaiterQueue
from headgate.keys import hash_tag

Reply = list[Any]  # of int and str

# What every script starts with: the operation, and the time in microseconds ('' for the server's).
LUA_PRELUDE = """
local op, now = ARGV[1], tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local function whole(number) return string.format('%.0f', number) end
"""


@dataclass(frozen=True)
class StateMachine:
    """A tool's operations, twice: *lua* for Redis, *state* for memory, whose methods are the operations."""

    prefix: str
    suffixes: tuple[str, ...]  # of its Redis keys; the first has none
    lua: str
    state: Callable[[], Any]

    def keys(self, name: str) -> list[str]:
        tag = f"{self.prefix}:{hash_tag(name)}"
        return [tag + suffix for suffix in self.suffixes]


def drop_expired(times: dict[str, int], now: int) -> list[str]:
    """Drop those whose time has come, and say who they were. All live equally long, so the oldest are the first."""
    gone = []
    for each, until in times.items():
        if until > now:
            break
        gone.append(each)
    for each in gone:
        del times[each]
    return gone


class Operation(NamedTuple):
    """Run this operation; the answer is its reply."""

    name: str
    arguments: tuple[str | int, ...]


# Operations that may let somebody else go on.
WAKING = frozenset({"release", "evict", "settle", "add", "add_new", "enqueue", "undo"})


def wake_waiters(line: WaiterQueue, channel: str, step: Operation, reply: Reply) -> None:
    """Wake whoever in this process can go on, now that *step* was answered."""
    if step.name in WAKING:
        line.wake(channel)
    elif step.name == "cancel":
        line.wake(entry_channel(channel, str(step.arguments[1])))
    elif step.name == "dequeue" and reply[0]:  # else there is nobody to tell: whoever waits for one would wake itself
        line.wake(entry_channel(channel, str(reply[0])))


def entry_channel(channel: str, who: str) -> str:
    """The line of those who wait to hear of *who*, and not of the channel as a whole."""
    return f"{channel}\n{who}" if who else channel  # no name has a line feed
