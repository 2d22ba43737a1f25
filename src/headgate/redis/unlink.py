"""Remove all keys of a prefix, on whatever topology: a plan (see `headgate._plan`) of SCAN and UNLINK.

It is not one atomic step: a key that is written meanwhile may stay. It takes the keys of a server a thousand at a time,
so that the server answers other clients in between.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator
from time import monotonic
from typing import Any

from headgate.redis.script import pack, slot_of, text
from headgate.redis.topology import ServerCommand, Topology
from headgate.redis.url import Address

_AT_ONCE = 1000
_SLOTS = 16384


def unlink_prefix(topology: Topology, prefix: str, timeout: float) -> Generator[ServerCommand, Any, int]:
    """Remove every key that starts with *prefix* and a colon; returns how many. *timeout*: seconds for each command."""
    pattern = re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + ":*"
    found = yield from topology.discover(0, monotonic() + timeout)
    count = 0
    for server in _primaries(topology, found):
        cursor = "0"
        while True:
            scan = pack("SCAN", cursor, "MATCH", pattern, "COUNT", _AT_ONCE)
            reply = yield ServerCommand(server, scan, monotonic() + timeout)
            cursor = text(reply[0])
            for names in _by_slot(topology, [text(name) for name in reply[1]]):
                count += int((yield ServerCommand(server, pack("UNLINK", *names), monotonic() + timeout)))
            if cursor == "0":
                break
    return count


def _primaries(topology: Topology, first: Address) -> list[Address]:
    if not topology.partitioned:
        return [first]
    known = (topology.address(slot) for slot in range(_SLOTS))
    return list(dict.fromkeys(address for address in known if address))


def _by_slot(topology: Topology, names: list[str]) -> list[list[str]]:
    """*names* in groups that one command may name."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name in names:
        groups[slot_of(name) if topology.partitioned else 0].append(name)
    return list(groups.values())
