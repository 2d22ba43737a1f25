"""How a call of a script is made, whatever the topology: breaker first, then the right server, again where it is safe.

It is safe to send again what the server says it has not done (NOSCRIPT, MOVED, ASK, TRYAGAIN, LOADING, READONLY,
CLUSTERDOWN) and what was never sent. After a lost reply it is not: the script may have run, so the call fails and the
policy answers. A check is spent once at most, never twice.

Everything here is a plan (see `headgate._plan`). `SyncExecutor` and `AsyncExecutor` answer its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import monotonic
from typing import Any, NamedTuple

from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from headgate.redis.breaker import Breaker, probe_intervals
from headgate.redis.script import LimiterCall, Script, ScriptCall, pack
from headgate.redis.topology import ServerCommand, Topology, Unreached, cluster_is_ok, topology
from headgate.redis.url import Address, RedisURL

PAUSE = 0.005  # seconds before a server that said "not now" is asked again

# What counts as no answer: silence, and a Cluster that says it is down although it was asked until the time was over.
NO_REPLY_ERRORS = (ConnectionError, TimeoutError, ClusterDownError, MasterDownError, OSError)


class ScriptRequest(NamedTuple):
    """A request: this call of that script to that server."""

    address: Address
    script: Script
    call: Any  # a `LimiterCall` of a LimiterScript, a `ScriptCall` of a LuaScript
    send_source: bool  # send the script itself: the server does not know it
    asking: bool  # the slot is on its way to this server
    until: float  # monotonic
    strict: bool  # `until` counts also while the request is queued here; else only the server's own time does


Request = ServerCommand | ScriptRequest | float  # a float: sleep that many seconds


class ConnectionsExhausted(Unreached):
    """Every connection was in use for as long as the call had."""


class Executor:
    """One Redis, be it a server, a service behind Sentinels or a Cluster: what threads and event loops share."""

    def __init__(self, url: RedisURL | None, display_name: str, timeout: float) -> None:
        self.timeout = timeout
        self.closed = False
        self._url = url  # None: a client was handed in
        self._display_name = display_name
        self._forget_servers()

    def _forget_servers(self) -> None:
        self._topology = topology(self._url)
        self._breaker = Breaker(self._display_name)
        self._breakers: dict[Address | None, Breaker] = {}  # one for each server, where keys lie at different ones

    def plan(self, script: Script, call: LimiterCall | ScriptCall, limit: float | None) -> Generator[Request, Any, Any]:
        """The reply to *call* within *limit* seconds, or the time-out; raises at once while the breaker is open."""
        topology, slot, breaker = self._topology, 0, self._breaker
        if topology.partitioned:
            slot = script.slot(call.key)
            breaker = self._breaker_of(topology.address(slot))
        if breaker.open:
            self.start_probe(breaker, slot)
            raise Unreached(f"{breaker.server} does not answer: {breaker.last_error}")
        begun = monotonic()
        hasty = limit is not None and limit < self.timeout
        until = begun + (limit if hasty and limit else self.timeout)
        try:
            reply = yield from _attempts(topology, script, call, slot, until, hasty)
        except ConnectionsExhausted:
            raise  # which is not the server's doing
        except NO_REPLY_ERRORS as error:
            if breaker.failed(error, begun, self.timeout if hasty else 0.0):
                self.start_probe(breaker, slot)
            raise
        if breaker.failures:
            breaker.answered()
        return reply

    def breakers(self) -> list[Breaker]:
        return list(self._breakers.values()) if self._topology.partitioned else [self._breaker]

    def start_probe(self, breaker: Breaker, slot: int) -> None:
        """Look for the server of *slot* in the background, unless a probe does so already."""
        raise NotImplementedError

    def _breaker_of(self, address: Address | None) -> Breaker:
        breaker = self._breakers.get(address)
        if breaker is None:
            name = f"{address.host}:{address.port}" if address else self._display_name
            breaker = self._breakers.setdefault(address, Breaker(name))
        return breaker


def _attempts(
    topology: Topology, script: Script, call: LimiterCall | ScriptCall, slot: int, until: float, strict: bool
) -> Generator[Request, Any, Any]:
    """Send *call* until it is answered; raise the last error once it is past *until* (monotonic)."""
    send_source, asked = False, None
    problem: RedisError
    while True:
        address = asked or topology.address(slot) or (yield from topology.discover(slot, until))
        try:
            return (yield ScriptRequest(address, script, call, send_source, asked is not None, until, strict))
        except NoScriptError as error:  # a new server, or its cache was flushed
            if send_source:
                raise
            send_source = strict = True
            problem = error
            continue
        except MovedError as error:  # before AskError, of which it is a subclass
            topology.moved(error.slot_id, Address(error.host or address.host, error.port))
            problem = error
        except AskError as error:
            asked, strict, problem = Address(error.host or address.host, error.port), True, error
            if monotonic() > until:
                raise
            continue
        except TryAgainError as error:
            problem = error
            yield PAUSE
        except (BusyLoadingError, ReadOnlyError, ClusterDownError, MasterDownError, Unreached) as error:
            if not topology.lost(address) or monotonic() + PAUSE > until:
                raise
            problem = error
            yield PAUSE
            yield from topology.discover(slot, until)
        except (RedisError, OSError) as error:
            elsewhere = topology.lost(address)  # for the next call: this one may have been done
            refused = isinstance(error, ResponseError)
            safe = (refused and elsewhere and "read only replica" in str(error)) or (not refused and script.repeatable)
            if not safe or monotonic() + PAUSE > until:
                raise
            problem = ConnectionError(str(error))
            yield PAUSE
        asked, strict = None, True
        if monotonic() > until:
            raise problem


class Probe(NamedTuple):
    """A request: see whether *executor* can ask for *slot* again."""

    executor: Any  # a SyncExecutor or an AsyncExecutor
    slot: int


def probe_until_back(
    executor: Callable[[], Executor | None], breaker: Breaker, slot: int
) -> Generator[float | Probe, None, None]:
    """Probe the server of *slot* until it answers. *executor* is a weak reference: no limiter, no probe."""
    for interval in probe_intervals():
        yield interval if breaker.open else 0.0
        alive = executor()
        if alive is None or alive.closed or not breaker.failures:
            return
        try:
            yield Probe(alive, slot)
        except Exception as error:  # any error: no caller would hear of it
            breaker.give_up(error)
            del alive
        else:
            breaker.answered()
            return


def probe(topology: Topology, slot: int, patience: float, until: float) -> Generator[ServerCommand, Any, None]:
    """Return if *slot* can be asked for in the *patience* seconds that a check has; raise if not."""
    address = yield from topology.discover(slot, until)
    yield ServerCommand(address, pack("PING"), until)  # connects, which may take longer
    begun = monotonic()
    yield ServerCommand(address, pack("EVAL", "return 1", 0), until)  # a server may answer PING and hold scripts up
    if (took := monotonic() - begun) > patience:
        raise TimeoutError(f"it answers, but in {took:.2f} s, and a check has {patience} s")
    if topology.partitioned and not cluster_is_ok((yield ServerCommand(address, pack("CLUSTER", "INFO"), until))):
        raise ClusterDownError("CLUSTERDOWN as the server itself says")


def reply_after_asking() -> Generator[None, Any, Any]:
    """Read the replies of ASKING and of the command behind it; both, so that none is left for the next call."""
    refused = None
    try:
        yield
    except ResponseError as error:
        refused = error
    reply = yield
    if refused:
        raise refused
    return reply
