"""The figures of several processes, such as the workers of gunicorn, by a directory that they share.

Each process writes its own figures into a file every `INTERVAL` seconds, and when it ends. A scrape at any of them adds
up all files. A process holds a lock on a second file for as long as it lives, which the kernel releases whatever
ends it: so the next scrape knows the dead, adds their counters to those of `ended.json` and drops their gauges.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from headgate._lifecycle import before_exit, in_each_child
from headgate.telemetry.families import FAMILIES
from headgate.telemetry.rows import Row, merge_gauges, rows_of, snapshot
from headgate.telemetry.watching import Labels

logger = logging.getLogger("headgate")

INTERVAL = 1.0  # seconds between two writes
ENDED = "ended.json"

_TOKEN = re.compile(r"\d+-[0-9a-f]{12}")  # of a process: its files are named by it

Figures = dict[tuple[str, Labels], float]
T = TypeVar("T")


class SharedFigures:
    """The figures of all processes that were given the same *directory*: `shared_figures` opens them.

    A process that is killed loses what it has counted since its last write: a second at most.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._users = 0
        self._register = before_exit(self._write_last)
        self._forget()

    def _forget(self) -> None:
        """Have no files: before the first use in a process."""
        self._token = ""
        self._alive: IO[str] | None = None
        self._writing = threading.RLock()
        self._stop = threading.Event()

    def open(self) -> None:
        """Write for one more user, who will `close`."""
        self._users += 1
        if self._users == 1:
            try:
                self._lock_file()
                self.write()
            except BaseException:
                self._users = 0
                raise
            self._start()

    def after_fork(self) -> None:
        """Have files of its own in the child. Its thread writes first: a fork waits for no disk."""
        if self._alive is not None:
            self._alive.close()  # of the parent, which holds the lock on: locks are of a process
        self._forget()
        if self._users:
            try:
                self._lock_file()
            except OSError as error:  # its thread tries again
                logger.warning("telemetry: cannot write into %s: %s", self.directory, error)
            self._start()

    def _start(self) -> None:
        self._register()
        self._stop = threading.Event()
        threading.Thread(target=_write_on, args=(self, self._stop), daemon=True, name="headgate-telemetry").start()

    def _lock_file(self) -> None:
        """Hold the lock that says that this process lives."""
        self._token = self._token or f"{os.getpid()}-{secrets.token_hex(6)}"
        path = self.directory / f"{self._token}.lock"
        while self._alive is None or not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
            fcntl.lockf(file, fcntl.LOCK_EX)
            if self._alive is not None:
                self._alive.close()  # of a file that is removed
            self._alive = file  # unless a scrape took it for that of the dead, and removed it before it was locked

    def write(self, gauges: bool = True) -> None:
        """Write the figures of this process."""
        with self._writing:  # around the snapshot too: an older one would make counters fall
            rows = [
                [row.name, sorted(row.labels.items()), row.value]
                for row in snapshot()
                if gauges or FAMILIES[row.name].kind == "counter"
            ]
            self._lock_file()  # the directory may have been removed
            _replace(self.directory / f"{self._token}.json", rows)
            if self._alive is not None:
                os.utime(self._alive.fileno())  # for programs that remove old files from directories such as /tmp

    def rows(self) -> list[Row]:
        """The figures of all processes, this one as of now."""
        self.write()
        with _locked(self.directory / "scrape.lock"):
            counters = self._counters_of_the_dead()
            gauges: list[tuple[str, Labels, float]] = []
            for path in self._files():
                for name, labels, value in _read(path):
                    if FAMILIES[name].kind == "counter":
                        counters[name, labels] = counters.get((name, labels), 0) + value
                    else:
                        gauges.append((name, labels, value))
        return rows_of({**counters, **merge_gauges(gauges)})

    def close(self) -> None:
        """Stop writing if this was the last user. The counters stay, and the lock: they are those of a live process."""
        self._users = max(self._users - 1, 0)
        if not self._users:
            self._stop.set()
            self._write_last()

    def _write_last(self) -> None:
        try:
            if self._token:
                self.write(gauges=False)
        except OSError:
            pass  # the directory is gone, and with it all readers

    def _files(self) -> list[Path]:
        return [path for path in self.directory.glob("*-*.json") if _TOKEN.fullmatch(path.stem)]

    def _counters_of_the_dead(self) -> Figures:
        """The counters of processes that have ended; their files are removed."""
        path = self.directory / ENDED
        totals: Figures = {}
        for name, labels, value in _read(path, "rows"):
            totals[name, labels] = totals.get((name, labels), 0) + value
        tokens = {file.stem for file in (*self._files(), *self.directory.glob("*-*.lock"))} - {self._token}
        ours = filter(_TOKEN.fullmatch, sorted(tokens))  # other files of the directory are not ours to remove
        dead = [token for token in ours if _is_dead(self.directory / f"{token}.lock")]
        if not dead:
            return totals
        ended = _load(path, lambda content: set(content["tokens"])) or set()
        for token in dead:
            if token not in ended:  # else a scrape ended between the two steps below
                for name, labels, value in _read(self.directory / f"{token}.json"):
                    if FAMILIES[name].kind == "counter":
                        totals[name, labels] = totals.get((name, labels), 0) + value
        rows = [[name, labels, value] for (name, labels), value in totals.items()]
        _replace(path, {"rows": rows, "tokens": dead})
        for token in dead:
            for file in self.directory.glob(f"{token}.*"):
                file.unlink(missing_ok=True)
        return totals


