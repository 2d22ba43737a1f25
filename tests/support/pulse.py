"""How long a busy machine makes threads wait, so that a test which measures time can allow for it."""

import threading
import time
from types import TracebackType
from typing import Self

BEAT = 0.01  # seconds between measurements
SLACK = 0.25  # seconds that are allowed in any case


class Pulse:
    """`with Pulse() as pulse: ...`: what was measured in it may take `pulse.slack` seconds more than promised."""

    def __init__(self) -> None:
        self.hiccup = 0.0  # the longest that a thread of this process was late, in seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="pulse")

    @property
    def slack(self) -> float:
        return SLACK + 3 * self.hiccup

    def _measure(self) -> None:
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
