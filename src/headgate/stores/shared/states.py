"""States as words of a file: integers as they are, logs as rings of cells.

A state that is an integer below 2**63 at any time until 2100 is one word. All others are a tuple of words, with cells
for the logs of sliding windows. The algorithms themselves are in `headgate.algorithms`; here is only what they keep.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from headgate.algorithms.algorithm import Algorithm
from headgate.algorithms.all_of import AllOf
from headgate.algorithms.sliding_window import Log, SlidingWindow
from headgate.stores.shared.columns import COPIED, Column, Damaged, copied, copy_words
from headgate.stores.shared.layout import MOST_HEADER, SLOTS, TOMB, Geometry

YEAR_2100: Final = 4_102_444_800_000_000  # microseconds
_WORD: Final = (1 << 64) - 1
SMALLEST: Final = 16  # entries of the ring of a new log

Cells = tuple[Any, ...]  # start, bytes, start, bytes: pieces of cells to write
_NO_CELLS: Final[Cells] = ()


def largest(algorithm: Algorithm[Any], now: int) -> int:
    """No state that is an integer is larger than this at *now*."""
    return int(algorithm.consume(algorithm.initial(), now, algorithm.limit)) + algorithm.limit


def fits_word(algorithm: Algorithm[Any]) -> bool:
    """Whether a state of *algorithm* is one word."""
    return isinstance(algorithm.initial(), int) and largest(algorithm, YEAR_2100) < TOMB


class Change(NamedTuple):
    """What a commit writes: all words, and some cells."""

    words: tuple[int, ...]
    cells: Cells = _NO_CELLS


class IntegerWords:
    """An integer state in one word, or in two."""

    near = 0
    far = 0

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        self.algorithm = algorithm
        self.header = 1 if fits_word(algorithm) else 2

    def decode(self, words: Sequence[int], near: int, far: int, now: int) -> int:
        state = words[0] if self.header == 1 else words[0] | words[1] << 64
        if state > largest(self.algorithm, now):
            raise Damaged
        return state

    def encode(self, state: int) -> Change:
        return Change((state,) if self.header == 1 else (state & _WORD, state >> 64))


class LogWords:
    """A log: five words (ring, head, size, total before, last total) and rings of (time, total).

    A ring of each power of two has cells of its own. A log that outgrows its ring is copied to the next one, so that
    what is read now stays as it is until the commit. A small ring is near, the larger ones are far.
    """

    header = 5

    def __init__(self, algorithm: SlidingWindow) -> None:
        self.period, self.limit = algorithm.period, algorithm.limit
        self.words: Any = memoryview(b"")
        self.allocate: Callable[[int, int], None] = lambda start, size: None
        self.largest = SMALLEST
        while self.largest <= self.limit:
            self.largest *= 2
        self.near = 2 * SMALLEST
        self.far = 2 * (2 * self.largest - 2 * SMALLEST)
        self.near_at = self.far_at = self.far_start = 0  # among the cells of a slot

    def decode(self, words: Sequence[int], near: int, far: int, now: int) -> Log:
        ring, head, size, before, last = words
        if not SMALLEST <= ring <= self.largest or ring & (ring - 1) or head >= ring or size > ring or last >= TOMB:
            raise Damaged
        at = near + self.near_at if ring == SMALLEST else far + self.far_at + 2 * (ring - 2 * SMALLEST)
        times: Any = Column(self.words, at, ring, head, size)  # Any: the algorithm takes any sequence
        totals: Any = Column(self.words, at + 1, ring, head, size)
        first = 0
        if size:
            totals[size - 1] = last
            if times[size - 1] > now:
                raise Damaged
            if times[0] <= now - self.period:
                first = bisect_right(times, now - self.period)
                before = totals[first - 1]
            if size > first and not (0 < last - before <= self.limit and times[size - 1] > now - self.period):
                raise Damaged
        log = Log()
        times.skip(first)
        totals.skip(first)
        if size - first <= COPIED:
            times, totals = copied(times, last)
        times.far = far
        log.fill(before, times, totals)
        return log

    def encode(self, log: Log) -> Change:
        times: Any = log.times
        totals: Any = log.totals or range(log.before + 1, log.before + len(times) + 1)
        size = len(times)
        if not hasattr(times, "ring"):  # a new log
            cells = (self.near_at, _entry(times[0], totals[0])) if size else _NO_CELLS
            return Change((SMALLEST, 0, size, log.before, totals[-1] if size else 0), cells)
        ring, head = times.ring, times.head
        if not size:
            return Change((ring, head, 0, 0, 0))
        last = totals[size - 1]
        if size <= times.kept:  # some were given back, none was added
            return Change((ring, head, size, log.before, last))
        if times.stored == ring:  # full: entries that others read stay as they are until the commit
            return self.move(log, size, ring, last)
        at = (head + size - 1) & (ring - 1)
        if size == 1:
            cells = (self.start(ring) + 2 * at, _entry(times[0], last))
        else:
            cells = self.appended(ring, at, times[size - 2], totals[size - 2], times[size - 1], last)
        return Change((ring, head, size, log.before, last), cells)

    def appended(self, ring: int, at: int, newest: int, total: int, now: int, last: int) -> Cells:
        """The cells of an entry (*now*, *last*) at *at* of the ring, and of the one before it.

        A refund may have changed the total of the one before: it wrote the word of the header only.
        """
        start = self.start(ring)
        if at:
            return start + 2 * at - 2, _TWO_ENTRIES(newest, total, now, last)
        return start, _entry(now, last), start + 2 * ring - 2, _entry(newest, total)

    def move(self, log: Log, size: int, ring: int, last: int) -> Change:
        """Copy to another ring: the next, or one of half the size if most entries have expired."""
        times: Any = log.times
        totals: Any = log.totals
        smaller = max(ring // 2, SMALLEST)
        target = 2 * ring if size > ring // 2 or smaller == ring else smaller
        if target > SMALLEST:
            self.allocate(times.far + self.far_at + 2 * (target - 2 * SMALLEST), 2 * target)
        copied = array("Q")
        at, end = times.head, times.head + size - 1
        copied.frombytes(copy_words(self.words, times.at + 2 * at, times.at + 2 * min(end, ring)))
        if end > ring:
            copied.frombytes(copy_words(self.words, times.at, times.at + 2 * (end - ring)))
        if size > 1:
            copied[-1] = totals[size - 2]
        copied.extend((times[size - 1], last))
        return Change((target, 0, size, log.before, last), (self.start(target), copied.tobytes()))

    def start(self, ring: int) -> int:
        """The first cell of *ring*, among the cells of a slot as a commit counts them."""
        return self.near_at if ring == SMALLEST else self.far_start + 2 * (ring - 2 * SMALLEST)


_TWO_ENTRIES: Final[Any] = Struct("=QQQQ").pack


def _entry(time: int, total: int) -> bytes:
    return array("Q", (time, total)).tobytes()


class StateWords:
    """The state of a rule as words and cells: of one quota, or of several one after the other."""

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        self.algorithm = algorithm
        self.several = isinstance(algorithm, AllOf)
        parts = algorithm.parts if isinstance(algorithm, AllOf) else [algorithm]
        self.parts: list[Any] = [
            LogWords(part) if isinstance(part, SlidingWindow) else IntegerWords(part) for part in parts
        ]
        self.header = sum(part.header for part in self.parts)
        if self.header > MOST_HEADER:
            raise ValueError(
                f"a shared store takes fewer quotas: {len(parts)} of {type(parts[0]).__name__} are too many"
            )
        self.near = sum(part.near for part in self.parts)
        self.far = sum(part.far for part in self.parts)
        near = far = 0
        for part in self.parts:
            if isinstance(part, LogWords):
                part.near_at, part.far_at, part.far_start = near, far, self.near + far
            near, far = near + part.near, far + part.far
        self.first_near = self.first_far = 0

    def bind(self, words: memoryview, geometry: Geometry, allocate: Callable[[int, int], None]) -> None:
        """Read logs from these words of a file, and have more of them set aside by *allocate*."""
        self.first_near, self.first_far = geometry.first_near, geometry.first_far
        for part in self.parts:
            if isinstance(part, LogWords):
                part.words, part.allocate = words, allocate

    def decode(self, found: Sequence[int], now: int) -> Any:
        """The state that `read` *found*; raises `Damaged`."""
        place = found[0]
        near, far = self.first_near + place * self.near, self.first_far + place * self.far
        if not self.several:
            return self.parts[0].decode(found[2:], near, far, now)
        states, at = [], 2
        for part in self.parts:
            states.append(part.decode(found[at : at + part.header], near, far, now))
            at += part.header
        return states

    def near_cells(self, set_index: int) -> tuple[int, int]:
        """Where the near cells of a set begin, and how many there are."""
        return self.first_near + set_index * SLOTS * self.near, SLOTS * self.near

    def encode(self, state: Any) -> Change:
        if not self.several:
            made: Change = self.parts[0].encode(state)
            return made
        changes = [part.encode(kept) for part, kept in zip(self.parts, state, strict=True)]
        words = tuple(word for change in changes for word in change.words)
        cells = tuple(item for change in changes for item in change.cells)
        return Change(words, cells)
