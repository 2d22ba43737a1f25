"""What a thread sleeps on."""

from __future__ import annotations

import threading
from contextlib import suppress


class Bell(threading.Event):
    """An event that a signal cannot break. It rings while `_quiet` is free.

    The ways into the usual one are Python: a handler that sets it, or raises, while its thread is in there may leave it
    locked, and then whoever sets it next waits for ever. This is one lock, taken in one step.
    """

    def __init__(self) -> None:
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def __repr__(self) -> str:
        return f"<Bell: {'rings' if self.is_set() else 'quiet'}>"

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
