"""One connection to a PostgreSQL server, without waiting: each step is a plan that yields what its socket waits for.

psycopg's own connections have no time-out for a statement, and a check must have one. So this uses libpq as psycopg
wraps it (`psycopg.pq`), and leaves the waiting to the caller: a thread polls until its deadline, an event loop has its
own. Parameters and results travel in binary.
"""

from __future__ import annotations

import ipaddress
import os
import select
from collections.abc import Generator, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from psycopg import Error, pq
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, PollingStatus

from headgate.postgresql import schema
from headgate.postgresql.url import PostgresURL


class NotConnected(ConnectionError):
    """No connection could be made: nothing was sent."""


class NoFreeConnection(NotConnected):
    """Every connection was in use for as long as the call had."""


class Lost(ConnectionError):
    """The connection broke after something was sent: the server may have done it."""


class ServerError(Exception):
    """The server answered with an error, and has done nothing."""

    def __init__(self, message: str, sqlstate: str = "") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class Wait(NamedTuple):
    """A request: wait until *socket* can be read, or written."""

    socket: int
    events: int  # of select.poll


Waiting = Generator[Wait, None, Any]

# After these the connection is given up: the next one may find another server, or has to make the tables anew.
_GIVE_UP = {"25006", "0A000", "55000", "42883", "42P01", "42703"}
_NO_TABLES = {"42P01", "3F000"}
_CANCELLED = "57014"  # by statement_timeout


class Statement(NamedTuple):
    """A call of a function: its SQL, which has a name on each connection, and its parameters in binary."""

    name: bytes
    sql: bytes
    parameters: Sequence[bytes | None]


