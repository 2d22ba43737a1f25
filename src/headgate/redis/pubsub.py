"""Wake-ups from Redis: one subscription a process, however many wait.

A message on a channel means that something about it has changed: whoever waits first asks again. Messages may get
lost, so everybody who waits also has a timer; nothing depends on a message but speed. A connection that breaks is made
again at once, and then everybody is woken: what happened meanwhile nobody has heard.
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
from headgate.redis.topology import Send, pack, text, topology
from headgate.redis.url import Address, RedisURL

logger = logging.getLogger("headgate")

LINGER = 10.0  # seconds that a channel stays subscribed after the last who waited: the next often comes soon
SILENCE = 5.0  # seconds without a message before the server is asked whether it is still there
PATIENCE = 2.0  # seconds to connect
PAUSE = 0.2  # seconds before the next try to connect; doubled each time up to the next
LONGEST_PAUSE = 5.0


class Subscription:
    """The channels that somebody in this process waits on. Thread-safe."""

    def __init__(self, target: RedisURL, wake: Callable[[str, str], object], wake_all: Callable[[], object]) -> None:
        self._target = target
        self._wake = wake
        self._wake_all = wake_all
        self._lock = threading.RLock()  # a garbage collection may call us while we hold it
        self._waiting: dict[str, int] = {}
        self._left: dict[str, float] = {}  # nobody waits there since
        self._connection: Any = None
        self._thread: threading.Thread | None = None
        self._worked = False  # the last connection, for a while

    def listen(self, channel: str) -> None:
        """Hear *channel* from now on, or soon: its line is woken when the subscription stands."""
        with self._lock:
            self._waiting[channel] = self._waiting.get(channel, 0) + 1
            if self._left.pop(channel, None) is None and self._waiting[channel] == 1:
                self._send("SUBSCRIBE", channel)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headgate-wake", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads here, or the process ends: whoever waits looks by itself
                    self._thread = None

    def leave(self, channel: str) -> None:
        """One less waits on *channel*."""
        with self._lock:
            if channel not in self._waiting:
                return  # it waited in the parent, before a fork
            self._waiting[channel] -= 1
            if not self._waiting[channel]:
                del self._waiting[channel]
                self._left[channel] = monotonic()

    def close(self) -> None:
        """End now if nobody waits, instead of in a while."""
        with self._lock:
            thread = self._thread
            if self._waiting or thread is None:
                return
            self._left.clear()
            if self._connection is not None and self._connection._sock is not None:
                self._connection._sock.shutdown(socket.SHUT_RDWR)  # the thread that reads wakes up, and ends
        thread.join(PATIENCE)

    def _send(self, *command: str) -> None:
        """Called with the lock: bytes of two commands must not mix."""
        if self._connection is not None:
            try:
                self._connection.send_packed_command([pack(*command)], check_health=False)
            except (RedisError, OSError):
                pass  # the thread that reads will see it too

    def _run(self) -> None:
        pause = PAUSE
        while True:
            begun, self._worked = monotonic(), False
            try:
                self._hear()
                return
            except (RedisError, OSError, ValueError) as error:
                problem = error
            if self._worked and (pause or monotonic() - begun > PAUSE):
                pause = 0.0
            else:
                pause = min(max(2 * pause, PAUSE), LONGEST_PAUSE)
            with self._lock:
                if self._connection is not None:
                    self._connection.disconnect()
                    self._connection = None
                self._forget()
                if not self._waiting:
                    self._left.clear()
                    self._thread = None
                    return
            logger.info("no wake-ups from Redis for now, timers have to do: %s", problem)
            threading.Event().wait(pause)

    def _hear(self) -> None:
        """Read messages until nobody has waited for a while."""
        connection = self._connect()
        with self._lock:
            self._connection = connection
            if channels := [*self._waiting, *self._left]:
                self._send("SUBSCRIBE", *channels)
        asked, unheard = False, len(channels)
        while True:
            if connection.can_read(timeout=SILENCE):
                asked = False
                message = connection.read_response()
                kind = text(message[0]) if isinstance(message, list) else ""
                if kind in ("message", "subscribe"):
                    self._wake(text(message[1]), text(message[2]) if kind == "message" else "")
                if kind == "subscribe":
                    unheard -= 1
                    if unheard == 0:
                        self._worked = True
                        self._wake_all()
            elif asked:
                raise TimeoutError("the server is silent")
            else:
                with self._lock:
                    self._send("PING")
                asked = True
            with self._lock:
                self._forget()
                if not self._waiting and not self._left:
                    self._connection, self._thread = None, None
                    break
        connection.disconnect()

    def _forget(self) -> None:
        old = monotonic() - LINGER
        if gone := [channel for channel, since in self._left.items() if since <= old]:
            for channel in gone:
                del self._left[channel]
            self._send("UNSUBSCRIBE", *gone)

    def _connect(self) -> Any:
        """A connection to any server that hears every message."""
        if self._target.kind == "sentinel":
            return self._connection_to(run(topology(self._target).discover(0), self._answer))
        problem: Exception = OSError("no server is known")
        for address in self._target.hosts:  # in a Cluster every node hears what is published at any
            try:
                return self._connection_to(address)
            except (RedisError, OSError) as error:
                problem = error
        raise problem

    def _connection_to(self, address: Address) -> Any:
        options = self._target.connection_options(address)
        options |= {"socket_timeout": PATIENCE, "socket_connect_timeout": PATIENCE, "protocol": 2}
        connection = self._target.connection(**options, retry=Retry(NoBackoff(), 0))
        connection.connect()
        return connection

    def _answer(self, request: Send) -> Any:
        connection = self._connection_to(request.address)
        try:
            connection.send_packed_command([request.command], check_health=False)
            return connection.read_response()
        finally:
            connection.disconnect()
