"""A circuit breaker before a server that does not answer: an outage costs microseconds, not time-outs.

After `FAILURES` calls in a row that got no answer it opens, and the policy answers without touching the network. One
probe at a time looks in the background whether the server is back, and closes it. Only silence counts: an error that
the server sends is an answer, and cost no wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from random import Random
from time import monotonic
from typing import Any

import redis.exceptions

from headgate.redis.url import Address

TIMEOUTS = (TimeoutError, redis.exceptions.TimeoutError)

logger = logging.getLogger("headgate")

DICE = Random()  # its own: a program that seeds the common one, or watches it as some tests do, is left alone

FAILURES = 3
FIRST_PROBE = 0.05  # seconds; then doubled up to the next
SLOWEST_PROBE = 0.5
PROBE_TIMEOUT = 1.0  # more than a check has: nobody waits for it, and a far server may need it to connect


class Breaker:
    """For one server, or for one service behind Sentinels. Thread-safe."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.open = False
        self.failures = 0  # in a row
        self.opened = 0  # times, ever
        self.last_error = ""
        self._since = 0.0
        self._latest = 0.0
        self._probing = False
        self._lock = threading.Lock()

    def failed(self, error: Exception, begun: float, lasting: float = 0.0) -> bool:
        """A call that began at *begun* got no answer. Whether to look for the server, with `start_probe`.

        *lasting*: the caller was in haste; silence that long must come together before anybody looks, and the store
        stays in use until a probe, which has more time, has failed as well.
        """
        with self._lock:
            stood_since = getattr(error, "since", begun)
            if self.failures and stood_since < self._latest and not isinstance(error, TIMEOUTS):
                return False  # connections that break together are one failure
            self._latest = now = monotonic()
            self._since = self._since if self.failures else now
            self.failures += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self.open or self.failures < FAILURES:
                return self.open
            if lasting:
                return now - self._since >= lasting
        self.give_up(error)
        return True

    def give_up(self, error: Exception) -> None:
        """Open: the policy answers from now on."""
        with self._lock:
            self.last_error = f"{type(error).__name__}: {error}"
            if self.open:
                return
            self.open = True
            self.opened += 1
        # what that means is for whoever asks to say: a limiter's on_store_error answers, a lock raises
        logger.error("%s does not answer (%s); calls are not sent to it until it does", self.who, self.last_error)

    def answered(self) -> None:
        """A call or a probe was answered."""
        with self._lock:
            was_open, self.open, self.failures = self.open, False, 0
        if was_open:
            logger.warning("%s answers again", self.who)

    def start_probe(self) -> bool:
        """Whether the caller may look for the server: one at a time. `end_probe` must follow."""
        with self._lock:
            free, self._probing = not self._probing, True
        return free

    def end_probe(self) -> None:
        self._probing = False


def broke(connection: Any, error: BaseException) -> None:
    """Say with *error* since when the connection stood that it broke.

    What cuts connections, a load balancer that restarts, say, may take a while to come to the last of them: a call
    that began in that while tells of the cut once more, not of the server.
    """
    if hasattr(connection, "since"):  # not of somebody's own pool
        setattr(error, "since", connection.since)  # noqa: B010  # exceptions do not declare it


class Breakers:
    """The breakers of a store: one, or one for each server where keys lie at different ones."""

    def __init__(self, shown: str, sliced: bool) -> None:
        self._shown = shown
        self._sliced = sliced
        self._all: dict[Address | None, Breaker] = {}

    def of(self, address: Address | None) -> Breaker:
        """The breaker before *address*."""
        key = address if self._sliced else None
        breaker = self._all.get(key)
        if breaker is None:
            breaker = self._all.setdefault(key, Breaker(f"{key.host}:{key.port}" if key else self._shown))
        return breaker

    def all(self) -> list[Breaker]:
        return list(self._all.values())


def pauses() -> Iterator[float]:
    """Seconds to wait before each probe: soon, then less often, never in step with other processes."""
    pause = FIRST_PROBE
    while True:
        yield pause * DICE.uniform(0.8, 1.2)
        pause = min(2 * pause, SLOWEST_PROBE)
