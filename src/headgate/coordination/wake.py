"""What a thread sleeps on."""

from __future__ import annotations

import threading


class Wake(threading.Event):
    """An event that a signal cannot break; to wait for it clears it.

    The ways into the usual one are Python: an exception that a signal's handler raises there may leave it locked, and
    then whoever sets it, such as the thread that hears of changes, waits for ever. This is one lock, taken in one step.
    """

    def __init__(self) -> None:  # nothing of the usual one is needed
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def is_set(self) -> bool:
        return not self._asleep.locked()

    def set(self) -> None:
        try:
            self._asleep.release()
        except RuntimeError:
            pass  # it is set already

    def clear(self) -> None:
        self._asleep.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        return self._asleep.acquire(timeout=-1 if timeout is None else max(timeout, 0))
