"""The files that this process has open, each once: all limiters of a rule share the table of its file.

A file is opened anew when its path leads to another file, as after a cleaner of temporary files, and in the child of a
fork, which needs a seat of its own. The threads of a process share one table.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import unpack_from
from typing import Any
from weakref import WeakValueDictionary

from headgate._lifecycle import in_each_child, renew_after_fork
from headgate.algorithms.algorithm import Algorithm
from headgate.clock import Clock
from headgate.errors import StoreUnavailable
from headgate.stores.shared import files
from headgate.stores.shared.columns import Damaged
from headgate.stores.shared.files import OpenFile, open_file, time_namespace_us
from headgate.stores.shared.layout import ATOMIC, HEAD, SLOTS, TOMB, Geometry, geometry_for
from headgate.stores.shared.locked import LockedTable
from headgate.stores.shared.states import StateWords, fits_word

logger = logging.getLogger("headgate")


class SharedFile:
    """The file of one rule, and its table. `check` and `allocate` raise OSError or `StoreUnavailable`."""

    def __init__(self, path: Path, rule: bytes, algorithm: Algorithm[Any], max_keys: int | None) -> None:
        self.path = path
        self.rule = rule
        self.state_words = StateWords(algorithm)
        words = self.state_words
        header = 0 if fits_word(algorithm) else words.header
        self.wanted, self.max_keys = geometry_for(header, words.near, words.far, max_keys)
        self.last_error = ""
        self.replaced_logged = False
        self.fd = -1
        self.lock = threading.RLock()
        self.open()
        renew_after_fork(self)

    def open(self) -> None:
        opened = open_file(self.path, self.rule, self.wanted, self.max_keys)
        before, self.fd = self.fd, opened.fd
        try:
            table: Any = native_table(opened) if opened.header.mode == ATOMIC else LockedTable(opened)
        except OSError as error:
            raise files.unusable(self.path, str(error)) from error
        finally:
            if before >= 0:
                os.close(before)
        self.opened = opened
        self.process = os.getpid()
        self.geometry: Geometry = opened.header.geometry
        self.max_keys = opened.header.max_keys
        self.epoch = opened.header.epoch - time_namespace_us()
        self.words: memoryview = memoryview(opened.map).cast("Q")
        self.state_words.bind(self.words, self.geometry, self.allocate)
        self.table = table

    def check(self) -> bool:
        """Open the file anew if it is not the one at the path, or was opened before a fork. Returns whether it was."""
        with self.lock:
            if self.process == os.getpid():
                if self.opened.is_current():
                    return False
                if not self.replaced_logged:
                    self.replaced_logged = True
                    logger.warning("%s was removed or replaced: its limits start anew in the file there now", self.path)
            self.open()
            return True

    def after_fork(self) -> None:
        """Let go of the locks of the parent: they would stay held after its death as long as this process lives."""
        self.lock = threading.RLock()
        if isinstance(self.table, LockedTable):
            self.table.lock = threading.RLock()  # a thread of the parent may have held it
            self.table.held = self.table.fd = -1
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def allocate(self, start: int, size: int) -> None:
        """Have the file system set so many words aside for cells."""
        if self.fd < 0:
            raise ChildProcessError("the file was opened before a fork")
        files.allocate(self.fd, 8 * start, 8 * size)

    def note(self, error: Exception) -> Exception:
        self.last_error = str(error)
        return error

    def clock_of(self, clock: Clock) -> Callable[[], int]:
        """*clock* in nanoseconds, which never go back: a state relies on that."""
        seen = [0]

        def read() -> int:
            seen[0] = max(seen[0], clock.now() * 1000)
            return seen[0]

        return read

    def states(self, now: int) -> Iterator[Any]:
        """Every state that is kept; for counting, as it goes through the whole file."""
        sizes, words = self.geometry, self.words
        for index in range(sizes.sets):
            at = sizes.first_set + index * sizes.set_words
            for slot, fingerprint in enumerate(unpack_from(f"{SLOTS}Q", words, 8 * (at + HEAD))):
                payload = at + HEAD + SLOTS + slot * sizes.payload
                if not fingerprint:
                    continue
                if not sizes.header:
                    if words[payload] != TOMB:
                        yield words[payload]
                    continue
                version = words[payload]
                start = payload + 1 + (version & 1) * sizes.header
                found = (index * SLOTS + slot, version, *unpack_from(f"{sizes.header}Q", words, 8 * start))
                try:
                    yield self.state_words.decode(found, now)
                except (Damaged, IndexError):
                    continue

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def native_table(opened: OpenFile) -> Any:
    """The table in C of a file."""
    sizes = opened.header.geometry
    numbers = (sizes.sets, sizes.header, sizes.near, sizes.far)
    return files.native.Table(opened.map, opened.fd, *numbers, *opened.header.hash_words)


_open: WeakValueDictionary[Path, SharedFile] = WeakValueDictionary()
_opening = threading.RLock()


@in_each_child
def _renew_lock() -> None:
    global _opening
    _opening = threading.RLock()


def shared_file(path: Path, rule: bytes, algorithm: Algorithm[Any], max_keys: int | None) -> SharedFile:
    """The file at *path*, which this process opens once; raises `StoreUnavailable` if it cannot be used."""
    with _opening:
        found = _open.get(path)
        if found is None:
            found = _open[path] = SharedFile(path, rule, algorithm, max_keys)
            return found
    try:
        found.check()
    except OSError as error:
        raise StoreUnavailable(str(error)) from error
    return found
