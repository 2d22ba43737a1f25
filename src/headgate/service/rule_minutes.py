"""What each rule allowed and denied in each of the last sixty minutes, in a small file that all workers map.

The counters of all workers are there anyway, so a minute costs nothing until it ends. Then the first worker that
notices takes the lock and writes the difference to the totals of the minute before. The file has its full size from the
start: two numbers for each slot of the counters and each minute, one megabyte in all.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from headgate.service.shared_counters import SLOTS, SharedCounters, locked

MINUTES_FILE = "minutes"
MINUTES = 60  # that are shown: the one that is under way and those before it
_MOST = 2**32 - 1  # in one minute

_TOTALS_AT = 8  # behind the number of the minute that is under way
_RING_AT = _TOTALS_AT + 2 * 8 * SLOTS
_SIZE = _RING_AT + MINUTES * 2 * 4 * SLOTS


class RuleHour(NamedTuple):
    """Counts by minute, the oldest first; the last one is of the minute that is under way."""

    allowed: list[int]
    denied: list[int]


def this_minute() -> int:
    """The number of this minute. The clock is the same in all processes of a machine, and is never set back."""
    return int(monotonic() // 60)


class RuleMinutes:
    """The mapped file. Its columns are a ring: a minute has the column of its number modulo `MINUTES`."""

    def __init__(self, folder: Path, minute: int | None = None) -> None:
        self._file = os.open(folder / MINUTES_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with locked(self._file):
            if not os.fstat(self._file).st_size:
                first = this_minute() if minute is None else minute
                os.write(self._file, first.to_bytes(8, "little") + bytes(_SIZE - 8))
        whole = memoryview(mmap.mmap(self._file, _SIZE))
        self._minute = whole[:_TOTALS_AT].cast("q")
        self._totals = whole[_TOTALS_AT:_RING_AT].cast("q")
        self._ring = whole[_RING_AT:].cast("I")

    def advance(self, counters: SharedCounters, minute: int) -> None:
        """Write down the minutes that have ended before *minute*; every worker calls this once a second."""
        if minute <= self._minute[0]:
            return
        with locked(self._file):
            ended = self._minute[0]
            if minute <= ended:
                return  # another worker was first
            column = self._column(ended)
            for slot, counts in enumerate(zip(*counters.decided(), strict=True)):
                for i, total in enumerate(counts):
                    at = 2 * slot + i
                    column[at] = min(max(total - self._totals[at], 0), _MOST)
                    self._totals[at] = total
            for skipped in range(max(ended + 1, minute - MINUTES + 1), minute + 1):
                self._column(skipped)[:] = memoryview(bytes(8 * SLOTS)).cast("I")
            self._minute[0] = minute

    def hours(self, counters: SharedCounters, minute: int) -> dict[str, RuleHour]:
        """The last hour of each slot that decided something, by its name."""
        self.advance(counters, minute)
        now, names, decided = self._minute[0], counters.names(), counters.decided()
        words = 2 * min(len(names), len(decided[0]))  # another worker may have added a name in between
        columns = [self._column(number)[:words].tolist() for number in range(now - MINUTES + 1, now)]
        rows = list(zip(*columns, strict=True))  # of each slot one for what it allowed and one for what it denied
        found = {}
        for slot, name in enumerate(names[: words // 2]):
            allowed, denied = (max(decided[i][slot] - self._totals[2 * slot + i], 0) for i in (0, 1))
            before = rows[2 * slot], rows[2 * slot + 1]
            if allowed or denied or any(before[0]) or any(before[1]):
                found[name] = RuleHour([*before[0], allowed], [*before[1], denied])
        return found

    def _column(self, minute: int) -> memoryview[int]:
        at = minute % MINUTES * 2 * SLOTS
        return self._ring[at : at + 2 * SLOTS]
