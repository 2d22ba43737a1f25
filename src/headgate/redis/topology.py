"""Which server to ask: the only one, the one that the Sentinels name, or the one that has the key's slot.

Everything that needs I/O is a plan (see `headgate._plan`) that yields `Send` requests, so threads and event loops
share it. A topology never asks a replica for a decision.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import Any, NamedTuple, Protocol

from redis.exceptions import ConnectionError, RedisError, ResponseError

from headgate.redis.url import Address, RedisURL

REFRESH_EVERY = 0.1  # seconds at least between two looks at the map of a Cluster
SHARE = 0.25  # to ask where to go is a part of a call; a server that is silent must leave time for the others


class Unreached(ConnectionError):
    """No connection could be made: nothing was sent."""


class Send(NamedTuple):
    """A request: this command to that server. The answer is its reply, or its error raised."""

    address: Address
    command: bytes
    share: float = 1.0  # the part of the time that is left which it may take


Plan = Generator[Send, Any, Address]


class Topology(Protocol):
    """What a caller must know of the servers."""

    sliced: bool  # whether keys lie at different servers

    def address(self, slot: int) -> Address | None:
        """Whom to ask for *slot*; None: find out with `discover`."""
        ...

    def servers(self) -> list[Address]:
        """All that may be asked how things are; empty where `discover` is the way to know."""
        ...

    def discover(self, slot: int) -> Plan: ...
    def lost(self, address: Address) -> bool:
        """*address* does not answer, or no longer decides. Whether it is worth asking again where to go."""
        ...

    def moved(self, slot: int, address: Address) -> None: ...


class Single:
    """One server."""

    sliced = False

    def __init__(self, address: Address) -> None:
        self._address = address

    def address(self, slot: int) -> Address:
        return self._address

    def servers(self) -> list[Address]:
        return [self._address]

    def discover(self, slot: int) -> Plan:
        yield from ()
        return self._address

    def lost(self, address: Address) -> bool:
        return False

    def moved(self, slot: int, address: Address) -> None:
        raise ConnectionError(
            f"the server belongs to a Cluster (slot {slot} is at {address.host}): use redis+cluster://"
        )


class Sentinel:
    """The primary of a service, as the Sentinels name it; asked again whenever it is lost."""

    sliced = False

    def __init__(self, target: RedisURL) -> None:
        self._sentinels = list(target.hosts)
        self._service = target.service
        self._primary: Address | None = None

    def address(self, slot: int) -> Address | None:
        return self._primary

    def servers(self) -> list[Address]:
        return []

    def discover(self, slot: int) -> Plan:
        problems = []
        for sentinel in list(self._sentinels):
            try:
                found = yield Send(sentinel, pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service), SHARE)
                if not found:
                    problems.append(f"{sentinel.host}:{sentinel.port} does not know {self._service!r}")
                    continue
                primary = Address(text(found[0]), int(found[1]))
                # a Sentinel that was cut off names the primary of before
                role = yield Send(primary, pack("ROLE"), SHARE)
            except (RedisError, OSError) as error:
                problems.append(f"{sentinel.host}:{sentinel.port}: {error}")
                continue
            if text(role[0]) == "master":
                # the one that knew is asked first; a new list, since other threads may be here too
                self._sentinels = [sentinel, *(other for other in self._sentinels if other != sentinel)]
                self._primary = primary
                return primary
            problems.append(f"{primary.host}:{primary.port} is not the primary any more")
        raise ConnectionError(f"no Sentinel names a primary for {self._service!r}: {'; '.join(problems)}")

    def lost(self, address: Address) -> bool:
        self._primary = None
        return True

    def moved(self, slot: int, address: Address) -> None:
        raise ConnectionError("the server belongs to a Cluster: use redis+cluster://")


class Cluster:
    """A map of 16,384 slots. A server that says MOVED is believed at once; when one is lost the map is read again."""

    sliced = True

    def __init__(self, target: RedisURL) -> None:
        self._seeds = list(target.hosts)
        self._slots: list[Address | None] = [None] * 16384
        self._next_look = 0.0

    def address(self, slot: int) -> Address | None:
        return self._slots[slot]

    def servers(self) -> list[Address]:
        return list(dict.fromkeys([*(address for address in self._slots if address), *self._seeds]))

    def discover(self, slot: int) -> Plan:
        """Read the map, at most ten times a second, from the first server that gives one."""
        known = self._slots[slot]
        if known is not None and monotonic() < self._next_look:
            return known
        self._next_look = monotonic() + REFRESH_EVERY
        problems = []
        others = self.servers()
        for server in [*(a for a in others if a != known), *(a for a in others if a == known)]:
            try:
                ranges = yield Send(server, pack("CLUSTER", "SLOTS"), SHARE)
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
            problems.append(f"nobody has slot {slot}")
        raise ConnectionError(f"no server gives a map of the Cluster: {'; '.join(problems)}")

    def lost(self, address: Address) -> bool:
        return True

    def moved(self, slot: int, address: Address) -> None:
        self._slots[slot] = address
        self._next_look = 0.0


def topology(target: RedisURL) -> Topology:
    """The one for what the URL says."""
    if target.kind == "sentinel":
        return Sentinel(target)
    if target.kind == "cluster":
        return Cluster(target)
    return Single(target.hosts[0])


def pack(*arguments: str | int) -> bytes:
    """A whole command as the Redis protocol writes it."""
    return b"*%d\r\n" % len(arguments) + pack_arguments(*arguments)


def pack_arguments(*arguments: str | int) -> bytes:
    packed = b""
    for argument in arguments:
        encoded = str(argument).encode()
        packed += b"$%d\r\n%b\r\n" % (len(encoded), encoded)
    return packed


def text(reply: Any) -> str:
    """A reply as text, whether the connection decodes or not."""
    if isinstance(reply, ResponseError):
        raise reply
    return reply.decode() if isinstance(reply, bytes) else str(reply or "")


def cluster_is_ok(info: Any) -> bool:
    """Whether a server's CLUSTER INFO says that the Cluster answers."""
    return "cluster_state:ok" in text(info)
