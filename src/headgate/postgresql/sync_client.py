"""PostgreSQL from threads: the connections, and the executor that makes calls on them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar

from headgate._lifecycle import renew_after_fork
from headgate._plan import run
from headgate.clock import Clock
from headgate.postgresql.backend import CallRequest, PostgresExecutor
from headgate.postgresql.connection import (
    Lost,
    NoFreeConnection,
    NotConnected,
    PostgresConnection,
    ServerError,
    Wait,
    Waiting,
)
from headgate.postgresql.statements import answers
from headgate.postgresql.url import PostgresURL
from headgate.stores.breaker import Breaker, note_connected_at
from headgate.stores.connections import NEVER, ThreadConnections
from headgate.stores.probe import PROBE_TIMEOUT, start_in_thread

MAX_IDLE = 0.05  # seconds after which an idle connection is checked before use: the server may have closed it

T = TypeVar("T")


class PostgresConnections(ThreadConnections):
    """The connections of all threads. psycopg's own pool has threads of its own, and no deadline for a statement."""

    exhausted = NoFreeConnection

    def __init__(self, url: PostgresURL) -> None:
        super().__init__()
        self._url = url
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def on_connection(self, deadline: float, exchange: Callable[[PostgresConnection], Waiting]) -> Any:
        """What the plan ``exchange(connection)`` returns, by *deadline*."""
        connection = self.acquire(deadline)
        clean = False
        try:
            value = wait_for(exchange(connection), connection, deadline)
            clean = True
            return value
        except ServerError:
            clean = connection.is_open  # it was read to its end, and the connection was not given up
            raise
        except OSError as error:
            note_connected_at(connection, error)
            raise
        finally:
            self.release(connection, clean=clean)  # whatever happened, a signal included

    def acquire(self, deadline: float) -> PostgresConnection:
        """An open connection. Raises `NotConnected` if there is none by *deadline*."""
        connection: PostgresConnection
        try:
            connection, used_at = self._idle.pop()
        except IndexError:
            connection, used_at = self._wait(deadline)
        now = monotonic()
        if now - used_at > MAX_IDLE or used_at <= self._last_broken:
            try:
                if connection.is_stale():
                    self.connect(connection, min(deadline, now + self._url.connect_timeout))
            except BaseException:
                self.release(connection, clean=False)
                raise
        return connection

    def connect(self, connection: PostgresConnection, deadline: float) -> None:
        """Connect by *deadline*. Raises `NotConnected`, or a `ServerError` if the tables are not ours."""
        try:
            wait_for(connection.connect(), connection, deadline)
        except TimeoutError as error:
            raise NotConnected(f"cannot connect within {self._url.connect_timeout} s") from error

    def release(self, connection: PostgresConnection, *, clean: bool) -> None:
        """Take *connection* back. One that is not *clean* may still get an answer, which the next caller would read."""
        if not clean:
            connection.close()
            self._last_broken = monotonic()  # the others may have broken with it
        self._idle.append((connection, monotonic() if clean else NEVER))
        if self._waiting:
            self._wake_first()

    def close(self) -> None:
        for connection in _close_all(self._idle):
            self._all.discard(connection)

    def _make(self) -> PostgresConnection | None:
        with self._making:
            if len(self._all) >= self._url.max_connections:
                return None
            made = PostgresConnection(self._url)
            self._all.add(made)
            return made


def _close_all(idle: deque[tuple[Any, float]]) -> list[Any]:
    closed: list[Any] = []
    while idle:
        try:
            connection, _ = idle.pop()
        except IndexError:  # another thread has taken the last one
            break
        connection.close()
        closed.append(connection)
    return closed


def wait_for(plan: Waiting, connection: PostgresConnection, deadline: float) -> Any:
    """What *plan* returns; raises a TimeoutError if its socket keeps it waiting until *deadline*."""
    begun = monotonic()

    def wait(request: Wait) -> None:
        poll, left = connection.poller(request), deadline - monotonic()
        if not poll.poll(max(left, 0.0) * 1000 + 0.5):
            raise TimeoutError(f"no answer within {deadline - begun:.3g} s")

    return run(plan, wait)


class PostgresThreads(PostgresExecutor):
    """Makes calls from threads. Safe after a fork: the child starts without connections."""

    def __init__(self, url: PostgresURL, display_name: str, clock: Clock | None) -> None:
        super().__init__(url, display_name, clock)
        self.connections = PostgresConnections(url)
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Forget the connections, which are the parent's."""
        self.connections = PostgresConnections(self.url)
        self._breaker = Breaker(self._display_name, on_open=self.calls.open)
        self.closed = False

    def answer(self, request: CallRequest) -> Any:
        """Do what a plan (see `headgate._plan`) requests: send a statement and read its answer."""
        asked = [request.asked]
        statement = self.statements.statement(asked)
        value = self.connections.on_connection(request.deadline, lambda connection: connection.run(statement))
        return answers(asked, value)[0]

    def warm_up(self, count: int) -> None:
        """Open *count* connections within the time-out; the first makes the tables, for which it has longer."""
        self.connections.warm_up(count, monotonic() + max(self.timeout, PROBE_TIMEOUT))

    def close(self) -> None:
        self.closed = True
        self._breaker.leave()
        self.connections.close()

    def start_probe(self, breaker: Breaker) -> None:
        start_in_thread(self, breaker, 0)

    def probe(self, slot: int) -> None:
        """Raise if the server does not let us connect, or answers later than a check can wait."""
        deadline = monotonic() + max(self.timeout, PROBE_TIMEOUT)
        connection = PostgresConnection(self.url)
        try:
            wait_for(connection.connect(), connection, deadline)
            begun = monotonic()
            wait_for(connection.ask("SELECT 1"), connection, deadline)
            check_speed(monotonic() - begun, self.timeout)
        except ServerError:
            pass  # it answers; what it says is for the calls
        finally:
            connection.close()


def check_speed(took: float, check_timeout: float) -> None:
    """Raise if an answer came later than a check can wait."""
    if took > check_timeout:
        raise Lost(f"it answers, but in {took:.2f} s, and a check has {check_timeout} s")
