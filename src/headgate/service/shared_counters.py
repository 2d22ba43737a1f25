"""The counters of all workers, in one small file that each worker maps into its memory.

Each worker increments plain integers in a section of its own, without locks or messages: a count costs nanoseconds,
and a scrape of any worker sees the counts of all workers. The section of a dead worker goes to its replacement, which
continues the counts. Counters by rule and algorithm have a numbered slot; the file maps slots to names.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headgate.algorithms import ALGORITHMS

COUNTERS_FILE = "counters"

# Slots: what happened under one rule and algorithm.
ALLOWED, DENIED, DEGRADED, SHADOW, NEAR, UNANSWERED, RELEASED = range(7)
SLOT_WORDS = 8
SLOTS = 2048
OTHERS = "others ALL"  # rule and algorithm of the last slot, which all share that come when the others are taken

# Timings: one for each kind of rule and outcome.
KINDS = (*ALGORITHMS, "concurrency")
BOUNDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # seconds
TIMING_WORDS = 16  # the sum in nanoseconds, then counts: one per bound, those above the last bound, those not timed
WAITED = 2 + len(BOUNDS)
TIMINGS = 2 * len(KINDS)

# Gauges: the state of a worker, updated once a second.
PID, KEYS, BREAKER_OPEN, BREAKER_OPENED, RELOADS, RELOADS_FAILED, RELOAD_OK, RELOADED_AT, PROBLEMS, REPORT = range(10)
IN_USE, IDLE, WAITING, HYBRID_TRIPS, HYBRID_FAILED_TRIPS, HYBRID_DOWN = range(16, 22)
GAUGES = 32

# Hybrid: what the leases of one rule and algorithm did. Each slot has a row here too.
IS_HYBRID, LOCAL, ASKED, REPORTS, BURNED, LEASED_KEYS, HELD, UNREPORTED = range(8)
HYBRID_COUNTERS = (LOCAL, ASKED, REPORTS, BURNED)
HYBRID_GAUGES = (LEASED_KEYS, HELD, UNREPORTED)
HYBRID_WORDS = 8

NAME_BYTES = 128
REPORT_BYTES = 65536  # twice what the longest keys, all of characters that JSON escapes, and a hundred servers take
HEADER_WORDS = 8
STOPPING, NAMED, STARTED_AT = range(3)

_NAMES_AT = 8 * HEADER_WORDS
_WORKERS_AT = _NAMES_AT + SLOTS * NAME_BYTES
_TIMINGS_AT = GAUGES
_SLOTS_AT = _TIMINGS_AT + TIMINGS * TIMING_WORDS
_HYBRID_AT = _SLOTS_AT + SLOTS * SLOT_WORDS
_WORDS = _HYBRID_AT + SLOTS * HYBRID_WORDS
_WORKER_BYTES = 8 * _WORDS + REPORT_BYTES


def create(path: Path, workers: int, started_at: int) -> None:
    """Make the file, with room for one worker that starts before the worker that it replaces has ended."""
    path.write_bytes(bytes(_WORKERS_AT + (workers + 1) * _WORKER_BYTES))
    SharedCounters(path).header[STARTED_AT] = started_at


class SharedCounters:
    """The counters of all workers: the mapped file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # stays open and mapped as long as the process lives
        self._map = mmap.mmap(self._file, 0)
        self._known: dict[str, int] = {}
        whole = memoryview(self._map)
        self.header = whole[:_NAMES_AT].cast("q")
        self._workers = [whole[at : at + 8 * _WORDS].cast("q") for at in range(_WORKERS_AT, len(whole), _WORKER_BYTES)]

    def claim(self) -> WorkerCounters:
        """The counters for this process: a free section, or that of a worker that has died."""
        with locked(self._file):
            free = [number for number, words in enumerate(self._workers) if not words[PID] or not _alive(words[PID])]
            # none is free when other processes have got the ids of dead workers
            number = free[0] if free else -1 % len(self._workers)
            words = self._workers[number]
            words[PID] = os.getpid()
            for gauge in (BREAKER_OPEN, KEYS, IN_USE, IDLE, WAITING, HYBRID_DOWN):
                words[gauge] = 0
            for row in range(_HYBRID_AT, _HYBRID_AT + self.header[NAMED] * HYBRID_WORDS, HYBRID_WORDS):
                for gauge in HYBRID_GAUGES:
                    words[row + gauge] = 0
        return WorkerCounters(words, self._map, _WORKERS_AT + number * _WORKER_BYTES + 8 * _WORDS)

    def slot(self, name: str) -> int:
        """The slot of *name*, the same in every worker. When all slots but one are taken, new names share the last."""
        name = name.encode()[:NAME_BYTES].decode(errors="ignore")
        with locked(self._file):
            used = self.header[NAMED]
            for number in range(len(self._known), used):
                self._known[self._name(number)] = number
            if name in self._known:
                return self._known[name]
            if used >= SLOTS - 1:
                name = OTHERS
                used = SLOTS - 1
            at = _NAMES_AT + used * NAME_BYTES
            self._map[at : at + NAME_BYTES] = name.encode().ljust(NAME_BYTES, b"\0")
            self.header[NAMED] = used + 1
            return used

    def _name(self, number: int) -> str:
        at = _NAMES_AT + number * NAME_BYTES
        return self._map[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace")

    def names(self) -> list[str]:
        """The names of the slots, in order."""
        return [self._name(number) for number in range(self.header[NAMED])]

    def slots(self) -> Iterator[tuple[str, list[int]]]:
        """The name of each slot and its counters, summed over all workers."""
        for number, name in enumerate(self.names()):
            at = _SLOTS_AT + number * SLOT_WORDS
            yield name, [sum(words[at + i] for words in self._workers) for i in range(SLOT_WORDS)]

    def decided(self) -> tuple[list[int], list[int]]:
        """The checks that each slot has allowed, and those that it has denied, summed over all workers."""
        end = _SLOTS_AT + self.header[NAMED] * SLOT_WORDS
        rows = [words[_SLOTS_AT:end].tolist() for words in self._workers]
        allowed, denied = (
            [sum(counts) for counts in zip(*(row[word::SLOT_WORDS] for row in rows), strict=True)]
            for word in (ALLOWED, DENIED)
        )
        return allowed, denied

    def hybrid_slots(self) -> Iterator[tuple[str, list[int]]]:
        """The name of each slot that has been hybrid, and its figures, summed over all workers."""
        for number, name in enumerate(self.names()):
            at = _HYBRID_AT + number * HYBRID_WORDS
            if any(words[at + IS_HYBRID] for words in self._workers):
                yield name, [sum(words[at + i] for words in self._workers) for i in range(HYBRID_WORDS)]

    def timing(self, number: int) -> list[int]:
        at = _TIMINGS_AT + number * TIMING_WORDS
        return [sum(words[at + i] for words in self._workers) for i in range(TIMING_WORDS)]

    def gauge(self, number: int) -> list[int]:
        """The gauge of each section that ever had a worker."""
        return [words[number] for words in self._workers if words[PID]]

    def workers(self) -> int:
        """The number of workers that are alive."""
        return sum(1 for words in self._workers if words[PID] and _alive(words[PID]))

    def reports(self) -> Iterator[bytes]:
        """The last report of each worker that is alive."""
        for number, words in enumerate(self._workers):
            if not words[PID] or not _alive(words[PID]):
                continue
            at = _WORKERS_AT + number * _WORKER_BYTES + 8 * _WORDS
            yield self._map[at : at + min(words[REPORT], REPORT_BYTES)]


class WorkerCounters:
    """The counters of one worker, and a report that it leaves for the others."""

    def __init__(self, words: memoryview[int], shared: mmap.mmap, report_at: int) -> None:
        self.gauges = words[:_TIMINGS_AT]
        self.timings = words[_TIMINGS_AT:_SLOTS_AT]
        self.slots = words[_SLOTS_AT:_HYBRID_AT]
        self.hybrid = words[_HYBRID_AT:]
        self._map = shared
        self._report_at = report_at

    def write_report(self, report: bytes) -> None:
        """Replace the report. A worker that reads it meanwhile may see a mixture, and must check what it reads."""
        report = report[:REPORT_BYTES]
        self.gauges[REPORT] = 0
        self._map[self._report_at : self._report_at + len(report)] = report
        self.gauges[REPORT] = len(report)


@contextmanager
def locked(file: int) -> Iterator[None]:
    """Hold the lock of an open file, which one process has at a time."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
