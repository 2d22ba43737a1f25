"""Bodies as they come in, part by part."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headgate.service import body
from headgate.service.body import MOST, MOST_AT_ONCE, Bodies
from headgate.service.http import Refusal


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


async def read(bodies: Bodies, sent: Any) -> bytes | int:
    """The body, or the status of the refusal."""
    try:
        return await bodies.read(sent, sent)
    except Refusal as refusal:
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
        (Sent(content_length=str(MOST + 1)), 413),
        (Sent(bytes(MOST), b"a"), 413),
        (Sent(bytes(MOST)), bytes(MOST)),
    ],
)
def test_a_body_is_whole_or_refused(sent: Sent, found: bytes | int) -> None:
    bodies = Bodies()
    assert asyncio.run(read(bodies, sent)) == found
    assert bodies.held == 0


def test_all_bodies_together_are_bounded() -> None:
    async def flood() -> list[bytes | int]:
        bodies, more = Bodies(), asyncio.Event()
        most = MOST_AT_ONCE // MOST
        slow = [asyncio.ensure_future(read(bodies, Sent(bytes(MOST), more=more))) for _ in range(most)]
        await asyncio.sleep(0)  # each has sent its part
        assert bodies.held == MOST_AT_ONCE
        refused = await read(bodies, Sent(b"a"))
        more.set()
        await asyncio.gather(*slow)
        assert bodies.held == 0
        return [refused, await read(bodies, Sent(b"a"))]

    assert asyncio.run(flood()) == [503, b"a"]


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SECONDS", 0.01)

    async def stall() -> bytes | int:
        bodies = Bodies()
        found = await read(bodies, Sent(b"a", more=asyncio.Event()))
        assert bodies.held == 0
        return found

    assert asyncio.run(stall()) == 408