class PostgresConnection:
    """A connection, usable by one caller at a time."""

    def __init__(self, url: PostgresURL) -> None:
        self.url = url
        self.connected_at = 0.0
        self._pq: pq.abc.PGconn | None = None
        self._prepared: set[bytes] = set()
        self.poll: Any = None
        self.read_only = False
        self._process = os.getpid()

    @property
    def is_open(self) -> bool:
        return self._pq is not None

    def close(self) -> None:
        """End the session; in the child of a fork it is the parent's, and only the copy of its socket is closed."""
        found, self._pq = self._pq, None
        if found is None:
            return
        if self._process == os.getpid():
            found.finish()
        else:
            os.close(found.socket)

    def connect(self, addresses: str = "") -> Waiting:
        """Connect, and see that the tables are there and ours; they are made if there are none.

        *addresses*: of the hosts, where they were looked up already. Raises `NotConnected` or `ServerError`.
        """
        return self._connect(addresses, self._say_hello())

    def connect_to_ask(self) -> Waiting:
        """Connect to `ask` what the server says of itself, whatever tables there are."""
        return self._connect("", ())

    def _connect(self, addresses: str, hello: Iterable[Wait]) -> Waiting:
        self.close()
        self.connected_at = monotonic()
        made = pq.PGconn.connect_start(self.url.conninfo(**({"hostaddr": addresses} if addresses else {})))
        try:
            while made.status != ConnStatus.BAD:
                wanted = made.connect_poll()
                if wanted in (PollingStatus.OK, PollingStatus.FAILED):
                    break
                yield Wait(made.socket, select.POLLIN if wanted == PollingStatus.READING else select.POLLOUT)
            if made.status != ConnStatus.OK:
                raise NotConnected(_words(made.error_message))
            made.nonblocking = 1
            self._pq, self._prepared = made, set()
            self.poll = select.poll()
            self.poll.register(made.socket, select.POLLIN)
            yield from hello
        except BaseException as error:
            self._pq = None
            made.finish()
            if isinstance(error, Lost | Error):  # nothing of a call was sent yet
                raise NotConnected(str(error)) from error
            raise

    def _say_hello(self) -> Waiting:
        hello = schema.hello_sql(self.url.prefix, self.url.timeout).encode()
        try:
            result = yield from self._command(hello)
        except ServerError as error:
            if error.sqlstate not in _NO_TABLES and error.sqlstate != "42703":
                raise
            try:
                yield from self._command(schema.create_sql(self.url.prefix).encode())
            except ServerError as problem:
                if problem.sqlstate == "42501":
                    words = f"{problem}; run `headgate migrate URL` as a user that may make tables"
                    raise ServerError(words, problem.sqlstate) from None
                raise
            result = yield from self._command(hello)
        version = int(result.get_value(0, 0) or b"0") if result.ntuples else 0
        if version != schema.VERSION:
            raise ServerError(
                f"the tables {self.url.prefix}_... are of version {version} and this headgate is of version "
                f"{schema.VERSION}; {schema.ADVICE}",
                schema.FOREIGN,
            )
        self.read_only = result.get_value(0, 4) == b"t" or result.get_value(0, 5) == b"on"

    def run(self, statement: Statement) -> Generator[Wait, None, bytes]:
        """The first value of the answer. Raises `ServerError`, or `Lost`."""
        found = self._pq
        if found is None:
            raise NotConnected("the connection is closed")
        try:
            if statement.name not in self._prepared:
                found.send_prepare(statement.name, statement.sql)
                yield from self._results(found)
                self._prepared.add(statement.name)
            found.send_query_prepared(statement.name, statement.parameters, _BINARY[len(statement.parameters)], 1)
            result = yield from self._results(found)
        except Error as error:
            raise Lost(_words(str(error).encode())) from error
        except ServerError as error:
            if error.sqlstate in _GIVE_UP:
                self.close()
            raise
        value: bytes = result.get_value(0, 0) or b""
        return value

    def ask(self, sql: str) -> Waiting:
        """The rows of a statement without parameters, as a result of libpq."""
        return self._command(sql.encode())

    def poller(self, request: Wait) -> Any:
        """A poll object for a request of this connection's plans."""
        if self._pq is not None and request.events == select.POLLIN:
            return self.poll  # nearly always
        other = select.poll()
        other.register(*request)
        return other

    def is_stale(self) -> bool:
        """Whether an idle connection can be read: the server has closed it."""
        return self._pq is None or bool(self.poll.poll(0))

    @property
    def version(self) -> str:
        number = self._pq.server_version if self._pq else 0
        return f"{number // 10000}.{number % 10000}"

    def _command(self, sql: bytes) -> Waiting:
        found = self._pq
        if found is None:
            raise NotConnected("the connection is closed")
        try:
            found.send_query(sql)
            return (yield from self._results(found))
        except Error as error:
            raise Lost(_words(str(error).encode())) from error

    def _results(self, found: pq.abc.PGconn) -> Waiting:
        """The last result of what was sent; the first error is raised when all has been read."""
        socket = found.socket
        while found.flush():
            yield Wait(socket, select.POLLIN | select.POLLOUT)
            found.consume_input()
        last, problem = None, None
        while True:
            while found.is_busy():
                yield Wait(socket, select.POLLIN)
                found.consume_input()
            result = found.get_result()
            if result is None:
                break
            last = result
            if result.status == ExecStatus.FATAL_ERROR and problem is None:
                problem = result
        if problem is not None:
            self._raise(problem)
        return last

    def _raise(self, problem: pq.abc.PGresult) -> None:
        sqlstate = (problem.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        words = _words(problem.error_field(DiagnosticField.MESSAGE_PRIMARY) or problem.error_message)
        if not sqlstate:
            raise Lost(words)  # it is libpq's own error: the connection broke
        if sqlstate == _CANCELLED:
            raise TimeoutError(words)
        if sqlstate[:3] == "57P":
            raise Lost(words)  # the server goes down, or is not up yet
        raise ServerError(f"{words} (SQLSTATE {sqlstate})", sqlstate)


_BINARY = [[pq.Format.BINARY] * many for many in range(16)]


def _words(message: bytes) -> str:
    """A message of libpq in one line; none of them has the password."""
    return " ".join(message.decode("utf-8", "replace").split()) or "the connection broke"


def hosts_to_resolve(url: PostgresURL) -> list[str]:
    """The host names of *url*, which libpq would look up while it blocks; empty if there are none."""
    hosts = str(url.parameters.get("host", "")).split(",")
    if "hostaddr" in url.parameters or not all(hosts) or any(host.startswith(("/", "@")) for host in hosts):
        return []
    return hosts if any(not _is_address(host) for host in hosts) else []


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
