"""Threads that come at the same moment take turns, the lowest place first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heapify, heappush
from itertools import count
from typing import Final

PATIENCE: Final = 0.2  # seconds; then a thread goes on without its turn: order is worth less than progress


class Turns:
    """Of the threads that wait, the one with the lowest place is next."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []  # a heap of places; of equal ones the first to come is first
        self._busy = False
        self._came = count()

    @contextmanager
    def turn(self, place: int) -> Iterator[None]:
        """Wait for a turn. A queue may raise in its threads anywhere (time limits), so none waits for ever."""
        with self._changed:
            ours = (place, next(self._came))
            heappush(self._waiting, ours)
            try:
                self._changed.wait_for(lambda: not self._busy and self._waiting[0] == ours, self._patience)
            finally:
                self._waiting.remove(ours)
                heapify(self._waiting)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
