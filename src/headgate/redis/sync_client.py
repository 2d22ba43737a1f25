"""Asking Redis from threads."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from functools import partial
from time import monotonic
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import MaxConnectionsError, ReadOnlyError, RedisError
from redis.retry import Retry

from headgate._lifecycle import renew_after_fork
from headgate._plan import run
from headgate._waiters import SignalSafeEvent
from headgate.redis.breaker import PROBE_TIMEOUT, Breaker, Breakers, broke, pauses
from headgate.redis.execute import NO_REPLY_ERRORS, Request, ScriptRequest, execute, probe
from headgate.redis.health import examine
from headgate.redis.lua import Eval, Lua
from headgate.redis.script import Call, Script
from headgate.redis.topology import Send, Single, Unreached, pack, text, topology
from headgate.redis.url import Address, RedisURL
from headgate.stores.base import Health

# A connection that idled longer than this is looked at before it is used: the server may have closed it.
IDLE = 0.05  # seconds
LONG_AGO = -math.inf
LOOK = 0.1  # seconds after which whoever waits looks around: a signal may have lost a connection, or a word about it
MOMENT = 0.001  # a time-out of 0 would mean: do not wait at all, and one below: a mistake


class PoolExhausted(Unreached):
    """Every connection was in use for as long as a call may take."""


class Connections:
    """Connections to one server: the one used last is used next, at most *limit*, and who finds none waits for one.

    redis-py's own pool polls the socket and counts on every loan, a quarter of the time of a check on a near server.
    Somebody's own pool is used as it is.
    """

    def __init__(self, target: RedisURL | redis.ConnectionPool, address: Address) -> None:
        self._target = target
        self._address = address
        self._idle: deque[tuple[Any, float]] = deque()
        self._all: weakref.WeakSet[Any] = weakref.WeakSet()  # one that an interrupt lost is none any more
        self._making = threading.RLock()  # a signal handler may want one too
        self._waiting: OrderedDict[SignalSafeEvent, None] = OrderedDict()
        self._broke_at = LONG_AGO
        # of one that nobody has any more, before a garbage collection finds the sockets, which would complain
        weakref.finalize(self, _disconnect, self._idle).atexit = False

    def borrow(self, until: float, unseen: float = IDLE) -> Any:
        """A connection, connected; what is done with it takes no longer than *until*. Raises `Unreached` if none is.

        One that idled for *unseen* seconds is looked at first.
        """
        if not isinstance(self._target, RedisURL):
            return self._lend(self._target, until)
        try:
            connection, since = self._idle.pop()
        except IndexError:
            connection, since = self._another(until)
        now = monotonic()
        if now - since > unseen or since <= self._broke_at:
            try:
                self._connect(connection, until - now)
            except BaseException as error:
                self.give_back(connection, clean=False)
                if isinstance(error, ReadOnlyError):
                    raise
                if isinstance(error, RedisError | OSError | ValueError):  # a host name can be wrong in many ways
                    raise Unreached(f"{self._address.host}:{self._address.port}: {error}") from error
                raise
            now = monotonic()
        connection._sock.settimeout(max(until - now, MOMENT))
        return connection

    def give_back(self, connection: Any, *, clean: bool) -> None:
        """Take it back; one that is not *clean* may still get a reply, which would be the next caller's."""
        if not clean:
            connection.disconnect()
            self._broke_at = monotonic()  # the others may have broken with it
        if not isinstance(self._target, RedisURL):
            if connection._sock is not None:
                connection._sock.settimeout(connection.socket_timeout)
            self._target.release(connection)
            return
        self._idle.append((connection, monotonic() if clean else LONG_AGO))
        if self._waiting:
            self._wake()

    def close(self) -> None:
        for connection in _disconnect(self._idle):
            self._all.discard(connection)

    def in_use(self) -> int:
        return len(self._all) - len(self._idle)

    def idle(self) -> int:
        return len(self._idle)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _another(self, until: float) -> tuple[Any, float]:
        """Wait for one, without a lock that a signal could leave held. Whoever wakes us takes us off the list."""
        bell = SignalSafeEvent()
        try:
            while True:
                bell.clear()
                self._waiting[bell] = None  # before the look: who gives one back after it must know that somebody waits
                try:
                    return self._idle.pop()
                except IndexError:
                    pass
                if made := self._make():
                    return made, LONG_AGO
                left = until - monotonic()
                if left <= 0:
                    raise PoolExhausted(f"all {len(self._all)} connections are in use: raise max_connections")
                bell.wait(min(left, LOOK))
        finally:
            self._waiting.pop(bell, None)
            if self._idle:
                self._wake()  # we may have been woken, and leave it

    def _wake(self) -> None:
        """Let the one who has waited longest look."""
        try:
            bell, _ = self._waiting.popitem(last=False)
        except KeyError:
            return
        bell.set()

    def _make(self) -> Any:
        """A new one, if there may be more."""
        target = self._target
        assert isinstance(target, RedisURL)
        with self._making:
            if len(self._all) >= target.max_connections:
                return None
            options = target.connection_options(self._address)
            made = target.connection(**options, socket_timeout=target.timeout, retry=Retry(NoBackoff(), 0))
            self._all.add(made)
            return made

    def _lend(self, pool: redis.ConnectionPool, until: float) -> Any:
        """One of somebody's own pool. It connects in its own time; what is asked on it has ours, if that is less."""
        try:
            connection: Any = pool.get_connection()
        except MaxConnectionsError as error:
            raise PoolExhausted(str(error)) from error
        left = max(until - monotonic(), MOMENT)
        if connection._sock is not None and left < (connection.socket_timeout or math.inf):
            connection._sock.settimeout(left)
        return connection

    def _connect(self, connection: Any, left: float) -> None:
        """Connect, or again if the server has closed it: nothing was asked, so nothing may be there to read."""
        if connection._sock is not None:
            try:
                if not connection.can_read():
                    return
            except (RedisError, OSError):
                pass
            connection.disconnect()
        target = self._target
        assert isinstance(target, RedisURL)
        # where there are other servers to ask, one that cannot be reached must leave time for them
        left = max(left if target.kind == "single" else left / 2, MOMENT)
        connection.socket_connect_timeout = min(target.connect_timeout, left)
        connection.socket_timeout = left
        connection.since = monotonic()
        connection.connect()
        if target.kind == "sentinel" and not self._address.sentinel:
            # a primary that was demoted cuts its clients off: the address is right no longer, and it would not say so
            connection.send_packed_command([pack("ROLE")], check_health=False)
            if text(connection.read_response()[0]) != "master":
                raise ReadOnlyError("READONLY it is not the primary any more")


