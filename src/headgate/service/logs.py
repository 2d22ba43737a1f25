"""Logs: one line an event to standard error, as text or as JSON."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime

import msgspec

from headgate.keys import digest

_QUOTED = re.compile(r"""(['"`])(?:(?!\1)[^\\]|\\.)*+(?:\1|\\?\Z)""", re.DOTALL)


class Lines(logging.Formatter):
    """Text: time, level, logger, message; a line break in a message is written as one, not made."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname:7} {record.name}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
            return line
        return line.replace("\r", "\\r").replace("\n", "\\n").replace("\x1b", "\\x1b")


class Json(logging.Formatter):
    """One JSON object a line."""

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
    """Send everything of headgate, and what other libraries warn of, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headgate").setLevel(level.upper())


def granian(form: str) -> dict[str, object]:
    """granian's own logging, which it sets up in every process: through ours."""
    formatter = "headgate.service.logs.Json" if form == "json" else "headgate.service.logs.Lines"
    return {
        "formatters": {"generic": {"()": formatter}, "access": {"()": formatter}},
        "handlers": {
            "console": {"formatter": "generic", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
            "access": {"formatter": "access", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
        },
    }


def masked(key: str) -> str:
    """A stand-in for a key: the same for the same key, and it does not show it."""
    return "#" + digest(key)[:12]


def unquoted(detail: str) -> str:
    """What was wrong with a request, without what it quotes of the request: that may be a key, or half of one."""
    return _QUOTED.sub("'...'", detail)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
