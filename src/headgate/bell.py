"""What a thread sleeps on."""

from __future__ import annotations

import threading


class Bell(threading.Event):
    """An event that a signal cannot break. `_quiet` is held until it rings.

    The ways into the usual one are Python: a handler that sets it, or raises, while its thread is in there may leave it
    locked, and then whoever sets it next waits for ever. This is one lock, taken in one step.
    """

    def __init__(self) -> None:
        self._rings = False
        self._quiet = threading.Lock()
        self._quiet.acquire()

    def __repr__(self) -> str:
        return f"<Bell: {'rings' if self._rings else 'quiet'}>"

    def is_set(self) -> bool:
        return self._rings

    def set(self) -> None:
        self._rings = True
        try:
            self._quiet.release()
        except RuntimeError:
            pass  # it rang before

    def clear(self) -> None:
        self._rings = False
        self._quiet.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        rang = self._rings
        if not rang:
            try:
                rang = self._quiet.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            finally:
                # until it is cleared: for all others who wait, even if a signal came just now
                if self._rings:
                    try:
                        self._quiet.release()
                    except RuntimeError:
                        pass
        return rang
