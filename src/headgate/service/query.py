"""Query strings: strict, and quick for what nearly every check sends."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from headgate.service.http import Refusal

MOST = 8192  # characters: ten times what the longest key takes with every byte of it encoded

_BROKEN = re.compile("%(?![0-9A-Fa-f]{2})")


def parse(query: str, known: frozenset[str]) -> dict[str, str]:
    """The parameters by name. Unknown ones, and those given twice, are refused: one of the two would be ignored."""
    found: dict[str, str] = {}
    if not query:
        return found
    if len(query) > MOST:
        raise Refusal(414, f"the query is {len(query)} characters, at most {MOST} are read")
    for pair in query.split("&"):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        if "%" in value or "+" in value:
            value = decode(value)
        if name not in known:
            name = decode(name)
            if name not in known:
                raise Refusal(400, f"unknown parameter {name!r:.60}; known are {', '.join(sorted(known))}")
        if name in found:
            raise Refusal(400, f"parameter {name!r} is given twice; give it once")
        found[name] = value
    return found


def decode(text: str) -> str:
    if found := _BROKEN.search(text):
        raise Refusal(400, f"'%' at {found.start()} of {text!r:.60} is not followed by two hex digits; write %25")
    try:
        return unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeDecodeError:
        raise Refusal(400, f"{text!r:.60} is not UTF-8 behind its percent signs") from None


def whole(name: str, text: str) -> int:
    """A whole number as people write it: digits, nothing else."""
    if text.isascii() and text.isdecimal() and len(text) <= 10:
        return int(text)
    raise Refusal(400, f"{name} must be a whole number such as 1, got {text!r:.40}")
