"""What every server that decides is asked: each primary of a Cluster, the primary behind Sentinels, or the only server.

For its figures all servers are asked at the same time, on connections of their own: one that is silent costs its own
figures alone, and neither waits behind checks nor holds them up. The keys of a prefix are removed server by server.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from redis.exceptions import RedisError

from headgate._plan import arun
from headgate.redis.health import info_fields
from headgate.redis.script import pack, slot_of, text
from headgate.redis.topology import ServerCommand, Topology, deciding_servers
from headgate.redis.url import Address

_AT_ONCE = 1000  # keys


@dataclass(frozen=True)
class ServerFigures:
    """What one server says of itself; nothing but *problem* if it did not answer."""

    server: str  # host:port, or the path of a Unix socket
    up: bool
    seconds: float = 0.0  # that the answer took
    info: dict[str, str] = field(default_factory=dict)  # the fields of INFO
    problem: str = ""


def server_name(address: Address) -> str:
    """*address* as a label; an IPv6 address is in brackets."""
    if not address.port:
        return address.host
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"


Answer = Callable[[Any], Awaitable[Any]]  # sends what a plan asks for


async def survey(topology: Topology, answer: Answer, time_limit: float) -> list[ServerFigures]:
    """Ask every server that decides, within *time_limit* seconds: half to find them, half to hear them."""
    servers = await _find(topology, answer, monotonic() + time_limit / 2)
    deadline = monotonic() + time_limit / 2
    return list(await asyncio.gather(*(_ask(server, answer, deadline) for server in servers)))


async def _find(topology: Topology, answer: Answer, deadline: float) -> list[Address]:
    """The servers as they are now; as they were known before where no server can tell."""
    try:
        if topology.has_other_servers:  # a primary may have been replaced that no check has missed yet
            await arun(topology.discover(0, deadline), answer)
        return await arun(deciding_servers(topology, deadline), answer)
    except (RedisError, OSError):
        slots = range(16384 if topology.partitioned else 1)
        return list(dict.fromkeys(found for slot in slots if (found := topology.address(slot)))) or topology.servers()


async def _ask(address: Address, answer: Answer, deadline: float) -> ServerFigures:
    name, begun = server_name(address), monotonic()
    try:
        reply = await answer(ServerCommand(address, pack("INFO"), deadline))
    except (RedisError, OSError) as error:
        return ServerFigures(name, False, problem=f"{type(error).__name__}: {error}".rstrip(": "))
    return ServerFigures(name, True, monotonic() - begun, info_fields(text(reply)))


def unlink_prefix(topology: Topology, prefix: str, timeout: float) -> Generator[ServerCommand, Any, int]:
    """Remove every key that starts with *prefix* and a colon; returns how many. *timeout*: seconds for each command.

    It is not one atomic step: a key that is written meanwhile may stay. It takes the keys of a server a thousand at a
    time, so that the server answers other clients in between.
    """
    pattern = re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + ":*"
    yield from topology.discover(0, monotonic() + timeout)
    count = 0
    for server in (yield from deciding_servers(topology, monotonic() + timeout)):
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


def _by_slot(topology: Topology, names: list[str]) -> list[list[str]]:
    """*names* in groups that one command may name."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name in names:
        groups[slot_of(name) if topology.partitioned else 0].append(name)
    return list(groups.values())
