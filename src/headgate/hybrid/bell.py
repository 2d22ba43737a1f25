"""What wakes the thread that drives a node, from wherever: another thread, or a signal handler in any of them."""

from __future__ import annotations

import threading
from contextlib import suppress


class Bell(threading.Event):
    """An Event that a signal handler may ring whatever it interrupts: it has no lock that an interrupt leaves behind.

    It rings while `_quiet` is free.
    """

    def __init__(self) -> None:
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def is_set(self) -> bool:
        return not self._quiet.locked()

    def set(self) -> None:
        with suppress(RuntimeError):  # it rings
            self._quiet.release()

    def clear(self) -> None:
        self._quiet.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        rung = self._quiet.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
        if rung:
            self.set()  # until it is cleared
        return rung
