"""The table of a shared file in plain Python: the methods of `_table.c`, under byte-range locks of the kernel.

A set is locked by its own byte, which the kernel frees when a process dies. Reads take no lock: a word is read whole,
and a slot that changed its key meanwhile is noticed. Wherever a process is killed, a set stays valid.
"""

from __future__ import annotations

import fcntl
import os
import platform
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import fcntl as call
from hashlib import blake2b
from os import getpid
from typing import Any, Final

from headgate.stores.shared.files import OpenFile
from headgate.stores.shared.layout import HEAD, LOCKS, SLOTS, TOMB

PATIENCE: Final = 0.5  # seconds to wait for a holder that is alive and does not run
_PLACES: Final = 4096  # keys whose place is remembered

# Linux: the lock belongs to the opened file. Elsewhere to the process, which then must open the file only once.
_TRY_LOCK: Final = getattr(fcntl, "F_OFD_SETLK", 37 if platform.system() == "Linux" else fcntl.F_SETLK)
_LINUX: Final = platform.system() == "Linux"
# Where other processors may see stores out of order, a read takes the lock too.
_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i686")
_PRINTS: Final = struct.Struct(f"{SLOTS}Q").unpack_from  # no slice: see `copy_words`


def _flock(kind: int, at: int) -> bytes:
    if _LINUX:
        return struct.pack("hhqqi4x", kind, os.SEEK_SET, LOCKS + at, 1, 0)
    return struct.pack("qqihh", LOCKS + at, 1, 0, kind, os.SEEK_SET)  # the order of macOS


class Place:
    """Where a key is: the word at which its set begins, its fingerprint; and where that was seen last."""

    __slots__ = ("at", "fingerprint", "give", "index", "seen_at", "take")

    def __init__(self, at: int, fingerprint: int, index: int) -> None:
        self.at, self.fingerprint, self.index = at, fingerprint, index
        self.seen_at = at + HEAD
        self.take, self.give = _flock(fcntl.F_WRLCK, index), _flock(fcntl.F_UNLCK, index)


