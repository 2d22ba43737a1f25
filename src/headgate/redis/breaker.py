"""A circuit breaker before a server that does not answer: an outage costs microseconds, not time-outs.

After `FAILURES` calls in a row that got no answer it opens, and the policy answers without touching the network. One
probe at a time looks in the background whether the server is back, and closes it. Only silence counts: an error that
the server sends is an answer, and cost no wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from random import Random
from time import monotonic

from headgate.redis.address import Address
from headgate.redis.topology import Unreached

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
        self._lock = threading.Lock()

    def failed(self, error: Exception, probe: Callable[[], object], lasting: float = 0.0) -> None:
        """A call got no answer. *probe* starts what will call `answered`; it is called when this opens.

        *lasting*: the silence must be that old, for the haste of one caller must not take the store from the others.
        """
        with self._lock:
            now = monotonic()
            self._since = self._since if self.failures else now
            self.failures += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self.open or self.failures < FAILURES or now - self._since < lasting:
                return
            self.open = True
            self.opened += 1
        logger.error("%s does not answer (%s); on_store_error answers until it does", self.who, self.last_error)
        probe()

    def answered(self) -> None:
        """A call or a probe was answered."""
        with self._lock:
            was_open, self.open, self.failures = self.open, False, 0
        if was_open:
            logger.warning("%s answers again", self.who)


class Breakers:
    """The breakers of a store: one, or one for each server where keys lie at different ones."""

    def __init__(self, shown: str, sliced: bool) -> None:
        self._shown = shown
        self._sliced = sliced
        self._all: dict[Address | None, Breaker] = {}

    def of(self, address: Address | None) -> Breaker:
        """The breaker before *address*; raises at once if it is open."""
        key = address if self._sliced else None
        breaker = self._all.get(key)
        if breaker is None:
            breaker = self._all.setdefault(key, Breaker(f"{key.host}:{key.port}" if key else self._shown))
        if breaker.open:
            raise Unreached(f"{breaker.who} does not answer: {breaker.last_error}")
        return breaker

    def all(self) -> list[Breaker]:
        return list(self._all.values())


def pauses() -> Iterator[float]:
    """Seconds to wait before each probe: soon, then less often, never in step with other processes."""
    pause = FIRST_PROBE
    while True:
        yield pause * DICE.uniform(0.8, 1.2)
        pause = min(2 * pause, SLOWEST_PROBE)
