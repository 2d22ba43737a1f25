"""What a machine adds to whatever is timed on it: a busy one makes everybody wait for a turn, or stands still."""

import threading
import time
from types import TracebackType
from typing import Self

BEAT = 0.01  # seconds
SLACK = 0.25  # seconds that a busy machine may add to any bound, besides what it was seen to add


class Pulse:
    """`with Pulse() as pulse: ...`, then allow `pulse.slack` seconds more than whatever was timed in it may take."""

    def __init__(self) -> None:
        self.hiccup = 0.0  # the longest that a thread of this process waited for its turn, in seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._feel, name="pulse")

    @property
    def slack(self) -> float:
        return SLACK + 3 * self.hiccup

    def _feel(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            time.sleep(BEAT)
            self.hiccup = max(self.hiccup, time.monotonic() - begun - BEAT)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
