"""Redis from threads: the connections to each server, and the executor that makes calls on them."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import MaxConnectionsError, ReadOnlyError, RedisError
from redis.retry import Retry

from headgate._lifecycle import renew_after_fork
from headgate._plan import run
from headgate.redis.execute import (
    NO_REPLY_ERRORS,
    ConnectionsExhausted,
    Executor,
    Request,
    ScriptRequest,
)
from headgate.redis.health import examine, probe
from headgate.redis.script import LuaScript, Script, ScriptCall, pack
from headgate.redis.shared_trips import SharedTrips, exchange
from headgate.redis.topology import ServerCommand, Unreached, check_role, deciding_servers
from headgate.redis.url import Address, RedisURL
from headgate.stores.base import Health
from headgate.stores.breaker import Breaker, note_connected_at
from headgate.stores.connections import NEVER, ThreadConnections
from headgate.stores.probe import PROBE_TIMEOUT, start_in_thread
from headgate.stores.remote import LimiterCall

T = TypeVar("T")

MAX_IDLE = 0.05  # seconds after which an idle connection is checked before use: the server may have closed it
MIN_TIMEOUT = 0.001  # seconds: a socket time-out of 0 would mean not to wait at all


class ServerConnections(ThreadConnections):
    """The connections to one server. The connection used last is used next; a caller that finds none free waits.

    redis-py's own pool polls the socket and counts on every loan, a quarter of the time of a check on a near server.
    The pool of a client that was handed in is used as it is.
    """

    exhausted = ConnectionsExhausted

    def __init__(self, source: RedisURL | redis.ConnectionPool, address: Address) -> None:
        self._source = source
        self._address = address
        super().__init__()
        # closes them when this object is gone, before a garbage collection finds open sockets, which would warn
        weakref.finalize(self, _disconnect, self._idle).atexit = False

    def acquire(self, deadline: float, max_idle: float = MAX_IDLE) -> Any:
        """A connected connection, whose reads and writes end by *deadline*. Raises `Unreached` if there is none.

        A connection that was idle for longer than *max_idle* seconds is checked first.
        """
        if not isinstance(self._source, RedisURL):
            return self._from_client(self._source, deadline)
        try:
            connection, used_at = self._idle.pop()
        except IndexError:
            connection, used_at = self._wait(deadline)
        now = monotonic()
        if now - used_at > max_idle or used_at <= self._last_broken:
            try:
                self._connect(connection, deadline - now)
            except BaseException as error:
                self.release(connection, clean=False)
                if isinstance(error, ReadOnlyError):
                    raise
                if isinstance(error, RedisError | OSError | ValueError):  # a host name can be wrong in many ways
                    raise Unreached(f"{self._address.host}:{self._address.port}: {error}") from error
                raise
            now = monotonic()
        left = deadline - now
        connection._sock.settimeout(left if left > MIN_TIMEOUT else MIN_TIMEOUT)
        return connection

    def release(self, connection: Any, *, clean: bool) -> None:
        """Take *connection* back. One that is not *clean* may still get a reply, which the next caller would read."""
        if not clean:
            connection.disconnect()
            self._last_broken = monotonic()  # the others may have broken with it
        if not isinstance(self._source, RedisURL):
            if connection._sock is not None:
                connection._sock.settimeout(connection.socket_timeout)
            self._source.release(connection)
            return
        self._idle.append((connection, monotonic() if clean else NEVER))
        if self._waiting:
            self._wake_first()

    def on_connection(
        self, deadline: float, exchange: Callable[[Any, T], Any], what: T, max_idle: float = MAX_IDLE
    ) -> Any:
        """What ``exchange(connection, what)`` returns, which sends and reads every reply to what it sent."""
        connection = self.acquire(deadline, max_idle)
        clean = False
        try:
            reply = exchange(connection, what)
            clean = True
            return reply
        except redis.ResponseError:
            clean = True  # an error is a reply too, and it was read to its end
            raise
        except NO_REPLY_ERRORS as error:
            note_connected_at(connection, error)
            raise
        finally:
            self.release(connection, clean=clean)  # whatever happened, a signal included

    def close(self) -> None:
        for connection in _disconnect(self._idle):
            self._all.discard(connection)

    def _make(self) -> Any:
        """A new connection, not connected yet; None if there are as many as there may be."""
        url = self._source
        assert isinstance(url, RedisURL)
        with self._making:
            if len(self._all) >= url.max_connections:
                return None
            options = url.connection_options(self._address)
            made = url.connection(**options, socket_timeout=url.timeout, retry=Retry(NoBackoff(), 0))
            self._all.add(made)
            return made

    def _from_client(self, pool: redis.ConnectionPool, deadline: float) -> Any:
        """A connection of a client's pool. It connects by the client's time-outs; a call on it ends by *deadline*."""
        try:
            connection: Any = pool.get_connection()
        except MaxConnectionsError as error:
            raise ConnectionsExhausted(str(error)) from error
        left = max(deadline - monotonic(), MIN_TIMEOUT)
        if connection._sock is not None and left < (connection.socket_timeout or math.inf):
            connection._sock.settimeout(left)
        return connection

    def _connect(self, connection: Any, left: float) -> None:
        """Connect, or connect again if it is readable while idle, which means that the server closed it."""
        if connection._sock is not None:
            try:
                if not connection.can_read():
                    return
            except (RedisError, OSError):
                pass
            connection.disconnect()
        url = self._source
        assert isinstance(url, RedisURL)
        # where there are other servers to ask, one that cannot be reached must leave time for them
        left = max(left if url.kind == "single" else left / 2, MIN_TIMEOUT)
        connection.socket_connect_timeout = min(url.connect_timeout, left)
        connection.socket_timeout = left
        connection.connected_at = monotonic()
        connection.connect()
        if url.kind == "sentinel" and not self._address.sentinel:
            connection.send_packed_command([pack("ROLE")], check_health=False)
            check_role(connection.read_response())


def _disconnect(idle: deque[tuple[Any, float]]) -> list[Any]:
    closed: list[Any] = []
    while True:
        try:
            connection, _ = idle.pop()  # not after a look at the length: another thread may take the last one
        except IndexError:
            return closed
        connection.disconnect()
        closed.append(connection)


class SyncExecutor(Executor):
    """Makes calls from threads. Safe after a fork: the child starts without connections."""

    def __init__(self, source: RedisURL | redis.ConnectionPool, display_name: str) -> None:
        self._source = source
        url = source if isinstance(source, RedisURL) else None
        super().__init__(url, display_name, url.timeout if url else 1.0)  # a client has time-outs of its own
        self._servers: dict[Address, SharedTrips] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Forget the connections, which are the parent's."""
        self._forget_servers()
        self._servers = {}
        self.closed = False

    def execute(self, script: Script, call: LimiterCall | ScriptCall, time_limit: float | None = None) -> Any:
        """The reply to *call*; raises at once while the breaker is open. *time_limit*: None for the time-out."""
        return run(self.plan(script, call, time_limit), self.answer)

    def examine(self, time_limit: float, check_timeout: float) -> Health:
        """Check the server's health within *time_limit* seconds, past the breaker."""
        return run(examine(self._topology, check_timeout, monotonic() + time_limit), self.answer)

    def connections(self) -> list[ServerConnections]:
        return [trips.connections for trips in list(self._servers.values())]

    def warm_up(self, count: int) -> None:
        """Open *count* connections to each server that decides, within the time-out."""
        deadline = monotonic() + self.timeout
        for address in run(deciding_servers(self._topology, deadline), self.answer):
            self._trips(address).connections.warm_up(count, deadline)

    def close(self) -> None:
        self.closed = True
        for breaker in self.breakers():
            breaker.leave()
        for connections in self.connections():
            connections.close()

    def answer(self, request: Request) -> Any:
        """Do what a plan (see `headgate._plan`) requests: sleep, or send a command and read its reply."""
        if isinstance(request, float):
            time.sleep(request)
            return None
        trips = self._servers.get(request.address)
        if trips is None:
            trips = self._trips(request.address)
        # coordination's scripts check every connection: a stray reply read as theirs would give one lock to two owners
        careful = isinstance(request, ScriptRequest) and isinstance(request.script, LuaScript)
        if careful or isinstance(request, ServerCommand) or request.counts_queue_time:  # alone, in a time of its own
            return trips.connections.on_connection(request.deadline, exchange, request, 0.0 if careful else MAX_IDLE)
        return trips.send(request)

    def _trips(self, address: Address) -> SharedTrips:
        """What shares the trips to *address*, made when it is first needed."""
        trips = self._servers.get(address)
        if trips is None:
            made = SharedTrips(ServerConnections(self._source, address), self._topology.partitioned)
            trips = self._servers.setdefault(address, made)
        return trips

    def start_probe(self, breaker: Breaker, slot: int) -> None:
        start_in_thread(self, breaker, slot)

    def probe(self, slot: int) -> None:
        """Raise if the server of *slot* does not answer as a check needs it."""
        deadline = monotonic() + max(self.timeout, PROBE_TIMEOUT)
        run(probe(self._topology, slot, self.timeout, deadline), self.answer)
