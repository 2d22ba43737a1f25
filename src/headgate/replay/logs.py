"""Lines of access logs: the combined format of nginx and Apache, JSON lines and CSV with a header.

A reader gives the time of each line, in microseconds since the epoch, and its key. The key is a field (``address``,
``user.id``) or a template of fields (``{user}:{path}``). A line without one of them gives None.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

LogFormat = Literal["combined", "json", "csv"]
Request = tuple[int, object] | None

COMBINED_FIELDS = ("address", "user", "time", "method", "path", "status", "size", "referer", "agent")
_TEXT = rb'(?:[^"\\]|\\.)*'  # between quotes; Apache escapes those of a client
_COMBINED = re.compile(
    rb'(\S+) \S+ (\S+) \[([^\]]+)\] "(\S*) ?([^ "]*)' + _TEXT + rb'" (\d+|-) (\d+|-)'
    rb'(?: "(' + _TEXT + rb')" "(' + _TEXT + rb')")?'
)
_ADDRESS = re.compile(rb"(\S+) \S+ \S+ \[([^\]]+)\]")  # all that most replays need

GZIP, BYTE_ORDER_MARK = b"\x1f\x8b", b"\xef\xbb\xbf"
GUESSED_BY = 20  # lines; the first ones may be broken

TIMES = ("time", "timestamp", "@timestamp", "ts", "time_iso8601", "time_local", "msec", "datetime", "date")
ADDRESSES = ("address", "remote_addr", "client_ip", "ip", "remote_ip", "client", "remote_address", "host")


class BadLog(ValueError):
    """A file is no log of that format, or has no such field; the text says which there are."""


@contextmanager
def open_log(path: Path) -> Iterator[IO[bytes]]:
    """The file as bytes, unpacked if it is of gzip, whatever its name; ``-`` is standard input."""
    with sys.stdin.buffer if str(path) == "-" else path.open("rb") as opened:
        if opened.peek(2)[:2] != GZIP:  # type: ignore[union-attr]  # both are buffered readers
            yield opened
            return
        with gzip.open(opened) as unpacked:
            yield unpacked  # type: ignore[misc]  # as good as IO


class LineReader:
    """Reads lines of one *format* (None: as the first line looks); *key* and *time* name fields (None: usual ones)."""

    def __init__(self, format: LogFormat | None = None, key: str | None = None, time: str | None = None) -> None:
        self.format, self.key, self.time = format, key, time
        self._moments: dict[object, int | None] = {}

    def requests(self, path: Path, lines: IO[bytes]) -> Iterator[Request]:
        """The requests of a file, a None for each line that is none."""
        head = list(islice((line for line in lines if line.strip()), GUESSED_BY))
        if not head:
            return iter(())
        head[0] = head[0].removeprefix(BYTE_ORDER_MARK)
        form = self.format or guess_format(head)
        first = next((line for line in head if guess_format([line]) == form), head[0])
        rest = chain(head, lines)
        match form:
            case "combined":
                return self._combined(path, first, rest)
            case "json":
                return self._records(path, _json_records(rest), self._parse(path, first))
            case _:
                if b"\0" in first and not self.format:
                    raise BadLog(f"{path}: it is no text: a log is of the combined format, JSON lines or CSV")
                table = csv.DictReader(line.decode("utf-8", "replace").replace("\0", "") for line in rest)
                return self._records(path, _csv_records(table), dict.fromkeys(_csv_header(path, table)))

    def _parse(self, path: Path, first: bytes) -> Mapping[str, Any]:
        found = _json(first)
        if found is None:
            raise BadLog(f"{path}: its first line is no JSON object: {first[:80]!r}")
        return found

    def _combined(self, path: Path, first: bytes, lines: Iterable[bytes]) -> Iterator[Request]:
        key = self.key or "address"
        unknown = [name for name in fields_of(key) if name not in COMBINED_FIELDS]
        if unknown:
            raise BadLog(f"a combined log has no field {unknown[0]!r}; it has {', '.join(COMBINED_FIELDS)}")
        if self.time:
            raise BadLog("--time is for JSON and CSV: a combined log has its times in one place")
        if _ADDRESS.match(first) is None:
            raise BadLog(f"{path}: its first line is not of the combined format: {first[:80]!r}")
        moments, moment = self._moments, self._moment
        if key == "address":
            match = _ADDRESS.match
            for line in lines:
                found = match(line)
                if found is None:
                    yield None
                    continue
                address, text = found.groups()
                time = moments[text] if text in moments else moment(text)
                yield None if time is None else (time, address)
            return
        name_of = key_template(key, lambda record, field: record[COMBINED_FIELDS.index(field)])
        for line in lines:
            full = _COMBINED.match(line)
            time = None if full is None else moment(full[3])
            name = None if full is None else name_of(full.groups())
            yield None if time is None or name is None else (time, name)

    def _records(self, path: Path, records: Iterable[Any], sample: Mapping[str, Any]) -> Iterator[Request]:
        time_field = self.time or _first_of(TIMES, sample, path, "time")
        key = self.key or _first_of(ADDRESSES, sample, path, "key")
        if self.format == "csv" or not isinstance(next(iter(sample.values()), None), dict):
            missing = [name for name in (time_field, *fields_of(key)) if "." not in name and name not in sample]
            if missing:
                raise BadLog(f"{path}: its first line has no {missing[0]!r}; it has {_listed(sample)}")
        name_of, moment = key_template(key, _nested), self._moment
        for record in records:
            time = None if record is None else moment(_nested(record, time_field))
            name = None if record is None else name_of(record)
            yield None if time is None or name is None else (time, name)

    def _moment(self, given: object) -> int | None:
        if given not in self._moments:
            if len(self._moments) > 100_000:
                self._moments.clear()
            self._moments[given] = microseconds(given)
        return self._moments[given]


def guess_format(head: Iterable[bytes]) -> LogFormat:
    """The format of a log that begins with these lines: of the first that tells, else CSV."""
    for line in head:
        if line.lstrip().startswith(b"{"):
            return "json"
        if _ADDRESS.match(line):
            return "combined"
    return "csv"


def microseconds(given: object) -> int | None:
    """The time that a log has in any usual form: ISO 8601, that of nginx, or a number since the epoch."""
    if isinstance(given, bytes):
        given = given.decode("ascii", "replace")
    if isinstance(given, bool) or given is None:
        return None
    if isinstance(given, str):
        text = given.strip()
        for form in ("%d/%b/%Y:%H:%M:%S %z", None):
            try:
                found = datetime.strptime(text, form) if form else datetime.fromisoformat(text)
                # a time without a zone is taken as UTC: a report must not depend on the zone of the host
                return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1_000_000)
            except ValueError:
                pass
        try:
            given = float(text)
        except ValueError:
            return None
    if not isinstance(given, int | float) or not 0 < given < 1e17:
        return None
    scale = 1_000_000 if given < 1e11 else 1_000 if given < 1e14 else 1  # seconds, milliseconds, microseconds
    return round(given * scale)


def fields_of(key: str) -> list[str]:
    """The fields that a key is made of."""
    return re.findall(r"\{([^{}]+)\}", key) if "{" in key else [key]


def key_template(key: str, get: Callable[[Any, str], object]) -> Callable[[Any], object]:
    """The function that makes the key of a record; None where a field is missing, empty or ``-``."""
    names = fields_of(key)
    if not names or ("{" in key) != ("}" in key):
        raise BadLog(f"a key is a field such as address, or a template such as {{user}}:{{path}}, got {key!r:.80}")

    def name_of(record: Any) -> object:
        values = [get(record, name) for name in names]
        if any(value in (None, "", "-", b"", b"-") for value in values):
            return None
        if "{" not in key:
            return values[0] if isinstance(values[0], str | bytes) else str(values[0])
        texts = iter(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values)
        return re.sub(r"\{[^{}]+\}", lambda _: next(texts), key)

    return name_of


def _nested(record: Any, name: str) -> object:
    if name in record:
        return record[name]
    for part in name.split("."):
        record = record.get(part) if isinstance(record, Mapping) else None
    return record


def _first_of(usual: Iterable[str], sample: Mapping[str, Any], path: Path, option: str) -> str:
    for name in usual:
        if name in sample:
            return name
    raise BadLog(f"{path}: say --{option} FIELD: its lines have {_listed(sample)}")


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _json_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    return (_json(line) for line in lines if line.strip())


def _csv_header(path: Path, table: csv.DictReader[str]) -> Sequence[str]:
    try:
        return table.fieldnames or ()
    except csv.Error as error:
        words = "its first line is of no known format, and no header of CSV"
        raise BadLog(f"{path}: {words} ({error!s:.40})") from error


def _csv_records(table: csv.DictReader[str]) -> Iterator[dict[str, Any] | None]:
    """The rows of a table; None for one that is no CSV, such as a field of a million letters."""
    while True:
        try:
            yield next(table)
        except csv.Error:
            yield None
        except StopIteration:
            return


def _listed(names: Iterable[str]) -> str:
    """The fields of a line as they may be shown in a terminal."""
    text = ", ".join(names)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:300]) or "none"
