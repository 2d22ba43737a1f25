"""Bodies of requests: read within a time, as far as they may be, and never half of one taken for the whole."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from headgate.service.http import Exchange, Refusal, Scope

MOST = 1 << 20  # bytes; a batch of 1,000 checks with the longest keys, all of it escaped, fits
MOST_AT_ONCE = 64 << 20  # bytes of all bodies that a worker is reading
SECONDS = 10  # for a client to send a body; slower ones only hold memory, and up the end of a worker


class Bodies:
    """The bodies that a worker is reading."""

    def __init__(self) -> None:
        self.held = 0  # bytes

    async def read(self, scope: Scope, exchange: Exchange) -> bytes:
        """The whole body; too large a one is refused before it is read, or as soon as it shows."""
        announced = scope.headers.get("content-length", "")
        length = int(announced) if announced.isascii() and announced.isdecimal() else None
        if length is not None and length > MOST:
            raise Refusal(413, f"the body is {length} bytes, at most {MOST} are read")
        if length == 0:
            return b""
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(SECONDS):
                await self._collect(exchange, parts)
        except TimeoutError:
            why = f"the body did not come within {SECONDS} s; nothing was spent"
            raise Refusal(408, why, ("connection", "close")) from None
        finally:
            self.held -= sum(map(len, parts))
        found = b"".join(parts)
        # a client that leaves, or sends no proper chunks, looks like the end of its body
        if length is not None and len(found) < length:
            raise Refusal(400, f"the body ended after {len(found)} of {length} bytes; nothing was spent")
        # granian says the end with an empty part; one before it stands for an error, or for trailers
        if b"" in parts[:-1] and not scope.headers.get("trailer"):
            raise Refusal(400, f"the body broke off after {len(found)} bytes, in mid-chunk; nothing was spent")
        if not found and scope.headers.get("transfer-encoding"):
            raise Refusal(400, "a body was announced and none came; nothing was spent")
        return found

    async def _collect(self, exchange: Exchange, parts: list[bytes]) -> None:
        size = 0
        async for part in exchange:
            parts.append(part)
            size += len(part)
            self.held += len(part)
            if size > MOST:
                raise Refusal(413, f"the body is longer than {MOST} bytes, no more are read")
            if self.held > MOST_AT_ONCE:
                raise Refusal(503, "too many bodies are being read at once; try again", ("retry-after", "1"))


def from_json(scope: Scope, raw: bytes, type: Any, form: str) -> Any:
    """*raw*, the body of a request, as *type*; *form* says in the error what would be right."""
    kind = scope.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refusal(415, f"the body is {kind!r:.80}; send application/json: {form}")
    try:
        found = msgspec.json.decode(raw, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"cannot read the body: {error}; send {form}") from None
    if isinstance(found, msgspec.Struct):
        refuse_doubled(raw, found.__struct_fields__)
    return found


def refuse_doubled(raw: bytes, names: tuple[str, ...]) -> None:
    """Refuse *raw*, one flat JSON object with no names but *names*, if it has a name twice: msgspec takes the last."""
    if b"\\" not in raw and all(raw.count(b'"%b"' % name.encode()) < 2 for name in names):
        return  # without escapes every name is written as it is, and a value that reads like one counts as well
    json.loads(raw, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise Refusal(400, f"the field {name!r} is given twice; give it once")
        seen.add(name)
