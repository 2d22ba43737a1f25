"""The requests of a log: when each came and for which key, in the order of time.

Times and keys are two arrays, so a million requests take 12 MB. A log is written when requests end, and by several
processes, so lines may be out of order: they are sorted, and lines of one time keep their order.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from headgate.errors import InvalidKey
from headgate.keys import check_key
from headgate.replay.logs import BadLog, LineReader, open_log

EVERY = 50_000  # lines between two reports of progress

Progress = Callable[[int], object]  # of the lines that were read


class Traffic:
    """Requests, each a time in microseconds and the number of a key; *names* has the keys by their number."""

    def __init__(self) -> None:
        self.times = array("q")
        self.keys = array("l")
        self.names: list[str] = []
        self.skipped: Counter[str] = Counter()  # lines by why they are no request
        self._numbers: dict[object, int] = {}  # by the name as the reader gives it; -1: no key for a limiter

    def __len__(self) -> int:
        return len(self.times)

    def add(self, requests: Iterable[tuple[int, object] | None], progress: Progress) -> None:
        """Add what a reader gives: times and keys, and None for lines without them."""
        numbers, add_time, add_key = self._numbers, self.times.append, self.keys.append
        unread = 0
        for count, request in enumerate(requests):
            if request is None:
                unread += 1
            else:
                time, name = request
                number = numbers.get(name)
                if number is None:
                    number = self._number(name)
                if number >= 0:
                    add_time(time)
                    add_key(number)
                else:
                    self.skipped["no key that a limiter takes"] += 1
            if not count % EVERY:
                progress(count)
        if unread:
            self.skipped["no time or no key"] += unread

    def sort(self) -> None:
        """Put the requests in the order of their times."""
        times = self.times
        if all(map(int.__le__, times, memoryview(times)[1:])):
            return
        order = sorted(range(len(times)), key=times.__getitem__)
        self.times, self.keys = (array(a.typecode, map(a.__getitem__, order)) for a in (times, self.keys))

    def _number(self, name: object) -> int:
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        number = self._numbers.get(text)  # readers of other formats give text where one gives bytes
        if number is None:
            try:
                check_key(text)
            except InvalidKey:
                number = -1
            else:
                number = len(self.names)
                self.names.append(text)
        self._numbers[name] = self._numbers[text] = number
        return number


def read_traffic(paths: Iterable[Path], reader: LineReader, progress: Progress = lambda count: None) -> Traffic:
    """The requests of all files; raises `BadLog` if a file is no log that *reader* can read, and OSError."""
    traffic = Traffic()
    for path in paths:
        try:
            with open_log(path) as lines:
                traffic.add(reader.requests(path, lines), progress)
        except (EOFError, zlib.error) as error:
            raise BadLog(f"{path}: it is packed, and broken: {error}") from error
    traffic.sort()
    return traffic
