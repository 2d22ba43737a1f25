"""How a call of a script is made, whatever the topology: breaker first, then the right server, again where it is safe.

It is safe to send again what the server says it has not done (NOSCRIPT, MOVED, ASK, TRYAGAIN, LOADING, READONLY,
CLUSTERDOWN) and what was never sent; `RetryPolicy` says how often. After a lost reply only scripts marked `repeatable`
are sent again. A limiter's script is not, because it may have run: the call fails and the policy answers. A check is
spent once at most.

Everything here is a plan (see `headgate._plan`). `SyncExecutor` and `AsyncExecutor` answer its requests.

Words for time, in this package:

    timeout        seconds that a call may take, a setting of the store
    time_limit     seconds that a caller gives one call; where it is less than the time-out, the call is *shortened*
    deadline       when a call must have ended, on the monotonic clock
    check_timeout  the time-out of a limiter's check, for a probe or a health check, which has more time itself
"""

from __future__ import annotations

import builtins
from collections.abc import Generator, Sequence
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

from headgate.redis.script import Script
from headgate.redis.servers import unlink_prefix
from headgate.redis.topology import ServerCommand, Topology, Unreached, topology
from headgate.redis.url import RETRY_PAUSE, Address, RedisURL
from headgate.stores.breaker import Breaker
from headgate.telemetry.tally import StoreCalls
from headgate.telemetry.watching import Watched

# What counts as no answer: silence, and a Cluster that still says at the deadline that it is down.
NO_REPLY_ERRORS = (ConnectionError, TimeoutError, ClusterDownError, MasterDownError, OSError)
TIMEOUTS = (builtins.TimeoutError, TimeoutError)


class ScriptRequest(NamedTuple):
    """A request: this call of that script to that server."""

    address: Address
    script: Script
    call: Any  # a `LimiterCall` of a LimiterScript, a `ScriptCall` of a LuaScript, a `JointCall` of a JointScript
    send_source: bool  # send the script itself: the server does not know it
    asking: bool  # the slot is on its way to this server
    deadline: float
    counts_queue_time: bool  # True: time in the queue of a batch counts towards the deadline


Request = ServerCommand | ScriptRequest | float  # a float: sleep that many seconds


class RetryPolicy(NamedTuple):
    """How often a call is sent again where that is safe, always within its deadline. Redirections are no retries.

    most None: as often as the deadline allows where another server may answer (Sentinel, Cluster); a single server that
    cannot be reached is not asked again. Any number holds for all topologies.
    """

    most: int | None = None
    pause: float = RETRY_PAUSE  # seconds before each


class ConnectionsExhausted(Unreached):
    """Every connection was in use for as long as the call had."""


