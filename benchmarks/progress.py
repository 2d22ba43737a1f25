"""Progress on standard error: one line that is rewritten on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 2.0
SECONDS_BETWEEN_DRAWS = 0.1


class Progress:
    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._name = ""
        self._total = 1
        self._done = 0.0
        self._start = 0.0
        self._shown = 0.0

    def begin(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0.0
        self._start, self._shown = time.monotonic(), 0.0
        self._show("starting")

    def step(self, text: str) -> None:
        """Say what starts now; everything said before counts as done."""
        self._show(text)
        self._done += 1

    def part(self, share: float, text: str) -> None:
        """Say that *share* of the whole is done."""
        self._done = share * self._total
        self._show(text)

    def end(self) -> None:
        self._done, self._shown = self._total, 0.0
        self._show("done")
        if self._terminal:
            print(file=sys.stderr)

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._shown < (SECONDS_BETWEEN_DRAWS if self._terminal else SECONDS_BETWEEN_LINES):
            return
        self._shown = now
        line = f"{self._name}: {self._done / self._total:4.0%} {now - self._start:5.0f} s  {text}"
        if self._terminal:
            print(f"\r\x1b[2K{line[:110]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