_OPEN: dict[str, SharedFigures] = {}  # by directory
_opening = threading.Lock()


def shared_figures(directory: str | os.PathLike[str]) -> SharedFigures:
    """The figures in *directory*, which is made if it is not there. The caller will close them.

    A process has one file in a directory, however many collectors read it: else its counts would be there twice.
    """
    path = os.path.realpath(directory)
    with _opening:
        found = _OPEN.get(path) or SharedFigures(Path(path))
        try:
            found.open()
        except OSError as error:
            words = f"telemetry needs a folder that this user may write to ({error.strerror})"
            raise OSError(error.errno, words, path) from error
        _OPEN[path] = found
    return found


def _write_on(figures: SharedFigures, stop: threading.Event) -> None:
    """Write every `INTERVAL` seconds, until the figures are closed."""
    failed = False
    while not stop.wait(INTERVAL):
        try:
            figures.write()
            failed = False
        except OSError as error:
            if not failed:
                logger.warning("telemetry: cannot write into %s: %s", figures.directory, error)
            failed = True


def _replace(path: Path, content: Any) -> None:
    """Write a file so that a reader sees the old content or the new."""
    new = path.with_suffix(f".{threading.get_ident()}.new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)


def _load(path: Path, take: Callable[[Any], T]) -> T | None:
    """What *take* makes of a file; None if there is none, or if it is not one that a process has written."""
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, RecursionError):
        logger.warning("telemetry: %s cannot be read, and is left out", path)
        return None


def _read(path: Path, part: str = "") -> list[tuple[str, Labels, float]]:
    """The rows of a file, or of a *part* of it."""
    return _load(path, lambda content: list(_checked(content[part] if part else content))) or []


def _checked(rows: Any) -> Iterator[tuple[str, Labels, float]]:
    """The rows of families that this version knows."""
    for name, labels, value in rows:
        if name in FAMILIES:
            yield name, tuple((str(label), str(text)) for label, text in labels), float(value)


def _is_dead(path: Path) -> bool:
    """Whether no process holds the lock of *path*."""
    try:
        with path.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


_scraping = threading.Lock()


@in_each_child  # after that of watching.py, by which the counters of the child start at 0
def _after_fork() -> None:
    global _scraping, _opening
    _scraping = threading.Lock()
    _opening = threading.Lock()
    for figures in _OPEN.values():
        figures.after_fork()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One scrape at a time, of all threads and processes."""
    with _scraping, path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
