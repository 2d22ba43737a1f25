"""BodyReader as they come in, part by part."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate.service import request
from headgate.service.request import MAX_BODIES, MAX_BODY, BodyReader
from headgate.service.rsgi import HTTPError


class Sent:
    """A request whose body is *parts*; it waits for *more* after them."""

    def __init__(self, *parts: bytes, more: asyncio.Event | None = None, **headers: str) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self._parts = parts
        self._more = more

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._more is not None:
            await self._more.wait()


async def read(bodies: BodyReader, sent: Any) -> bytes | int:
    """The body, or the status of the refusal."""
    try:
        return await bodies.read(sent, sent)
    except HTTPError as refusal:
        return refusal.status


@pytest.mark.parametrize(
    "sent, found",
    [
        (Sent(), b""),
        (Sent(b"a", b"b"), b"ab"),
        (Sent(b"ab", content_length="2"), b"ab"),
        (Sent(b"a", content_length="2"), 400),
        (Sent(content_length="2"), 400),
        (Sent(content_length="0"), b""),
        (Sent(transfer_encoding="chunked"), 400),
        (Sent(b"a", transfer_encoding="chunked"), b"a"),
        (Sent(b"a", b"", transfer_encoding="chunked"), b"a"),
        (Sent(b"a", b"", b"", transfer_encoding="chunked"), 400),
        (Sent(b"a", b"", b"", transfer_encoding="chunked", trailer="digest"), b"a"),
        (Sent(content_length=str(MAX_BODY + 1)), 413),
        (Sent(bytes(MAX_BODY), b"a"), 413),
        (Sent(bytes(MAX_BODY)), bytes(MAX_BODY)),
    ],
)
def test_whole_body(sent: Sent, found: bytes | int) -> None:
    """A body is read as a whole or refused."""
    bodies = BodyReader()
    assert asyncio.run(read(bodies, sent)) == found
    assert bodies.held == 0


def test_all_bodies() -> None:
    """The sum of all bodies being read is bounded."""

    async def flood() -> list[bytes | int]:
        bodies, more = BodyReader(), asyncio.Event()
        most = MAX_BODIES // MAX_BODY
        slow = [asyncio.ensure_future(read(bodies, Sent(bytes(MAX_BODY), more=more))) for _ in range(most)]
        await asyncio.sleep(0)  # each has sent its part
        assert bodies.held == MAX_BODIES
        refused = await read(bodies, Sent(b"a"))
        more.set()
        await asyncio.gather(*slow)
        assert bodies.held == 0
        return [refused, await read(bodies, Sent(b"a"))]

    assert asyncio.run(flood()) == [503, b"a"]


def test_late_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that does not come in time is a 408."""
    monkeypatch.setattr(request, "BODY_SECONDS", 0.01)

    async def stall() -> bytes | int:
        bodies = BodyReader()
        found = await read(bodies, Sent(b"a", more=asyncio.Event()))
        assert bodies.held == 0
        return found

    assert asyncio.run(stall()) == 408
