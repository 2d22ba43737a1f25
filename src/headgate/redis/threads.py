"""Asking Redis from threads."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from time import monotonic, sleep
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from headgate.plan import run
from headgate.redis.address import Address, Target
from headgate.redis.asking import SILENCE, Request, ask, probe
from headgate.redis.breaker import Breaker, Breakers, pauses
from headgate.redis.health import Health, examine
from headgate.redis.lua import Eval, Lua
from headgate.redis.script import Call, Script
from headgate.redis.topology import Send, Single, Unreached, pack, topology

# A connection that idled longer than this is looked at before it is used: the server may have closed it.
IDLE = 0.05  # seconds


class PoolExhausted(Unreached):
    """Every connection was in use for as long as a call may take."""


class Connections:
    """Connections to one server: the one used last is used next, at most *limit*, and who finds none waits for one.

    redis-py's own pool polls the socket and counts on every loan, a quarter of the time of a check on a near server.
    Somebody's own pool is used as it is.
    """

    def __init__(self, target: Target | redis.ConnectionPool, address: Address) -> None:
        self._target = target
        self._address = address
        self._idle: deque[tuple[Any, float]] = deque()
        self._made = 0
        self._changed = threading.Condition()
        self.waiting = 0

    def borrow(self, until: float) -> Any:
        """A connection, connected; waits for one up to *until*. Raises `Unreached` if that cannot be."""
        if not isinstance(self._target, Target):
            return self._target.get_connection()
        try:
            connection, since = self._idle.pop()
        except IndexError:
            connection, since = self._another(until)
        if monotonic() - since > IDLE:
            try:
                _connect(connection)
            except BaseException as error:
                connection.disconnect()
                self.give_back(connection)
                if isinstance(error, RedisError | OSError | ValueError):  # a host name can be wrong in many ways
                    raise Unreached(f"{self._address.host}:{self._address.port}: {error}") from error
                raise
        return connection

    def give_back(self, connection: Any) -> None:
        if not isinstance(self._target, Target):
            self._target.release(connection)
            return
        self._idle.append((connection, monotonic()))
        if self.waiting:
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        while self._idle:
            connection, _ = self._idle.pop()
            connection.disconnect()
            self._made -= 1

    def in_use(self) -> int:
        return self._made - len(self._idle)

    def idle(self) -> int:
        return len(self._idle)

    def _another(self, until: float) -> tuple[Any, float]:
        target = self._target
        assert isinstance(target, Target)
        with self._changed:
            self.waiting += 1  # before the look: who gives one back after it must know that somebody waits
            try:
                while self._made >= target.max_connections:
                    try:
                        return self._idle.pop()
                    except IndexError:
                        pass
                    if not self._changed.wait(until - monotonic()):
                        raise PoolExhausted(
                            f"all {target.max_connections} connections are in use: raise max_connections"
                        )
                self._made += 1
            finally:
                self.waiting -= 1
        options = target.connection_options(self._address)
        # to ask a Sentinel is a part of a call, and may take a part of its time only
        timeout = target.timeout / 4 if self._address.sentinel else target.timeout
        if target.kind == "cluster":
            timeout /= 2  # a call may wait for one server and then, elsewhere, for another
            options["socket_connect_timeout"] = min(options["socket_connect_timeout"], timeout)
        return target.connection(**options, socket_timeout=timeout, retry=Retry(NoBackoff(), 0)), 0.0


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


def _connect(connection: Any) -> None:
    """Connect, or connect again if the server has closed it: nothing was asked, so nothing may be there to read."""
    if connection.is_connected:
        try:
            if not connection.can_read():
                return
        except (RedisError, OSError):
            pass
        connection.disconnect()
    connection.connect()


_LINKS: weakref.WeakSet[ThreadLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in _LINKS:
        link._start()


os.register_at_fork(after_in_child=_after_fork)


class ThreadLink:
    """A Redis, single, behind Sentinels or a Cluster, for threads. Safe after a fork: the child starts anew."""

    def __init__(self, source: Target | redis.ConnectionPool, shown: str) -> None:
        self._source = source
        self._shown = shown
        self.timeout = source.timeout if isinstance(source, Target) else 1.0
        self._start()
        _LINKS.add(self)

    def _start(self) -> None:
        source = self._source
        self._topology = topology(source) if isinstance(source, Target) else Single(Address("", 0))
        self._nodes: dict[Address, Connections] = {}
        self._breakers = Breakers(self._shown, self._topology.sliced)
        self.closed = False

    def ask(self, script: Script | Lua, call: Call | Eval) -> Any:
        """The reply to *call*, within the time-out; raises at once while the breaker is open."""
        slot = script.slot(call.key) if self._topology.sliced else 0
        breaker = self._breakers.of(self._topology.address(slot))
        try:
            reply = run(ask(self._topology, script, call, monotonic() + self.timeout), self._answer)
        except PoolExhausted:
            raise  # that is nothing the server did
        except SILENCE as error:
            breaker.failed(error, lambda: self._probe_later(breaker, slot))
            raise
        if breaker.failures:
            breaker.answered()
        return reply

    def examine(self) -> Health:
        """Look at the server; not through the breaker."""
        return run(examine(self._topology), self._answer)

    def breakers(self) -> list[Breaker]:
        return self._breakers.all()

    def connections(self) -> list[Connections]:
        return list(self._nodes.values())

    def close(self) -> None:
        self.closed = True
        for connections in list(self._nodes.values()):
            connections.close()

    def _answer(self, request: Request) -> Any:
        if isinstance(request, float):
            sleep(request)
            return None
        connections = self._nodes.get(request.address)
        if connections is None:
            connections = self._nodes.setdefault(request.address, Connections(self._source, request.address))
        connection = connections.borrow(monotonic() + self.timeout)
        clean = False
        try:
            if isinstance(request, Send):
                connection.send_packed_command([request.command], check_health=False)
            else:
                command = request.script.call([request.call], request.whole)
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
        finally:
            if not clean:
                connection.disconnect()  # whatever came, even a signal: a reply left in it would be the next caller's
            connections.give_back(connection)

    def _probe_later(self, breaker: Breaker, slot: int) -> None:
        threading.Thread(target=self._probe, args=(breaker, slot), name="headgate-probe", daemon=True).start()

    def _probe(self, breaker: Breaker, slot: int) -> None:
        for pause in pauses():
            sleep(pause)
            if self.closed or not breaker.open:
                return
            try:
                run(probe(self._topology, slot), self._answer)
            except (RedisError, OSError):
                continue
            breaker.answered()
            return
