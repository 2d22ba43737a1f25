"""Which server to ask: the only one, the primary that the Sentinels name, or the one that has the key's slot.

Everything that needs I/O is a plan (see `headgate._plan`) that yields `ServerCommand` requests, so threads and event
loops share it. A topology never asks a replica for a decision.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Any, NamedTuple, Protocol

from redis.exceptions import ConnectionError, ReadOnlyError, RedisError

from headgate.redis.script import pack, text
from headgate.redis.url import Address, RedisURL

REFRESH_EVERY = 0.1  # seconds at least between two reads of a Cluster's map
SHARE = 0.25  # part of a call's time that one question about the way may take: a silent server leaves time for others


class Unreached(ConnectionError):
    """No connection could be made: nothing was sent."""


class ServerCommand(NamedTuple):
    """A request: send this command to that server. The answer is its reply, or its error raised."""

    address: Address
    command: bytes
    deadline: float  # monotonic time by which the reply must be there


Plan = Generator[ServerCommand, Any, Address]


class Topology(Protocol):
    """What a caller must know of the servers."""

    readiness: bytes = b""  # the command of a probe, where it is not that of Redis

    partitioned: bool  # whether keys lie at different servers
    has_other_servers: bool  # whether `discover` may find another server for a slot whose server is lost

    def address(self, slot: int) -> Address | None:
        """The server that decides for *slot*; None: unknown, find it with `discover`."""
        ...

    def servers(self) -> list[Address]:
        """The servers that a health check may ask; empty where `discover` has to find one."""
        ...

    def discover(self, slot: int, deadline: float) -> Plan:
        """Find the server that decides for *slot*, by the deadline."""
        ...

    def mark_lost(self, address: Address) -> None:
        """Note that *address* does not answer, or no longer decides."""
        ...

    def mark_stale(self) -> None:
        """Note that what is known may be old: the next `discover` asks, however lately another did."""
        ...

    def moved(self, slot: int, address: Address) -> None:
        """Note that *slot* is at *address* now, as a server has said."""
        ...


class Single:
    """One server."""

    partitioned = False
    has_other_servers = False

    def __init__(self, address: Address, readiness: bytes = b"") -> None:
        self._address = address
        self.readiness = readiness

    def address(self, slot: int) -> Address:
        return self._address

    def servers(self) -> list[Address]:
        return [self._address]

    def discover(self, slot: int, deadline: float) -> Plan:
        yield from ()
        return self._address

    def mark_lost(self, address: Address) -> None:
        """There is no other server to ask."""

    def mark_stale(self) -> None:
        """There is nothing to ask for."""

    def moved(self, slot: int, address: Address) -> None:
        raise ConnectionError(
            f"the server belongs to a Cluster (slot {slot} is at {address.host}): use redis+cluster://"
        )


class Sentinel(Topology):
    """The primary of a service, as the Sentinels name it; they are asked again whenever it is lost."""

    partitioned = False
    has_other_servers = True

    def __init__(self, url: RedisURL) -> None:
        self._sentinels = list(url.hosts)
        self._service = url.service
        self._primary: Address | None = None

    def address(self, slot: int) -> Address | None:
        return self._primary

    def servers(self) -> list[Address]:
        return []

    def discover(self, slot: int, deadline: float) -> Plan:
        which = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        problems = []
        for sentinel in list(self._sentinels):
            try:
                found = yield ServerCommand(sentinel, which, _share_of(deadline))
                if not found:
                    problems.append(f"{sentinel.host}:{sentinel.port} does not know {self._service!r}")
                    continue
                primary = Address(text(found[0]), int(found[1]))
                # a Sentinel that was cut off still names the former primary
                role = yield ServerCommand(primary, pack("ROLE"), _share_of(deadline))
            except (RedisError, OSError) as error:
                problems.append(f"{sentinel.host}:{sentinel.port}: {error}")
                continue
            if text(role[0]) == "master":
                # the Sentinel that knew is asked first next time; a new list, since other threads may iterate over it
                self._sentinels = [sentinel, *(other for other in self._sentinels if other != sentinel)]
                self._primary = primary
                return primary
            problems.append(f"{primary.host}:{primary.port} is not the primary any more")
        raise ConnectionError(f"no Sentinel names a primary for {self._service!r}: {'; '.join(problems)}")

    def mark_lost(self, address: Address) -> None:
        self._primary = None

    def mark_stale(self) -> None:
        """`discover` asks each time."""

    def moved(self, slot: int, address: Address) -> None:
        raise ConnectionError("the server belongs to a Cluster: use redis+cluster://")


class Cluster(Topology):
    """A map of 16,384 slots. MOVED of a server is believed at once; when a server is lost the map is read again."""

    partitioned = True
    has_other_servers = True

    def __init__(self, url: RedisURL) -> None:
        self._seeds = list(url.hosts)
        self._slots: list[Address | None] = [None] * 16384
        self._read_again_at = 0.0

    def address(self, slot: int) -> Address | None:
        return self._slots[slot]

    def servers(self) -> list[Address]:
        return list(dict.fromkeys([*(address for address in self._slots if address), *self._seeds]))

    def discover(self, slot: int, deadline: float) -> Plan:
        """Read the map, at most ten times a second, from the first server that has one."""
        known = self._slots[slot]
        if known is not None and monotonic() < self._read_again_at:
            return known
        self._read_again_at = monotonic() + REFRESH_EVERY
        problems = []
        others = self.servers()
        for server in [*(a for a in others if a != known), *(a for a in others if a == known)]:
            try:
                ranges = yield ServerCommand(server, pack("CLUSTER", "SLOTS"), _share_of(deadline))
            except (RedisError, OSError) as error:
                problems.append(f"{server.host}:{server.port}: {error}")
                continue
            slots: list[Address | None] = [None] * 16384
            for first, last, primary, *_ in ranges:
                address = Address(text(primary[0]) or server.host, int(primary[1]))
                slots[first : last + 1] = [address] * (last - first + 1)
            self._slots = slots
            found = slots[slot]
            if found is not None:
                return found
            problems.append(f"no server has slot {slot}")
        raise ConnectionError(f"no server gives a map of the Cluster: {'; '.join(problems)}")

    def mark_lost(self, address: Address) -> None:
        """The map stays: `discover` reads it again, before a retry, or after time-outs in a probe (see `health.py`)."""

    def mark_stale(self) -> None:
        self._read_again_at = 0.0

    def moved(self, slot: int, address: Address) -> None:
        self._slots[slot] = address
        self._read_again_at = 0.0


def topology(url: RedisURL | None) -> Topology:
    """The topology that a URL names; None: a client that was handed in, which knows its own server."""
    if url is None:
        return Single(Address("", 0))
    if url.kind == "sentinel":
        return Sentinel(url)
    if url.kind == "cluster":
        return Cluster(url)
    return Single(url.hosts[0], url.readiness)


def deciding_servers(topology: Topology, deadline: float) -> Generator[ServerCommand, Any, list[Address]]:
    """The servers that decide now: the only one, the primary of a service, or all primaries of a Cluster."""
    first = topology.address(0)
    if first is None:
        first = yield from topology.discover(0, deadline)
    if not topology.partitioned:
        return [first]
    return list(dict.fromkeys(address for slot in range(16384) if (address := topology.address(slot))))


def _share_of(deadline: float) -> float:
    now = monotonic()
    return now + (deadline - now) * SHARE


def check_role(reply: Any) -> None:
    """Refuse a server that is no primary: one that was demoted cuts its clients off, and does not say why."""
    if text(reply[0]) != "master":
        raise ReadOnlyError("READONLY it is not the primary any more")


def cluster_is_ok(info: Any) -> bool:
    """Whether a server's CLUSTER INFO says that the Cluster answers."""
    return "cluster_state:ok" in text(info)
