"""Logs: one line per event to standard error, as text or as JSON."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime

import msgspec

from headgate.keys import digest

_QUOTED = re.compile(r"""(['"`])(?:(?!\1)[^\\]|\\.)*+(?:\1|\\?\Z)""", re.DOTALL)


class TextFormatter(logging.Formatter):
    """Text: time, level, logger, message; line breaks and escapes inside a message are written as \\n, \\r, \\x1b."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname:7} {record.name}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
            return line
        return line.replace("\r", "\\r").replace("\n", "\\n").replace("\x1b", "\\x1b")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            entry["requestId"] = request_id
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def configure(level: str, form: str) -> None:
    """Send the log of headgate, and the warnings of other libraries, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headgate").setLevel(level.upper())


def granian_logging(form: str) -> dict[str, object]:
    """The configuration for granian's own logging, which it sets up in every process, in our format."""
    formatter = "headgate.service.logs.JsonFormatter" if form == "json" else "headgate.service.logs.TextFormatter"
    return {
        "formatters": {"generic": {"()": formatter}, "access": {"()": formatter}},
        "handlers": {
            "console": {"formatter": "generic", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
            "access": {"formatter": "access", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
        },
    }


def masked(key: str) -> str:
    """A short digest in place of a key: equal for equal keys, and it does not reveal the key."""
    return "#" + digest(key)[:12]


def hide_quoted(detail: str) -> str:
    """The text of an error without the parts of the request that it quotes: those may contain a key."""
    return _QUOTED.sub("'...'", detail)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
