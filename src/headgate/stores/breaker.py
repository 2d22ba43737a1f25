"""A circuit breaker before a server that does not answer: an outage costs microseconds, not time-outs.

After `FAILURES_TO_OPEN` calls in a row without an answer the breaker opens, and the policy answers without touching
the server. One probe at a time looks in the background whether the server is back, and closes the breaker (see
`headgate.stores.probe`). Only silence counts: an error that the server sends is an answer, and it cost no wait.

Each limiter that was given a URL has a breaker of its own. The log and `on_open` tell of an outage of a server once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from headgate._lifecycle import in_each_child

logger = logging.getLogger("headgate")

FAILURES_TO_OPEN = 3  # in a row

_outages: dict[str, set[int]] = {}  # servers that the log has given up: the breakers that are open, by their id
_outages_lock = threading.RLock()  # reentrant: a signal handler may ask a store


class Breaker:
    """For one server, or for one service behind Sentinels. Thread-safe.

    *timeouts* are the exceptions of the client library that mean: no answer in time. *on_open* is called when it is the
    first of this process to open in an outage.
    """

    def __init__(
        self,
        server: str,
        timeouts: tuple[type[Exception], ...] = (TimeoutError,),
        on_open: Callable[[], object] | None = None,
    ) -> None:
        self.server = server  # for messages
        self._timeouts = timeouts
        self._on_open = on_open
        self.open = False
        self.failures = 0  # in a row
        self.opened = 0  # how often, ever
        self.last_error = ""
        self._first_failure = 0.0
        self._last_failure = 0.0
        self._probing = False
        self._lock = threading.Lock()

    def failed(self, error: Exception, begun: float, min_span: float = 0.0) -> bool:
        """Count a call that began at *begun* and got no answer. Returns whether to probe the server now.

        *min_span*: 0, or the store's time-out if the caller gave the call less time than that. Then a probe starts
        after three failures that span so many seconds, and the breaker opens only if the probe fails, too.
        """
        with self._lock:
            connected_at = getattr(error, "connected_at", begun)
            if self.failures and connected_at < self._last_failure and not isinstance(error, self._timeouts):
                return False  # the connection is older than the last failure: the same cut, which is counted already
            self._last_failure = now = monotonic()
            self._first_failure = self._first_failure if self.failures else now
            self.failures += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self.open or self.failures < FAILURES_TO_OPEN:
                return self.open
            if min_span:
                return now - self._first_failure >= min_span
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
        with _outages_lock:
            known = _outages.setdefault(self.server, set())
            known.add(id(self))
            if len(known) > 1:
                return
        if self._on_open:
            self._on_open()
        # what follows from it differs, so the message does not say: a limiter's on_store_error answers, a lock raises
        logger.error("%s does not answer (%s); calls are not sent to it until it does", self.server, self.last_error)

    def answered(self) -> None:
        """Close: a call or a probe was answered."""
        with self._lock:
            was_open, self.open, self.failures = self.open, False, 0
        if was_open and _outages.pop(self.server, None) is not None:
            logger.warning("%s answers again", self.server)

    def claim_probe(self) -> bool:
        """Whether the caller may probe the server: one probe at a time. `release_probe` must follow."""
        with self._lock:
            free, self._probing = not self._probing, True
        return free

    def release_probe(self) -> None:
        self._probing = False
        self.leave()

    def leave(self) -> None:
        """Look after the server no longer, back or not: an outage that another breaker finds is told of."""
        with _outages_lock:
            known = _outages.get(self.server, set())
            known.discard(id(self))
            if not known:
                _outages.pop(self.server, None)


@in_each_child
def _after_fork() -> None:
    global _outages_lock
    _outages_lock = threading.RLock()
    _outages.clear()


def note_connected_at(connection: Any, error: BaseException) -> None:
    """Write into *error* when the connection that it broke was made.

    Whatever cuts connections, a load balancer that restarts, say, may take a while to reach the last of them. A call
    that began in that while reports the same cut once more, not a second failure of the server.
    """
    if hasattr(connection, "connected_at"):  # connections of a client that was handed in do not have it
        setattr(error, "connected_at", connection.connected_at)  # noqa: B010  # exceptions do not declare it
