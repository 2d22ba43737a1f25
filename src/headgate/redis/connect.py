"""From a URL to connections, for threads or for an event loop, with time-outs made for a limiter."""

from __future__ import annotations

import os
import weakref
from collections import deque
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

# A check that takes longer than this is worth less than the answer that on_store_error gives.
TIMEOUT = 0.25  # seconds, to connect and for a reply


# A connection that idled longer than this is looked at before it is used: the server may have closed it.
IDLE = 0.05  # seconds


class Connections:
    """Connections for threads: the one used last is used next. Nothing is connected before the first command.

    redis-py's pool polls the socket and counts on every loan, a quarter of the time of a check on a near server;
    this keeps what it has borrowed. Safe after a fork: the child starts with none.
    """

    def __init__(self, source: str | redis.ConnectionPool) -> None:
        self._own = isinstance(source, str)
        self._pool = _pool(source) if isinstance(source, str) else source
        self._idle: deque[tuple[redis.Connection, float]] = deque()
        forget = weakref.WeakMethod(self._idle_forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def borrow(self) -> redis.Connection:
        try:
            connection, since = self._idle.pop()
        except IndexError:
            return self._pool.get_connection()
        if monotonic() - since > IDLE:
            _freshen(connection)
        return connection

    def give_back(self, connection: redis.Connection) -> None:
        if self._own:
            self._idle.append((connection, monotonic()))
        else:
            self._pool.release(connection)

    def close(self) -> None:
        """Close what is idle; somebody else's pool is left as it is."""
        while self._idle:
            connection, _ = self._idle.pop()
            connection.disconnect()
            self._pool.release(connection)

    def _idle_forget(self) -> None:
        self._idle.clear()


def _freshen(connection: redis.Connection) -> None:
    """Disconnect if the server has: the next command connects again."""
    try:
        usable = not connection.can_read()  # nothing was asked, so nothing may be there to read
    except (redis.RedisError, OSError):
        usable = False
    if not usable:
        connection.disconnect()


def _pool(url: str) -> redis.ConnectionPool:
    return redis.ConnectionPool.from_url(url, **_options(url), retry=Retry(NoBackoff(), 0))


def async_pool(url: str) -> redis.asyncio.ConnectionPool:
    """A pool for one event loop. One time-out around a trip replaces redis-py's around every read and write."""
    options = _options(url) | {"socket_timeout": None}
    return redis.asyncio.ConnectionPool.from_url(url, **options, retry=AsyncRetry(NoBackoff(), 0))


def check_url(url: str) -> str:
    """Return *url* if redis-py can read it; else raise a ValueError that says what is wrong."""
    parts = urlsplit(url)
    try:
        _ = parts.port
        redis.connection.parse_url(url)
    except ValueError as error:
        raise ValueError(f"cannot read the store URL {_without_password(url)!r}: {error}; {FORM}") from None
    return url


FORM = "write redis://user:password@host:6379/0, rediss:// for TLS, or unix:///path/to/socket"


def _options(url: str) -> dict[str, Any]:
    options: dict[str, Any] = {"socket_timeout": TIMEOUT}
    if not url.startswith("unix://"):
        options |= {"socket_connect_timeout": TIMEOUT, "socket_keepalive": True}
    return options


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url
