"""What is where in a shared file, and the check that a file is one.

    a page       the header: `Header`
    1024 seats   of 64 bytes: one for each process that has the file open (mode atomic)
    the sets     of 31 slots each: two words, 31 fingerprints, 31 payloads
    the cells    of each slot: room for logs, which the file system gives as logs grow; near ones lie close together

A key is in the set that its hash names or nowhere: there is no rehashing and no sweep, and the slot of an expired key
is taken by the next new key of the set. Sets are made so numerous that `max_keys` keys practically never fill one.
A word is 8 bytes. A payload is one word where a state fits, else a version and two buffers for the words of a state.

Mode atomic is for the C of `_table.c`: words change by compare-and-swap, larger states under the lock word of the set.
Mode locked is for plain Python: everything changes under a byte-range lock of the kernel (`locked.py`).
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"headgate"
LAYOUT: Final = 1
ATOMIC, LOCKED = 1, 2
MODES = {ATOMIC: "atomic", LOCKED: "locked"}

PAGE: Final = 4096
SEATS: Final = 1024
SEAT_BYTES: Final = 64
HEAD: Final = 2  # words of a set before its fingerprints; the first is its lock
SLOTS: Final = 31
LOCKS: Final = 1 << 40  # bytes of the file that are only ever locked: seats, or sets
TOMB: Final = 1 << 63  # the word of a slot that changes its key; no state is as large

MOST_HEADER: Final = 256  # words of a larger state
MOST_BYTES: Final = 1 << 36  # of a whole file, most of which may be room for logs that never grow
_ORDER: Final = 0x0102030405060708  # reads differently on a machine that has another byte order
_FIELDS: Final = struct.Struct("=8sQQQQQQQQQq16s16s16sQ")
_MOST_RULE: Final = PAGE - _FIELDS.size


class ForeignFile(Exception):
    """The file is not one of ours; the text says why."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes in a file: *header* words of a larger state (0: a state is one word), *near* and *far* for its logs."""

    sets: int
    header: int
    near: int
    far: int

    @property
    def payload(self) -> int:
        return 1 + 2 * self.header

    @property
    def set_words(self) -> int:
        return HEAD + SLOTS + SLOTS * self.payload

    @property
    def first_set(self) -> int:
        """The word at which the sets begin."""
        return (PAGE + SEATS * SEAT_BYTES) // 8

    @property
    def first_near(self) -> int:
        return self.first_set + self.sets * self.set_words

    @property
    def first_far(self) -> int:
        return self.first_near + self.sets * SLOTS * self.near

    @property
    def table_bytes(self) -> int:
        """What is allocated when the file is made: everything but the cells."""
        return 8 * self.first_near

    @property
    def file_bytes(self) -> int:
        return 8 * (self.first_far + self.sets * SLOTS * self.far)


def geometry_for(header: int, near: int, far: int, max_keys: int | None) -> tuple[Geometry, int]:
    """The sizes for states of this kind and *max_keys* (100,000 if None, or as many as logs leave room for).

    Words: a third of the slots are in use at *max_keys*, so that a set is full for one key in a hundred million. Larger
    states: half of them, one in five thousand.
    """
    spare = 2 if header else 3
    wanted = 100_000 if max_keys is None else max_keys
    made = Geometry(max(1, -(-wanted * spare // SLOTS)), header, near, far)
    if made.file_bytes > MOST_BYTES:
        most = max(1, MOST_BYTES // (8 * (made.set_words + SLOTS * (near + far))))
        if max_keys is not None:
            raise ValueError(
                f"{max_keys:,} keys of this rule would need {made.file_bytes:,} bytes, more than {MOST_BYTES:,}; "
                f"give max_keys={most * SLOTS // spare:,}, or use an algorithm whose states do not grow with the limit"
            )
        made, wanted = Geometry(most, header, near, far), most * SLOTS // spare
    return made, wanted


@dataclass(frozen=True, slots=True)
class Header:
    """The first page of a file."""

    mode: int
    geometry: Geometry
    max_keys: int
    epoch: int  # microseconds to add to the monotonic clock of this machine, as it was booted, for the time of states
    boot: bytes
    secret: bytes  # keys the hash, so that a client cannot choose keys that share a set
    rule: bytes  # which limiters share the file

    def pack(self) -> bytes:
        sizes = self.geometry
        rule = self.rule[:_MOST_RULE]
        numbers = (sizes.sets, sizes.header, sizes.near, sizes.far)
        fields = (LAYOUT, self.mode, _ORDER, *numbers, self.max_keys, sizes.file_bytes)
        secret = (self.secret[:16], self.secret[16:])
        packed = _FIELDS.pack(MAGIC, *fields, self.epoch, self.boot, *secret, len(rule))
        return (packed + rule).ljust(PAGE, b"\0")

    @property
    def hash_words(self) -> tuple[int, int]:
        one, two = struct.unpack("=QQ", self.secret[:16])
        return one, two


def read_header(page: bytes, size: int, rule: bytes) -> Header:
    """The header of a file of *size* bytes that starts with *page*; raises `ForeignFile` if it is not for *rule*."""
    if len(page) < PAGE:
        raise ForeignFile(f"it has {size} bytes, less than a header: it was truncated, or is not a file of headgate")
    magic, layout, mode, order, sets, header, near, far, max_keys, expected, epoch, boot, one, two, length = (
        _FIELDS.unpack_from(page)
    )
    if magic != MAGIC:
        raise ForeignFile("it is not a file of headgate")
    if order != _ORDER:
        raise ForeignFile(f"it was made on a machine with another byte order than {sys.byteorder}")
    if layout != LAYOUT:
        raise ForeignFile(
            f"it has layout {layout}, and this version of headgate uses layout {LAYOUT}: give this version another "
            "directory, or remove the file when no process of the other version runs"
        )
    found = Geometry(sets, header, near, far)
    if mode not in MODES or not sets or found.file_bytes != expected:
        raise ForeignFile("its header makes no sense: it is damaged")
    if size < expected:
        raise ForeignFile(f"it was truncated to {size} bytes of {expected}")
    if page[_FIELDS.size : _FIELDS.size + length] != rule[:_MOST_RULE]:
        raise ForeignFile("it belongs to another limiter")
    return Header(mode, found, max_keys, epoch, boot, one + two, rule)


EPOCH_AT: Final = struct.calcsize("=8sQQQQQQQQQ")  # where a new boot writes epoch and boot id


def pack_boot(epoch: int, boot: bytes) -> bytes:
    return struct.pack("=q16s", epoch, boot)
