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
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

LogFormat = Literal["combined", "json", "csv"]
Request = tuple[int, object] | None

COMBINED_FIELDS = ("address", "user", "time", "method", "path", "status", "size", "referer", "agent")
_COMBINED = re.compile(rb'(\S+) \S+ (\S+) \[([^\]]+)\] "(\S*) ?([^ "]*)[^"]*" (\d+|-) (\d+|-)(?: "([^"]*)" "([^"]*)")?')
_ADDRESS = re.compile(rb"(\S+) \S+ \S+ \[([^\]]+)\]")  # all that most replays need

TIMES = ("time", "timestamp", "@timestamp", "ts", "time_iso8601", "time_local", "msec", "datetime", "date")
ADDRESSES = ("address", "remote_addr", "client_ip", "ip", "remote_ip", "client", "remote_address", "host")


class BadLog(ValueError):
    """A file is no log of that format, or has no such field; the text says which there are."""


def open_log(path: Path) -> IO[bytes]:
    """The file as bytes, unpacked if it ends in .gz; ``-`` is standard input."""
    if str(path) == "-":
        return sys.stdin.buffer
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]  # as good as IO


class LineReader:
    """Reads lines of one *format* (None: as the first line looks); *key* and *time* name fields (None: usual ones)."""

    def __init__(self, format: LogFormat | None = None, key: str | None = None, time: str | None = None) -> None:
        self.format, self.key, self.time = format, key, time
        self._moments: dict[object, int | None] = {}

    def requests(self, path: Path, lines: IO[bytes]) -> Iterator[Request]:
        """The requests of a file, a None for each line that is none."""
        first = next((line for line in lines if line.strip()), b"")
        if not first:
            return iter(())
        rest = _chain(first, lines)
        match self.format or guess_format(first):
            case "combined":
                return self._combined(path, first, rest)
            case "json":
                return self._records(path, _json_records(rest), self._parse(path, first))
            case _:
                table = csv.DictReader(line.decode("utf-8", "replace") for line in rest)
                return self._records(path, table, dict.fromkeys(table.fieldnames or ()))

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
                raise BadLog(f"{path}: its first line has no {missing[0]!r}; it has {', '.join(sample)[:300]}")
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


def guess_format(first: bytes) -> LogFormat:
    """The format of a log whose first line is this."""
    if first.lstrip().startswith(b"{"):
        return "json"
    return "combined" if _ADDRESS.match(first) else "csv"


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
                return round(found.timestamp() * 1_000_000) if found.tzinfo or form is None else None
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
    raise BadLog(f"{path}: say --{option} FIELD: its lines have {', '.join(sample)[:300]}")


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _json_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    return (_json(line) for line in lines if line.strip())


def _chain(first: bytes, lines: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from lines
