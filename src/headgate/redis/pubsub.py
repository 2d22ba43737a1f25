"""Wake-ups from Redis: one subscription for each process, however many callers wait.

A message on a channel means that its state has changed, so the first waiter of that channel asks again. Messages may
get lost, so every waiter has a timer too; only speed depends on messages. A connection that breaks is made again at
once, and then every waiter is woken, because changes in between were not heard.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from headgate._plan import run
from headgate.redis.script import pack, text
from headgate.redis.topology import ServerCommand, topology
from headgate.redis.url import Address, RedisURL

logger = logging.getLogger("headgate")

LINGER = 10.0  # seconds that a channel stays subscribed after its last waiter: the next one often comes soon
PING_AFTER = 5.0  # seconds without a message before the server is asked whether it is still there
CONNECT_TIMEOUT = 2.0  # seconds
PAUSE = 0.2  # seconds before the next try to connect; doubled each time up to the next
LONGEST_PAUSE = 5.0


class Subscription:
    """The channels that callers in this process wait on. Thread-safe."""

    def __init__(self, url: RedisURL, wake: Callable[[str, str], object], wake_all: Callable[[], object]) -> None:
        self._url = url
        self._wake = wake
        self._wake_all = wake_all
        self._lock = threading.RLock()  # reentrant: a garbage collection may call `leave` while we hold it
        self._waiting: dict[str, int] = {}  # waiters by channel
        self._left: dict[str, float] = {}  # when the last waiter of a channel left
        self._connection: Any = None
        self._thread: threading.Thread | None = None
        self._connected = False  # the latest connection was subscribed to all channels

    def listen(self, channel: str) -> None:
        """Add a waiter to *channel*. Its waiters are woken once the subscription stands."""
        with self._lock:
            self._waiting[channel] = self._waiting.get(channel, 0) + 1
            if self._left.pop(channel, None) is None and self._waiting[channel] == 1:
                self._send("SUBSCRIBE", channel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headgate-wake", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads here, or the process ends: waiters have their timers
                    self._thread = None

    def leave(self, channel: str) -> None:
        """Take a waiter off *channel*."""
        with self._lock:
            if channel not in self._waiting:
                return  # it waited in the parent, before a fork
            self._waiting[channel] -= 1
            if not self._waiting[channel]:
                del self._waiting[channel]
                self._left[channel] = monotonic()

    def close(self) -> None:
        """End now if there are no waiters, instead of after `LINGER`."""
        with self._lock:
            thread = self._thread
            if self._waiting or thread is None:
                return
            self._left.clear()
            if self._connection is not None and self._connection._sock is not None:
                self._connection._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which ends
        thread.join(CONNECT_TIMEOUT)

    def _send(self, *command: str) -> None:
        """Called with the lock held: the bytes of two commands must not mix."""
        if self._connection is not None:
            try:
                self._connection.send_packed_command([pack(*command)], check_health=False)
            except (RedisError, OSError):
                pass  # the thread that reads sees it too

    def _run(self) -> None:
        pause = PAUSE
        while True:
            begun, self._connected = monotonic(), False
            try:
                self._read_messages()
                return
            except (RedisError, OSError, ValueError) as error:
                problem = error
            if self._connected and (pause or monotonic() - begun > PAUSE):
                pause = 0.0
            else:
                pause = min(max(2 * pause, PAUSE), LONGEST_PAUSE)
            with self._lock:
                if self._connection is not None:
                    self._connection.disconnect()
                    self._connection = None
                self._unsubscribe_old()
                if not self._waiting:
                    self._left.clear()
                    self._thread = None
                    return
            logger.info("no wake-ups from Redis until it is connected again; waiters use their timers: %s", problem)
            threading.Event().wait(pause)

    def _read_messages(self) -> None:
        """Read messages until there has been no waiter for a while."""
        connection = self._connect()
        with self._lock:
            self._connection = connection
            if channels := [*self._waiting, *self._left]:
                self._send("SUBSCRIBE", *channels)
        pinged, unconfirmed = False, len(channels)
        while True:
            if connection.can_read(timeout=PING_AFTER):
                pinged = False
                message = connection.read_response()
                kind = text(message[0]) if isinstance(message, list) else ""
                if kind in ("message", "subscribe"):
                    self._wake(text(message[1]), text(message[2]) if kind == "message" else "")
                if kind == "subscribe":
                    unconfirmed -= 1
                    if unconfirmed == 0:
                        self._connected = True
                        self._wake_all()
            elif pinged:
                raise TimeoutError("the server is silent")
            else:
                with self._lock:
                    self._send("PING")
                pinged = True
            with self._lock:
                self._unsubscribe_old()
                if not self._waiting and not self._left:
                    self._connection, self._thread = None, None
                    break
        connection.disconnect()

    def _unsubscribe_old(self) -> None:
        old = monotonic() - LINGER
        if gone := [channel for channel, since in self._left.items() if since <= old]:
            for channel in gone:
                del self._left[channel]
            self._send("UNSUBSCRIBE", *gone)

    def _connect(self) -> Any:
        """A connection to a server that hears every message."""
        if self._url.kind == "sentinel":
            return self._connection_to(run(topology(self._url).discover(0, monotonic()), self._answer))
        problem: Exception = OSError("no server is known")
        for address in self._url.hosts:  # in a Cluster every node hears what is published at any
            try:
                return self._connection_to(address)
            except (RedisError, OSError) as error:
                problem = error
        raise problem

    def _connection_to(self, address: Address) -> Any:
        options = self._url.connection_options(address)
        options |= {"socket_timeout": CONNECT_TIMEOUT, "socket_connect_timeout": CONNECT_TIMEOUT, "protocol": 2}
        connection = self._url.connection(**options, retry=Retry(NoBackoff(), 0))
        connection.connect()
        return connection

    def _answer(self, request: ServerCommand) -> Any:
        """Each command has `CONNECT_TIMEOUT`: no caller waits for this connection."""
        connection = self._connection_to(request.address)
        try:
            connection.send_packed_command([request.command], check_health=False)
            return connection.read_response()
        finally:
            connection.disconnect()
