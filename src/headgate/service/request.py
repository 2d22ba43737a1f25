"""What a client sent: its query string and its body, parsed strictly and within bounds."""

from __future__ import annotations

import asyncio
import json
import re
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from headgate.service.rsgi import HTTPError, HTTPProtocol, Scope

MAX_QUERY = 8192  # characters: ten times what the longest key takes with every byte of it encoded
MAX_BODY = 1 << 20  # bytes; a batch of 1,000 checks with the longest keys, all of it escaped, fits
MAX_BODIES = 64 << 20  # bytes of all bodies that a worker is reading
BODY_SECONDS = 10  # for a client to send its body; a slower one holds memory, and delays the stop of a worker

_BAD_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def parse_query(query: str, known: frozenset[str]) -> dict[str, str]:
    """The parameters by name. Refuses unknown ones, and those given twice, of which one would be ignored."""
    found: dict[str, str] = {}
    if not query:
        return found
    if len(query) > MAX_QUERY:
        raise HTTPError(414, f"the query is {len(query)} characters, at most {MAX_QUERY} are read")
    for pair in query.split("&"):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        if "%" in value or "+" in value:
            value = _decode(value)
        if name not in known:
            name = _decode(name)
            if name not in known:
                raise HTTPError(400, f"unknown parameter {name!r:.60}; known are {', '.join(sorted(known))}")
        if name in found:
            raise HTTPError(400, f"parameter {name!r} is given twice; give it once")
        found[name] = value
    return found


def _decode(text: str) -> str:
    if found := _BAD_ESCAPE.search(text):
        raise HTTPError(400, f"'%' at {found.start()} of {text!r:.60} is not followed by two hex digits; write %25")
    try:
        return unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeDecodeError:
        raise HTTPError(400, f"{text!r:.60} is not UTF-8 behind its percent signs") from None


def parse_integer(name: str, text: str) -> int:
    """A whole number written in digits alone."""
    if text.isascii() and text.isdecimal() and len(text) <= 10:
        return int(text)
    raise HTTPError(400, f"{name} must be a whole number such as 1, got {text!r:.40}")


class BodyReader:
    """Reads the bodies of a worker's requests, and bounds their sum."""

    def __init__(self) -> None:
        self.held = 0  # bytes
        self.reading = 0  # bodies

    async def read(self, scope: Scope, protocol: HTTPProtocol) -> bytes:
        """The whole body. Refuses one that is too large, late or incomplete."""
        announced = scope.headers.get("content-length", "")
        length = int(announced) if announced.isascii() and announced.isdecimal() else None
        if length is not None and length > MAX_BODY:
            raise HTTPError(413, f"the body is {length} bytes, at most {MAX_BODY} are read")
        if length == 0:
            return b""
        parts: list[bytes] = []
        self.reading += 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._collect(protocol, parts)
        except TimeoutError:
            why = f"the body did not come within {BODY_SECONDS} s; nothing was spent"
            raise HTTPError(408, why, ("connection", "close")) from None
        finally:
            self.reading -= 1
            self.held -= sum(map(len, parts))
        found = b"".join(parts)
        # granian ends the body in the same way when the client disconnects or sends broken chunks
        if length is not None and len(found) < length:
            raise HTTPError(400, f"the body ended after {len(found)} of {length} bytes; nothing was spent")
        # granian marks the end with an empty part; an empty part before it stands for an error, or for trailers
        if b"" in parts[:-1] and not scope.headers.get("trailer"):
            raise HTTPError(400, f"the body broke off after {len(found)} bytes, in mid-chunk; nothing was spent")
        if not found and scope.headers.get("transfer-encoding"):
            raise HTTPError(400, "a body was announced and none came; nothing was spent")
        return found

    async def _collect(self, protocol: HTTPProtocol, parts: list[bytes]) -> None:
        size = 0
        async for part in protocol:
            parts.append(part)
            size += len(part)
            self.held += len(part)
            if size > MAX_BODY:
                raise HTTPError(413, f"the body is longer than {MAX_BODY} bytes, no more are read")
            if self.held > MAX_BODIES:
                raise HTTPError(503, "too many bodies are being read at once; try again", ("retry-after", "1"))


async def query_and_body(
    bodies: BodyReader, scope: Scope, protocol: HTTPProtocol, type: type[msgspec.Struct], form: str
) -> dict[str, Any]:
    """The parameters of a POST: in the query, in the body, or in both; *type* has a field for each.

    A value of the query is a text; one of the body has the type of its field.
    """
    asked: dict[str, Any] = parse_query(scope.query_string, frozenset(type.__struct_fields__))
    if raw := await bodies.read(scope, protocol):
        sent = parse_json(scope, raw, type, form)
        given = {name: value for name in sent.__struct_fields__ if (value := getattr(sent, name)) is not None}
        if both := asked.keys() & given.keys():
            raise HTTPError(400, f"{', '.join(sorted(both))} is in the query and in the body; give it once")
        asked |= given
    return asked


def parse_permits(asked: dict[str, Any]) -> int:
    """The permits among the parameters of a request, 1 if there are none."""
    permits = asked.get("permits", 1)
    return parse_integer("permits", permits) if isinstance(permits, str) else int(permits)


def parse_json(scope: Scope, raw: bytes, type: Any, form: str) -> Any:
    """*raw*, the body of a request, as *type*; *form* is shown in errors as an example of what would be right."""
    kind = scope.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPError(415, f"the body is {kind!r:.80}; send application/json: {form}")
    try:
        found = msgspec.json.decode(raw, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPError(400, f"cannot read the body: {error}; send {form}") from None
    if isinstance(found, msgspec.Struct):
        refuse_duplicates(raw, quoted_names(type))
    return found


@lru_cache
def quoted_names(type: type[msgspec.Struct]) -> tuple[bytes, ...]:
    """The field names of *type* as they stand in JSON."""
    return tuple(f'"{name}"'.encode() for name in type.__struct_fields__)


def refuse_duplicates(raw: bytes, names: tuple[bytes, ...]) -> None:
    """Refuse the flat JSON object *raw* if it has one of *names* twice; msgspec would take the last."""
    # Without escapes a name that is given twice is twice in the text. It may also be there once as a value: parse then.
    if b"\\" not in raw:
        for name in names:
            if raw.count(name) > 1:
                break
        else:
            return
    json.loads(raw, object_pairs_hook=_check_names)


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise HTTPError(400, f"the field {name!r} is given twice; give it once")
        seen.add(name)