class LockedTable:
    """The table of one file, for the threads of this process."""

    def __init__(self, file: OpenFile) -> None:
        sizes = file.header.geometry
        self.fd = file.fd
        self.process = os.getpid()
        self.words: memoryview = memoryview(file.map).cast("Q")
        self.secret = file.header.secret
        self.sets, self.header, self.payload, self.set_words = sizes.sets, sizes.header, sizes.payload, sizes.set_words
        self.first, self.near, self.far = sizes.first_set, sizes.near, sizes.far
        self.first_near, self.first_far = sizes.first_near, sizes.first_far
        self.read_header = struct.Struct(f"{self.header}Q").unpack_from
        self.places: dict[str, Place] = {}
        self.lock = threading.RLock()  # reentrant: a signal handler may call the limiter in the middle of a call
        self.held = -1  # the set that a thread of ours has locked
        self.unreleased: Place | None = None  # a lock that an exception of a signal handler may have left

    def place(self, key: str) -> Place:
        found = self.places.get(key)
        if found is None:
            one, two = struct.unpack("=QQ", blake2b(key.encode(), digest_size=16, key=self.secret).digest())
            index = one * self.sets >> 64
            if len(self.places) >= _PLACES:
                self.places.clear()
            found = self.places[key] = Place(self.first + index * self.set_words, two or 1, index)
        return found

    def set_index(self, key: str) -> int:
        return self.place(key).index

    @contextmanager
    def locked(self, place: Place) -> Iterator[None]:
        """Hold the lock of a set. A signal handler that comes here in the middle shares the lock of the same set."""
        with self.lock:
            outer = self.held
            try:
                if outer != place.index:
                    self.take(place)
                    self.held = place.index
                yield
            finally:
                self.held = outer
                if outer != place.index:
                    self.give(place)

    def holds(self, place: Place) -> bool:
        """Whether this thread, and no other one of this process, has locked the set."""
        owned: bool = self.lock._is_owned()  # type: ignore[attr-defined]  # public enough for Condition, not in typeshed
        return owned and self.held == place.index

    def under_lock(self, place: Place, change: Callable[..., bool], *arguments: Any) -> bool:
        """`change(place, *arguments)` with the lock of the set held; `locked` written out for a lock that is free."""
        with self.lock:
            if self.held < 0 and self.unreleased is None and self.process == getpid():
                self.unreleased = place
                try:
                    call(self.fd, _TRY_LOCK, place.take)
                    self.held = place.index
                    return change(place, *arguments)
                except (BlockingIOError, PermissionError):
                    pass
                finally:
                    self.held = -1
                    if self.fd >= 0:
                        call(self.fd, _TRY_LOCK, place.give)
                    self.unreleased = None
        with self.locked(place):
            return change(place, *arguments)

    def take(self, place: Place) -> None:
        if self.process != os.getpid():
            raise ChildProcessError("the table was opened before a fork")
        if self.held < 0 and self.unreleased is not None:
            self.give(self.unreleased)
        self.unreleased = place
        deadline = nap = 0.0
        while True:
            try:
                fcntl.fcntl(self.fd, _TRY_LOCK, place.take)
                return
            except (BlockingIOError, PermissionError):
                now = time.monotonic()
                deadline = deadline or now + PATIENCE
                if now > deadline:
                    raise TimeoutError("another process holds a lock of the shared file and does not run") from None
                time.sleep(nap)
                nap = min(nap + 0.00002, 0.001)

    def give(self, place: Place) -> None:
        """Release a lock, also one that was not taken; `fd` is -1 in the child of a fork that came between."""
        if self.fd >= 0:
            fcntl.fcntl(self.fd, _TRY_LOCK, place.give)
        self.unreleased = None

    def seek(self, place: Place) -> int:
        """Where the fingerprint of a key is now, which is remembered; 0 if the key has no slot."""
        prints = self.prints(place)
        if place.fingerprint not in prints:
            return 0
        place.seen_at = at = place.at + HEAD + prints.index(place.fingerprint)
        return at

    def prints(self, place: Place) -> tuple[int, ...]:
        return _PRINTS(self.words, 8 * (place.at + HEAD))

    # ------------------------------------------------------------------------------------------- states of one word

    def find(self, key: str) -> int | None:
        place = self.places.get(key) or self.place(key)
        if not _ORDERED and not self.holds(place):
            with self.locked(place):
                return self.find(key)
        words, at = self.words, place.seen_at
        if words[at] != place.fingerprint:
            at = self.seek(place)
            if not at:
                return None
        word: int = words[at + SLOTS]
        return word if words[at] == place.fingerprint else None

    def swap(self, key: str, before: int, after: int) -> bool:
        return self.under_lock(self.places.get(key) or self.place(key), self.store, before, after)

    def store(self, place: Place, before: int, after: int) -> bool:
        """Replace the word, if it is still *before*. With the lock held."""
        words, at = self.words, place.seen_at
        if words[at] != place.fingerprint:
            at = self.seek(place)
        if not at or words[at + SLOTS] != before:
            return False
        words[at + SLOTS] = after
        return True

    def add(self, key: str, word: int) -> int:
        place = self.place(key)
        with self.locked(place):
            slot = self.free_slot(place)
            if slot < 0:
                return slot + 1
            at = place.at + HEAD + slot
            self.words[at + SLOTS] = word
            self.words[at] = place.fingerprint
            return 1

    def free_slot(self, place: Place) -> int:
        """A free slot of the set for a new key; -1: the key has a slot, -2: none is free."""
        prints = self.prints(place)
        if place.fingerprint in prints:
            return -1
        return prints.index(0) if 0 in prints else -2

    def look(self, key: str, slot: int) -> int | None:
        at = self.place(key).at + HEAD + slot
        word: int = self.words[at + SLOTS]
        return word if self.words[at] and word < TOMB else None

    def replace(self, key: str, slot: int, before: int, after: int) -> bool:
        place = self.place(key)
        with self.locked(place):
            words, at = self.words, place.at + HEAD + slot
            if place.fingerprint in self.prints(place) or words[at + SLOTS] != before:
                return False
            words[at] = 0
            words[at + SLOTS] = after
            words[at] = place.fingerprint
            return True

    # ------------------------------------------------------------------------------------------------- larger states

    def read(self, key: str) -> tuple[int, ...] | None:
        place = self.place(key)
        at = place.seen_at if self.words[place.seen_at] == place.fingerprint else self.seek(place)
        return self.snapshot(place, at - place.at - HEAD, place.fingerprint) if at else None

    def read_at(self, key: str, slot: int) -> tuple[int, ...] | None:
        place = self.place(key)
        fingerprint = self.words[place.at + HEAD + slot]
        return self.snapshot(place, slot, fingerprint) if fingerprint else None

    def snapshot(self, place: Place, slot: int, fingerprint: int) -> tuple[int, ...] | None:
        if not _ORDERED and not self.holds(place):
            with self.locked(place):
                return self.snapshot(place, slot, fingerprint)
        words, payload = self.words, self.payload_at(place, slot)
        while True:
            version = words[payload]
            start = payload + 1 + (version & 1) * self.header
            found = self.read_header(words, 8 * start)
            if words[place.at + HEAD + slot] != fingerprint:
                return None
            if words[payload] == version:
                return (place.index * SLOTS + slot, version, *found)

    def payload_at(self, place: Place, slot: int) -> int:
        return place.at + HEAD + SLOTS + slot * self.payload

    def still(self, key: str, slot: int, version: int) -> bool:
        place = self.place(key)
        same: bool = self.words[self.payload_at(place, slot)] == version
        return same and self.words[place.at + HEAD + slot] == place.fingerprint

    def write(self, key: str, slot: int, version: int, header: tuple[int, ...], cells: tuple[Any, ...]) -> bool:
        place = self.places.get(key) or self.place(key)
        return self.under_lock(place, self.advance, slot, version, header, cells)

    def advance(self, place: Place, slot: int, version: int, header: tuple[int, ...], cells: tuple[Any, ...]) -> bool:
        """Commit, if it is still that version of the key. With the lock held."""
        words, at = self.words, place.at + HEAD
        if words[at + SLOTS + slot * self.payload] != version or words[at + slot] != place.fingerprint:
            return False
        self.commit(place, slot, version, header, cells)
        return True

    def commit(self, place: Place, slot: int, version: int, header: tuple[int, ...], cells: tuple[Any, ...]) -> None:
        """Write what comes after *version*, and the version last."""
        words, payload, number = self.words, self.payload_at(place, slot), place.index * SLOTS + slot
        for i in range(0, len(cells), 2):
            start, piece = cells[i], cells[i + 1]
            if start < self.near:
                first = self.first_near + number * self.near + start
            else:
                first = self.first_far + number * self.far + start - self.near
            words[first : first + len(piece) // 8] = memoryview(piece).cast("Q")
        buffer = payload + 1 + (version + 1 & 1) * self.header
        words[buffer : buffer + self.header] = memoryview(array("Q", header))
        words[payload] = version + 1 & (1 << 64) - 1

    def settle(self, place: Place, slot: int, header: tuple[int, ...], cells: tuple[Any, ...]) -> None:
        """Give the slot to a key, with its first state."""
        self.words[place.at + HEAD + slot] = 0
        version = self.words[self.payload_at(place, slot)]  # versions go on: none comes twice
        self.commit(place, slot, version, header, cells)
        self.words[place.at + HEAD + slot] = place.fingerprint

    def add_state(self, key: str, header: tuple[int, ...], cells: tuple[Any, ...]) -> int:
        place = self.place(key)
        with self.locked(place):
            slot = self.free_slot(place)
            if slot < 0:
                return slot + 1
            self.settle(place, slot, header, cells)
            return 1

    def replace_state(self, key: str, slot: int, version: int, header: tuple[int, ...], cells: tuple[Any, ...]) -> bool:
        place = self.place(key)
        with self.locked(place):
            if place.fingerprint in self.prints(place) or self.words[self.payload_at(place, slot)] != version:
                return False
            self.settle(place, slot, header, cells)
            return True
