"""The counters of all workers, in one small file that each maps into its memory.

A worker counts in a slab of its own, as plain integers: no lock and no message, so a count costs nanoseconds and a
scrape of any worker sees every count of every worker. A slab outlives its worker; the one that takes its place goes
on counting where it ended. What is counted by rule and algorithm has a numbered slot, and the file says whose it is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Slots: what happened under one rule and algorithm.
ALLOWED, DENIED, DEGRADED, SHADOW, NEAR, UNANSWERED = range(6)
SLOT_WORDS = 8
SLOTS = 2048
OTHERS = "others ALL"  # rule and algorithm of those for whom there is no slot left

# Timings: one for each algorithm and outcome.
BOUNDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds
TIMING_WORDS = 16  # nanoseconds in all, then how many within each bound, how many beyond, how many not timed
WAITED = 2 + len(BOUNDS)
TIMINGS = 12

# Gauges: the state of a worker, looked at once a second.
PID, KEYS, BREAKER_OPEN, BREAKER_OPENED, RELOADS, RELOADS_FAILED, RELOAD_OK, RELOADED_AT, PROBLEMS, BODY = range(10)
GAUGES = 16

NAME_BYTES = 128
BODY_BYTES = 16384
HEADER_WORDS = 8
STOPPING, NAMED, STARTED_AT = range(3)

_NAMES_AT = 8 * HEADER_WORDS
_SLABS_AT = _NAMES_AT + SLOTS * NAME_BYTES
_TIMINGS_AT = GAUGES
_SLOTS_AT = _TIMINGS_AT + TIMINGS * TIMING_WORDS
_WORDS = _SLOTS_AT + SLOTS * SLOT_WORDS
_SLAB_BYTES = 8 * _WORDS + BODY_BYTES


def create(path: Path, workers: int, started_at: int) -> None:
    """Make the file, with room for a worker that starts before the one it replaces has ended."""
    path.write_bytes(bytes(_SLABS_AT + (workers + 1) * _SLAB_BYTES))
    Board(path).header[STARTED_AT] = started_at


class Board:
    """The file, mapped."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # open, and mapped, as long as the process lives
        self._map = mmap.mmap(self._file, 0)
        self._known: dict[str, int] = {}
        whole = memoryview(self._map)
        self.header = whole[:_NAMES_AT].cast("q")
        self._slabs = [whole[at : at + 8 * _WORDS].cast("q") for at in range(_SLABS_AT, len(whole), _SLAB_BYTES)]

    def claim(self) -> Slab:
        """A slab for this process: a free one, or that of a worker that is no more."""
        with self._locked():
            free = [number for number, words in enumerate(self._slabs) if not words[PID] or not _alive(words[PID])]
            number = free[0] if free else -1 % len(self._slabs)  # none: others have the process ids of dead workers
            words = self._slabs[number]
            words[PID] = os.getpid()
            words[BREAKER_OPEN] = words[KEYS] = 0
        return Slab(words, self._map, _SLABS_AT + number * _SLAB_BYTES + 8 * _WORDS)

    def slot(self, name: str) -> int:
        """The slot of *name*, the same for every worker. Those that come when all but one are taken share the last."""
        with self._locked():
            used = self.header[NAMED]
            for number in range(len(self._known), used):
                self._known[self._name(number)] = number
            if name in self._known:
                return self._known[name]
            if used >= SLOTS - 1:
                name = OTHERS
                used = SLOTS - 1
            at = _NAMES_AT + used * NAME_BYTES
            self._map[at : at + NAME_BYTES] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
            self.header[NAMED] = used + 1
            return used

    def _name(self, number: int) -> str:
        at = _NAMES_AT + number * NAME_BYTES
        return self._map[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace")

    def names(self) -> list[str]:
        """Whose the slots are, in order."""
        return [self._name(number) for number in range(self.header[NAMED])]

    def slots(self) -> Iterator[tuple[str, list[int]]]:
        """What was counted in each slot, by all workers, ever."""
        for number, name in enumerate(self.names()):
            at = _SLOTS_AT + number * SLOT_WORDS
            yield name, [sum(words[at + i] for words in self._slabs) for i in range(SLOT_WORDS)]

    def timing(self, number: int) -> list[int]:
        at = _TIMINGS_AT + number * TIMING_WORDS
        return [sum(words[at + i] for words in self._slabs) for i in range(TIMING_WORDS)]

    def gauge(self, number: int) -> list[int]:
        """The gauge of each slab that ever had a worker."""
        return [words[number] for words in self._slabs if words[PID]]

    def workers(self) -> int:
        return sum(1 for words in self._slabs if words[PID] and _alive(words[PID]))

    def bodies(self) -> Iterator[bytes]:
        """What each worker last wrote down."""
        for number, words in enumerate(self._slabs):
            at = _SLABS_AT + number * _SLAB_BYTES + 8 * _WORDS
            yield self._map[at : at + min(words[BODY], BODY_BYTES)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Slab:
    """Where one worker counts."""

    def __init__(self, words: memoryview[int], shared: mmap.mmap, body_at: int) -> None:
        self.gauges = words[:_TIMINGS_AT]
        self.timings = words[_TIMINGS_AT:_SLOTS_AT]
        self.slots = words[_SLOTS_AT:]
        self._map = shared
        self._body_at = body_at

    def write(self, body: bytes) -> None:
        """Leave *body* for all workers to read. One that reads while this writes gets nonsense, and looks again."""
        body = body[:BODY_BYTES]
        self.gauges[BODY] = 0
        self._map[self._body_at : self._body_at + len(body)] = body
        self.gauges[BODY] = len(body)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