def _disconnect(idle: deque[tuple[Any, float]]) -> list[Any]:
    gone = []
    while idle:
        connection, _ = idle.pop()
        connection.disconnect()
        gone.append(connection)
    return gone


def read_both(connection: Any) -> Any:
    """The reply to what came behind ASKING. Both are read whatever they are, so that none is left for the next call."""
    refused = None
    try:
        connection.read_response()
    except redis.ResponseError as error:
        refused = error
    reply = connection.read_response()
    if refused:
        raise refused
    return reply


class SyncExecutor:
    """A Redis, single, behind Sentinels or a Cluster, for threads. Safe after a fork: the child starts anew."""

    def __init__(self, source: RedisURL | redis.ConnectionPool, shown: str) -> None:
        self._source = source
        self._shown = shown
        self.timeout = source.timeout if isinstance(source, RedisURL) else 1.0  # a client's own time-outs count then
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Know nothing yet: the connections of a parent are the parent's."""
        source = self._source
        self._topology = topology(source) if isinstance(source, RedisURL) else Single(Address("", 0))
        self._nodes: dict[Address, Connections] = {}
        self._breakers = Breakers(self._shown, self._topology.sliced)
        self.closed = False

    def ask(self, script: Script | Lua, call: Call | Eval, within: float | None = None) -> Any:
        """The reply to *call*, *within* seconds or the time-out; raises at once while the breaker is open."""
        slot = script.slot(call.key) if self._topology.sliced else 0
        breaker = self._breakers.of(self._topology.address(slot))
        if breaker.open:
            self._probe_later(breaker, slot)
            raise Unreached(f"{breaker.who} does not answer: {breaker.last_error}")
        begun = monotonic()
        hasty = within is not None and within < self.timeout
        until = begun + (within if hasty and within else self.timeout)
        try:
            reply = run(execute(self._topology, script, call, until), partial(self._answer, until))
        except PoolExhausted:
            raise  # that is nothing the server did
        except NO_REPLY_ERRORS as error:
            if breaker.failed(error, begun, self.timeout if hasty else 0.0):
                self._probe_later(breaker, slot)
            raise
        if breaker.failures:
            breaker.answered()
        return reply

    def examine(self, within: float, patience: float) -> Health:
        """Look at the server, *within* seconds; not through the breaker. A check has *patience* seconds."""
        return run(examine(self._topology, patience), partial(self._answer, monotonic() + within))

    def breakers(self) -> list[Breaker]:
        return self._breakers.all()

    def connections(self) -> list[Connections]:
        return list(self._nodes.values())

    def close(self) -> None:
        self.closed = True
        for connections in list(self._nodes.values()):
            connections.close()

    def _answer(self, until: float, request: Request) -> Any:
        if isinstance(request, float):
            time.sleep(request)
            return None
        if isinstance(request, Send) and request.share < 1:
            now = monotonic()
            until = now + (until - now) * request.share
        connections = self._nodes.get(request.address)
        if connections is None:
            connections = self._nodes.setdefault(request.address, Connections(self._source, request.address))
        # a reply that came twice would be the next caller's: a lock that two have is worse than a look at the socket
        careful = isinstance(request, ScriptRequest) and isinstance(request.script, Lua)
        connection = connections.borrow(until, 0.0 if careful else IDLE)
        clean = False
        try:
            if isinstance(request, Send):
                connection.send_packed_command([request.command], check_health=False)
            else:
                command = request.script.call([request.call], request.send_source)
                if request.asking:
                    connection.send_packed_command([pack("ASKING") + command], check_health=False)
                    reply = read_both(connection)
                    clean = True
                    return reply
                connection.send_packed_command([command], check_health=False)
            reply = connection.read_response()
            clean = True
            return reply
        except redis.ResponseError:
            clean = True  # an answer too, and read to its end
            raise
        except NO_REPLY_ERRORS as error:
            broke(connection, error)
            raise
        finally:
            connections.give_back(connection, clean=clean)  # whatever came, even a signal

    def _probe_later(self, breaker: Breaker, slot: int) -> None:
        arguments = (weakref.ref(self), breaker, slot)  # weak: a limiter that nobody has any more needs no probe
        try:
            if self.closed or not breaker.start_probe():
                return
            threading.Thread(target=_probe, args=arguments, name="headgate-probe", daemon=True).start()
        except BaseException as error:  # no more threads here; or a signal, which a thread that starts may not survive
            breaker.end_probe()  # one of the next calls may have more luck
            if not isinstance(error, RuntimeError):
                raise

    def _probe(self, slot: int) -> None:
        until = monotonic() + max(self.timeout, PROBE_TIMEOUT)
        run(probe(self._topology, slot, self.timeout), partial(self._answer, until))


def _probe(link: weakref.ref[SyncExecutor], breaker: Breaker, slot: int) -> None:
    try:
        for pause in pauses():
            time.sleep(pause if breaker.open else 0)
            alive = link()
            if alive is None or alive.closed or not breaker.failures:
                return
            try:
                alive._probe(slot)
            except Exception as error:  # whatever it is, there is nobody to hear it but the next try
                breaker.give_up(error)
                del alive
            else:
                breaker.answered()
                return
    finally:
        breaker.end_probe()