class Executor:
    """One Redis, be it a server, a service behind Sentinels or a Cluster: what threads and event loops share."""

    def __init__(self, url: RedisURL | None, display_name: str, timeout: float) -> None:
        self.timeout = timeout
        self.closed = False
        self._url = url  # None: a client was handed in
        self._display_name = display_name
        self._retry = RetryPolicy(url.retries, url.retry_pause) if url else RetryPolicy()
        self.calls = StoreCalls()
        self.watched: Watched | None = None
        self._forget_servers()

    def _forget_servers(self) -> None:
        self._topology = topology(self._url)
        self._breaker = Breaker(self._display_name, TIMEOUTS, self.calls.open)
        self._breakers: dict[Address | None, Breaker] = {}  # one for each server, where keys lie at different ones

    def plan(self, script: Script, call: Any, time_limit: float | None) -> Generator[Request, Any, Any]:
        """The reply to *call*; raises at once while the breaker is open. *time_limit*: None for the time-out."""
        topology, slot, breaker = self._topology, 0, self._breaker
        if topology.partitioned:
            slot = script.slot(call.key)
            breaker = self._breaker_of(topology.address(slot))
        calls = self.calls
        if breaker.open:
            calls.skip()
            self.start_probe(breaker, slot)
            raise Unreached(f"{breaker.server} does not answer: {breaker.last_error}")
        begun = monotonic()
        seconds = self.timeout if time_limit is None else min(time_limit, self.timeout)
        shortened = seconds < self.timeout
        try:
            reply = yield from _attempts(topology, script, call, slot, begun + seconds, shortened, self._retry)
        except ConnectionsExhausted:
            calls.fail(begun)
            raise  # the server did not fail
        except NO_REPLY_ERRORS as error:
            calls.fail(begun)
            if breaker.failed(error, begun, self.timeout if shortened else 0.0):
                self.start_probe(breaker, slot)
            raise
        except RedisError:
            calls.fail(begun, refused=True)
            raise
        calls.answer(begun)
        if breaker.failures:
            breaker.answered()
        return reply

    def unlink(self, prefix: str) -> Generator[Request, Any, int]:
        """Remove every key that starts with *prefix* and a colon; returns how many. Past the breaker, not atomic."""
        return unlink_prefix(self._topology, prefix, self.timeout)

    def server_of(self, slot: int) -> Address | None:
        """The server that decides about the keys of *slot*; None as long as no call has found it."""
        return self._topology.address(slot)

    def breakers(self) -> list[Breaker]:
        return list(self._breakers.values()) if self._topology.partitioned else [self._breaker]

    def connection_counts(self) -> dict[str, int]:
        """Connections in use and idle, and callers that wait for one."""
        servers = self.connections()
        return {
            "in_use": sum(server.in_use() for server in servers),
            "idle": sum(server.idle() for server in servers),
            "waiting": sum(server.waiting for server in servers),
        }

    def connections(self) -> Sequence[Any]:
        """The connections of each server."""
        raise NotImplementedError

    def start_probe(self, breaker: Breaker, slot: int) -> None:
        """Look for the server of *slot* in the background, unless a probe does so already."""
        raise NotImplementedError

    def _breaker_of(self, address: Address | None) -> Breaker:
        breaker = self._breakers.get(address)
        if breaker is None:
            name = f"{address.host}:{address.port}" if address else self._display_name
            breaker = self._breakers.setdefault(address, Breaker(name, TIMEOUTS, self.calls.open))
        return breaker


def _attempts(
    topology: Topology,
    script: Script,
    call: Any,
    slot: int,
    deadline: float,
    counts_queue_time: bool,
    retry: RetryPolicy,
) -> Generator[Request, Any, Any]:
    """Send *call* until it is answered; raise the last error once the deadline or the policy ends the retries."""
    send_source, redirect, failed = False, None, 0
    problem: RedisError
    while True:
        address = redirect or topology.address(slot) or (yield from topology.discover(slot, deadline))
        try:
            asking = redirect is not None
            return (yield ScriptRequest(address, script, call, send_source, asking, deadline, counts_queue_time))
        except NoScriptError as error:  # a new server, or its cache was flushed
            if send_source:
                raise
            send_source = counts_queue_time = True
            problem = error
            continue
        except MovedError as error:  # before AskError, of which it is a subclass
            topology.moved(error.slot_id, Address(error.host or address.host, error.port))
            problem = error
        except AskError as error:
            redirect, counts_queue_time, problem = Address(error.host or address.host, error.port), True, error
            if monotonic() > deadline:
                raise
            continue
        except TryAgainError as error:
            failed += 1
            if not may_retry(retry, failed, True):
                raise
            problem = error
            yield retry.pause
        except (BusyLoadingError, ReadOnlyError, ClusterDownError, MasterDownError, Unreached) as error:
            topology.mark_lost(address)
            failed += 1
            if not may_retry(retry, failed, topology.has_other_servers) or monotonic() + retry.pause > deadline:
                raise
            problem = error
            yield retry.pause
            yield from topology.discover(slot, deadline)
        except (RedisError, OSError) as error:
            topology.mark_lost(address)  # behind Sentinels the next call looks for it, in a Cluster a probe
            if isinstance(error, ResponseError):
                may_repeat = topology.has_other_servers and "read only replica" in str(error)
            else:
                may_repeat = script.repeatable
            failed += 1
            if not may_repeat or not may_retry(retry, failed, True) or monotonic() + retry.pause > deadline:
                raise
            problem = ConnectionError(str(error))
            yield retry.pause
        redirect, counts_queue_time = None, True
        if monotonic() > deadline:
            raise problem


def may_retry(retry: RetryPolicy, failed: int, by_default: bool) -> bool:
    """Whether a call that was not answered *failed* times may be sent again; *by_default* if no number was set."""
    return by_default if retry.most is None else failed <= retry.most


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
