"""The times and totals of a log in a file, as `SlidingWindow` reads and changes them. Changes stay in these objects.

A log of a few thousand entries is copied: a search in an array takes no Python code. A longer one is read where it is,
a few entries for each decision. Not compiled: `bisect` takes no native class of mypyc for a sequence.
"""

from __future__ import annotations

from array import array
from struct import unpack_from
from typing import Any, Final

COPIED: Final = 4096  # entries; to copy so many takes about as long as to read a few entry by entry


class Damaged(Exception):
    """The words make no sense: they are those of no state, or another process is changing them."""


def copy_words(words: memoryview, start: int, end: int) -> bytes:
    """The bytes of the words from *start* to *end*.

    Not by a slice of *words*: a memoryview counts its slices, and loses count of those that threads make at the same
    time where there is no interpreter lock (seen in Python 3.14.6). It is closed then.
    """
    copied: bytes = unpack_from(f"{8 * (end - start)}s", words, 8 * start)[0]
    return copied


class Column:
    """The times of a log, or its totals, read from the ring in the file.

    A ring has pairs of a time and a total, so *at*, the first word of the column, is one word later for the totals.

    stored  entries in the ring, with those that have expired
    kept    entries of the log when it was read
    far     the word at which the far cells of the slot begin
    """

    def __init__(self, words: Any, at: int, ring: int, head: int, size: int) -> None:
        self.words, self.at, self.ring, self.head, self.size = words, at, ring, head, size
        self.stored = self.kept = size
        self.far = 0
        self.changed: dict[int, int] = {}

    def skip(self, count: int) -> None:
        """Leave out the oldest entries, which have expired."""
        if count:
            self.head = (self.head + count) & (self.ring - 1)
            self.kept = self.size = self.size - count
            self.changed = {position - count: value for position, value in self.changed.items()}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        if isinstance(position, slice):
            # An algorithm cuts off entries that have expired. `skip` has left those out, so the times are in disorder.
            raise Damaged
        if position < 0:
            position += self.size
        if not 0 <= position < self.size:
            raise IndexError(position)
        changed = self.changed.get(position)
        if changed is not None:
            return changed
        return int(self.words[self.at + 2 * ((self.head + position) & (self.ring - 1))])

    def __setitem__(self, position: int, value: int) -> None:
        self.changed[position] = value

    def __delitem__(self, piece: slice) -> None:
        self.size = min(self.size, piece.start)

    def append(self, value: int) -> None:
        self.changed[self.size] = value
        self.size += 1


class CopiedTimes(array):  # type: ignore[type-arg]  # of int
    """The times as an array, with what `LogWords.encode` has to know of the ring."""

    at: int
    ring: int
    head: int
    stored: int
    kept: int
    far: int


def copied(times: Column, last: int) -> tuple[CopiedTimes, array[int]]:
    """The times and the totals of a column of times; *last* is the last total."""
    words, at, ring, head, size = times.words, times.at, times.ring, times.head, times.size
    both: array[int] = array("Q")
    end = head + size
    both.frombytes(copy_words(words, at + 2 * head, at + 2 * min(end, ring)))
    if end > ring:
        both.frombytes(copy_words(words, at, at + 2 * (end - ring)))
    made = CopiedTimes("Q", both[::2])
    totals = both[1::2]
    if size:
        totals[-1] = last
    made.at, made.ring, made.head, made.stored, made.kept = at, ring, head, times.stored, size
    return made, totals
